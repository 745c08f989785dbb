"""Steps of a training loop that says nothing of them: where each begins and ends is found from outside.

NOTE [Where a step begins and ends].

 1. A step begins with the first forward, under gradients and in training mode, of a model that is watched. What that
    forward is called with is the step's batch. Later forwards belong to the same step: micro-batches, second forwards.
 2. It ends when the optimizer has stepped. Of several optimizers it ends when all have, or with the next forward after
    some have, so that each part of a loop that alternates between them is a step of its own.
 3. Forwards in evaluation mode or without gradients begin nothing, and are no part of what is learned of a size. Who
    trains in evaluation mode is believed when an optimizer steps after such a forward: from then on they begin steps.
 4. A forward that raises ends its step as failed. One that was refused elsewhere, as in its backward, is ended as
    failed when the next forward begins. What else raises between forward and update leaves the step running: the
    next forward goes on with it, as plain PyTorch goes on with gradients that are there.
 5. Closing ends a running step; so does the end of all references to the models.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, Self, Unpack, final

import torch
from torch._compile import _disable_dynamo

from spillway.engines.blocks.hook import Unscripted
from spillway.errors import BudgetInfeasible, UsageError
from spillway.session import ManageOptions, Session, manage
from spillway.session.inputs import Models, Optimizers, several, unwrapped
from spillway.session.updates import Arguments, before_update, users_level

_ALONE: Final = 3
"""References to what only its frame holds: the frame's, a name, and the argument of whoever counts."""


class _Failed(Exception):
    """Stands for what the loop raised, and has dealt with since."""


@final
class _Hears(Unscripted):
    """A hook of a model. In a copy of it, by whatever means, it hears nothing."""

    def __init__(self, hears: Callable[..., None]) -> None:
        self._hears = hears

    @_disable_dynamo
    def __call__(self, *told: Any) -> None:
        self._hears(*told)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hears, (_deaf,)


def _deaf(*_: Any) -> None: ...


@final
class AutomaticSteps:
    """A session whose steps begin and end by themselves. A context manager that closes it.

    Arguments:
        model: What the loop calls: the module, or several that train together.
        optimizer: Theirs, or several. Wrappers, such as Accelerate's, are looked through.
        budget: As for `spillway.manage`.
        when_ended: Called after every step that ended well, with the session.
        options: As for `spillway.manage`: method, spill, blocks, report.

    Raises:
        UsageError, ModelError, SpillDirectoryError: As `spillway.manage`.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        budget: int | str | None,
        when_ended: Callable[[Session], None] | None = None,
        **options: Unpack[ManageOptions],
    ) -> None:
        models: list[torch.nn.Module] = several(model, torch.nn.Module)
        optimizers: list[torch.optim.Optimizer] = [unwrapped(one) for one in several(optimizer, torch.optim.Optimizer)]
        if not optimizers:
            raise UsageError("The end of a step is found by its update: give AutomaticSteps the optimizer as well.")
        self.session: Session = manage(models, optimizers, budget=budget, **options)
        """With `history`, one report per step."""
        self._when_ended = when_ended
        self._running = self._told = False
        self.closed = False
        self._trains_in_evaluation = self._evaluated = False
        self._within = id(None)
        """The number of what was being handled when a forward began, which may return None as well."""
        self._waiting = {id(one) for one in optimizers}
        """Optimizers that have not stepped in the running step."""
        self._all = frozenset(self._waiting)
        self._handles: list[Any] = []
        for one in models:
            begins, ended = _Hears(self._forward_begins), _Hears(self._forward_ended)
            self._handles.append(one.register_forward_pre_hook(begins, prepend=True, with_kwargs=True))
            self._handles.append(one.register_forward_hook(ended, always_call=True))
        for each in optimizers:
            self._handles.append(each.register_step_pre_hook(self._optimizer_begins))
            self._handles.append(each.register_step_post_hook(self._optimizer_ended))

    def close(self) -> None:
        """End a step that is running, give everything back, and watch nothing any more. Calling it again is fine."""
        self.__exit__(None, None, None)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            with contextlib.suppress(Exception):  # such as of a constructor that failed, or in another thread
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.closed, self._running = True, False
        while self._handles:
            self._handles.pop().remove()
        self.session.__exit__(kind, error, trace)

    # ------------------------------------------------------------------ heard of torch

    def _forward_begins(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.closed or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._within = id(sys.exception())
        if not (_trains(model) or self._trains_in_evaluation):
            self._evaluated = True
            return
        if self._running and (self._waiting != self._all or self._was_refused()):
            self._end(failed=self._was_refused())
        if self._running:
            self.session.micro_batch((*args, kwargs))
            return
        self._waiting = set(self._all)
        self.session.begin((*args, kwargs))
        self._running = True
        self.session._call_began(model, args, kwargs)

    def _forward_ended(self, model: torch.nn.Module, args: tuple[Any, ...], result: Any) -> None:
        error = sys.exception()
        if self._running and error is not None and result is None and id(error) != self._within:
            self._end(failed=True)

    def _optimizer_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        return before_update(functools.partial(self._update_begins, optimizer), args, kwargs)

    def _update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._running:
            return
        if self._evaluated:
            self._trains_in_evaluation = True
        elif not self._told:
            self._told = True
            warnings.warn(
                f"{type(optimizer).__name__}.step() ran, and no forward of the model in training mode came before it: "
                f"nothing was kept under the budget. Call the module itself, model(batch), not its forward or a part "
                f"of it.",
                stacklevel=users_level(),
            )

    def _optimizer_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._evaluated = False
        self._waiting.discard(id(optimizer))
        if self._running and not self._waiting:
            self._end()

    # ------------------------------------------------------------------ the step

    def _was_refused(self) -> bool:
        step = self.session._running
        return step is not None and step.refused is not None

    def _end(self, *, failed: bool = False) -> None:
        self._running = False
        if failed and (error := sys.exception()) is not None:
            end_failed(self.session, error)
        elif failed:
            try:
                raise _Failed
            except _Failed as stand_in:
                end_failed(self.session, stand_in)
        else:
            self.session.end()
            if self._when_ended is not None:
                self._when_ended(self.session)


def _trains(model: torch.nn.Module) -> bool:
    """Of a wrapper, such as DistributedDataParallel, the mode of the module within counts: some set that alone."""
    return model.training or bool(getattr(getattr(model, "module", None), "training", False))


def callers(frame: FrameType | None) -> Iterator[Any]:
    """Whose methods are running, from there on outwards."""
    while frame is not None:
        there = frame.f_locals
        caller = there.get("self")
        # Before Python 3.13 that is a copy, which would hold a function's first batch for as long as the function runs;
        # of one that has called locals() it is what that has returned.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(there) is dict and sys.getrefcount(there) <= _ALONE:
            there.clear()
        yield caller
        frame = frame.f_back


def end_failed(session: Session, error: BaseException) -> None:
    """End a step of which `error` is being handled. A refusal says then which budget works: only now it is known."""
    try:
        session.end()
    except BudgetInfeasible as told:
        if isinstance(error, BudgetInfeasible):
            error.args = told.args
            vars(error).update(vars(told))
    except Exception as fault:
        error.add_note(f"Ending the step failed as well: {type(fault).__name__}: {fault}")
