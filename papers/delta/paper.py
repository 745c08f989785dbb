"""The numbers of DELTA's tables, read where they stand beside the project; none is kept in it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from benchmarks.record import Skipped
from papers import SHARED

TABLES: Final = SHARED / "papers" / "tables"
"""`../shared/papers/tables`, seen from the root of the project."""

METHODS: Final = ("baseline", "DTR", "DELTA")
"""As the paper's tables name them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """A row of Table III or IV."""

    batch: int
    growth: float
    memory_gib: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A row of Table V, in seconds."""

    tensor: str
    swap: float
    recompute: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What the paper says."""

    memory_mib: dict[tuple[str, str], float]
    """Table II by model and method."""
    resnet_gib: dict[tuple[int, str], float]
    """Figure 3 by batch and method; nothing where it ran out of memory or was not told."""
    largest: dict[tuple[str, str], Largest]
    """Tables III and IV by model and method."""
    costs: tuple[Costs, ...]
    """Table V."""
    claims: dict[str, str]
    """What stands in the text, by number."""

    @classmethod
    def read(cls, folder: Path = TABLES) -> Self:
        """Read all of it. Raises Skipped where it is not."""
        if not folder.is_dir():
            raise Skipped(f"the paper's numbers are not there: {folder}")
        table2, figure3 = _rows(folder, "table2_memory_MB"), _rows(folder, "fig3_resnet50_memory_GB")
        return cls(
            memory_mib={
                (model.replace("ResNext", "ResNeXt"), row["method"]): float(number)
                for row in table2
                for model, number in row.items()
                if model != "method"
            },
            resnet_gib={
                (int(row["batch"]), method): float(row[method])
                for row in figure3
                for method in METHODS
                if row[method] not in ("", "OOM")
            },
            largest={
                (model, row["method"]): Largest(
                    batch=int(row["max_batchsize"]), growth=float(row["growth_x"]), memory_gib=float(row["memory_GB"])
                )
                for model, name in (("ResNet-50", "table3_maxbs_resnet50"), ("ResNet-101", "table4_maxbs_resnet101"))
                for row in _rows(folder, name)
            },
            costs=tuple(
                Costs(
                    tensor=f"{row['tensor']}({row['id']})", swap=float(row["c_s_us"]) / 1e6,
                    recompute=float(row["c_r_us"]) / 1e6,
                )
                for row in _rows(folder, "table5_costs_us")
            ),
            claims={row["id"]: f"{row['value']} {row['unit']}".strip() for row in _rows(folder, "text_claims")},
        )  # fmt: skip


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"delta_{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
