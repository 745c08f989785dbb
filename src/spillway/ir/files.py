"""Run files: what a run did, as versioned JSON lines that a person can read.

The first line is the header, `{"format": "spillway-run", "version": 3, ...}`; every further line is one record,
`{"step": {...}}`, `{"timeline": {...}}` or, once at the end of a run block by block, `{"blocks": {...}}`. Lines are
sealed (`sealed.py`). Numbers that JSON does not have are written as Python's `json` writes them (`NaN`, `Infinity`),
because a diverging loss is worth reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from os import PathLike
from types import TracebackType
from typing import Any, Final, Self, final

from spillway.ir.reading import LONGEST, MOST, fault_in, lines_of
from spillway.ir.sealed import RESERVED, encoded, records_of, seal
from spillway.ir.step_report import BlocksAtPeak, StepReport
from spillway.ir.timeline import MOST_OPS, Timeline
from spillway.units import format_bytes

FORMAT: Final = "spillway-run"
"""What the first line of every run file names."""
VERSION: Final = 3
"""The version that this code writes, and the newest that it reads. Version 2 has no record of blocks; version 1 has no
spans in its timelines either, and fewer figures in its steps. Both are read all the same."""


@final
class RunWriter:
    """Writes a run file, a line at a time; a killed run leaves a file that can be read up to its last whole line.

    A file that stands at `path` is replaced. Raises OSError where the system does.
    """

    def __init__(self, path: str | PathLike[str], header: Mapping[str, Any]) -> None:
        reserved = header.keys() & RESERVED
        if reserved:
            raise ValueError(f"the header of a run file names its own {', '.join(sorted(reserved))}")
        self._pending, self._checksum = seal(encoded({"format": FORMAT, "version": VERSION, **header}), 0)
        self._end = 0
        self._path = path
        self._file = FileIO(path, "w")
        try:
            self._write_pending()
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record, `{"step": report.to_json()}`, or of a timeline or of blocks, and hand it to the system.

        Raises ValueError for other records, and with one sentence for what could not be read again (too many ops in a
        timeline, too long a line or file), and TypeError for what JSON cannot hold, before anything is written. After
        an OSError or Ctrl-C the record is kept, and written whole before the next one or on closing.
        """
        if len(record) != 1 or not record.keys() <= {"step", "timeline", "blocks"}:
            raise ValueError(
                f"a record is one step, one timeline or one of blocks, not {', '.join(map(repr, record)) or 'nothing'}"
            )
        ops = record.get("timeline", {}).get("ops", 0)
        if ops > MOST_OPS:
            raise ValueError(self._left_out(f"a timeline of {ops} ops, where {MOST_OPS} is the most that is read"))
        self._write(encoded(record))

    def close(self) -> None:
        """Write what is pending and close the file; more than once does no harm."""
        if self._file.closed:
            return
        try:
            self._write_or_tell()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, body: bytes) -> None:
        line, checksum = seal(body, self._checksum)
        for what, nbytes, most in (
            ("line", len(line), LONGEST),
            ("file", self._end + len(self._pending) + len(line), MOST),
        ):
            if nbytes > most:
                raise ValueError(
                    self._left_out(f"a record with which the {what} would be longer than {format_bytes(most)}")
                )
        self._checksum, self._pending = checksum, self._pending + line
        self._write_or_tell()

    def _left_out(self, what: str) -> str:
        return f"The run file {os.fspath(self._path)!r} leaves out what could not be read again: {what}."

    def _write_pending(self) -> None:
        # Every write names its offset, so one that was interrupted, or met a full disk half-way, is done again as it
        # was. A buffered file would forget the rest of a large line.
        while self._pending:
            written = os.pwrite(self._file.fileno(), self._pending, self._end)
            self._end, self._pending = self._end + written, self._pending[written:]

    def _write_or_tell(self) -> None:
        try:
            self._write_pending()
        except OSError as error:
            told = type(error)(
                f"The run file {os.fspath(self._path)!r} cannot be written ({error.strerror}): what it lacks is "
                f"written with the next step or on closing, if there is room by then."
            )
            told.errno = error.errno
            raise told from None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """What a run file holds."""

    header: dict[str, Any]
    """The first line: format, version, and what the run wrote there."""
    steps: list[StepReport]
    """What every step did, in order."""
    timelines: list[Timeline]
    """The timelines that the run kept, in order."""
    blocks: BlocksAtPeak | None = None
    """What blocks held in the step with the highest peak; None where none ran, and of a run that was killed."""
    damaged_tail: int
    """1 if the last line was incomplete, as a killed run leaves it, and was dropped; else 0."""


def read_run(path: str | PathLike[str]) -> RunFile:
    """Read a run file.

    Raises FileFormatError with the path and the line at fault for a foreign, newer or damaged file, and OSError where
    the system does.
    """
    steps: list[StepReport] = []
    timelines: list[Timeline] = []
    blocks: BlocksAtPeak | None = None
    tail: list[int] = []

    def whole() -> Iterator[tuple[int, bytes]]:
        for number, line in lines_of(path):
            if number > 1 and not line.endswith(b"\n"):
                tail.append(number)
                return
            yield number, line

    records = records_of(path, whole(), name=FORMAT, version=VERSION, what="a run file")
    _, header = next(records)
    for number, record in records:
        with fault_in(path, number):
            match record:
                case {"step": step}:
                    steps.append(StepReport.from_json(step))
                case {"timeline": timeline}:
                    timelines.append(Timeline.from_json(timeline))
                case {"blocks": held}:
                    blocks = BlocksAtPeak.from_json(held)
                case _:
                    raise ValueError("the line holds neither a step nor a timeline nor blocks")
    return RunFile(header=header, steps=steps, timelines=timelines, blocks=blocks, damaged_tail=len(tail))
