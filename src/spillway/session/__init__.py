"""`manage()`: a model trained step by step under a budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from spillway.engines.blocks.environment import Generator
from spillway.engines.tensors.devices import allowed_bytes, device_of, engine_for, pinned_bytes
from spillway.errors import BudgetError, UsageError
from spillway.ir import RunWriter
from spillway.methods import BLOCK_METHODS, AbstractPolicy, resolve
from spillway.methods.by_block import AbstractBlockMethod
from spillway.session.abstract_session import Session, header
from spillway.session.block_session import BlockSession
from spillway.session.inputs import Models, Optimizers, check_models, several, unwrapped
from spillway.session.tensor_session import TensorSession, tensor_header
from spillway.tiers.spill_file import SpillIO

if TYPE_CHECKING:
    from spillway.report.live import LiveLine


def manage(
    model: Models,
    optimizer: Optimizers = None,
    *,
    budget: int | str | None,
    method: str | AbstractPolicy | AbstractBlockMethod = "lru",
    host_budget: int | str | None = None,
    spill_directory: str | os.PathLike[str] | None = None,
    spill_io: SpillIO = "buffered",
    return_freed: bool = True,
    run_file: str | os.PathLike[str] | None = None,
    timeline: bool = False,
    live: bool = False,
    blocks: Sequence[str] | None = None,
    size: Callable[[Any], int | Sequence[int]] | None = None,
    generators: Iterable[Generator] = (),
    lossy: bool = False,
) -> Session:
    """Train `model` under a memory budget, bit-identically to plain PyTorch unless `lossy` allows another way.

    Arguments:
        model: The module, or several that train together. Nothing about them is changed.
        optimizer: Theirs, or several; used to know their state's storages.
        budget: Bytes, "6GiB", or a share of the memory of the model's device, "80%". It covers every storage that the
            step touches: parameters, gradients, optimizer state, inputs, activations; on CUDA also what the allocator
            hands out to anybody else in the process. None only keeps account.
        method: How to decide what leaves: a name or an object (of a block engine's method its options count).
            Policies, such as "lru" and "delta", run on the tensor engine, which watches every op; "mimose",
            "mimose-published" and "checkpoint" on the block engine, which recomputes blocks and costs nothing per op.
        host_budget: For models on CUDA: the most host memory that is pinned for what leaves the device, in bytes or as
            a share of the memory that this process may use, that is of RAM or of what a control group allows of it;
            half of that by default.
        spill_directory: Where the spill file goes, the system's temporary directory by default. It needs room for what
            leaves; the file has no name and is gone with the process.
        spill_io: "direct" writes and reads past the system's page cache where the file system can (O_DIRECT), so that
            spilled bytes do not take its place; "buffered" is faster as long as there is memory for the cache.
        return_freed: Return freed memory to the system when the process's resident set is about to pass the budget
            by 5 %. False leaves it to the allocator: steps under pressure are faster, and the process may take twice
            the budget and more, because the allocator keeps what it cannot reuse.
        run_file: JSON lines with the figures of every step.
        timeline: Keep the memory timeline of the step in which most bytes left and came back, for `Session.report`.
            The block engine has no timelines; it measures the peak of every step then, and not only of those of which
            something is to be learned.
        live: Show one line in the terminal while training.
        blocks: For the block engine: names of the modules that are its blocks. Found in the first step if left out.
        size: For the block engine: gives the size of a batch, a whole number or several. By default it is read from the
            shapes: the dimensions that differ between batches.
        generators: For the block engine: random streams that the model draws from, beside the global ones and those
            that are attributes of its modules.
        lossy: Allow methods that quantize what the backward reads, such as `Checkpoint(Action.COMPRESS)`: their losses
            and gradients are other than plain PyTorch's. Nothing else quantizes because of it.

    Raises:
        UsageError: Something given makes no sense; the message says what would.
        SpillDirectoryError: The spill directory cannot be used.
    """
    models: list[torch.nn.Module] = several(model, torch.nn.Module)
    optimizers: list[torch.optim.Optimizer] = [unwrapped(one) for one in several(optimizer, torch.optim.Optimizer)]
    check_models(models, optimizers)
    decides = resolve(method)
    if isinstance(decides, AbstractBlockMethod):
        _check_action(decides, host_budget, lossy=lossy)
        device = device_of(models)
        pinned, allowed = pinned_bytes(device, host_budget), allowed_bytes(device, budget)
        first = header(allowed, decides.name, device) | decides.in_header()
        writer = None if run_file is None else RunWriter(run_file, first)
        try:
            return BlockSession(
                models, optimizers, writer, _live(allowed, live), blocks=blocks, method=decides, allowed=allowed,
                size_of=size, generators=generators, spill_directory=spill_directory, spill_io=spill_io,
                traces=timeline, pinned=pinned, return_freed=return_freed, lossy=lossy,
            )  # fmt: skip
        except BaseException:
            if writer is not None:
                writer.close()
            raise
    if blocks is not None or size is not None or tuple(generators):
        raise UsageError(
            f"blocks=, size= and generators= are for methods of the block engine, {', '.join(BLOCK_METHODS)}; "
            f"{method!r} watches every op and needs none of them."
        )
    engine = engine_for(device_of(models), decides, budget, host_budget, spill_directory, spill_io)
    allowed = engine.controller.budget.allowed
    try:
        first = tensor_header(allowed, engine, return_freed=return_freed)
        writer = None if run_file is None else RunWriter(run_file, first)
        return TensorSession(
            models, optimizers, engine, writer, _live(allowed, live), keep_timeline=timeline, return_freed=return_freed
        )
    except BaseException:
        engine.close()
        raise


def _check_action(method: AbstractBlockMethod, host_budget: int | str | None, *, lossy: bool) -> None:
    action = method.action
    if host_budget is not None and not action.moves:
        raise BudgetError(
            f"host_budget= is for what is moved to the host, and {method.name!r}, which is to {action.value}, moves "
            f"nothing."
        )
    if action.lossy and not lossy:
        raise UsageError(
            f"{method.name!r} is to {action.value} ({action}), in {method.bits} bits an element, so that gradients are "
            f"other than plain PyTorch's; allow that with lossy=True, or choose another action."
        )


def _live(allowed: int, wanted: bool) -> LiveLine | None:
    if not wanted:
        return None
    from spillway.report.live import LiveLine  # and a terminal's library, which nobody else needs

    return LiveLine(allowed)


__all__ = ["BlockSession", "Session", "TensorSession", "manage"]
