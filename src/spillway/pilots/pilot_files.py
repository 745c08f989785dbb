"""Pilot files: what a pilot has learned, with the architecture that its numbers are of, as versioned JSON lines.

    {"format":"spillway-pilot","version":1,"network":"var-bert","base":"transformer","pilot":"decisions",
     "settings":{...},"facts":{...},"paths":2,"arrays":3}

Then what a sample file has of an architecture (`sample_files.py`), and the arrays, each
`{"array":"mlp.layer0","shape":[97,256],"content":"..."}` in the same base64. Lines are sealed (`ir/sealed.py`).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import numpy as np

from spillway.ir.reading import fault_in, lines_of, read_fields
from spillway.ir.sealed import records_of, replace_file, sealed, stated
from spillway.pilots.architecture import Architecture
from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.paths import BaseType, Floats, PathOp, Sample
from spillway.pilots.program import Program
from spillway.pilots.sample_files import RecordedSamples, architecture_records, array_of, learn_record, text_of
from spillway.pilots.ten_vectors import PublishedPilot

FORMAT: Final = "spillway-pilot"
"""What the first line of every pilot file names."""
VERSION: Final = 1
"""The version that this code writes, and the newest that it reads."""

TrainedPilot: TypeAlias = DecisionPilot | PublishedPilot
KINDS: Final[Mapping[str, type[DecisionPilot] | type[PublishedPilot]]] = {
    one.name: one for one in (DecisionPilot, PublishedPilot)
}
"""The pilots that are trained, by name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPilot:
    """A pilot that was trained ahead."""

    pilot: TrainedPilot
    """Its program is of the architecture that it was trained on."""
    facts: Mapping[str, Any]
    """How it was trained: what JSON can hold."""


def write_pilot(path: str | PathLike[str], saved: SavedPilot) -> None:
    """Write a pilot file, compressed. A file that stands there is replaced as a whole.

    Raises TypeError for facts that JSON cannot hold, and OSError where the system does.
    """
    replace_file(Path(path), gzip.compress(sealed(_records(saved)), compresslevel=6, mtime=0))


def _records(saved: SavedPilot) -> Iterator[dict[str, Any]]:
    pilot = saved.pilot
    known, arrays = pilot.program.architecture, pilot.arrays()
    yield {
        "format": FORMAT, "version": VERSION, "network": known.network, "base": known.base.value, "pilot": pilot.name,
        "settings": pilot.settings(), "facts": dict(saved.facts), "paths": len(known.paths), "arrays": len(arrays),
    }  # fmt: skip
    yield from architecture_records(known)
    for name, array in arrays.items():
        yield {"array": name, "shape": list(array.shape), "content": text_of(array)}


def read_pilot(path: str | PathLike[str], *, network: str | None = None) -> SavedPilot:
    """Read a pilot file.

    Raises FileFormatError with the path and the line at fault for a foreign, newer, cut or damaged file, and if
    `network` is given for a pilot of another one; OSError where the system does.
    """
    records = records_of(path, lines_of(path), name=FORMAT, version=VERSION, what="a pilot file")
    number, header = next(records)
    with fault_in(path, number):
        first = read_fields(_Header, stated(header), "first line")
        if network is not None and first.network != network:
            raise ValueError(f"this is a pilot of the network {first.network!r}, and one of {network!r} is needed")
        if first.pilot not in KINDS:
            raise ValueError(f"{first.pilot!r} is none of the pilots {', '.join(KINDS)}")
    architecture, arrays = Architecture(first.network, first.base), dict[str, Floats]()
    for number, record in records:
        with fault_in(path, number):
            if number <= 2 + first.paths:
                learn_record(architecture, record, tables=number == 2)
            else:
                given = read_fields(_Array, record, "array")
                arrays[given.array] = _shaped(given)
    with fault_in(path, number):
        if (len(architecture.paths), len(arrays)) != (first.paths, first.arrays):
            raise ValueError(
                f"{len(architecture.paths)} paths and {len(arrays)} arrays follow of the {first.paths} and "
                f"{first.arrays} that the first line announces"
            )
        pilot = KINDS[first.pilot].of_arrays(Program(architecture), arrays, first.settings)
    return SavedPilot(pilot=pilot, facts=first.facts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    network: str
    base: BaseType
    pilot: str
    settings: dict[str, int]
    facts: dict[str, Any]
    paths: int
    arrays: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Array:
    array: str
    shape: list[int]
    content: str


def _shaped(given: _Array) -> Floats:
    flat = array_of(given.content, "<f4", given.array)
    if len(flat) != int(np.prod(given.shape, dtype=np.int64)) or not np.isfinite(flat).all():
        raise ValueError(f"{given.array} has {len(flat)} numbers for the shape {given.shape}, or some that are none")
    return flat.reshape(given.shape)


def renumbered(recorded: RecordedSamples, into: Architecture) -> list[Sample]:
    """The samples of a file by the numbers of another architecture of the same network, which learns their paths.

    Raises ValueError with a clause for samples of another network, or with other parameters.
    """
    given = recorded.architecture
    if given.network != into.network:
        raise ValueError(f"the samples are of the network {given.network!r}, and the pilot is of {into.network!r}")
    parameters = [into.parameter(one) for one in given.parameters]
    ops = np.array(
        [into.op(PathOp(op.site, op.name, tuple(parameters[one] for one in op.parameters))) for op in given.ops],
        np.int32,
    )
    signatures = np.array([into.signature(one) for one in given.signatures], np.int32)
    paths = [into.path(ops[path.keys], path.starts, path.operands) for path in given.paths]
    return [
        replace(one, path=paths[one.path.number], signatures=signatures[one.signatures]) for one in recorded.samples
    ]
