"""Offload or recompute: the rule for one kind of block, and what a plan did about it, in sentences.

phi is what the lane carries while the block runs forward, over what an action moves: link x seconds / bytes. At 1 or
above the copy hides behind compute, for any number of such blocks. Below 1/2, recomputing them all takes less than
moving them all; in between, moving them all takes less. At any phi a mixture beats both: it costs 1 - phi forwards
a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import Block, BlockProblem, Option
from spillway.methods.auto.choosing import Planned, floor
from spillway.units import Bytes, format_bytes, format_seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an action that moves something is worth for a kind of block, over one link."""

    action: Action
    moved: Bytes
    """A block."""
    phi: float
    """Of them, what the link carries while the block runs forward."""

    @property
    def sentence(self) -> str:
        hidden = (
            "every block's copies hide behind compute"
            if self.phi >= 1
            else f"copies hide for {self.phi:.0%} of the blocks"
        )
        return (
            f"{self.action.value.capitalize()} has phi {self.phi:.2f} at {format_bytes(self.moved)} a block: {hidden}."
        )


def rules(block: Block, rate: float) -> tuple[Rule, ...]:
    """For each action of a block's menu that moves something, at so many bytes a second, of the slower of the two
    ways."""
    return tuple(
        Rule(action=option.action, moved=option.moved, phi=rate * (block.forward + option.forward) / option.moved)
        for option in block.options
        if option.moved
    )


def _told(name: str, taken: Sequence[tuple[Block, Option]], rate: float) -> str:
    """What was chosen for the blocks of one kind, and why."""
    chosen = Counter(option.action for _, option in taken)
    if set(chosen) == {Action.KEEP}:
        return f"{len(taken)} x {name}: kept."
    counted = ", ".join(f"{count} {action.value}" for action, count in chosen.items())
    freed = sum(block.options[0].resident - option.resident for block, option in taken)
    moved = sum(option.moved for _, option in taken)
    seconds = sum(option.forward + option.backward for _, option in taken)
    every = rules(taken[0][0], rate)
    # Where nothing was moved, the best of what was not.
    telling = [rule for rule in every if rule.action in chosen] or sorted(every, key=lambda rule: -rule.phi)[:1]
    told = (
        f"{len(taken)} x {name}: {counted}; {format_bytes(freed)} fewer in memory"
        f"{f', {format_bytes(moved)} moved' if moved else ''}, {format_seconds(seconds)} of compute more."
    )
    return " ".join([told, *(rule.sentence for rule in telling)])


def sentences(problem: BlockProblem, planned: Planned, names: Mapping[int, str] | None = None) -> tuple[str, ...]:
    """What a plan comes to, one sentence a kind of block in the order in which these first run, and one for the step;
    or the refusal. Kinds without `names` are called "kind 3"."""
    outcome = planned.outcome
    if not outcome.fits:
        return (refusal(problem),)
    waits, whole = outcome.room_stall + outcome.data_stall, problem.plain + problem.rest
    step = (
        f"The step is expected to take {format_seconds(outcome.seconds + problem.rest)}, "
        f"{(outcome.seconds - problem.plain) / max(whole, 1e-12):.1%} more than with everything kept, "
        f"{format_seconds(waits)} of it waiting for copies, and {format_bytes(outcome.peak)} of "
        f"{format_bytes(problem.available)} at its peak."
    )
    taken: dict[int, list[tuple[Block, Option]]] = {}
    for block, number in zip(problem.blocks, planned.choice, strict=True):
        taken.setdefault(block.kind, []).append((block, block.options[number]))
    called, rate = names or {}, min(problem.out_rate, problem.in_rate)
    return (*(_told(called.get(kind, f"kind {kind}"), pairs, rate) for kind, pairs in taken.items()), step)


def refusal(problem: BlockProblem) -> str:
    """Why nothing can be planned, with what would have to be available."""
    return (
        f"No choice of what becomes of the {len(problem.blocks)} blocks fits into {format_bytes(problem.available)}: "
        f"{format_bytes(floor(problem))} have to be available."
    )
