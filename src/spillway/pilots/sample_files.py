"""Sample files: steps of a dynamic network as versioned JSON lines, from which pilots learn; compressed.

    {"format":"spillway-samples","version":2,"network":"var-bert","base":"transformer","facts":{...},
     "paths":2,"samples":3}
    {"parameters":[["embedding.tokens.weight",33152]],"ops":[["embedding",0,0,"aten.embedding.default",[0]]],
     "signatures":[["aten.embedding.default",[259,32,0],4096,0,8704]],"statements":{"":["if is_open"]}}
    {"path":0,"keys":"...","starts":"...","operands":"..."}
    {"sample":0,"path":0,"sizes":[39.0,6.0],"structure":[],"loss":5.6,"embedding":"...","signatures":"...",
     "asked_at":"...","hidden":"..."}

Arrays are little-endian, int32 or float32, in base64. Lines are sealed (`ir/sealed.py`). Paths stand in the order in
which they were seen, so that who reads them learns the same architecture, with the same numbers.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from spillway.errors import FileFormatError
from spillway.ir.reading import fault_in, lines_of, read_fields, shown
from spillway.ir.sealed import records_of, replace_file, sealed, stated
from spillway.pilots.architecture import Architecture
from spillway.pilots.paths import BaseType, Numbers, OpSignature, ParameterStorage, PathOp, ResolvedPath, Sample, Site

FORMAT: Final = "spillway-samples"
"""What the first line of every sample file names."""
VERSION: Final = 2
"""The version that this code writes, and the newest that it reads."""
LEARNED: Final = 0.75
"""Of samples, the share in front that a pilot learns; it is judged by the rest."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSamples:
    """Steps of one network in order, and the architecture that was learned from them."""

    architecture: Architecture
    """What the samples' numbers mean."""
    samples: tuple[Sample, ...]
    facts: Mapping[str, Any]
    """How they were recorded, such as the seed and the options: what JSON can hold."""

    def parted(self) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
        """What a pilot learns ahead, and what it is judged by."""
        cut = int(len(self.samples) * LEARNED)
        return self.samples[:cut], self.samples[cut:]


def write_samples(path: str | PathLike[str], recorded: RecordedSamples) -> None:
    """Write a sample file, compressed. A file that stands there is replaced as a whole.

    Raises TypeError for facts that JSON cannot hold, and OSError where the system does.
    """
    replace_file(Path(path), gzip.compress(sealed(_records(recorded)), compresslevel=6, mtime=0))


def read_samples(path: str | PathLike[str]) -> RecordedSamples:
    """Read a sample file.

    Raises FileFormatError with the path and the line at fault for a foreign, newer, cut or damaged file, and OSError
    where the system does.
    """
    records = records_of(path, lines_of(path), name=FORMAT, version=VERSION, what="a file of samples")
    number, header = next(records)
    with fault_in(path, number):
        first = read_fields(_Header, stated(header), "first line")
    architecture, samples = Architecture(first.network, first.base), list[Sample]()
    for number, record in records:
        with fault_in(path, number):
            if number <= 2 + first.paths:
                learn_record(architecture, record, tables=number == 2)
            else:
                sample = _sample(architecture, read_fields(_Sample, record, "sample"))
                if samples and _widths(sample) != _widths(samples[0]):
                    raise ValueError(
                        f"sample {sample.step} has {_widths(sample)} sizes, numbers of structure and of its embedding, "
                        f"and the first one {_widths(samples[0])}"
                    )
                samples.append(sample)
    if (len(architecture.paths), len(samples)) != (first.paths, first.samples):
        reason = (
            f"{len(architecture.paths)} paths and {len(samples)} samples follow of the {first.paths} and "
            f"{first.samples} that the first line announces"
        )
        raise FileFormatError(reason, path=path, line=number)
    return RecordedSamples(architecture=architecture, samples=tuple(samples), facts=first.facts)


# ---------------------------------------------------------------------- writing


def _records(recorded: RecordedSamples) -> Iterator[dict[str, Any]]:
    known = recorded.architecture
    yield {
        "format": FORMAT, "version": VERSION, "network": known.network, "base": known.base.value,
        "facts": dict(recorded.facts), "paths": len(known.paths), "samples": len(recorded.samples),
    }  # fmt: skip
    yield from architecture_records(known)
    for sample in recorded.samples:
        yield {
            "sample": sample.step, "path": sample.path.number, "sizes": list(sample.sizes),
            "structure": list(sample.structure), "loss": sample.loss, "embedding": text_of(sample.embedding),
            "signatures": text_of(sample.signatures), "asked_at": text_of(sample.asked_at),
            "hidden": text_of(sample.hidden),
        }  # fmt: skip


def architecture_records(known: Architecture) -> Iterator[dict[str, Any]]:
    """The second line and those of the paths, for every file that begins with an architecture."""
    yield {
        "parameters": [[one.name, one.nbytes] for one in known.parameters],
        "ops": [[op.site.module, op.site.call, op.site.op, op.name, list(op.parameters)] for op in known.ops],
        "signatures": [[one.name, list(one.dims), one.created, one.flops, one.traffic] for one in known.signatures],
        "statements": {module: list(heads) for module, heads in known.statements.items()},
    }
    for path in known.paths:
        yield {
            "path": path.number, "keys": text_of(path.keys), "starts": text_of(path.starts),
            "operands": text_of(path.operands),
        }  # fmt: skip


