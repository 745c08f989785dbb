"""Problems for `auto`: four models on four devices, as formulas; nothing here was measured on these devices."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.record import frozen
from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import Block, BlockProblem, Option
from spillway.methods.auto.choosing import floor
from spillway.methods.auto.simulate import Clock


@frozen
class Machine:
    """What a device does at best in long ops, in a second."""

    flops: float
    memory: float
    """Bytes of its own memory."""
    link: float
    """Bytes to host memory or disk, each way."""
    element: int
    """Bytes of a number."""


MACHINES: Final[Mapping[str, Machine]] = {
    "H200": Machine(flops=500e12, memory=3.6e12, link=55e9, element=2),
    "A100": Machine(flops=220e12, memory=1.5e12, link=24e9, element=2),
    "V100": Machine(flops=12e12, memory=0.75e12, link=12e9, element=4),
    "CPU and disk": Machine(flops=60e9, memory=12e9, link=2e9, element=4),
}


@frozen
class Part:
    """A block of a model, on a batch."""

    kind: int
    input: float
    """Numbers."""
    output: float
    saved: float
    """Numbers that autograd saves, the input included and the output not."""
    kept: float
    """Of these, what a selective action keeps beside the input."""
    again: float
    """Share of the forward that it then repeats."""
    flops: float
    """Of the forward."""
    backward: float
    """Forwards that the backward takes."""
    parameters: float


def transformer(kind: int, tokens: float, length: float, width: float, *, saved: float, selective: float,
                again: float, backward: float, crossed: float = 0.0) -> Part:  # fmt: skip
    """An encoder or decoder layer; with a length of another sequence, which it attends to, a layer with cross
    attention. Saved and selective in inputs."""
    one = tokens * width
    extra = 4 * width**2 if crossed else 0.0
    flops = tokens * (24 * width**2 + 4 * length * width + 2 * extra + 4 * crossed * width)
    return Part(
        kind=kind, input=one, output=one, saved=saved * one, kept=(selective * saved - 1) * one, again=again,
        flops=flops, backward=backward, parameters=12 * width**2 + extra,
    )  # fmt: skip


def bottleneck(kind: int, batch: float, side: int, before: int, channels: int, stride: int) -> Part:
    """A bottleneck block of a ResNet: three convolutions, with a fourth where the shape changes."""
    inner, outer = channels // 4, batch * side**2 * channels
    entering = batch * (side * stride) ** 2 * before
    wide = batch * (side * stride) ** 2 * inner
    small = batch * side**2 * inner
    projected = outer if before != channels else 0.0
    weights = before * inner + 9 * inner**2 + inner * channels + (before * channels if projected else 0)
    # Of each convolution its result, which the normalisation saves, and what that and its rectifier hand on.
    kept = wide + small + outer + projected
    flops = 2 * (wide * before + small * 9 * inner + outer * inner + projected * before)
    return Part(
        kind=kind, input=entering, output=outer, saved=entering + kept + wide + small, kept=kept, again=0.2,
        flops=flops, backward=2.0, parameters=weights,
    )  # fmt: skip


def _resnet50(batch: float) -> list[Part]:
    parts, before = [], 64
    for stage, (blocks, side, channels) in enumerate(((3, 56, 256), (4, 28, 512), (6, 14, 1024), (3, 7, 2048))):
        for number in range(blocks):
            first = number == 0
            stride = 2 if first and stage else 1
            parts.append(bottleneck(2 * stage + (not first), batch, side, before, channels, stride))
            before = channels
    return parts


def model(name: str, *, blocks: int | None = None) -> tuple[list[Part], Part]:
    """The blocks of a model and its head; with `blocks`, so many of them, evenly chosen."""
    if name == "bert":
        layer = transformer(0, 32 * 512, 512, 1024, saved=24, selective=0.42, again=0.16, backward=1.8)
        parts, classes = [layer] * 24, 2048.0
    elif name == "llama-like":
        layer = transformer(0, 2 * 8192, 8192, 4096, saved=20.7, selective=0.55, again=0.05, backward=1.92)
        parts, classes = [layer] * 20, 8192.0
    elif name == "encoder-decoder":
        encoder = transformer(0, 32 * 512, 512, 1024, saved=24, selective=0.42, again=0.16, backward=1.8)
        decoder = transformer(
            1, 32 * 256, 256, 1024, saved=38, selective=0.45, again=0.14, backward=1.85, crossed=512
        )  # fmt: skip
        parts, classes = [encoder] * 6 + [decoder] * 6, 4096.0
    else:
        parts, classes = _resnet50(128), 1000.0 / 49
    if blocks is not None:
        parts = [parts[round((at + 0.5) * len(parts) / blocks - 0.5)] for at in range(blocks)]
    last = parts[-1]
    head = Part(
        kind=99, input=last.output, output=0, saved=last.output * (1 + classes / 1024), kept=0, again=0,
        flops=2 * last.output * classes, backward=2.0, parameters=classes * 1024,
    )  # fmt: skip
    return parts, head


def problem(parts: Sequence[Part], head: Part, machine: Machine, share: float | None = None) -> BlockProblem:
    """What `auto` is given. `share` is of the way from the floor to the peak of keeping everything; None for all."""
    *blocks, last = (_block(part, machine) for part in (*parts, head))
    blocks.append(replace(last, options=last.options[:1]))
    made = BlockProblem(blocks=blocks, available=0, out_rate=machine.link, in_rate=machine.link)
    clock = Clock(made)
    most = clock.needed(clock.picked((0,) * len(blocks)))
    least = floor(made)
    return replace(made, available=most if share is None else least + round(share * (most - least)))


def _block(part: Part, machine: Machine) -> Block:
    x, y, saved = (round(machine.element * numbers) for numbers in (part.input, part.output, part.saved))
    kept = x + round(machine.element * part.kept)
    # The ops that are no products move what is saved, twice.
    forward = part.flops / machine.flops + 2 * saved / machine.memory
    working, again, back = x, 3 * x, 3 * x
    peak = saved + y + x + back
    whole = saved + y + working

    def option(action: Action, resident: int, moved: int, backward: float, forward_peak: int) -> Option:
        return Option(
            action=action, resident=resident, moved=moved, backward=backward, forward_peak=forward_peak,
            backward_peak=peak,
        )  # fmt: skip

    options = (
        option(Action.KEEP, saved, 0, 0.0, whole),
        option(Action.RECOMPUTE, x, 0, forward, x + again + y),
        option(Action.RECOMPUTE_OFFLOADED, 0, x, forward, x + again + y),
        option(Action.OFFLOAD, 0, saved, 0.0, whole),
        option(Action.SELECTIVE, kept, 0, part.again * forward, kept + again + y),
        option(Action.SELECTIVE_OFFLOADED, 0, kept, part.again * forward, kept + again + y),
    )
    return Block(
        kind=part.kind, forward=forward, backward=part.backward * forward, options=options,
        gradients=round(machine.element * part.parameters),
    )  # fmt: skip


MODELS: Final = ("bert", "llama-like", "resnet50", "encoder-decoder")
SHARES: Final = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9)


def shaken(problem: BlockProblem, drawn: random.Random, sizes: float, times: float) -> BlockProblem:
    """The same with every number of bytes off by up to a share, and every number of seconds by another."""

    def size(nbytes: int) -> int:
        return round(nbytes * (1 + drawn.uniform(-sizes, sizes)))

    def time(seconds: float) -> float:
        return seconds * (1 + drawn.uniform(-times, times))

    blocks = [
        Block(
            kind=number, forward=time(block.forward), backward=time(block.backward), gradients=size(block.gradients),
            options=tuple(
                replace(
                    option, resident=size(option.resident), moved=size(option.moved),
                    forward=time(option.forward), backward=time(option.backward),
                    forward_peak=size(option.forward_peak), backward_peak=size(option.backward_peak),
                )
                for option in block.options
            ),
        )
        for number, block in enumerate(problem.blocks)
    ]  # fmt: skip
    return replace(problem, blocks=blocks, out_rate=time(problem.out_rate), in_rate=time(problem.in_rate))


def scaled(problem: BlockProblem, sizes: float, times: float) -> BlockProblem:
    """The same with every number of bytes and of seconds multiplied; what is available stays."""
    blocks = [
        replace(
            block, forward=block.forward * times, backward=block.backward * times,
            options=tuple(
                replace(
                    option, resident=int(option.resident * sizes), moved=int(option.moved * sizes),
                    forward=option.forward * times, backward=option.backward * times,
                    forward_peak=int(option.forward_peak * sizes), backward_peak=int(option.backward_peak * sizes),
                )
                for option in block.options
            ),
        )
        for block in problem.blocks
    ]  # fmt: skip
    return replace(problem, blocks=blocks)
