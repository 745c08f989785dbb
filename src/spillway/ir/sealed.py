"""Sealed lines: JSON lines whose checksums tell of any damage. What all files that Spillway writes have in common.

The first line is the header, which names format and version. Each line ends in a CRC-32 of itself and of all lines
before it, so that no damage is read as numbers: a changed digit, a missing line and two swapped lines are all noticed.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, Final

from spillway.ir.reading import document

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


def read_header(line: bytes, *, name: str, version: int, what: str) -> tuple[dict[str, Any], int]:
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
