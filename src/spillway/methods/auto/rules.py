"""Offload or recompute: the rule for one kind of block, and what a plan did about it, in sentences.

phi is what the lane carries while the block runs forward, over what an action moves: link x seconds / bytes. At 1 or
above the copy hides behind compute, for any number of such blocks. Below 1/2, recomputing them all takes less than
moving them all; in between, moving them all takes less. At any phi a mixture beats both: it costs 1 - phi forwards
a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from spillway.methods.actions import Action
from spillway.methods.auto.block_problem import Block, BlockProblem, Option
from spillway.methods.auto.choosing import Planned, floor
from spillway.units import Bytes, Seconds, format_bytes, format_seconds


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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary:
    """What became of the blocks of one kind, and why."""

    kind: int
    blocks: int
    chosen: Mapping[Action, int]
    """How many blocks each action was chosen for."""
    freed: Bytes
    """By all of them, of what keeping them would leave in memory."""
    moved: Bytes
    seconds: Seconds
    """That all of them take beside forward and backward, waiting left out."""
    rules: tuple[Rule, ...]

    def sentence(self, name: str | None = None) -> str:
        """What was chosen and why, for people."""
        blocks = f"{self.blocks} x {name or f'kind {self.kind}'}"
        if set(self.chosen) == {Action.KEEP}:
            return f"{blocks}: kept."
        counted = ", ".join(f"{count} {action.value}" for action, count in self.chosen.items())
        moved = f", {format_bytes(self.moved)} moved" if self.moved else ""
        told = (
            f"{blocks}: {counted}; {format_bytes(self.freed)} fewer in memory{moved}, "
            f"{format_seconds(self.seconds)} of compute more."
        )
        return " ".join([told, *(rule.sentence for rule in self._telling())])

    def _telling(self) -> list[Rule]:
        """The rules of what was chosen; where nothing was moved, the best of what was not."""
        used = [rule for rule in self.rules if rule.action in self.chosen]
        return used or sorted(self.rules, key=lambda rule: -rule.phi)[:1]


def by_kind(problem: BlockProblem, planned: Planned) -> tuple[KindSummary, ...]:
    """What became of each kind of block, in the order in which the kinds first run."""
    rate = min(problem.out_rate, problem.in_rate)
    taken: dict[int, list[tuple[Block, Option]]] = {}
    for block, number in zip(problem.blocks, planned.choice, strict=True):
        taken.setdefault(block.kind, []).append((block, block.options[number]))
    return tuple(
        KindSummary(
            kind=kind, blocks=len(pairs), chosen=Counter(option.action for _, option in pairs),
            freed=sum(block.options[0].resident - option.resident for block, option in pairs),
            moved=sum(option.moved for _, option in pairs),
            seconds=sum(option.forward + option.backward for _, option in pairs), rules=rules(pairs[0][0], rate),
        )
        for kind, pairs in taken.items()
    )  # fmt: skip


def sentences(problem: BlockProblem, planned: Planned, names: Mapping[int, str] | None = None) -> tuple[str, ...]:
    """What a plan comes to, one sentence a kind of block and one for the step; or the refusal. Kinds without `names`
    are called "kind 3"."""
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
    return (*(summary.sentence((names or {}).get(summary.kind)) for summary in by_kind(problem, planned)), step)


def refusal(problem: BlockProblem) -> str:
    """Why nothing can be planned, with what would have to be available."""
    return (
        f"No choice of what becomes of the {len(problem.blocks)} blocks fits into {format_bytes(problem.available)}: "
        f"{format_bytes(floor(problem))} have to be available."
    )
