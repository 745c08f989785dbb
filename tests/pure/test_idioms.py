from __future__ import annotations

import csv
import re

import pytest

from spillway.pilots.idioms import ADDED, PUBLISHED, counts_of, folded, nine_vectors
from spillway.pilots.paths import OpSignature
from tests.shared import SHARED

TABLE = SHARED / "papers" / "tables" / "dynn_idiom_table.csv"


def names(cell: str) -> list[str]:
    """`slow_conv3d(_backward); x*` -> the names that are meant."""
    found = []
    for word in re.split(r"[;,]\s*", cell):
        plain, ending = re.fullmatch(r"([\w]+)\*?\s*(?:\((\w+).*\))?", word).groups()  # type: ignore[union-attr]
        found.append(plain)
        if ending is not None and ending.startswith("_"):
            found.append(plain + ending.replace("_with_indice", "_with_indices").replace("indicess", "indices"))
    return found


@pytest.mark.skipif(not TABLE.is_file(), reason="the published table stands beside the project")
def test_counts_are_those_that_were_published() -> None:
    with TABLE.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    told = {
        name: tuple(int(row[idiom]) for idiom in ("transpose", "gather", "scatter", "reduction", "stream", "stencil"))
        for row in rows for name in names(row["operators"])
    }  # fmt: skip
    no_ops = {"Tensor", "Scaler", "data"}
    assert {name: counts_of(name) for name in told if name not in no_ops} == {
        name: counts for name, counts in told.items() if name not in no_ops
    }


def test_additions_contradict_nothing_that_was_published() -> None:
    assert not PUBLISHED.keys() & ADDED.keys()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("aten.mm.default", (1, 0, 0, 1, 1, 0)),
        ("aten.addmm.default", (1, 0, 0, 1, 2, 0)),
        ("aten.add.Tensor", (0, 0, 0, 0, 1, 0)),
        ("aten.add_.Tensor", (0, 1, 0, 0, 0, 0)),
        ("aten.convolution.default", (0, 1, 0, 1, 1, 2)),
        ("aten.unheard_of.default", (0, 0, 0, 0, 1, 0)),
    ],
)
def test_an_op_has_the_counts_of_its_name(name: str, counts: tuple[int, ...]) -> None:
    assert counts_of(name) == counts


def test_dimensions_are_folded_to_three() -> None:
    assert [folded(shape) for shape in ((), (5,), (5, 6), (5, 6, 7), (2, 3, 6, 7))] == [
        (0, 0, 0), (5, 0, 0), (5, 6, 0), (5, 6, 7), (6, 6, 7),
    ]  # fmt: skip


def test_the_vector_of_the_papers_example() -> None:
    """Fig. 3: matmul of [2, 3] and [3, 4] is [1, 0, 0, 1, 1, 0, ar + br, ac + bc, 0]."""
    assert nine_vectors([OpSignature("aten.mm.default", (5, 7, 0), 0, 0, 0)]).tolist() == [[1, 0, 0, 1, 1, 0, 5, 7, 0]]
