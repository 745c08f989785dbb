"""What planning and collecting cost, and how many plans a training makes: Table 2 of Mimose's paper."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from benchmarks.timing import Clock, median_ratio
from papers.mimose.lab import build
from spillway.engines.blocks.trace import AllocationTrace
from spillway.methods.actions import Action
from spillway.methods.by_block import BlockPlan, BlockSample, Forecast, InputSize, StepSample
from spillway.methods.mimose import Mimose, Options
from spillway.methods.mimose.peaks import highest, limits
from spillway.units import Bytes, MiB, Seconds
from spillway.workloads import get

# ---------------------------------------------------------------------- ways to collect


COUNTED: Final = "every block recomputed, as it is"
TRACED: Final = "every block recomputed, traced as a session collects"
CHECKPOINTED: Final = "torch.utils.checkpoint on every block"
SHUTTLED: Final = "shuttling, two forwards"
REHEARSED: Final = "two forwards, as mimose-published collects"
WAYS: Final = (COUNTED, TRACED, CHECKPOINTED, SHUTTLED, REHEARSED)


def stepper(*, way: str, layers: int, width: int, batch: int, length: int) -> Callable[[], Seconds]:
    """Every call is a forward and a backward of a model of its own, and tells their processor time."""
    subject = build("TC-Bert", {"layers": layers, "width": width, "batch": batch})
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    if way in (COUNTED, TRACED, REHEARSED):
        subject.engine(length, actions=lambda block, call: Action.RECOMPUTE).rehearses = way == REHEARSED
        around = nullcontext if way == COUNTED else traced
    else:
        layers: Any = subject.model.get_submodule("bert.encoder.layer")
        for layer in layers:
            layer.forward = partial(CHECKPOINT if way == CHECKPOINTED else _shuttled, layer.forward)

    def step() -> Seconds:
        began = time.process_time()
        with around():
            subject.loss(length).backward()  # type: ignore[no-untyped-call]
        taken = time.process_time() - began
        subject.model.zero_grad()
        return taken

    return step


@contextmanager
def traced() -> Iterator[None]:
    """With every allocation traced, and read in the end: what a session adds to a step that it learns from."""
    trace = AllocationTrace({})
    trace.mark()
    yield
    trace.stop()


CHECKPOINT: Final = partial(checkpoint, use_reentrant=False)


def _shuttled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Section 4.2: once with everything saved, to be measured and dropped, and once with nothing saved."""
    state = torch.get_rng_state()
    forward(*args, **kwargs)
    torch.set_rng_state(state)
    return CHECKPOINT(forward, *args, **kwargs)


# ---------------------------------------------------------------------- planning


HIT: Final[Seconds] = 5e-6
"""Target for a plan that is remembered."""
MISSES: Final[Mapping[int, Seconds]] = {24: 100e-6, 96: 500e-6}
"""Targets by blocks for a plan that is made, with its peak checked."""
NOISE: Final = 0.03
"""By what share measured seconds are too long at most."""
KEPT: Final = 60
"""Target for the plans that are kept of a task of SQuAD, whose lengths are near 300."""
PAPERS_MOST: Final = 0.63
"""Of an iteration, for TC-Bert: 157.73 of 250.27 ms."""
COLLECTING: Final = 1.02
"""Target for a step that counts, times one in which torch recomputes every block and nobody counts."""


@frozen
class Task:
    """A row of the paper's Table 2."""

    name: str
    shortest: int
    longest: int
    plans: int
    """The paper's."""
    seconds: tuple[Seconds, Seconds]
    """The paper's, of estimator and scheduler, from and to."""
    collector: Seconds
    """The paper's, in a sheltered step."""
    iteration: Seconds
    """The paper's."""


TASKS: Final = (
    Task(name="MC-Roberta", shortest=35, longest=141, plans=17, seconds=(0.26e-3, 0.32e-3), collector=145.99e-3,
         iteration=371.86e-3),
    Task(name="QA-XLNet", shortest=153, longest=512, plans=69, seconds=(0.31e-3, 0.39e-3), collector=294.47e-3,
         iteration=1033.56e-3),
    Task(name="QA-Bert", shortest=153, longest=512, plans=24, seconds=(0.27e-3, 0.38e-3), collector=118.96e-3,
         iteration=452.89e-3),
    Task(name="TC-Bert", shortest=30, longest=332, plans=51, seconds=(0.27e-3, 0.34e-3), collector=157.73e-3,
         iteration=250.27e-3),
)  # fmt: skip
"""Table 2 of arXiv:2209.02478; its ranges of lengths are those of section 3.1."""


