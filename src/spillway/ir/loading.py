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
    if archived or _is_log(Path(path)):
        name = text.rpartition(":")[2] if archived else Path(path).name
        step = step_of_log(read_dtr_log(path))
        return Recorded(step=step, workload=name.removesuffix(".log"), facts={"source": "an operator log of DTR"})
    return read_step(path)


def _is_log(path: Path) -> bool:
    """Whether the first line is one of a log; what is none of both is left to the reader of step files to complain."""
    with opened(path) as file:
        return b'"INSTRUCTION"' in file.readline(4096)
