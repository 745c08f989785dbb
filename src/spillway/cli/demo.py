"""`spillway demo`: the same training plain and under three budgets, on input that every machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, final

import typer

from spillway.cli.board import Board
from spillway.cli.common import (
    Json,
    Method,
    Seed,
    SpillDirectory,
    Steps,
    check_writable,
    machine_memory,
    print_json,
    to_terminal,
    write_page,
)
from spillway.cli.tables import broken_promises, page_facts, print_rows
from spillway.errors import BudgetInfeasible, EngineError
from spillway.methods import resolve
from spillway.report.figures import highest_peak
from spillway.runs.comparison import RefusedRow, Row, plain_row, refused_row, row
from spillway.runs.records import RunRequest, RunResult
from spillway.units import Bytes, parse_budget

WORKLOAD: Final = "stdlib-lm"
STEPS: Final = 12
BUDGETS: Final = "70%,50%,35%"
METHOD: Final = "lru"
OUTPUT: Final = Path("spillway-report.html")


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

    Every run is a process of its own with one thread and does the same steps. Ends with exit code 1 if a run is not
    bit for bit the plain one, or went over its budget.
    """
    resolve(method)
    check_writable(output)
    wanted = [text.strip() for text in budgets.split(",")]
    for text in wanted:
        parse_budget(text, machine_memory())  # What makes no sense is refused before minutes are spent.
    spill = None if spill_directory is None else str(spill_directory)
    request = RunRequest(
        workload=WORKLOAD, seed=seed, steps=steps, method=None, budget_bytes=None, spill_directory=spill
    )
    with TemporaryDirectory(prefix="spillway-") as folder, Board(to_terminal()) as board:
        rows = _Demo(board, request, wanted, method, Path(folder) / "run.jsonl").rows(output)
    if json:
        print_json([row.to_json() for row in rows])
    else:
        print_rows(WORKLOAD, method, rows)
        print(f"Memory and lanes over the time of a step: {output}")
    for broken in broken_promises(rows):
        raise EngineError(broken)


@final
class _Demo:
    """The runs of a demo, announced when made."""

    def __init__(self, board: Board, request: RunRequest, wanted: Sequence[str], method: str, run_file: Path) -> None:
        self._board = board
        self._request = request
        self._wanted = wanted
        self._method = method
        self._run_file = run_file
        titles = ["plain", "plain, with account", *(f"budget {text}" for text in wanted)]
        self._tasks = [board.announce(title, request.steps) for title in titles]

    def rows(self, output: Path) -> list[Row | RefusedRow]:
        """Run plain, then keeping account only, then under each budget; write the page."""
        plain = self._board.run(self._tasks[0], self._request)
        account = self._board.run(self._tasks[1], replace(self._request, method="keep-all"))
        first = plain_row(self._request, plain, account)
        peak = highest_peak(account.reports)
        rows = [self._row(index, peak, plain) for index in range(len(self._wanted))]
        middle = rows[self._middle]
        if isinstance(middle, Row):
            write_page(output, self._run_file, page_facts(WORKLOAD, middle))
        return [first, *rows]

    @property
    def _middle(self) -> int:
        return len(self._wanted) // 2

    def _row(self, index: int, plain_peak: Bytes, plain: RunResult) -> Row | RefusedRow:
        text = self._wanted[index]
        budget = parse_budget(text, plain_peak if text.endswith("%") else machine_memory())
        request = replace(self._request, method=self._method, budget_bytes=budget)
        if index == self._middle:
            request = replace(request, run_file=str(self._run_file), timeline=True)
        try:
            return row(request, self._board.run(self._tasks[2 + index], request), plain)
        except BudgetInfeasible as error:
            return refused_row(budget_bytes=budget, method=self._method, error=error)
