"""The smallest budget that would have worked, for a step that was refused.

What the ops that ran needed is known; what the rest of the step would have needed is asked of torch's fake tensors,
on the model and the batch of the refused step: shapes are computed, and no tensor with content is made but of whole
numbers of the batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast, final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from spillway.engines.controller import SMALLEST_MOVABLE
from spillway.engines.tensors.collectives import NAMESPACES
from spillway.engines.tensors.lists import PARTS, arguments_per_element
from spillway.engines.tensors.sizes import FORMULAS
from spillway.engines.tensors.twins import bare_step, results_of, unseen, untouched, usual_loss, without_content
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.tensors.engine import TensorEngine

MARGIN = 1.05
"""Room for what this does not know: alignment, estimates of sizes that are a little high."""


_UNTOLD: Final = frozenset({"aten::mkldnn_rnn_layer"})
"""Ops whose last result is a workspace of a size that is not known of fake tensors."""


@final
class _WorkingSets(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    """Notes the most bytes that one op needs: what it reads and creates, and what is alive and too small to leave."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.largest: Bytes = 0
        self.small: Bytes = 0
        """Bytes of all that is alive and too small to leave."""
        self._known: dict[int, weakref.ref[Any]] = {}
        self._larger: dict[int, tuple[Bytes, weakref.ref[Any]]] = {}
        """What the storages of workspaces really are, as long as they live: their keys are used again."""
        for tensor in tensors:
            self._note({}, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(NAMESPACES):
            raise RuntimeError("This forward is no other process's.")  # who would wait for it, or be waited for
        given: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, given.append, (args, kwargs))
        has_content = bool(given) and not any(isinstance(tensor, FakeTensor) for tensor in given)
        with unset_fake_temporarily() if has_content else contextlib.nullcontext():
            out = func(*args, **(kwargs or {}))
        if func._schema.name in _UNTOLD:
            others = sum(result.untyped_storage().nbytes() for result in out[:-1])
            workspace = out[-1].untyped_storage()
            died = weakref.ref(workspace, lambda _, key=workspace._cdata: self._larger.pop(key))  # type: ignore[misc]
            self._larger[workspace._cdata] = FORMULAS[func._schema.name](args) - others, died
        storages: dict[int, Bytes] = {}
        tree_map_only(torch.Tensor, lambda tensor: self._note(storages, tensor), (args, kwargs, out))
        self.largest = max(self.largest, sum(storages.values()) + self.small)
        return out

    def _note(self, storages: dict[int, Bytes], tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._larger:
            nbytes = max(nbytes, self._larger[key][0])
        if nbytes >= SMALLEST_MOVABLE:
            storages[key] = nbytes
        elif key not in self._known:
            self.small += nbytes
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key, nbytes))

    def _forget(self, key: int, nbytes: Bytes) -> None:
        self.small -= nbytes
        del self._known[key]


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


@unseen()
def smallest_budget(
    error: BudgetInfeasible,
    engine: TensorEngine,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Any,
    calls: Sequence[Called] = (),
) -> BudgetInfeasible:
    """The same error with the smallest budget that works, where that can be told.

    It is exact if the models could be run on fake tensors as they were called, or the first of them, if none was called
    by then, with the batch (`model(**batch)`, `model(*batch)` or `model(batch)`, or as much of it as the model takes);
    a bound from below otherwise.
    """
    updates = [_Update(optimizer) for optimizer in optimizers]
    states = sum(update.small for update in updates)
    probed = _probe(models, batch, calls)
    largest = max(
        error.needed,  # with what could not leave then
        engine.controller.counters.floor_bytes + engine.never_leaves(),
        max((update.largest for update in updates), default=0) + states + _small(models),
        (probed or 0) + states + sum(storage.nbytes for storage in list(engine.table.values()) if storage.escaped),
    )
    reserved = engine.place.measured().reserved
    return BudgetInfeasible(
        needed=error.needed + reserved, allowed=error.allowed + reserved, op=error.op, op_index=error.op_index,
        smallest_budget=int(largest * MARGIN) + reserved, exact=probed is not None,
    )  # fmt: skip


def _small(models: Sequence[torch.nn.Module]) -> Bytes:
    """Bytes of parameters and gradients that are too small to leave."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    return sum(2 * p.nbytes for p in parameters if p.nbytes < SMALLEST_MOVABLE)


@final
class _Update:
    """What an update of an optimizer needs, from two updates of a small parameter like its largest."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        most = max(parameters, key=lambda parameter: parameter.nbytes)
        tensors, states, numbers = _UNKNOWN
        if type(optimizer).__module__.startswith("torch.optim"):  # what wraps another would update the user's own
            with contextlib.suppress(Exception):  # it wants a closure
                tensors, states, numbers = _counted(optimizer, most)
        self.largest: Bytes = int(tensors * most.nbytes)
        """Bytes of the tensors that one op needs at once."""
        self.small: Bytes = sum(
            numbers * 4 + (states * p.nbytes if p.nbytes < SMALLEST_MOVABLE else 0) for p in parameters
        )
        """Bytes of state that is too small to leave."""


_UNKNOWN: Final = (4.0, 2, 1)
"""Tensors that one op of an update needs at once, tensors of state for each parameter, and numbers: as Adam's."""


