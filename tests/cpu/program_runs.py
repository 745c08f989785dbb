"""Runs random programs: plainly, plainly up to an op, and under a budget."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves

from spillway.engines.tensors.calls import operands
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import Sizes
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.internals.dispatch_key import Handler, Watcher
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.memory.records import AWAY, HERE
from spillway.methods import AbstractPolicy
from spillway.methods.base import Drop, Move
from spillway.methods.planned import SelfPlanned
from spillway.session.planned_steps import PlannedSteps
from tests.cpu.bits import strided
from tests.cpu.fronts import stand_before
from tests.cpu.world import IN_A_ROW, Part, Program, World


def taken_natively(engine: TensorEngine) -> int:
    """Ops that ran in the native hook, in all steps so far; views count."""
    native = engine._dispatch.native
    return 0 if native is None else native._native.taken


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
    """A program that was run under a budget, to its end or until it was refused: in which part, in which of its
    instructions, and before which op.

    `held` are the bytes that were too small to move and perhaps alive only for the sake of drops.
    """

    state: dict[str, Any] = field(default_factory=dict)
    closed: dict[str, Any] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    natively: int = 0
    """Ops that the hook took."""
    began_planned: int = 0
    """Steps that followed a plan when they began."""
    ended_planned: int = 0
    """Steps that were as planned to their end."""
    peak: int = 0
    refusal: BudgetInfeasible | None = None
    part: int = 0
    ops: int = 0
    begun: int = 1 << 40
    between_ops: bool = False
    held: int = 0
    wrong: list[str] = field(default_factory=list)


class Stopped(SpillwayError):
    """A plain run has come to where a managed one was refused."""


class Counting:
    """Stands before the handlers of an engine, counts ops as it does, and may do something before each."""

    def __init__(self) -> None:
        self.ops = 0
        self.refused_in = 0
        """The op that was refused; 0 if none was."""

    def front(self, func: Any, handler: Handler) -> Handler:
        """What stands before the handler of an op."""
        info = _info(func)

        def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += not info.view
            self.before(info, args, kwargs or {})
            try:
                out = handler(mode, func, types, args, kwargs)
            except BudgetInfeasible:
                self.refused_in = self.refused_in or self.ops
                raise
            except Exception:
                self.failed()
                raise
            self.after()
            return out

        return handle

    def before(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        """Called before each op, views included."""

    def after(self) -> None:
        """Called after each."""

    def failed(self) -> None:
        """Called instead where it has raised an error of its own."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Stand before the ops of this thread, without an engine."""
        watcher = Watcher({}, lambda func: self.front(func, _looked_at))
        watcher.begin()
        try:
            yield
        finally:
            watcher.end()


