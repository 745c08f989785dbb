"""The smallest budget that would have worked, for a step that was refused.

What the ops that ran needed is known; what the rest of the step would have needed is asked of torch's fake tensors,
on the model and the batch of the refused step: shapes are computed, nothing is allocated.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import numpy
import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from spillway.engines.controller import SMALLEST_MOVABLE
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine

MARGIN = 1.05
"""Room for what stays below the size at which storages move."""


@final
class _WorkingSets(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
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
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Any,
) -> BudgetInfeasible:
    """The same error with the smallest budget that works, where that can be told.

    It is exact if the model could be run on fake tensors with the batch (`model(**batch)`, `model(*batch)` or
    `model(batch)`, or as much of the batch as the model takes), a bound from below otherwise.
    """
    stuck = sum(s.nbytes for s in list(engine.table.values()) if s.escaped or s.nbytes < SMALLEST_MOVABLE)
    update = max((_update_bytes(optimizer) for optimizer in optimizers), default=0)
    largest = max(error.needed, engine.controller.counters.floor_bytes, update)
    probed = _probe(models, batch) if batch is not None else None
    reserved = engine.place.measured().reserved
    bytes_needed = int((max(largest, probed or 0) + stuck) * MARGIN) + reserved
    return BudgetInfeasible(
        needed=error.needed + reserved, allowed=error.allowed + reserved, op=error.op, op_index=error.op_index,
        smallest_budget=bytes_needed, exact=probed is not None,
    )  # fmt: skip


def _update_bytes(optimizer: torch.optim.Optimizer) -> Bytes:
    """Bytes of one op of an update: a parameter, its gradient and state, or those of a whole group at once."""
    largest = 0
    for group in optimizer.param_groups:
        sizes = [parameter.nbytes for parameter in group["params"]]
        together = group.get("foreach") or group.get("fused")
        largest = max(largest, 6 * (sum(sizes) if together else max(sizes, default=0)))
    return largest


def _probe(models: Sequence[torch.nn.Module], batch: Any) -> Bytes | None:
    """Most bytes that one op of a forward and backward of the first model needs; None if it does not run on fakes."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tensors of ours that the user does not know of
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            model = _without_content(models[0], fake)
            for call in _ways_to_call(model, batch):
                with contextlib.suppress(Exception):  # whatever the model does with tensors that have no content
                    return _largest_working_set(model, call, fake)
        return None
    except Exception:  # a model that cannot be copied
        return None
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _without_content(model: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """A copy of the model on fake tensors: what a forward does to a model (counters, buffers) must not happen to the
    user's, and the user's hooks must not see fakes.
    """
    with FakeCopyMode(fake):
        twin = copy.deepcopy(model)
    for module in twin.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                hooks.clear()
    return twin


_LOSS = 3
"""A loss outside the model is not run. What the backward of the usual ones needs at once is this many times the model's
result: `_log_softmax_backward_data` reads two tensors of its size and makes a third."""


def _largest_working_set(model: torch.nn.Module, call: Callable[[Any], Any], fake: FakeTensorMode) -> Bytes:
    with fake:
        sets = _WorkingSets()
        with sets:
            out = call(lambda tree: tree_map_only(torch.Tensor, fake.from_tensor, tree))
            results: list[torch.Tensor] = []
            tree_map_only(FakeTensor, results.append, dict(out) if hasattr(out, "items") else out)
            total = torch.stack([result.float().sum() for result in results if result.requires_grad]).sum()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(total, trained, allow_unused=True)
    return max(sets.largest, _LOSS * max((result.nbytes for result in results), default=0))


def _ways_to_call(model: torch.nn.Module, batch: Any) -> Iterator[Callable[[Any], Any]]:
    """Each takes the function that makes the batch fake: everything the batch has first, then less of it."""
    if isinstance(batch, dict):
        accepted = inspect.signature(model.forward).parameters
        known = {name: value for name, value in batch.items() if name in accepted}
        yield lambda fake: model(**fake(batch))
        yield lambda fake: model(**fake(known))
    items = list(batch.values()) if isinstance(batch, dict) else list(batch) if _many(batch) else [batch]
    for count in range(len(items), 0, -1):
        yield functools.partial(lambda fake, taken: model(*fake(taken)), taken=items[:count])


def _many(batch: Any) -> bool:
    return isinstance(batch, list | tuple)
