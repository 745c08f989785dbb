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
 5. `on_epoch_begin` of all callbacks: the session opens before the first, since what another callback raises in
    `on_train_begin` is not told to anybody.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Unpack, final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spillway.errors import UsageError
from spillway.integrations.automatic_steps import callers
from spillway.report.figures import scalars
from spillway.session import ManageOptions, Session, check_arguments, manage
from spillway.units import format_bytes, format_seconds

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
        options: As for `manage`: method, spill, blocks, report. The method "auto" plans the model's layers together,
            and watches every op where it has none. For `blocks` a batch is a micro-batch.

    Raises:
        UsageError: For a budget or an option that makes no sense. `train()` raises it as `manage` does, and for a
            version of transformers that cannot be followed.
        BudgetInfeasible: `train()` raises it for a step that cannot run under the budget.
    """

    memory: Session | None = None
    """The session of the last `train()`: its `history`, and `report("run.html")` for a page about it."""

    def __init__(self, budget: int | str | None, **options: Unpack[ManageOptions]) -> None:
        check_arguments(budget, **options)
        self._manage = functools.partial(manage, budget=budget, **options)
        self._batches: Sequence[Any] = ()
        self._told = 0
        """Steps that the trainer's records have told of."""
        self._in_step = False
        self._undo = contextlib.ExitStack()
        """Takes away what stands in front of a trainer's methods."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the first epoch: of a callback that fails here nobody is told, and a session would stay open."""
        self._stop()
        self.memory = None
        trainer = self._caller()
        self._in_front(trainer.callback_handler, "on_epoch_begin", functools.partial(self._epoch_begins, trainer))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The micro-batches are there, and nothing has run."""
        if self.memory is not None:
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

    def _in_front(self, of: Any, name: str, function: Callable[..., Any]) -> None:
        """Have `function` called in place of a method, with that as its first argument, until the session ends."""
        own = vars(of).get(name)  # somebody else may have put it there
        setattr(of, name, functools.partial(function, getattr(of, name)))
        if own is None:
            self._undo.callback(vars(of).pop, name, None)
        else:
            self._undo.callback(setattr, of, name, own)

    def _epoch_begins(self, trainer: Trainer, begins: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See (5)."""
        if self.memory is None:
            self.memory = self._manage(trainer.model_wrapped, trainer.optimizer)
            self._told = 0
            for name in _GUARDED:
                self._in_front(trainer, name, self._guard)
            self._in_front(trainer, "get_batch_samples", self._fetch)
            self._in_front(trainer, "training_step", self._go_on)
            self._in_front(trainer, "log", self._log)
        return self._guard(begins, *args, **kwargs)

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
        try:
            self._end_step()
        finally:
            self._batches = ()
            self._undo.close()
            if self.memory is not None:
                self.memory.__exit__(*sys.exc_info())
