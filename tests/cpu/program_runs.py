"""Runs random programs: plainly, plainly up to an op, and under a budget."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.controller import SMALLEST_MOVABLE, UNLIMITED
from spillway.engines.records import AWAY, HERE, Storage
from spillway.engines.tensors.calls import operands
from spillway.engines.tensors.dispatch_key import unwatched
from spillway.engines.tensors.engine import TensorEngine
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import Sizes
from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.methods import AbstractPolicy, KeepAll
from spillway.methods.base import Drop, Move
from tests.cpu.world import Part, Program, World


@dataclass(slots=True)
class Figures:
    """What happened in the steps of a program."""

    drops: int = 0
    moves: int = 0
    replays: int = 0
    bytes_out: int = 0
    dropped_bytes: int = 0

    def add(self, engine: TensorEngine) -> None:
        counters = engine.controller.counters
        self.drops += counters.drops
        self.moves += counters.moves
        self.replays += counters.recomputed_ops
        self.bytes_out += counters.bytes_out
        self.dropped_bytes += counters.dropped_bytes


@dataclass(slots=True)
class Ran:
    """A program that was run under a budget, to its end or until it was refused: in which part, and before which op.

    `held` are the bytes that were too small to move and perhaps alive only for the sake of drops.
    """

    state: dict[str, Any] = field(default_factory=dict)
    closed: dict[str, Any] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    peak: int = 0
    refusal: BudgetInfeasible | None = None
    part: int = 0
    ops: int = 0
    between_ops: bool = False
    held: int = 0
    wrong: list[str] = field(default_factory=list)


class Stopped(SpillwayError):
    """A plain run has come to where a managed one was refused."""


class Counting(TorchDispatchMode):
    """Counts ops as the engine does, and may do something before each."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.refused_in = 0
        """The op that was refused; 0 if none was."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += not _info(func).view
        self.before(func, args, kwargs or {})
        try:
            return func(*args, **(kwargs or {}))
        except BudgetInfeasible:
            self.refused_in = self.refused_in or self.ops
            raise

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Called before each op, views included."""


