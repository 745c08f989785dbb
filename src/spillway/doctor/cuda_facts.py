"""What a CUDA device and this torch offer, and what Spillway makes of it, for people (`spillway doctor`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from spillway.errors import DeviceFullError, NativeError
from spillway.internals.private import CAN_SWAP
from spillway.native.device_arena import DRIVER, DeviceArena
from spillway.units import Bytes, format_bytes

NATIVE: Final = "native"
"""The caching allocator of torch's own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """One device."""

    name: str
    """As the driver calls it."""
    total: Bytes
    free: Bytes
    """What of it nobody has."""
    exchanges: bool
    """Whether bytes can be exchanged under a storage, so that moved ones can be read where they are."""
    allocator: str
    """Torch's name of the allocator: "native" is its own caching one."""
    expandable_segments: bool
    """Whether the caching allocator maps its segments piece by piece, which avoids odd pieces."""
    chunk: Bytes
    """Of memory that can be mapped behind addresses; 0 where the driver or our native part has no virtual
    addressing."""
    host_behind: bool | None
    """Whether host memory can stand behind a device address; None where that could not be tried."""
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
        return absent, segments, self._addressing(), *benchmarks

    def _addressing(self) -> str:
        if not self.chunk:
            return "Virtual addressing (spillway.native.device_arena) is not to be had here."
        behind = {
            True: "host memory can stand behind their addresses",
            False: "host memory cannot stand behind their addresses",
            None: "whether host memory can stand behind their addresses could not be tried",
        }[self.host_behind]
        return f"Virtual addressing maps chunks of {format_bytes(self.chunk)}; {behind}."


def cuda_facts(device: torch.device, environment: Mapping[str, str] = os.environ) -> CudaFacts:
    """Ask torch, the driver and the environment about a device."""
    free, total = torch.cuda.mem_get_info(device)
    return CudaFacts(
        name=torch.cuda.get_device_name(device), total=int(total), free=int(free), exchanges=CAN_SWAP,
        allocator=str(torch.cuda.get_allocator_backend()), expandable_segments=expandable_segments(environment),
        benchmarks=bool(torch.backends.cudnn.benchmark), **addressing(device.index or 0),
    )  # fmt: skip


def addressing(device: int, driver: str = DRIVER) -> dict[str, Any]:
    """`chunk` and `host_behind`, found by paging one chunk out."""
    try:
        arena = DeviceArena.of(device, driver=driver)
    except NativeError:
        return {"chunk": 0, "host_behind": None}
    behind = None
    with contextlib.suppress(DeviceFullError, NativeError):
        block = arena.take(arena.chunk)
        try:
            behind = arena.page_out(block)
        finally:
            arena.give(block)
            if not arena.counts().requested:
                arena.trim()
    return {"chunk": arena.chunk, "host_behind": behind}


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """As the allocator has it, or else as the environment asks for it."""
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):  # a private function, whose answer has changed its shape before
            snapshot: Any = torch.cuda.memory._snapshot()
            return bool(snapshot["allocator_settings"]["expandable_segments"])
    asked = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = dict(part.strip().partition(":")[::2] for part in asked.split(",") if part.strip())
    return settings.get("expandable_segments", "").strip().lower() == "true"
