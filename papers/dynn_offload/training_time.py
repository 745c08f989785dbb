"""Figs. 7 to 9: a step under a budget, by method, simulated on the paper's RTX 6000 with its PCIe 3.0.

The paper prints no numbers in these figures; the text says 35 % less time than DTR on average (Fig. 7), 33 % less than
ZeRO-Offload on the static BERT, 12 % and at most 28 % less than DTR over budgets (Fig. 9), and that UVM spends 55 % and
40 % of Tree-CNN's and UGAN's time on migration (Fig. 8). The path is known here: what mispredictions cost is in
`prefetch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.dynn_offload.steps import SIZES, step_of
from spillway.calibration.named_device import device_of
from spillway.costs import Device
from spillway.errors import BudgetInfeasible
from spillway.ir import Step
from spillway.methods import method_named
from spillway.simulation.simulated_engine import simulate

OURS, PUBLISHED = "dynn-offload", "dynn-offload-published"
BASELINES: Final = ("uvm", "dtr", "zero-offload", "lru")
"""The paper's three, and moving on demand what is stalest."""
RIVALS: Final = ("uvm", "dtr", "zero-offload")


@frozen
class Size:
    """How much is run."""

    networks: tuple[str, ...]
    shares: tuple[float, ...]
    """Budgets, as shares of what the plain step takes at most."""
    smaller: bool = False
    """Whether networks are as small as they are built by default."""


def run(size: Size, tell: Tell) -> Result:
    """A row a network, budget and method."""
    device, rows = device_of("rtx6000"), list[Row]()
    for network in size.networks:
        options: dict[str, Any] = {"width": 32, "batch": 4} if size.smaller else {}
        step = step_of(network, device, **options)
        tell(f"{network}: {len(step.ops)} ops")
        for share in size.shares:
            found = [_row(network, step, share, method, device) for method in (OURS, PUBLISHED, *BASELINES)]
            rows += found
            tell(f"{network} at {share:.0%}: " + ", ".join(f"{row['method']} {row['shown']}" for row in found))
    return Result(
        title="DyNN-Offload, Figs. 7 to 9: a step under a budget on the paper's RTX 6000", columns=COLUMNS,
        rows=[*rows, *_ratios(rows)], notes=NOTES,
    )  # fmt: skip


def _row(network: str, step: Step, share: float, method: str, device: Device) -> Row:
    head = {"network": network, "share": share, "method": method, "ops": len(step.ops)}
    try:
        ran = simulate(
            step, allowed=int(step.plain_peak() * share), method=method_named(method), device=device, steps=2
        )
    except BudgetInfeasible as refused:
        return {**head, "shown": "does not fit", "why": str(refused)}
    if ran.status != "ok":
        return {**head, "shown": "does not fit" if ran.status == "oom" else ran.status, "why": ran.why}
    return {
        **head, "shown": f"{ran.overhead:.2f}", "overhead": ran.overhead, "stalls": ran.stall_seconds / ran.seconds,
        "recomputing": ran.recomputed_seconds / ran.seconds, "plain": ran.plain_seconds / ran.seconds,
        "gb_in": ran.bytes_in / 1e9, "gb_out": ran.bytes_out / 1e9,
    }  # fmt: skip


def _ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """How much less time each form takes than the best rival, on average."""
    for form in (OURS, PUBLISHED):
        for rival in (*BASELINES, "the best of UVM, DTR and ZeRO-Offload"):
            found = [1 - time / other for time, other in _pairs(rows, form, rival)]
            if found:
                yield {
                    "method": f"{form}, time less than {rival}", "less": sum(found) / len(found),
                    "shown": f"in {len(found)} cells", "most": max(found), "least": min(found),
                }  # fmt: skip


def _pairs(rows: Sequence[Row], form: str, rival: str) -> Iterator[tuple[float, float]]:
    for cell in {(row["network"], row["share"]): None for row in rows}:
        times = {row["method"]: row.get("overhead") for row in rows if (row["network"], row["share"]) == cell}
        others = [times.get(one) for one in (RIVALS if rival.startswith("the best") else (rival,))]
        there = [one for one in others if one is not None]
        own = times.get(form)
        if own is not None and there:
            yield own, min(there)


def _checks(result: Result) -> Iterator[Check]:
    rows = [row for row in result.rows if "network" in row]
    found = [time / other for time, other in _pairs(rows, OURS, "the best of UVM, DTR and ZeRO-Offload")]
    if found:
        mean = sum(found) / len(found)
        yield Check(what=f"{OURS}: time over that of the best of the paper's rivals", measured=mean, at_most=0.65)
    refused = sum(row["method"] == OURS and "overhead" not in row for row in rows)
    yield Check(what=f"cells in which {OURS} does not fit", measured=refused)


COLUMNS: Final = (
    *columns.text(network="network"),
    *columns.shown("{:.0%}".format, share="budget"),
    *columns.text(method="method", shown="time / plain"),
    *columns.shares(plain="ops", stalls="waiting", recomputing="recomputing", less="less time"),
    *columns.shown("{:.2f}".format, gb_in="GB in", gb_out="GB out"),
)  # fmt: skip
NOTES: Final = (
    "Steps of the networks of `spillway.workloads` at widths of 256 to 1,024, recorded here and timed by roofline. The "
    "budget is a share of what the plain step takes at most. UVM is refused beyond twice the budget, as in the paper.",
)
NETWORKS: Final = tuple(one for one in SIZES if one != "evoformer")
"""DTR takes minutes for each budget of the folding trunk's 7,600 ops."""
BENCHMARK: Final = Benchmark(
    name="dynn_training_time",
    run=run,
    judge=_checks,
    full=Size(networks=NETWORKS, shares=(0.5, 0.7, 0.9)),
    quick=Size(networks=("var-lstm",), shares=(0.7,), smaller=True),
)
