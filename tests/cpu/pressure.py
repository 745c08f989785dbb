"""Ways for the tests to make storages absent: at a chosen moment, or before every op that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spillway.internals.dispatch_key import unwatched
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.memory.records import AWAY, DROPPED
from spillway.methods import LRU, AbstractPolicy, Delta, Drop, Move
from spillway.session import Session

Image: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...], bytes]

PLENTY = 1 << 30
"""A budget under which nothing has to leave, but may."""

Way: TypeAlias = type[Drop] | type[Move]


def copying_beside() -> AbstractPolicy:
    """Nearly everything is copied out while ops run, much is fetched, and of the rest what can be is recomputed."""
    policy = Delta(
        filter="lru", early=0.01, enough=1.0, spare=1.0, most_copies_out=4, most_copies_in=4, only_beside=False,
        looks_after=1, recomputes="always",
    )  # fmt: skip
    # Costs that do not vary from run to run.
    policy._transfer_seconds = lambda view, one: one.nbytes / 1e9 * (1 if view.copied(one) else 2)  # type: ignore[method-assign]
    return policy


ENDS = ("recompute first", "move first")
"""Both ends of what a policy can be told."""

ORDERS: Mapping[str, Callable[[], AbstractPolicy]] = MappingProxyType(
    {
        "recompute first": lambda: LRU(short_chain=32, worth=inf),
        "move first": lambda: LRU(short_chain=0),
        "copy beside": copying_beside,
        "delta-published": Delta.as_published,
    }
)
"""These, copies under way at all times, and DELTA as its paper has it."""


def put_away(memory: Session, tensor: torch.Tensor, way: Way) -> bool:
    """Make the tensor's storage leave now; whether that was granted."""
    engine = memory._engine
    with engine.controller.lock, unwatched():
        storage = engine.lookup(tensor)
        large = storage is not None and storage.nbytes >= SMALLEST_MOVABLE
        return storage is not None and large and engine.controller.grant(way(storage))


def is_dropped(memory: Session, tensor: torch.Tensor) -> bool:
    return _absence(memory, tensor) == DROPPED


def is_moved(memory: Session, tensor: torch.Tensor) -> bool:
    return _absence(memory, tensor) == AWAY


def _absence(memory: Session, tensor: torch.Tensor) -> int:
    storage = memory._engine.table.get(torch._C._storage_address(tensor))
    assert storage is not None
    assert storage.value is not None
    return storage.value.absent


def image(tensor: torch.Tensor) -> Image:
    """All that a tensor is, by value."""
    values = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, tensor.stride(), values.numpy().tobytes()


class InputsLeave(TorchDispatchMode):
    """Makes the inputs of every op absent right before it runs, in the first of `ways` that is granted."""

    def __init__(self, memory: Session, *ways: Way) -> None:
        super().__init__()
        self.memory = memory
        self.ways = ways
        self.granted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self.granted += any(put_away(self.memory, value, way) for way in self.ways)
        return func(*args, **(kwargs or {}))
