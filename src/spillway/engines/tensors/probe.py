"""The smallest budget that would have worked, for a step that was refused.

What the ops that ran needed is known; what the rest of the step would have needed is asked of torch's fake tensors, on the
model and the batch of the refused step: shapes are computed, nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine

MARGIN = 1.02
"""Room for what stays below the size at which storages move."""


@final
class _WorkingSets(TorchDispatchMode):
    """Notes the most bytes that one op reads and creates."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: Bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages: dict[int, Bytes] = {}
        tree_map_only(torch.Tensor, lambda t: _note(storages, t), (args, kwargs, out))
        self.largest = max(self.largest, sum(storages.values()))
        return out


def _note(storages: dict[int, Bytes], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage._cdata] = storage.nbytes()


def smallest_budget(
    error: BudgetInfeasible,
    engine: TensorEngine,
    models: Sequence[torch.nn.Module],
    tensors: Iterable[tuple[str, torch.Tensor]],
    batch: Any,
) -> BudgetInfeasible:
    """The same error with the smallest budget that works, where that can be told.

    It is exact if the model could be run on fake tensors with the batch (`model(**batch)`, `model(*batch)` or
    `model(batch)`), a bound from below otherwise.
    """
    parameters = [t for kind, t in tensors if kind == "parameter"]
    stuck = sum(s.nbytes for s in engine.table.values() if s.escaped or s.nbytes < 4096)
    update = 6 * max((p.nbytes for p in parameters), default=0)
    largest = max(error.needed, engine.controller.counters.floor_bytes, update)
    probed = _probe(models, batch) if batch is not None else None
    bytes_needed = int((max(largest, probed or 0) + stuck) * MARGIN)
    return BudgetInfeasible(
        needed=error.needed, allowed=error.allowed, op=error.op, op_index=error.op_index,
        smallest_budget=bytes_needed, exact=probed is not None,
    )  # fmt: skip


def _probe(models: Sequence[torch.nn.Module], batch: Any) -> Bytes | None:
    """Most bytes that one op of a forward and backward of the first model needs; None if it does not run on fakes."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, _WorkingSets() as sets:
            inputs = tree_map_only(torch.Tensor, fake.from_tensor, batch)
            call = models[0]
            out = call(**inputs) if isinstance(inputs, dict) else call(*inputs) if _many(inputs) else call(inputs)
            results: list[torch.Tensor] = []
            tree_map_only(FakeTensor, results.append, dict(out) if hasattr(out, "items") else out)
            sum(result.float().sum() for result in results if result.requires_grad).backward()
    except Exception:  # whatever the model does with tensors that have no content
        return None
    finally:
        for model in models:
            for parameter in model.parameters():
                if isinstance(parameter.grad, FakeTensor):
                    parameter.grad = None
    return sets.largest


def _many(inputs: Any) -> bool:
    return isinstance(inputs, list | tuple)
