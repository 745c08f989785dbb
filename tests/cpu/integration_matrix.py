"""The table of docs/integrations.md, made by the tests: integrations, methods, and what training loops do besides.

A module `test_integrations_*.py` holds the rows of its integrations in `MATRIX` and checks every cell:

    MATRIX = {"Trainer": Row(trained)}

    @pytest.mark.parametrize(("name", "situation"), cells(MATRIX))
    def test_the_table_says_what_happens(name: str, situation: str) -> None:
        check(MATRIX, name, situation)

`python -m tests.cpu.integration_matrix` runs all cells and writes the table; with names of integrations, those rows.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from spillway.errors import ModelError, UsageError

METHODS: Final = ("auto", "delta", "mimose")
SITUATIONS: Final = ("accumulation", "clipping", "evaluation", "save and resume", "bf16 autocast")
"""What a loop does besides: gradients of several micro-batches are added up before the optimizer steps; their norm is
clipped; the model is evaluated between steps; training is saved, and goes on in new objects; forwards are autocast."""

HOLDS: Final = "identical, within budget"
PAGE: Final = Path(__file__).parents[2] / "docs" / "integrations.md"
BEGIN: Final = "<!-- made by `python -m tests.cpu.integration_matrix` -->"
END: Final = "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training left."""

    told: Sequence[Any]
    """Numbers and tensors that its loop told, in order: losses, norms of gradients, figures of evaluations."""
    state: Mapping[str, Tensor]
    """Weights and buffers at its end; of several processes, those of each."""
    peaks: Sequence[int] = field(default=())
    """Bytes, of each step of the session, of each process; none without a session."""


class Row(NamedTuple):
    """An integration."""

    trained: Callable[[str, str | None, int | None], Trained]
    """Trains a small model on batches of several lengths, from the same seed each time: in a situation, under a method
    (None: without Spillway) and a budget in bytes (None: a session that only keeps account)."""
    share: float = 0.7
    """The budget, of the peak of a session that only keeps account."""


def cells(matrix: Mapping[str, Row]) -> list[tuple[str, str]]:
    """For `parametrize`: all methods in one test, since they are compared with one plain training.

    Two situations an integration, other ones for each, so that every situation is met by several; all of them with
    SPILLWAY_WHOLE_TABLE=1, and by the command above.
    """
    whole = os.environ.get("SPILLWAY_WHOLE_TABLE") == "1"
    taken = {name: SITUATIONS if whole else _some(name) for name in matrix}
    return [(name, situation) for name, situations in taken.items() for situation in situations]


def _some(name: str) -> list[str]:
    first = sum(name.encode()) % len(SITUATIONS)
    return [SITUATIONS[(first + more) % len(SITUATIONS)] for more in (0, 2)]


def check(matrix: Mapping[str, Row], name: str, situation: str) -> None:
    """Fails unless every method does in this situation what the table says."""
    told = _table(PAGE.read_text())
    for method in METHODS:
        found, said = verdict(matrix[name], method, situation), told.get((name, method), {}).get(situation)
        assert found == said, f"{name}, {method}, {situation}: the table says {said!r}, and it is {found!r}"


def verdict(row: Row, method: str, situation: str) -> str:
    """What stands in a cell: `HOLDS`, or the sentence with which Spillway refuses the model or what it was given.

    Raises AssertionError for results that are other than plain, and for a peak above the budget: no cell says so.
    """
    plain, budget = _plainly(row.trained, situation), _budget(row, situation)
    try:
        found = row.trained(situation, method, budget)
    except (ModelError, UsageError) as refusal:
        return str(refusal)
    assert _same(plain.told, found.told), f"{method}, {situation}: {found.told} was told, and plainly {plain.told}"
    assert plain.state.keys() == found.state.keys(), f"{method}, {situation}: other tensors are left"
    wrong = [name for name, value in plain.state.items() if not _same(value, found.state[name])]
    assert not wrong, f"{method}, {situation}: {', '.join(wrong[:5])} are other than after a plain training"
    assert 0 < max(found.peaks) <= budget, f"{method}, {situation}: a peak of {max(found.peaks)}, a budget of {budget}"
    return HOLDS


@functools.cache
def _plainly(trained: Callable[[str, str | None, int | None], Trained], situation: str) -> Trained:
    plain = trained(situation, None, None)
    assert plain.told
    assert plain.state
    return plain


@functools.cache
def _budget(row: Row, situation: str) -> int:
    """Below what the training takes if nothing gives way."""
    return int(row.share * max(row.trained(situation, "lru", None).peaks))


def _same(one: Any, other: Any) -> bool:
    """Bit for bit, but for NaN, which equals NaN here."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) or (one != one and other != other)


def _table(page: str) -> dict[tuple[str, str], dict[str, str]]:
    """What the page says: cells by integration and method, by situation."""
    lines = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[2:]]
    return {(row[0], row[1]): dict(zip(("budget", *SITUATIONS), row[2:], strict=True)) for row in rows}


def _written(page: str, told: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """The page with that table."""
    head = ("integration", "method", "budget", *SITUATIONS)
    rows = [head, ["---"] * len(head), *([*key, *row.values()] for key, row in told.items())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def rows() -> dict[str, Row]:
    """Those of all modules, in the order of the table."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("test_integrations_*.py"))
    return {name: row for one in modules for name, row in import_module(f"tests.cpu.{one}").MATRIX.items()}


def main(names: Sequence[str]) -> None:
    """Run the cells of these integrations, of all without a name, and write what they say."""
    torch.set_num_threads(1)
    matrix, told = rows(), _table(PAGE.read_text())
    for name in names or matrix:
        for method in METHODS:
            share = f"{matrix[name].share:.0%}"
            told[name, method] = {"budget": share} | {one: verdict(matrix[name], method, one) for one in SITUATIONS}
            print(name, method, told[name, method], flush=True)
    ordered = {(name, method): told[name, method] for name in matrix for method in METHODS if (name, method) in told}
    PAGE.write_text(_written(PAGE.read_text(), ordered))


if __name__ == "__main__":
    main(sys.argv[1:])
