"""Step files: a recorded step as versioned JSON lines, one line per storage and per op, which a person can read.

    {"format":"spillway-step","version":1,"workload":"gpt2","size":2048,"facts":{...},"storages":7,"ops":9,
     "plain_peak_bytes":640,"digest":"..."}
    {"storage":0,"kind":"parameter","bytes":128,"alive":[0,9],"present":"start end","name":"head.weight",
     "dtype":"float32"}
    {"op":0,"name":"aten.mm.default","phase":"forward","module":"head","reads":"s4@0 s0@0","creates":"s5@0","flops":512}
    {"values":[0,1,4,5],"saved":"s4@0 s0@0","savings":[["s4@0",0,"head","float32",true]]}

An op names values as `s<storage>@<version>`. The last line lists the storage of every value in the order of their ids,
each time a storage occurs its next version; a saving is a value, how many ops had begun, the module, the dtype, and
whether the tensor was differentiable. What has its default is left out. Lines are sealed (`sealed.py`); a file
whose name ends in `.gz` is compressed. What is written is read again before it takes the place of what was there.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

from spillway.errors import FileFormatError
from spillway.ir.reading import fault_in, lines_of, read_fields, read_row, shown
from spillway.ir.sealed import records_of, replace_file, sealed, stated
from spillway.ir.step import Op, Saving, Step, StorageInfo, Value, ValueId
from spillway.units import Bytes

FORMAT: Final = "spillway-step"
"""What the first line of every step file names."""
VERSION: Final = 1
"""The version that this code writes, and the newest that it reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A step, and what it is the step of."""

    step: Step
    workload: str
    size: int | None = None
    """The input size that the step was recorded at, in the workload's own measure; None if it has none."""
    facts: Mapping[str, Any]
    """Everything else worth knowing, such as the machine and the options: what JSON can hold, and no tuples."""


def write_step(path: str | PathLike[str], recorded: Recorded) -> None:
    """Write a step file, compressed if the name ends in `.gz`. A file that stands there is replaced as a whole.

    Raises ValueError or TypeError for facts that would not come back as they are, and OSError where the system does.
    """
    path = Path(path)
    content = sealed(_records(recorded))
    again = _read(path, enumerate(content.splitlines(keepends=True), start=1))
    if again != replace(recorded, facts=dict(recorded.facts)):
        raise ValueError("the facts of a recorded step have to come back from JSON as they are")
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    replace_file(path, content)


def read_step(path: str | PathLike[str]) -> Recorded:
    """Read a step file, compressed or not, whatever its name.

    Raises FileFormatError with the path and the line at fault for a foreign, newer, cut or damaged file, and OSError
    where the system does.
    """
    return _read(path, lines_of(path))


# ---------------------------------------------------------------------- writing


def _records(recorded: Recorded) -> Iterator[dict[str, Any]]:
    step = recorded.step
    size = {} if recorded.size is None else {"size": recorded.size}
    counts = {"storages": len(step.storages), "ops": len(step.ops)}
    checks = {"plain_peak_bytes": step.plain_peak(), "digest": step.digest()}
    yield {
        "format": FORMAT, "version": VERSION, "workload": recorded.workload, **size, "facts": dict(recorded.facts),
        **counts, **checks,
    }  # fmt: skip
    yield from map(_storage_record, step.storages)
    names = [str(value) for value in step.values]
    for op in step.ops:
        yield _op_record(op, names)
    savings = [[names[one.value], one.after, one.module, one.dtype, one.differentiable] for one in step.savings]
    last = {"values": [value.storage for value in step.values], "saved": _named(step.saved, names)}
    yield last | _worth_saying({"savings": savings})


def _storage_record(storage: StorageInfo) -> dict[str, Any]:
    record: dict[str, Any] = {"storage": storage.id, "kind": storage.kind.value, "bytes": storage.nbytes}
    record["alive"] = [storage.alive_from, storage.alive_until]
    ends = ["start"] * storage.present_at_start + ["end"] * storage.present_at_end
    return record | _worth_saying({"present": " ".join(ends), "name": storage.name, "dtype": storage.dtype})


def _op_record(op: Op, names: list[str]) -> dict[str, Any]:
    record: dict[str, Any] = {"op": op.number, "name": op.name, "phase": op.phase.value}
    record |= _worth_saying(
        {"module": op.module, "reads": _named(op.reads, names), "creates": _named(op.creates, names)}
    )
    if op.seconds is not None:
        record["seconds"] = op.seconds
    record |= _worth_saying({"flops": op.flops, "traffic": op.traffic, "seeded": op.seeded, "shape": [*op.shape]})
    return record if op.replayable else record | {"replayable": False}


