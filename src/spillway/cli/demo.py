"""`spillway demo`: the same training plain and under three budgets, on input that every machine has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, final

import typer
from rich.console import Console

from spillway.cli.board import Board
from spillway.cli.common import (
    Json,
    Method,
    Seed,
    SpillDirectory,
    Steps,
    check_writable,
    machine_memory,
    naming,
    print_json,
    to_terminal,
)
from spillway.cli.tables import print_comparison, check_promises
from spillway.errors import BudgetInfeasible
from spillway.ir import RunFile, StepReport, read_run
from spillway.methods import resolve
from spillway.report.html import write_report
from spillway.runs.comparison import RefusedRow, Row, plain_row, refused_row, row
from spillway.runs.records import RunRequest, RunResult
from spillway.units import Bytes, format_bytes, parse_budget

WORKLOAD: Final = "stdlib-lm"
BUDGETS: Final = "70%,50%,35%"
STEPS: Final = 12


def demo(
    *,
    steps: Steps = STEPS,
    budgets: Annotated[
        str, typer.Option(help="Separated by commas; a share is one of what the plain run needs.")
    ] = BUDGETS,
    method: Method = "lru",
    spill_directory: SpillDirectory = None,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option(help="The page about the middle one of the budgets.")] = Path(
        "spillway-report.html"
    ),
    json: Json = False,
) -> None:
    """Train a language model on Python's standard library: plain, then under smaller and smaller budgets.

    Every run is a process of its own with one thread and does the same steps. Ends with exit code 1 if a run is not bit
    for bit the plain one, or went over its budget.
    """
    texts = [text.strip() for text in budgets.split(",")]
    _check(texts, method)
    check_writable(output)
    request = RunRequest(
        workload=WORKLOAD,
        seed=seed,
        steps=steps,
        method=None,
        budget_bytes=None,
        spill_directory=None if spill_directory is None else str(spill_directory),
    )
    console = to_terminal()
    with TemporaryDirectory(prefix="spillway-") as folder, Board(console) as board:
        rows = _Demo(board=board, request=request, method=method, folder=Path(folder)).rows(texts)
        ...
