"""What `verify` accepts can run: random plans, carried out by a small machine that knows contents and no rules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.errors import PlanRejected
from spillway.ir import (
    Gap,
    Home,
    Host,
    Kind,
    Op,
    Phase,
    Plan,
    Recompute,
    Rule,
    Step,
    StorageInfo,
    Value,
    verify,
)

PLENTY = 10**9


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any valid step of a few ops, made by running random ops on random storages."""
    ops = draw(st.integers(0, 8))
    storages = [new_storage(draw, number, 0, source=True) for number in range(draw(st.integers(0, 3)))]
    values = [Value(id=storage.id, storage=storage.id, version=0) for storage in storages]
    current = {value.storage: value for value in values}
    recorded = []
    for number in range(ops):
        reads = draw(st.lists(st.sampled_from(sorted(current)), max_size=3, unique=True)) if current else []
        written = draw(st.lists(st.sampled_from(sorted(current)), max_size=1)) if current else []
        created = [new_storage(draw, len(storages) + place, number) for place in range(draw(st.integers(0, 2)))]
        storages += created
        outputs = [Value(id=-1, storage=old, version=current[old].version + 1) for old in written]
        outputs += [Value(id=-1, storage=storage.id, version=0) for storage in created]
        outputs = [replace(value, id=len(values) + place) for place, value in enumerate(outputs)]
        recorded.append(
            Op(
                number=number,
                name=f"op{number}",
                phase=draw(st.sampled_from(Phase)),
                reads=tuple(current[storage].id for storage in reads),
                creates=tuple(value.id for value in outputs),
                replayable=draw(st.integers(0, 9)) > 0,
            )
        )
        values += outputs
        current |= {value.storage: value for value in outputs}
        for dead in draw(st.lists(st.sampled_from(sorted(current)), max_size=1)) if current else []:
            storages[dead] = replace(storages[dead], alive_until=number + 1)
            del current[dead]
    for survivor in current:
        storages[survivor] = replace(storages[survivor], alive_until=ops, present_at_end=draw(st.booleans()))
    return Step(storages=tuple(storages), values=tuple(values), ops=tuple(recorded))


def new_storage(draw: st.DrawFn, number: int, op: int, *, source: bool = False) -> StorageInfo:
    kind, nbytes = draw(st.sampled_from(Kind)), draw(st.integers(0, 1000))
    return StorageInfo(id=number, nbytes=nbytes, kind=kind, alive_from=op, alive_until=op, present_at_start=source)


def plan_of(step: Step, gaps: list[Gap] | None = None) -> Plan:
    return Plan(step=step.digest(), allowed=PLENTY, projected=PLENTY, gaps=tuple(gaps or ()))


def verdict(plan: Plan, step: Step, allowed: int = PLENTY) -> str | None:
    try:
        verify(plan, step, allowed)
    except PlanRejected as rejected:
        return rejected.rule
    return None


@given(steps())
def test_an_empty_plan_verifies_within_the_plain_peak_and_not_a_byte_below(step: Step) -> None:
    assert verdict(plan_of(step), step, step.plain_peak()) is None
    expected = Rule.OVER_BUDGET if step.plain_peak() else None
    assert verdict(plan_of(step), step, max(0, step.plain_peak() - 1)) == expected


def idle_intervals(step: Step) -> list[tuple[int, int, int]]:
    """For every value the longest intervals of ops that neither use nor outlast it: value, start, end."""
    found = []
    for value in step.values:
        storage = step.storages[value.storage]
        uses = [op.number for op in step.ops if value.id in (*op.reads, *op.creates)]
        ends = [op.number for op in step.ops if following(step, value) in op.creates] or [storage.alive_until]
        bounds = [*([-1] if value.version == 0 and storage.present_at_start else []), *uses, *ends]
        found += [(value.id, a + 1, b) for a, b in pairwise(bounds) if a + 1 < b]
    return found


def following(step: Step, value: Value) -> int | None:
    """The value that is written over this one."""
    return next((v.id for v in step.values if (v.storage, v.version) == (value.storage, value.version + 1)), None)


@given(steps(), st.data())
def test_whatever_moves_while_nothing_uses_it_verifies_within_the_plain_peak(step: Step, data: st.DataObject) -> None:
    moved = [interval for interval in idle_intervals(step) if data.draw(st.booleans())]
    gaps = [Gap(value=value, start=start, end=end, home=Host()) for value, start, end in moved]
    assert verdict(plan_of(step, gaps), step, step.plain_peak()) is None


