"""Offload or recompute: the rule of `methods/auto/rules.py` for the blocks of one recorded step, over one link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, final

from spillway.costs.device import Device
from spillway.ir import Step
from spillway.methods.actions import Action
from spillway.methods.auto.recorded_blocks import Blocks, problems
from spillway.methods.auto.rules import rules
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

WHAT: Final = {
    Action.OFFLOAD: "all that it saves", Action.RECOMPUTE_OFFLOADED: "its input",
    Action.SELECTIVE_OFFLOADED: "results of expensive ops",
}  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRule:
    """What a link does for blocks of one kind."""

    first: str
    """The module of the first of them."""
    blocks: int
    seconds: Seconds
    """Of the forward of each."""
    moved: dict[Action, Bytes]
    """By each, under every action that moves anything."""
    phi: dict[Action, float]
    """What the link carries while the block runs forward, over that."""

    def sentence(self) -> str:
        others = f" and {self.blocks - 1} like it" if self.blocks > 1 else ""
        each = (
            f"{phi:.2f} for {WHAT[action]} ({format_bytes(self.moved[action])})" for action, phi in self.phi.items()
        )
        advice = "; ".join(self._advice())
        return f"{self.first}{others}, {format_seconds(self.seconds)} forward: phi is {', '.join(each)}: {advice}."

    def _advice(self) -> Iterable[str]:
        whole, results = self.phi.get(Action.OFFLOAD), self.phi.get(Action.SELECTIVE_OFFLOADED, 0.0)
        if whole is not None:
            if whole >= 1:
                yield "offload everything, which hides behind compute, and recompute nothing"
                return
            better = "offloading all still takes less than recomputing all" if whole >= 0.5 else (
                "recomputing all takes less than offloading all"
            )  # fmt: skip
            yield f"{better}, and a mixture less than either"
        if results >= 1:
            yield "results of expensive ops leave for free, and the rest is recomputed from them"
        if self.phi.get(Action.RECOMPUTE_OFFLOADED, 0.0) >= 1:
            yield "inputs of recomputed blocks leave for free"

    def to_json(self) -> dict[str, Any]:
        """The rule as JSON can hold it."""
        return {
            "first": self.first, "blocks": self.blocks, "forward_seconds": self.seconds,
            "moved_bytes": {action.value: nbytes for action, nbytes in self.moved.items()},
            "phi": {action.value: phi for action, phi in self.phi.items()}, "sentence": self.sentence(),
        }  # fmt: skip


def offload_rules(step: Step, device: Device) -> list[BlockRule]:
    """Of every kind of block in a step whose ops have seconds, in order of the forward; kinds differ in bytes that
    move, or in seconds of the forward. None where no modules repeat."""
    blocks = Blocks(step)
    found: dict[object, BlockRule] = {}
    for problem, calls in problems(blocks, step.plain_peak(), device):
        rate = min(problem.out_rate, problem.in_rate)
        for block, call in zip(problem.blocks, calls, strict=True):
            told = rules(block, rate) if call is not None else ()
            if call is None or not told:
                continue
            key = f"{block.forward:.3g}", *((one.action, one.moved) for one in told)
            before = found.get(key)
            found[key] = BlockRule(
                first=before.first if before else blocks.calls[call].name, blocks=before.blocks + 1 if before else 1,
                seconds=block.forward, moved={one.action: one.moved for one in told},
                phi={one.action: one.phi for one in told},
            )  # fmt: skip
    return list(found.values())
