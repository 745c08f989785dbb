"""Single ops of DTR's logs, each log foretold by a fit to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Skipped, Tell, frozen
from papers.costs.left_out import ZIP
from papers.costs.log_ops import ASSUMED, LOGS, TITAN_V, Log
from spillway.costs.fitting import LeftOut, leave_one_out


@frozen
class Size:
    """Which logs."""

    logs: Sequence[str] = tuple(LOGS)
    zip: Path = ZIP


def run(size: Size, tell: Tell) -> Result:
    """Every log, left out."""
    if not size.zip.is_file():
        raise Skipped(f"there is no {size.zip}")
    groups = [Log(size.zip, name).timed() for name in size.logs]
    tell(f"{sum(len(group.works) for group in groups)} ops of {len(groups)} logs")
    return result_of(leave_one_out(groups, TITAN_V, ASSUMED))


def result_of(left: Sequence[LeftOut]) -> Result:
    """A row a log."""
    rows = [
        {
            "log": one.name, "ops": len(one.ratios), "measured": one.seconds, "foretold": one.foretold,
            "ratio": one.foretold / one.seconds, "error": one.error,
        }
        for one in left
    ]  # fmt: skip
    return Result(title=TITLE, columns=COLUMNS, rows=rows, notes=NOTES)


def judge(result: Result) -> Iterator[Check]:
    """Of every log, single ops and their sum."""
    for row in result.rows:
        yield Check(
            what=f"{row['log']}: single ops, median error", measured=round(row["error"], 4), at_most=0.25
        )  # fmt: skip
        yield Check(
            what=f"{row['log']}: all ops, off by", measured=round(abs(row["ratio"] - 1), 4), at_most=0.10
        )  # fmt: skip


TITLE: Final = "Single ops of DTR's logs on a Titan V, the log left out"

COLUMNS: Final = (
    *columns.text(log="log", ops="ops"),
    *columns.seconds(measured="all ops, measured", foretold="foretold"),
    *columns.ratios(ratio="foretold / measured"),
    *columns.shares(error="single ops off by, median"),
)  # fmt: skip

NOTES: Final = (
    "Views are left out, as they take no time of the device. Before any log is read the fit has round numbers "
    "(`log_ops.ASSUMED`). Every op's launch has about 25 us in it, which the logs' clock waits for.",
)

BENCHMARK: Final = Benchmark(name="costs_ops", run=run, judge=judge, full=Size(), quick=Size(logs=("unet", "resnet32")))
