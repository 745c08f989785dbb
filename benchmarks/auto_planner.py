"""Plans of `auto` against what no plan can beat, against the best of all plans, and against simpler rules; their time
and their safety. On paper: the clock of `methods/auto/simulate.py` is the judge."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final

from benchmarks import columns
from benchmarks.auto_bound import Program
from benchmarks.auto_instances import MACHINES, MODELS, SHARES, model, problem, scaled, shaken
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import BlockProblem
from spillway.methods.auto.choosing import Effort, floor, plan
from spillway.methods.auto.simulate import Clock, simulate
from spillway.methods.mimose.scheduler import select
from spillway.units import Seconds


@frozen
class Size:
    """How much is planned."""

    models: Sequence[str]
    solver_seconds: Seconds
    """For one bound, at most."""
    idle: bool
    """Whether the third tier is measured too."""
    small_blocks: int
    """Blocks of the problems of which every choice is tried, the head included."""
    random_problems: int
    times: int
    """Plans of which the median counts."""


def run(size: Size, tell: Tell) -> Result:
    """Bounds, exhaustive search, times, random problems."""
    rows: list[Row] = []
    instances: list[Mapping[str, Any]] = []
    for name in size.models:
        for device in MACHINES:
            tell(f"{name} on {device}")
            of_pair = [_instance(name, device, share, size) for share in SHARES]
            instances += of_pair
            rows.append(_row(name, device, of_pair))
    tell("every choice")
    small = [
        _exhausted(name, device, share, size)
        for name in size.models for device in MACHINES for share in SHARES[:3]
    ]  # fmt: skip
    tell("times")
    taken = {str(count): _milliseconds(count, size) for count in (24, 100)}
    tell("random problems")
    safe = _safety(size, tell)
    worst = [
        f"{one['model']} on {one['device']} at {one['share']:.2f} ({one['first_gap']:.2f} points)"
        for one in sorted(instances, key=lambda one: -one["first_gap"])[:3]
    ]
    return Result(
        title=f"plans of `auto` on paper: {len(instances)} problems with a bound, {len(small)} with every choice tried",
        columns=COLUMNS,
        rows=rows,
        facts={"small": small, "milliseconds": taken, "random": safe},
        notes=(*NOTES, f"Farthest from the bound: {'; '.join(worst)}.", _told(instances, small, safe, size)),
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", device="device"),
    *columns.ratios(phi="phi, offload", phi_selective="phi, selective"),
    *columns.shares(**{f"at_{round(100 * share)}": f"at {share:g}" for share in SHARES}),
    *columns.shares(**{f"mimose_{round(100 * share)}": f"Mimose at {share:g}" for share in SHARES}),
    *columns.shown("{:.2f}".format, mean_gap="gap, mean", worst_gap="gap, worst", polished_gap="polished, mean"),
)

NOTES: Final = (
    "At a share of the way from the least that anything fits into to the peak of keeping everything: seconds over the "
    "plain step's, as a share of them. Mimose: Algorithm 1 on recompute alone, repaired by the clock; nothing where "
    "all blocks recomputed do not fit. Gaps are points of the plain step over the dual bound of a mixed integer "
    "program (HiGHS, within a time limit), which no plan of the clock can go under. Devices are figures on paper.",
    "What `auto` is given: keep, recompute, offload, selective, and both of the recomputing ones with what they keep "
    "offloaded. The head can only be kept.",
)


def _instance(name: str, device: str, share: float, size: Size) -> Mapping[str, Any]:
    given = problem(*model(name), MACHINES[device], share)
    plain = given.plain
    first = plan(given).outcome.seconds
    polished = plan(given, effort=Effort.POLISH).outcome.seconds
    idle = plan(given, effort=Effort.IDLE).outcome.seconds if size.idle else polished
    bound = plain
    # The tighter program takes longer, and is worth it where the other leaves a gap.
    for whole in (False, True):
        if first - bound > 0.003 * plain:
            bound = max(bound, Program(given, whole=whole).bound(size.solver_seconds))
    others = {"keep": _seconds(given, [0] * len(given.blocks)), "mimose": mimose(given)}
    others |= {action.value: _seconds(given, alike(given, action)) for action in Action if not action.lossy}
    return {
        "model": name, "device": device, "share": share, "first": first / plain - 1, "bound": bound / plain - 1,
        "first_gap": 100 * (first - bound) / plain, "polish_gap": 100 * (polished - bound) / plain,
        "idle_gap": 100 * (idle - bound) / plain,
        "mimose": others["mimose"] / plain - 1 if others["mimose"] < inf else None,
        "over_others": 100 * max(first - min(others.values()), 0.0) / plain,
        "phi": _phi(given, Action.OFFLOAD), "phi_selective": _phi(given, Action.SELECTIVE_OFFLOADED),
    }  # fmt: skip


def _row(name: str, device: str, instances: Sequence[Mapping[str, Any]]) -> Row:
    shares = {f"at_{round(100 * one['share'])}": one["first"] for one in instances}
    shares |= {f"mimose_{round(100 * one['share'])}": one["mimose"] for one in instances}
    return {
        "model": name, "device": device, "phi": instances[0]["phi"], "phi_selective": instances[0]["phi_selective"],
        **shares, "mean_gap": statistics.mean(one["first_gap"] for one in instances),
        "worst_gap": max(one["first_gap"] for one in instances),
        "polished_gap": statistics.mean(one["polish_gap"] for one in instances), "instances": instances,
    }  # fmt: skip


def _phi(given: BlockProblem, action: Action) -> float:
    """Of the first block."""
    block = given.blocks[0]
    (moved,) = (option.moved for option in block.options if option.action is action)
    return given.out_rate * block.forward / moved


def _seconds(given: BlockProblem, choice: Sequence[int]) -> Seconds:
    return simulate(given, choice).seconds


def alike(given: BlockProblem, action: Action) -> list[int]:
    """Every block the same, where its menu has it."""
    return [
        next((number for number, option in enumerate(block.options) if option.action is action), 0)
        for block in given.blocks
    ]


def mimose(given: BlockProblem) -> Seconds:
    """What Algorithm 1 takes: it is asked for more until the clock says that its blocks are enough; infinite if not."""
    clock = Clock(given)
    recomputed = alike(given, Action.RECOMPUTE)
    freed = [block.options[0].resident - block.options[one].resident
             for block, one in zip(given.blocks, recomputed, strict=True)]  # fmt: skip
    excess = max(clock.needed(clock.picked([0] * len(freed))) - given.available, 0)
    while True:
        selection = select(freed, excess)
        chosen = frozenset(selection.blocks)
        seconds = clock.seconds(
            clock.picked([recomputed[number] if number in chosen else 0 for number in range(len(freed))])
        )
        if seconds < inf or selection.uncovered:
            return seconds
        excess += max(min(nbytes for nbytes in freed if nbytes), 1)


# ---------------------------------------------------------------------- every choice


def _exhausted(name: str, device: str, share: float, size: Size) -> Mapping[str, Any]:
    given = problem(*model(name, blocks=size.small_blocks - 1), MACHINES[device], share)
    best = exhausted(given)
    bound = Program(given, whole=True).bound(size.solver_seconds)
    gaps = {
        effort.name.lower(): 100 * (plan(given, effort=effort).outcome.seconds - best) / given.plain
        for effort in (Effort.FIRST, Effort.POLISH)
    }
    return {"model": name, "device": device, "share": share, "slack": 100 * (best - bound) / given.plain, **gaps}


def exhausted(given: BlockProblem) -> Seconds:
    """The seconds of the best of all choices."""
    clock = Clock(given)
    best = inf
    for rows in itertools.product(*clock.rows):
        if sum([row[8] for row in rows]) < best:
            best = min(best, clock.seconds(rows, best))
    return best


# ---------------------------------------------------------------------- time


def _milliseconds(count: int, size: Size) -> float:
    """Of a first plan of so many blocks, at worst of all models and devices: process time, the median of warm ones."""
    worst = 0.0
    for name, device in itertools.product(size.models, ("H200", "V100")):
        parts, head = model(name, blocks=count - 1)
        given = problem(parts, head, MACHINES[device], 0.2)
        taken = []
        for _ in range(size.times + 2):
            # A new object, so that nothing of it is known.
            fresh = replace(given)
            began = time.process_time()
            plan(fresh)
            taken.append(time.process_time() - began)
        worst = max(worst, statistics.median(taken[2:]))
    return 1e3 * worst


# ---------------------------------------------------------------------- safety


def random_problems(size: Size) -> Iterator[BlockProblem]:
    """Each of other sizes and times, with less available than the floor in about one of twenty."""
    drawn = random.Random(24)
    pairs = [problem(*model(name), MACHINES[device]) for name in size.models for device in MACHINES]
    floors = [floor(pair) for pair in pairs]
    for _ in range(size.random_problems):
        number = drawn.randrange(len(pairs))
        least, most = floors[number], pairs[number].available
        available = round(least + drawn.uniform(-0.05, 0.95) * (most - least))
        yield shaken(replace(pairs[number], available=available), drawn, 0.05, 0.3)


def _safety(size: Size, tell: Tell) -> Mapping[str, Any]:
    counts = dict.fromkeys(
        ("over", "refused", "floors_off", "slower_if_smaller", "slower_with_more", "single", "polished"), 0
    )
    most = dict.fromkeys(("slower_if_smaller", "slower_with_more", "single"), 0.0)
    for number, given in enumerate(random_problems(size)):
        if number % 2000 == 1999:
            tell(f"{number + 1} random problems")
        planned = plan(given)
        counts["over"] += planned.outcome.fits and planned.outcome.peak > given.available
        if not planned.outcome.fits:
            counts["refused"] += 1
            least = floor(given)
            fits = [plan(replace(given, available=available)).outcome.fits for available in (least, least - 1)]
            counts["floors_off"] += fits != [True, False]
            continue
        seconds, plain = planned.outcome.seconds, given.plain
        smaller = [
            simulate(scaled(given, share, times), planned.choice).seconds
            for share in (0.99, 0.98, 0.96) for times in (1.0, share)
        ]  # fmt: skip
        roomy = replace(given, available=round(given.available * (1.01, 1.03, 1.1)[number % 3]))
        more = plan(roomy).outcome.seconds
        simple = min(mimose(given), *(_seconds(given, alike(given, action)) for action in Action if not action.lossy))
        found = {
            "slower_if_smaller": max(smaller) - seconds, "slower_with_more": more - seconds, "single": seconds - simple
        }  # fmt: skip
        for key, over in found.items():
            points = 100 * over / plain
            counts[key] += points > (0.5 if key != "single" else 1e-6)
            most[key] = max(most[key], points)
        if more - seconds > 0.005 * plain:
            polished = [plan(one, effort=Effort.POLISH).outcome.seconds for one in (given, roomy)]
            counts["polished"] += polished[1] - polished[0] > 0.005 * plain
    return {"counts": counts, "most": most}


# ---------------------------------------------------------------------- targets


def _checks(result: Result) -> list[Check]:
    facts, instances = result.facts, [one for row in result.rows for one in row["instances"]]
    return [
        *_against_bounds(instances), *_against_optima(facts["small"]), *_of_times(facts["milliseconds"]),
        *_of_safety(facts["random"]),
    ]  # fmt: skip


def _against_bounds(instances: Sequence[Mapping[str, Any]]) -> list[Check]:
    first = sorted(one["first_gap"] for one in instances)
    return [
        Check(what="points over the bound, mean", measured=statistics.mean(first), at_most=0.6),
        Check(what="points over the bound, 95th percentile", measured=first[int(0.95 * len(first))], at_most=2.5),
        Check(what="points over the bound, most", measured=first[-1], at_most=3),
        Check(what="points over the bound once polished, mean",
              measured=statistics.mean(one["polish_gap"] for one in instances), at_most=0.45),
        Check(what="problems with a bound where Mimose, keeping all or any single action is faster",
              measured=sum(one["over_others"] > 1e-6 for one in instances)),
    ]  # fmt: skip


def _against_optima(small: Sequence[Mapping[str, Any]]) -> list[Check]:
    polished = [one["polish"] for one in small]
    return [
        Check(what="points over the best of all choices once polished, mean",
              measured=statistics.mean(polished), at_most=0.5),
        Check(what="share of them that are not the best", measured=sum(gap > 1e-3 for gap in polished) / len(polished),
              at_most=0.4),
        Check(what="bounds above the best of all choices", measured=sum(one["slack"] < -0.02 for one in small)),
    ]  # fmt: skip


def _of_times(taken: Mapping[str, float]) -> list[Check]:
    return [
        Check(what=f"milliseconds for a plan of {count} blocks, process time", measured=taken[str(count)], at_most=most)
        for count, most in ((24, 1.0), (100, 5.0))
    ]


def _of_safety(safe: Mapping[str, Any]) -> list[Check]:
    told = {
        "over": "random problems over what is available",
        "floors_off": "refusals whose floor does not plan, or is not the least that does",
        "slower_if_smaller": "plans slower by more than .5 points if the problem is 1, 2 or 4 % smaller",
        "slower_with_more": "plans slower by more than .5 points with 1, 3 or 10 % more available",
        "single": "random problems where Mimose or any single action is faster",
    }
    return [Check(what=what, measured=safe["counts"][key]) for key, what in told.items()]


def _told(
    instances: Sequence[Mapping[str, Any]], small: Sequence[Mapping[str, Any]], safe: Mapping[str, Any], size: Size
) -> str:  # fmt: skip
    idle = statistics.mean(one["idle_gap"] for one in instances)
    first = statistics.mean(one["first"] for one in small)
    return (
        f"{f'Idle: {idle:.3f} points over the bound on average. ' if size.idle else ''}Every choice tried: first tier "
        f"{first:.3f} points over the best, at most {max(one['first'] for one in small):.2f}; polished at most "
        f"{max(one['polish'] for one in small):.2f}; the bound at most "
        f"{max(one['slack'] for one in small):.2f} below it. Of {size.random_problems} random problems "
        f"{safe['counts']['refused']} were refused; at worst {safe['most']['slower_if_smaller']:.2f} points slower if "
        f"smaller, {safe['most']['slower_with_more']:.2f} with more available; once both plans are polished, "
        f"{safe['counts']['polished']} of these are left with more than .5."
    )


BENCHMARK: Final = Benchmark(
    name="auto_planner",
    run=run,
    judge=_checks,
    full=Size(
        models=MODELS, solver_seconds=3.0, idle=True, small_blocks=7, random_problems=10_000, times=20
    ),
    quick=Size(
        models=("encoder-decoder",), solver_seconds=0.2, idle=False, small_blocks=4, random_problems=20, times=3
    ),
)  # fmt: skip
