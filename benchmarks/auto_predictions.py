"""What `auto` expects of a step, beside what the step then takes: its peak and its seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.race import PLAIN, Contest
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.turns import Answers, account, take_turns, training, verdict
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

AUTO: Final = "auto"
CLOSE: Final = 1.01
"""Of the peak, what is expected at most."""
OFF: Final = 0.08
"""Of the seconds, by which they may be other than expected."""


@frozen
class Size:
    """How much is measured."""

    contests: Sequence[Contest]
    percents: Sequence[int]
    """Budgets, in percent of the way from the peak with every block recomputed to the plain peak."""
    rounds: int
    """Steps that every competitor makes."""
    planned: int
    """The last of them, which count."""


def run(size: Size, tell: Tell) -> Result:
    """One model after the other: plain steps, and one session for every budget, in turn."""
    rows: list[Row] = []
    for contest in size.contests:
        rows += _contest(contest, size, lambda text, model=contest.model: tell(f"{model}: {text}"))  # type: ignore[misc]
    return Result(title="what auto expects of steps", columns=COLUMNS, rows=rows, notes=NOTES)


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model"),
    *columns.shares(share="budget at"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="peak"),
    *columns.ratios(least="expected/peak, least", most="most"),
    *columns.seconds(expected="expected", seconds="time"),
    *columns.ratios(off="time/expected", ratio="x plain"),
    *columns.text(planned="planned steps", losses="losses"),
)
NOTES: Final = (
    "Budget at: 0 is the peak with every block recomputed, 1 the plain one. Expected: what the plan of each counted "
    "step said before it ran. Times are medians, of steps that took turns with plain ones.",
)


def _contest(contest: Contest, size: Size, tell: Tell) -> list[Row]:
    def job(**more: Any) -> Any:
        return training(contest.model, contest.options, **more)

    tell("peaks")
    most = account(job(method="keep-all"), 3)
    least = account(job(method="checkpoint", budget=2 * most), 3)
    budgets = {percent: least + (most - least) * percent // 100 for percent in size.percents}
    jobs = {f"{percent}": job(method=AUTO, budget=budget) for percent, budget in budgets.items()}
    found = take_turns({PLAIN: job()} | jobs, size.rounds, tell)
    plain = found[PLAIN]
    assert not isinstance(plain, BudgetInfeasible)
    return [
        {
            "model": contest.model, "share": percent / 100, "budget_bytes": budget,
            **_row(found[f"{percent}"], plain, size.planned),
        }
        for percent, budget in budgets.items()
    ]  # fmt: skip


def _row(found: Answers | BudgetInfeasible, plain: Answers, count: int) -> Row:
    if isinstance(found, BudgetInfeasible):
        return {"losses": f"refused: {found}"}
    reports = [answer["report"] for answer in found]
    counted = [report for report in reports[-count:] if report["projected_seconds"]]
    same = [answer["loss"] for answer in found] == [answer["loss"] for answer in plain]
    row = {
        "planned": len(counted), "peak_bytes": max(report["peak_bytes"] for report in reports),
        "losses": verdict(identical=same),
    }  # fmt: skip
    if not counted:
        return row
    expected, seconds = (statistics.median(r[key] for r in counted) for key in ("projected_seconds", "seconds"))
    off = statistics.median(report["seconds"] / report["projected_seconds"] for report in counted)
    foretold = [report["projected_bytes"] / report["peak_bytes"] for report in counted]
    return row | {
        "expected": expected, "seconds": seconds, "off": off, "least": min(foretold),
        "most": max(foretold), "ratio": seconds / statistics.median(answer["wall"] for answer in plain[-count:]),
    }  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        cell = f"{row['model']}, budget at {row['share']:.0%}"
        peak: Bytes = row.get("peak_bytes", 0)
        yield Check(what=f"{cell}: bytes over the budget", measured=max(peak - row["budget_bytes"], 0))
        yield Check(what=f"{cell}: losses that differ", measured=row["losses"] != verdict(identical=True))
        yield Check(what=f"{cell}: steps without a plan", measured=not row.get("planned"))
        if row.get("planned"):
            yield Check(what=f"{cell}: peak as a multiple of what was expected", measured=1 / row["least"], at_most=1)
            yield Check(what=f"{cell}: expected as a multiple of the peak", measured=row["most"], at_most=CLOSE)
            yield Check(what=f"{cell}: share of seconds off", measured=abs(row["off"] - 1), at_most=OFF)


BENCHMARK: Final = Benchmark(
    name="auto_predictions",
    run=run,
    judge=_checks,
    full=Size(
        contests=[
            Contest(model="bert-small", options={"batch": 16}, dropout=True),
            Contest(model="gpt-small", options={"batch": 16}, dropout=True),
            Contest(model="t5", options={"batch": 8, "layers": 3, "width": 256, "length": 64}, dropout=True),
            Contest(model="vit-small", dropout=True), Contest(model="convnext"), Contest(model="resnet"),
            Contest(model="unet"),
        ],
        percents=(20, 60), rounds=16, planned=8,
    ),
    quick=Size(
        contests=[Contest(model="stdlib-lm", options={"width": 64, "layers": 3, "longest": 96}, dropout=True)],
        percents=(60,), rounds=9, planned=3,
    ),
)  # fmt: skip
