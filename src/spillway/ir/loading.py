"""A recorded step from wherever there is one: a step file, an operator log of DTR, or such a log within a zip file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from spillway.ir.dtr_log import read_dtr_log, step_of_log
from spillway.ir.reading import opened
from spillway.ir.step_files import Recorded, read_step


def load_step(path: str | PathLike[str]) -> Recorded:
    """Read a recorded step, `step.jsonl` or `step.jsonl.gz`, a log, `unet.log`, or `logs.zip:unet`.

    Raises FileFormatError with path and line for a file that is neither or is damaged, and OSError where the system
    does.
    """
    text = str(path)
    archived = ".zip:" in text
    if not archived:
        with opened(path) as file:  # what is none of both is left to the reader of step files to complain
            log = b'"INSTRUCTION"' in file.readline(4096)
    if archived or log:
        name = text.rpartition(":")[2] if archived else Path(path).name
        step = step_of_log(read_dtr_log(path), path)
        return Recorded(step=step, workload=name.removesuffix(".log"), facts={"source": "an operator log of DTR"})
    return read_step(path)
