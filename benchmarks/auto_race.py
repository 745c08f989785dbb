"""`auto` beside plain training, the usual checkpointing and Spillway's other methods, at shares of the plain peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.race import CHECKPOINT, PLAIN, Contest
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import median_ratio
from benchmarks.turns import Answers, account, figures, take_turns, training, verdict
from spillway.errors import BudgetInfeasible

AUTO: Final = "auto"
CHECKPOINTED: Final = ("stdlib-lm", "resnet", "lstm", "unet")
"""Models whose blocks the benchmark knows."""
OTHERS: Final = ("mimose", "lru", "delta", "window")
LIMIT: Final = 1.08
"""Times the plain step, at the tight share."""
FITS: Final = 1.01
"""Times the plain step, where everything fits."""
BESIDE: Final = 0.80
"""Times the step of `torch.utils.checkpoint` around every block."""
BEST: Final = 1.02
"""Times the fastest other method of Spillway at the same budget."""


@frozen
class Size:
    """How much is measured."""

    contests: Sequence[Contest]
    percent: int
    """The tight budget, in percent of the plain peak."""
    rounds: int
    """Steps that every competitor makes."""
    warm: int
    """The first of them, which do not count: `auto` measures in them."""


def run(size: Size, tell: Tell) -> Result:
    """One model after the other."""
    rows: list[Row] = []
    for contest in size.contests:
        rows += _contest(contest, size, lambda text, model=contest.model: tell(f"{model}: {text}"))  # type: ignore[misc]
    return Result(title="auto at a share of the plain peak", columns=COLUMNS, rows=rows, notes=NOTES)


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", competitor="competitor"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="peak"),
    *columns.seconds(seconds="time", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", cpu_ratio="CPU x plain"),
    *columns.nbytes(bytes_out="out/step", bytes_in="in/step"),
    *columns.text(losses="losses"),
)

NOTES: Final = (
    "All competitors of a model train the same batch in processes of their own, a step each in turn, one thread each. "
    "Times are medians; ratios are medians over rounds of the time as a multiple of the plain time of that round.",
    "Checkpoint: `torch.utils.checkpoint` (not reentrant) around every block, without a budget.",
)


def _contest(contest: Contest, size: Size, tell: Tell) -> list[Row]:
    def job(method: str | None = None, budget: int | None = None, **flags: bool) -> Any:
        return training(contest.model, contest.options, batches=1, method=method, budget=budget, **flags)

    tell("peaks")
    peaks = {PLAIN: account(job("keep-all"), 3)}
    jobs = {PLAIN: job()}
    if contest.model in CHECKPOINTED:
        peaks[CHECKPOINT] = account(job("keep-all", checkpoints=True), 3)
        jobs[CHECKPOINT] = job(checkpoints=True)
    tight = peaks[PLAIN] * size.percent // 100
    jobs |= {name: job(name, tight) for name in (AUTO, *OTHERS)}
    jobs[f"{AUTO}, fits"] = job(AUTO, 2 * peaks[PLAIN])
    answers = take_turns(jobs, size.rounds, tell)
    return [
        {
            "model": contest.model, "competitor": name, "budget_bytes": one.options["budget"],
            "peak_bytes": peaks.get(name), **_found(name, answers, size.warm, peaks.get(name)),
        }
        for name, one in jobs.items()
    ]  # fmt: skip


def _found(name: str, answers: Mapping[str, Answers | BudgetInfeasible], warm: int, peak: int | None) -> dict[str, Any]:
    found, beside = answers[name], answers[PLAIN]
    if isinstance(found, BudgetInfeasible):
        return {"losses": f"refused, needs {found.smallest_budget / found.allowed:.2f} x"}
    assert not isinstance(beside, BudgetInfeasible)
    told = figures(found, beside, warm, peak)
    return {**told, "walls": [answer["wall"] for answer in found[warm:]], "losses": verdict(told.pop("identical"))}


def _checks(result: Result) -> list[Check]:
    models = dict.fromkeys(row["model"] for row in result.rows)
    return [
        check
        for model in models
        for check in _of_model({row["competitor"]: row for row in result.rows if row["model"] == model}, model)
    ]


def _of_model(rows: Mapping[str, Row], model: str) -> list[Check]:
    answered = {name: row for name, row in rows.items() if "ratio" in row}
    checks = [
        Check(what=f"{model}, competitors whose losses differ", measured=_differing(rows)),
        Check(what=f"{model}, auto refused", measured=sum(name not in answered for name in (AUTO, f"{AUTO}, fits"))),
    ]
    if f"{AUTO}, fits" in answered:
        fits = answered[f"{AUTO}, fits"]["ratio"]
        checks.append(Check(what=f"{model}, auto, fits, times the plain step", measured=fits, at_most=FITS))
    if AUTO not in answered:
        return checks
    auto = answered[AUTO]
    over = max(auto["peak_bytes"] - auto["budget_bytes"], 0)
    checks.append(Check(what=f"{model}, auto, bytes over the budget", measured=over))
    checks.append(Check(what=f"{model}, auto, times the plain step", measured=auto["ratio"], at_most=LIMIT))
    limits = {CHECKPOINT: BESIDE, min(OTHERS, key=lambda name: answered.get(name, {}).get("ratio", 1e9)): BEST}
    for other, limit in limits.items():
        if other in answered:
            beside = median_ratio(auto["walls"], answered[other]["walls"])
            checks.append(Check(what=f"{model}, auto, times {other}", measured=beside, at_most=limit))
    return checks


def _differing(rows: Mapping[str, Row]) -> int:
    return sum(row["losses"] == verdict(identical=False) for row in rows.values())


BENCHMARK: Final = Benchmark(
    name="auto_race",
    run=run,
    judge=_checks,
    full=Size(
        contests=[
            Contest(model="stdlib-lm"), Contest(model="resnet"), Contest(model="lstm"), Contest(model="unet"),
            Contest(model="bert-small"), Contest(model="gpt-small"),
            Contest(model="vit-small"),
        ],
        percent=40, rounds=13, warm=6,
    ),
    quick=Size(
        contests=[Contest(model="stdlib-lm", options={"width": 64, "layers": 2, "longest": 96})],
        percent=60, rounds=8, warm=6,
    ),
)  # fmt: skip