def _worth_saying(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _named(ids: Iterable[ValueId], names: list[str]) -> str:
    return " ".join(names[number] for number in ids)


# ---------------------------------------------------------------------- reading


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What the first line says besides format and version."""

    workload: str
    facts: dict[str, Any]
    storages: int
    ops: int
    plain_peak_bytes: Bytes
    digest: str
    size: int | None = None


def _read(path: str | PathLike[str], lines: Iterator[tuple[int, bytes]]) -> Recorded:
    found = records_of(path, lines, name=FORMAT, version=VERSION, what="a recorded step")
    number, header = next(found)
    with fault_in(path, number):
        first = read_fields(_Header, stated(header), "first line")
    records = [record for _, record in found]
    expected = first.storages + first.ops + 1
    if len(records) != expected:
        reason = f"the file ends after {len(records)} of the {expected} lines that should follow the first"
        if len(records) > expected:
            reason = f"more lines follow than the {expected} that the first line announces"
        raise FileFormatError(reason, path=path, line=len(records) + 1)
    step = _step(path, records, first.storages)
    if (step.plain_peak(), step.digest()) != (first.plain_peak_bytes, first.digest):
        reason = "the step that follows is not the one that the first line announces"
        raise FileFormatError(reason, path=path, line=1)
    return Recorded(step=step, workload=first.workload, size=first.size, facts=first.facts)


def _step(path: str | PathLike[str], records: list[dict[str, Any]], storages: int) -> Step:
    last = len(records) + 1
    with fault_in(path, last):
        end = read_fields(_LastLine, records[-1], "last line")
        values = tuple(_values(end.values))
        ids = {str(value): value.id for value in values}
        saved, savings = _ids(end.saved, ids), tuple(_saving(row, ids) for row in end.savings)
    made = [_at(path, place + 2, _storage, records[place]) for place in range(storages)]
    run = [_at(path, place + 2, _op, records[place], ids) for place in range(storages, len(records) - 1)]
    with fault_in(path, last):
        return Step(storages=tuple(made), values=values, ops=tuple(run), saved=saved, savings=savings)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _LastLine:
    """Of every value its storage; what autograd keeps, and how it came to."""

    values: list[int]
    saved: str = ""
    savings: list[Any] = field(default_factory=list)


def _at(path: str | PathLike[str], line: int, read: Any, *given: Any) -> Any:
    with fault_in(path, line):
        return read(*given)


def _values(storages: list[int]) -> Iterator[Value]:
    versions: dict[int, int] = {}
    for number, storage in enumerate(storages):
        versions[storage] = version = versions.get(storage, -1) + 1
        yield Value(id=number, storage=storage, version=version)


def _ids(named: str, ids: dict[str, ValueId]) -> tuple[ValueId, ...]:
    try:
        return tuple(ids[name] for name in named.split())
    except KeyError as unknown:
        raise ValueError(f"{shown(unknown.args[0])} is no value of this step") from None


def _saving(row: Any, ids: dict[str, ValueId]) -> Saving:
    match row:
        case [str(value), *rest] if value in ids:
            return read_row(Saving, [ids[value], *rest], "saving")
    raise ValueError(f"{shown(row)} does not say when and where a value was saved")


def _storage(record: dict[str, Any]) -> StorageInfo:
    match {"present": "", **record}:
        case {"storage": number, "bytes": nbytes, "alive": [begin, end], "present": str(present), **rest}:
            ends = present.split()
            if set(ends) <= {"start", "end"}:
                told = {"id": number, "nbytes": nbytes, "alive_from": begin, "alive_until": end,
                        "present_at_start": "start" in ends, "present_at_end": "end" in ends}  # fmt: skip
                return read_fields(StorageInfo, {**rest, **told}, "storage")
    raise ValueError("the line does not hold a storage: its number, kind, bytes and when it is alive")


def _op(record: dict[str, Any], ids: dict[str, ValueId]) -> Op:
    match {"reads": "", "creates": "", **record}:
        case {"op": number, "reads": str(reads), "creates": str(creates), **rest}:
            told = {"number": number, "reads": [*_ids(reads, ids)], "creates": [*_ids(creates, ids)]}
            return read_fields(Op, {**rest, **told}, "op")
    raise ValueError("the line does not hold an op: its number, name, phase, what it reads and what it creates")
