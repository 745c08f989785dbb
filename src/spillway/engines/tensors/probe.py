"""The smallest budget that would have worked, for a step that was refused.

What the ops that ran needed is known; what the rest of the step would have needed is asked of torch's fake tensors,
on the model and the batch of the refused step: shapes are computed, and no tensor with content is made but of whole
numbers of the batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spillway.engines.tensors.fakes import FakeMode
from spillway.engines.tensors.mutated_saves import allowed
from spillway.engines.tensors.optimizers import Update, assumed, update_of
from spillway.engines.tensors.tally import Tally
from spillway.engines.tensors.twins import others_hear, results_of, unseen, untouched, usual_loss, without_content
from spillway.errors import BudgetInfeasible
from spillway.internals.private import grad_mode, storage_of
from spillway.ir.timeline import Kind
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.units import Bytes, format_bytes

if TYPE_CHECKING:
    from spillway.engines.tensors.tensor_engine import TensorEngine

MARGIN = 1.05
"""Room for what this does not know: alignment, estimates of sizes that are a little high."""
UNTOLD = 1.1
"""An op that needs so many times what was told shows that the rest of the step is another one."""
_MADE = (None, Kind.ACTIVATION, Kind.TEMPORARY)
"""What storages are that the step made."""


@final
@dataclass(frozen=True, slots=True)
class Like:
    """A tensor that a model was called with."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    content: Callable[[], torch.Tensor | None]
    """The tensor itself, as long as it is there, of whole numbers."""

    def again(self, *, with_content: bool) -> torch.Tensor:
        """One like it, or the same numbers if they are asked for and there."""
        content = self.content() if with_content else None
        if content is not None:
            return content.clone()
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.needs_grad)


