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
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

from spillway.errors import FileFormatError
from spillway.ir.sealed import encoded, fault_in, read_header, seal, unsealed
from spillway.ir.step import Op, Phase, Saving, Step, StorageInfo, Value, ValueId
from spillway.ir.timeline import Kind

FORMAT: Final = "spillway-step"
"""What the first line of every step file names."""
VERSION: Final = 1
"""The version that this code writes, and the newest that it reads."""

_GZIP: Final = b"\x1f\x8b"
"""The first bytes of what is compressed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A step, and what it is the step of."""

    step: Step
    """The step."""
    workload: str
    """What the workload is called."""
    size: int | None = None
    """The input size that the step was recorded at, in the workload's own measure; None if it has none."""
    facts: Mapping[str, Any]
    """Everything else worth knowing, such as the machine and the options: what JSON can hold, and no tuples."""


def write_step(path: str | PathLike[str], recorded: Recorded) -> None:
    """Write a step file, compressed if the name ends in `.gz`. A file that stands there is replaced as a whole.

    Raises ValueError or TypeError for facts that would not come back as they are, and OSError where the system does.
    """
    path = Path(path)
    content = b"".join(_lines(recorded))
    again = _read(path, BytesIO(content))
    if again != Recorded(
        step=recorded.step, workload=recorded.workload, size=recorded.size, facts=dict(recorded.facts)
    ):
        raise ValueError("the facts of a recorded step have to come back from JSON as they are")
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    _replace(path, content)


def read_step(path: str | PathLike[str]) -> Recorded:
    """Read a step file, compressed or not, whatever its name.

    Raises FileFormatError with the path and the line at fault for a foreign, newer, cut or damaged file, and OSError
    where the system does.
    """
    with Path(path).open("rb") as file:
        compressed = file.read(2) == _GZIP
    with gzip.open(path, "rb") if compressed else Path(path).open("rb") as content:
        return _read(path, content)


def _replace(path: Path, content: bytes) -> None:
    """Write beside the file and exchange them, so that nobody ever meets half a file."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with beside.open("xb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


# ---------------------------------------------------------------------- writing


def _lines(recorded: Recorded) -> Iterator[bytes]:
    checksum = 0
    for record in _records(recorded):
        line, checksum = seal(encoded(record), checksum)
        yield line


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
    record |= _worth_saying({"flops": op.flops, "traffic": op.traffic, "seeded": op.seeded})
    return record if op.replayable else record | {"replayable": False}


def _worth_saying(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _named(ids: Iterable[ValueId], names: list[str]) -> str:
    return " ".join(names[number] for number in ids)


# ---------------------------------------------------------------------- reading


def _read(path: str | PathLike[str], content: Iterable[bytes]) -> Recorded:
    lines = _whole_lines(path, content)
    number, line = next(lines, (1, b""))
    with fault_in(path, number):
        header, checksum = read_header(line, name=FORMAT, version=VERSION, what="a recorded step")
        counts = _counts(header)
    records: list[dict[str, Any]] = []
    for number, line in lines:
        with fault_in(path, number):
            record, checksum = unsealed(line, checksum)
        records.append(record)
    expected = sum(counts) + 1
    if len(records) != expected:
        reason = f"the file ends after {len(records)} of the {expected} lines that should follow the first"
        if len(records) > expected:
            reason = f"more lines follow than the {expected} that the first line announces"
        raise FileFormatError(reason, path=Path(path), line=number)
    step = _step(path, records, counts)
    with fault_in(path, 1):
        if (step.plain_peak(), step.digest()) != (header.get("plain_peak_bytes"), header.get("digest")):
            raise ValueError("the step that follows is not the one that the first line announces")
        return _recorded(header, step)


def _whole_lines(path: str | PathLike[str], content: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number lines from 1; a compressed file that breaks off or does not unpack is told by the line it broke at."""
    number = 0
    try:
        for number, line in enumerate(content, start=1):
            yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FileFormatError(
            f"the compressed file is cut or damaged ({error})", path=Path(path), line=number + 1
        ) from None


def _counts(header: dict[str, Any]) -> tuple[int, int]:
    match header:
        case {"storages": int(storages), "ops": int(ops)} if storages >= 0 and ops >= 0:
            return storages, ops
    raise ValueError("the first line does not say how many storages and ops follow")


