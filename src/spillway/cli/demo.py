"""`spillway demo`: the same training plain and under three budgets, on input that every machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, final

import typer
from rich.progress import TaskID

from spillway.cli.board import Board
from spillway.cli.common import (
    Json,
    Method,
    Seed,
    SpillDirectory,
    Steps,
    check_writable,
    print_json,
    to_terminal,
    write_page,
)
from spillway.cli.tables import broken_promises, page_facts, print_methods, print_rows
from spillway.engines.memory import machine_memory
from spillway.errors import BudgetInfeasible, EngineError
from spillway.methods import resolve
from spillway.report.figures import highest_peak
from spillway.subprocess_runs.rows import RefusedRow, Row, plain_row, refused_row, row
from spillway.subprocess_runs.run import STATIC, RunRequest, RunResult
from spillway.units import Bytes, parse_budget

WORKLOAD: Final = "stdlib-lm"
STEPS: Final = 8
BUDGETS: Final = "70%,50%,35%"
METHOD: Final = "lru"
OUTPUT: Final = Path("spillway-report.html")
BY_BLOCK: Final = ("mimose", STATIC, "checkpoint", "delta")
"""Side by side under the middle one of the budgets, in the second table."""


def demo(
    *,
    steps: Steps = STEPS,
    budgets: Annotated[
        str, typer.Option(help="Separated by commas; a percentage is one of the plain run's peak.")
    ] = BUDGETS,
    method: Method = METHOD,
    spill_directory: SpillDirectory = None,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="Where to write the page about the middle one of the budgets.")] = OUTPUT,
    json: Json = False,
) -> None:
    """Train a language model on Python's standard library: plain, then under smaller and smaller budgets.

    Then the same under the middle one of the budgets on the block engine: Mimose, one static plan for the longest
    input, every block recomputed; and DELTA; there freed memory stays with the allocator, as in the plain run. Every
    run is a process of its own with one thread and does the same steps.
    Ends with exit code 1 if a run is not bit for bit the plain one, or went over its budget.
    """
    resolve(method)
    check_writable(output)
    check_writable(page_by_size(output))
    wanted = [text.strip() for text in budgets.split(",")]
    for text in wanted:
        parse_budget(text, machine_memory())  # What makes no sense is refused before minutes are spent.
    spill = None if spill_directory is None else str(spill_directory)
    request = RunRequest(
        workload=WORKLOAD, seed=seed, steps=steps, method=None, budget_bytes=None, spill_directory=spill
    )
    with TemporaryDirectory(prefix="spillway-") as folder, Board(to_terminal()) as board:
        runs = _Demo(board, request, wanted, method, Path(folder))
        rows = runs.rows(output)
        by_block = runs.by_block(page_by_size(output))
    if json:
        print_json([row.to_json() for row in [*rows, *by_block]])
    else:
        print_rows(WORKLOAD, method, rows)
        print_methods(WORKLOAD, [rows[0], *by_block])
        for page, what in runs.pages.items():
            print(f"{what}: {page}")
    for broken in broken_promises([*rows, *by_block]):
        raise EngineError(broken)


def page_by_size(output: Path) -> Path:
    """Where the second page goes: beside the first."""
    return output.with_stem(f"{output.stem}-mimose")


@final
class _Demo:
    """The runs of a demo, announced when made."""

    def __init__(self, board: Board, request: RunRequest, wanted: Sequence[str], method: str, folder: Path) -> None:
        self._board = board
        self._request = request
        self._wanted = wanted
        self._method = method
        self._run_file = folder / "run.jsonl"
        self._run_file_by_size = folder / "by-size.jsonl"
        self.pages: dict[Path, str] = {}
        """What was written, and what it shows."""
        self._plain: RunResult | None = None
        self._peak: Bytes = 0
        middle = wanted[self._middle]
        titles = ["plain", "plain, with account", *(f"budget {text}" for text in wanted)]
        titles += [f"budget {middle}, {name}" for name in BY_BLOCK]
        self._tasks = [board.announce(title, request.steps) for title in titles]

    def rows(self, output: Path) -> list[Row | RefusedRow]:
        """Run plain, then keeping account only, then under each budget; write the page."""
        plain = self._board.run(self._tasks[0], self._request)
        account = self._board.run(self._tasks[1], replace(self._request, method="keep-all"))
        first = plain_row(self._request, plain, account)
        self._plain, self._peak = plain, highest_peak(account.reports)
        rows = [self._row(index, plain) for index in range(len(self._wanted))]
        middle = rows[self._middle]
        if isinstance(middle, Row):
            write_page(output, self._run_file, page_facts(WORKLOAD, middle))
            self.pages[output] = "Memory and lanes over the time of a step"
        return [first, *rows]

    def by_block(self, output: Path) -> list[Row | RefusedRow]:
        """After `rows`: run each of `BY_BLOCK` under the middle budget; write the page about Mimose.

        Freed memory stays with the allocator, as it does in the plain run: what page faults cost is not theirs.
        """
        assert self._plain is not None
        request = replace(
            self._request, budget_bytes=self._budget(self._middle), timeline=True, return_freed=False
        )  # fmt: skip
        rows = []
        for task, name in zip(self._tasks[-len(BY_BLOCK) :], BY_BLOCK, strict=True):
            figures = str(self._run_file_by_size) if name == BY_BLOCK[0] else None
            rows.append(self._run(task, replace(request, method=name, run_file=figures), self._plain))
        if isinstance(rows[0], Row):
            write_page(output, self._run_file_by_size, page_facts(WORKLOAD, rows[0]))
            self.pages[output] = "Memory against input size under Mimose"
        return rows

    @property
    def _middle(self) -> int:
        return len(self._wanted) // 2

    def _budget(self, index: int) -> Bytes:
        text = self._wanted[index]
        return parse_budget(text, self._peak if text.endswith("%") else machine_memory())

    def _row(self, index: int, plain: RunResult) -> Row | RefusedRow:
        request = replace(self._request, method=self._method, budget_bytes=self._budget(index))
        if index == self._middle:
            request = replace(request, run_file=str(self._run_file), timeline=True)
        return self._run(self._tasks[2 + index], request, plain)

    def _run(self, task: TaskID, request: RunRequest, plain: RunResult) -> Row | RefusedRow:
        try:
            return row(request, self._board.run(task, request), plain)
        except BudgetInfeasible as error:
            assert request.budget_bytes is not None
            assert request.method is not None
            return refused_row(budget_bytes=request.budget_bytes, method=request.method, error=error)
