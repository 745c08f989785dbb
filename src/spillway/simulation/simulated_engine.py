"""The simulated engine: a recorded step under the real controller, on the machine on paper.

NOTE [As the tensor engine does it]. `_Run` calls the controller in the order in which `engines.tensors` does, so that
a decision that was simulated is the decision that is made, as far as the same ops find room short:

 1. Before the step: what is known by name is taken into account, `begin_step`, room for what is there.
 2. Before an op: the policy looks ahead if the op before it created something large or had to wait for room, unless
    it did so less than `looks_after` ops ago. The clock; everything the op names was used now. If all of it is there,
    nothing hangs on what will be written, and what will be created fits, the op runs. Otherwise `prepare`, and
    `finish` afterwards.
 3. After an op: what it wrote begins the next version, what it created is taken into account in its order, one recipe
    for all of it. Then the dead are forgotten.
 4. After the step: `end_step`.

What the tensor engine only expects of an op's size is exact here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Final, Literal, final

from spillway.costs.device import Device
from spillway.costs.roofline import step_seconds
from spillway.errors import BudgetInfeasible, DeviceFullError, EngineError, SpillFullError, UsageError
from spillway.ir.lives import versions_of
from spillway.ir.plan import Plan
from spillway.ir.spans import total
from spillway.ir.step import Op, Phase, Step, StorageId
from spillway.ir.timeline import Change, Origin, Timeline
from spillway.memory.chronicle import Chronicle, Ran
from spillway.memory.controller import Controller
from spillway.memory.following import Following
from spillway.memory.lanes import stalled_intervals, transfers_beside, unseen
from spillway.memory.records import EXACT, LARGE, NEVER, SCAFFOLD, WITHOUT_CONTENT, Recipe, Storage, Value
from spillway.methods.base import Absence, AbstractPlanner, AbstractPolicy, Problem
from spillway.methods.planned import Planned
from spillway.simulation.allocators import allocator_named
from spillway.simulation.paper_machine import TIERS, PaperMachine, Thrashing, Tier
from spillway.units import Bytes, Seconds

THRASH: Final = 1.0
"""Recomputing for longer than so many times the plain step's compute is thrashing, as in DTR's simulator."""

SCAFFOLDS: Final = frozenset(f"aten.{name}" for name in WITHOUT_CONTENT)
"""Ops whose result has no content yet, by the part of their name before the overload."""

Status = Literal["ok", "oom", "thrash"]
"""How a simulated step ended."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a simulated step did; up to where it ended, if it did not end well."""

    status: Status
    """`ok`; `oom` if something did not fit; `thrash` if more was recomputed than is worth it."""
    why: str
    """A sentence on why it is not `ok`; else empty."""
    timeline: Timeline
    """What was resident when, and what ran on which lane."""
    seconds: Seconds
    """From the beginning of the step to its end."""
    plain_seconds: Seconds
    """Of its ops alone."""
    peak_bytes: Bytes
    """Most bytes resident at once, by the controller's account."""
    reserved_bytes: Bytes
    """Most bytes that the allocator model had taken from the device."""
    bytes_out: Bytes
    """Bytes copied to the slower tier."""
    bytes_in: Bytes
    """Bytes copied back."""
    recomputed_ops: int
    """Ops run again."""
    recomputed_seconds: Seconds
    """Time that they took."""
    stall_seconds: Seconds
    """Time that compute waited for copies."""
    python_seconds: Seconds
    """Compute waited for Spillway itself, as the device says: for every op, storage handled and question asked."""
    hidden_seconds: Seconds
    """Of the time that copies took, the part in which compute did not wait."""
    dropped_bytes: Bytes
    bytes_out_beside: Bytes
    """Of the bytes out, those whose copy began while ops ran."""
    bytes_in_beside: Bytes
    """Of the bytes in, those whose copy began while ops ran."""
    end_bytes: Bytes
    """Bytes resident when the step ended."""
    drops: int
    moves: int
    refusals: dict[str, int]
    """Proposals that were refused, by reason."""
    remark: str = ""
    """What the planner had to say of the plan that was followed."""

    @property
    def overhead(self) -> float:
        """Seconds over plain seconds; 1.0 for a step that takes no time."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 1.0


def simulate(
    step: Step, *, allowed: Bytes, method: AbstractPolicy | AbstractPlanner | Plan, device: Device,
    allocator: str = "exact", limit: Bytes | None = None, tier: Tier = "host", steps: int = 2,
) -> Simulation:  # fmt: skip
    """Run a recorded step, whose ops have seconds, under a budget in bytes, on paper (`spillway.simulate`).

    Arguments:
        method: A policy; or a plan for the step, or what makes one, which `Planned` follows.
        device: How fast copies are, and what watching costs. A step that fits is not watched, unless a
            plan has something leave all the same.
        limit: Device memory in bytes; what does not fit ends the step as `oom`.
        steps: A policy that looks back, as DELTA's prefetcher does, knows nothing in the first.

    Raises UsageError if an op has no seconds, or an argument makes no sense, and BudgetInfeasible if a planner has no
    plan for so little.
    """
    if steps < 1:
        raise UsageError(f"A simulation takes 1 step or more; got {steps}.")
    if tier not in TIERS:
        raise UsageError(f"There is no tier {tier!r}; choose one of {', '.join(TIERS)}.")
    plain, from_host = step_seconds(step), 0
    if isinstance(method, AbstractPlanner):
        step, from_host = method.as_run(step, device)
        plan = method.plan(rehearsing(Problem(step=step, allowed=allowed, device=device)))
        policy: AbstractPolicy = Planned.as_meant(plan, step, method)
    else:
        policy = Planned(method, step) if isinstance(method, Plan) else method
    machine = PaperMachine(
        policy.link(device), allocator_named(allocator, limit), tier=tier, most_recomputing=THRASH * plain,
        overlaps=device.overlaps,
    )  # fmt: skip
    watched = policy.follows or step.plain_peak() > allowed  # else it costs half as much, which is not on paper
    controller = Controller(machine, policy, allowed)
    run = _Run(step, machine, controller, device if watched else None)
    for number in range(steps):
        status, why = run.go(number)
        if status != "ok":
            break
    done = run.result(status, why, plain)
    return replace(done, bytes_in=done.bytes_in + from_host)


def rehearsing(problem: Problem) -> Problem:
    """The problem, for planners that ask what a policy would do."""
    return replace(problem, rehearse=partial(_absences, problem))


def _absences(problem: Problem, policy: AbstractPolicy) -> list[Absence]:
    """What is gone when, in one step under the policy; none of it if that does not end well."""
    step = problem.step
    machine = PaperMachine(
        policy.link(problem.device), allocator_named("exact", None), most_recomputing=step_seconds(step)
    )
    run = _Run(step, machine, Controller(machine, policy, problem.allowed), None)
    status, why = run.go(0)
    return run.absences(run.result(status, why, step_seconds(step)).timeline) if status == "ok" else []


@final
@dataclass(frozen=True, slots=True)
class _Call:
    """An op of the step, by what the engine has to know."""

    op: Op
    reads: tuple[StorageId, ...]
    writes: tuple[StorageId, ...]
    creates: tuple[StorageId, ...]
    needed: Bytes
    exactness: int
    dies: tuple[StorageId, ...]
    """What nobody reaches any more after the op."""


def _calls(step: Step) -> Iterator[_Call]:
    dying = defaultdict(list)
    for storage in step.storages:
        if not storage.present_at_end:
            dying[storage.alive_until].append(storage.id)
    for op in step.ops:
        made = [step.values[number] for number in op.creates]
        creates = tuple(
            value.storage for value in made if value.version == 0 and not step.storages[value.storage].present_at_start
        )
        yield _Call(
            op=op, creates=creates, writes=tuple(value.storage for value in made if value.storage not in creates),
            reads=tuple(step.values[number].storage for number in op.reads),
            needed=sum(step.storages[storage].nbytes for storage in creates), dies=tuple(dying[op.number + 1]),
            exactness=SCAFFOLD if op.name.rpartition(".")[0] in SCAFFOLDS else EXACT if op.replayable else NEVER,
        )  # fmt: skip


@final
class _Run:
    """One step, again and again, under one controller. `watched` is the device that says what compute waits for
    Spillway itself; None if it does not."""

    def __init__(self, step: Step, machine: PaperMachine, controller: Controller, watched: Device | None) -> None:
        self._step = step
        self._machine = machine
        self._controller = controller
        self._watched = watched
        self._handled: Seconds = 0.0
        self._python: Seconds = 0.0
        self._calls = tuple(_calls(step))
        self._storages: dict[StorageId, Storage] = {}
        self._recorded_as: dict[int, StorageId] = {}
        self._counted: dict[Storage, None] = {}  # these, and what lives on for a copy of it that is under way
        self._foresees = controller.policy.foresees and controller.budget.limited
        self._following = Following(controller) if controller.policy.follows else None
        self._look_ahead = False
        self._phase = Phase.FORWARD
        self._began: Seconds = 0.0
        self._seconds: Seconds = 0.0
        self._number = 0
        self._chronicle = Chronicle(controller, ())
        machine.died = self._bury

    def go(self, number: int) -> tuple[Status, str]:
        """Run the step once more."""
        self._number = number
        try:
            self._begin()
            for call in self._calls:
                self._run_op(call)
            self._look_ahead = False
            if self._following is not None:
                self._following.before_op()
            self._controller.end_step()
            self._attend(None)
        except (BudgetInfeasible, SpillFullError, DeviceFullError) as error:
            return "oom", str(error)
        except Thrashing as error:
            return "thrash", f"{error}: the method brings back the same things over and over."
        finally:
            # Compute also waits where the controller does not see it.
            counters, machine = self._controller.counters, self._machine
            self._seconds = machine.now() - self._began
            counters.stalls += unseen(machine.log.waits, counters.stalls)
            counters.stall_seconds = total(stalled_intervals(counters.stalls))
        return "ok", ""

    # ------------------------------------------------------------------ around the step

    def _begin(self) -> None:
        controller, machine = self._controller, self._machine
        machine.begin_step()
        self._handled = self._python = 0.0
        self._began = machine.now()
        self._chronicle = Chronicle(controller, self._counted)
        self._renew_sources()
        if controller.policy.foresees:
            machine.measure_link()
        controller.begin_step("simulated")
        if self._following is not None:
            self._following.begin_step(self._storages[number] for number in sorted(self._storages))
        self._chronicle = Chronicle(controller, self._counted)
        controller.make_room(0, "begin step")
        controller.budget.begin()
        machine.allocator.reset_peak()
        self._chronicle = Chronicle(controller, self._counted)
        for storage in self._step.storages:
            if storage.alive_until == 0 and not storage.present_at_end:
                self._let_go(storage.id)

    def _renew_sources(self) -> None:
        """What the last step left behind and this one does not begin with is replaced by what it does begin with."""
        for number in list(self._storages):
            info = self._step.storages[number]
            if not (info.present_at_start and info.present_at_end):
                self._let_go(number)
        for info in self._step.storages:
            if info.present_at_start and info.id not in self._storages:
                self._adopt(info.id)

    def result(self, status: Status, why: str, plain: Seconds) -> Simulation:
        """The figures of the last step."""
        controller, counters, log = self._controller, self._controller.counters, self._machine.log
        events = self._chronicle.stop()
        timeline = self._chronicle.timeline(self._number, events, log, self._began, ops=len(self._calls))
        timeline = replace(timeline, origins=tuple(self._origins(timeline)))
        if isinstance(controller.policy, Planned) and controller.policy.plan.window:
            timeline = replace(timeline, window=controller.policy.plan.window)
        hidden = transfers_beside(log.transfers, stalled_intervals(counters.stalls)).hidden_seconds
        return Simulation(
            status=status, why=why, timeline=timeline, seconds=self._seconds, plain_seconds=plain,
            peak_bytes=controller.budget.peak, reserved_bytes=self._machine.allocator.peak_reserved,
            bytes_out=counters.bytes_out, bytes_in=counters.bytes_in, recomputed_ops=counters.recomputed_ops,
            recomputed_seconds=counters.recomputed_seconds, stall_seconds=counters.stall_seconds,
            python_seconds=self._python, hidden_seconds=hidden,
            dropped_bytes=counters.dropped_bytes, bytes_out_beside=counters.early_out,
            bytes_in_beside=counters.early_in, end_bytes=controller.budget.resident,
            drops=counters.drops, moves=counters.moves, refusals=dict(counters.refusals),
            remark=controller.policy.plan.remark if isinstance(controller.policy, Planned) else "",
        )  # fmt: skip

    def absences(self, timeline: Timeline) -> list[Absence]:
        """From when to when each value was gone."""
        found, left = list[Absence](), dict[StorageId, int]()
        made = versions_of(self._step)
        for event in timeline.events:
            number = self._recorded_as.get(event.storage)
            if number is None:
                continue
            if event.change in (Change.DROP, Change.MOVE):
                left[number] = event.op
            elif number in left:
                start = left.pop(number)
                values = [value for op, value in made[number] if 0 <= op < start]
                if values:
                    found.append(Absence(values[-1], start, event.op))
        return found

    def _origins(self, timeline: Timeline) -> Iterator[Origin]:
        """Where storages come from, as it was recorded."""
        for line in timeline.storages:
            number = self._recorded_as.get(line.storage)
            if number is None:
                continue
            info = self._step.storages[number]
            op, module = "", ""
            if not info.present_at_start and info.alive_from < len(self._step.ops):
                maker = self._step.ops[info.alive_from]
                op, module = maker.name, maker.module
            if info.name or op:
                yield Origin(storage=line.storage, name=info.name, op=op, module=module, line="")

    # ------------------------------------------------------------------ around an op

    def _run_op(self, call: _Call) -> None:
        controller, now = self._controller, self._machine.now
        began = now()
        if self._following is not None:
            self._following.before_op()
        if self._look_ahead:
            self._look_ahead = False
            controller.foresee(call.op.phase)
        self._phase = call.op.phase
        controller.clock = clock = controller.clock + 1
        used, written = self._named(call.reads), self._named(call.writes)
        for storage in (*used, *written):
            storage.touched = clock
        reads = [_current(storage) for storage in used]
        if self._ready(reads, written) and controller.budget.short(call.needed) <= 0:
            self._complete(call, reads, written)
        else:
            controller.prepare(call.op.name, reads, written, call.needed)
            try:
                self._complete(call, reads, written)
            finally:
                controller.finish(reads, written)
                self._note_pressure()
        if self._following is not None:
            self._following.after_op(self._named(call.creates))
        self._attend(call.op)
        self._chronicle.ran.append(Ran(began, now(), clock, call.op.name))
        for number in call.dies:
            self._let_go(number)

    def _attend(self, op: Op | None) -> None:
        """Compute waits for Python: for an op, and for what was handled since the last."""
        counters, device = self._controller.counters, self._watched
        if device is None:
            return
        events = counters.drops + counters.moves + counters.reloads + counters.recomputed_ops
        handled = device.handling_seconds * events + device.question_seconds * counters.questions
        handled += device.beside_seconds * counters.early
        around, length = (0.0, 0.0) if op is None else (device.watch_seconds, op.seconds or 0.0)
        seconds = (around + handled - self._handled) * (1 + device.cold_root * sqrt(length))
        self._machine.work(seconds)
        self._handled, self._python = handled, self._python + seconds

    def _named(self, numbers: tuple[StorageId, ...]) -> list[Storage]:
        storages = self._storages
        return [storages[number] for number in numbers]

    @staticmethod
    def _ready(reads: list[Value], writes: list[Storage]) -> bool:
        if any(value.absent for value in reads):
            return False
        return not any(value.absent or value.dependents for value in map(_current, writes))

    def _complete(self, call: _Call, reads: list[Value], writes: list[Storage]) -> None:
        """The op runs: it writes, it creates, and there is a recipe."""
        machine, seconds = self._machine, call.op.seconds or 0.0
        sheets = [machine.create(self._step.storages[number].nbytes) for number in call.creates]
        machine.work(seconds)
        recorded = self._controller.policy.uses_recipes and call.exactness != NEVER
        edges = self._write(reads, writes, recorded=recorded)
        created = [self._adopt(number, sheet) for number, sheet in zip(call.creates, sheets, strict=True)]
        if recorded and (created or edges):
            recipe = Recipe(
                self._controller.clock, call.op.name, reads, None, seconds, call.exactness, tuple(created),
                tuple(edges), call.needed,
            )  # fmt: skip
            self._controller.remember(recipe)

    def _write(self, reads: list[Value], writes: list[Storage], *, recorded: bool) -> list[tuple[int, Value]]:
        """Begin the next versions: an edge from each old one that could be recomputed itself."""
        edges: list[tuple[int, Value]] = []
        for storage in writes:
            old = _current(storage)
            new = self._controller.overwrite(storage, None)
            if recorded and old.recipe is not None:
                if old not in reads:  # written without looking: a replay has to have where to write
                    reads.append(old)
                edges.append((reads.index(old), new))
        return edges

    def _adopt(self, number: StorageId, sheet: object = None) -> Value:
        """Take a storage into account."""
        info = self._step.storages[number]
        handle = self._machine.create(info.nbytes) if sheet is None else sheet
        self._storages[number] = storage = self._controller.adopt(number, info.nbytes, handle)
        self._counted[storage] = None
        self._recorded_as[storage.number] = number
        storage.kind = info.kind.value
        if info.nbytes >= LARGE and sheet is not None:
            self._note_pressure()
        return _current(storage)

    def _note_pressure(self) -> None:
        """Before the next op the policy is asked for copies that may begin, as in the tensor engine."""
        if self._foresees and not self._look_ahead:
            self._controller.phase = self._phase
            self._look_ahead = self._controller.copies.asks()

    def _let_go(self, number: StorageId) -> None:
        self._machine.let_go(self._storages.pop(number))

    def _bury(self, storage: Storage) -> None:
        storage.handle = None
        self._counted.pop(storage, None)  # a replay's temporary is not among them
        self._controller.forget(storage)


def _current(storage: Storage) -> Value:
    if storage.value is None:
        raise EngineError(f"{storage!r} is dead and was used all the same.")
    return storage.value
