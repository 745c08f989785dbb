"""Reading files that anybody may have written: how much is read of them, as what, and what their fields may hold.

A field is checked by the annotation of the dataclass that it goes into, so whoever declares a field has said what a
file may have there:

    bool, str, an enumeration   that, and no other type; of text what can be printed on one line
    int, Bytes                  a whole number from 0 to 2^63 - 1
    Seconds                     a number from 0 to 10^15
    float                       any number, also none that JSON has (`NaN`), because a diverging loss is worth reading
    X | None, tuples, dict, Mapping, list   each part by its own annotation
    a dataclass                 an object with its fields, or a list of all of them in order
    Any                         what JSON can hold, not deeper than `DEEPEST`

`Annotated[int, Within(least, most)]` says something narrower. Everything here raises ValueError with a clause, which
`fault_in` turns into a FileFormatError that names path and line.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import reprlib
import stat
import typing
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, BinaryIO, Final, TypeVar, get_args, get_origin

from spillway.errors import FileFormatError
from spillway.units import Bytes, GiB, MiB, Within, format_bytes

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Gives back what may stand in a field, as it is meant; raises ValueError for anything else."""

MOST: Final[Bytes] = GiB
"""What is read of a file, unpacked; a step of 10 000 ops takes 3 MiB, a report of 1 000 000 steps 900."""
LONGEST: Final[Bytes] = 128 * MiB
"""What is read of a line."""
DEEPEST: Final = 32
"""Lists and objects within each other where a file may say anything."""

WHOLE: Final = Within(0, 2**63 - 1)
_GZIP: Final = b"\x1f\x8b"
"""The first bytes of what is compressed."""
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a cursor, turns text round, or is no character at all."""
_NO_CHARACTER: Final = re.compile("[\ud800-\udfff]")


# ---------------------------------------------------------------------- bytes


@contextmanager
def fault_in(path: str | PathLike[str], line: int) -> Iterator[None]:
    """Turn a ValueError within into a FileFormatError that names the path and the line."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise FileFormatError(str(error).rstrip("."), path=path, line=line) from None


