"""A recorded step: its ops in order, what they read and create, and the storages behind it.

Everything is numbered from 0 without a hole, so that an id is an index: `step.ops[k]`, `step.values[id]`,
`step.storages[id]`. The grammar stands in `README.md` beside this file. A step is checked when it is built.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TypeAlias, final

from spillway.ir.timeline import Kind
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

StorageId: TypeAlias = int
"""Index of a storage in its step."""
ValueId: TypeAlias = int
"""Index of a value in its step."""


@final
class Phase(StrEnum):
    """The part of the step that an op belongs to. With accumulated gradients the parts alternate."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A storage at one version of its content; what ops read and create."""

    id: ValueId
    storage: StorageId
    version: int
    """0 for the storage's first content, one more for every op that writes to the storage."""

    def __str__(self) -> str:
        return f"s{self.storage}@{self.version}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StorageInfo:
    """The bytes behind one or more tensors, and when they exist."""

    id: StorageId
    nbytes: Bytes
    kind: Kind
    alive_from: int
    """First op of the half-open interval of ops during which it exists: the op that creates it."""
    alive_until: int
    """End of that interval: one more than the last op during which it exists."""
    present_at_start: bool = False
    """Whether it exists before op 0; its version 0 is then a source, which no op creates."""
    present_at_end: bool = False
    """Whether it still exists after the last op, as parameters do."""
    name: str = ""
    """What the model calls it, of parameters, buffers and what belongs to them; else empty."""
    dtype: str = ""
    """Of the first tensor over it, as torch calls it, `float32`; empty where nobody wrote that down."""

    def __str__(self) -> str:
        ends = [" present at start"] * self.present_at_start + [" present at end"] * self.present_at_end
        interval = f"ops [{self.alive_from}, {self.alive_until})"
        return f"s{self.id}  {self.kind}  {format_bytes(self.nbytes)}  {interval}{','.join(ends)}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One dispatched operator. Views create no value: they share the storage that they look into."""

    number: int
    """Its index, in the order in which ops run."""
    name: str
    """The operator, `aten.mm.default`."""
    phase: Phase
    """The part of the step it belongs to."""
    reads: tuple[ValueId, ...]
    """The values whose content it needs, each once."""
    creates: tuple[ValueId, ...]
    """The values it makes, each once: version 0 of a new storage, or the next version of a storage it writes to."""
    seconds: Seconds | None = None
    """How long it takes; None until it is measured or modelled."""
    seeded: bool = False
    """Whether it draws random numbers, so that a replay needs the generator's state of the first run."""
    replayable: bool = True
    """Whether running it again on the same values gives the same bits."""
    module: str = ""
    """Qualified name of the module whose call it belongs to, `encoder.layer.0`; empty outside of any."""
    flops: int = 0
    """Floating-point operations that it takes; 0 for what only moves bytes, and where nobody counted."""
    traffic: Bytes = 0
    """Bytes that it reads and writes in device memory; 0 where nobody counted."""
    shape: tuple[int, ...] = ()
    """Of a matrix product: matrices, rows, columns, summed over. Of a convolution: samples, channels in and out, places
    of its result, height and width of its window, stride, groups; height and stride count all dimensions but the last.
    Of a batch norm: channels. Empty for all else, and where nobody wrote it down."""

    def __post_init__(self) -> None:
        if any(length < 0 for length in self.shape):
            raise ValueError(f"{self.label} has the shape {self.shape}")
        if self.seconds is not None and not 0 <= self.seconds < math.inf:
            raise ValueError(f"{self.label} takes {self.seconds} seconds")
        if self.flops < 0 or self.traffic < 0:
            raise ValueError(f"{self.label} takes {self.flops} operations and moves {self.traffic} bytes")
        for ids in (self.reads, self.creates):
            if len(set(ids)) < len(ids):
                raise ValueError(f"{self.label} lists a value twice")

    @property
    def label(self) -> str:
        """Number and name, for messages."""
        return f"op {self.number} ({self.name})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Once that autograd kept a value for the backward."""

    value: ValueId
    after: int
    """How many ops had begun."""
    module: str
    """Qualified name of the module whose forward was running; empty outside of any."""
    dtype: str
    """Of the tensor, as torch calls it: `float32`."""
    differentiable: bool
    """Whether a gradient flows to the tensor."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step as it was recorded, nothing dropped and nothing moved.

    Raises ValueError when built if it breaks the grammar, naming the op, value or storage at fault.
    """

    storages: tuple[StorageInfo, ...]
    values: tuple[Value, ...]
    """Every value of the step; the versions of one storage in their order."""
    ops: tuple[Op, ...]
    """Every op of the step, in the order in which they run."""
    saved: tuple[ValueId, ...] = ()
    """What autograd keeps from the forward for the backward, each value once, in the order of saving."""
    savings: tuple[Saving, ...] = ()
    """How it came to keep them, parameters and buffers left out, in the order of saving; empty where nobody wrote that
    down."""

    def __post_init__(self) -> None:
        _check_numbered("storage", (storage.id for storage in self.storages))
        _check_numbered("value", (value.id for value in self.values))
        _check_numbered("op", (op.number for op in self.ops))
        for storage in self.storages:
            _check_storage(storage, len(self.ops))
        _check_versions(self)
        _check_ops(self)
        if len(set(self.saved)) < len(self.saved):
            raise ValueError("a step lists a saved value twice")
        for number in self.saved:
            if not 0 <= number < len(self.values):
                raise ValueError(f"value {number} is saved, which is not listed")
        saved = set(self.saved)
        for saving in self.savings:
            if saving.value not in saved:
                raise ValueError(f"value {saving.value} was saved in {saving.module!r}, and is not among what is saved")
            if not 0 <= saving.after <= len(self.ops):
                raise ValueError(f"value {saving.value} was saved after {saving.after} of {len(self.ops)} ops")

    def levels(
        self, sizes: Sequence[Bytes] | None = None, gone: Iterable[tuple[StorageId, int, int]] = ()
    ) -> list[Bytes]:
        """Bytes alive during every op, where storages count as their bytes, or as `sizes` says; those `gone` are not
        there during half-open intervals of ops."""
        sizes = [storage.nbytes for storage in self.storages] if sizes is None else sizes
        changes = [0] * (len(self.ops) + 1)
        for storage in self.storages:
            changes[storage.alive_from] += sizes[storage.id]
            changes[storage.alive_until] -= sizes[storage.id]
        for number, start, end in gone:
            changes[start] -= sizes[number]
            changes[end] += sizes[number]
        return list(accumulate(changes[:-1]))

    def plain_peak(self) -> Bytes:
        """The most bytes alive during any op: what the step needs if nothing leaves memory; 0 if it has no op."""
        return max(self.levels(), default=0)

    def digest(self) -> str:
        """SHA-256 in hexadecimal of what a plan stands on: not of costs, which may change under it, nor of names."""
        digest = hashlib.sha256()
        for line in _canonical(self):
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def __str__(self) -> str:
        return "\n".join(_listing(self))


