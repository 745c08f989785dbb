"""Recorded steps for the tests of the simulated engine: a chain of layers, forth and back."""

from __future__ import annotations

from spillway.costs.device import Device
from spillway.ir import Kind, Op, Phase, Step, StorageInfo, Value
from spillway.units import Bytes, GiB, MiB, Seconds

LAYER: Bytes = MiB

DEVICE = Device(
    name="test", flops_per_second=1e12, bytes_per_second=1e11, memory=GiB, out_per_second=1e9, in_per_second=1e9,
    disk_out_per_second=5e8, disk_in_per_second=5e8, copy_seconds=0.0, source="round numbers",
)  # fmt: skip
"""A layer takes about a millisecond to copy, two from and to disk."""


def layers(depth: int, *, nbytes: Bytes = LAYER, seconds: Seconds | None = 1e-3, replayable: bool = True) -> Step:
    """A weight, `depth` layers whose results live until the backward reads them, and `depth` gradients, each of which
    lives for two ops."""
    ends = 2 * depth
    weight = StorageInfo(
        id=0, nbytes=nbytes, kind=Kind.PARAMETER, alive_from=0, alive_until=ends, present_at_start=True,
        present_at_end=True, name="weight",
    )  # fmt: skip
    storages, values, ops = [weight], [Value(id=0, storage=0, version=0)], []
    for number in range(ends):
        forward = number < depth
        mirrored = ends - number  # the layer whose result this gradient needs
        until = ends - number if forward else min(number + 2, ends)
        reads = (0,) if number == 0 else (0, number) if forward else (mirrored, number)
        kind, phase = (Kind.ACTIVATION, Phase.FORWARD) if forward else (Kind.TEMPORARY, Phase.BACKWARD)
        storages.append(
            StorageInfo(id=number + 1, nbytes=nbytes, kind=kind, alive_from=number, alive_until=until)
        )  # fmt: skip
        values.append(Value(id=number + 1, storage=number + 1, version=0))
        ops.append(
            Op(
                number=number,
                name=f"aten.{'layer' if forward else 'layer_backward'}.default",
                phase=phase,
                reads=tuple(dict.fromkeys(reads)),
                creates=(number + 1,),
                seconds=seconds,
                replayable=replayable,
            )
        )
    return Step(storages=tuple(storages), values=tuple(values), ops=tuple(ops))
