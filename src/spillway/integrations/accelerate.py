"""Loops of Hugging Face Accelerate under a memory budget.

    from spillway.integrations.accelerate import prepare
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, budget="8GiB")

The rest of the loop stays as it is. A step is what comes between two updates of the optimizer: with
`accelerator.accumulate(model)` all micro-batches of an update, since Accelerate's optimizer steps for real only with
the last. Where steps begin and end is found by `AutomaticSteps`, as its note says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Unpack

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from spillway.errors import UsageError
from spillway.integrations.automatic_steps import AutomaticSteps
from spillway.session import ManageOptions, check_arguments

_ENDS: Final = ("end_training", "free_memory")
"""Methods of an accelerator after which what it has prepared trains no more."""


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    budget: int | str | None,
    device_placement: list[bool] | None = None,
    **options: Unpack[ManageOptions],
) -> Any:
    """What `accelerator.prepare(*objects)` returns, trained under a memory budget from here on.

    The session closes with `accelerator.end_training()`, `free_memory()` or `clear()`, or when nobody holds the model
    any more. Before that it stands in `accelerator.spillway`: `with accelerator.spillway: ...` closes it whatever the
    loop raises, `accelerator.spillway.session.history` has a report per step, and `.session.report("run.html")`
    writes a page. Evaluation and `save_state` run as they do without a session.

    Arguments:
        accelerator: Prepares the objects.
        objects: In the order in which they come back; the model and its optimizer have to be among them. Several models
            train in one session where the method allows it, as those of the tensor engine do.
        budget: As for `spillway.manage`.
        device_placement: As for `accelerator.prepare`.
        options: As for `spillway.manage`: method, spill, blocks, report. A batch is a tuple of what the model is called
            with, keyword arguments last.

    Raises:
        UsageError: No model and optimizer that belong together are among the objects, or the accelerator's last session
            is open; and as `spillway.manage` does.
        ModelError, SpillDirectoryError: As `spillway.manage`.
    """
    there = vars(accelerator).get("spillway")
    if isinstance(there, AutomaticSteps) and not there.closed:
        raise UsageError(
            "This accelerator trains under a budget already, and steps of two sessions do not nest: prepare all models "
            "and optimizers in one call, or call accelerator.free_memory() before the next training."
        )
    # What makes no sense is refused before the accelerator has anything in its hands.
    check_arguments(budget, **options)
    _trained_among(objects)
    prepared = accelerator.prepare(*objects, device_placement=device_placement)
    models, optimizers = _trained_among(prepared if isinstance(prepared, tuple) else (prepared,))
    steps = AutomaticSteps(models, optimizers, budget=budget, **options)
    accelerator.spillway = steps
    for name in _ENDS:
        if not isinstance(vars(accelerator).get(name), functools.partial):
            setattr(accelerator, name, functools.partial(_end, accelerator, getattr(accelerator, name)))
    return prepared


def _trained_among(objects: Sequence[Any]) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """The models that an optimizer among them updates, and all optimizers. Raises UsageError without one."""
    optimizers = [one for one in objects if isinstance(one, torch.optim.Optimizer)]
    updated = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    modules = [one for one in objects if isinstance(one, torch.nn.Module)]
    models = [one for one in modules if any(id(p) in updated for p in one.parameters())]
    if not models:
        raise UsageError(
            f"prepare() needs a model and the optimizer that updates it among what it prepares, and found "
            f"{len(modules)} models and {len(optimizers)} optimizers: prepare(accelerator, model, optimizer, loader, "
            f"budget=...)."
        )
    return models, optimizers


def _end(accelerator: Accelerator, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    accelerator.spillway.close()
    return method(*args, **kwargs)