def _counted(optimizer: torch.optim.Optimizer, like: torch.Tensor) -> tuple[float, int, int]:
    tiny = torch.nn.Parameter(torch.zeros([min(length, 16) for length in like.shape], dtype=like.dtype))
    twin: Any = copy.copy(optimizer)
    group = next(group for group in optimizer.param_groups if any(p is like for p in group["params"]))
    twin.param_groups, twin.state = [{**group, "params": [tiny]}], defaultdict(dict)
    together = _Together(tiny.numel())
    for update in range(2):
        if update and like in optimizer.state:
            together.most = 0.0  # the state is there
        tiny.grad = torch.ones_like(tiny)
        with together:
            bare_step(twin)
    kept = [value for value in twin.state[tiny].values() if isinstance(value, torch.Tensor)]
    together_at_once = any(group.get(flag) for flag in ("foreach", "fused"))
    tensors = together.alive if together_at_once else sum(value.dim() > 0 for value in kept)
    return together.most, tensors, sum(value.dim() == 0 for value in kept)


@final
class _Together(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    """Counts the tensors, of so many numbers, that an op needs at once, and those that are alive at once of what ops
    make. What writes in place into lists does with one and a copy of a part.
    """

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel
        self._made: dict[int, weakref.ref[Any]] = {}
        self.most = 0.0
        self.alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = self._shares((args, kwargs)), self._shares(out)
        in_parts = arguments_per_element(func._schema) and not func._schema.returns
        self.most = max(self.most, min(sum((given | made).values()), 1 + 1 / PARTS if in_parts else 8))
        tree_map_only(torch.Tensor, lambda tensor: self._note(given, tensor), out)
        self.alive = max(self.alive, len(self._made))
        return out

    def _shares(self, tree: Any) -> dict[int, float]:
        shares: dict[int, float] = {}
        tree_map_only(
            torch.Tensor,
            lambda t: t.dim() and shares.update({t.untyped_storage()._cdata: t.numel() / self._numel}),
            tree,
        )
        return shares

    def _note(self, given: Mapping[int, float], tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in given and tensor.dim():
            self._made[key] = weakref.ref(storage, lambda _: self._made.pop(key))


def _probe(models: Sequence[torch.nn.Module], batch: Any, calls: Sequence[Called]) -> Bytes | None:
    """Most bytes that one op of forwards and backwards needs; None if one of them does not run on fakes."""
    found = [_probe_call(model, [called.again], trains=called.trains) for called in calls if (model := called.model())]
    if None not in found:
        known = [needed for needed in found if needed is not None]
        if known:
            return max(known)
    return _probe_call(models[0], list(_ways_to_call(models[0], batch)), trains=True) if batch is not None else None


_Way = Callable[[Callable[[Any], torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Takes what makes a tensor fake, and returns what a model is called with."""


def _probe_call(model: torch.nn.Module, ways: Sequence[_Way], *, trains: bool) -> Bytes | None:
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        return None  # copies share their parameters
    with contextlib.suppress(Exception), untouched(model), torch.set_grad_enabled(trains):  # it cannot be copied
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        twin = without_content(model, fake)
        # Whole numbers have their content at first: a tree, a length, what is looked up.
        for way, with_content in itertools.product(ways, (True, False)):
            with contextlib.suppress(Exception):  # whatever the model does with tensors that have no content
                return _largest_working_set(twin, way, fake, with_content=with_content)
    return None


_LOSS = 3
"""A loss outside the model is not run. What the backward of the usual ones needs at once is this many times the model's
result: `_log_softmax_backward_data` reads two tensors of its size and makes a third."""


def _largest_working_set(model: torch.nn.Module, way: _Way, fake: FakeTensorMode, *, with_content: bool) -> Bytes:
    def faked(tensor: torch.Tensor | Like) -> torch.Tensor:
        if isinstance(tensor, Like):
            return tensor.again(with_content=with_content)
        whole = with_content and not (tensor.is_floating_point() or tensor.is_complex())
        return tensor.clone() if whole else fake.from_tensor(tensor)

    with fake:
        sets = _WorkingSets([*model.parameters(), *model.buffers()])
        with sets:
            args, kwargs = way(faked)
            results = results_of(model(*args, **kwargs))
            most = max((result.nbytes for result in results), default=0)
            if any(result.requires_grad for result in results):
                loss = [usual_loss(results)]
                del results  # the graph alone holds them, as in a step
                cast(Any, loss.pop()).backward()
    return max(sets.largest, _LOSS * most + sets.small)


def _ways_to_call(model: torch.nn.Module, batch: Any) -> Iterator[_Way]:
    """Everything the batch has first, then less of it."""
    if isinstance(batch, dict):
        accepted = inspect.signature(model.forward).parameters
        known = {name: value for name, value in batch.items() if name in accepted}
        for named in (batch, known):
            yield functools.partial(lambda fake, named: ((), tree_map_only(torch.Tensor, fake, named)), named=named)
    items = list(batch.values()) if isinstance(batch, dict) else list(batch) if _many(batch) else [batch]
    for count in range(len(items), 0, -1):
        taken = tuple(items[:count])
        yield functools.partial(lambda fake, taken: (tree_map_only(torch.Tensor, fake, taken), {}), taken=taken)


def _many(batch: Any) -> bool:
    return isinstance(batch, list | tuple)
