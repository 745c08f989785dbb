"""Linear graphs, as Checkmate's own tests have them: n layers, a loss, n gradients. No torch."""

from __future__ import annotations

from spillway.ir import Kind, Op, Phase, Step, StorageInfo, Value
from spillway.units import Bytes, Seconds


def linear_step(layers: int, *, nbytes: Bytes = 1 << 20, seconds: Seconds = 1e-3) -> Step:
    """A step of 2n + 1 ops: layer k reads what layer k - 1 made, its gradient reads that and the gradient above.

    Every op takes `seconds` and makes `nbytes`. Op 0 reads the input, which is there from the beginning.
    """
    ops_count = 2 * layers + 1
    loss = layers
    # What layer 0 reads is value 0, what op k makes is value k + 1.
    storages = [
        StorageInfo(
            id=0, nbytes=nbytes, kind=Kind.INPUT, alive_from=0, alive_until=ops_count, present_at_start=True,
            present_at_end=True,
        )
    ]  # fmt: skip
    ops = []
    for number in range(ops_count):
        if number <= loss:
            reads, phase = (number,), Phase.FORWARD
        else:
            # The gradient of layer k reads what went into that layer, value k, and the gradient above it.
            reads, phase = (ops_count - 1 - number, number), Phase.BACKWARD
        # Value v is read by the layer above, op v, and by gradient v, op 2n - v; a gradient by the next one alone.
        until = ops_count - 1 - number if number < loss else min(number + 2, ops_count)
        storages.append(
            StorageInfo(id=number + 1, nbytes=nbytes, kind=Kind.ACTIVATION, alive_from=number, alive_until=until)
        )
        ops.append(
            Op(number=number, name=_name(number, loss), phase=phase, reads=reads, creates=(number + 1,),
               seconds=seconds)
        )  # fmt: skip
    values = tuple(Value(id=storage.id, storage=storage.id, version=0) for storage in storages)
    return Step(storages=tuple(storages), values=values, ops=tuple(ops))


def _name(number: int, loss: int) -> str:
    if number == loss:
        return "loss"
    return f"layer{number}" if number < loss else f"gradient{2 * loss - number}"
