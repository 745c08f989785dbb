"""Checkmate's bound against the optimum of small random steps, found by trying every schedule; drafts against both."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from itertools import count
from math import inf

import pytest

from spillway.calibration.named_device import device_of
from spillway.errors import BudgetInfeasible, NoPlanFound
from spillway.ir import Kind, Op, Phase, Recompute, Step, StorageInfo, Value, verify
from spillway.ir.account import account
from spillway.ir.lives import lives_of
from spillway.methods import LRU, Checkmate, Planned, Problem
from spillway.methods.base import Absence
from spillway.methods.checkmate import cut as cut_module
from spillway.methods.checkmate import lower_bound, seconds_of
from spillway.methods.checkmate.cut import cuts
from spillway.methods.checkmate.draft import Draft
from spillway.simulation.simulated_engine import simulate
from tests.pure.linear_graphs import linear_step
from tests.pure.training_steps import Recorder

DEVICE = device_of("a100")


def random_step(seed: int, ops_count: int = 7) -> Step:
    """Ops that read one or two values and make one, at times in place of what they read, which may outlive the step."""
    draw = random.Random(seed)
    sizes, versions, current = [draw.randint(1, 3)], [0], [0]
    values, reads_of, creates_of = [(0, 0)], list[tuple[int, ...]](), list[tuple[int, ...]]()
    for _ in range(ops_count):
        reads = tuple(sorted({draw.choice(current[-5:]), draw.choice(current[-2:])}))
        storage = values[draw.choice(reads)][0]
        if draw.random() < 0.2 and storage:
            versions[storage] += 1
        else:
            storage = len(sizes)
            sizes.append(draw.randint(1, 4))
            versions.append(0)
            current.append(-1)
        current[storage] = len(values)
        values.append((storage, versions[storage]))
        reads_of.append(reads)
        creates_of.append((len(values) - 1,))
    ends = {storage for storage in range(1, len(sizes)) if draw.random() < 0.2} | {0}
    ops = tuple(
        Op(
            number=number, name="op", phase=Phase.FORWARD, reads=reads, creates=creates,
            seconds=draw.randint(1, 5) * 1.0, replayable=draw.random() < 0.9,
        )
        for number, (reads, creates) in enumerate(zip(reads_of, creates_of, strict=True))
    )  # fmt: skip
    touched: dict[int, list[int]] = {}
    for op in ops:
        for value in (*op.reads, *op.creates):
            touched.setdefault(values[value][0], []).append(op.number)
    storages = tuple(
        StorageInfo(
            id=storage, nbytes=nbytes, kind=Kind.ACTIVATION,
            alive_from=0 if not storage else touched[storage][0],
            alive_until=ops_count if storage in ends else touched[storage][-1] + 1,
            present_at_start=not storage, present_at_end=storage in ends,
        )
        for storage, nbytes in enumerate(sizes)
    )  # fmt: skip
    named = tuple(Value(id=number, storage=storage, version=version)
                  for number, (storage, version) in enumerate(values))  # fmt: skip
    return Step(storages=storages, values=named, ops=ops)


def optimum(step: Step, allowed: int) -> float:
    """Seconds of the fastest schedule within the budget that runs ops again and moves nothing; infinite if there is
    none. Dijkstra's algorithm over how many ops have run and which contents are there."""
    lives, numbers = lives_of(step), count()
    sizes = [step.storages[value.storage].nbytes for value in step.values]
    lasting = {value.storage: value.id for value in step.values}
    outlive = {value for storage, value in lasting.items() if step.storages[storage].present_at_end}
    start = frozenset(value.id for value in step.values if lives[value.id].created < 0)
    heap, best = [(0.0, next(numbers), 0, start)], {(0, start): 0.0}
    while heap:
        seconds, _, done, there = heapq.heappop(heap)
        if best[done, there] < seconds:
            continue
        if done == len(step.ops) and outlive <= there:
            return seconds
        found = [(0.0, done, there - {value}) for value in there]
        for op in step.ops[: done + 1]:
            if not set(op.reads) <= there or (op.number < done and not op.replayable):
                continue
            first = op.number == done
            # An op that writes in place does so to what it reads, or to a copy, which takes room of its own.
            for in_place in (True, False):
                old = {lives_value for made in op.creates for lives_value in there
                       if step.values[lives_value].storage == step.values[made].storage
                       and step.values[lives_value].version == step.values[made].version - 1}  # fmt: skip
                kept = there - old if in_place else there
                after = kept | set(op.creates)
                if sum(sizes[value] for value in after) <= allowed:
                    found.append((op.seconds or 0.0, done + first, after))
        for more, ran, now in found:
            if seconds + more < best.get((ran, now), inf):
                best[ran, now] = seconds + more
                heapq.heappush(heap, (seconds + more, next(numbers), ran, now))
    return inf


