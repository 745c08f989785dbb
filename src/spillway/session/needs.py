"""What the rest of a step will need, told on tensors without content: a forward and backward in which every block is
recomputed, and the step of an optimizer."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, cast, final

import numpy
import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from spillway.engines.blocks.containers import rebuilt
from spillway.units import Bytes


class Needs(NamedTuple):
    """Of the next step of some optimizers, beside parameters and gradients."""

    state: Bytes
    """That it adds."""
    working: Bytes
    """Temporaries, at most at once."""


NOTHING: Final = Needs(0, 0)


def needs_of(optimizers: Sequence[torch.optim.Optimizer]) -> Needs:
    """Of several optimizers that step one after the other; nothing of one that does not run on such tensors."""
    found = [_needs(one) for one in optimizers]
    return Needs(sum(one.state for one in found), max((one.working for one in found), default=0))


def _needs(optimizer: torch.optim.Optimizer) -> Needs:
    total = NOTHING
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        trained = [one for one in group["params"] if one.requires_grad]
        fresh = [one for one in trained if not optimizer.state.get(one)]
        together = bool(group.get("foreach") or group.get("fused"))
        pieces = [trained] if together else list({(one.shape, one.dtype): [one] for one in trained}.values())
        try:
            measured = [_measured(type(optimizer), piece, options) for piece in pieces if piece]
        except Exception:  # an optimizer of somebody's own, with other arguments or ops without shapes
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
    with warnings.catch_warnings(), FakeTensorMode(), torch.enable_grad():
        warnings.simplefilter("ignore")
        fakes = [torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype)) for one in parameters]
        for fake in fakes:
            fake.grad = torch.empty(fake.shape, dtype=fake.dtype)
        optimizer = cast(Any, kind)([{**options, "params": fakes}])
        live = _Live()
        with live:
            optimizer.step()
            state = live.now()
            live.peak = 0
            optimizer.step()
        return Needs(state, max(live.peak - state, 0))


def recomputing(
    model: torch.nn.Module, blocks: Sequence[str], called: tuple[Any, dict[str, Any]], missing: Collection[str]
) -> Bytes | None:
    """Of a forward and backward in which every block is recomputed, the most bytes above what is there when it begins.

    Args:
        model: A copy of it runs, without the user's hooks.
        blocks: Names of its blocks.
        called: What its forward is called with; of tensors only shape, strides, dtype and device count.
        missing: Names of parameters that have no gradient yet.

    None where the model does not run on tensors without content.
    """
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            with FakeCopyMode(fake):
                twin = copy.deepcopy(model)
            for module in twin.modules():
                for name, hooks in vars(module).items():
                    if name.endswith("_hooks") and isinstance(hooks, dict):
                        hooks.clear()
            for name in blocks:
                block = twin.get_submodule(name)
                again = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
                block.forward = again
            with fake:
                for name, parameter in twin.named_parameters():
                    parameter.grad = None if name in missing else torch.empty_like(parameter)
                args, kwargs = rebuilt(called, _empty)
                live = _Live()
                with live:
                    cast(Any, _loss(twin(*args, **kwargs))).backward()
        return live.peak
    except Exception:  # whatever the model does with tensors that have no content
        return None
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def _loss(out: Any) -> torch.Tensor:
    """Its own, or one that needs what the usual ones do: twice the result that is kept, and a gradient of its size."""
    if isinstance(out, dict) and isinstance(out.get("loss"), torch.Tensor):
        own: torch.Tensor = out["loss"]
        return own
    results = [one for one in tree_leaves(dict(out) if isinstance(out, dict) else out) if isinstance(one, torch.Tensor)]
    return torch.stack([one.float().square().mean() for one in results if one.requires_grad]).sum()


@final
class _Live(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    """Bytes of the storages that were made in it and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak: Bytes = 0
        self._made: dict[int, tuple[Any, Bytes]] = {}

    def now(self) -> Bytes:
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given:
                storage = one.untyped_storage()
                self._made[storage._cdata] = cast(Any, StorageWeakRef)(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result
