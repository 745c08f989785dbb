"""`spillway demo`: the same training plain and under three budgets, on input that every machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer
from rich.progress import Progress, TaskID

from spillway.budgets import budget_of_peak, parse_budget
from spillway.cli.common import (
    Json,
    Method,
    Seed,
    SpillDirectory,
    Steps,
    check_writable,
    print_json,
    tell_shares,
    to_terminal,
    write_page,
)
from spillway.cli.training import announce, board, broken_promises, page_facts, print_rows, run_announced
from spillway.errors import BudgetInfeasible, EngineError
from spillway.internals.machine_memory import usable_memory
from spillway.methods import resolve
from spillway.report.figures import highest_peak
from spillway.subprocess_runs.rows import RefusedRow, Row, plain_row, row
from spillway.subprocess_runs.run import STATIC, RunRequest

WORKLOAD: Final = "stdlib-lm"
STEPS: Final = 8
BUDGETS: Final = "0.7x,0.5x,0.35x"
METHOD: Final = "auto"
OUTPUT: Final = Path("spillway-report.html")
BY_BLOCK: Final = ("mimose", STATIC, "checkpoint", "delta")
"""Side by side under the middle one of the budgets, in the second table."""


def demo(
    *,
    steps: Steps = STEPS,
    budgets: Annotated[
        str,
        typer.Option(help="Separated by commas: shares of the plain run's peak, 0.5x; of the memory, 50%; or bytes."),
    ] = BUDGETS,
    method: Method = METHOD,
    spill_directory: SpillDirectory = None,
    seed: Seed = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the page about the middle one of the budgets.")
    ] = OUTPUT,
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
    check_writable(page_by_size(output))  # which a directory has none of
    there, wanted = usable_memory(), [text.strip() for text in budgets.split(",")]
    for text in wanted:
        if budget_of_peak(text, there, there) > there:  # What makes no sense is refused before minutes are spent.
            parse_budget(text, there)
    tell_shares(budgets, "this machine", there)
    spill = None if spill_directory is None else str(spill_directory)
    request = RunRequest(
        workload=WORKLOAD, seed=seed, steps=steps, method=None, budget_bytes=None, spill_directory=spill
    )
    pages: dict[Path, str] = {}
    with TemporaryDirectory(prefix="spillway-") as folder, board(to_terminal()) as shown:
        rows, by_block = _run_all(shown, request, wanted, method, Path(folder), output, pages)
    if json:
        print_json([row.to_json() for row in [*rows, *by_block]])
    else:
        print_rows(WORKLOAD, rows, method)
        print_rows(WORKLOAD, [rows[0], *by_block])
        for page, what in pages.items():
            print(f"{what}: {page}")
    for broken in broken_promises([*rows, *by_block]):
        raise EngineError(broken)


def page_by_size(output: Path) -> Path:
    """Where the second page goes: beside the first."""
    return output.with_stem(f"{output.stem}-mimose")


def _run_all(
    shown: Progress, request: RunRequest, wanted: Sequence[str], method: str, folder: Path, output: Path,
    pages: dict[Path, str],
) -> tuple[list[Row | RefusedRow], list[Row | RefusedRow]]:  # fmt: skip
    """Run plain, then keeping account only, under each budget, and each of `BY_BLOCK` under the middle one.

    Returns the rows of both tables; writes the pages, and into `pages` what each shows. On the block engine freed
    memory stays with the allocator, as it does in the plain run: what page faults cost is not theirs.
    """
    middle = len(wanted) // 2
    titles = ["plain", "plain, with account", *(f"budget {text}" for text in wanted)]
    tasks = [announce(shown, title, request.steps) for title in titles]
    tasks += [announce(shown, f"budget {wanted[middle]}, {name}", request.steps) for name in BY_BLOCK]
    plain, account = (
        run_announced(shown, tasks[0], request),
        run_announced(shown, tasks[1], replace(request, method="keep-all")),
    )
    peak = highest_peak(account.reports)
    allowed = [budget_of_peak(text, peak, usable_memory()) for text in wanted]

    def ran(task: TaskID, asked: RunRequest, run_file: Path | None) -> Row | RefusedRow:
        asked = replace(asked, run_file=None if run_file is None else str(run_file))
        try:
            return row(asked, run_announced(shown, task, asked), plain)
        except BudgetInfeasible as error:
            return RefusedRow(
                budget_bytes=asked.budget_bytes or 0, method=asked.method or "", refused=str(error),
                smallest_budget_bytes=error.smallest_budget,
            )  # fmt: skip

    first = plain_row(request, plain, account)

    def show(found: Row | RefusedRow, path: Path, run_file: Path, what: str) -> None:
        if isinstance(found, Row):
            write_page(path, run_file, page_facts(WORKLOAD, found, first))
            pages[path] = what

    in_time, by_size = folder / "run.jsonl", folder / "by-size.jsonl"
    under = [
        ran(
            tasks[2 + index], replace(request, method=method, budget_bytes=budget, timeline=index == middle),
            in_time if index == middle else None,
        )
        for index, budget in enumerate(allowed)
    ]  # fmt: skip
    show(under[middle], output, in_time, "Memory and lanes over the time of a step")
    on_blocks = replace(request, budget_bytes=allowed[middle], timeline=True, return_freed=False)
    by_block = [
        ran(task, replace(on_blocks, method=name), by_size if name == BY_BLOCK[0] else None)
        for task, name in zip(tasks[-len(BY_BLOCK) :], BY_BLOCK, strict=True)
    ]
    show(by_block[0], page_by_size(output), by_size, "Memory against input size under Mimose")
    return [first, *under], by_block