def bound(step: Step, allowed: int) -> float:
    try:
        return lower_bound(Problem(step=step, allowed=allowed, device=DEVICE))
    except BudgetInfeasible:
        return inf


def tried(seeds: range) -> list[tuple[int, Step, int, float]]:
    """Steps under budgets between their plain peak and what no schedule keeps to, and the optimum."""
    found = []
    for seed in seeds:
        step = random_step(seed)
        for allowed in range(step.plain_peak() - 1, 2, -2):
            best = optimum(step, allowed)
            found.append((seed, step, allowed, best))
            if best == inf:
                break
    return found


def test_the_bound_never_exceeds_the_optimum_and_often_is_it() -> None:
    exact = more = 0
    for seed, step, allowed, best in tried(range(60)):
        found = bound(step, allowed)
        assert found <= best * (1 + 1e-6), (seed, allowed)
        plain = sum(op.seconds or 0.0 for op in step.ops)
        more += plain < found < inf
        exact += best < inf and found == pytest.approx(best)
    assert more > 10
    assert exact > 20


def test_an_op_behind_which_nothing_is_wanted_is_judged_by_its_bytes() -> None:
    recorder = Recorder()
    recorder.op("held", Phase.FORWARD, [], [8])
    recorder.op("drawn", Phase.FORWARD, [], [8])
    step = recorder.step()
    step = replace(step, storages=tuple(replace(one, alive_until=2) for one in step.storages))
    for allowed, found in ((16, 2.0), (15, 2.0), (8, 2.0), (7, inf)):
        assert bound(step, allowed) == found == optimum(step, allowed)