def _check_numbered(what: str, ids: Iterable[int]) -> None:
    for index, number in enumerate(ids):
        if number != index:
            raise ValueError(f"{what} {number} stands at place {index}: numbers go from 0 without a hole")


def _check_storage(storage: StorageInfo, ops: int) -> None:
    name = f"storage {storage.id}"
    if storage.nbytes < 0:
        raise ValueError(f"{name} has {storage.nbytes} bytes")
    if not 0 <= storage.alive_from <= storage.alive_until <= ops:
        raise ValueError(f"{name} is alive during [{storage.alive_from}, {storage.alive_until}) of {ops} ops")
    if storage.present_at_start and storage.alive_from != 0:
        raise ValueError(f"{name} is present at the start but alive only from op {storage.alive_from}")
    if storage.present_at_end and storage.alive_until != ops:
        raise ValueError(f"{name} is present at the end but alive only until op {storage.alive_until} of {ops}")


def _check_versions(step: Step) -> None:
    last = dict.fromkeys(range(len(step.storages)), -1)
    for value in step.values:
        if value.storage not in last:
            raise ValueError(f"value {value.id} is of storage {value.storage}, which is not listed")
        if value.version != last[value.storage] + 1:
            raise ValueError(f"value {value.id} is {value}, but versions increase by one from {last[value.storage]}")
        last[value.storage] = value.version
    for storage, version in last.items():
        if version < 0:
            raise ValueError(f"storage {storage} has no value")


