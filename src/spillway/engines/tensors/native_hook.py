"""The handlers of nearly all ops in C++ (`native/hook.cpp`): what they have to know of an engine and of its ops.

Where there is a hook, an op arrives at it first, and whatever it does not take goes on to the handlers in Python, which
do the same, and are what there is without one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import torch

from spillway.engines.environment import OpEnvironment, Settings
from spillway.engines.tensors.abstract import AbstractTensorEngine, Hooked
from spillway.engines.tensors.collectives import NAMESPACES
from spillway.engines.tensors.cpu_machine import Watch
from spillway.engines.tensors.followed import HookedPlan
from spillway.engines.tensors.handlers import HANDED_OVER
from spillway.engines.tensors.ops import KEPT_WITHIN, PLAIN_TENSORS, OpInfo
from spillway.errors import NativeError
from spillway.internals.dispatch_key import Watcher, serve_first
from spillway.internals.private import storage_address
from spillway.memory.records import EXACT, Recipe, Storage, Value
from spillway.native.library import HOOK, load_hook, wanted
from spillway.units import Bytes

_told: Final[set[str]] = set()


def native_module() -> Any | None:
    """The hook's module, or None where there cannot be one; why not is said once."""
    if not wanted(HOOK) or _told:  # it would not be compiled by another try
        return None
    try:
        return load_hook()
    except NativeError as reason:
        _told.add(str(reason))
        cost = "every op of a watched step costs some microseconds of Python"
        warnings.warn(f"Spillway runs without its native hook, so that {cost}: {reason}", stacklevel=2)
        return None


@final
class NativeHook:
    """The hook of one engine."""

    def __init__(self, engine: AbstractTensorEngine, watcher: Watcher, hooked: Hooked, native: Any) -> None:
        serve_first(native.serve)
        self._engine = engine
        self._hooked = hooked
        self._environments: dict[Settings, Callable[[], OpEnvironment]] = {}
        self._native = native.Hook(
            watcher=watcher, table=engine.table, interrupts=engine.interrupts, ledger=engine.controller,
            budget=engine.budget, plain=tuple(PLAIN_TENSORS), storage=Storage, value=Value, recipe=Recipe, watch=Watch,
            died=engine.died, creations=engine.creations,
            look_ahead=engine.look_ahead if engine.foresees else None, odd=engine.pass_by,
            limited=engine.budget.limited, cells=hooked.cells,
        )  # fmt: skip

    @property
    def heard_other_threads(self) -> bool:
        """Whether an op of this step came from another thread than the step's."""
        elsewhere: bool = self._native.elsewhere
        return elsewhere

    def arm(self, *, recording: bool, plan: HookedPlan | None) -> None:
        """In a step that is watched, with recipes or without, and with what is asked around some of its ops."""
        self._native.arm(recording, plan)

    def disarm(self) -> None:
        """Between steps, and where something stands around the handlers."""
        self._native.disarm()

    def survey(self) -> tuple[list[Storage], Bytes, int]:
        """Between steps: storages whose size may have changed or that are absent, the bytes of all others, and how many
        storages have escaped."""
        found: tuple[list[Storage], Bytes, int] = self._native.survey()
        return found

    def uncounted(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], asked: tuple[int, int]
    ) -> list[torch.Tensor] | None:
        """Between steps: of what these have, tensors of which the account knows nothing, or not the size. `asked` is
        whether a storage counts all the same, as `OpMemory.asked`. None where it cannot be told here."""
        found: list[torch.Tensor] | None = self._native.uncounted(
            tuple(models), tuple(optimizers), storage_address, *asked
        )
        return found

    def forget(self) -> None:
        """What is known about ops has changed."""
        self._native.forget()

    def learn(self, info: OpInfo) -> None:
        """An op was met."""
        kind = self._kind(info)
        if kind is None:
            return
        settings = self._engine.backend.settings_of(info)
        environment = self._environments.setdefault(settings, partial(OpEnvironment.now, settings))
        recorded = bool(self._engine.controller.policy.uses_recipes and info.exactness)
        training = -1 if info.training is None else info.training
        self._native.teach(
            info.func.name(), kind, info.name, recorded, info.resized, info.seeded,
            torch.Tag.pointwise in info.func.tags, info.safety, info.exactness, info.bound, environment, training,
            tuple(info.scratch), *self._hooked.around(info),
        )  # fmt: skip

    def _kind(self, info: OpInfo) -> str | None:
        """What the hook does for an op, as `handler_for` chooses; None for what the handlers in Python take."""
        if info.name.startswith(NAMESPACES) or info.name == HANDED_OVER or info.name in KEPT_WITHIN:
            return None
        if info.view:
            return "view" if self._engine.machine.readable_in_place else None
        if info.writes_statistics and info.bound is not None:
            return "normalises" if self._engine.controller.policy.uses_recipes and info.exactness else None
        if not info.fast or info.resizes:
            return None
        if info.fresh and not info.writes:
            return "creates"
        if info.fresh or info.writes not in ((), (0,)):
            return None
        return "reads" if not info.writes else "writes" if info.exactness == EXACT else None
