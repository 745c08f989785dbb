"""What is given to a session: models, optimizers, batches, and what of them can be told without running them."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from spillway.engines.tensors.calls import inner_tensors
from spillway.engines.tensors.devices import device_of
from spillway.errors import ModelError
from spillway.internals.private import counted_storage, fully_sharded, is_distributed, local_of
from spillway.ir import Kind

Models = torch.nn.Module | Sequence[torch.nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


# Tuples, made once: `A | B` makes a union whenever it is evaluated.
_LEAVES: Final = (torch.Tensor, bool, int, float)
_CONTAINERS: Final = (list, tuple)
_TRAINING: Final = operator.attrgetter("training")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")


def signature_of(batch: Any) -> str:
    """Shapes and dtypes of the tensors in a batch, and its numbers, in order; empty without tensors."""
    if type(batch) is torch.Tensor and not batch.is_nested:  # the usual case, before every step
        return f"{str(batch.dtype)[6:]}{list(batch.shape)}"
    found = list(leaves(batch))
    if not any(isinstance(leaf, torch.Tensor) for leaf in found):
        return ""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(shape_of(leaf))}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in found
    )


def circumstances(
    signature: str, device: torch.device, parts: Iterable[torch.nn.Module], parameters: Iterable[torch.Tensor]
) -> Hashable:
    """What a step on inputs of that signature depends on besides: what trains, and in which modes."""
    kind = device.type
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    # `map` over getters in C: this is asked before every step, watched or not.
    return signature, modes, tuple(map(_TRAINING, parts)), tuple(map(_REQUIRES_GRAD, parameters))


def modules_of(models: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """As `Module.modules` has them, in its order, in a third of the time."""
    waiting: list[Any] = [*models][::-1]
    seen = set[torch.nn.Module]()
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        children = module._modules
        if type(children) is not dict:  # of TorchScript
            inside = dict.fromkeys(one for one in module.modules() if one not in seen)
            seen.update(inside)
            yield from inside
            continue
        seen.add(module)
        yield module
        waiting += reversed(children.values())


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Those that the modules themselves have, each once."""
    every = (one for module in modules for one in module._parameters.values() if one is not None)
    return list({id(one): one for one in every}.values())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """None as well for what stands in a parameter's place, such as weights after an update of `functional_call`: torch
    warns where the gradient of a tensor is read that will have none."""
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of a nested tensor how many tensors it has, and how many elements they have together."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    return tensor.size(0), (tensor.values() if tensor.layout is torch.jagged else tensor).numel()


def leaves(batch: Any, around: tuple[int, ...] = ()) -> Iterator[torch.Tensor | bool | int | float]:
    """The tensors and numbers of a batch, in order. `around`: the containers that it lies in, by identity."""
    if isinstance(batch, _LEAVES):
        yield batch
        return
    values: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, _CONTAINERS):
        values = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    if id(batch) not in around:
        for value in values:
            yield from leaves(value, (*around, id(batch)))


def storages(tensors: Iterable[tuple[Kind, torch.Tensor]]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each once; of nested and sparse ones those of what they consist of."""
    parts = (part for _, one in tensors for part in _strided(local_of(one)))
    return list({storage._cdata: storage for storage in map(counted_storage, parts)}.values())


def _strided(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    if tensor.layout is torch.strided:
        return (tensor,)
    return (part for part in inner_tensors(tensor) if part.layout is torch.strided)


def several(given: Any, kind: type[Any]) -> list[Any]:
    """One thing, several of them, or what `check_models` then complains about."""
    if given is None:
        return []
    try:
        return [given] if isinstance(given, kind) else list(given)
    except TypeError:
        return [given]


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper that holds one, such as Accelerate's: it has hooks, and the state's tensors."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer else optimizer


def check_models(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], *, by_block: bool
) -> None:
    """Raises ModelError for what one session cannot manage, by the block engine or by the tensor engine."""
    for given, kind, what in ((models, torch.nn.Module, "model"), (optimizers, torch.optim.Optimizer, "optimizer")):
        for item in given:
            if not isinstance(item, kind):
                raise ModelError(f"manage() needs a {kind.__name__} as {what} (or several), got {type(item).__name__}.")
    if not models:
        raise ModelError("manage() needs at least one model.")
    check_sharding(models, optimizers, by_block=by_block)
    device_of(models)
    if any(
        isinstance(t, UninitializedParameter | UninitializedBuffer)
        for m in models
        for t in (*m.parameters(), *m.buffers())
    ):
        raise ModelError("The model has lazy parameters without a size; run one batch through it before manage().")
    if not any(p.requires_grad for m in models for p in m.parameters()):
        warnings.warn("No parameter of the model requires a gradient.", stacklevel=3)


def check_sharding(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer], *, by_block: bool
) -> None:
    """Raises ModelError for parameters that lie in several processes, in a way that nobody manages.

    What shards them frees, resizes and exchanges their storages, as the tensor engine does. The block engine leaves
    parameters alone; `fully_shard` has them gathered when a block runs again, as `torch.utils.checkpoint` finds them.
    """
    given = [parameter for model in models for parameter in model.parameters()]
    given += [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    flattened = any(getattr(parameter, "_fsdp_flattened", False) for parameter in given)
    parts: list[Any] = [parameter for parameter in given if is_distributed(parameter)]
    if not (flattened or parts):
        return
    sharded = any(fully_sharded(module) for model in models for module in model.modules())
    twice = any(sum(one.is_shard() for one in part.placements) > 1 for part in parts)
    if flattened or twice or not sharded:
        raise ModelError(
            "The parameters of this model are sharded over several processes by FullyShardedDataParallel, "
            "distribute_tensor or in two ways at once, which no session manages: shard it with fully_shard alone, for "
            "a method of the block engine such as method='auto', or replicate it with DistributedDataParallel."
        )
    if not by_block:
        raise ModelError(
            "The parameters of this model are sharded over several processes by fully_shard, and methods that watch "
            "every op do not manage that: take one of the block engine, such as method='auto', 'mimose' or "
            "'checkpoint', and shard the model before manage()."
        )
