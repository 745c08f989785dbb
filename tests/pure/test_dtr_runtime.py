"""DTR by its own rules: each rule on a log of a few lines, its fast costs against slow ones, and its published runs."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, final

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from papers.dtr import runtime
from papers.dtr.costs import AbstractCost, Classes, Neighbourhood
from papers.dtr.program import Event, Program, program_of
from papers.dtr.runtime import HEURISTICS, Heuristic, Outcome, run_dtr
from spillway.errors import FileFormatError, UsageError
from spillway.ir.dtr_log import (
    Annotate,
    Call,
    Constant,
    Copy,
    CopyFrom,
    Instruction,
    Mutate,
    Release,
    Result,
    read_dtr_log,
)
from tests.shared import shared

PLENTY = 1 << 40

PUBLISHED = {"U-Net (6)": "unet", "ResNet-32 (56)": "resnet32"}
THEIR_NAMES = {
    "dtr": "DTR", "dtr-eqclass": "DTREqClass", "dtr-local": "DTRLocal", "lru": "LRU", "largest": "LargestStorage",
    "msps": "MSPS",
}  # fmt: skip


def constant(name: str, nbytes: int = 10) -> Instruction:
    return Constant(line=1, name=name, nbytes=nbytes)


def call(args: str, results: str, nanoseconds: int = 1, nbytes: int = 10, alias: int | None = None) -> Instruction:
    made = tuple(Result(name=name, nbytes=nbytes, alias=alias) for name in results.split())
    return Call(line=1, operator="op", args=tuple(args.split()), results=made, nanoseconds=nanoseconds)


def release(name: str) -> Instruction:
    return Release(line=1, name=name)


def ran(
    log: Sequence[Instruction], allowed: int = PLENTY, heuristic: str = "dtr-local", limit: float = 100.0
) -> Outcome:
    return run_dtr(program_of(log), heuristic, allowed, limit)


def chain(*names: str) -> list[Instruction]:
    """A constant w, and each name made from the one before; all are there in the end."""
    return [constant("w"), *(call(before, after) for before, after in zip(("w", *names), names, strict=False))]


# ---------------------------------------------------------------------- what a log says


def test_a_program_runs_gets_releases_and_pins_in_the_order_of_the_log() -> None:
    copies = [Copy(line=1, source="w", destination="v"), CopyFrom(line=1, source="a", destination="v")]
    program = program_of([Annotate(line=1, text="START"), constant("w", 8), call("w w", "a b", 5), *copies])
    assert program.events == (
        (Event.RUN, 0), (Event.PIN, 0), (Event.RUN, 1), (Event.GET, 0), (Event.RELEASE, 0), (Event.GET, 1),
        (Event.PIN, 0), (Event.PIN, 1), (Event.PIN, 2), (Event.PIN, 1),
    )  # fmt: skip
    assert (program.operators[1].reads, program.operators[1].creates) == ((0, 0), (1, 2))
    assert (program.storages, program.nanoseconds, program.operators[1].nbytes) == ((8, 10, 10), 5, 20)


def test_what_stands_before_the_start_is_left_out_and_unknown_releases_are_passed_over() -> None:
    log = [constant("before"), Annotate(line=2, text="START"), constant("w"), release("before"), release("w")]
    assert program_of(log).events == ((Event.RUN, 0), (Event.PIN, 0), (Event.RELEASE, 0))


def test_a_mutation_makes_a_new_storage_as_large_as_the_whole_one_under_a_view() -> None:
    mutate = Mutate(line=1, operator="add_", args=("v", "w"), mutated=(0,), nanoseconds=3)
    program = program_of([constant("w", 8), call("w", "a", nbytes=64), call("a", "v", nbytes=16, alias=0), mutate])
    assert program.storages == (8, 64, 64)
    assert program.operators[3].reads == (2, 0)
    assert program.tensors[2].storage == 1
    assert program.tensors[3].storage == 2
    assert program.events[-3:] == ((Event.PIN, 0), (Event.PIN, 1), (Event.PIN, 3)), "v has moved on"


@pytest.mark.parametrize("wrong", [call("nobody", "a"), constant("w"), Copy(line=1, source="w", destination="w")])
def test_a_name_that_is_unknown_or_given_twice_is_an_error_of_the_log(wrong: Instruction) -> None:
    with pytest.raises(FileFormatError, match=r"is not known here|is named a second time"):
        program_of([constant("w"), wrong])


# ---------------------------------------------------------------------- the rules


def test_with_plenty_of_room_nothing_is_recomputed_and_the_peak_is_what_there_was() -> None:
    done = ran([*chain("a", "b", "c"), release("a")])
    assert (done.status, done.recomputed_nanoseconds, done.evictions, done.peak) == ("ok", 0, 0, 40)
    assert (done.nanoseconds, done.overhead) == (4, 4 / 3), "their clock begins at 1"


def test_rule_1_a_view_leaves_with_its_storage_and_is_made_again_by_its_own_operator() -> None:
    # b pushes a out; the view needs a again (5 ns) and then itself (1 ns).
    log = [constant("w"), call("w", "a", 5), call("a", "v", 1, alias=0), call("w", "b", 1), call("w", "c", 1)]
    log += [release("b"), release("c"), call("v", "d", 1)]
    done = ran(log, 40, "lru")
    assert (done.status, done.recomputed_nanoseconds) == ("ok", 0)
    done = ran(log, 30, "lru")
    assert done.status == "ok"
    assert done.recomputed_nanoseconds == 6 + 0
    assert ran(log, 20, "lru").status == "oom", "w is pinned, and two more have to be there"


def test_rule_2_constants_and_what_is_read_stay() -> None:
    assert ran([constant("w"), call("w", "a")], 19).status == "oom"
    assert ran([constant("w"), call("w", "a"), release("a"), call("w", "b")], 20).status == "ok"
    assert ran([*chain("a", "b"), release("a"), release("b")], 29).status == "oom", "a is read while b is made"


def test_rule_3_what_nobody_refers_to_is_evicted_at_once_and_recomputed_when_it_is_needed() -> None:
    log = [*chain("a", "b", "c"), release("a"), release("b")]
    assert ran(log).peak == 40
    log = [*chain("a"), call("a", "b"), release("a"), call("b", "c"), call("w", "d"), release("b")]
    # b is evicted for d and not wanted in the end. c is evicted for nobody.
    done = ran(log, 40)
    assert (done.status, done.peak, done.recomputed_nanoseconds) == ("ok", 40, 0)


def test_rule_3_a_dead_storage_is_recomputed_for_one_that_is_wanted_in_the_end() -> None:
    log = [*chain("a", "b"), release("a"), call("w", "c"), call("w", "d"), release("d"), release("c")]
    done = ran(log, 30, "lru")
    assert (done.status, done.recomputed_nanoseconds) == ("ok", 2), "a and then b"


def test_rule_4_an_operator_makes_all_of_its_results_again_and_gives_back_those_that_are_there() -> None:
    log = [constant("w"), call("w", "a b", 2), call("w", "c", 1, nbytes=20), release("c")]
    done = ran(log, 40, "lru")
    # One of the two left for c. Making it again takes 20 bytes beside the one that stayed.
    assert (done.status, done.evictions, done.recomputed_nanoseconds, done.peak) == ("ok", 1, 2, 40)


def test_rule_5_of_equal_scores_the_one_that_came_into_the_pool_last_leaves() -> None:
    log = [constant("w"), call("w", "a"), call("w", "b"), call("w", "c", nbytes=10), release("c")]
    for first, wanted in (("a", 0), ("b", 1)):
        last = "b" if first == "a" else "a"
        done = ran([*log, release(last)], 30, "largest")
        assert done.recomputed_nanoseconds == wanted, f"b left for c; {first} is wanted in the end"


@pytest.mark.parametrize(("nanoseconds", "looks"), [(0, 1), (1, 3)])
def test_rule_5_the_first_score_of_0_ends_the_search(nanoseconds: int, looks: int) -> None:
    log = [constant("w"), *(call("w", name, nanoseconds) for name in "abc"), call("w", "d"), *map(release, "abcd")]
    done = ran(log, 40, "msps")
    assert (done.status, done.evictions, done.looks) == ("ok", 1, looks)


def test_rule_7_a_run_that_recomputes_for_longer_than_the_limit_is_given_up() -> None:
    log = [*chain("a", "b"), release("a"), call("w", "c"), call("w", "d"), release("d"), release("c")]
    assert ran(log, 30, "lru", 0.5).status == "ok"
    assert ran(log, 30, "lru", 0.49).status == "thrash"


def test_a_heuristic_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^DTR has no heuristic 'best'; choose one of dtr, dtr-eqclass"):
        ran(chain("a"), heuristic="best")


# ---------------------------------------------------------------------- fast costs against slow ones


class Slow(AbstractCost):
    """Looks at the whole graph after everything that happens."""

    def __init__(self, storages: int) -> None:
        super().__init__(storages)
        self.least = [0] * storages
        self.edges: set[tuple[int, int]] = set()
        self.absent: set[int] = set()

    def appeared(self, storage: int) -> None:
        self.absent.add(storage)

    def grew(self, storage: int, nanoseconds: int) -> None:
        super().grew(storage, nanoseconds)
        self.look()

    def joined(self, parent: int, child: int) -> None:
        self.edges.add((parent, child))

    def evicted(self, storage: int) -> None:
        self.absent.add(storage)
        self.look()

    def came(self, storages: Iterable[int]) -> None:
        self.absent -= set(storages)
        self.look()

    def look(self) -> None:
        for storage in range(len(self.own)):
            self.least[storage] = self.own[storage] + self.around(storage)

    def of(self, storage: int) -> int:
        return self.least[storage]

    def around(self, storage: int) -> int:
        raise NotImplementedError

    def reached(self, storage: int, edges: set[tuple[int, int]]) -> set[int]:
        found: set[int] = set()
        while more := {b for a, b in edges if (a == storage or a in found) and b in self.absent} - found:
            found |= more
        return found - {storage}


@final
class SlowNeighbourhood(Slow):
    def around(self, storage: int) -> int:
        return sum(self.own[s] for way in self.ways() for s in self.reached(storage, way))

    def ways(self) -> list[set[tuple[int, int]]]:
        return [self.edges, {(b, a) for a, b in self.edges}]


@final
class SlowClasses(Slow):
    """Classes as plain lists of sets, and their sums as they were told."""

    def __init__(self, storages: int) -> None:
        super().__init__(storages)
        self.classes: list[tuple[set[int], list[int]]] = []

    def appeared(self, storage: int) -> None:
        super().appeared(storage)
        self.classes.append(({storage}, []))

    def evicted(self, storage: int) -> None:
        near = {b for a, b in self.edges if a == storage} | {a for a, b in self.edges if b == storage}
        touching = [group for group in self.classes if group[0] & near]
        self.classes = [group for group in self.classes if not group[0] & near]
        members = {storage}.union(*(group[0] for group in touching))
        self.classes.append((members, [self.own[storage], *(cost for _, costs in touching for cost in costs)]))
        super().evicted(storage)

    def came(self, storages: Iterable[int]) -> None:
        for storage in storages:
            (group,) = (group for group in self.classes if storage in group[0])
            group[0].discard(storage)
            group[1].append(-self.own[storage])
        super().came(storages)

    def around(self, storage: int) -> int:
        near = {b for a, b in self.edges if a == storage} | {a for a, b in self.edges if b == storage}
        return sum(sum(costs) for members, costs in self.classes if members & near)


@st.composite
def logs(draw: st.DrawFn) -> list[Instruction]:
    """A random log, in which views may look into one argument and read others beside it."""
    names, log = ["w"], [constant("w")]
    for number in range(draw(st.integers(3, 24))):
        args = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        made = [f"n{number}", f"m{number}"][: draw(st.integers(1, 2))]
        alias = draw(st.sampled_from([None, None, None, 0]))
        log.append(
            call(" ".join(args), " ".join(made), draw(st.integers(0, 9)), draw(st.sampled_from([0, 5, 10, 10])), alias)
        )
        names += made
        if draw(st.booleans()):
            log.append(Mutate(line=1, operator="x_", args=(names[-1], "w"), mutated=(0,), nanoseconds=number))
        for gone in draw(st.lists(st.sampled_from(names), max_size=2, unique=True)):
            if gone != "w":
                names.remove(gone)
                log.append(release(gone))
    return log


@pytest.mark.parametrize(("name", "slow"), [("dtr", SlowNeighbourhood), ("dtr-eqclass", SlowClasses)])
@settings(max_examples=60, deadline=None)
@given(log=logs(), share=st.floats(0.3, 1.0))
def test_what_is_chosen_by_fast_costs_is_what_is_chosen_by_looking_at_everything(
    name: str, slow: type[Slow], log: list[Instruction], share: float
) -> None:
    program = program_of(log)
    allowed = int(run_dtr(program, "lru", PLENTY).peak * share)
    fast = run_dtr(program, name, allowed)
    slowly = runtime._Runtime(program, Heuristic(cost=slow), allowed, 1.0).run()
    event(f"{fast.status}, {'with' if fast.evictions else 'without'} evictions")
    assert fast == slowly


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_costs_on_random_graphs_are_those_of_looking_at_everything(data: st.DataObject) -> None:
    pairs: list[tuple[AbstractCost, Slow]] = [
        (Neighbourhood(12), SlowNeighbourhood(12)), (Classes(12), SlowClasses(12)),
    ]  # fmt: skip
    absent: set[int] = set()

    def tell(what: str, *args: Any) -> None:
        for cost in itertools.chain(*pairs):
            getattr(cost, what)(*args)

    for storage in range(data.draw(st.integers(2, 12))):
        parents = data.draw(st.sets(st.integers(0, storage - 1), max_size=3)) if storage else set()
        tell("appeared", storage)
        tell("grew", storage, data.draw(st.integers(0, 9)))
        for parent in parents:
            tell("joined", parent, storage)
        tell("came", [storage])
        for other in data.draw(st.lists(st.integers(0, storage), max_size=3)):
            tell(*(("came", [other]) if other in absent else ("evicted", other)))
            absent ^= {other}
            for fast, slow in pairs:
                present = sorted(set(range(storage + 1)) - absent)
                assert [fast.of(one) for one in present] == [slow.of(one) for one in present]


# ---------------------------------------------------------------------- the published runs


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    archive = shared("data/dtr/logs.zip")
    return {model: program_of(read_dtr_log(f"{archive}:{log}")) for model, log in PUBLISHED.items()}


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_published_runs_are_the_same_to_the_nanosecond_and_to_the_byte(
    heuristic: str, programs: dict[str, Program]
) -> None:
    with shared("data/dtr/reference_runs.csv").open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["heuristic"] == THEIR_NAMES[heuristic]]
    rows = [row for row in rows if row["model"] in programs and float(row["ratio"]) in (0.9, 0.5, 0.4, 0.3)]
    assert len(rows) >= 4
    for row in rows:
        done = run_dtr(programs[row["model"]], heuristic, int(row["budget_bytes"]))
        found = (done.status, done.recomputed_nanoseconds, done.peak, done.looks, repr(done.overhead))
        expected = (row["remat_ns"], row["max_memory_bytes"], row["heuristic_evals"])
        assert found == (row["status"], *map(int, expected), row["overhead"]), row
