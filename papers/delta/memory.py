"""DELTA's Table II and Figures 3 and 7: how much memory a step takes at a batch, and under which filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.record import Row
from papers.delta.lab import HERITAGE, WORTH, Lab, figure, gib, mib, overheads, published
from papers.delta.soft_budget import Ran, run_softly
from spillway.methods import METHODS
from spillway.units import Bytes

COMPARED: Final = ("ResNet-101", "ResNeXt-50", "BERT")
"""The models of Table II."""
FILTERED: Final = ("ResNet-50", "EfficientNet", "ResNeXt-50")
"""The models of Figure 7."""
FILTERS: Final = ("base", "lru", "greedy")
COMPOSED: Final = "gelu_python"
"""An activation of three ops instead of one, as frameworks without a kernel for it have it."""


def table_2(lab: Lab) -> list[Row]:
    """Memory of three models."""
    rows = []
    for model in COMPARED:
        batch = lab.size.batches[model]
        lab.tell(f"Table II: {model}")
        rows += _methods(lab, "II", model, batch, mib, "MiB", {m: lab.paper.memory_mib[model, m] for m in _NAMES})
    batch = lab.size.batches["BERT"]
    composed = lab.step("BERT", batch, activation=COMPOSED).plain_peak()
    note = "the activation of three ops, each of whose results is kept"
    rows.insert(
        2 * len(_WHY) + 1,
        figure("II", f"BERT, batch {batch}: baseline, GELU composed", lab.paper.memory_mib["BERT", "baseline"],
               (mib(composed),), "MiB", why="b", note=note),
    )  # fmt: skip
    return rows


def figure_3(lab: Lab) -> list[Row]:
    """Memory of ResNet-50 as the batch grows."""
    rows = []
    for batch in lab.size.curve:
        lab.tell(f"Figure 3: batch {batch}")
        told = {name: lab.paper.resnet_gib.get((batch, name)) for name in _NAMES}
        rows += _methods(lab, "Fig. 3", "ResNet-50", batch, gib, "GiB", told)
    return rows


_NAMES: Final = ("baseline", "DTR", "DELTA")
_WHY: Final = {"baseline": "b", "DTR": "d", "DELTA": "c", "DELTA under DTR's": "c"}
"""Explanations in papers/delta/README.md."""


def _methods(
    lab: Lab, table: str, model: str, batch: int, scaled: Callable[[Bytes], float], unit: str,
    told: Mapping[str, float | None],
) -> list[Row]:  # fmt: skip
    step = lab.step(model, batch)
    least = lab.least(model, batch)
    dtr = [
        run_softly(step, METHODS[HERITAGE](), ran.budget, device)
        for ran, device in zip(least, lab.size.devices, strict=True)
    ]

    def row(method: str, paper: float | None, ours: Sequence[float | str], note: str = "") -> Row:
        return figure(table, f"{model}, batch {batch}: {method}", paper, ours, unit, why=_WHY[method], note=note)

    def peaks(runs: Sequence[Ran]) -> list[float | str]:
        return [scaled(ran.simulation.peak_bytes) if ran.ok else ran.simulation.status for ran in runs]

    budgets = ", ".join(f"{scaled(ran.budget):,.4g}" for ran in least)
    rows = [
        row("baseline", told["baseline"], (scaled(step.plain_peak()),)),
        row("DTR", told["DTR"], peaks(dtr), f"budget {budgets}; {overheads(dtr)}"),
        row(
            "DELTA",
            told["DELTA"],
            peaks(least),
            f"budget {budgets}, at which it is least at up to {WORTH:g} x plain; {overheads(least)}",
        ),
    ]
    if told["DTR"] is not None and told["baseline"] is not None:
        saved = told["DTR"] / told["baseline"]
        under = lab.soft(model, batch, published, saved)
        note = f"budget {saved:.1%} of the plain peak, what DTR took in the paper; {overheads(under)}"
        rows.append(row("DELTA under DTR's", told["DELTA"], peaks(under), note))
    return rows


# ---------------------------------------------------------------------- Figure 7


def figure_7(lab: Lab) -> tuple[list[Row], dict[tuple[str, float], dict[str, tuple[Ran, Ran]]]]:
    """The three filters under every budget; the rows, and the runs by model, share and filter."""
    rows: list[Row] = []
    cells: dict[tuple[str, float], dict[str, tuple[Ran, Ran]]] = {}
    for model in FILTERED:
        batch = lab.size.batches[model]
        lab.tell(f"Figure 7: {model}")
        for share in lab.size.shares:
            cell = {name: lab.soft(model, batch, partial(published, name), share) for name in FILTERS}
            cells[model, share] = cell
            budget = gib(next(iter(cell.values()))[0].budget)
            what = f"{model}, batch {batch}, budget {share:.0%} = {budget:.2f} GiB: "
            names = " / ".join(FILTERS)
            rows.append(figure("Fig. 7", f"{what}memory, {names}", None, _shown(cell, _peak), "GiB"))
            rows.append(figure("Fig. 8", f"{what}offloads, {names}", None, _shown(cell, _offloads)))
    return rows, cells


def _shown(cell: Mapping[str, tuple[Ran, Ran]], of: Callable[[Ran], str]) -> list[str]:
    return [" / ".join(of(pair[link]) for pair in cell.values()) for link in range(2)]


def _peak(ran: Ran) -> str:
    return f"{gib(ran.simulation.peak_bytes):.2f}" if ran.ok else ran.simulation.status


def _offloads(ran: Ran) -> str:
    return str(ran.offloads)