@frozen
class Size:
    """How much is measured."""

    blocks: Sequence[int]
    """Models to plan for, by their blocks."""
    plans: int
    """Lengths that are planned in a round."""
    rounds: int
    """Medians over these count."""
    steps: int
    """Steps of an epoch whose plans are counted."""
    encoder: Mapping[str, int]
    """The BERT whose steps collect."""
    run: Mapping[str, int]
    """The language model that is trained, and for how many steps."""
    turns: int
    """Steps of each of these competitors."""


def run(size: Size, tell: Tell) -> Result:
    """Time plans of models whose blocks are alike and of such that are not, collect, and count plans."""
    rows: list[Row] = []
    for blocks in size.blocks:
        for alike in (True, False):
            tell(f"{blocks} blocks, {'alike' if alike else 'all different'}")
            rows += _planning(blocks, size, alike=alike)
    collected = _collecting(size, tell)
    counted = [_counted(task, options, size.steps) for task in TASKS for options in (Options(), Options.as_published())]
    tell("a run")
    ran = _in_a_run(size.run)
    return Result(
        title=TITLE, columns=COLUMNS, rows=[*rows, *ran, *collected, *counted], notes=NOTES,
    )  # fmt: skip


# ---------------------------------------------------------------------- plans


def truth(blocks: int, length: int, *, alike: bool) -> Forecast:
    """What a step needs: a BERT of so many blocks, or one whose blocks all save other bytes in other times.

    Of 16 samples, 768 features and 12 heads, in float32. What a block works with grows with the larger of two products
    of lengths, so that it follows no law.
    """
    chance = random.Random(0)
    widths = [1.0 if alike else chance.uniform(0.25, 2) for _ in range(blocks)]
    prices = [1.0 if alike else chance.uniform(0.5, 2) for _ in range(blocks)]
    features = [int(768 * width) for width in widths]
    saved = [16 * length * (4 * 17 * wide + 9 * 12 * length) for wide in features]
    return Forecast(
        saved=saved, seconds=[price * nbytes * 1e-10 for price, nbytes in zip(prices, saved, strict=True)],
        turn=16 * length * 4000, rest=16 * length * 8000 + 100 * MiB,
        working=[max(64 * length * 4 * wide, 64 * 12 * length * length * 2) for wide in features],
        gradients=[28_000_000] * blocks,
    )  # fmt: skip


def trained(blocks: int, options: Options, lengths: Sequence[int], *, alike: bool) -> Mimose:
    """After its sheltered steps, whose seconds are as uneven as measured ones are."""
    mimose, chance = Mimose(options), random.Random(1)
    for length in lengths:
        step = truth(blocks, length, alike=alike)
        samples = [
            BlockSample(
                block=block, size=(length,), nbytes=step.saved[block], working=step.working[block],
                seconds=step.seconds[block] * (1 + NOISE * chance.random()), gradients=step.gradients[block],
            )
            for block in range(blocks)
        ]  # fmt: skip
        mimose.end(_of_step(step, length, step.everything), samples)
    return mimose


def _of_step(step: Forecast, length: int, recomputed: frozenset[int]) -> StepSample:
    return StepSample(size=(length,), recomputed=recomputed, peak=highest(step, recomputed, limits(step)))


def _planning(blocks: int, size: Size, *, alike: bool) -> list[Row]:
    """Every length once with a budget of its own between the extremes, new and then remembered, round after round.
    Similar lengths share no plan here: each would make another one's anew."""
    mimose = trained(blocks, Options(similar=0.0), (41, 67, 90, 122, 151, 200, 288, 310), alike=alike)
    questions = _questions(mimose, size.plans)
    misses: list[Seconds] = []
    hits: list[Seconds] = []
    for _ in range(size.rounds):
        mimose.cache.forget()
        for found in (misses, hits):
            clock = Clock()
            with clock.running():
                for question in questions:
                    mimose.plan(*question)
            found.append(clock.cpu[0] / len(questions))
    what = f"{blocks} blocks, {'alike' if alike else 'all different'}"
    if (mimose.cache.made, mimose.cache.hits) != (size.rounds * size.plans,) * 2:
        raise RuntimeError(f"{what}: {mimose.cache.made} plans were made and {mimose.cache.hits} remembered.")
    chosen = {len(mimose.plan(*question).given_up) for question in questions}
    return [
        {
            "what": f"{kind}, {what}", "kind": kind, "of": blocks, "seconds": statistics.median(taken),
            "worst": max(taken), "plans": len(questions),
            "detail": f"recomputing {min(chosen)} to {max(chosen)} blocks",
        }
        for kind, taken in (("miss", misses), ("hit", hits))
    ]  # fmt: skip


