"""What Mimose's paper says of its four tasks, read where it stands beside the project; none of it is kept here."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from benchmarks.record import Skipped
from papers.delta.paper import TABLES

_RANGES: Final = {"SWAG": "M7", "SQuAD": "M8", "GLUE-QQP": "M9"}
"""The claims that give the lengths of a data set's batches."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A row of Table 1, and the lengths of Fig. 3."""

    dataset: str
    batch: int
    shortest: int
    """Of the batches of an epoch, in tokens."""
    longest: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What the paper says."""

    tasks: dict[str, Told]
    """By the names of Table 2, in the order of Table 1."""
    claims: dict[str, float]
    """What stands in the text and is one number, by its own numbering."""

    @classmethod
    def read(cls, folder: Path = TABLES) -> Self:
        """Read all of it. Raises Skipped where it is not."""
        if not folder.is_dir():
            raise Skipped(f"the paper's numbers are not there: {folder}")
        claims = {row["id"]: row["value"] for row in _rows(folder, "text_claims")}
        tasks = {}
        for row in _rows(folder, "table1_tasks"):
            shortest, longest = map(int, claims[_RANGES[row["dataset"]]].split("-"))
            tasks[row["task"].partition("(")[2].rstrip(")")] = Told(
                dataset=row["dataset"], batch=int(row["batch_size"]), shortest=shortest, longest=longest
            )
        return cls(tasks=tasks, claims={name: float(value) for name, value in claims.items() if _is_number(value)})


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"mimose_{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
