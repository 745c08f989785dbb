"""The three filters of DELTA's section 5.7: its Figures 7 and 8, on this CPU."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.turns import account, figures, take_turns, training, verdict
from benchmarks.workers import Job
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

PLAIN: Final = "plain"
FILTERS: Final = ("base", "lru", "greedy")


@frozen
class Size:
    """How much is measured."""

    models: Sequence[tuple[str, Mapping[str, Any]]]
    """Names with options."""
    percents: Sequence[int]
    """Budgets, in percent of the plain peak."""
    rounds: int
    warm: int
    """The first of the rounds, which do not count."""


def run(size: Size, tell: Tell) -> Result:
    """Every model under every budget, the filters a step each in turn."""
    rows = [row for name, options in size.models for row in _rows(name, options, size, tell)]
    cells = _cells(rows)
    over = sum(row["over"] for row in rows if "over" in row)
    different = sum(row["losses"] == "DIFFER" for row in rows)
    return Result(
        title="DELTA as published with each of its three filters",
        columns=COLUMNS,
        rows=rows,
        checks=[
            Check(what="steps over budget", measured=over),
            Check(what="runs whose losses differ from plain", measured=different),
        ],
        notes=(*NOTES, *_ordering(cells)),
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", budget="budget", filter="filter"),
    *columns.nbytes(budget_bytes="bytes", peak_bytes="peak"),
    *columns.seconds(seconds="time", stall_seconds="stalls"),
    *columns.ratios(ratio="x plain"),
    *columns.text(offloads="offloads", evictions="evictions", recomputes="recomputed", recalls="instead of reload"),
    *columns.text(reloads="reloads", recomputed_ops="ops again", losses="losses"),
)

NOTES: Final = (
    "Offloads, evictions and what came back are storages in a step, medians; instead of reload: of the recomputed "
    "storages those that had been offloaded. Three convolutional networks as in the paper, small enough for a CPU.",
    "The paper's Figure 7 shows memory, not time: where its GPU run passes the budget by what one filter keeps, here "
    "the budget is kept by every filter, and a bad choice shows as time.",
)


def _rows(model: str, options: Mapping[str, Any], size: Size, tell: Tell) -> list[Row]:
    def job(method: str | None = None, budget: Bytes | None = None) -> Job:
        return training(model, options, method=method, budget=budget, return_freed=False)

    peak = account(job("keep-all"), 2)
    rows: list[Row] = []
    for percent in size.percents:
        budget = peak * percent // 100
        jobs = {PLAIN: job()} | {name: job(f"delta-published, {name}", budget) for name in FILTERS}
        told = f"{model}, {percent} %"
        answers = take_turns(jobs, size.rounds, lambda text, told=told: tell(f"{told}: {text}"))  # type: ignore[misc]
        plain = answers.pop(PLAIN)
        rows += [
            {"model": model, "budget": f"{percent} %", "filter": name, "budget_bytes": budget}
            | _figures(found, plain, size.warm)
            for name, found in answers.items()
        ]
    return rows


def _figures(found: Any, plain: Any, warm: int) -> dict[str, Any]:
    if isinstance(found, BudgetInfeasible):
        return {"losses": f"refused, needs {found.smallest_budget / found.allowed:.2f} x"}
    told, steps = figures(found, plain, warm), found[warm:]

    def middle(record: str, key: str) -> Any:
        return statistics.median_high(answer[record][key] for answer in steps)

    return {
        "peak_bytes": told["peak_bytes"],
        "over": sum(answer["report"]["peak_bytes"] > answer["report"]["allowed"] for answer in found),
        "seconds": told["seconds"],
        "ratio": told["ratio"],
        "stall_seconds": middle("report", "stall_seconds"),
        "offloads": middle("report", "moves"),
        "evictions": middle("report", "drops"),
        "recomputed_ops": middle("report", "recomputed_ops"),
        **{key: middle("counts", key) for key in ("recomputes", "recalls", "reloads")},
        "losses": verdict(told["identical"]),
    }


def _cells(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """The three filters by name, of each model and budget under which none was refused."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if "ratio" in row:
            cells.setdefault((row["model"], row["budget"]), {})[row["filter"]] = row
    return [cell for cell in cells.values() if len(cell) == len(FILTERS)]


def _ordering(cells: Sequence[Mapping[str, Row]]) -> list[str]:
    """What the paper says of its filters, and in how many cells it is so here."""
    fastest = {name: sum(min(c, key=lambda f: c[f]["ratio"]) == name for c in cells) for name in FILTERS}
    slower = sum(cell["greedy"]["ratio"] >= max(cell["base"]["ratio"], cell["lru"]["ratio"]) for cell in cells)
    most = sum(cell["lru"]["offloads"] >= max(cell["base"]["offloads"], cell["greedy"]["offloads"]) for cell in cells)
    return [
        f"Paper: base is the fastest. Here, of {len(cells)} cells: "
        + ", ".join(f"{name} in {count}" for name, count in fastest.items())
        + ".",
        f"Paper: greedy is the worst under small budgets. Here it is the slowest in {slower} of {len(cells)}.",
        f"Paper: lru offloads most often (Figure 8). Here in {most} of {len(cells)}.",
    ]


BENCHMARK: Final = Benchmark(
    name="heuristics",
    run=run,
    full=Size(
        models=[("resnet", {}), ("efficientnet", {}), ("resnext", {})], percents=(80, 65, 50, 40), rounds=11, warm=3
    ),
    quick=Size(
        models=[("resnext", {"width": 8, "blocks": 1, "batch": 2, "side": 32})], percents=(50,), rounds=3, warm=1
    ),
)
