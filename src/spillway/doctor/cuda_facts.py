"""What a CUDA device and this torch offer, and what Spillway makes of it, for people (`spillway doctor`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from spillway.internals.private import CAN_SWAP
from spillway.units import Bytes

NATIVE: Final = "native"
"""The caching allocator of torch's own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """One device."""

    name: str
    """As the driver calls it."""
    total: Bytes
    """Its memory."""
    free: Bytes
    """What of it nobody has."""
    exchanges: bool
    """Whether bytes can be exchanged under a storage, so that moved ones can be read where they are."""
    allocator: str
    """Torch's name of the allocator: "native" is its own caching one."""
    expandable_segments: bool
    """Whether the caching allocator maps its segments piece by piece, which avoids odd pieces."""
    benchmarks: bool
    """Whether cuDNN takes the algorithm that was fastest when it tried."""

    def notes(self) -> tuple[str, ...]:
        """What follows for a session, a sentence each."""
        absent = (
            "Moved storages point at pinned host memory: code that does not ask reads them there, slowly and right."
            if self.exchanges
            else "This torch cannot exchange bytes under a storage (2.13 can): absent storages have no bytes, and at "
            "the end of every step all are brought back, which has to fit in the budget."
        )
        segments = (
            f"The allocator is {self.allocator}, not torch's own, and expandable_segments is not its setting."
            if self.allocator != NATIVE
            else "expandable_segments is on: odd pieces of memory hardly count."
            if self.expandable_segments
            else "expandable_segments is off: blocks may be up to 1 MiB larger than their storages, which is set aside "
            "in the budget; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of it."
        )
        benchmarks = ("cudnn.benchmark is on: convolutions are moved and not recomputed.",) if self.benchmarks else ()
        return absent, segments, *benchmarks


def cuda_facts(device: torch.device, environment: Mapping[str, str] = os.environ) -> CudaFacts:
    """Ask torch, the driver and the environment about a device."""
    free, total = torch.cuda.mem_get_info(device)
    return CudaFacts(
        name=torch.cuda.get_device_name(device), total=int(total), free=int(free), exchanges=CAN_SWAP,
        allocator=str(torch.cuda.get_allocator_backend()), expandable_segments=expandable_segments(environment),
        benchmarks=bool(torch.backends.cudnn.benchmark),
    )  # fmt: skip


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """As the allocator has it, or else as the environment asks for it."""
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):  # a private function, whose answer has changed its shape before
            snapshot: Any = torch.cuda.memory._snapshot()
            return bool(snapshot["allocator_settings"]["expandable_segments"])
    asked = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = dict(part.strip().partition(":")[::2] for part in asked.split(",") if part.strip())
    return settings.get("expandable_segments", "").strip().lower() == "true"
