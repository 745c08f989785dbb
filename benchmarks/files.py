"""Thousands of files that nobody should have written, given to the verbs that read such files: one sentence each.

Files of every kind are written, one thing in them is changed, checksums are done again, and the command line is called
within this process. What is counted is how the call ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from tests.cpu.damaged_files import elsewhere, ends_of, kinds_in


@frozen
class Size:
    """How many files are written."""

    files: int
    bomb: bool = True
    """Whether one of them unpacks to more than is read, which takes a while."""


def run(size: Size, tell: Tell) -> Result:
    """Write files, have them read, and count how that ends."""
    rows: list[Row] = []
    with TemporaryDirectory(prefix="spillway-") as folder, elsewhere(Path(folder)):
        kinds = kinds_in(Path(folder))
        shares = sum(kind.share for kind in kinds)
        odd: list[str] = []
        for kind in kinds:
            files = max(round(size.files * kind.share / shares), 1)
            rows.append(ends_of(kind, Path(folder), files, odd, bomb=size.bomb))
            tell(f"{kind.name}: {rows[-1]}")
    return Result(
        title=f"{sum(row['files'] for row in rows)} files changed and read by the command line",
        columns=columns.text(
            kind="kind", files="files", read="read all the same", refused="refused in one sentence",
            traceback="tracebacks", not_a_sentence="not one sentence", script="script in a page", endless="endless",
        ),
        rows=rows,
        notes=(
            "One thing of each file is changed: a field gets another type or size, is left out, said twice or renamed; "
            "elements are repeated, swapped, nested; names hold markup, formulas, control characters, halves of "
            "characters. Checksums and counts of lines are done again. Or bytes are: cut, inserted, in another "
            "encoding, compressed, cut after compression. Once for each kind: a folder, a pipe, a device, an empty "
            "file, a compressed file that unpacks to more than is read.",
            *odd[:10],
        ),
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    for name in ("traceback", "not_a_sentence", "script", "endless"):
        yield Check(what=f"files that ended in: {name}", measured=sum(row[name] for row in result.rows))


BENCHMARK: Final = Benchmark(
    name="files", run=run, judge=_checks, full=Size(files=20_000), quick=Size(files=220, bomb=False)
)