@contextmanager
def opened(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """A file, opened to be read. Raises FileFormatError for what has no end that can be known, OSError where the system
    does."""
    # A pipe would wait for who writes to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileFormatError("this is a pipe or a device: write what it gives to a file first", path=path, line=1)
        yield file


def content_of(path: str | PathLike[str], most: Bytes = MOST) -> bytes:
    """All bytes of a file. Raises FileFormatError if there are more than `most`."""
    with opened(path) as file:
        return at_most(file, path, most)


def at_most(file: BinaryIO, path: str | PathLike[str], most: Bytes = MOST) -> bytes:
    """What is left of an open file. Raises FileFormatError if it is more than `most`."""
    content = file.read(most + 1)
    if len(content) > most:
        raise FileFormatError(f"it is longer than {format_bytes(most)}, the most that is read of it", path=path, line=1)
    return content


def lines_of(path: str | PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, compressed or not, with their numbers from 1.

    Raises FileFormatError for too long a file or line, and for a compressed one that is damaged, by the line at which
    that shows; OSError where the system does.
    """
    with opened(path) as file:
        compressed = file.read(2) == _GZIP
        file.seek(0)
        source = typing.cast(BinaryIO, gzip.GzipFile(fileobj=file)) if compressed else file
        number, left = 0, MOST
        try:
            while line := source.readline(min(LONGEST, left) + 1):
                number, left = number + 1, left - len(line)
                if left < 0 or len(line) > LONGEST:
                    what, most = ("the file", MOST) if left < 0 else ("the line", LONGEST)
                    reason = f"{what} is longer than {format_bytes(most)}, the most that is read of it"
                    raise FileFormatError(reason, path=path, line=number)
                yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = f"the compressed file is cut or damaged ({error})"
            raise FileFormatError(reason, path=path, line=number + 1) from None


def document(text: bytes | str) -> Any:
    """What a JSON text says. Raises ValueError for what is none, and for an object that says a thing twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except _SaidTwice:
        raise
    except ValueError as error:  # of numbers with thousands of digits, and of bytes that are no text, too
        raise ValueError(f"it is no JSON that can be read ({str(error).partition(';')[0].rstrip('.')})") from None


class _SaidTwice(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _SaidTwice(f"it says {shown(next(name for name in names if names.count(name) > 1))} twice")
    return found


# ---------------------------------------------------------------------- fields


def read_fields(kind: type[T], data: object, what: str) -> T:
    """The dataclass that `data` has the fields of, by name. Raises ValueError for a field that is missing without a
    default, unknown, or of another type or size."""
    if not isinstance(data, dict):
        raise ValueError(f"{shown(data)} is no {what}")
    checks, needed = _fields(typing.cast(Hashable, kind))
    for name in data:
        if name not in checks:
            raise ValueError(f"{shown(name)} is no field of a {what}, which has {', '.join(checks)}")
    if lacking := [name for name in needed if name not in data]:
        raise ValueError(f"the {what} lacks {', '.join(lacking)}")
    return kind(**{name: _field(checks[name], value, f"{name} of the {what}") for name, value in data.items()})


def read_row(kind: type[T], row: object, what: str) -> T:
    """The dataclass that `row` has the fields of, in their order. Raises ValueError as `read_fields` does."""
    checks, _ = _fields(typing.cast(Hashable, kind))
    if not isinstance(row, list) or len(row) != len(checks):
        raise ValueError(f"{shown(row)} is no {what}: {', '.join(checks)}")
    found = zip(checks.items(), row, strict=True)
    return kind(**{name: _field(check, value, f"{name} of the {what}") for (name, check), value in found})


def read_value(hint: Any, value: object, name: str) -> Any:
    """The value, if an annotation allows it. Raises ValueError for any other."""
    return _field(_check_of(hint), value, name)


def shown(value: object) -> str:
    """Anything, as a short text on one line."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number of thousands of digits"


class _Unfit(ValueError):
    """What is there, and why it may not be; who knows the field's name puts that in front."""


def _field(check: Check, value: object, name: str) -> Any:
    try:
        return check(value)
    except _Unfit as error:
        raise ValueError(f"{name} is {error}") from None


@functools.cache
def _fields(kind: Any) -> tuple[Mapping[str, Check], Sequence[str]]:
    """What checks each field, and the fields that have no default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return {field.name: _check_of(hints[field.name]) for field in fields(kind)}, needed


@functools.cache
def _check_of(hint: Any) -> Check:
    """The check of one annotation."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [extra for extra in parts[1:] if isinstance(extra, Within)]
        return _number(parts[0], bounds[-1]) if bounds else _check_of(parts[0])
    if origin in (typing.Union, UnionType):
        (other,) = (_check_of(part) for part in parts if part is not NoneType)
        return lambda value: None if value is None else other(value)
    if origin is tuple:
        return _all_of(_check_of(parts[0]), tuple)
    if origin is list:
        return _all_of(_check_of(parts[0]), list)
    if origin in (dict, Mapping):
        return _mapping(_check_of(parts[1]))
    if hint is Any:
        return _anything
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        what = re.sub("(?<=[a-z])(?=[A-Z])", " ", hint.__name__).lower()
        return lambda value: read_row(hint, value, what) if isinstance(value, list) else read_fields(hint, value, what)
    return {bool: _boolean, str: _text, int: _number(int, WHOLE), float: _number(float, None), NoneType: _nothing}[hint]


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _Unfit(f"{shown(value)}, neither true nor false")
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise _Unfit(f"{shown(value)}, not null")


def fits_on_a_line(text: str) -> bool:
    """Whether a name can be written to a file and read from it again."""
    return not _UNPRINTABLE.search(text)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Unfit(f"{shown(value)}, not text")
    if not fits_on_a_line(value):
        raise _Unfit(f"{shown(value)}, which cannot be printed on one line")
    return value


def _number(kind: type, bounds: Within | None) -> Check:
    kinds = (int,) if kind is int else (int, float)
    called = "whole number" if kind is int else "number"

    def check(value: Any) -> Any:
        if type(value) not in kinds or (bounds is not None and not bounds.least <= value <= bounds.most):
            more = "" if bounds is None else f" from {bounds.least} to {bounds.most:.4g}"
            raise _Unfit(f"{shown(value)}, not a {called}{more}")
        return value if kind is int else _as_float(value)

    return check


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise _Unfit(f"{shown(value)}, too large a number") from None


def _member(kind: type[Enum]) -> Check:
    members = {member.value: member for member in kind}

    def check(value: Any) -> Any:
        if type(value) is not str or value not in members:
            raise _Unfit(f"{shown(value)}, none of {', '.join(members)}")
        return members[value]

    return check


def _all_of(check: Check, into: type) -> Check:
    def check_all(value: Any) -> Any:
        if type(value) is not list:
            raise _Unfit(f"{shown(value)}, not a list")
        return into(map(check, value))

    return check_all


def _mapping(check: Check) -> Check:
    def check_all(value: Any) -> Any:
        if type(value) is not dict:
            raise _Unfit(f"{shown(value)}, not an object")
        return {_text(name): check(one) for name, one in value.items()}

    return check_all


def _anything(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise _Unfit("nested too deeply")
    if isinstance(value, str) and _NO_CHARACTER.search(value):
        raise _Unfit(f"{shown(value)}, which cannot be written as text")
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _anything(part, depth + 1)
    return value
