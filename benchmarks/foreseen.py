"""A dynamic network of which an eighth fits: its forward foreseen by pilots, beside methods that fetch on demand."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import spillway
from benchmarks import columns, models, out_of_core
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import Clock, median_ratio
from benchmarks.training import METHODS, bits_of_state, warm_up
from benchmarks.turns import Answers, account, answered, figures, verdict
from benchmarks.workers import Job, started
from spillway.internals.process_memory import PeakMemory
from spillway.methods import DynnOffload
from spillway.pilots.course import Course
from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.pilot import Foresight
from spillway.pilots.pilot_files import SavedPilot, write_pilot
from spillway.pilots.program import Program
from spillway.tiers.spill_file import SpillIO
from spillway.units import Bytes
from spillway.workloads.recorded import record_samples

PLAIN: Final = "plain"
TRAINED: Final = "dynn-offload, pilot trained ahead"
LEARNING: Final = "dynn-offload"
ON_DEMAND: Final = "lru that moves only"
OTHERS: Final = (ON_DEMAND, "lru", "delta")

RATIOS: Final = (0.5, 1.0)
"""Of computing the forward to copying its parameters in, between which foreseeing has to pay."""
FORWARD: Final = 0.9
"""Times the forward on demand, there."""
FOLLOWING: Final = 0.1e-6
"""Seconds that looking an op up in what is foreseen may take."""


@frozen
class Task:
    """A dynamic network trained by all methods."""

    workload: str
    options: Mapping[str, Any]
    io: SpillIO
    recorded: int
    """Forwards, of other samples, that the pilot which is trained ahead learns."""
    rounds: int
    """Steps that every competitor makes."""
    warm: int
    """The first of them, which are not timed."""
    part: int = 8
    """Of the plain peak, one part in so many is the budget."""


@frozen
class Size:
    """How much is measured."""

    tasks: Sequence[Task]
    follows: int
    """Ops that are looked up to time it."""


def run(size: Size, tell: Tell) -> Result:
    """What following costs; then the tasks one after the other."""
    tell("what following costs")
    seconds = following_seconds(size.tasks[0], size.follows)
    rows = list[Row]()
    for task in size.tasks:
        rows += _rows(task, lambda text, task=task: tell(f"{_name(task)}: {text}"))  # type: ignore[misc]
    return Result(
        title="a dynamic network of which an eighth fits", columns=COLUMNS, rows=rows,
        facts={"following_seconds": seconds}, notes=NOTES,
    )  # fmt: skip


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(task="task", competitor="competitor"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="peak"),
    *columns.seconds(forward_seconds="forward", seconds="step", stall_seconds="stalled"),
    *columns.ratios(of_forward="forward x on demand", of_step="step x on demand", ratio="step x plain"),
    *columns.nbytes(bytes_out="out/step", bytes_in="in/step"),
    *columns.text(acted="acted", losses="losses"),
)

NOTES: Final = (
    "Every competitor trains the same batches in a process of its own, a step each in turn. Times are medians; ratios "
    "are medians over rounds. On demand: the same engine, which moves what is stalest and fetches nothing ahead.",
    "Budget: an eighth of the plain peak. Task: the network, whether copies go past the page cache (direct) "
    "or through it (buffered), and what computing a plain forward takes as a multiple of copying in the parameters "
    "that it uses, at the speed of copies alone.",
    "The pilot that is trained ahead has learned forwards of the network before it was trained. Acted: who acted in "
    "how many steps.",
)


def _name(task: Task) -> str:
    return f"{task.workload}, {task.options.get('batch', 1)} a batch, {task.io}"


# ---------------------------------------------------------------------- one task


def _rows(task: Task, tell: Tell) -> list[Row]:
    shared = {"workload": task.workload, "options": dict(task.options), "rounds": task.rounds}

    def job(method: str | None = None, budget: Bytes | None = None, **more: Any) -> Job:
        return Job(
            function="benchmarks.foreseen:competitor",
            options={**shared, "method": method, "budget": budget, "io": task.io, **more},
        )

    tell("peak")
    peak = account(job("keep-all"), min(task.rounds, 6))
    budget = peak // task.part
    with tempfile.TemporaryDirectory() as folder:
        tell("a pilot is trained ahead")
        pilot = Path(folder, "ahead.pilot")
        with started(Job(function="benchmarks.foreseen:pilot_trainer", options={
            "workload": task.workload, "options": dict(task.options), "samples": task.recorded, "pilot": str(pilot),
        })) as worker:  # fmt: skip
            worker.ask()
        jobs = {
            PLAIN: job(), **{name: job(name, budget) for name in OTHERS}, LEARNING: job(LEARNING, budget),
            TRAINED: job(LEARNING, budget, pilot=str(pilot)),
            out_of_core.COPIES: Job(function="benchmarks.out_of_core:copier", options={"io": task.io}),
        }  # fmt: skip
        answers = answered(jobs, task.rounds, tell)
    alone = statistics.median(one["in"] for one in answers.pop(out_of_core.COPIES))
    per_byte = alone / (out_of_core.PIECES * out_of_core.PIECE)
    plain = answers[PLAIN][task.warm :]
    computing = statistics.median(one["forward"] / (one["used_bytes"] * per_byte) for one in plain)
    shared_by_all = {
        "task": f"{_name(task)}, {computing:.2f}", "computing": computing, "copied_in_per_second": 1 / per_byte
    }  # fmt: skip
    return [
        {
            **shared_by_all, "competitor": name, "budget_bytes": jobs[name].options["budget"],
            **figures(answers[name], answers[PLAIN], task.warm, peak if name == PLAIN else None),
            **_beside(answers[name], answers[PLAIN], answers[ON_DEMAND], task.warm),
        }
        for name in answers
    ]  # fmt: skip


def _beside(found: Answers, plain: Answers, demanded: Answers, warm: int) -> Row:
    """A competitor beside the plain one and the one on demand, round by round."""
    same = [one["loss"] for one in found] == [one["loss"] for one in plain] and found[-1]["state"] == plain[-1]["state"]
    timed, before = found[warm:], demanded[warm:]
    row: Row = {
        "forward_seconds": statistics.median(one["forward"] for one in timed), "losses": verdict(same),
        "of_forward": median_ratio([one["forward"] for one in timed], [one["forward"] for one in before]),
        "of_step": median_ratio([one["wall"] for one in timed], [one["wall"] for one in before]),
    }  # fmt: skip
    if found[-1]["report"] is not None:
        row["stall_seconds"] = statistics.median(one["report"]["stall_seconds"] for one in timed)
    foresight = found[-1]["foresight"]
    if foresight is not None:
        acted = [f"{one['pilot']} {one['acted']}" for one in foresight["standings"] if one["acted"]]
        row |= {"foresight": foresight, "acted": ", ".join(acted)}
    return row


def _checks(result: Result) -> Iterator[Check]:
    seconds, (low, high) = result.facts["following_seconds"], RATIOS
    yield Check(what="seconds to look an op up in what is foreseen", measured=seconds, at_most=FOLLOWING)
    for name in dict.fromkeys(row["task"] for row in result.rows):
        yield from _of_task(name, [row for row in result.rows if row["task"] == name])
    none = not any(low <= row["computing"] <= high for row in result.rows if row["competitor"] == LEARNING)
    yield Check(what=f"without a task that computes for {low:g} to {high:g} times what it copies", measured=none)


def _of_task(name: str, rows: Sequence[Row]) -> Iterator[Check]:
    of = {row["competitor"]: row for row in rows}
    low, high = RATIOS
    for competitor in (TRAINED, LEARNING):
        row = of[competitor]
        if low <= row["computing"] <= high:
            what = f"{name}, {competitor}, forward as a multiple of the one on demand"
            yield Check(what=what, measured=row["of_forward"], at_most=FORWARD)
        what = f"{name}, {competitor}, step as a multiple of the one on demand"
        yield Check(what=what, measured=row["of_step"], at_most=1.0)
    differing = sum(row["losses"] == verdict(False) for row in rows)
    yield Check(what=f"{name}, competitors with other bits than plain", measured=differing)
    for row in rows:
        if row["budget_bytes"] is not None:
            over = max(row["peak_bytes"] - row["budget_bytes"], 0)
            yield Check(what=f"{name}, {row['competitor']}, bytes over the budget", measured=over)


# ---------------------------------------------------------------------- in processes of their own


def pilot_trainer(
    *, workload: str, options: Mapping[str, Any], samples: int, pilot: str
) -> Callable[[], dict[str, Any]]:
    """Records forwards of another seed's samples, and trains a pilot on them."""

    def trained() -> dict[str, Any]:
        recorded = record_samples(workload, steps=samples, frozen=True, seed=0, **options)
        made = DecisionPilot(Program(recorded.architecture))
        made.fit(recorded.samples)
        write_pilot(pilot, SavedPilot(pilot=made, facts={"samples": samples}))
        return {"decisions": made.program.decisions}

    return trained


