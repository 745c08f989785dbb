"""What the verbs share: budgets and paths that are refused early, and where output goes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from spillway.errors import SpillwayError, UsageError
from spillway.ir import Recorded, RunFile, StepReport, read_run
from spillway.ir.loading import load_step
from spillway.methods import METHODS
from spillway.report.html import render
from spillway.units import Bytes, format_bytes

WORKLOADS: Final = (
    "stdlib-lm", "resnet", "deep-narrow", "tree-lstm", "tree-cnn", "var-lstm", "var-bert", "moe", "unrolled-gan",
    "evoformer", "resnet50", "bert-base", "bert-large", "gpt2", "swin", "t5", "bert-small", "gpt-small", "vit-small",
)  # fmt: skip
"""Names of `spillway.workloads.WORKLOADS`, which cannot be asked without torch; a test holds them to be the same."""
PLANNERS: Final = tuple(name for name, one in METHODS.items() if one.plans)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Method = Annotated[str, typer.Option(help=f"How to decide what leaves memory: {', '.join(METHODS)}.")]
Workload = Annotated[str, typer.Argument(help=f"file.py:function, or one of {', '.join(WORKLOADS)}.")]
BudgetOfStep = Annotated[
    str, typer.Option(help="Bytes, 6GiB; a share of the plain peak, 0.5x; or of the device's memory, 50%.")
]
Page = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write a page about the run.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the model, the data and everything that is drawn.")]
SpillDirectory = Annotated[
    Path | None,
    typer.Option(help="Where bytes wait that left memory.", show_default="the system's temporary directory"),
]
SpillIO = Annotated[
    Literal["buffered", "direct"], typer.Option(help="Spill through the page cache, or past it where that is possible.")
]
ReturnFreed = Annotated[
    bool,
    typer.Option(
        "--return-freed/--keep-freed", help="Return freed memory to the system, or keep it: faster, takes more memory."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Training steps of every run.")]


INTERRUPTED: Final = 130
"""The exit code after Ctrl-C."""
WIDTH_OF_FILES: Final = 160
"""Columns of a table that does not go to a terminal."""


def to_print() -> Console:
    """For results: standard output, whatever it is."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)


def to_terminal() -> Console:
    """For progress and remarks: standard error, whatever it is."""
    return Console(stderr=True)


def say(console: Console, text: str) -> None:
    """Print text as it is, above whatever the console keeps at its bottom."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print the one document of a verb. Losses that are not numbers are written as Python's `json` writes them."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def tell_shares(budgets: str, of: str, nbytes: Bytes) -> None:
    """Say what a percentage is one of, where a share of the plain peak may have been meant."""
    if "%" in budgets:
        say(
            to_terminal(),
            f"{budgets}: percentages are of the {format_bytes(nbytes)} of {of}; a share of the plain peak is written "
            f"with an x, as 0.5x.",
        )


def check_writable(*written: Path | None, read: Iterable[Path | str] = ()) -> None:
    """Refuse now what could not be written after minutes of work, and what would replace a file that is written too, or
    one that is read: by its name, as `logs.zip:NAME` or as `file.py:function`. Raises SpillwayError."""
    names = [name for one in read for name in (str(one), str(one).rpartition(":")[0])]
    taken = {os.path.realpath(name): f"reads {name}" for name in names if os.path.isfile(name)}
    for path in filter(None, written):
        place = os.path.realpath(path)
        if place in taken:
            raise SpillwayError(f"{path} cannot be written: this command {taken[place]}; choose another place.")
        _check_place(path)
        if path.is_file() or not path.exists():  # what is a device or a pipe takes both
            taken[place] = f"writes {path} too"


def _check_place(path: Path) -> None:
    folder = path.parent
    try:
        if path.is_dir():
            raise SpillwayError(f"{path} is a directory and cannot be written as a file.")
        if not folder.is_dir():
            raise SpillwayError(f"{path} cannot be written: there is no directory {folder}.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise SpillwayError(f"{path} cannot be written: permission denied.")
        if not os.path.lexists(path):  # whether it may be made shows when it is: folders of the system take no files
            path.open("xb").close()
            path.unlink()
    except OSError as error:
        raise SpillwayError(f"{path} cannot be written: {error.strerror}.") from error


def record_workload(workload: str, **options: Any) -> Recorded:
    """Record a step of a workload by its name; what it prints goes to standard error.

    Raises WorkloadError also for what its own code raises, and what `spillway.record` raises.
    """
    from spillway.workloads.named import told
    from spillway.workloads.recorded import record

    with told(f"A step of the workload {workload}"), redirect_stdout(sys.stderr):
        return record(workload, **options)


def read_recorded(step: str) -> Recorded:
    """Read a recorded step. Raises FileFormatError for what is none, and SpillwayError if the system refuses: with how
    to record one, where that is the name of a workload."""
    try:
        with naming(step):
            return load_step(step)
    except SpillwayError as error:
        if step not in WORKLOADS or not isinstance(error.__cause__, FileNotFoundError):
            raise
        way = f"`spillway record {step} -o step.jsonl` records a step of that workload."
        raise SpillwayError(f"{error} {way}") from error


def read_figures(path: Path) -> RunFile:
    """Read a run file. Raises FileFormatError for what is none, SpillwayError if the system refuses."""
    with naming(path):
        return read_run(path)


def write_page(path: Path, run_file: Path, facts: Mapping[str, Any], run: RunFile | None = None) -> list[StepReport]:
    """Write a page about the run in `run_file`, and return its steps. Raises what `read_figures` raises. `facts` are
    what the page says at its top besides the header of the run file."""
    run = run or read_figures(run_file)
    with naming(path):
        page = render({**run.header, **facts}, run.steps, run.timelines, blocks=run.blocks)
        path.write_text(page, encoding="utf-8", errors="backslashreplace")  # what it names need not be text
    if run.damaged_tail:
        say(to_terminal(), f"The last line of {run_file} is incomplete, as a killed run leaves it, and was left out.")
    return run.steps


def numbers(text: str | None, option: str, example: str, *, least: int = 1, most: int | None = None) -> list[int]:
    """Of `2,4,8`, each once, ascending; none of None. Raises UsageError for anything but whole numbers in between."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,18}", part) and least <= int(part) <= (most or int(part)) for part in parts):
        upto = "on" if most is None else f"to {most:,}"
        raise UsageError(
            f"{option} takes whole numbers from {least} {upto} with commas between them, as {example}; got {text!r}."
        )
    return sorted({int(part) for part in parts})


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Turn what the system says about a file into one sentence."""
    try:
        yield
    except OSError as error:
        raise SpillwayError(f"{path}: {error.strerror or error}.") from error
