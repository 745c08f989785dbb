"""Figs. 7 to 9: a step under a budget, by method, simulated on the paper's RTX 6000 with its PCIe 3.0.

The paper prints no numbers in these figures; the text says 35 % less time than DTR on average (Fig. 7), 33 % less than
ZeRO-Offload on the static BERT, 12 % and at most 28 % less than DTR over budgets (Fig. 9), and that UVM spends 55 % and
40 % of Tree-CNN's and UGAN's time on migration (Fig. 8). The path is known here: what mispredictions cost is in
`prefetch`.

What parts these figures from the paper's is measured beside them: how long copies take beside ops, how much of that was
hidden and what would be left if all were that ops are long enough for, how fast recomputing frees memory, what share of
a step its update is. And how the ratio to the best rival changes with one condition at a time (`_conditions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final, TypeAlias

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.dynn_offload.steps import SIZES, STATIC, step_of
from spillway.calibration.named_device import device_of
from spillway.costs import Device
from spillway.errors import BudgetInfeasible
from spillway.ir import Phase, Step
from spillway.methods import method_named
from spillway.simulation.simulated_engine import simulate

OURS, PUBLISHED = "dynn-offload", "dynn-offload-published"
BASELINES: Final = ("uvm", "dtr", "zero-offload", "lru")
"""The paper's three, and moving on demand what is stalest."""
RIVALS: Final = ("uvm", "dtr", "zero-offload")
THE_BEST: Final = "the best of UVM, DTR and ZeRO-Offload"
WAITS: Final = 0.01
"""The share of its time that UVM waits in a cell in which anything has to move."""
Cell: TypeAlias = Mapping[str, Row]
"""The rows of a network, budget and load, by method."""
Rivals: TypeAlias = Callable[[Cell], Sequence[str]]
"""Those that the best is taken of in a cell; none if the cell is left out."""


@frozen
class Size:
    """How much is run."""

    networks: tuple[str, ...]
    shares: tuple[float, ...]
    """Budgets, as shares of what the plain step takes at most."""
    loads: tuple[float, ...]
    """How many times as long the ops of the forward and backward take as the roofline says, 1 first."""
    smaller: bool = False
    """Whether networks are as small as they are built by default."""


def run(size: Size, tell: Tell) -> Result:
    """A row a network, budget and method."""
    device, rows = device_of("rtx6000"), list[Row]()
    for network in size.networks:
        options: dict[str, Any] = {"width": 32, "batch": 4} if size.smaller else {}
        recorded = step_of(network, device, **options)
        tell(f"{network}: {len(recorded.ops)} ops")
        for share, load in product(size.shares, size.loads):
            step = _loaded(recorded, load)
            found = [_row(network, step, share, load, method, device) for method in (OURS, PUBLISHED, *BASELINES)]
            rows += found
            told = ", ".join(f"{row['method']} {row['shown']}" for row in found)
            tell(f"{network} at {share:.0%}, {load:g} times: {told}")
    return Result(
        title="DyNN-Offload, Figs. 7 to 9: a step under a budget on the paper's RTX 6000", columns=COLUMNS,
        rows=[*rows, *_ratios(rows), *_conditions(rows)], notes=NOTES,
    )  # fmt: skip


def _loaded(step: Step, load: float) -> Step:
    """With a forward and a backward whose ops take so many times as long."""
    factors = (1.0 if op.phase is Phase.OPTIMIZER else load for op in step.ops)
    timed = zip(step.ops, factors, strict=True)
    return replace(step, ops=tuple(replace(op, seconds=(op.seconds or 0.0) * factor) for op, factor in timed))


def _row(network: str, step: Step, share: float, load: float, method: str, device: Device) -> Row:
    head = {"network": network, "share": share, "load": load, "method": method, "ops": len(step.ops)}
    try:
        ran = simulate(
            step, allowed=int(step.plain_peak() * share), method=method_named(method), device=device, steps=2
        )
    except BudgetInfeasible as refused:
        return {**head, "shown": "does not fit", "why": str(refused)}
    if ran.status != "ok":
        return {**head, "shown": "does not fit" if ran.status == "oom" else ran.status, "why": ran.why}
    copies = ran.hidden_seconds + ran.stall_seconds
    lanes = ran.bytes_out / device.out_per_second, ran.bytes_in / device.in_per_second
    done: Row = {
        **head, "shown": f"{ran.overhead:.2f}", "overhead": ran.overhead, "stalls": ran.stall_seconds / ran.seconds,
        "recomputing": ran.recomputed_seconds / ran.seconds, "plain": ran.plain_seconds / ran.seconds,
        "gb_in": ran.bytes_in / 1e9, "gb_out": ran.bytes_out / 1e9, "copies": copies / ran.plain_seconds,
        "least": max(ran.plain_seconds + ran.recomputed_seconds, *lanes) / ran.plain_seconds,
    }  # fmt: skip
    if copies > 0:
        done["hidden"] = ran.hidden_seconds / copies
    if ran.recomputed_seconds > 0:
        done["freed"] = ran.dropped_bytes / ran.recomputed_seconds / 1e9
    if method == "zero-offload":
        done["update"] = sum(op.seconds or 0.0 for op in step.ops if op.phase is Phase.OPTIMIZER) / ran.plain_seconds
    return done