def competitor(
    *, workload: str, options: dict[str, Any], rounds: int, method: str | None, budget: Bytes | None, io: SpillIO,
    pilot: str | None = None,
) -> Callable[[], dict[str, Any]]:  # fmt: skip
    """Trains on one batch after the other; every call is a step, the last of which tells the bits of the state."""
    warm_up()
    memory = PeakMemory()
    built = models.build(workload, options)
    batches, session = built.batches(rounds), None
    if method is not None:
        decides = DynnOffload(pilot=pilot, dynamism=built.dynamism) if method == LEARNING else METHODS[method]()
        session = spillway.manage(
            built.model, built.optimizers, budget=budget, method=decides, spill=spillway.SpillOptions(io=io)
        )
    nbytes = [one.untyped_storage().nbytes() for one in built.model.parameters()]
    asked = 0

    def step() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        clock, batch = Clock(), next(batches)
        with clock.running(), nullcontext() if session is None else session.step(batch):
            began = time.perf_counter()
            loss = built.loss(built.model, batch)
            forward = time.perf_counter() - began
            loss.backward()  # type: ignore[no-untyped-call]
            used = sum(size for size, one in zip(nbytes, built.model.parameters(), strict=True) if one.grad is not None)
            for optimizer in built.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        last = asked == rounds
        return {
            "wall": clock.wall[0], "cpu": clock.cpu[0], "forward": forward, "used_bytes": used,
            "loss": float(loss.detach()).hex(), "rss": memory.above_start(),
            "report": None if session is None else session.history[-1].to_json(),
            "foresight": session.foresight if session is not None and last else None,
            "state": bits_of_state(built) if last else None,
        }  # fmt: skip

    return step


