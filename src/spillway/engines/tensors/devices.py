"""Which device a session's model lies on, and the engine for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from spillway.budgets import parse_budget
from spillway.engines.tensors.cuda_backend import cuda_engine
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import BudgetError, ModelError
from spillway.internals.machine_memory import usable_memory
from spillway.internals.private import CAN_SWAP
from spillway.memory.budget import UNLIMITED, Budget
from spillway.methods.base import AbstractPolicy
from spillway.tiers.cuda_streams import CudaStreams
from spillway.tiers.spill_file import SpillIO
from spillway.units import Bytes

HOST_SHARE = "50%"
"""Of the memory that this process may use: the host budget where none is given."""


def pinned_bytes(device: torch.device, host_budget: int | str | None) -> Bytes:
    """The most host memory that is pinned for what leaves that device. Raises BudgetError for a budget that cannot be
    read, for more than there is, and where nothing is pinned."""
    if host_budget is not None and device.type == "cpu":
        raise BudgetError(
            "SpillOptions(host_budget=...) is for models on CUDA; what leaves memory on the CPU goes to disk."
        )
    return parse_budget(HOST_SHARE if host_budget is None else host_budget, usable_memory())


def device_of(models: Sequence[torch.nn.Module]) -> torch.device:
    """Where all parameters and buffers lie. Raises ModelError if they lie on several devices, on one that cannot be
    managed, or in memory of which torch keeps no account."""
    found = {t.device for m in models for t in (*m.parameters(), *m.buffers())}
    names = sorted({str(device) for device in found})
    if len(names) > 1:
        raise ModelError(f"The model lies on {len(names)} devices ({', '.join(names)}); move it to one.")
    device = next(iter(found), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"The model lies on {device}; this version manages models on the CPU and on CUDA.")
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "pluggable":
        raise ModelError(
            "torch keeps no account of CUDA memory here, because its allocator is a pluggable one (which is what "
            "DeviceArena().serve() makes it): train without a session, or with torch's own allocator."
        )
    if device.type == "cpu" and not CAN_SWAP:
        raise ModelError(
            f"torch {torch.__version__} cannot exchange a storage's bytes in place; use torch 2.13 or newer."
        )
    return device


def engine_for(
    device: torch.device,
    policy: AbstractPolicy,
    allowed: Bytes | Budget,
    pinned: Bytes,
    spill_directory: str | os.PathLike[str] | None,
    spill_io: SpillIO = "buffered",
) -> TensorEngine:
    """An engine for tensors of that device, under a budget in bytes, or the account of it. At most `pinned` bytes of
    host memory are pinned for what leaves a CUDA device."""
    if device.type == "cpu":
        return TensorEngine(policy, allowed, spill_directory, spill_io)
    return cuda_engine(policy, allowed, CudaStreams(device), pinned)


def allowed_bytes(device: torch.device, budget: int | str | None) -> Bytes:
    """The budget for models on that device in bytes. Raises BudgetError for a budget that cannot be read, or for more
    than there is."""
    there = usable_memory() if device.type == "cpu" else CudaStreams(device).total
    return UNLIMITED if budget is None else parse_budget(budget, there)
