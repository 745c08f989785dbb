"""What recording a step takes: time, memory and bytes of the file, by the command that a user types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.ir.step_files import read_step
from spillway.units import Bytes, GiB, KiB, Seconds

MB: Final = 10**6


@frozen
class Recording:
    """A step to record, and what that may take."""

    workload: str
    options: Sequence[str]
    most_seconds: Seconds | None = None
    most_memory: Bytes | None = None
    """Of the process, resident."""
    largest_file: Bytes | None = None


@frozen
class Size:
    """How much is recorded."""

    recordings: Sequence[Recording]


def run(size: Size, tell: Tell) -> Result:
    """One after the other, each in a process of its own."""
    rows, checks = list[Row](), list[Check]()
    with tempfile.TemporaryDirectory() as folder:
        for number, asked in enumerate(size.recordings):
            row = _recorded(asked, Path(folder) / f"{number}.jsonl.gz")
            tell(f"{row['step']}: {row['seconds']:.1f} s, {row['peak_rss_bytes']} bytes resident")
            rows.append(row)
            checks += _checks(asked, row)
    return Result(
        title="recording a step with `spillway record`", columns=COLUMNS, rows=rows, checks=checks, notes=NOTES
    )


def _recorded(asked: Recording, path: Path) -> Row:
    command = [sys.executable, "-m", "spillway", "record", asked.workload, *asked.options, "-o", str(path)]
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {said.read().decode()}")
    step = read_step(path).step
    return {
        "step": " ".join([asked.workload, *(re.sub("^--", "", option) for option in asked.options)]),
        "seconds": seconds, "peak_rss_bytes": used.ru_maxrss * KiB, "file_bytes": path.stat().st_size,
        "ops": len(step.ops), "storages": len(step.storages), "plain_peak_bytes": step.plain_peak(),
    }  # fmt: skip


def _checks(asked: Recording, row: Row) -> list[Check]:
    limits = (
        ("seconds", row["seconds"], asked.most_seconds),
        ("resident bytes", row["peak_rss_bytes"], asked.most_memory),
        ("bytes of the file", row["file_bytes"], asked.largest_file),
    )
    return [
        Check(what=f"{row['step']}: {what}", measured=measured, at_most=most)
        for what, measured, most in limits if most is not None
    ]  # fmt: skip


COLUMNS: Final = (
    *columns.text(step="step", ops="ops", storages="storages"),
    *columns.nbytes(plain_peak_bytes="peak of the step"),
    *columns.seconds(seconds="time"),
    *columns.nbytes(peak_rss_bytes="RSS", file_bytes="file"),
)
NOTES: Final = (
    "Time is that of the whole process, the imports of torch and transformers included. Fake: on fake tensors, which "
    "have shapes and no bytes.",
)

BENCHMARK: Final = Benchmark(
    name="recording",
    run=run,
    full=Size(
        recordings=(
            Recording(
                workload="resnet50", options=("--fake", "--batch", "1440"), most_seconds=60.0, most_memory=2 * GiB
            ),
            Recording(workload="bert-base", options=("--fake", "--batch", "8"), largest_file=MB),
            Recording(workload="bert-large", options=("--fake", "--batch", "32")),
            Recording(workload="gpt2", options=("--fake", "--batch", "8")),
            Recording(workload="swin", options=("--fake", "--batch", "256")),
            Recording(workload="t5", options=("--fake", "--batch", "8")),
        )
    ),
    quick=Size(recordings=(Recording(workload="resnet", options=("--fake", "--batch", "2"), largest_file=MB),)),
)  # fmt: skip
