"""Files that anybody may have written: how much is read of them, and what their fields may hold."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isnan, nan
from pathlib import Path
from typing import Annotated, Any

import pytest

from spillway.errors import FileFormatError, on_one_line
from spillway.ir import reading
from spillway.ir.reading import content_of, document, lines_of, opened, read_fields, read_row, read_value
from spillway.units import Bytes, MiB, Seconds, Within


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    number: int
    colour: Colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    name: str
    nbytes: Bytes
    seconds: Seconds | None
    ready: bool = False
    few: Annotated[int, Within(1, 9)] = 1
    parts: tuple[Part, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


GOOD: dict[str, Any] = {"name": "a", "nbytes": 5, "seconds": 0.5}


def test_a_dataclass_is_read_from_its_fields_and_parts_also_from_rows() -> None:
    parts = [{"number": 1, "colour": "red"}, [2, "blue"]]
    facts = {"any": [1, {"thing": None}]}
    read = read_fields(Whole, {**GOOD, "parts": parts, "logged": {"loss": 1}, "facts": facts}, "thing")
    made = (Part(number=1, colour=Colour.RED), Part(number=2, colour=Colour.BLUE))
    assert read == Whole(name="a", nbytes=5, seconds=0.5, parts=made, logged={"loss": 1.0}, facts=facts)
    assert read_row(Part, [3, "red"], "part") == Part(number=3, colour=Colour.RED)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": 7}, "name of the thing is 7, not text"),
        ({"name": "a\x1b[31m"}, r"name of the thing is 'a\x1b[31m', which cannot be printed on one line"),
        ({"name": "\ud800"}, r"name of the thing is '\ud800', which cannot be printed on one line"),
        ({"nbytes": 5.0}, "nbytes of the thing is 5.0, not a whole number from 0 to 9.223e+18"),
        ({"nbytes": True}, "nbytes of the thing is True, not a whole number"),
        ({"nbytes": -1}, "nbytes of the thing is -1, not a whole number"),
        ({"nbytes": 2**63}, "nbytes of the thing is 9223372036854775808, not a whole number"),
        ({"nbytes": 10**5000}, "nbytes of the thing is a number of thousands of digits, not a whole number"),
        ({"seconds": "1"}, "seconds of the thing is '1', not a number from 0 to 1e+15"),
        ({"seconds": nan}, "seconds of the thing is nan, not a number"),
        ({"seconds": inf}, "seconds of the thing is inf, not a number"),
        ({"seconds": -1e-9}, "seconds of the thing is -1e-09, not a number"),
        ({"ready": 1}, "ready of the thing is 1, neither true nor false"),
        ({"few": 10}, "few of the thing is 10, not a whole number from 1 to 9"),
        ({"parts": {}}, "parts of the thing is {}, not a list"),
        ({"parts": [[1]]}, "[1] is no part: number, colour"),
        ({"parts": [[1, "green"]]}, "colour of the part is 'green', none of red, blue"),
        ({"parts": [{"number": 1}]}, "the part lacks colour"),
        ({"logged": {"loss": "low"}}, "logged of the thing is 'low', not a number"),
        ({"logged": {"loss": 10**400}}, "too large a number"),
        ({"logged": []}, "logged of the thing is [], not an object"),
        ({"facts": json.loads("[" * 50 + "]" * 50)}, "facts of the thing is"),
        ({"facts": {"deep": json.loads("[" * 50 + "]" * 50)}}, "facts of the thing is nested too deeply"),
        ({"facts": {"half": ["\udc80"]}}, "which cannot be written as text"),
        ({"more": 1}, "'more' is no field of a thing, which has name, nbytes, seconds"),
    ],
)
def test_a_field_that_holds_something_else_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^") as caught:
        read_fields(Whole, {**GOOD, **changes}, "thing")
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_is_missing_is_named_and_what_is_no_object_too() -> None:
    with pytest.raises(ValueError, match="the thing lacks nbytes, seconds"):
        read_fields(Whole, {"name": "a"}, "thing")
    with pytest.raises(ValueError, match=r"\[1\] is no thing"):
        read_fields(Whole, [1], "thing")
    assert isnan(read_value(float, nan, "loss"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "it is no JSON that can be read"),
        (b"\xff", "it is no JSON that can be read"),
        ("9" * 5000, "it is no JSON that can be read"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a": {"b": 1, "b": 2}}', "it says 'b' twice"),
    ],
)
def test_json_that_cannot_be_read_is_told_apart(text: str | bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        document(text)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FileFormatError, match="this is a pipe or a device"), opened(path):
            raise AssertionError
    with pytest.raises(IsADirectoryError), opened(tmp_path) as file:
        file.read()
    with pytest.raises(FileNotFoundError):
        content_of(tmp_path / "missing")


def test_no_more_is_read_than_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(3 * MiB)  # takes no room on the disk, and may as well be a file without an end
    with pytest.raises(FileFormatError, match=r"longer than 2.00 MiB, the most that is read of it"):
        content_of(path, 2 * MiB)
    monkeypatch.setattr(reading, "MOST", 1000)
    path.write_bytes(b"0123456\n" * 1000)
    with pytest.raises(FileFormatError, match=r"line 126: the file is longer than 1000 B"):
        list(lines_of(path))
    path.write_bytes(gzip.compress(b"0" * MiB))
    with pytest.raises(FileFormatError, match=r"line 1: the file is longer than 1000 B"):
        list(lines_of(path))
    monkeypatch.setattr(reading, "LONGEST", 100)
    path.write_bytes(b"short\n" + b"x" * 101)
    with pytest.raises(FileFormatError, match=r"line 2: the line is longer than 100 B"):
        list(lines_of(path))


def test_lines_are_numbered_whether_they_are_compressed_or_not(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for content in (b"a\n\nb", gzip.compress(b"a\n\nb")):
        path.write_bytes(content)
        assert list(lines_of(path)) == [(1, b"a\n"), (2, b"\n"), (3, b"b")]
    path.write_bytes(gzip.compress(b"a\n" * 9999)[:-9])
    with pytest.raises(FileFormatError, match="the compressed file is cut or damaged"):
        list(lines_of(path))


def test_a_sentence_stays_on_its_line() -> None:
    assert on_one_line("a\nb\x1b[2J\u202e\ud800é") == r"a\nb\x1b[2J\u202e\ud800é"
    assert "\n" not in str(FileFormatError("a\nb", path="c\nd", line=1))
