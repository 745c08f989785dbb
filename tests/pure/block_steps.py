"""Steps of models with blocks, as a recording names them: modules, dead values, results that the next block reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spillway.ir import Kind, Phase, Step
from spillway.ir.block_calls import _Modules
from spillway.ir.lives import lives_of
from tests.pure.training_steps import Recorder

UNIT = 1 << 20
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


class Named(Recorder):
    """Writes a step down whose ops belong to modules."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []

    def run(
        self, module: str, phase: Phase, reads: list[int], sizes: list[int], *, kind: Kind = Kind.ACTIVATION,
        seconds: float = 1e-3, replayable: bool = True, writes: tuple[int, ...] = (),
    ) -> list[int]:  # fmt: skip
        """An op of that module, called after its place there."""
        self.modules.append(module)
        name = f"aten.{module.rpartition('.')[2] or 'op'}.default"
        return self.op(name, phase, reads, sizes, writes=writes, kind=kind, seconds=seconds, replayable=replayable)

    def finished(self) -> Step:
        """The step, each op with its module."""
        step = self.step()
        ops = [replace(op, module=module) for op, module in zip(step.ops, self.modules, strict=True)]
        return replace(step, ops=tuple(ops))


def block(recorder: Named, name: str, x: int, *, units: int = 1, extra: str = "") -> tuple[int, list[int]]:
    """A block of five ops; its result, and what its backward wants.

    `inner.first` makes what nobody keeps, and two ops make something of it that the backward wants.
    """
    (dead,) = recorder.run(f"{name}.inner.first", FORWARD, [x], [units * UNIT])
    (one,) = recorder.run(f"{name}.inner.second", FORWARD, [dead], [units * UNIT])
    (other,) = recorder.run(f"{name}.inner.third", FORWARD, [dead], [units * UNIT])
    added = [dead] if not extra else recorder.run(f"{name}.{extra}", FORWARD, [x], [units * UNIT])
    (last,) = recorder.run(f"{name}.last", FORWARD, [one, other, *added], [units * UNIT])
    (result,) = recorder.run(name, FORWARD, [last, x], [UNIT])
    return result, [x, one, other, last]


def backward(recorder: Named, blocks: Sequence[tuple[str, list[int]]], gradient: int) -> list[int]:
    """The backward of blocks, last first; the parameters' gradients."""
    found = []
    for name, kept in reversed(blocks):
        (inner,) = recorder.run(f"{name}.last", BACKWARD, [gradient, kept[-1], kept[0]], [UNIT], kind=Kind.TEMPORARY)
        (weights,) = recorder.run(name, BACKWARD, [inner, *kept[:-1]], [UNIT // 4], kind=Kind.GRADIENT)
        (gradient,) = recorder.run(f"{name}.inner.first", BACKWARD, [inner, *kept[1:3]], [UNIT], kind=Kind.TEMPORARY)
        found.append(weights)
    return found


def blocks_step(
    depth: int = 4, *, name: Callable[[int], str] = "layers.{}".format, units: Sequence[int] | None = None,
    extras: Sequence[str] | None = None, batches: int = 1,
) -> Step:  # fmt: skip
    """An embedding, `depth` blocks, a loss; backward; an update.

    Args:
        depth: Of blocks.
        name: Of the module of each.
        units: What an inner op of each block makes, in MiB; 1 if not given.
        extras: A further module of each block; empty for none.
        batches: Micro-batches.
    """
    recorder = Named()
    weights = recorder.source(UNIT, Kind.PARAMETER)
    gradients: list[int] = []
    for _ in range(batches):
        (x,) = recorder.run("embedding", FORWARD, [weights], [UNIT])
        done = []
        for number in range(depth):
            x, kept = block(
                recorder, name(number), x, units=units[number] if units else 1, extra=extras[number] if extras else ""
            )
            done.append((name(number), kept))
        (loss,) = recorder.run("", FORWARD, [x], [64])
        gradients += backward(recorder, done, loss)
    recorder.modules.append("")
    recorder.op("adam_", Phase.OPTIMIZER, [weights, *gradients], [], writes=(weights,))
    return recorder.finished()


def block_names(step: Step) -> list[str]:
    """Names of the modules that are blocks, in order of their first op."""
    return list(_Modules(step, lives_of(step)).blocks(""))
