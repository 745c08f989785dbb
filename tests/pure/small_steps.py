"""Steps of a few ops in a row, with the numbers that tests of costs are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from spillway.ir import Kind, Op, Phase, Step, StorageInfo, Value


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An op that reads what the op before it made, and makes a storage of `nbytes`, or nothing if that is None."""

    name: str = "aten.relu.default"
    nbytes: int | None = 8
    flops: int = 0
    traffic: int = 0
    seconds: float | None = None


def row(*lines: Line, source: int = 8) -> Step:
    """The ops in a row; the first reads a storage of `source` bytes that is there before."""
    made = [line for line in lines if line.nbytes is not None]
    sizes = [source, *(line.nbytes for line in made if line.nbytes is not None)]
    storages, ops, newest = [_storage(0, source, 0, len(lines))], [], 0
    for number, line in enumerate(lines):
        creates: Sequence[int] = ()
        if line.nbytes is not None:
            creates = (len(storages),)
            storages.append(_storage(len(storages), line.nbytes, number, len(lines)))
        ops.append(
            Op(
                number=number, name=line.name, phase=Phase.FORWARD, reads=(newest,), creates=tuple(creates),
                flops=line.flops, traffic=line.traffic, seconds=line.seconds,
            )
        )  # fmt: skip
        newest = len(storages) - 1
    values = tuple(Value(id=number, storage=number, version=0) for number in range(len(sizes)))
    return Step(storages=tuple(storages), values=values, ops=tuple(ops))


def _storage(number: int, nbytes: int, alive_from: int, ops: int) -> StorageInfo:
    return StorageInfo(
        id=number, nbytes=nbytes, kind=Kind.ACTIVATION, alive_from=alive_from, alive_until=ops,
        present_at_start=number == 0, present_at_end=True,
    )  # fmt: skip
