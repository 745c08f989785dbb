"""The tables of DELTA, simulated on an A100 with both readings of its link, beside what the paper says.

Tang et al., arXiv:2203.15980: Tables II to V, Figures 3 and 7, and what its text claims. The README beside
this explains every row that is further from the paper than a tenth, by the letter in the column "why".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell
from papers.delta.batches import Found, tables_3_and_4
from papers.delta.costs import Cells, claims, ordered, table_5
from papers.delta.lab import LINKS, TOLERANCE, Lab, Size, unexplained
from papers.delta.memory import FILTERED, figure_3, figure_7, table_2
from papers.delta.paper import Paper
from spillway.units import GiB


def run(size: Size, tell: Tell) -> Result:
    """Every table, then what can be checked of it."""
    lab = Lab(size, Paper.read(), tell)
    derived = _derived_wrong(lab)
    memory = table_2(lab) + figure_3(lab)
    batches, largest = tables_3_and_4(lab)
    filters, cells = figure_7(lab)
    costs = table_5(lab)
    rows = [*memory, *batches, *costs, *filters, *claims(lab, largest, cells)]
    return Result(
        title="DELTA's tables, simulated on an A100",
        columns=COLUMNS,
        rows=rows,
        checks=_checks(derived, rows, costs, largest, cells),
        notes=NOTES,
    )


def _checks(
    derived: int, rows: Sequence[Row], costs: Sequence[Row], largest: Mapping[tuple[str, str], Sequence[Found]],
    cells: Cells,
) -> list[Check]:  # fmt: skip
    baselines = [abs(row["deviation"]) for row in rows if _is_baseline(row)]
    worse, more = ordered(cells)
    figures: dict[str, tuple[float, float]] = {
        "numbers of a derived step that are not as recorded": (derived, 0),
        "rows beyond tolerance without an explanation": (unexplained(rows), 0),
        "largest deviation of a plain ResNet's memory": (max(baselines), 0.06),
        "largest batches not in the paper's order (plain, DTR, DELTA)": (_disorder(largest), 0),
        "rows of Table V in which recomputing takes as long as the copy": (_slow(costs), 0),
        "models of Figure 7 in which greedy needs less than base or lru": (len(FILTERED) - worse, 0),
        "models of Figure 8 in which lru does not offload most": (len(FILTERED) - more, 0),
    }
    return [Check(what=what, measured=measured, at_most=most) for what, (measured, most) in figures.items()]


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


COLUMNS: Final = (
    *columns.text(table="table", what="what", unit="unit"),
    Column(key="paper", head="paper", show=_shown),
    Column(key="ours", head="ours (paper's link)", show=_shown),
    Column(key="physical", head="ours (physical link)", show=_shown),
    Column(key="deviation", head="deviation", show="{:+.1%}".format),
    *columns.text(why="why", note="note"),
)

NOTES: Final = (
    "Links: " + "; ".join(f"{device.name} {device.out_per_second / 1e9:g} GB/s a direction" for device in LINKS) + ". "
    "The deviation is that of the run with the paper's link. "
    f"Beyond {TOLERANCE:.0%} the letter stands for a paragraph of papers/delta/README.md.",
    "Assumed, because the paper does not tell: batch 128 in Table II (BERT: 32, told), fp32 without TF32, pictures of "
    "224 x 224, questions of 384 tokens, GELU as one op, EfficientNet-B0, Adam, units of 2^20 and 2^30 bytes, budgets.",
    "DELTA and DTR run here as their papers' runs did: under a budget that the policy knows and nobody enforces, DELTA "
    "without releases in the backward. Under Spillway's controller no step passes its budget.",
    "Memory is what is in use at once (max_memory_allocated), without workspaces of convolutions. Largest batches are "
    "those for which PyTorch's caching allocator, as modelled, has room in 80 GiB, none of them taken by CUDA itself.",
)


def _derived_wrong(lab: Lab) -> int:
    """Numbers of a step of which a derived one and a recorded one do not agree."""
    derived = lab.growth("ResNet-50").step_at(lab.size.checked)
    recorded = lab.recorded("ResNet-50", lab.size.checked)
    pairs: list[tuple[object, object]] = list(zip(derived.storages, recorded.storages, strict=True))
    pairs += zip(derived.ops, recorded.ops, strict=True)
    return sum(one != other for one, other in pairs)


def _is_baseline(row: Row) -> bool:
    """Whether the row tells what a plain step of a ResNet takes, or which one takes so much."""
    told = row["table"] in ("II", "Fig. 3") or "plain step in" in row["what"]
    return told and "baseline" in row["what"] and "BERT" not in row["what"] and row["deviation"] is not None


def _disorder(largest: Mapping[tuple[str, str], Sequence[Found]]) -> int:
    batches = {key: found[0].batch for key, found in largest.items()}
    models = {model for model, _ in batches}
    return sum(
        batches[model, one] >= batches[model, other]
        for model in models
        for one, other in (("baseline", "DTR"), ("DTR", "DELTA"))
    )


def _slow(costs: Sequence[Row]) -> int:
    """By the rows' own figures: a cost of a copy, then that of recomputing the same."""
    seconds: dict[str, dict[str, float]] = {}
    for row in costs:
        tensor, _, cost = row["what"].rpartition(" ")
        if cost in ("c_s", "c_r"):
            seconds.setdefault(tensor, {})[cost] = row["ours"]
    return sum(pair["c_r"] >= pair["c_s"] for pair in seconds.values())


BENCHMARK: Final = Benchmark(
    name="delta_tables",
    run=run,
    full=Size(
        options={},
        sizes=(2, 3, 5),
        checked=128,
        batches={"ResNet-50": 128, "ResNet-101": 128, "ResNeXt-50": 128, "EfficientNet": 128, "BERT": 32},
        curve=(128, 256, 512, 1072, 1814),
        shares=(0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
        device_shares=(0.9, 0.8, 0.65, 0.5, 0.4, 0.3),
        ladder=1.04,
    ),
    quick=Size(
        options={
            **{name: {"blocks": (1, 1), "side": 64} for name in ("ResNet-50", "ResNet-101", "ResNeXt-50")},
            "EfficientNet": {"side": 64},
            "BERT": {"layers": 1, "length": 32},
        },
        sizes=(2, 3, 5),
        checked=7,
        batches={"ResNet-50": 16, "ResNet-101": 16, "ResNeXt-50": 16, "EfficientNet": 4, "BERT": 8},
        curve=(16,),
        shares=(0.7, 0.5),
        device_shares=(0.8,),
        ladder=1.3, devices=(replace(LINKS[0], memory=GiB), replace(LINKS[1], memory=GiB)),
    ),
)  # fmt: skip