def text_of(array: npt.NDArray[Any]) -> str:
    """An array in base64, little-endian."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


# ---------------------------------------------------------------------- reading


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    network: str
    base: BaseType
    facts: dict[str, Any]
    paths: int
    samples: int


@final
@dataclass(frozen=True, slots=True)
class _Operation:
    module: str
    call: int
    op: int
    name: str
    parameters: list[int]


@final
@dataclass(frozen=True, slots=True)
class _Tables:
    parameters: list[ParameterStorage]
    ops: list[_Operation]
    signatures: list[OpSignature]
    statements: dict[str, list[str]] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class _Path:
    path: int
    keys: str
    starts: str
    operands: str


@final
@dataclass(frozen=True, slots=True)
class _Sample:
    sample: int
    path: int
    sizes: list[float]
    loss: float
    embedding: str
    signatures: str
    asked_at: str
    hidden: str
    structure: list[float] = field(default_factory=list)


def learn_record(architecture: Architecture, record: dict[str, Any], *, tables: bool) -> None:
    """Learn what `architecture_records` gave: the tables, or a path. Raises ValueError for anything else."""
    if tables:
        _learn_tables(architecture, read_fields(_Tables, record, "second line"))
    else:
        _learn_path(architecture, read_fields(_Path, record, "path"))


def _learn_tables(architecture: Architecture, tables: _Tables) -> None:
    architecture.statements.update((module, tuple(heads)) for module, heads in tables.statements.items())
    for parameter in tables.parameters:
        architecture.parameter(parameter)
    for op in tables.ops:
        if not all(number < len(architecture.parameters) for number in op.parameters):
            raise ValueError(f"{op.name} touches a parameter that is not listed")
        architecture.op(PathOp(Site(op.module, op.call, op.op), op.name, tuple(op.parameters)))
    for one in tables.signatures:
        if len(dims := [*one.dims]) != 3:  # reading lets tuples of any length pass
            raise ValueError(f"{shown(dims)} are not the three dimensions of a signature")
        architecture.signature(one)
    told = (len(tables.parameters), len(tables.ops), len(tables.signatures))
    if told != (len(architecture.parameters), len(architecture.ops), len(architecture.signatures)):
        raise ValueError("a parameter, an op or a signature is listed twice")


def _learn_path(architecture: Architecture, given: _Path) -> None:
    keys = _numbers(given.keys, "keys", below=len(architecture.ops))
    starts, operands = _numbers(given.starts, "starts"), _numbers(given.operands, "operands", below=len(keys))
    ends = (starts[0], starts[-1]) if len(starts) == len(keys) + 1 else None
    if ends != (0, len(operands)) or bool((np.diff(starts) < 0).any()):
        raise ValueError("starts do not say where the operands of every op begin")
    if architecture.path(keys, starts, operands).number != given.path:
        raise ValueError(f"path {given.path} is listed twice, or not in its place")


def _sample(architecture: Architecture, given: _Sample) -> Sample:
    if given.path >= len(architecture.paths):
        raise ValueError(f"sample {given.sample} took path {given.path}, which is not listed")
    path: ResolvedPath = architecture.paths[given.path]
    embedding, hidden = (array_of(text, "<f4", what) for text, what in
                         ((given.embedding, "embedding"), (given.hidden, "hidden")))  # fmt: skip
    asked_at = _numbers(given.asked_at, "asked_at", below=len(path))
    signatures = _numbers(given.signatures, "signatures", below=len(architecture.signatures))
    if len(signatures) != len(path) or hidden.size != len(asked_at) * len(embedding):
        raise ValueError(f"sample {given.sample} has more or fewer signatures or hidden states than its path has ops")
    return Sample(
        step=given.sample, sizes=tuple(given.sizes), structure=tuple(given.structure), embedding=embedding,
        base=architecture.base, path=path, signatures=signatures, asked_at=asked_at,
        hidden=hidden.reshape(len(asked_at), len(embedding)), loss=given.loss,
    )  # fmt: skip


def _widths(sample: Sample) -> tuple[int, int, int]:
    return len(sample.sizes), len(sample.structure), len(sample.embedding)


def _numbers(text: str, what: str, *, below: int | None = None) -> Numbers:
    found = array_of(text, "<i4", what)
    if below is not None and len(found) and not (int(found.min()) >= 0 and int(found.max()) < below):
        raise ValueError(f"{what} name what is not listed")
    return found


def array_of(text: str, dtype: str, what: str) -> npt.NDArray[Any]:
    """What `text_of` gave, `what` for errors. Raises ValueError for what is none."""
    try:
        content = base64.b64decode(text, validate=True)
        return np.frombuffer(content, dtype).astype(dtype[1:])
    except ValueError:
        raise ValueError(f"{what} is no array in base64") from None
