"""`spillway doctor`: what this machine offers, and what Spillway will do with it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.common import Json, SpillDirectory, print_json
from spillway.doctor import Finding, Problem, on_system
from spillway.errors import SpillwayError


def doctor(
    *,
    spill_directory: SpillDirectory = None,
    measure: Annotated[
        bool, typer.Option(help="Measure how fast disk, memory and links are: some seconds, and 256 MiB on the disk.")
    ] = True,
    json: Json = False,
) -> None:
    """Say what this machine offers, and what Spillway will do with it.

    Ends with exit code 1 if nothing can be trained under a budget here.
    """
    findings = examine(spill_directory or Path(tempfile.gettempdir()), measure=measure)
    if json:
        print_json([finding.to_json() for finding in findings])
    else:  # a line for each, and under it two for each of its problems
        wide = max(len(finding.topic) for finding in findings)
        for finding in findings:
            print(f"{finding.topic:{wide}}  {finding.sentence}")
            for problem in finding.problems:
                print(f"{'':{wide}}  ! {problem.what}\n{'':{wide}}    {problem.fix}")
    for finding in findings:
        for problem in finding.problems:
            if problem.fatal:
                raise SpillwayError(f"Nothing can be trained under a budget here: {problem.what} {problem.fix}")


def examine(directory: Path, *, measure: bool) -> list[Finding]:
    """Look at everything. What cannot be looked at is a problem and no error."""
    from spillway.doctor import on_spill

    try:
        from spillway.doctor import on_torch
    except ImportError as error:
        problem = Problem(what=f"torch cannot be imported: {error}.", fix="Install torch 2.13 or newer.", fatal=True)
        findings = [Finding(topic="torch", sentence="Not there.", facts={"version": None}, problems=[problem])]
    else:
        findings = [on_torch.version(), on_torch.native(), on_torch.threads(), on_torch.kernels()]
        findings += [on_torch.memory_copy()] if measure else []
        findings += on_torch.devices(measure=measure)
    findings += [on_system.memory(), on_system.allocator(), on_system.huge_pages()]
    findings.append(on_spill.spill_directory(directory))
    if measure and findings[-1].facts["usable"]:
        findings.append(on_spill.speed(directory))
    return findings
