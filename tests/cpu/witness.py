"""A training whose need varies in a session, beside somebody else who counts its bytes."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spillway
from spillway.methods import AbstractPolicy
from spillway.units import Bytes
from tests.cpu.families import state_of
from tests.cpu.varying_models import VARYING, batch_of

_DATA_PTR: Final = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
"""As it is without a session."""


@final
class Witness(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._now: Bytes = 0
        self._looks = False
        self.start: Bytes = 0
        self.peak: Bytes = 0
        """With all storages in memory."""
        self.seen: Bytes = 0
        """Of what is in memory; of a step in which the witness looks."""

    def begin(self, tensors: Iterator[Tensor], *, looks: bool) -> None:
        """A step begins, in which these are there."""
        self._meet(tensors)
        self.start = self.peak = self._now
        self.seen, self._looks = 0, looks

    def _meet(self, tensors: Any) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._now += storage.nbytes()
                self._alive[storage._cdata] = weakref.ref(storage, self._forgetting(storage._cdata, storage.nbytes()))
        self.peak = max(self.peak, self._now)

    def _forgetting(self, key: int, nbytes: Bytes) -> Any:
        def forget(_: Any) -> None:
            self._now -= nbytes
            del self._alive[key]

        return forget

    def _look(self) -> Bytes:
        """Bytes in memory that is nobody's but this process's: no file's, and readable."""
        starts, ends = _own_memory()
        total = 0
        for reference in list(self._alive.values()):
            storage = reference()
            if storage is not None and storage.nbytes():
                address = _DATA_PTR(storage)
                place = bisect.bisect_right(starts, address) - 1
                total += storage.nbytes() if place >= 0 and address < ends[place] else 0
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meet(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        self._meet(tree_leaves(out))
        if self._looks:
            self.seen = max(self.seen, self._look())
        return out


def _own_memory() -> tuple[list[int], list[int]]:
    starts, ends = [], []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, _, _, inode, *_ = line.split()
            if inode == "0" and rights.startswith("rw"):
                start, end = (int(text, 16) for text in span.split("-"))
                starts.append(start)
                ends.append(end)
    return starts, ends


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A training in a session."""

    reports: Sequence[spillway.StepReport]
    peaks: Sequence[Bytes]
    """What the witness counted, by step."""
    growths: Sequence[Bytes]
    """The same, above what it counted when the step began."""
    seen: Sequence[Bytes]
    """What it saw where it looked, else 0."""
    state: Any


@final
class Training:
    """One network with Adam, from the same seed every time."""

    def __init__(self, network: str, width: int) -> None:
        torch.manual_seed(0)
        self.width = width
        self.model: nn.Module = VARYING[network](width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Forward, backward, update."""
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plainly(self, steps: int) -> Any:
        """What the training ends in."""
        for number in range(steps):
            self.step(batch_of(number, self.width))
        return state_of(self.model, self.optimizer)

    def under(self, budget: Bytes | None, method: AbstractPolicy, steps: int, looked: int) -> Watched:
        """The same in a session, beside a witness."""
        witness, peaks, growths, seen = Witness(), [], [], []
        with spillway.manage(self.model, self.optimizer, budget=budget, method=method) as memory:
            for number in range(steps):
                batch = batch_of(number, self.width)
                witness.begin(self._named(batch), looks=number % looked == looked - 1)
                with memory.step(batch), witness:
                    self.step(batch)
                peaks.append(witness.peak)
                growths.append(witness.peak - witness.start)
                seen.append(witness.seen)
                del batch
        state = state_of(self.model, self.optimizer)
        return Watched(reports=memory.history, peaks=peaks, growths=growths, seen=seen, state=state)

    def _named(self, batch: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from batch
        for state in self.optimizer.state.values():
            yield from state.values()
