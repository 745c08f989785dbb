"""`spillway report`: from a run file to a page, and to a trace for the Perfetto viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.common import Json, check_writable, naming, print_json, read_figures, write_page
from spillway.errors import SpillwayError
from spillway.report.figures import hidden_share, highest_peak
from spillway.report.perfetto import write_trace


def report(
    *,
    run: Annotated[Path, typer.Argument(help="A run file: of `spillway train --run-file`, or of a session.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write the page.", show_default="RUN with the ending .html"),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Also write the lanes of the recorded step as a trace, for ui.perfetto.dev.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a self-contained page about a run."""
    page = output or run.parent / f"{run.stem}.html"
    check_writable(page, perfetto, read=[run])
    found = read_figures(run)
    events = 0
    if perfetto is not None:
        if not any(timeline.spans for timeline in found.timelines):  # nobody looked at the clock in that run
            raise SpillwayError(
                f"{run} holds no lanes: record them with spillway.manage(..., report=ReportOptions(timeline=True, "
                f"run_file=...)) or spillway train --run-file, in this version."
            )
        with naming(perfetto):
            events = write_trace(perfetto, found.header, found.timelines)
    write_page(page, run, {}, found)
    steps, simulated = found.steps, "simulated" in found.header
    if json:
        print_json({
            "report": str(page), "perfetto": None if perfetto is None else str(perfetto), "steps": len(steps),
            "peak_bytes": highest_peak(steps), "hidden_share": hidden_share(steps), "simulated": simulated,
        })  # fmt: skip
    else:
        print(f"{len(steps)} {'simulated ' * simulated}step{'s' * (len(steps) != 1)}: {page}")
        if perfetto is not None:
            print(f"{events} events for ui.perfetto.dev: {perfetto}")
