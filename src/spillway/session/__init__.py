"""`manage()`: a model trained step by step under a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch

from spillway.budgets import parse_budget
from spillway.engines.tensors.devices import allowed_bytes, device_of, engine_for, pinned_bytes
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import BudgetError, UsageError
from spillway.internals.private import fully_sharded
from spillway.ir import RunWriter
from spillway.memory.budget import UNLIMITED
from spillway.methods import METHODS, AbstractPlanner, AbstractPolicy, resolve
from spillway.methods.by_block import AbstractBlockMethod
from spillway.session.abstract_session import Session, header
from spillway.session.auto_session import AutoSession
from spillway.session.block_session import BlockSession
from spillway.session.inputs import Models, Optimizers, check_models, modules_of, several, unwrapped
from spillway.session.options import BlockOptions, ManageOptions, ReportOptions, SpillOptions
from spillway.session.planned_steps import watching
from spillway.session.tensor_session import TensorSession, tensor_header
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.report.live import LiveLine, LiveView


_Told = Callable[[TensorEngine], RunWriter | None]
"""From an engine to what writes its run file."""
_SPILL, _BLOCKS, _REPORT = SpillOptions(), BlockOptions(), ReportOptions()


def manage(
    model: Models,
    optimizer: Optimizers = None,
    *,
    budget: int | str | None,
    method: str | AbstractPolicy | AbstractPlanner | AbstractBlockMethod = "auto",
    spill: SpillOptions = _SPILL,
    blocks: BlockOptions = _BLOCKS,
    report: ReportOptions = _REPORT,
) -> Session:
    """Train `model` under a memory budget, bit-identically to plain PyTorch unless `blocks` allows another way.

    Arguments:
        model: The module, or several that train together. Nothing about them is changed.
        optimizer: Theirs, or several; used to know their state's storages.
        budget: Bytes, "6GiB", or a share of the memory of the model's device, "80%". It covers every storage that the
            step touches: parameters, gradients, optimizer state, inputs, activations; on CUDA also what the allocator
            hands out to anybody else in the process. None only keeps account. `Session.budget` names another, later.
        method: How to decide what leaves: a name of `spillway.methods.METHODS`, or an object (of a block engine's
            method its options count). "auto" plans for every size of the input what is kept, recomputed or offloaded
            block by block, and leaves models without blocks to "lru". Policies, such as "lru" and "delta", run on the
            tensor engine, which watches every op; so do planners, such as "window": a step of each size is recorded,
            and those after it follow the plan. "auto", "mimose", "mimose-published" and "checkpoint" run on the block
            engine, which costs nothing per op.
        spill: Where bytes wait that have left.
        blocks: What a method of the block engine is told of the model.
        report: What is told of the run.

    Raises:
        UsageError: Something given makes no sense; the message says what would.
        SpillDirectoryError: The spill directory cannot be used.
    """
    _check_options(spill=spill, blocks=blocks, report=report)
    models: list[torch.nn.Module] = several(model, torch.nn.Module)
    optimizers: list[torch.optim.Optimizer] = [unwrapped(one) for one in several(optimizer, torch.optim.Optimizer)]
    decides = resolve(method)
    check_models(models, optimizers, by_block=isinstance(decides, AbstractBlockMethod))
    device = device_of(models)
    if not isinstance(decides, AbstractBlockMethod):
        if blocks != _BLOCKS:
            names = ", ".join(name for name, one in METHODS.items() if one.by_block is not None)
            raise UsageError(
                f"blocks= is for methods of the block engine, {names}; {method!r} watches every op and needs nothing "
                f"of it."
            )
    elif decides.needs_blocks:
        _check_action(decides, spill.host_budget, lossy=blocks.lossy)
    pinned, allowed = pinned_bytes(device, spill.host_budget), allowed_bytes(device, budget)
    session: Session
    sharded = any(map(fully_sharded, modules_of(models)))  # and none of the tensor engine's
    pages = isinstance(decides, AbstractBlockMethod) and not decides.needs_blocks and not sharded
    falls_back = pages and blocks.names is None

    def opened(
        decides: AbstractPolicy, told: _Told, allowed: Bytes, engine: TensorEngine | None = None
    ) -> TensorSession:  # fmt: skip
        where: dict[str, Any] = {"pinned": pinned, "spill_directory": spill.directory, "spill_io": spill.io}
        opens: Callable[[Bytes], TensorEngine] = functools.partial(engine_for, device, decides, **where)
        engine = opens(allowed) if engine is None else engine
        undo.callback(engine.close)
        return TensorSession(
            models, optimizers, engine, told(engine), live, opens=opens, keep_timeline=report.timeline,
            return_freed=spill.return_freed,
        )  # fmt: skip

    with contextlib.ExitStack() as undo:
        live = _live(report.live)
        if isinstance(decides, AbstractBlockMethod):
            writer = _writer(report, header(allowed, decides.name, device) | decides.in_header(), undo)
            by_block = functools.partial(
                BlockSession, models, optimizers, writer, live, method=decides, traces=report.timeline, pinned=pinned,
                spill=spill, blocks=dataclasses.replace(blocks, page=pages or (blocks.page and not sharded)),
            )  # fmt: skip
            storages = functools.partial(opened, watching(), lambda _: writer)
            session = cast(Session, AutoSession(by_block, storages, allowed)) if falls_back else by_block(allowed)
        else:
            told = functools.partial(tensor_header, allowed, return_freed=spill.return_freed)
            session = opened(decides, lambda engine: _writer(report, told(engine), undo), allowed)
        undo.callback(session.close)
        session._meet_ranks()
        undo.pop_all()
    return session


def check_arguments(budget: int | str | None, **options: Unpack[ManageOptions]) -> None:
    """Refuse at once what `manage` would refuse later, whatever the model is.

    Raises:
        TypeError: There is no such option.
        UsageError: As `manage`.
    """
    inspect.signature(manage).bind_partial(budget=budget, **options)
    resolve(options.get("method", "auto"))
    _check_options(**{name: given for name, given in options.items() if name != "method"})
    if budget is not None:
        parse_budget(budget, UNLIMITED)


def _writer(report: ReportOptions, first: dict[str, Any], undo: contextlib.ExitStack) -> RunWriter | None:
    if report.run_file is None:
        return None
    try:
        writer = RunWriter(report.run_file, first)
    except OSError as error:
        raise UsageError(f"The run file {os.fspath(report.run_file)} cannot be written: {error.strerror}.") from error
    undo.callback(writer.close)
    return writer


def _check_options(**given: object) -> None:
    kinds = {"spill": SpillOptions, "blocks": BlockOptions, "report": ReportOptions}
    for name, options in given.items():
        if not isinstance(options, kinds[name]):
            fields = ", ".join(f"{one.name}=" for one in dataclasses.fields(kinds[name]))
            raise UsageError(
                f"{name}= takes spillway.{kinds[name].__name__}(...), with {fields}; got {type(options).__name__}."
            )


def _check_action(method: AbstractBlockMethod, host_budget: int | str | None, *, lossy: bool) -> None:
    action = method.action
    if host_budget is not None and not action.moves:
        raise BudgetError(
            f"SpillOptions(host_budget=...) is for what is moved to the host, and {method.name!r}, which is to "
            f"{action.value}, moves nothing."
        )
    if action.lossy and not lossy:
        raise UsageError(
            f"{method.name!r} is to {action.value} ({action}), in {method.action_options[action].bits} bits an "
            f"element, so that gradients are other than plain PyTorch's; allow that with "
            f"blocks=BlockOptions(lossy=True), or choose another action."
        )


def _live(wanted: bool) -> LiveLine | LiveView | None:
    if not wanted:
        return None
    from spillway.report.live import shown  # and a terminal's library, which nobody else needs

    return shown()


__all__ = [
    "BlockOptions",
    "BlockSession",
    "ManageOptions",
    "ReportOptions",
    "Session",
    "SpillOptions",
    "TensorSession",
    "check_arguments",
    "manage",
]