def _questions(mimose: Mimose, count: int) -> list[tuple[InputSize, Bytes]]:
    chance, found = random.Random(2), []
    for length in chance.sample(range(35, 513), count):
        forecast = mimose.forecast((length,))
        if forecast is None:
            raise RuntimeError("The default simulates its plans.")
        least, most = (highest(forecast, some, limits(forecast)) for some in (forecast.everything, ()))
        found.append(((length,), round(least + chance.uniform(0.02, 0.98) * (most - least))))
    return found


def _in_a_run(run: Mapping[str, int]) -> list[Row]:
    """Plans of a training, between whose steps the processor's caches go to something else. Its budget lies half way
    between the peaks with every block recomputed and with none."""
    taken: dict[str, list[Seconds]] = {"miss": [], "hit": []}
    options = {name: value for name, value in run.items() if name != "steps"}
    peaks = [
        _train(options, run["steps"] // 3, budget=budget, method=method)
        for method, budget in (("checkpoint", "8GiB"), ("keep-all", None))
    ]
    with _timed_plans(taken):
        _train(options, run["steps"], budget=sum(peaks) // 2, method="mimose")
    return [
        {
            "what": f"{kind}, {run['layers']} blocks, in a run", "kind": f"{kind}, in a run", "of": run["layers"],
            "seconds": statistics.median(of), "worst": max(of), "plans": len(of),
            "detail": f"of {run['steps']} steps of stdlib-lm",
        }
        for kind, of in taken.items() if of
    ]  # fmt: skip


def _train(options: Mapping[str, int], steps: int, **session: Any) -> Bytes:
    """Train the language model, and tell the highest peak."""
    workload = get("stdlib-lm", **options)
    with spillway.manage(workload.model, workload.optimizers, **session) as memory:
        for batch in workload.batches(steps):
            with memory.step(batch):
                workload.train_step(batch)
        return max(step.peak_bytes for step in memory.history)


@contextmanager
def _timed_plans(taken: Mapping[str, list[Seconds]]) -> Iterator[None]:
    """Every plan of Mimose is timed, by the processor's time, those remembered and those made."""
    plan = Mimose.plan

    def timed(self: Mimose, size: InputSize, available: Bytes) -> BlockPlan:
        misses, began = self.cache.misses, time.process_time()
        found = plan(self, size, available)
        taken["miss" if self.cache.misses > misses else "hit"].append(time.process_time() - began)
        return found

    Mimose.plan = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Mimose.plan = plan  # type: ignore[method-assign]


# ---------------------------------------------------------------------- collecting


def _collecting(size: Size, tell: Tell) -> list[Row]:
    """A step of every way in a round, so that all see the same machine."""
    taken: dict[str, list[Seconds]] = {way: [] for way in WAYS}
    steppers = {way: stepper(way=way, **size.encoder) for way in WAYS}
    for number in range(size.turns + 1):
        tell(f"collecting, round {number} of {size.turns}")
        for way, step in steppers.items():
            seconds = step()
            if number:  # the first shows what blocks write to
                taken[way].append(seconds)
    return [
        {
            "what": f"step, {way}", "kind": way, "seconds": statistics.median(taken[way]), "worst": max(taken[way]),
            "ratio": median_ratio(taken[way], taken[CHECKPOINTED]),
            "adds": 1 - 1 / median_ratio(taken[way], taken[CHECKPOINTED]) if way in (SHUTTLED, REHEARSED) else None,
            "of": size.encoder["layers"],
            "detail": f"BERT, batch {size.encoder['batch']} x {size.encoder['length']}",
        }
        for way in WAYS
    ]  # fmt: skip


# ---------------------------------------------------------------------- how many plans


def _counted(task: Task, options: Options, steps: int) -> Row:
    """An epoch under a budget half way between the extremes of its longest input; lengths are drawn from a bell."""
    chance, blocks = random.Random(3), 12
    middle, spread = (task.shortest + task.longest) / 2, (task.longest - task.shortest) / 6
    longest = truth(blocks, task.longest, alike=True)
    budget = sum(highest(longest, some, limits(longest)) for some in (longest.everything, frozenset())) // 2
    mimose, planned, drawn = Mimose(options), 0.0, set()
    for _ in range(steps):
        length = min(max(round(chance.gauss(middle, spread)), task.shortest), task.longest)
        drawn.add(length)
        step = truth(blocks, length, alike=True)
        began = time.process_time()
        decision = mimose.begin((length,), budget)
        planned += time.process_time() - began
        recomputed = frozenset(block for block in range(blocks) if not decision.plan.keeps(block))
        samples = [
            BlockSample(block=b, size=(length,), nbytes=step.saved[b], seconds=step.seconds[b], working=step.working[b])
            for b in (range(blocks) if decision.collects else ())
        ]
        mimose.end(_of_step(step, length, recomputed), samples)
    way = "published" if options.interval > 1 else "default"
    return {
        "what": f"{task.name}, {way}", "kind": way, "plans": mimose.cache.made, "kept": len(mimose.cache),
        "paper_plans": task.plans,
        "seconds": planned / steps, "paper_seconds": statistics.fmean(task.seconds),
        "detail": f"{len(drawn)} lengths in {steps} steps",
        "paper_adds": task.collector / task.iteration,
    }  # fmt: skip


# ---------------------------------------------------------------------- what is shown


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        limit = HIT if row["kind"] == "hit" else MISSES.get(row["of"]) if row["kind"] == "miss" else None
        if limit is not None:
            what, taken = f"microseconds of a {row['what']}", round(row["seconds"] * 1e6, 2)
            yield Check(what=what, measured=taken, at_most=limit * 1e6)
        if row["kind"] in (COUNTED, TRACED):
            what = f"a step with {row['kind']}, times one under checkpoints"
            yield Check(what=what, measured=round(row["ratio"], 4), at_most=COLLECTING)
        if row["kind"] == REHEARSED and row.get("adds") is not None:
            what = f"what collecting adds, {REHEARSED}, of an iteration; the paper's most"
            yield Check(what=what, measured=round(row["adds"], 4), at_most=PAPERS_MOST)
        if row["kind"] == "default" and "kept" in row and row["what"].startswith("QA"):
            yield Check(what=f"{row['what']}: plans kept, {row['detail']}", measured=row["kept"], at_most=KEPT)


TITLE: Final = "what planning and collecting cost, and how many plans there are (Mimose's Table 2)"

COLUMNS: Final = (
    *columns.text(what="what"),
    *columns.seconds(seconds="seconds", worst="worst round", paper_seconds="paper"),
    *columns.shown("{:.3f}".format, ratio="x checkpoint"),
    *columns.shares(adds="collecting, of an iteration", paper_adds="paper"),
    *columns.text(plans="plans made", kept="kept", paper_plans="paper", detail=""),
)

NOTES: Final = (
    "Processor time. A miss is a length that was not planned before, under a budget drawn between the smallest that "
    "holds and the plain peak: bytes and seconds of all blocks estimated, the plan made, its peak in every moment "
    "checked, and the plan remembered. A hit is the same length and budget once more. Medians over rounds of "
    "consecutive plans, so that the caches of the processor are warm: in a run, below, they are not. The paper's "
    "seconds are of estimator and scheduler, 12 blocks, no peak checked.",
    f"A step: forward and backward of BERT with every block recomputed. {CHECKPOINTED!r} counts nothing; {COUNTED!r} "
    f"is the engine, which counts in every step; {TRACED!r}: with all allocations traced too. {SHUTTLED!r} runs each "
    f"block once to measure and again under torch.utils.checkpoint, as the paper's collector does; {REHEARSED!r} is "
    "the engine, traced, with the first forward whose ops are watched and counted. Of an iteration: what it has more "
    "than a step under checkpoints.",
    "Plans of an epoch are counted on steps that are simulated, of 12 blocks, with lengths drawn from a bell whose "
    "three sigmas reach the ends of the paper's range: the lengths of its data sets are not published, and its two "
    "counts for the same SQuAD show how much hangs on them. Seconds there: what `Mimose.begin` takes on average, hits "
    "and misses. The default keeps one plan for lengths that are about 2 % apart, made for the longest of them so "
    "far, and looks at it again when later steps correct what it stands on; the published one has one for five "
    "lengths.",
)

BENCHMARK: Final = Benchmark(
    name="mimose_planning",
    run=run,
    judge=_checks,
    full=Size(blocks=(12, 24, 96), plans=200, rounds=21, steps=2000,
              encoder={"layers": 4, "width": 768, "batch": 4, "length": 128}, turns=15,
              run={"layers": 6, "width": 64, "heads": 4, "batch": 4, "longest": 384, "steps": 90}),
    quick=Size(blocks=(3,), plans=5, rounds=2, steps=20,
               encoder={"layers": 2, "width": 64, "batch": 2, "length": 12}, turns=1,
               run={"layers": 2, "width": 32, "heads": 2, "batch": 2, "longest": 32, "steps": 12}),
)  # fmt: skip
"""24 blocks are those of BERT-large."""