def _recorded(header: dict[str, Any], step: Step) -> Recorded:
    match header:
        case {"workload": str(workload), "facts": dict(facts)}:
            size = header.get("size")
            if size is None or isinstance(size, int):
                return Recorded(step=step, workload=workload, size=size, facts=facts)
    raise ValueError("the first line does not say which workload was recorded, its size and its facts")


def _step(path: str | PathLike[str], records: list[dict[str, Any]], counts: tuple[int, int]) -> Step:
    storages, ops = counts
    last = len(records) + 1
    with fault_in(path, last):
        values = _values(records[-1])
        ids = {str(value): value.id for value in values}
        saved = _ids(records[-1].get("saved", ""), ids)
        savings = tuple(_saving(row, ids) for row in records[-1].get("savings", []))
    made = [_at(path, place + 2, _storage, records[place]) for place in range(storages)]
    run = [_at(path, place + 2, _op, records[place], ids) for place in range(storages, storages + ops)]
    with fault_in(path, last):
        return Step(storages=tuple(made), values=values, ops=tuple(run), saved=saved, savings=savings)


def _at(path: str | PathLike[str], line: int, read: Any, *given: Any) -> Any:
    with fault_in(path, line):
        return read(*given)


def _values(record: dict[str, Any]) -> tuple[Value, ...]:
    match record:
        case {"values": list(storages)} if all(type(storage) is int for storage in storages):
            versions: dict[int, int] = {}
            values = []
            for number, storage in enumerate(storages):
                versions[storage] = version = versions.get(storage, -1) + 1
                values.append(Value(id=number, storage=storage, version=version))
            return tuple(values)
    raise ValueError("the last line does not list the values and what is saved of them")


def _ids(named: object, ids: dict[str, ValueId]) -> tuple[ValueId, ...]:
    if not isinstance(named, str):
        raise ValueError(f"{named!r:.80} are not values")
    try:
        return tuple(ids[name] for name in named.split())
    except KeyError as unknown:
        raise ValueError(f"{unknown.args[0]:.80} is no value of this step") from None


def _saving(row: object, ids: dict[str, ValueId]) -> Saving:
    match row:
        case [str(name), int(after), str(module), str(dtype), bool(differentiable)] if name in ids:
            return Saving(
                value=ids[name], after=after, module=module, dtype=dtype, differentiable=differentiable
            )  # fmt: skip
    raise ValueError(f"{row!r:.80} does not say what autograd saved, when, where and how")


def _storage(record: dict[str, Any]) -> StorageInfo:
    match record:
        case {"storage": int(number), "kind": str(kind), "bytes": int(nbytes), "alive": [int(begin), int(end)]}:
            present, name, dtype = (record.get(key, "") for key in ("present", "name", "dtype"))
            if present in ("", "start", "end", "start end") and isinstance(name, str) and isinstance(dtype, str):
                return StorageInfo(
                    id=number, nbytes=nbytes, kind=Kind(kind), alive_from=begin, alive_until=end, name=name,
                    dtype=dtype, present_at_start=present.startswith("start"), present_at_end=present.endswith("end"),
                )  # fmt: skip
    raise ValueError("the line does not hold a storage: its number, kind, bytes and when it is alive")


def _op(record: dict[str, Any], ids: dict[str, ValueId]) -> Op:
    defaults = {"module": "", "seconds": None, "flops": 0, "traffic": 0, "seeded": False, "replayable": True}
    match defaults | record:
        case {
            "op": int(number), "name": str(name), "phase": str(phase), "module": str(module),
            "seconds": int() | float() | None as seconds, "flops": int(flops), "traffic": int(traffic),
            "seeded": bool(seeded), "replayable": bool(replayable),
        }:  # fmt: skip
            return Op(
                number=number, name=name, phase=Phase(phase), module=module, seconds=seconds, flops=flops,
                traffic=traffic, seeded=seeded, replayable=replayable, reads=_ids(record.get("reads", ""), ids),
                creates=_ids(record.get("creates", ""), ids),
            )  # fmt: skip
    raise ValueError("the line does not hold an op: its number, name, phase, what it reads and what it creates")
