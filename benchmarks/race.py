"""Every usual way to train in less memory, at several budgets, on four kinds of models, in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import median_ratio
from benchmarks.turns import Answers, account, figures, profiled_peak, take_turns, training, verdict
from benchmarks.workers import Job
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

PLAIN: Final = "plain"
STILL: Final = "plain, no dropout"
CHECKPOINT: Final = "checkpoint"
TORCH_BUDGET: Final = "activation budget 0.5"
DELTA: Final = "delta"
OTHERS: Final = ("lru", "delta-published")
LIMIT: Final = 1.25
"""Times the plain step, of DELTA at the middle budget."""
MIDDLE: Final = 50


@frozen
class Contest:
    """A model with its options."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout: bool = False
    """Whether the model has any."""


@frozen
class Size:
    """How much is measured."""

    contests: Sequence[Contest]
    percents: Sequence[int]
    """Budgets, in percent of the plain peak."""
    batches: int
    rounds: int
    """Steps that every competitor makes."""
    warm: int
    """The first of them, which do not count."""


def run(size: Size, tell: Tell) -> Result:
    """One contest after the other."""
    rows: list[Row] = []
    for contest in size.contests:
        rows += _contest(contest, size, lambda text, model=contest.model: tell(f"{model}: {text}"))  # type: ignore[misc]
    return Result(title="ways to train in less memory", columns=COLUMNS, rows=rows, notes=NOTES)


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", competitor="competitor"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="peak", peak_rss_bytes="RSS"),
    *columns.seconds(seconds="time", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", cpu_ratio="CPU x plain"),
    *columns.nbytes(bytes_out="out/step", bytes_in="in/step"),
    *columns.shares(recomputed_share="recomputed"),
    *columns.text(losses="losses"),
)

NOTES: Final = (
    "All competitors of a model train the same batches in processes of their own, a step each in turn. Times are "
    "medians; ratios are medians over rounds of the time as a multiple of the plain time of that round.",
    "Checkpoint: `torch.utils.checkpoint` (not reentrant) around every block. Activation budget 0.5: torch's "
    "`activation_memory_budget` under `torch.compile(backend='aot_eager')`, with dropout off because a compiled "
    "dropout draws other numbers; it is compared with a plain run without dropout where the model has any. Its peak is "
    "that of the profiler's allocations, the other peaks are by our account.",
    "`kept`: with `SpillOptions(return_freed=False)`. Freed memory that is returned to the system costs page faults "
    "when it is asked for again, which on a virtual machine take most of the difference between the two.",
)


def _contest(contest: Contest, size: Size, tell: Tell) -> list[Row]:
    def job(method: str | None = None, budget: Bytes | None = None, still: bool = False, **flags: Any) -> Job:
        more = {"batches": size.batches, "method": method, "budget": budget, "still": still, **flags}
        return training(contest.model, contest.options, **more)

    tell("peaks")
    steps = size.batches + 1  # the optimizer's state is there from the second on
    peaks = {
        PLAIN: account(job("keep-all"), steps),
        CHECKPOINT: account(job("keep-all", checkpoints=True), steps),
        TORCH_BUDGET: profiled_peak(job(still=True, activation_budget=0.5), steps),
    }
    jobs = {PLAIN: job(), CHECKPOINT: job(checkpoints=True)}
    if contest.dropout:
        jobs[STILL] = job(still=True)
    jobs[TORCH_BUDGET] = job(still=True, activation_budget=0.5)
    for percent in size.percents:
        budget = peaks[PLAIN] * percent // 100
        jobs |= {f"{method}, {percent} %": job(method, budget) for method in (*OTHERS, DELTA)}
        if percent == MIDDLE:
            jobs |= {f"{m}, {percent} %, kept": job(m, budget, return_freed=False) for m in (*OTHERS, DELTA)}
    answers = take_turns(jobs, size.rounds, tell)
    return [
        {
            "model": contest.model, "competitor": name, "budget_bytes": job.options["budget"],
            "peak_bytes": peaks.get(name),
            **found_of(name, answers, size.warm, peaks.get(name), still=name == TORCH_BUDGET),
        }
        for name, job in jobs.items()
    ]  # fmt: skip


def found_of(
    name: str, answers: Mapping[str, Answers | BudgetInfeasible], warm: int, peak: Bytes | None, *, still: bool
) -> dict[str, Any]:
    """What a competitor did beside plain, or why it is refused.

    Arguments:
        warm: Rounds that do not count.
        peak: Of a competitor without a session.
        still: Whether it trains without dropout, and is held to a plain run without, where there is one.
    """
    found = answers[name]
    if isinstance(found, BudgetInfeasible):
        return {"losses": f"refused, needs {found.smallest_budget / found.allowed:.2f} x"}
    beside = answers[STILL if still and STILL in answers else PLAIN]
    assert not isinstance(beside, BudgetInfeasible)
    told = figures(found, beside, warm, peak)
    losses = "no dropout" if name == STILL else verdict(told.pop("identical"))
    return {**told, "walls": [answer["wall"] for answer in found[warm:]], "losses": losses}


def by_model(of_model: Callable[[Mapping[str, Row], str], list[Check]], result: Result) -> list[Check]:
    """The checks of each contest, which are told of its rows by competitor, and of its model."""
    models = dict.fromkeys(row["model"] for row in result.rows)
    return [
        check
        for model in models
        for check in of_model({row["competitor"]: row for row in result.rows if row["model"] == model}, model)
    ]


def _of_model(rows: Mapping[str, Row], model: str) -> list[Check]:
    """DELTA at the middle budget against plain and against the other two, freed memory returned and kept."""
    checks, refused = list[Check](), 0
    for ending in ("", ", kept"):
        delta = rows.get(f"{DELTA}, {MIDDLE} %{ending}", {})
        if "ratio" not in delta:
            refused += 1
            continue
        what = f"{model}, {delta['competitor']}, time as a multiple of"
        checks.append(Check(what=f"{what} the plain step", measured=delta["ratio"], at_most=LIMIT))
        for other in (rows[f"{name}, {MIDDLE} %{ending}"] for name in OTHERS):
            if "walls" in other:
                ratio = median_ratio(delta["walls"], other["walls"])
                checks.append(Check(what=f"{what} that of {other['competitor']}", measured=ratio, at_most=1.0))
    different = sum(row["losses"] == "DIFFER" for name, row in rows.items() if name != TORCH_BUDGET)
    return [
        *checks,
        Check(what=f"{model}, {DELTA}, {MIDDLE} %, refused", measured=refused),
        Check(what=f"{model}, competitors whose losses differ from plain", measured=different),
    ]


BENCHMARK: Final = Benchmark(
    name="race",
    run=run,
    judge=partial(by_model, _of_model),
    full=Size(
        contests=[
            Contest(model="stdlib-lm", options={"grouped": 1}, dropout=True),
            Contest(model="resnet"),
            Contest(model="lstm"),
            Contest(model="unet"),
        ],
        percents=(70, 50, 35), batches=2, rounds=9, warm=3,
    ),
    quick=Size(
        contests=[
            Contest(
                model="stdlib-lm", options={"grouped": 1, "width": 64, "layers": 2, "longest": 96}, dropout=True
            )
        ],
        percents=(50,), batches=1, rounds=3, warm=1,
    ),
)  # fmt: skip
