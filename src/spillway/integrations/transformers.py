"""Hugging Face's `Trainer`, and what is derived from it, such as TRL's `SFTTrainer`, under a memory budget.

    trainer = Trainer(..., callbacks=[SpillwayCallback("8GiB")])
    trainer.train()

NOTE [What a callback is not told]. A step is an optimizer step: its micro-batches, their backward passes, clipping, the
update. `on_step_begin` and `on_step_end` stand around exactly that, and evaluation, checkpoints and logging come after
it. The rest of what a session needs no callback is told, so methods of the trainer, of this one object and for the
length of one `train()`, have something in front of them:

 1. Which trainer it is: the nearest caller that has this callback.
 2. `get_batch_samples`, `training_step`: the micro-batches, whose shapes are the signature of the step. They are
    fetched before `on_step_begin`, and a method of the block engine plans each by its own size.
 3. `log`: what Spillway has to say is added to the trainer's own records, since callbacks that write them to
    TensorBoard or Weights & Biases come before those of the user.
 4. `_evaluate`, `_run_epoch`, `_finalize_training`: `on_train_end` is not called after an exception or Ctrl-C; the
    session is closed all the same.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spillway.errors import UsageError
from spillway.integrations.automatic_steps import callers
from spillway.methods import AbstractPlanner, AbstractPolicy
from spillway.methods.by_block import AbstractBlockMethod
from spillway.report.figures import scalars
from spillway.session import BlockOptions, ReportOptions, Session, SpillOptions, manage
from spillway.units import format_bytes, format_seconds

_SPILL, _BLOCKS, _REPORT = SpillOptions(), BlockOptions(), ReportOptions()
_GUARDED: Final = ("_evaluate", "_run_epoch", "_finalize_training")
_LOG: Final = logging.getLogger(__name__)


@final
class SpillwayCallback(TrainerCallback):
    """Trains whatever a `Trainer` trains under a memory budget; see `spillway.manage`.

    The budget is kept in every optimizer step, with all its micro-batches. Evaluation, prediction and checkpoints run
    between steps, as they do without Spillway, and are not held to it. Each `train()` is a session of its own, which
    ends with it.

    Records that the trainer logs while it trains get four figures about the steps since the last: the highest
    `spillway_peak_bytes`, `spillway_budget_bytes`, and the time that `spillway_stall_seconds` and
    `spillway_recompute_seconds` added, waiting for copies and recomputing. The last record, and the metrics that
    `train()` returns, have them of all steps, and a line of the log (logger `spillway.integrations.transformers`, level
    INFO) says the same.

    A model with `gradient_checkpointing=True` trains on the tensor engine, under "auto" too: it recomputes its layers
    itself, so that a method of the block engine that must have blocks, such as "mimose", refuses it.

    Arguments:
        budget: As for `manage`.
        method: As for `manage`; "auto" plans the model's layers together, and watches every op where it has none.
        spill: As for `manage`.
        blocks: As for `manage`; a batch is a micro-batch.
        report: As for `manage`.

    Raises:
        UsageError: `train()` raises it, as `manage` does, and for a version of transformers that cannot be followed.
        BudgetInfeasible: `train()` raises it for a step that cannot run under the budget.
    """

    memory: Session | None = None
    """The session of the last `train()`: its `history`, and `report("run.html")` for a page about it."""

    def __init__(
        self,
        budget: int | str | None,
        *,
        method: str | AbstractPolicy | AbstractPlanner | AbstractBlockMethod = "auto",
        spill: SpillOptions = _SPILL,
        blocks: BlockOptions = _BLOCKS,
        report: ReportOptions = _REPORT,
    ) -> None:
        self._manage = functools.partial(
            manage, budget=budget, method=method, spill=spill, blocks=blocks, report=report
        )
        self._batches: Sequence[Any] = ()
        self._told = 0
        """Steps that the trainer's records have told of."""
        self._in_step = False
        self._patched: tuple[Trainer, dict[str, Any]] | None = None
        """The trainer, and what it has of its own under the names that something stands in front of."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open a session of the model and the optimizer, however the trainer has wrapped them."""
        self._stop()
        trainer = self._caller()
        self.memory = self._manage(trainer.model_wrapped, trainer.optimizer)
        self._told = 0
        in_front: dict[str, Callable[..., Any]] = dict.fromkeys(_GUARDED, self._guard)
        in_front |= {"get_batch_samples": self._fetch, "training_step": self._go_on, "log": self._log}
        self._patched = trainer, {name: vars(trainer).get(name) for name in in_front}
        for name, function in in_front.items():
            setattr(trainer, name, functools.partial(function, getattr(trainer, name)))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The micro-batches are there, and nothing has run."""
        if self.memory is not None and self._patched is not None:
            self.memory.begin(self._batches[0] if self._batches else None)
            self._in_step = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The optimizer has stepped, and gradients are gone."""
        self._end_step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the session, and say what it came to."""
        self._stop()
        if self.memory is not None and (steps := self.memory.history):
            told = scalars(steps)
            _LOG.info(
                "%d steps took at most %s%s; %s left memory; of their %s, %s were spent waiting for copies and %s "
                "recomputing.",
                len(steps), format_bytes(max(step.peak_bytes for step in steps)),
                f" of {format_bytes(self.memory.allowed)}" if "spillway_budget_bytes" in told else "",
                format_bytes(sum(step.bytes_out + step.dropped_bytes for step in steps)),
                format_seconds(sum(step.seconds for step in steps)), format_seconds(told["spillway_stall_seconds"]),
                format_seconds(told["spillway_recompute_seconds"]),
            )  # fmt: skip

    # ------------------------------------------------------------------ in front of the trainer's methods

    def _fetch(self, fetch: Callable[..., tuple[list[Any], Any]], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """See (2). A step that the end of the data has cut short is over."""
        self._end_step()
        self._batches = ()
        fetched = fetch(*args, **kwargs)
        self._batches = fetched[0]
        return fetched

    def _go_on(self, train: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See (2)."""
        if self.memory is not None and self._in_step and any(inputs is one for one in self._batches[1:]):
            self.memory.micro_batch(inputs)
        return train(model, inputs, *args, **kwargs)

    def _log(self, log: Callable[..., None], logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """See (3)."""
        assert self.memory is not None
        since, whole = self.memory.history[self._told :], "train_runtime" in logs
        if whole or ("loss" in logs and since):
            self._told += len(since)
            logs.update(scalars(self.memory.history if whole else since))
        log(logs, *args, **kwargs)

    def _guard(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See (4)."""
        try:
            result = method(*args, **kwargs)
            self._end_step()  # one that a callback has broken off
            return result
        except BaseException:
            self._stop()
            raise

    # ------------------------------------------------------------------

    def _caller(self) -> Trainer:
        """See (1)."""
        for caller in callers(sys._getframe(1)):
            if isinstance(caller, Trainer) and any(one is self for one in caller.callback_handler.callbacks):
                missing = [name for name in _GUARDED if not hasattr(caller, name)]
                if not missing:
                    return caller
                raise UsageError(
                    f"SpillwayCallback follows Trainer of transformers 5, whose {missing[0]} this version does not "
                    f"have: upgrade transformers, or put memory.step(batch) of spillway.manage around a loop of yours."
                )
        raise UsageError("SpillwayCallback is for a Trainer, in its callbacks: Trainer(..., callbacks=[...]).")

    def _end_step(self) -> None:
        if self._in_step and self.memory is not None:
            self._in_step = False
            self.memory.end()

    def _stop(self) -> None:
        """End the step and the session; what the trainer is, is its own again. Calling it again does nothing."""
        patched, self._patched = self._patched, None
        try:
            self._end_step()
        finally:
            self._batches = ()
            if patched is not None:
                trainer, own = patched
                for name, method in own.items():
                    vars(trainer).pop(name, None)
                    if method is not None:  # somebody else had put it there
                        setattr(trainer, name, method)
            if self.memory is not None:
                self.memory.__exit__(*sys.exc_info())
