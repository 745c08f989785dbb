"""The second run of a block: what autograd saves in it goes to the holders of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, final

from torch import Tensor

from spillway.engines.blocks.fingerprints import first_changed
from spillway.errors import EngineError, RecomputeError

if TYPE_CHECKING:
    from spillway.engines.blocks.frame import Frame
    from spillway.engines.blocks.holders import Holder
    from spillway.engines.blocks.sites import Site


def detached(tensor: Tensor) -> Tensor:
    """Without its graph, which a node that saves its own result would hold for ever."""
    return tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor


def check_unchanged(frame: Frame) -> None:
    """Before a second run.

    Raises:
        RecomputeError: What the first ran on has been written to.
    """
    if frame.frozen is None:
        raise EngineError(f"The arguments of {frame.name} are gone.")
    moved = next((i for i, one in enumerate(frame.arguments()) if one.moved_on and not one.copied), None)
    if moved is not None:
        frame.site.written.add((frame.call, moved))
        raise RecomputeError(
            f"Argument {moved} of {frame.name} was written to in place after the block had run, for the first time "
            f"in this step, so the block cannot run again as it ran; from the next step on it is copied first."
        )
    written = frame.snapshot.written()
    if written:
        raise RecomputeError(
            f"{written} of {frame.site.name} was written to between its forward and its backward, so "
            f"the block cannot run again as it ran; keep this block, or write after the backward."
        )


@final
class StopRecompute(BaseException):
    """All that the first run saved has been saved again. No `except Exception` of a model may stop this."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self.replay = replay


@final
class Replay:
    """Fills the holders of a frame, in the order in which the first run made them."""

    def __init__(self, frame: Frame, *, child: bool = False) -> None:
        self._frame = frame
        self._stops = frame.stops_early and not child  # what comes after a child in its parent has to run
        self._saved = 0
        self._called = 0
        self._error: RecomputeError | None = None

    def fill(self, tensor: Tensor) -> Any:
        """The hook that packs."""
        number, frame = self._saved, self._frame
        self._saved += 1
        kept = tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor
        holder = frame.holders[number]() if number < len(frame.holders) else None
        if holder is not None:
            if tensor.shape != holder.shape or tensor.dtype != holder.dtype:
                self._fail(f"saved tensor {number} is {holder.differs(tensor)}")
            if holder.value is None:
                holder.give_back(kept if frame.outer is None else frame.outer[0](tensor))
        if self._stops and self._saved == len(frame.holders):
            raise StopRecompute(self)
        return kept

    def call(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called inside: the child that the first run had here runs again."""
        number, children = self._called, self._frame.children
        self._called += 1
        if number >= len(children) or self._frame.child_sites[number] is not site:
            self._fail(f"{site.name} is called inside, where the first run called another block or none")
        child = children[number]()
        if child is not None:
            return child.rerun(args, kwargs)
        return self._frame.conductor.pass_through(args, kwargs, site, holds=self._frame.differentiates)

    def verify(self) -> None:
        """After the run.

        Raises:
            RecomputeError: It was not the same as the first.
        """
        if self._error is not None:
            raise self._error
        if self._saved != len(self._frame.holders):
            self._fail(f"autograd saved {self._saved} tensors, and {len(self._frame.holders)} in the first run")
        number = first_changed(self._frame.holders)
        if number is not None:
            holder = cast("Holder", self._frame.holders[number]())
            self._fail(f"saved tensor {number}, {holder.looks}, holds other values")

    def _fail(self, clause: str) -> None:
        decides = "a stream of random numbers or a state outside of the model decides what it does: register it with "
        decides += "generators="
        if self._frame.inexact:
            decides = (
                "it ran on arguments that had been quantized, and their values decide what it does: compress what "
            )
            decides += "it saves (Action.COMPRESS)"
        error = RecomputeError(
            f"The second run of {self._frame.name} was not the same as the first: {clause}; {decides}, or keep this "
            f"block."
        )
        self._error = self._error or error  # the model may catch what is raised in the middle of it
        raise error


@final
class Passing:
    """A run from which nothing is wanted: blocks inside are no frames.

    Args:
        holds: What is saved is held as long as the run lasts, for a backward in it.
    """

    def __init__(self, *, holds: bool = False) -> None:
        self._holds = holds

    def fill(self, tensor: Tensor) -> Tensor | None:
        """The hook that packs."""
        return detached(tensor) if self._holds else None

    def verify(self) -> None:
        """Anything goes."""