def _check_ops(step: Step) -> None:
    """Walk through the ops with the version that each storage has at that moment."""
    current = {storage.id: 0 for storage in step.storages if storage.present_at_start}
    for op in step.ops:
        for value in _named(step, op, op.reads):
            now = current.get(value.storage, -1)
            if value.version > now:
                raise ValueError(f"{op.label} reads {value}, which no earlier op creates and which is no source")
            if value.version < now:
                raise ValueError(f"{op.label} reads {value}, which has been overwritten by version {now}")
        created = list(_named(step, op, op.creates))
        for value in created:
            _check_creation(op, value, step.storages[value.storage], current)
        current.update((value.storage, value.version) for value in created)
    for value in step.values:
        if value.version > current.get(value.storage, -1):
            raise ValueError(f"value {value.id} ({value}) is created by no op")


def _named(step: Step, op: Op, ids: tuple[ValueId, ...]) -> Iterator[Value]:
    """Yield the values an op names, each checked to exist and to be alive while the op runs."""
    for number in ids:
        if not 0 <= number < len(step.values):
            raise ValueError(f"{op.label} names value {number}, which is not listed")
        value = step.values[number]
        storage = step.storages[value.storage]
        if not storage.alive_from <= op.number < storage.alive_until:
            raise ValueError(f"{op.label} names {value}, which is not alive then: {storage}")
        yield value


def _check_creation(op: Op, value: Value, storage: StorageInfo, current: dict[StorageId, int]) -> None:
    now = current.get(value.storage, -1)
    if value.version != now + 1:
        raise ValueError(f"{op.label} creates {value}, but the next version of that storage is {now + 1}")
    if value.version == 0 and storage.alive_from != op.number:
        raise ValueError(f"{op.label} creates {value}, whose storage is alive from op {storage.alive_from}")


def _canonical(step: Step) -> Iterator[str]:
    for storage in step.storages:
        ends = f"{storage.present_at_start:d} {storage.present_at_end:d}"
        yield f"storage {storage.nbytes} {storage.kind!s} {storage.alive_from} {storage.alive_until} {ends}"
    for value in step.values:
        yield f"value {value.storage} {value.version}"
    for op in step.ops:
        yield f"op {op.name!r} {op.phase!s} {op.reads} {op.creates} {op.seeded:d} {op.replayable:d}"


def _listing(step: Step) -> Iterator[str]:
    sizes = f"{len(step.ops)} ops, {len(step.storages)} storages, {len(step.values)} values"
    yield f"step of {sizes}, plain peak {format_bytes(step.plain_peak())}"
    for storage in step.storages:
        yield f"  {storage}"
    for op in step.ops:
        yield f"  {op.number}  {op.phase}  {op.name}  {_effect(step, op)}{_remarks(op)}"


def _effect(step: Step, op: Op) -> str:
    reads, creates = (" ".join(str(step.values[number]) for number in ids) for ids in (op.reads, op.creates))
    return f"{reads or '()'} -> {creates or '()'}"


def _remarks(op: Op) -> str:
    remarks = [format_seconds(op.seconds)] if op.seconds is not None else []
    remarks += ["seeded"] * op.seeded + ["not replayable"] * (not op.replayable)
    return "".join(f"  {remark}" for remark in remarks)
