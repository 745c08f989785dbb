"""Lightning's `Trainer` under a memory budget.

    trainer = Trainer(..., callbacks=[SpillwayCallback("8GiB")])
    trainer.fit(module, loader)

NOTE [What is managed]. A step is from the beginning of a batch to the end of the batch in which an optimizer stepped:
with `accumulate_grad_batches`, and where manual optimization accumulates, several batches. Which module is managed is
seen in the first batch of a fit: the outermost one that `training_step` calls. If it holds all that the optimizers
update, as `self` or `self.net` do, methods of the block engine find their blocks in it, and the session opens with that
call. If `training_step` calls parts one by one, the whole module is managed by a method of the tensor engine.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any, Unpack, final

import torch

from spillway.engines.blocks.hook import Hook
from spillway.errors import UsageError
from spillway.integrations.automatic_steps import end_failed
from spillway.methods import LRU, resolve
from spillway.methods.by_block import AbstractBlockMethod
from spillway.report.figures import scalars
from spillway.session import BlockOptions, ManageOptions, Session, check_arguments, manage
from spillway.session.inputs import unwrapped
from spillway.session.updates import Arguments, update_in_parts, users_level
from spillway.units import Bytes

if TYPE_CHECKING or "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:  # the same under its older name, in classes of its own
    from pytorch_lightning import Callback, LightningModule, Trainer

_BLOCKS = BlockOptions()


@final
class SpillwayCallback(Callback):
    """Trains what `Trainer.fit` trains under a memory budget; see `spillway.manage`.

    The budget is kept in every optimizer step, with all its batches, in automatic and in manual optimization.
    Validation and checkpoints run as they do without Spillway, as do `validate`, `test` and `predict`. Each `fit` is a
    session of its own, which ends with it, whatever it raises.

    After every step four figures are logged, as `LightningModule.log` does: `spillway_peak_bytes`,
    `spillway_budget_bytes`, and the time that `spillway_stall_seconds` and `spillway_recompute_seconds` added, waiting
    for copies and recomputing.

    Arguments:
        budget: As for `manage`.
        options: As for `manage`: method, spill, blocks, report. The method "auto" plans the module's layers together,
            and watches every op where it has none.

    Raises:
        UsageError: For a budget or an option that makes no sense. `fit` raises it as `manage` does, and for a method of
            the block engine where `training_step` calls no module that holds all parameters that are trained.
        BudgetInfeasible: `fit` raises it for a step that cannot run under the budget.
    """

    memory: Session | None = None
    """The session of the last `fit`: its `history`, and `report("run.html")` for a page about it."""
    bypassed = True
    """A compiler may leave out what waits for a first call."""

    def __init__(self, budget: int | str | None, **options: Unpack[ManageOptions]) -> None:
        check_arguments(budget, **options)
        self._manage = functools.partial(manage, budget=budget, **options)
        self._method, self._blocks = options.get("method", "auto"), options.get("blocks", _BLOCKS)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._handles: list[Any] = []
        self._looking: list[Hook] = []
        """What waits for the first call of a module, in front of all of them."""
        self._batch: Any = None
        self._stepped = self._in_step = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the first forward."""
        self._stop()
        self.memory = None
        self._optimizers = [unwrapped(one) for one in trainer.optimizers]
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._optimizer_begins))
            self._handles.append(optimizer.register_step_post_hook(self._optimizer_ended))
        for module in pl_module.modules():
            if any(one.requires_grad for one in module.parameters()):
                self._looking.append(Hook(module, functools.partial(self._called, pl_module, module), self))
        for hook in self._looking:
            hook.install()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A step begins, or goes on with another batch."""
        self._batch = batch
        if self.memory is None:
            if self._stepped and not self._in_step:  # and no module was called
                self._open(pl_module, pl_module, whole=False)
            else:
                return
        assert self.memory is not None
        if self._in_step:
            self.memory.micro_batch(batch)
        else:
            self.memory.begin(batch)
            self._in_step, self._stepped = True, False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step ends, if an optimizer has stepped."""
        self._batch = None
        if not (self._in_step and self._stepped and self.memory is not None):
            return
        self._in_step = False
        self.memory.end()
        for name, value in scalars(self.memory.history[-1:]).items():
            pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The session ends with the fit."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """And with what it raises. A refusal says then which budget works, which is known when its step has ended."""
        if self._in_step and self.memory is not None:
            end_failed(self.memory, exception)
        self._stop(exception)

    def _stop(self, error: BaseException | None = None) -> None:
        while self._looking:
            self._looking.pop().remove()
        while self._handles:
            self._handles.pop().remove()
        self._stepped = self._in_step = False
        self._batch = None
        if self.memory is not None:
            self.memory.__exit__(type(error) if error is not None else None, error, None)

    # ------------------------------------------------------------------ the first batch

    def _called(self, pl_module: LightningModule, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of a module's forward, until the first one under gradients of a batch."""
        for hook in self._looking:
            if hook.module is module:
                forward = hook.original
        if self._batch is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        while self._looking:
            self._looking.pop().remove()
        holds = {id(one) for one in module.parameters()}
        updated = [one for each in self._optimizers for group in each.param_groups for one in group["params"]]
        self._open(pl_module, module, whole=all(id(one) in holds for one in updated))
        assert self.memory is not None
        self.memory.begin(self._batch)
        self._in_step, self._stepped = True, False
        self.memory._call_began(module, args, kwargs)
        return module.forward(*args, **kwargs)  # where a session may stand in front of it by now

    def _open(self, pl_module: LightningModule, module: torch.nn.Module, *, whole: bool) -> None:
        method, blocks = resolve(self._method), self._blocks
        if isinstance(method, AbstractBlockMethod) and not whole:
            if method.needs_blocks or blocks != _BLOCKS:
                raise UsageError(
                    f"{method.name!r} finds its blocks in one module that is called and holds all that is trained, and "
                    f"the training_step of {type(pl_module).__name__} calls {type(module).__name__} first, which does "
                    f"not: put its parts into the forward of one module and call that, or take method='delta'."
                )
            method = LRU()
        managed = module if whole else pl_module
        self.memory = self._manage(managed, self._optimizers, method=method, blocks=blocks)

    # ------------------------------------------------------------------ heard of optimizers

    def _optimizer_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """The first batch runs in the closure, and with it the session opens too late to be told of this update."""
        if self.memory is not None:
            return None
        return update_in_parts(optimizer, functools.partial(self._update_begins, optimizer), args, kwargs)

    def _update_begins(self, optimizer: torch.optim.Optimizer, at_once: bool) -> Bytes | None:
        return None if self.memory is None else self.memory._update_begins(optimizer, at_once)

    def _optimizer_ended(self, *_: Any) -> None:
        self._stepped = True
        if self.memory is None:
            warnings.warn(
                "An optimizer stepped, and training_step has called no module: nothing was kept under the budget in "
                "this batch. In those that follow every op is watched.",
                stacklevel=users_level(),
            )
