"""The blocks of a model, found in a forward that its user makes: it runs once more, before, and is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from spillway.engines.blocks.aside import aside
from spillway.engines.blocks.discovery import BackwardInside, Watch, blocks_of
from spillway.engines.blocks.environment import Environment
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.errors import NoBlocksError


def find_blocks(
    model: nn.Module,
    forward: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    environment: Environment,
) -> list[str]:
    """Names of the blocks that this call of the model's forward has.

    The forward runs under gradients, and what autograd saves in it is let go at once, so that it needs little memory.
    Afterwards all is as it was before (`aside`).

    Raises:
        NoBlocksError: The model has no blocks, or its arguments cannot be copied.
    """

    def watched(*, keeps: bool) -> Watch:
        watch = Watch(model, keeps=keeps)
        with aside(environment, (model,), args, kwargs) as (given, named), watch.watching():
            forward(*given, **named)
        return watch

    try:
        watch = watched(keeps=False)
    except BackwardInside:
        watch = watched(keeps=True)
    except CannotCopyError as error:
        reason = f"they cannot be looked for in a forward that runs once more, because {error}"
        raise NoBlocksError(
            f"The blocks of {type(model).__name__} cannot be found in a forward that runs once more, because {error}: "
            f"name them with blocks=[...].",
            reason=reason,
        ) from error
    return blocks_of(model, watch)
