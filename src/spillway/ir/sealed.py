"""Sealed lines: JSON lines whose checksums tell of any damage. What all files that Spillway writes have in common.

The first line is the header, which names format and version. Each line ends in a CRC-32 of itself and of all lines
before it, so that no damage is read as numbers: a changed digit, a missing line and two swapped lines are all noticed.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Final

from spillway.ir.reading import document, fault_in, read_value

RESERVED: Final = frozenset({"format", "version", "crc32"})
"""What every header says by itself."""

_SEALED = re.compile(rb'(?P<body>\{.+),"crc32":"(?P<checksum>[0-9a-f]{8})"\}\n')


def encoded(record: Mapping[str, Any]) -> bytes:
    """The record as JSON without its closing brace, before which the checksum is to stand.

    Raises TypeError for what JSON cannot hold.
    """
    return json.dumps(dict(record), separators=(",", ":")).encode()[:-1]


def seal(body: bytes, checksum: int) -> tuple[bytes, int]:
    """The line of what `encoded` gave, and the checksum of it and of all lines before it, whose own is `checksum`."""
    checksum = zlib.crc32(body, checksum)
    return b'%b,"crc32":"%08x"}\n' % (body, checksum), checksum


def unsealed(line: bytes, checksum: int) -> tuple[dict[str, Any], int]:
    """Read a line whose checksum continues that of the lines before it. Raises ValueError for a damaged one."""
    match = _SEALED.fullmatch(line)
    if match is None:
        raise ValueError("the line is damaged: it does not end in a checksum")
    checksum = zlib.crc32(match["body"], checksum)
    if int(match["checksum"], 16) != checksum:
        raise ValueError("the line is damaged, or lines before it are missing: its checksum does not fit")
    record: dict[str, Any] = document(match["body"] + b"}")
    return record, checksum


def records_of(
    path: str | PathLike[str], lines: Iterator[tuple[int, bytes]], *, name: str, version: int, what: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records of a file and the numbers of their lines; the first is the header.

    Raises FileFormatError for a damaged line, and if the first is not that of `what`, the format `name`.
    """
    number, line = next(lines, (1, b""))
    with fault_in(path, number):
        header, checksum = _header(line, name=name, version=version, what=what)
        header = read_value(dict[str, Any], header, "the first line")
    yield number, header
    for number, line in lines:
        with fault_in(path, number):
            record, checksum = unsealed(line, checksum)
        yield number, record


def stated(header: Mapping[str, Any]) -> dict[str, Any]:
    """What a header says beside what is `RESERVED`."""
    return {name: value for name, value in header.items() if name not in RESERVED}


def sealed(records: Iterable[Mapping[str, Any]]) -> bytes:
    """All lines of a file. Raises TypeError for what JSON cannot hold."""
    lines, checksum = [], 0
    for record in records:
        line, checksum = seal(encoded(record), checksum)
        lines.append(line)
    return b"".join(lines)


def replace_file(path: Path, content: bytes) -> None:
    """Write beside the file and exchange them, so that nobody ever meets half a file. Raises OSError.

    What is no file but a link, a pipe or a device (`/dev/null`) is written to and stays what it is.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with beside.open("xb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _header(line: bytes, *, name: str, version: int, what: str) -> tuple[dict[str, Any], int]:
    """The header and its checksum. Raises ValueError if this is not the first line of `what`, the format `name`.

    That the file is ours is checked before its checksum, which a newer version may have moved elsewhere.
    """
    try:
        header = document(line)
    except ValueError:
        header = None
    match header:
        case {"format": str(found), "version": int(newer)} if found == name and newer > version:
            raise ValueError(f"written in version {newer} of the format, and this Spillway reads up to {version}")
        case {"format": str(found), "version": int()} if found == name:
            return unsealed(line, 0)
    raise ValueError(f"this is not the first line of {what}: the file is foreign, empty or damaged")
