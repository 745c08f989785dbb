"""What stands in autograd's graph in place of a saved tensor."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from spillway.engines.blocks.containers import address, empty_witness
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.blocks.frame import Frame
    from spillway.engines.blocks.homes import Away


@final
class Holder:
    """One saved tensor: its bytes, or the way back to them. It dies with the node of the graph that saved it."""

    __slots__ = (
        "__weakref__",
        "differentiable",
        "dtype",
        "fingerprint",
        "frame",
        "home",
        "pinned",
        "recomputed",
        "shape",
        "value",
        "version",
        "witness",
    )

    def __init__(self, frame: Frame, tensor: Tensor, value: Any, pinned: bool, watched: bool) -> None:
        self.frame = frame
        self.shape, self.dtype, self.differentiable = tensor.shape, tensor.dtype, tensor.requires_grad
        self.value = value
        """None while it is away. Where the user has hooks of his own, what they made of the tensor."""
        self.pinned = pinned
        """A parameter, a buffer, or a view of one: not ours to give up."""
        self.recomputed = False
        """The value was brought back, and can be brought back again."""
        self.home: Away | None = None
        self.witness: Any = value if watched else None
        """Tells of writes, as autograd does where there are no hooks but ours. None where there are others."""
        self.version: int = value._version if watched else 0
        self.fingerprint: Tensor | None = None
        """Of the value when it was given up, where values are compared."""

    @property
    def unwritten(self) -> bool:
        """Whether it is ours to give up, and nobody has written to it since it was saved."""
        return not self.pinned and self.witness is not None and self.witness._version == self.version

    @property
    def written(self) -> bool:
        """Whether somebody is known to have written to it since it was saved: nobody may read it any more."""
        return self.witness is not None and bool(self.witness._version != self.version)

    def let_go(self) -> None:
        """Give the bytes up; the version counter stays, so that a write to the tensor is still noticed."""
        if self.value is None or self.pinned:
            return
        if self.witness is not None and self.witness is self.value:
            self.witness = empty_witness(self.value)
        self.value = None

    def give_back(self, value: Any) -> None:
        """Hold bytes again."""
        self.value, self.recomputed = value, True

    def differs(self, tensor: Tensor) -> str:
        """In what a tensor is not like the one that was saved, a clause."""
        return f"{str(tensor.dtype)[6:]} of shape {tuple(tensor.shape)} where it was {self.looks} before"

    @property
    def looks(self) -> str:
        """Dtype and shape, for a sentence."""
        return f"{str(self.dtype)[6:]} of shape {tuple(self.shape)}"

    def check(self) -> None:
        """As autograd does for what it saves itself.

        Raises:
            RuntimeError: The tensor was written to in place after it had been saved.
        """
        if not self.written:
            return
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(self.shape)}, saved in {self.frame.name}, is at version "
            f"{self.witness._version}; expected version {self.version} instead."
        )

    def address(self) -> int | None:
        """The storage that it holds alive; None if it holds none, or one that nobody can tell apart."""
        value = self.value
        if isinstance(value, Tensor) and value.layout is torch.strided and torch._C._has_storage(value):
            return address(value)
        return None


HolderRef = weakref.ref[Holder]


def storages(holders: list[Holder]) -> dict[int, Bytes]:
    """Bytes of the storages that holders hold alive, but for parameters and buffers, by address."""
    found: dict[int, Bytes] = {}
    for holder in holders:
        key = None if holder.pinned else holder.address()
        if key is not None and key not in found:
            found[key] = holder.value.untyped_storage().nbytes()
    return found


def retained() -> bool:
    """Whether the backward that is running keeps the graph for another one."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
