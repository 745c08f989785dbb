"""The blocks of a model, found in a forward that its user makes: it runs once more, before, and is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from spillway.engines.blocks.containers import CannotCopyError, FrozenTensor, freeze, thaw
from spillway.engines.blocks.discovery import BackwardInside, Watch, blocks_of
from spillway.engines.blocks.environment import Environment
from spillway.engines.blocks.module_state import ModuleState
from spillway.errors import NoBlocksError


def find_blocks(
    model: nn.Module,
    forward: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    environment: Environment,
) -> list[str]:
    """Names of the blocks that this call of the model's forward has.

    The forward runs under gradients, on copies of its arguments, and what autograd saves in it is let go at once, so
    that it needs little memory. Random streams, and buffers and attributes of modules, are afterwards as they were;
    what the forward changes elsewhere it changes once more, and hooks on modules inside are called once more.

    Raises:
        NoBlocksError: The model has no blocks, or its arguments cannot be copied.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    try:
        frozen = freeze((args, kwargs), lambda tensor: FrozenTensor(tensor, copies))
    except CannotCopyError as error:
        reason = f"they cannot be looked for in a forward that runs once more, because {error}"
        raise NoBlocksError(
            f"The blocks of {type(model).__name__} cannot be found in a forward that runs once more, because {error}: "
            f"name them with blocks=[...].",
            reason=reason,
        ) from error
    args, kwargs = thaw(frozen)
    watch = Watch(model, keeps=False)
    try:
        _run(model, forward, args, kwargs, environment, watch)
    except BackwardInside:
        watch = Watch(model)
        args, kwargs = thaw(frozen)
        _run(model, forward, args, kwargs, environment, watch)
    return blocks_of(model, watch)


def _run(
    model: nn.Module,
    forward: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    environment: Environment,
    watch: Watch,
) -> None:
    state = ModuleState(model)
    captured, snapshot = environment.capture(), state.snapshot()
    with environment(captured), state.as_of(snapshot), _attributes(model), torch.enable_grad(), watch.watching():
        forward(*args, **kwargs)


@contextlib.contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    """What modules have in their `__dict__` is afterwards what it was."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
