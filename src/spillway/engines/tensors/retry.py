"""An op that fails for want of device memory runs again after room was made.

The budget is kept by account, so this is for what the account cannot see: a device that others use too, a cache in
pieces, a workspace that nobody expected. First the allocator's cache is given back, then more leaves, then everything
that may.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, final

import torch

from spillway.engines.tensors.abstract import AbstractTensorEngine
from spillway.engines.tensors.ops import OWN_OPS, OpInfo
from spillway.errors import BudgetInfeasible, DeviceFullError, SpillFullError
from spillway.memory.records import Storage
from spillway.tiers.cuda_streams import CudaStreams
from spillway.units import Bytes, format_bytes

T = TypeVar("T")

_SHARES: Final = (8, 2, 1)
"""Room that is made before each further attempt: an eighth of what is resident, then half of it, then all."""


@final
class Retry:
    """Runs what may fail for want of device memory."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._engine: AbstractTensorEngine | None = None
        self._busy = False
        self.count = 0
        """Ops that had to run again."""

    def attach(self, engine: AbstractTensorEngine) -> None:
        """Whose storages leave."""
        self._engine = engine

    def run(self, attempt: Callable[[], T], name: str, nbytes: Bytes) -> T:
        """What `attempt` gives. It must not have had an effect when it fails. Raises DeviceFullError if it failed
        although everything that may leave had left."""
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            if self._busy or self._engine is None:  # making room for something else: that is tried again
                raise
            told = str(error)
        # Outside of `except`, because the error's traceback holds what the failed attempt had made.
        return self._again(attempt, name, nbytes, told)

    def _again(self, attempt: Callable[[], T], name: str, nbytes: Bytes, told: str) -> T:
        self._busy = True
        self.count += 1
        try:
            for make_room in (lambda: None, *self._more_and_more(nbytes)):
                make_room()
                self._streams.empty_cache()
                try:
                    return attempt()
                except torch.OutOfMemoryError as error:
                    told = str(error)
        finally:
            self._busy = False
        raise self._refusal(name, told)

    def _more_and_more(self, nbytes: Bytes) -> Iterator[Callable[[], None]]:
        for share in _SHARES:
            yield lambda share=share: self._make_room(nbytes, share)  # type: ignore[misc]

    def _make_room(self, nbytes: Bytes, share: int) -> None:
        """Let so much leave as if the budget were smaller; what cannot leave stays."""
        engine = self._engine
        if engine is None:
            return
        controller = engine.controller
        resident = controller.budget.resident
        less, everything_left = max(resident - max(resident // share, nbytes), 0), (BudgetInfeasible, SpillFullError)
        with controller.lock, controller.budget.as_if(less), contextlib.suppress(*everything_left):
            controller.make_room(0, "making room on the device")

    def _refusal(self, name: str, told: str) -> DeviceFullError:
        resident = self._engine.controller.budget.resident if self._engine is not None else 0
        first, _, _ = told.partition(". ")
        return DeviceFullError(
            f"{name} found no memory on {self._streams.device} with all gone that may leave ({format_bytes(resident)} "
            f"resident, {format_bytes(self._streams.allocated())} handed out of {format_bytes(self._streams.total)}): "
            f"lower budget= or free the device. torch said: {first}."
        )

    # ------------------------------------------------------------------ ops

    def guarded(self, info: OpInfo, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, but run again where that is harmless."""
        # Whether the op, when it fails for want of memory, has changed nothing yet. Ops of torch's own allocate before
        # they launch their one kernel. Those that write several tensors one after the other may have written some;
        # what others' ops do is not known.
        if not (info.name.partition("::")[0] in OWN_OPS and info.writes in ((), (0,)) and not info.uncounted):
            return call
        again, operands_locked, seeded, streams = self._again, self._operands_locked, info.seeded, self._streams
        writes = bool(info.writes)

        def repeatable(*args: Any, **kwargs: Any) -> Any:
            generator = (kwargs.get("generator") or streams.generator) if seeded else None
            state = generator.get_state() if generator is not None else None
            try:
                return call(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                if self._busy or self._engine is None:
                    raise
                told = str(error)

            def attempt() -> Any:
                if generator is not None and state is not None:
                    generator.set_state(state)
                return call(*args, **kwargs)

            with operands_locked((*args, *kwargs.values()), writes):
                return again(attempt, info.name, 0, told)

        return repeatable

    @contextlib.contextmanager
    def _operands_locked(self, arguments: Iterable[Any], writes: bool) -> Iterator[None]:
        """What the op uses stays, and nothing may come to depend on what it writes (rule 3)."""
        engine = self._engine
        if engine is None:
            yield
            return
        storages = list(dict.fromkeys(_storages(engine, arguments)))
        doomed: Sequence[Storage] = storages[:1] if writes else ()
        before = [storage.written for storage in doomed]
        for storage in storages:
            storage.locks += 1
        for storage in doomed:
            storage.written = True
        try:
            yield
        finally:
            for storage in storages:
                storage.locks -= 1
            for storage, was in zip(doomed, before, strict=True):
                storage.written = was


def _storages(engine: AbstractTensorEngine, arguments: Iterable[Any]) -> Iterator[Storage]:
    for value in arguments:
        if isinstance(value, torch.Tensor):
            storage = engine.find(value)
            if storage is not None:
                yield storage
        elif isinstance(value, list | tuple):
            yield from _storages(engine, value)