@pytest.mark.parametrize("fault", ["given", "needed"])
def test_a_bound_that_asks_for_too_much_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the test before fails on planted faults: bytes that count twice, and a value that has to be made
    again although nobody wants it."""
    memory, correct = cut_module._Program._memory, cut_module._Program._correct

    def twice(self: cut_module._Program) -> None:
        memory(self)
        self._program._factors = [1.5 * factor for factor in self._program._factors]  # of the only row as yet

    def all_again(self: cut_module._Program) -> None:
        correct(self)
        for one in list(self._run.values())[:1]:
            self._program.row((one, 1.0), least=1.0)

    monkeypatch.setattr(cut_module._Program, *(("_memory", twice) if fault == "given" else ("_correct", all_again)))
    assert any(bound(step, allowed) > best * (1 + 1e-6) for _, step, allowed, best in tried(range(60)))


def test_plans_are_never_better_than_the_optimum_and_often_are_it() -> None:
    planned = optimal = 0
    for _, step, allowed, best in tried(range(45)):
        try:
            plan = Checkmate(time_limit=5, most_nodes=0).plan(Problem(step=step, allowed=allowed, device=DEVICE))
        except (BudgetInfeasible, NoPlanFound):
            continue
        verify(plan, step, allowed)
        seconds = seconds_of(step, lives_of(step), plan.gaps)
        assert seconds >= best * (1 - 1e-6)
        planned += 1
        optimal += seconds == pytest.approx(best)
    assert planned > 15
    assert optimal > 0.4 * planned, (optimal, planned)


def test_a_draft_counts_as_the_account_does_and_takes_back_what_it_did() -> None:
    draw = random.Random(3)
    step = linear_step(12)
    lives, allowed = lives_of(step), 8 << 20
    draft = Draft(step, lives, allowed)
    for _ in range(60):
        mark, before = draft.mark(), (draft.seconds, draft.excess(), draft.gaps())
        number = draw.randrange(len(draft.idle))
        one = draft.idle[number]
        end = draw.choice([None, one.end, draw.randint(one.start + 1, one.end)]) if one.start + 1 < one.end else None
        done = draft.change(number, end)
        counted = account(step, draft.gaps(), lives)
        over = [max(max(pair) - allowed, 0) for pair in zip((*counted.during, 0), counted.before, strict=True)]
        assert draft.excess() == sum(over)
        if not done or draw.random() < 0.3:
            draft.back_to(mark)
            assert (draft.seconds, draft.excess(), draft.gaps()) == (pytest.approx(before[0]), *before[1:])


def test_the_work_is_counted_and_comes_out_the_same() -> None:
    step = linear_step(30)
    problem = Problem(step=step, allowed=int(step.plain_peak() * 0.4), device=DEVICE)
    first, second = (Checkmate(time_limit=1000, most_nodes=0).plan(problem) for _ in range(2))
    assert first == second
    assert [one.bound for one in cuts(step, lives_of(step), problem.allowed)] == sorted(
        (one.bound for one in cuts(step, lives_of(step), problem.allowed)), reverse=True
    )


def test_what_no_other_method_has_gone_is_not_begun_with_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = linear_step(12)
    problem = Problem(step=step, allowed=int(step.plain_peak() * 0.6), device=DEVICE)
    begun = list[int]()
    repair = Draft.repair

    def counted(draft: Draft, most_work: int, without: int | None = None, *, in_order: bool = False) -> bool:
        if without is None:
            begun.append(len(draft.ends))
        return repair(draft, most_work, without, in_order=in_order)

    monkeypatch.setattr(Draft, "repair", counted)
    alone = Checkmate(most_nodes=0).plan(problem)
    once, begun = begun, []
    assert Checkmate(most_nodes=0, starts=[LRU, LRU]).plan(problem) == alone
    assert Checkmate(most_nodes=0, starts=[LRU]).plan(replace(problem, rehearse=lambda policy: [])) == alone
    assert begun == once * 2


@pytest.mark.parametrize("until", [0, 100])
def test_a_draft_follows_what_a_policy_left_to_die(until: int) -> None:
    step = linear_step(4)
    longer = replace(step.storages[2], alive_until=len(step.ops))  # nobody reads it any more
    step = replace(step, storages=(*step.storages[:2], longer, *step.storages[3:]))
    draft = Draft(step, lives_of(step), step.plain_peak())
    dying = {number: one for number, one in enumerate(draft.idle) if not one.back}
    # Given up as it dies, or before, and never seen again.
    draft.follow(Absence(one.value, one.start, max(until, one.start)) for one in dying.values())
    assert dying
    assert draft.ends == {number: one.end for number, one in dying.items()}


@pytest.mark.parametrize("replayable", [True, False])
def test_what_nobody_reads_again_is_dropped_where_its_recipe_outlives_it_and_moved_elsewhere(replayable: bool) -> None:
    step = linear_step(6)
    longer = replace(step.storages[3], alive_until=len(step.ops))  # read for the last time by op 10 of 13
    first = replace(step.ops[0], replayable=replayable)  # what it makes is dead by then
    step = replace(
        step, storages=(*step.storages[:3], longer, *step.storages[4:]), ops=(first, *step.ops[1:])
    )  # fmt: skip
    lives = lives_of(step)
    draft = Draft(step, lives, step.plain_peak(), move_seconds=1.0)
    number, one = next((number, one) for number, one in enumerate(draft.idle) if not one.back)
    assert draft.change(number, one.end)
    assert draft.seconds == (0.0 if replayable else one.nbytes)
    plan = Problem(step=step, allowed=step.plain_peak(), device=DEVICE).plan_with(draft.gaps(), lives)
    assert [gap.home for gap in plan.gaps] == [Recompute(ops=(0, 1, 2) if replayable else ())]
    verify(plan, step, step.plain_peak())
    ran = simulate(step, allowed=step.plain_peak(), method=Planned(plan, step), device=DEVICE, steps=1)
    assert (ran.drops, ran.moves) == ((1, 0) if replayable else (0, 1))