class Called(NamedTuple):
    """A call of a model."""

    model: Callable[[], torch.nn.Module | None]
    again: Callable[[Callable[[Like], torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    """Its arguments, positional and named, with new tensors."""
    trains: bool
    """Whether it ran under gradients."""


def smallest_budget(
    error: BudgetInfeasible,
    engine: TensorEngine,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Any,
    calls: Sequence[Called] = (),
    beside: Sequence[torch.Tensor] = (),
) -> BudgetInfeasible:
    """The same error with the smallest budget that works, where that can be told. `beside` are tensors that the session
    has in every step.

    It is exact if the models could be run on fake tensors as they were called, or the first of them, if none was called
    by then, with the batch (`model(**batch)`, `model(*batch)` or `model(batch)`, or as much of it as the model takes);
    a bound from below otherwise: where an op needs more than that tells, as losses may, where hooks or modes stand
    around a forward, where the policy takes a multiple of the budget at most, which unusual losses pass, and where code
    takes addresses of what the step makes: that stays, and nobody knows how much more there would have been of it.
    """
    heard, policy = any(map(others_hear, models)), engine.controller.policy
    with unseen():
        update = functools.reduce(Update.beside, (update_of(one) or assumed(one) for one in optimizers), Update())
        escaped = [storage for storage in list(engine.table.values()) if storage.escaped]
        known = all(one.kind not in _MADE for one in escaped if one.nbytes >= SMALLEST_MOVABLE)
        probed, made = _probe(models, batch, calls) or (None, 0)
        lives = _named(models, optimizers, batch) + update.state + max(made, _gradients(models) + update.working)
        kept = sum(one.nbytes for one in beside if one.nbytes < SMALLEST_MOVABLE)
        seen = max(error.needed, engine.controller.counters.floor_bytes + engine.never_leaves())  # what could not leave
        foretold = max(
            update.large + update.small + _small(models, batch) + kept,
            (probed or 0) + update.small + kept + sum(one.nbytes for one in escaped),
            ceil(lives / policy.most),
        )
    told_all = probed is not None and seen <= UNTOLD * foretold
    reserved = engine.controller.budget.reserved
    told = BudgetInfeasible(
        needed=error.needed + reserved, allowed=error.allowed + reserved, op=error.op, op_index=error.op_index,
        smallest_budget=int(max(seen, foretold) * MARGIN) + reserved,
        exact=told_all and known and not heard and policy.most == inf,
    )  # fmt: skip
    if not known:
        stays = sum(one.nbytes for one in escaped if one.kind in _MADE)
        told.add_note(
            f"Of what the step made {format_bytes(stays)} stays, as code has its address (NumPy's arrays do) or a "
            f"sparse tensor consists of it, and how much more of it the rest of the step makes is not known. What "
            f"steps take without a budget (StepReport.peak_bytes) is enough."
        )
    return told


def _named(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], batch: Any) -> Bytes:
    """Bytes of what a step works on, gradients apart."""
    held = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    held += tree_leaves([dict(one.state) for one in optimizers]) + tree_leaves(batch)
    given = [one for one in held if isinstance(one, torch.Tensor) and torch._C._has_storage(one)]
    return sum({storage_of(one)._cdata: storage_of(one).nbytes() for one in given}.values())


def _gradients(models: Sequence[torch.nn.Module]) -> Bytes:
    return sum(one.nbytes for model in models for one in model.parameters() if one.requires_grad)


def _small(models: Sequence[torch.nn.Module], batch: Any) -> Bytes:
    """Bytes of parameters, gradients, buffers and tensors of the batch that are too small to leave."""
    parameters = [one for model in models for one in model.parameters()]
    others = [one for model in models for one in model.buffers()]
    given = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and torch._C._has_storage(one)]
    return sum(one.nbytes for one in (*parameters, *parameters, *others, *given) if one.nbytes < SMALLEST_MOVABLE)


def _probe(models: Sequence[torch.nn.Module], batch: Any, calls: Sequence[Called]) -> tuple[Bytes, Bytes] | None:
    """Most bytes that one op of forwards and backwards needs, and the most that lives at once of what they make; None
    if one of them does not run on fakes."""
    found = [_probe_call(model, [called.again], trains=called.trains) for called in calls if (model := called.model())]
    if None not in found:
        known = [needed for needed in found if needed is not None]
        if known:
            return max(needed for needed, _ in known), max(lives for _, lives in known)
    return _probe_call(models[0], list(_ways_to_call(models[0], batch)), trains=True) if batch is not None else None


_Way = Callable[[Callable[[Any], torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Takes what makes a tensor fake, and returns what a model is called with."""


_Around = Callable[[], contextlib.AbstractContextManager[None]]
_AROUND: tuple[_Around, ...] = (contextlib.nullcontext, lambda: allowed())
"""It may be that the step is one that may write to what it has saved."""


def _probe_call(model: torch.nn.Module, ways: Sequence[_Way], *, trains: bool) -> tuple[Bytes, Bytes] | None:
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        return None  # copies share their parameters
    with contextlib.suppress(Exception), untouched(model), grad_mode(enabled=trains):  # it cannot be copied
        fake = FakeMode()
        twin = without_content(model, fake)
        # Whole numbers have their content at first: a tree, a length, what is looked up.
        for way, whole, around in itertools.product(ways, (True, False), _AROUND):
            with contextlib.suppress(Exception):  # whatever the model does with tensors that have no content
                return _largest_working_set(twin, way, fake, around, with_content=whole)
    return None


_LOSS = 3
"""A loss outside the model is not run. What the backward of the usual ones needs at once is this many times the model's
result: `_log_softmax_backward_data` reads two tensors of its size and makes a third."""


def _largest_working_set(
    model: torch.nn.Module, way: _Way, fake: FakeTensorMode, around: _Around, *, with_content: bool
) -> tuple[Bytes, Bytes]:
    def faked(tensor: torch.Tensor | Like) -> torch.Tensor:
        if isinstance(tensor, Like):
            return tensor.again(with_content=with_content)
        whole = with_content and not (tensor.is_floating_point() or tensor.is_complex())
        return tensor.clone() if whole else fake.from_tensor(tensor)

    with fake:
        tally = Tally([*model.parameters(), *model.buffers()])
        with tally, around():
            args, kwargs = way(faked)
            given = tally.alive
            results = results_of(model(*args, **kwargs))
            most = max((result.nbytes for result in results), default=0)
            if any(result.requires_grad for result in results):
                loss = [usual_loss(results)]
                del results  # the graph alone holds them, as in a step
                cast(Any, loss.pop()).backward()
    return max(tally.largest, _LOSS * most + tally.small), tally.lives - given


def _ways_to_call(model: torch.nn.Module, batch: Any) -> Iterator[_Way]:
    """Everything the batch has first, then less of it."""
    if isinstance(batch, dict):
        accepted = inspect.signature(model.forward).parameters
        known = {name: value for name, value in batch.items() if name in accepted}
        for named in (batch, known):
            yield functools.partial(lambda fake, named: ((), tree_map_only(torch.Tensor, fake, named)), named=named)
    several = batch.values() if isinstance(batch, dict) else batch
    items = list(several) if isinstance(batch, dict | list | tuple) else [batch]
    for count in range(len(items), 0, -1):
        taken = tuple(items[:count])
        yield functools.partial(lambda fake, taken: (tree_map_only(torch.Tensor, fake, taken), {}), taken=taken)
