"""Ways to change a file that should not be read as it was afterwards, or not at all; checksums are done again."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import MappingProxyType
from typing import Any, Final

SCRIPTS: Final = ("<script>alert", "<img src=x", "<svg onload")
"""What no page may hold."""

RAW: Final = "raw:"
"""Begins a text that is put into JSON as it is."""

TEXTS: Final = (
    "", "x", "here", "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</title><svg onload=alert(1)>",
    "${7*7}{{7*7}}", "$\\frac{$", "a\nb", "\x1b[31mred\x1b[0m", "\0", "\ud800", "\u202egnp.exe", "../../etc/passwd",
    "%s%n", "é" * 300, "x" * 100_000, "nan", "1e400", "-1", "0x10", "\uff11\uff12", " 5 ", "[red]a[/red]", "[/",
)  # fmt: skip
NUMBERS: Final = (
    0, 1, -1, 2, 7, 255, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**300, 10**400, -(2**63), 0.5,
    -0.5, 1e-320, 1e-30, 1e18, 1e300, 1.7e308, 1.5,
)  # fmt: skip
OTHERS: Final = (
    None, True, False, [], {}, [1], [[]], [None], ["x"], {"x": 1}, {"": {}}, [[[[1]]]],
    f"{RAW}NaN", f"{RAW}Infinity", f"{RAW}-Infinity", f"{RAW}{'9' * 5000}", f"{RAW}1e999",
    f"{RAW}{'[' * 3000}{']' * 3000}", f"{RAW}{'[' * 100}{']' * 100}", f'{RAW}{{"a":1,"a":2}}',
    f"{RAW}{'[' * 100_000}", f"{RAW}-0", f"{RAW}0.0e-0",
)  # fmt: skip


def nasty(random: Random) -> Any:
    """A value of any type."""
    return random.choice(random.choice((TEXTS, NUMBERS, OTHERS)))


# ---------------------------------------------------------------------- JSON


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and object with every key of it."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        yield node, key
        yield from _places(value)


def change_document(document: Any, random: Random) -> Any:
    """The document with one or two places of it changed."""
    changed = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2))):
        places = list(_places(changed))
        if places:
            _change_place(*random.choice(places), random)
    return changed


def _change_place(node: Any, key: Any, random: Random) -> None:
    way = random.randrange(12)
    if way < 7:
        node[key] = nasty(random)
    elif way == 7:
        del node[key]
    elif way == 8 and isinstance(node, dict):
        node[random.choice(TEXTS)] = node.pop(key)
    elif way == 8:
        node.insert(key, copy.deepcopy(node[key]))
    elif way == 9:
        node[key] = [node[key]] if random.random() < 0.5 else {"x": node[key]}
    elif way == 10 and isinstance(node, dict):
        node[random.choice(TEXTS)] = nasty(random)
    elif way == 10:
        node.append(nasty(random))
    else:
        other = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node[key], node[other] = node[other], node[key]


def _json(document: Any) -> str:
    """As JSON, raw texts as they are."""
    text = json.dumps(document, separators=(",", ":"))
    return re.sub(f'"{RAW}((?:[^"\\\\]|\\\\.)*)"', lambda found: json.loads(f'"{found[1]}"'), text)


def changed_document(whole: bytes, random: Random) -> bytes:
    """One JSON document, changed."""
    if random.random() < 0.15:
        return odd_bytes(whole, random)
    return _json(change_document(json.loads(whole), random)).encode()


def changed_lines(whole: bytes, random: Random) -> bytes:
    """JSON lines, changed and sealed again where they were sealed."""
    if random.random() < 0.1:
        return odd_bytes(whole, random)
    records = [json.loads(line) for line in whole.splitlines()]
    sealed = "crc32" in records[0]
    for record in records:
        record.pop("crc32", None)
    way = random.randrange(10)
    if way == 0:
        place = random.randrange(len(records))
        records[place : place + 1] = random.choice(([], [records[place]] * 2, [nasty(random)], [{}]))
    elif way == 1:
        one, other = random.randrange(len(records)), random.randrange(len(records))
        records[one], records[other] = records[other], records[one]
    else:
        place = random.choice((0, random.randrange(len(records)), len(records) - 1))
        records[place] = change_document(records[place], random)
    lines = [_json(record).encode() for record in records]
    return b"".join(_sealed(lines)) if sealed else b"".join(line + b"\n" for line in lines)


def _sealed(lines: list[bytes]) -> Iterator[bytes]:
    checksum = 0
    for line in lines:
        body = line[:-1]
        checksum = zlib.crc32(body, checksum)
        yield b'%b,"crc32":"%08x"}\n' % (body, checksum)


# ---------------------------------------------------------------------- others


def changed_cells(whole: bytes, random: Random) -> bytes:
    """CSV with a cell, a row or a column changed."""
    if random.random() < 0.15:
        return odd_bytes(whole, random)
    rows = list(csv.reader(io.StringIO(whole.decode())))
    for _ in range(random.choice((1, 1, 2, 6))):
        place = random.randrange(len(rows))
        row = rows[place]
        way = random.randrange(8)
        if way < 5 and row:
            row[random.randrange(len(row))] = str(
                random.choice((random.choice(TEXTS), random.choice(NUMBERS), "inf", "1_0"))
            )
        elif way == 5 and row:
            del row[random.randrange(len(row))]
        elif way == 6:
            row.append(random.choice(TEXTS))
        else:
            rows.insert(place, list(row))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def changed_source(whole: bytes, random: Random) -> bytes:
    """Python that is none, or gives something else than it should."""
    if random.random() < 0.3:
        return odd_bytes(whole, random)
    lines = whole.decode().splitlines()
    place = random.randrange(len(lines))
    more = random.choice((
        "return None", "    return 5", "raise SystemExit(3)", "    raise KeyError('x')", "import nothing_of_that_name",
        "build = 7", "    raise MemoryError", "def build(: pass", "    1 / 0", "\tx = 1", "    assert False, 'a\\nb'",
        "    raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'y')", "(" * 300 + ")" * 300, "del build", "    yield 1",
        "    raise ExceptionGroup('a', [ValueError('b')])", "#" + "\0",
    ))  # fmt: skip
    lines[place : place + random.randrange(2)] = [more]
    return "\n".join(lines).encode()


def odd_bytes(whole: bytes, random: Random) -> bytes:
    """The bytes in another way, whatever they say."""
    at, end = sorted(random.randrange(len(whole) + 1) for _ in range(2))
    return _WAYS[random.choice(list(_WAYS))](whole, at, end, random)


_Way = Callable[[bytes, int, int, Random], bytes]
_WAYS: Final[Mapping[str, _Way]] = MappingProxyType(
    {
        "cut": lambda whole, at, end, random: whole[:at],
        "without": lambda whole, at, end, random: whole[:at] + whole[end:],
        "twice": lambda whole, at, end, random: whole[:end] + whole[at:],
        "bytes within": lambda whole, at, end, random: whole[:at] + random.randbytes(9) + whole[at:],
        "zeros": lambda whole, at, end, random: whole[:at] + b"\0" * 9 + whole[at:],
        "a bit": lambda whole, at, end, random: whole[:at] + bytes([random.randrange(256)]) + whole[at + 1 :],
        "utf-16": lambda whole, at, end, random: whole.decode("latin-1").encode("utf-16"),
        "latin-1": lambda whole, at, end, random: whole[:at] + "ÿé".encode("latin-1") + whole[at:],
        "mark": lambda whole, at, end, random: b"\xef\xbb\xbf" + whole,
        "carriage returns": lambda whole, at, end, random: whole.replace(b"\n", b"\r\n"),
        "no line ends": lambda whole, at, end, random: whole.replace(b"\n", b" "),
        "compressed": lambda whole, at, end, random: gzip.compress(whole),
        "compressed and cut": lambda whole, at, end, random: gzip.compress(whole)[: 10 + at // 8],
        "compressed and spoilt": lambda whole, at, end, random: gzip.compress(whole)[:40] + random.randbytes(40),
        "a head alone": lambda whole, at, end, random: b"\x1f\x8b",
        "lines without end": lambda whole, at, end, random: whole + b"x" * 300_000,
    }
)
