"""`spillway train`: a workload under a budget."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer
from rich.console import Console

from spillway.budgets import parse_budget
from spillway.cli.common import (
    Json,
    Method,
    Page,
    ReturnFreed,
    Seed,
    SpillDirectory,
    SpillIO,
    Steps,
    Workload,
    check_writable,
    print_json,
    say,
    to_terminal,
    write_page,
)
from spillway.cli.training import announce, board, broken_promises, page_facts, print_rows, run_announced
from spillway.errors import SpillwayError
from spillway.internals.machine_memory import usable_memory
from spillway.methods import resolve
from spillway.report.live import LiveLine
from spillway.subprocess_runs.rows import Row, row
from spillway.subprocess_runs.run import RunRequest, RunResult, StepDone, run

STEPS: Final = 20
METHOD: Final = "auto"


def train(
    *,
    workload: Workload,
    budget: Annotated[str, typer.Option(help='Bytes, "6GiB", "80%" of usable memory, or "none".')],
    method: Method = METHOD,
    steps: Steps = STEPS,
    spill_directory: SpillDirectory = None,
    spill_io: SpillIO = "buffered",
    return_freed: ReturnFreed = True,
    run_file: Annotated[Path | None, typer.Option(help="Where to write the figures of every step.")] = None,
    output: Page = None,
    plain_check: Annotated[bool, typer.Option(help="Train plainly too, first, and compare every bit.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Train a workload under a budget, in a process of its own with one thread.

    With --plain-check, ends with exit code 1 if the run is not bit for bit the plain one.
    """
    resolve(method)
    allowed = None if budget == "none" else parse_budget(budget, usable_memory())
    check_writable(run_file, output, read=[workload])
    with TemporaryDirectory(prefix="spillway-") as folder:
        figures = run_file or Path(folder) / "run.jsonl"
        request = RunRequest(
            workload=workload, seed=seed, steps=steps, method=method, budget_bytes=allowed,
            spill_directory=None if spill_directory is None else str(spill_directory), spill_io=spill_io,
            return_freed=return_freed, run_file=str(figures), timeline=run_file is not None or output is not None,
        )  # fmt: skip
        rows = _rows(request, plain_check=plain_check)
        if output is not None:
            write_page(output, figures, page_facts(workload, rows[-1]))
    if json:
        files = {"run_file": run_file, "report": output}
        paths = {name: None if path is None else str(path) for name, path in files.items()}
        print_json({"workload": workload, **rows[-1].to_json(), **paths})
    else:
        print_rows(workload, rows, method)
    for broken in broken_promises(rows):
        raise SpillwayError(f"{broken} Either the workload is not twice the same, or this is a bug in Spillway.")


def _rows(request: RunRequest, *, plain_check: bool) -> list[Row]:
    """The run's row, after that of the plain run if that was asked for."""
    console = to_terminal()
    if not plain_check:
        return [row(request, _watched(request, console), None)]
    plainly = replace(request, method=None, budget_bytes=None, run_file=None, timeline=False)
    with board(console) as shown:
        plain = run_announced(shown, announce(shown, "plain", request.steps), plainly)
    return [row(plainly, plain, plain), row(request, _watched(request, console), plain)]


def _watched(request: RunRequest, console: Console) -> RunResult:
    """Run it behind the live line."""
    with closing(LiveLine(console=console)) as live:

        def step(done: StepDone) -> None:
            if done.report is not None:
                live.update(done.report)

        return run(request, step=step, output=partial(say, console))
