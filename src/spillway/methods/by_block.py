"""What methods of the block engine have in common: they decide which blocks a step recomputes, and learn from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self, TypeAlias, final

from spillway.methods.actions import USUAL, Action, ActionOptions
from spillway.units import Bytes, Seconds

InputSize: TypeAlias = tuple[int, ...]
"""What the size of an input is, one number per dimension that varies: a length, the lengths of encoder and decoder,
height and width. With `Options.batched` the first is the number of samples, by which all bytes are multiplied."""


def of_lengths(size: InputSize, function: Callable[[int], int], *, batched: bool) -> InputSize:
    """Of each number what the function makes of it, but for a number of samples."""
    numbers = tuple(map(function, size))
    return (size[0], *numbers[1:]) if batched else numbers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSample:
    """One call of one block, measured in a step."""

    block: int
    """The call's number in forward order, from 0."""
    size: InputSize
    """Of the step's input."""
    nbytes: Bytes
    """What autograd saves inside the block and recomputing it frees. What it hands on is not among it."""
    seconds: Seconds
    """Of its forward, once."""
    working: Bytes = 0
    """Needed on top of what is saved while it is recomputed and goes backward, at most: temporaries, gradients of
    activations. What is left at 0 counts as part of the rest of the step, which is less exact and never too low."""
    gradients: Bytes = 0
    """Parameter gradients that its backward creates; 0 where the step begins with them."""
    action: Action = Action.RECOMPUTE
    """What became of it."""
    leaving: Bytes = 0
    """Of `nbytes`, what leaves where the block is offloaded."""
    inputs: Bytes = 0
    """Of what it was called with, what nobody else holds once its forward has ended: that could leave."""
    holds_result: Bytes = 0
    """Of what it saves, what it hands on: that stays with it where it is kept, whoever else lets go of it."""
    kept: Bytes = 0
    """What a selective action keeps; 0 where no op was spared by it."""
    beside: Bytes = 0
    """The most while it ran, beside what it saved, what other blocks left, and gradients of parameters."""
    backward: Seconds = 0.0
    """Of its backward, without the second run and without waiting; 0 where that was not seen."""
    again: Seconds = 0.0
    """Of its second run; 0 without one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Forward and backward of one step, measured. All bytes are above what was there when the forward began."""

    size: InputSize
    recomputed: frozenset[int]
    peak: Bytes
    """Most bytes at once."""
    turn_peak: Bytes | None = None
    """Most bytes from the end of the last block's forward until the backward comes back to it, if that was looked
    at."""
    backward_peak: Bytes | None = None
    """Most bytes at all other moments, if that was looked at."""
    projected: Bytes = 0
    """What its plan expected at most; 0 where it had none."""
    available: Bytes = 0
    """What its plan was made for; 0 where it had none."""
    out_rate: float = 0.0
    """Bytes a second at which copies went out while blocks ran; 0 where nothing was copied."""
    in_rate: float = 0.0
    """The same of copies in."""
    seconds: Seconds = 0.0
    """Of the whole step, its update included; 0 where nobody said."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a step of one size is expected to need; bytes above what is there when its forward begins."""

    saved: Sequence[Bytes]
    """By each block, in order of the forward: what recomputing it frees."""
    seconds: Sequence[Seconds]
    """Of each block's forward."""
    turn: Bytes
    """Between the blocks' forward and their backward, beside what blocks save."""
    rest: Bytes
    """While blocks go backward, beside them."""
    working: Sequence[Bytes]
    """Of each block, on top of what it saves."""
    gradients: Sequence[Bytes]
    """Parameter gradients that each block's backward creates."""

    @property
    def everything(self) -> frozenset[int]:
        return frozenset(range(len(self.saved)))