@given(steps())
def test_a_gap_stretched_over_a_use_is_rejected(step: Step) -> None:
    beyond = {Rule.GAP_OVER_READ, Rule.GAP_AFTER_OVERWRITE, Rule.GAP_AFTER_DEATH, Rule.UNKNOWN_NAME}
    before = {Rule.GAP_OVER_READ, Rule.GAP_BEFORE_CREATION}
    for value, start, end in idle_intervals(step):
        late = Gap(value=value, start=start, end=end + 1, home=Host())
        assert verdict(plan_of(step, [late]), step) in beyond
        if start > 0:
            early = Gap(value=value, start=start - 1, end=end, home=Host())
            assert verdict(plan_of(step, [early]), step) in before


def recipe(step: Step, gap: Gap, *, keep: int = -1) -> Recompute:
    """Every op that the value descends from, but for what is written over by none before the gap ends.

    With `keep` the op at this place of the recipe is left out.
    """
    ops: set[int] = set()
    leaves: set[int] = set()
    wanted = [gap.value]
    while wanted:
        value = step.values[wanted.pop()]
        creator = next((op for op in step.ops if value.id in op.creates), None)
        if creator is None or (value.id != gap.value and unchanged_and_reachable(step, value, gap)):
            leaves.add(value.id)
        elif creator.number not in ops:
            ops.add(creator.number)
            wanted += creator.reads
    order = [op for place, op in enumerate(sorted(ops)) if place != keep]
    return Recompute(ops=tuple(order), held=tuple(sorted(leaves)), temporaries=PLENTY // 1000)


def unchanged_and_reachable(step: Step, value: Value, gap: Gap) -> bool:
    written = [op.number for op in step.ops if following(step, value) in op.creates]
    return all(op >= gap.end for op in written) and step.storages[value.storage].alive_until >= gap.start


@given(steps())
def test_every_op_of_a_smallest_recipe_is_needed(step: Step) -> None:
    for value, start, end in idle_intervals(step):
        gap = Gap(value=value, start=start, end=end, home=Host())
        home = recipe(step, gap)
        is_read = value in [number for op in step.ops[end : end + 1] for number in op.reads]
        if not is_read or verdict(plan_of(step, [replace(gap, home=home)]), step) is not None:
            continue
        for place, op in enumerate(home.ops):
            damaged = replace(gap, home=recipe(step, gap, keep=place))
            creates_it = value in step.ops[op].creates
            expected = Rule.RECIPE_WITHOUT_VALUE if creates_it else Rule.MISSING_LEAF
            assert verdict(plan_of(step, [damaged]), step) == expected


@st.composite
def steps_with_plans(draw: st.DrawFn) -> tuple[Step, Plan]:
    """A step and a plan that may or may not be able to run."""
    step = draw(steps().filter(idle_intervals))
    gaps = []
    for value, first, last in draw(
        st.lists(st.sampled_from(idle_intervals(step)), min_size=1, max_size=5, unique=True)
    ):
        start = draw(st.integers(first, last - 1))
        end = draw(st.integers(start + 1, last))
        gaps.append(Gap(value=value, start=start, end=end, home=Host()))
    return step, plan_of(step, [replace(gap, home=draw(homes(step, gap))) for gap in gaps])


def homes(step: Step, gap: Gap) -> st.SearchStrategy[Home]:
    whole = recipe(step, gap)
    more = st.lists(st.integers(0, len(step.ops) - 1), max_size=2).map(lambda ops: (*ops, *whole.ops))
    held = st.lists(st.sampled_from(range(len(step.values))), max_size=4, unique=True).map(tuple)
    few = st.integers(0, 3000)
    return st.one_of(
        st.builds(Recompute, ops=st.just(whole.ops), held=st.just(whole.held), temporaries=few),
        st.builds(Recompute, ops=st.just(whole.ops), held=held, temporaries=few),
        st.builds(Recompute, ops=more, held=st.just(whole.held), temporaries=few),
        st.just(Host()),
    )


class CannotRun(Exception):
    """The machine met an op whose input is not there, or is not what it has to be."""


@dataclass(slots=True)
class Machine:
    """Carries a plan out. What a storage holds is the id of a value, so that a stale or foreign content shows."""

    step: Step
    plan: Plan
    content: dict[int, int] = field(default_factory=dict)
    held: list[tuple[Gap, int]] = field(default_factory=list)
    peak: int = 0

    def run(self) -> None:
        sources = [storage for storage in self.step.storages if storage.present_at_start]
        self.content = {v.storage: v.id for v in self.step.values if v.version == 0 and self.info(v.id) in sources}
        for op in self.step.ops:
            self.leave(op.number)
            self.die(op.number)
            self.come_back(op.number, {gap for gap in self.ending(op.number) if self.is_wanted(gap, op)})
            self.execute(op)
        self.die(len(self.step.ops))
        recipes = {gap for gap in self.ending(len(self.step.ops)) if isinstance(gap.home, Recompute)}
        self.come_back(len(self.step.ops), {gap for gap in recipes if self.info(gap.value).present_at_end})

    def ending(self, op: int) -> list[Gap]:
        return [gap for gap in self.plan.gaps if gap.end == op]

    def is_wanted(self, gap: Gap, op: Op) -> bool:
        """Whether the op reads the value, or leaves it for a later one."""
        lives_on = self.info(gap.value).alive_until > op.number
        return gap.value in op.reads or (
            lives_on and following(self.step, self.step.values[gap.value]) not in op.creates
        )

    def info(self, value: int) -> StorageInfo:
        return self.step.storages[self.step.values[value].storage]

    def leave(self, op: int) -> None:
        dead = {value for _, value in self.held}
        for gap in self.plan.gaps:
            if gap.start == op:
                self.hold(gap, dead)
                if self.content.pop(self.info(gap.value).id, None) != gap.value:
                    raise CannotRun(f"{gap}: not there to leave")

    def hold(self, gap: Gap, dead: set[int]) -> None:
        if isinstance(gap.home, Recompute):
            self.held += [(gap, value) for value in dead.intersection(gap.home.held)]

    def die(self, op: int) -> None:
        for storage in self.step.storages:
            if storage.alive_until == op and not storage.present_at_end and storage.id in self.content:
                dead = {self.content.pop(storage.id)}
                for gap in self.plan.gaps:
                    if gap.start <= op <= gap.end:
                        self.hold(gap, dead)

    def come_back(self, op: int, waiting: set[Gap]) -> None:
        """Bring back whatever can be, as often as that may have made another possible."""
        while ready := [gap for gap in waiting if self.can_come_back(gap)]:
            for gap in ready:
                self.content[self.info(gap.value).id] = gap.value
                self.note(gap.home.temporaries if isinstance(gap.home, Recompute) else 0)
                waiting.remove(gap)
        if waiting:
            raise CannotRun(f"before op {op}: {waiting} cannot come back")
        self.held = [(gap, value) for gap, value in self.held if gap.end != op]

    def can_come_back(self, gap: Gap) -> bool:
        if not isinstance(gap.home, Recompute):
            return True
        reachable = set(self.content.values()) | {value for _, value in self.held}
        for number in gap.home.ops:
            if not self.step.ops[number].replayable or not set(self.step.ops[number].reads) <= reachable:
                return False
            reachable |= set(self.step.ops[number].creates)
        return any(gap.value in self.step.ops[number].creates for number in gap.home.ops)

    def execute(self, op: Op) -> None:
        for value in op.reads:
            if self.content.get(self.info(value).id) != value:
                raise CannotRun(f"{op.label}: {self.step.values[value]} is not there")
        self.content |= {self.info(value).id: value for value in op.creates}
        self.note(0)

    def note(self, temporaries: int) -> None:
        storages = set(self.content) | {self.info(value).id for _, value in self.held}
        self.peak = max(self.peak, sum(self.step.storages[storage].nbytes for storage in storages) + temporaries)


@settings(max_examples=200)
@given(steps_with_plans())
def test_what_verifies_runs_within_the_bytes_that_were_counted(case: tuple[Step, Plan]) -> None:
    step, plan = case
    if verdict(plan, step) is not None:
        return
    machine = Machine(step=step, plan=plan)
    machine.run()
    assert verdict(plan, step, machine.peak) in (None, Rule.OVER_BUDGET)
    assert machine.peak == 0 or verdict(plan, step, machine.peak - 1) == Rule.OVER_BUDGET
