"""Random programs under random budgets and policies: what they compute is what plain code computes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Any, final

from hypothesis import event, given, settings
from hypothesis import strategies as st

from spillway.errors import BudgetInfeasible, SpillFullError
from spillway.memory.budget import UNLIMITED
from spillway.memory.records import EXACT, HERE, NEVER, SCAFFOLD
from spillway.methods.base import AbstractPolicy, Candidate, Copy, Drop, Fetch, MemoryView, Move, Proposal, Recall
from spillway.methods.delta import Delta
from spillway.methods.dtr import DTR, HEURISTICS
from spillway.methods.keep_all import KeepAll
from spillway.methods.lru import LRU
from spillway.units import Bytes
from tests.pure.cells import ITEM, Op, OpFailed
from tests.pure.memory_machine import Plain, Program, audit
from tests.pure.small_programs import Eager

Action = tuple[str, tuple[Any, ...]]
"""A method of `Program` and `Plain`, and what it is given."""

BETWEEN_STEPS = ("source", "poke", "begin_step")
"""Actions before which room was not made yet."""

FALLIBLE = ("run", "page_out", "page_in", "start_out", "start_in", "settle")
"""What a machine does that can go wrong; everything else only exchanges pointers."""


@final
class Adversary(AbstractPolicy):
    """Proposes anything that it has ever seen, asks everything, leaves walks unfinished and gives up at any moment."""

    name = "adversary"

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._seen: dict[Candidate, None] = {}
        self._unfinished: Iterator[Candidate] = iter(())

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        self._seen.update(dict.fromkeys(view.candidates()))
        self._unfinished = view.candidates()
        next(self._unfinished, None)
        for _ in range(self._random.randrange(12) if self._seen else 0):
            storage = self._random.choice(list(self._seen))
            assert (view.chain(storage) is None) == (view.recompute_seconds(storage) == inf)
            assert view.transfer_seconds(storage) >= 0
            yield Drop(storage) if self._random.random() < 0.7 else Move(storage)


@final
class Foreseeing(AbstractPolicy):
    """An adversary that begins copies of anything, in and out, before every op, and recomputes what it moved."""

    name = "foreseeing"
    foresees = True
    recalls = True

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._adversary = Adversary(seed)
        self._seen: dict[Candidate, None] = {}

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        yield from self._adversary.relieve(view, needed)

    def bring_back(self, view: MemoryView, storage: Candidate) -> Recall:
        assert view.recompute_seconds(storage) <= view.recompute_seconds_at_worst(storage)
        return self._random.choice([Recall.RECOMPUTE, Recall.RECOMPUTE, Recall.RELOAD])

    def foresee(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        present, moved = list(view.candidates()), list(view.moved())
        self._seen.update(dict.fromkeys((*present, *moved)))
        assert set(view.due()) <= set(moved)
        assert view.arriving * ITEM <= view.resident
        for _ in range(self._random.randrange(5)):
            kind = self._random.choices([Copy, Fetch, Move, Drop], [4, 4, 2, 1])[0]
            likely = moved if kind is Fetch else present
            among = likely if likely and self._random.random() < 0.9 else list(self._seen)
            if among:
                yield kind(self._random.choice(among))


@final
class Recalling(AbstractPolicy):
    """Moves everything, and recomputes all that it may."""

    name = "recalling"
    recalls = True

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        for storage in view.candidates():
            yield Move(storage)

    def bring_back(self, view: MemoryView, storage: Candidate) -> Recall:
        return Recall.RECOMPUTE


POLICIES: dict[str, Callable[[int], AbstractPolicy]] = {
    "move only": lambda seed: LRU(short_chain=0),
    "lru": lambda seed: LRU(),
    "recompute first": lambda seed: LRU(short_chain=UNLIMITED, worth=inf),
    "drop whatever there is": lambda seed: Eager(),
    "keep-all": lambda seed: KeepAll(),
    "adversary": Adversary,
    "foreseeing": Foreseeing,
    "recalling": lambda seed: Recalling(),
    "delta": lambda seed: Delta(early=0.1, enough=1.0, spare=1.0),
    "delta as published": lambda seed: Delta.as_published(),
    **{name: (lambda seed, name=name: DTR(name)) for name in HEURISTICS},
}


@final
class Author:
    """Writes a valid program: every name that it uses exists, and nothing reads what was never filled."""

    def __init__(self, draw: st.DrawFn, *, tame: bool) -> None:
        self._draw = draw
        self._names: list[str] = []
        self._escaped: list[str] = []
        self._made = 0
        self._tame = tame
        self.actions: list[Action] = []

    def program(self) -> list[Action]:
        for _ in range(self._draw(st.integers(1, 3))):
            self._between_steps()
            self._act("begin_step")
            for _ in range(self._draw(st.integers(0, 24))):
                self._draw(st.sampled_from(self._kinds()))()
            self._act("end_step")
        self._between_steps()
        return self.actions

    def _kinds(self) -> list[Callable[[], None]]:
        if not self._names:
            return [self._make]
        often = [self._make] * 5 + [self._write, self._read, self._free] * 2
        seldom = [self._fill, self._normalise, self._view, self._make_once]
        wild = [] if self._tame else [self._reveal, self._fail]
        return often + seldom + wild + ([self._scribble] * 2 if self._escaped else [])

    def _between_steps(self) -> None:
        for _ in range(self._draw(st.integers(0 if self._names else 1, 3))):
            items = self._draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
            nbytes = None if self._tame else self._draw(st.sampled_from([None, None, None, 100]))
            self._act("source", self._new_name(), items, nbytes)
        for name in self._draw(st.lists(st.sampled_from(self._names), max_size=3)):
            self._act("poke", name, self._draw(st.integers(100, 199)))

    def _act(self, method: str, *args: Any) -> None:
        self.actions.append((method, args))

    def _new_name(self) -> str:
        self._made += 1
        self._names.append(f"n{self._made}")
        return self._names[-1]

    def _some(self, most: int = 3) -> list[str]:
        return self._draw(st.lists(st.sampled_from(self._names), min_size=1, max_size=most)) if self._names else []

    def _op(self, reads: Sequence[str], op: Op, statistics: str = "") -> None:
        created = [self._new_name() for _ in op.creates]
        self._act("run", replace(op, name=f"op{len(self.actions)}"), " ".join(reads), " ".join(created), statistics)

    def _sizes(self) -> tuple[int, ...]:
        return tuple(self._draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))

    def _make(self) -> None:
        self._op(self._some(), Op(name="", creates=self._sizes(), seeded=self._draw(st.booleans())))

    def _make_once(self) -> None:
        self._op(self._some(), Op(name="", creates=self._sizes(), exactness=NEVER))

    def _write(self) -> None:
        reads = self._some()
        writes = tuple(sorted(self._draw(st.sets(st.integers(0, len(reads) - 1), min_size=1))))
        creates = self._sizes() if self._draw(st.booleans()) else ()
        exactness = self._draw(st.sampled_from([EXACT, EXACT, EXACT, NEVER]))
        self._op(reads, Op(name="", creates=creates, writes=writes, seeded=True, exactness=exactness))

    def _fill(self) -> None:
        reads = self._some(2)
        self._op([], Op(name="", creates=(self._draw(st.integers(1, 2)),), exactness=SCAFFOLD))
        self._op([self._names[-1], *reads], Op(name="", writes=(0,), fills=True))

    def _normalise(self) -> None:
        self._op(self._some(2), Op(name="", creates=(1,)), statistics=self._some(1)[0])

    def _fail(self) -> None:
        self._op(self._some(), Op(name="", writes=(0,), fails=True))

    def _read(self) -> None:
        self._act("read", self._some(1)[0])

    def _view(self) -> None:
        of = self._some(1)[0]
        self._act("view", self._new_name(), of)

    def _free(self) -> None:
        name = self._some(1)[0]
        self._names.remove(name)
        self._escaped = [other for other in self._escaped if other != name]
        self._act("free", name)

    def _reveal(self) -> None:
        name, by_address = self._some(1)[0], self._draw(st.integers(0, 2)) == 0
        self._act("reveal", name, by_address)
        self._escaped += [name] * by_address

    def _scribble(self) -> None:
        self._act("poke", self._draw(st.sampled_from(self._escaped)), self._draw(st.integers(200, 299)))


@st.composite
def programs(draw: st.DrawFn, *, tame: bool = False) -> list[Action]:
    """A random program; a tame one keeps to what can leave memory and to ops that succeed."""
    return Author(draw, tame=tame).program()


def outcome(target: Program | Plain, action: Action) -> Any:
    method, args = action
    try:
        return getattr(target, method)(*args)
    except OpFailed as error:
        return str(error)


def run_beside(program: Program, plain: Plain, actions: Sequence[Action]) -> None:
    """Run both, action by action; every read and every failure is the same, and the account is right all the time."""
    for action in actions:
        got = outcome(program, action)
        audit(program)
        assert got == outcome(plain, action), f"{action} gave something else"
        assert program.machine.peak == program.controller.budget.peak, f"{action} had another peak"
        assert program.machine.peak <= program.controller.budget.allowed or action[0] in BETWEEN_STEPS


def ends_well(program: Program, plain: Plain) -> None:
    """Everything is right, and whoever leaves last leaves nothing behind."""
    audit(program)
    assert not program.controller.dropped
    assert {name: program.look(name) for name in program.names} == plain.names
    assert all(value.recipe is None for value in map(program.__getitem__, program.names))
    for name in list(program.names):
        program.free(name)
    audit(program)
    assert (program.controller.budget.resident, program.machine.homes) == (0, set())


def largest_op(actions: Sequence[Action]) -> Bytes:
    """Bytes of what one op uses and creates, at most."""
    plain, most = Plain(), 0
    for action in actions:
        method, args = action
        if method in ("run", "read"):
            names = " ".join((args[1], args[3])) if method == "run" else args[0]
            used = {id(plain.names[name]): len(plain.names[name]) for name in names.split()}
            most = max(most, sum(used.values()) + (sum(args[0].creates) if method == "run" else 0))
        outcome(plain, action)
    return most * ITEM


@settings(max_examples=250)
@given(
    actions=programs(),
    spare=st.integers(-2, 4),
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1 << 16),
    chain_cap=st.sampled_from([1, 3, 32, 1 << 30]),
    tier_bytes=st.sampled_from([UNLIMITED, UNLIMITED, UNLIMITED, 0, 4 * ITEM]),
)
def test_a_managed_program_computes_what_plain_code_computes_or_is_refused_with_nothing_lost(
    actions: list[Action], spare: int, policy: str, seed: int, chain_cap: int, tier_bytes: Bytes
) -> None:
    allowed = largest_op(actions) + spare * ITEM
    program = Program(allowed, POLICIES[policy](seed), chain_cap=chain_cap, tier_bytes=tier_bytes)
    plain = Plain()
    error = refusal(lambda: run_beside(program, plain, actions))
    event(f"{type(error).__name__}, {'with' if program.machine.replayed else 'without'} replays")
    event(f"recalls: {program.controller.counters.recalls > 0}")
    audit(program)
    if isinstance(error, BudgetInfeasible):
        assert error.allowed == allowed < error.needed <= error.smallest_budget
    if isinstance(error, SpillFullError):
        assert tier_bytes < UNLIMITED
    if error is not None:
        refusal(program.end_step)
    ends_well(program, plain)


@settings(max_examples=150)
@given(
    actions=programs(),
    spare=st.integers(0, 6),
    seed=st.integers(0, 1 << 16),
    tier_bytes=st.sampled_from([UNLIMITED, UNLIMITED, 4 * ITEM]),
)
def test_copies_that_run_beside_the_program_change_nothing(
    actions: list[Action], spare: int, seed: int, tier_bytes: Bytes
) -> None:
    allowed = largest_op(actions) + spare * ITEM
    program, plain = Program(allowed, Foreseeing(seed), tier_bytes=tier_bytes), Plain()
    error = refusal(lambda: run_beside(program, plain, actions))
    event(f"{type(error).__name__}, {min(len(program.machine.flights), 3)} kinds of flights")
    if isinstance(error, BudgetInfeasible):
        assert error.allowed == allowed < error.needed <= error.smallest_budget
    if error is not None:
        refusal(program.end_step)
    ends_well(program, plain)


def refusal(act: Callable[[], object]) -> BudgetInfeasible | SpillFullError | None:
    """How `act` was refused, without the frames that would keep what it worked on alive; None if it was not."""
    try:
        act()
    except (BudgetInfeasible, SpillFullError) as error:
        return error.with_traceback(None)
    return None


@settings(max_examples=120)
@given(
    actions=programs(tame=True),
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1 << 16),
    chain_cap=st.sampled_from([1, 3, 32, 1 << 30]),
)
def test_a_budget_that_holds_the_largest_op_is_enough_and_one_byte_less_is_not(
    actions: list[Action], policy: str, seed: int, chain_cap: int
) -> None:
    allowed = largest_op(actions)
    program, plain = Program(allowed, POLICIES[policy](seed), chain_cap=chain_cap), Plain()
    run_beside(program, plain, actions)
    ends_well(program, plain)
    if allowed > 0:
        smaller = Program(allowed - 1, POLICIES[policy](seed), chain_cap=chain_cap)
        error = refusal(lambda: run_alone(smaller, actions))
        assert isinstance(error, BudgetInfeasible)
        assert error.smallest_budget == allowed


def run_alone(program: Program, actions: Sequence[Action]) -> None:
    for action in actions:
        outcome(program, action)


@settings(max_examples=120)
@given(
    actions=programs(),
    spare=st.integers(-6, 2),
    policy=st.sampled_from(sorted(POLICIES)),
    other=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1 << 16),
)
def test_no_budget_below_the_smallest_of_a_refusal_works_for_any_policy(
    actions: list[Action], spare: int, policy: str, other: str, seed: int
) -> None:
    program = Program(largest_op(actions) + spare * ITEM, POLICIES[policy](seed))
    error = refusal(lambda: run_alone(program, actions))
    if isinstance(error, BudgetInfeasible):
        smaller = Program(error.smallest_budget - 1, POLICIES[other](seed))
        assert refusal(lambda: run_alone(smaller, actions)) is not None


@settings(max_examples=100)
@given(actions=programs(), seed=st.integers(0, 1 << 16), stops=st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_an_exception_at_any_moment_leaves_every_account_right_and_every_content_where_it_was(
    actions: list[Action], seed: int, stops: list[int]
) -> None:
    program, plain = Program(largest_op(actions) + ITEM, Foreseeing(seed)), Plain()
    count = 0

    def interrupt(action: str) -> None:
        nonlocal count
        program.check_account(action)
        count += action in FALLIBLE
        if action in FALLIBLE and count in stops:
            raise KeyboardInterrupt

    program.machine.before = interrupt
    try:
        refusal(lambda: run_beside(program, plain, actions))
    except KeyboardInterrupt:
        event("interrupted")
    program.machine.before = program.check_account
    audit(program)
    refusal(program.end_step)
    ends_well(program, plain)


@settings(max_examples=50)
@given(actions=programs(), seed=st.integers(0, 1 << 16))
def test_after_closing_every_byte_is_in_memory_again(actions: list[Action], seed: int) -> None:
    program, plain = Program(largest_op(actions) + ITEM, Foreseeing(seed)), Plain()
    refusal(lambda: run_beside(program, plain, actions[:-1]))
    program.controller.restore_all(list(program.names.values()))
    assert all(program[name].absent == HERE for name in program.names)
    assert {name: program.look(name) for name in program.names} == plain.names