def following_seconds(task: Task, count: int) -> float:
    """What a look at an op that is as foreseen takes, less what asking for nothing does."""
    recorded = record_samples(task.workload, steps=2, frozen=True, seed=0, **task.options)
    course, path = Course(Program(recorded.architecture)), recorded.samples[0].path
    keys = [key for key in path.keys.tolist() if key not in course.program.groups_of_op]

    def seconds(look: Callable[[int, int], object]) -> float:
        began = time.perf_counter()
        for _ in range(max(count // len(keys), 1)):
            for key in keys:
                look(key, 0)
        return (time.perf_counter() - began) / (max(count // len(keys), 1) * len(keys))

    course.begin()
    course.expect(Foresight(course.program.bits(path)))
    return min(seconds(course.passed) for _ in range(5)) - min(seconds(lambda key, clock: None) for _ in range(5))


_VAR_BERT: Final = {"width": 768, "layers": 12, "heads": 12, "target": 0.5, "rate": 1e-4, "longest": 48}
"""As wide, as deep and trained at the rate of BERT-base, on texts that are so short that it computes no longer than it
copies."""

BENCHMARK: Final = Benchmark(
    name="foreseen",
    run=run,
    judge=_checks,
    full=Size(
        tasks=tuple(
            Task(
                workload="var-bert", options={**_VAR_BERT, "batch": batch}, io="direct", recorded=300, rounds=24, warm=6
            )
            for batch in (1, 2)
        ),
        follows=200_000,
    ),
    quick=Size(
        tasks=(
            Task(
                workload="unrolled-gan", options={"width": 128, "batch": 16, "ahead": 3}, io="buffered", recorded=4,
                rounds=3, warm=1, part=4,
            ),
        ),
        follows=2000,
    ),
)  # fmt: skip