def _looked_at(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an op and ask for the storages of what it reads and returns, as who keeps an account has to.

    From then on Python keeps a storage as well, and autograd no longer adds to such a tensor in place where it sums
    gradients: other versions of the same bits.
    """
    out = op(*args, **kwargs)
    for tensor in tree_leaves((args, kwargs, out)):
        if isinstance(tensor, torch.Tensor) and strided(tensor) and not tensor.is_nested:
            tensor.untyped_storage()
    return out


@final
class StopAt(Counting):
    """Raises instead of running the op of that number or what comes after that instruction; or, early, as soon as the
    op before it has run and that instruction has begun."""

    def __init__(self, world: World, last: int, begun: int, *, early: bool) -> None:
        super().__init__()
        self.world, self.last, self.begun, self.early = world, last, begun, early
        world.begins = self.begins

    def after(self) -> None:
        if self.early and self.ops == self.last - 1 and self.world.begun >= self.begun:
            raise Stopped("before what follows")

    def begins(self) -> None:
        """Called when an instruction begins."""
        self.after()
        if self.world.begun > self.begun:
            raise Stopped("before the next")

    def before(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        if self.ops == self.last:
            raise Stopped("here")


@cache
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

    def before(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        if info.view:  # an engine meets what it shows when it is read; who holds it then need not hold it now
            return
        found = {self.engine.lookup(tensor) for _, tensor, _ in operands(info, args, kwargs)}
        needed = _SIZES.expected(info, args, kwargs)[1] if info.creates(args) else 0
        self.working = max(self.working, needed + sum(storage.nbytes for storage in found if storage))
        for storage in filter(None, found):
            storage.escaped = storage.escaped or self.engine.machine.escaped(storage)
        self.after()

    def after(self) -> None:
        """What is read between two ops may have to be recomputed beside a result that dies soon. What was loaded may
        lie there before any op reads it, in storages that cannot be resized."""
        self.engine._meet_what_is_left()
        storages = list(self.engine.table.values())
        self.stuck = max(self.stuck, sum(s.nbytes for s in storages if s.nbytes < SMALLEST_MOVABLE or s.escaped))

    def failed(self) -> None:
        """The parts of a sparse tensor stay once an op was called with it, and may die with the error."""
        self.after()


@final
class Shake(Counting):
    """Makes some storages leave before every op."""

    def __init__(self, engine: TensorEngine, seed: int) -> None:
        super().__init__()
        self.engine = engine
        self.draw = random.Random(seed)

    def before(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        controller = self.engine.controller
        with controller.lock:
            for storage in list(self.engine.table.values()):
                if storage.nbytes >= SMALLEST_MOVABLE and self.draw.random() < 0.15:
                    controller.grant((Drop if self.draw.random() < 0.7 else Move)(storage))


# ---------------------------------------------------------------------- running


def plain(program: Program, front: Counting | None = None) -> dict[str, Any]:
    """What a program leaves; `front` stands before the ops of its steps."""
    world = World(program.seed)
    _run_plainly(world, program.parts, front)
    return world.state()


@contextlib.contextmanager
def poisoned(byte: int) -> Iterator[None]:
    """The C library fills what it hands out with the complement of the byte, and what is freed with the byte itself."""
    libc, perturb = ctypes.CDLL(None), -6
    libc.mallopt(perturb, byte)
    try:
        yield
    finally:
        libc.mallopt(perturb, 0)


def plain_until(program: Program, ran: Ran, *, early: bool = False) -> dict[str, Any]:
    """As plain torch would have left everything if the op that was refused had raised, or whatever came before it in
    that instruction.

    Early, it is left as it was when the op before it had run and the instruction had begun.
    """
    world = World(program.seed)
    _run_plainly(world, program.parts[: ran.part], Counting())
    if ran.ops:
        stop = StopAt(world, ran.ops, ran.begun, early=early)
        with contextlib.suppress(Stopped), stop.alone():
            world.run(program.parts[ran.part].inside)
    return world.state()


def _run_plainly(world: World, parts: Iterable[Part], front: Counting | None) -> None:
    for part in parts:
        with contextlib.nullcontext() if front is None else front.alone():
            world.run(part.inside)
        world.run(part.outside)


def managed(
    program: Program, policy: AbstractPolicy, allowed: int, above: Callable[[TensorEngine], Counting] | None
) -> Ran:
    """Run it under a budget, with what `above` makes before the engine's handlers; with nothing, in the native hook
    where there is one, and what is said of ops means nothing."""
    ran, world, engine = Ran(), World(program.seed), TensorEngine(policy, allowed)
    optimizers = list(dict.fromkeys((world.optimizer, world.sparse_optimizer)))
    plans = PlannedSteps(policy, engine, [world.network], optimizers) if isinstance(policy, SelfPlanned) else None
    front = Counting() if above is None else above(engine)
    if above is not None:
        stand_before(engine, front.front)
    try:
        for number, part in enumerate(program.parts):
            ran.part = number
            if plans is None:
                _run_part(world, engine, part, ran, front)
            else:
                _run_as_planned(plans, number // IN_A_ROW, partial(_run_part, world, engine, part, ran, front), ran)
            if ran.refusal is not None or ran.wrong:
                break
            world.run(part.outside)
        if engine.controller.dropped:  # the end of the step failed, and nobody can read what was dropped
            raise AssertionError("\n".join(ran.wrong))
        ran.state = world.state()
        _check_books(engine, ran)
    finally:
        ran.natively = taken_natively(engine)
        engine.close()
    ran.closed = world.state()
    del world
    gc.collect()
    if engine.table:
        ran.wrong.append(f"{len(engine.table)} storages are still in the table of a closed engine")
    return ran


def _run_as_planned(plans: PlannedSteps, kind: int, run: Callable[[], None], ran: Ran) -> None:
    plans.begin(kind, None)
    try:
        run()
    finally:
        plans.end()
    if ran.refusal is None and not ran.wrong:
        plan = plans._policy.planned
        plans.conclude(0.0)
        ran.began_planned += plan is not None
        ran.ended_planned += plan is not None and plans._now.planned is plan


def _run_part(world: World, engine: TensorEngine, part: Part, ran: Ran, front: Counting) -> None:
    front.ops = 0
    try:
        engine.begin_step(world.named())
        front.after()
        world.run(part.inside)
        front.after()  # the address of something may have been asked for since the last op
    except BudgetInfeasible as error:
        began = error.op != "begin step"
        ran.refusal, ran.ops = error, (front.refused_in or front.ops + 1) if began else 0
        ran.begun, ran.between_ops = world.begun, not front.refused_in
        small = [storage for storage in engine.table.values() if storage.nbytes < SMALLEST_MOVABLE]
        ran.held = sum(storage.nbytes for storage in small if storage.held)
    except Exception as error:
        ran.wrong.append("".join(traceback.format_exception(error)))
    ran.peak = max(ran.peak, engine.controller.budget.peak)
    try:
        engine.end_step()
        ran.peak = max(ran.peak, engine.controller.budget.peak)
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
    if controller.budget.resident != present:
        ran.wrong.append(f"the account says {controller.budget.resident} bytes and {present} are present")
    if controller.dropped or controller.recipes:
        ran.wrong.append(f"{len(controller.dropped)} drops and {len(controller.recipes)} recipes outlive the step")
    if controller.away != sum(s.value is not None and s.value.absent == AWAY for s in storages):
        ran.wrong.append(f"the account says that {controller.away} storages are away")
    for storage in storages:
        if storage.locks or storage.held or storage.written or (storage.value is not None and storage.value.wanted):
            ran.wrong.append(f"{storage!r} is still locked, held, written or wanted")
