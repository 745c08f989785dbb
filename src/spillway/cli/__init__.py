"""The command line: one module per verb.

Results go to standard output and everything else to standard error, so that `--json` prints one JSON document and
nothing besides. Exit codes: 0; 1 for an expected failure, told in one sentence; 2 for a wrong command line; 130 for
Ctrl-C. A traceback means a bug. Nothing here imports torch before a verb needs it: models that train live in the
processes that `spillway.subprocess_runs` starts.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import spillway
from spillway.cli import (
    advise,
    build,
    calibrate,
    compare,
    demo,
    doctor,
    fit,
    pilot,
    plan,
    record,
    report,
    simulate,
    train,
)
from spillway.cli.common import PLANNERS, WORKLOADS
from spillway.errors import SpillwayError, on_one_line
from spillway.methods import METHODS

UNWRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""What the system says where standard output takes no more: errors about files that have a name are told by verbs."""

app = typer.Typer(
    name="spillway", help="Train PyTorch models under a memory budget that you name, with bit-identical results.",
    epilog=f"Workloads: {', '.join(WORKLOADS)}. Methods: {', '.join(METHODS)}. "
    f"Planners among them: {', '.join(PLANNERS)}.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
for _name, _verb in (
    ("demo", demo.demo), ("train", train.train), ("record", record.record), ("compare", compare.compare_),
    ("simulate", simulate.simulate), ("report", report.report), ("doctor", doctor.doctor), ("plan", plan.plan),
    ("advise", advise.advise_), ("build", build.build_), ("calibrate", calibrate.calibrate),
):  # fmt: skip
    app.command(name=_name)(_verb)
app.command(name="fit", context_settings={"allow_interspersed_args": False})(fit.fit)
app.add_typer(pilot.app, name="pilot")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spillway {spillway.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # A path need not be text, nor everything what a terminal can write. Of `fit` standard output is the script's own.
    if context.invoked_subcommand != "fit" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the arguments are the process's own by default. Always raises SystemExit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called: nobody wants to know
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    try:
        try:
            app(arguments)
        finally:
            sys.stdout.flush()
    except SpillwayError as error:
        print(on_one_line(f"spillway: {error}"), file=sys.stderr)
        if error.page:
            print(f"spillway: what to do: {error.page}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at the end
        if not isinstance(error, BrokenPipeError):
            print(f"spillway: Standard output cannot be written: {error.strerror}.", file=sys.stderr)
        sys.exit(1)
