"""Many architectures under every lossless action of the block engine, mixed, and revoked at random: the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.units import format_bytes
from tests.cpu.architectures import ARCHITECTURES
from tests.cpu.block_ways import STEPS, WAYS, Outcome, Subject, outcome_of, subject_of
from tests.cpu.families import FAMILIES

FEWEST_ARCHITECTURES: Final = 20
EXACT: Final = "identical"


@frozen
class Size:
    """How much is measured."""

    architectures: Sequence[str]
    families: Sequence[str]


def run(size: Size, tell: Tell) -> Result:
    """Train every model plainly, then in every way."""
    builds = {name: ARCHITECTURES[name] for name in size.architectures} | {n: FAMILIES[n] for n in size.families}
    rows, outcomes = [], []
    for name, build in builds.items():
        tell(name)
        subject = subject_of(name, build)
        ran = {way: outcome_of(subject, WAYS[way]) for way in WAYS}
        outcomes += [(subject, way, outcome) for way, outcome in ran.items()]
        rows.append(_row(subject, ran))
    return Result(
        title=f"{len(builds)} models x {len(WAYS)} ways, {STEPS} steps each",
        columns=columns.text(model="model", told="blocks", calls="calls a step", **{way: way for way in WAYS}),
        rows=rows,
        notes=(*NOTES, *_summary(outcomes)),
    )


def _checks(result: Result) -> Iterator[Check]:
    runs = [(row, way) for row in result.rows for way in WAYS]
    wrong = sum(not row[way].startswith(EXACT) for row, way in runs)
    yield Check(what=f"runs of {len(runs)} that are not exact", measured=wrong)
    yield Check(what="runs that gave up nothing of what they held", measured=sum(row["idle"][way] for row, way in runs))
    architectures = sum(row["found"] and row["model"] in ARCHITECTURES for row in result.rows)
    short = max(0, FEWEST_ARCHITECTURES - architectures)
    yield Check(what="architectures with blocks short of twenty", measured=short)


NOTES: Final = (
    "Identical: losses, gradients before every optimizer step, and parameters, buffers, optimizer state and the random "
    "streams of torch, NumPy and Python after every step, in bytes, dtypes and strides. Behind it, how many calls of "
    "blocks ran again. Mixed: an action is drawn for every call. Revoked: at random moments of forward, second runs "
    "and backward, calls that are drawn give up what they hold.",
    "Named: the model is refused with `ModelError`, because no class of modules repeats in it and nothing else cuts it "
    "well; the modules that were named instead need not be what anybody would choose.",
)


Outcomes: TypeAlias = Sequence[tuple[Subject, str, Outcome]]


def _row(subject: Subject, ran: Mapping[str, Outcome]) -> Row:
    count = len(subject.blocks)
    calls = next(iter(ran.values())).counts["calls"]
    return {
        "model": subject.name,
        "found": subject.found,
        "told": str(count) if subject.found else f"none; {count} named",
        "calls": f"{calls / STEPS:.3g}",
        **{way: o.wrong[:120] or f"{EXACT}, {o.counts['recomputes']}" for way, o in ran.items()},
        "idle": {way: outcome.is_idle(WAYS[way]) for way, outcome in ran.items()},
        "counts": {way: dict(outcome.counts) for way, outcome in ran.items()},
        "kept": {way: dict(outcome.kept) for way, outcome in ran.items() if outcome.kept},
    }


def _summary(outcomes: Outcomes) -> Iterator[str]:
    total: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for _, _, outcome in outcomes:
        total += outcome.counts
        kept += outcome.kept
    forward = total["revoked"] - total["revoked in the backward"]
    yield (
        f"{total['calls']} calls of blocks, {total['recomputes']} second runs; revoked: {forward} in a forward and "
        f"{total['revoked in the backward']} in a backward; {format_bytes(total['offloaded'])} went to the spill file."
    )
    if kept:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in kept.most_common())
        yield f"Calls that could not run again, {sum(kept.values())}: {reasons}."
    unfound = sorted({subject.name for subject, _, _ in outcomes if not subject.found})
    if unfound:
        yield f"Without blocks: {', '.join(unfound)}."


BENCHMARK: Final = Benchmark(
    name="block_exactness",
    run=run,
    judge=_checks,
    full=Size(architectures=tuple(ARCHITECTURES), families=tuple(FAMILIES)),
    quick=Size(architectures=("GPT-2", "ALBERT"), families=("stochastic-depth",)),
)