def _ratios(rows: Sequence[Row]) -> Iterator[Row]:
    """How much less time each form takes than the best rival, on average."""
    for form in (OURS, PUBLISHED):
        for rival in (*BASELINES, THE_BEST):
            found = [1 - time / other for time, other in _pairs(rows, form, rival)]
            if found:
                yield {
                    "method": f"{form}, time less than {rival}", "less": sum(found) / len(found),
                    "shown": f"in {len(found)} cells", "most": max(found), "least_less": min(found),
                }  # fmt: skip


def _conditions(rows: Sequence[Row]) -> Iterator[Row]:
    """Time over that of the best rival, on average, as one condition after the other becomes that of the paper."""
    for load in {row["load"]: None for row in rows}:
        ops = "" if load == 1 else f", ops {load:g} times as long"
        for says, rivals, time in CONDITIONS:
            found = [own / other for own, other in _pairs(rows, OURS, THE_BEST, load, rivals, time)]
            if found:
                told = {"method": f"over the best of them, {says}{ops}", "shown": f"in {len(found)} cells"}
                yield {**told, "over": sum(found) / len(found)}


def _all(_cell: Cell) -> Sequence[str]:
    return RIVALS


def _published(cell: Cell) -> Sequence[str]:
    """The paper: ZeRO-Offload only works for static networks."""
    return RIVALS if cell[OURS]["network"] in STATIC else RIVALS[:-1]


def _moving(cell: Cell) -> Sequence[str]:
    """Where anything has to move."""
    return _published(cell) if cell["uvm"].get("stalls", 1.0) >= WAITS else ()


def _recomputing(cell: Cell) -> Sequence[str]:
    """DTR moves nothing; where that does not do, its paper's does not fit, and Spillway's moves the rest."""
    alone = cell["dtr"].get("gb_in", 1.0) == 0
    return [one for one in _moving(cell) if one != "dtr" or alone]


def _pairs(
    rows: Sequence[Row], form: str, rival: str, load: float = 1.0, rivals: Rivals = _all, time: str = "overhead"
) -> Iterator[tuple[float, float]]:
    for network, share in {(row["network"], row["share"]): None for row in rows}:
        of_cell = network, share, load
        cell = {row["method"]: row for row in rows if (row["network"], row["share"], row["load"]) == of_cell}
        others = [cell[one].get("overhead") for one in (rivals(cell) if rival == THE_BEST else (rival,)) if one in cell]
        there = [one for one in others if one is not None]
        own = cell.get(form, {}).get(time)
        if own is not None and there:
            yield own, min(there)


def _checks(result: Result) -> Iterator[Check]:
    rows = [row for row in result.rows if "network" in row]
    found = [time / other for time, other in _pairs(rows, OURS, THE_BEST)]
    if found:
        mean = sum(found) / len(found)
        yield Check(what=f"{OURS}: time over that of the best of the paper's rivals", measured=mean, at_most=0.65)
    refused = sum(row["method"] == OURS and "overhead" not in row for row in rows)
    yield Check(what=f"cells in which {OURS} does not fit", measured=refused)


CONDITIONS: Final[Sequence[tuple[str, Rivals, str]]] = (
    ("as it stands", _all, "overhead"),
    ("ZeRO-Offload for the static network alone", _published, "overhead"),
    ("the same where anything has to move", _moving, "overhead"),
    ("the same, DTR where it moves nothing", _recomputing, "overhead"),
    ("the same, all copies hidden that could be", _recomputing, "least"),
)
"""What makes this the paper's comparison, one after the other."""
COLUMNS: Final = (
    *columns.text(network="network"),
    *columns.shown("{:.0%}".format, share="budget"),
    *columns.shown("{:g}".format, load="load"),
    *columns.text(method="method", shown="time / plain"),
    *columns.shown("{:.2f}".format, over="over the best", least="at least", copies="copies / plain"),
    *columns.shares(hidden="hidden", plain="ops", stalls="waiting", recomputing="recomputing", less="less time"),
    *columns.shown("{:.2f}".format, gb_in="GB in", gb_out="GB out"),
    *columns.shown("{:.0f}".format, freed="GB freed a second"),
    *columns.shares(update="update"),
)  # fmt: skip
NOTES: Final = (
    "Steps of the networks of `spillway.workloads` at widths of 256 to 1,024, recorded here and timed by roofline. The "
    "budget is a share of what the plain step takes at most. UVM is refused beyond twice the budget, as in the paper.",
    "Load: ops of the forward and backward take so many times their seconds of the roofline. At least: what the step "
    "would take if all of its copies were hidden that ops and the two lanes leave room for. GB freed a second: of "
    "recomputing; the link moves 12 each way. Update: the share of the plain step that ZeRO-Offload's host spares the "
    "device.",
    "DTR moves what it may not drop, where its paper's runs out of memory.",
)
BENCHMARK: Final = Benchmark(
    name="dynn_training_time",
    run=run,
    judge=_checks,
    full=Size(networks=tuple(SIZES), shares=(0.5, 0.7, 0.9), loads=(1.0, 4.0)),
    quick=Size(networks=("var-lstm",), shares=(0.7,), loads=(1.0, 4.0), smaller=True),
)
