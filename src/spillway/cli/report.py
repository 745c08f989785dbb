"""`spillway report`: from a run file to a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.common import Json, check_writable, print_json, write_page
from spillway.errors import SpillwayError
from spillway.report.figures import highest_peak


def report(
    *,
    run: Annotated[Path, typer.Argument(help="A run file: of `spillway train --run-file`, or of a session.")],
    output: Annotated[
        Path | None, typer.Option(help="Where to write the page.", show_default="RUN with the ending .html")
    ] = None,
    json: Json = False,
) -> None:
    """Write a self-contained page about a run."""
    page = output or run.parent / f"{run.stem}.html"
    if page.resolve() == run.resolve():
        raise SpillwayError(f"The page would replace the run file {run}; choose another place with --output.")
    check_writable(page)
    steps = write_page(page, run, {})
    if json:
        print_json({"report": str(page), "steps": len(steps), "peak_bytes": highest_peak(steps)})
    else:
        print(f"{len(steps)} steps: {page}")
