"""What the rest of a step will need, told on tensors without content: a forward and backward in which every block is
recomputed, and the step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spillway.engines.blocks.aside import is_the_models
from spillway.engines.blocks.containers import rebuilt
from spillway.engines.blocks.engine import BlockEngine
from spillway.engines.blocks.environment import Environment
from spillway.engines.blocks.quiet import quiet
from spillway.engines.blocks.reach import Reach, reach_of
from spillway.engines.tensors.collectives import NAMESPACES
from spillway.engines.tensors.interrupts import by_signal
from spillway.engines.tensors.twins import bare_step, results_of, unseen, untouched, usual_loss, without_content
from spillway.methods.actions import Action
from spillway.units import Bytes


class Call(NamedTuple):
    """A call of a model's forward."""

    engine: BlockEngine
    """A copy of its model runs, without the user's hooks; what that changes beside the copy is put back."""
    called: tuple[Any, dict[str, Any]]
    """Its arguments; of tensors only shape, strides, dtype and device count."""
    gradients: Mapping[str, Bytes]
    """Of parameters that have one by then, by their names."""


class Needs(NamedTuple):
    """Of the next step of some optimizers, beside parameters and gradients."""

    state: Bytes
    """That it adds."""
    working: Bytes
    """Temporaries, at most at once."""


NOTHING: Final = Needs(0, 0)


@unseen()
def needs_of(optimizers: Sequence[torch.optim.Optimizer]) -> Needs:
    """Of several optimizers that step one after the other; nothing of one that does not run on such tensors."""
    found = [_needs(one) for one in optimizers]
    return Needs(sum(one.state for one in found), max((one.working for one in found), default=0))


def _needs(optimizer: torch.optim.Optimizer) -> Needs:
    total = NOTHING
    if not type(optimizer).__module__.startswith("torch.optim"):
        return total  # a step of somebody's own may change what only the user's may: a counter, a random stream
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        trained = [one for one in group["params"] if one.requires_grad]
        fresh = [one for one in trained if not optimizer.state.get(one)]
        together = bool(group.get("foreach") or group.get("fused"))
        pieces = [trained] if together else list({(one.shape, one.dtype): [one] for one in trained}.values())
        try:
            measured = [_measured(type(optimizer), piece, options) for piece in pieces if piece]
        except Exception as error:  # an optimizer of somebody's own, with other arguments or ops without shapes
            if by_signal(error):
                raise
            continue
        each = dict(zip([(piece[0].shape, piece[0].dtype) for piece in pieces if piece], measured, strict=True))
        if together:
            state = sum(one.state for one in measured) if fresh else 0
        else:
            state = sum(each[one.shape, one.dtype].state for one in fresh)
        working = max((one.working for one in measured), default=0)
        total = Needs(total.state + state, max(total.working, working))
    return total


def _measured(kind: type[torch.optim.Optimizer], parameters: Sequence[torch.Tensor], options: dict[str, Any]) -> Needs:
    """Of two steps on a few parameters: the first makes state, the second has temporaries alone."""
    with FakeTensorMode(), torch.enable_grad():
        fakes = [torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype)) for one in parameters]
        for fake in fakes:
            fake.grad = torch.empty(fake.shape, dtype=fake.dtype)
        optimizer = cast(Any, kind)([{**options, "params": fakes}])
        live = _Live()
        with live:
            bare_step(optimizer)
            state = live.now()
            live.peak = 0
            bare_step(optimizer)
        return Needs(state, max(live.peak - state, 0))


def recomputing(call: Call, environment: Environment) -> Bytes | None:
    """Of a forward and backward in which every block is recomputed, the most bytes above what is there when it begins,
    with a loss that needs what the usual ones do, and for an engine that has learnt nothing yet. None where the model
    does not run on tensors without content."""
    return _peak(call, environment, _go_back, trains=True, taught=False)


def least(call: Call, environment: Environment, enough: Bytes = 0) -> Bytes | None:
    """The same for the engine as it is, with a loss that needs nothing, or of a forward alone if it runs without
    gradients: less cannot do. If that is no more than what is enough, nobody looks for less."""
    if not torch.is_grad_enabled():
        return _peak(call, environment, lambda out: None, trains=False, taught=True)
    held = sum(call.gradients.values())
    peak = _peak(call, environment, _descend, trains=True, taught=True)
    if peak is None or not held or peak <= enough:
        return peak
    # They may be given up between forward and backward.
    fresh = _peak(call._replace(gradients={}), environment, _descend, trains=True, taught=True)
    return None if fresh is None else min(peak, fresh - held)


@unseen()
def _peak(
    call: Call, environment: Environment, goes_on: Callable[[list[Any]], None], *, trains: bool, taught: bool
) -> Bytes | None:
    model = call.engine.model
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        return None  # copies share their parameters, and kernels depend on how often they have run
    reach = Reach(reach_of((model,), *call.called))
    if reach.too_much:
        return None
    around = environment(environment.capture())
    fake: Any = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False  # it would hold on to storages that `Tensor.set_` is given
    try:
        with quiet(), reach.lent(), untouched(model), around, torch.set_grad_enabled(trains):
            twin = _twin(call, fake)
            live = _Live()
            with fake, BlockEngine(twin, call.engine.blocks, actions=_again) as engine:
                if taught:
                    engine.learn_from(call.engine)
                args, kwargs = rebuilt(call.called, _empty)
                with live:
                    goes_on([twin(*args, **kwargs)])
        return live.peak
    except BaseException as error:  # whatever the model does with tensors that have no content
        if by_signal(error) or not (isinstance(error, Exception) or is_the_models(error)):
            raise
        return None


def _twin(call: Call, fake: FakeTensorMode) -> torch.nn.Module:
    twin = without_content(call.engine.model, fake)
    with fake:
        for name, parameter in twin.named_parameters():
            parameter.grad = torch.empty_like(parameter) if name in call.gradients else None
    return twin


def _again(block: str, call: int) -> Action:
    return Action.RECOMPUTE


def _go_back(out: list[Any]) -> None:
    cast(Any, usual_loss(results_of(out[0]))).backward()


def _descend(out: list[Any]) -> None:
    """From a result that nobody holds."""
    sums = [one.sum().real.float() for one in results_of(out.pop()) if one.requires_grad]
    cast(Any, torch.stack(sums).sum()).backward()


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


_WITH_STORAGE: Final = (torch.Tensor, torch.UntypedStorage)


def _storage(one: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    return one.untyped_storage() if isinstance(one, torch.Tensor) else one


@final
class _Live(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    """Bytes of the storages that were made in it and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak: Bytes = 0
        self._made: dict[int, tuple[Any, Bytes]] = {}
        self._most: Bytes = 0
        """What can be alive at most: what was at the last count, and what was made since."""

    def now(self) -> Bytes:
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        self._most = sum(nbytes for _, nbytes in self._made.values())
        return self._most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(NAMESPACES):
            raise RuntimeError("This forward is no other process's.")  # who would wait for it, or be waited for
        if func is torch.ops.aten.equal.default and args[0].dtype is torch.uint8:
            return True  # bytes that the engine looks at, before and after a block: there are none
        given = {_storage(one)._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, _WITH_STORAGE)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                storage = one.untyped_storage()
                self._made[storage._cdata] = cast(Any, StorageWeakRef)(storage), storage.nbytes()
                self._most += storage.nbytes()
        if self._most > self.peak:
            self.peak = max(self.peak, self.now())
        return result
