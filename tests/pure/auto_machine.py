"""Problems for `auto`, and a slow machine that runs a choice by the letter of NOTE [Lanes] in `auto/simulate.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import Block, BlockProblem, Option

KEEP, RECOMPUTE, OFFLOAD = 0, 1, 2
"""Options of `uniform`."""


def option(
    resident: int, moved: int = 0, backward: float = 0.0, peak: int = 100, action: Action = Action.KEEP
) -> Option:
    """With the same peak forward and backward."""
    return Option(
        action=action, resident=resident, moved=moved, backward=backward, forward_peak=peak, backward_peak=peak
    )


def uniform(
    count: int, available: int, rate: float = 100.0, head: bool = True, host: int | None = None
) -> BlockProblem:
    """Blocks of 100 bytes, 1 second forward and 2 backward, that are kept, recomputed on 10 bytes, or moved; and a head
    of no bytes that takes as long."""
    menu = (
        option(100), option(10, backward=1.0, action=Action.RECOMPUTE), option(0, moved=100, action=Action.OFFLOAD)
    )  # fmt: skip
    blocks = [Block(kind=0, forward=1.0, backward=2.0, gradients=0, options=menu) for _ in range(count)]
    last = Block(kind=1, forward=1.0, backward=2.0, gradients=0, options=(option(0, peak=0),))
    return BlockProblem(
        blocks=[*blocks, last] if head else blocks, available=available, out_rate=rate, in_rate=rate, host=host
    )


@st.composite
def problems(draw: st.DrawFn, most_blocks: int = 5) -> BlockProblem:
    """Any menus, of few kinds."""
    numbers = st.integers(0, 60)
    seconds = st.integers(0, 8).map(lambda eighths: eighths / 8)
    options = st.builds(
        Option, action=st.just(Action.RECOMPUTE), resident=numbers, moved=numbers | st.just(0), forward=seconds,
        backward=seconds, forward_peak=st.integers(40, 120), backward_peak=st.integers(40, 120),
    )  # fmt: skip
    keeps = st.builds(
        Option, action=st.just(Action.KEEP), resident=st.integers(40, 100), forward_peak=st.integers(80, 120),
        backward_peak=st.integers(80, 120),
    )  # fmt: skip
    kinds = [
        Block(
            kind=kind, forward=draw(seconds) + 0.25, backward=draw(seconds) + 0.5, gradients=draw(st.integers(0, 10)),
            options=(draw(keeps), *draw(st.lists(options, max_size=3))),
        )
        for kind in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    blocks = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most_blocks))
    return BlockProblem(
        blocks=blocks, available=draw(st.integers(60, 500)), out_rate=draw(st.sampled_from((20.0, 64.0, 300.0))),
        in_rate=draw(st.sampled_from((20.0, 64.0, 300.0))), host=draw(st.none() | st.integers(0, 150)),
    )  # fmt: skip


@dataclass
class Ran:
    """What the machine saw."""

    seconds: float
    most: float
    """Bytes at once."""


class Machine:
    """Looks at every byte at every moment anew."""

    def __init__(self, problem: BlockProblem, choice: Sequence[int], *, minds_room: bool = True) -> None:
        self.problem = problem
        self.blocks = problem.blocks
        self.options = [block.options[number] for block, number in zip(self.blocks, choice, strict=True)]
        self.minds_room = minds_room
        """Otherwise copies in begin when they are due, as full as memory may be."""
        self.outs: dict[int, tuple[float, float]] = {}
        self.ins: dict[int, tuple[float, float]] = {}
        self.now = 0.0
        self.most = 0.0

    def held(self, number: int) -> int:
        return sum(option.resident for option in self.options[:number])

    def going(self, now: float) -> float:
        """Bytes that are still to go out."""
        return sum(
            self.options[number].moved * min(max((end - now) / (end - begin), 0.0), 1.0)
            for number, (begin, end) in self.outs.items()
        )

    def claimed(self, before: int) -> int:
        return sum(self.options[number].moved for number in self.ins if number < before)

    def need(self, number: int) -> int:
        """While its backward runs, beside copies."""
        gradients = sum(block.gradients for block in self.blocks[number:])
        return self.held(number) + gradients + self.options[number].backward_peak

    def wait_for(self, need: float) -> None:
        """Until so many bytes are free beside what goes out, in small steps towards it."""
        end = max((end for _, end in self.outs.values()), default=0.0)
        if need + self.going(self.now) > self.problem.available and end > self.now:
            low, high = self.now, end
            for _ in range(100):
                middle = (low + high) / 2
                low, high = (low, middle) if need + self.going(middle) <= self.problem.available else (middle, high)
            self.now = high
        self.most = max(self.most, need + self.going(self.now))

    def planned(self, number: int) -> int:
        """Where rule 2 has a copy in begin."""
        due, count = 0.0, len(self.blocks)
        ends = [
            sum(block.backward + option.backward
                for block, option in zip(self.blocks[:end + 1], self.options[:end + 1], strict=True))
            for end in range(count)
        ]  # fmt: skip
        for early in range(number + 1):
            if self.options[early].moved:
                due = max(due, ends[early]) + 1.25 * self.options[early].moved / self.problem.in_rate
        return next((at for at in range(number, count) if ends[at] >= due), count - 1)

    def begin_copies(self, number: int) -> None:
        for early in reversed(range(number + 1)):
            option = self.options[early]
            if not option.moved or early in self.ins:
                continue
            gone = self.outs[early][1]
            if early < number:
                room = min(
                    self.problem.available - self.need(at) - self.claimed(at) for at in range(early + 1, number + 1)
                )
                full = self.minds_room and room - self.going(self.now) < option.moved - 1e-6
                if self.planned(early) < number or gone > self.now or full:
                    return
            begin = max([self.now, gone, *(end for _, end in self.ins.values())])
            self.ins[early] = begin, begin + option.moved / self.problem.in_rate

    def run(self) -> Ran:
        for number, (block, option) in enumerate(zip(self.blocks, self.options, strict=True)):
            self.wait_for(self.held(number) + option.forward_peak)
            self.now += block.forward + option.forward
            if option.moved:
                begin = max([self.now, *(end for _, end in self.outs.values())])
                self.outs[number] = begin, begin + option.moved / self.problem.out_rate
        for number in reversed(range(len(self.blocks))):
            self.wait_for(self.need(number) + self.claimed(number))
            self.begin_copies(number)
            self.most = max(self.most, self.need(number) + self.claimed(number) + self.going(self.now))
            self.now = max(self.now, self.ins.get(number, (0.0, 0.0))[1])
            self.now += self.blocks[number].backward + self.options[number].backward
        return Ran(seconds=self.now, most=self.most)