class Phase(Enum):
    """What a step is for."""

    COLLECTING = "collecting"
    """Every block is recomputed, and blocks are measured."""
    PLANNED = "planned"
    """Blocks follow the plan of the input's size."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """What becomes of the blocks in a step."""

    size: InputSize
    """The size it was made for: that of the step, rounded up."""
    actions: Sequence[Action]
    """What becomes of each call of a block that it knows of, in forward order."""
    otherwise: Action
    """What becomes of any other call, of whose bytes nothing is known."""
    projected: Bytes
    """Bytes that the step is expected to need above what is there when its forward begins; 0 in the collecting phase,
    which expects nothing."""
    available: Bytes
    """Bytes that it may need."""
    seconds: Seconds
    """Expected to be spent on what is not kept."""
    smallest: Bytes
    """What the smallest of the blocks saves that are not kept; 0 if all are."""
    options: Mapping[Action, ActionOptions] = field(default_factory=lambda: USUAL, hash=False)
    """How these actions are carried out."""
    comes_in: Sequence[int] = ()
    """The call at the beginning of whose backward the copy in of each call is to begin; its own number where nothing
    of it is away. Empty where nobody has planned copies in: then one block's is read ahead."""
    step_seconds: Seconds = 0.0
    """What the whole step is expected to take; 0 where that is not known."""

    @classmethod
    def nothing_kept(
        cls, size: InputSize, available: Bytes, action: Action = Action.RECOMPUTE,
        options: Mapping[Action, ActionOptions] = USUAL,
    ) -> Self:  # fmt: skip
        """For a step of which nothing is known yet: the same becomes of every block."""
        return cls(
            size=size, actions=(), otherwise=action, projected=0, available=available, seconds=0.0, smallest=0,
            options=options,
        )  # fmt: skip

    @property
    def given_up(self) -> frozenset[int]:
        """The calls that it knows of and does not keep, by their number in forward order."""
        return frozenset(call for call, action in enumerate(self.actions) if action is not Action.KEEP)

    @property
    def moves(self) -> bool:
        """Whether anything waits outside of the device's memory."""
        return any(action.moves for action in {*self.actions, self.otherwise})

    @property
    def prefetches(self) -> bool:
        """Whether anything of that may come back before the backward wants it."""
        return any(action.moves and not self.options[action].waits for action in {*self.actions, self.otherwise})

    @property
    def only_recomputes(self) -> bool:
        """Whether nothing becomes of what is not kept but that it is recomputed."""
        return {*self.actions, self.otherwise} <= {Action.KEEP, Action.RECOMPUTE}

    @property
    def shortfall(self) -> Bytes:
        """Bytes by which it is expected to be over what is available; then every block is recomputed.

        Estimates err upwards, so the step is not refused for this: whoever runs it knows more when it runs.
        """
        return max(self.projected - self.available, 0)

    @property
    def holds(self) -> bool:
        """Whether it is expected to stay within what is available."""
        return not self.shortfall

    def action(self, call: int) -> Action:
        """What becomes of a call, by its number in forward order."""
        return self.actions[call] if call < len(self.actions) else self.otherwise

    def keeps(self, call: int) -> bool:
        return self.action(call) is Action.KEEP


def recomputing(calls: Collection[int], of: int) -> tuple[Action, ...]:
    """What becomes of so many calls if these are recomputed and the others kept."""
    return tuple(Action.RECOMPUTE if call in calls else Action.KEEP for call in range(of))


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """What the engine does in a step."""

    phase: Phase
    plan: BlockPlan
    collects: bool
    """Whether blocks are measured although they are recomputed."""


class AbstractBlockMethod(ABC):
    """Decides before every forward, block by block. One object belongs to one training."""

    name: str
    """What users write."""
    takes_vectors: bool = True
    """Whether the size of an input may be several numbers; otherwise it is the one that the paper takes."""
    action: Action = Action.RECOMPUTE
    """What becomes of blocks that are not kept."""
    action_options: Mapping[Action, ActionOptions] = USUAL
    """How it has actions carried out."""
    needs_blocks: bool = True
    """Whether a model without blocks is refused; otherwise it is left to the tensor engine."""
    forwards: int = 1
    """How often a block's forward runs where it is measured."""

    def in_header(self) -> dict[str, object]:
        """What a run file says of it beside its name."""
        options = self.action_options[self.action]
        bits = {"bits": options.bits} if self.action.lossy else {}
        told = {"compiled": options.compiled, "waits": options.waits}
        return {"action": self.action.value, **bits, **{name: True for name, on in told.items() if on}}

    @abstractmethod
    def fresh(self, *, batched: bool) -> Self:
        """The same method, which has learned nothing yet. `batched` says whether the first number of a size counts
        samples, by which all bytes are multiplied."""

    @property
    @abstractmethod
    def collecting(self) -> bool:
        """Whether the next step is for measuring: every block is recomputed, whatever the budget."""

    def collects(self, size: InputSize) -> bool:
        """Whether the next step, on an input of this size, is for measuring."""
        return self.collecting

    @property
    def moves(self) -> bool:
        """Whether anything may wait outside of the device's memory."""
        return self.action.moves

    @abstractmethod
    def begin(self, size: InputSize, available: Bytes) -> Decision:
        """What to do in a forward and backward on an input of this size; `available` is the budget less what is
        resident when the forward begins."""

    @abstractmethod
    def end(self, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        """Take what a step measured: its peak, and of a step that collects every block."""

    def holds(self, size: InputSize, available: Bytes) -> bool:
        """Whether a plan for a step of this size is known to stay within so many bytes."""
        return False

    def forget_plans(self) -> None:  # noqa: B027  # not every method plans
        """The budget is another: nothing that was planned for the one before is used. What was measured is."""

    def does_without_spill(self) -> bool:
        """There is no room for what was to leave: whether plans move nothing from here on. If not, the step ends."""
        return False

    def explained(self, names: Sequence[str]) -> tuple[str, ...]:
        """What the latest plan does and why, in sentences; none where there is no plan, or nothing to explain."""
        return ()

    @abstractmethod
    def forecast(self, size: InputSize) -> Forecast | None:
        """What a step of this size is expected to need, moment by moment; None where that is not known."""