@final
class StopAt(Counting):
    """Raises instead of running the op of that number."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        if self.ops == self.last:
            raise Stopped("here")


@functools.cache
def _info(func: Any) -> OpInfo:
    return OpInfo(func)


_SIZES = Sizes()
"""Nothing is ever learned by it: it answers from shapes alone, as an engine does that sees an op for the first time."""


@final
class Needs(Counting):
    """Above an engine that keeps everything: the budget under which a program need not be refused.

    It is the most bytes that one op reads, writes and may create, and beside them everything that never leaves.
    """

    def __init__(self, engine: TensorEngine) -> None:
        super().__init__()
        self.engine = engine
        self.working = 0
        self.stuck = 0

    @property
    def budget(self) -> int:
        return self.working + self.stuck

    def __enter__(self) -> Needs:
        self._note_stuck(())
        return super().__enter__()  # type: ignore[no-any-return]

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        info = _info(func)
        with unwatched():
            found = {self.engine.lookup(tensor) for _, tensor, _ in operands(info, args, kwargs)}
            needed = _SIZES.expected(info, args, kwargs)[1] if info.fresh or info.resizes else 0
            self.working = max(self.working, needed + sum(storage.nbytes for storage in found if storage))
            self._note_stuck(storage for storage in found if storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._note_stuck(())  # what is read between two ops may have to be recomputed beside a result that dies soon
        return out

    def _note_stuck(self, used: Iterable[Storage]) -> None:
        for storage in used:
            storage.escaped = storage.escaped or self.engine.machine.escaped(storage)
        storages = list(self.engine.table.values())
        self.stuck = max(self.stuck, sum(s.nbytes for s in storages if s.nbytes < SMALLEST_MOVABLE or s.escaped))


@final
class Shake(Counting):
    """Makes some storages leave before every op."""

    def __init__(self, engine: TensorEngine, seed: int) -> None:
        super().__init__()
        self.engine = engine
        self.draw = random.Random(seed)

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        controller = self.engine.controller
        with controller.lock, unwatched():
            for storage in list(self.engine.table.values()):
                if storage.nbytes >= SMALLEST_MOVABLE and self.draw.random() < 0.15:
                    controller.grant((Drop if self.draw.random() < 0.7 else Move)(storage))


# ---------------------------------------------------------------------- running


def plain(program: Program) -> dict[str, Any]:
    world = World(program.seed)
    for part in program.parts:
        world.run(part.inside)
        world.run(part.outside)
    return world.state()


def plain_until(program: Program, last: int, ops: int) -> dict[str, Any]:
    """As plain torch would have left everything if the op of that number in the last step had raised.

    The mode that raises stands above an engine that keeps everything, which is judged by itself. Alone it would let
    backwards pass that plain torch refuses: under a mode torch counts versions of what some ops write otherwise.
    """
    world = World(program.seed)
    for part in program.parts[:last]:
        world.run(part.inside)
        world.run(part.outside)
    if not ops:
        return world.state()
    engine = TensorEngine(KeepAll(), UNLIMITED)
    try:
        engine.begin_step(world.named())
        try:
            with contextlib.suppress(Stopped), StopAt(ops):
                world.run(program.parts[last].inside)
        finally:
            engine.end_step()
    finally:
        engine.close()
    return world.state()


def managed(program: Program, policy: AbstractPolicy, allowed: int, above: Callable[[TensorEngine], Counting]) -> Ran:
    """Run it under a budget, with the mode that `above` makes over the engine's own."""
    ran, world, engine = Ran(), World(program.seed), TensorEngine(policy, allowed)
    mode = above(engine)
    try:
        for number, part in enumerate(program.parts):
            ran.part = number
            _run_part(world, engine, part, ran, mode)
            if ran.refusal is not None or ran.wrong:
                break
            world.run(part.outside)
        if engine.controller.dropped:  # the end of the step failed, and nobody can read what was dropped
            raise AssertionError("\n".join(ran.wrong))
        ran.state = world.state()
        _check_books(engine, ran)
    finally:
        engine.close()
    ran.closed = world.state()
    del world
    gc.collect()
    if engine.table:
        ran.wrong.append(f"{len(engine.table)} storages are still in the table of a closed engine")
    return ran


def _run_part(world: World, engine: TensorEngine, part: Part, ran: Ran, mode: Counting) -> None:
    mode.ops = 0
    try:
        engine.begin_step(world.named())
        with mode:
            world.run(part.inside)
    except BudgetInfeasible as error:
        began = error.op != "begin step"
        ran.refusal, ran.ops = error, (mode.refused_in or mode.ops + 1) if began else 0
        ran.between_ops = not mode.refused_in
        small = [storage for storage in engine.table.values() if storage.nbytes < SMALLEST_MOVABLE]
        ran.held = sum(storage.nbytes for storage in small if storage.held)
    except Exception as error:
        ran.wrong.append("".join(traceback.format_exception(error)))
    ran.peak = max(ran.peak, engine.controller.peak)
    try:
        engine.end_step()
        ran.peak = max(ran.peak, engine.controller.peak)
    except BudgetInfeasible as error:
        if ran.refusal is None:
            ran.refusal, ran.ops = error, 1 << 40
    except Exception as error:
        ran.wrong.append("".join(traceback.format_exception(error)))
    ran.figures.add(engine)


def _check_books(engine: TensorEngine, ran: Ran) -> None:
    """What has to hold between steps."""
    controller, storages = engine.controller, list(engine.table.values())
    present = sum(s.nbytes for s in storages if s.value is not None and s.value.absent == HERE)
    if controller.resident != present:
        ran.wrong.append(f"the account says {controller.resident} bytes and {present} are present")
    if controller.dropped or controller.recipes:
        ran.wrong.append(f"{len(controller.dropped)} drops and {len(controller.recipes)} recipes outlive the step")
    if controller.away != sum(s.value is not None and s.value.absent == AWAY for s in storages):
        ran.wrong.append(f"the account says that {controller.away} storages are away")
    for storage in storages:
        if storage.locks or storage.held or storage.written or (storage.value is not None and storage.value.wanted):
            ran.wrong.append(f"{storage!r} is still locked, held, written or wanted")
