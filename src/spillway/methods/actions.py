"""What may become of a call of a block."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

from spillway.errors import UsageError


class Action(enum.Enum):
    """What becomes of what autograd saves inside a block, once the block has run."""

    KEEP = "keep"
    """It stays. It can still be given up later (`BlockEngine.revoke`)."""
    RECOMPUTE = "recompute"
    """It goes; the block runs again when the backward reaches it."""
    RECOMPUTE_OFFLOADED = "recompute, input offloaded"
    """The same, and what the block was called with waits on disk, or in host memory on CUDA."""
    OFFLOAD = "offload"
    """It waits on disk, or in host memory on CUDA."""
    SELECTIVE = "selective"
    """It goes, but for the results of expensive ops; the block runs again without these ops."""
    SELECTIVE_OFFLOADED = "selective, results offloaded"
    """The same, and the results wait on disk, or in host memory on CUDA."""
    COMPRESS = "compress"
    """It is quantized to a few bits an element."""
    RECOMPUTE_COMPRESSED = "recompute, input compressed"
    """It goes; the block runs again on what it was called with, quantized."""
    COMPRESS_OFFLOADED = "compress, offloaded"
    """It is quantized, and waits on disk, or in host memory on CUDA."""

    @property
    def moves(self) -> bool:
        """Whether something waits outside of the device's memory."""
        return self in (
            Action.RECOMPUTE_OFFLOADED, Action.OFFLOAD, Action.SELECTIVE_OFFLOADED, Action.COMPRESS_OFFLOADED
        )  # fmt: skip

    @property
    def recomputes(self) -> bool:
        """Whether the block runs twice."""
        return self not in (Action.KEEP, Action.OFFLOAD, Action.COMPRESS, Action.COMPRESS_OFFLOADED)

    @property
    def selects(self) -> bool:
        """Whether the second run is given results of the first."""
        return self in (Action.SELECTIVE, Action.SELECTIVE_OFFLOADED)

    @property
    def compresses(self) -> bool:
        """Whether what autograd saved is quantized."""
        return self in (Action.COMPRESS, Action.COMPRESS_OFFLOADED)

    @property
    def lossy(self) -> bool:
        """Whether the backward gets other bits than plain PyTorch's (safety rule 8)."""
        return self.compresses or self is Action.RECOMPUTE_COMPRESSED


def check_bits(bits: int) -> None:
    """Raises UsageError for a number of bits that elements are not quantized to."""
    if type(bits) is not int or bits not in (2, 4, 8):
        raise UsageError(f"Elements are quantized to 2, 4 or 8 bits; got bits={bits!r}.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOptions:
    """How an action is carried out, where there is a choice. Raises UsageError if `bits` are none of these."""

    bits: int = 4
    """An element, of what is quantized: 2, 4 or 8. PAPAYA's is 4."""
    compiled: bool = False
    """What quantizes is compiled by torch.compile: the same bits in less time, after some seconds at first."""
    waits: bool = False
    """Copies of what moves never run beside compute, as PAPAYA's swapping has it: a block has ended when its bytes are
    out, and the backward waits for every copy in."""

    def __post_init__(self) -> None:
        check_bits(self.bits)


USUAL: Final[Mapping[Action, ActionOptions]] = MappingProxyType({action: ActionOptions() for action in Action})
"""The options of every action, where nothing else is said."""

LOSSLESS: Final = tuple(action for action in Action if not action.lossy)
"""The others change no bit of what training computes."""

EXPENSIVE_NAMES: Final = (
    "mm", "addmm", "convolution", "cudnn_convolution", "mkldnn_convolution", "_scaled_mm", "_grouped_mm",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
)  # fmt: skip
"""What selective actions do not run again: products of matrices with weights, convolutions, fused attention; `bmm` not:
its result is larger than it is dear."""


def is_expensive(op: str) -> bool:
    """Whether a recorded op is one of these, by its name, as `aten.mm.default`."""
    return op.removeprefix("aten.").partition(".")[0] in EXPENSIVE_NAMES
