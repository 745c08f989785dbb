"""Training that is found while somebody's own program runs, and put under a budget without a word changed in it.

NOTE [What is found]. Whatever trains, a loop by hand or a library's, calls a module under gradients and has an
optimizer that updates its parameters. So optimizers are noted as they are made, and calls of modules are looked at
until one of them is of a module that an optimizer updates. From there on `AutomaticSteps` finds the steps. The session
is of the module that was called and, where its optimizers update more than that, of the outermost modules that own the
rest. Another optimizer may mean another training: then the next call of a module that it updates is looked at in the
same way, and the session before is closed. Which library calls is told by who is on the stack. Lightning sends
`training_step` through the forward of DistributedDataParallel: what is managed is what that step calls, since a second
run of the wrapper would call something else.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, Self, TypeAlias, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from spillway.engines.tensors.probe import smallest_budget
from spillway.errors import BudgetInfeasible, UsageError
from spillway.integrations.automatic_steps import AutomaticSteps, callers
from spillway.ir import StepReport
from spillway.session import Session, TensorSession
from spillway.session.called import Calls
from spillway.units import Bytes

Trainer: TypeAlias = Literal["transformers.Trainer", "lightning.Trainer", "Accelerate", "a loop"]

_TRAINERS: Final[dict[tuple[str, str], Trainer]] = {
    ("transformers", "Trainer"): "transformers.Trainer",
    ("lightning", "Trainer"): "lightning.Trainer",
    ("pytorch_lightning", "Trainer"): "lightning.Trainer",
}


@final
class FoundTraining:
    """While this context manager is open, whatever trains in this process is kept under a budget.

    Arguments:
        when_ended: Called after every step that ended well, and was not the first of its training.
        options: As for `spillway.manage`: budget, method, spill, blocks, report.
    """

    def __init__(self, when_ended: Callable[[FoundTraining], None], **options: Any) -> None:
        self.reports: list[StepReport] = []
        self.trainer: Trainer | None = None
        """What calls the model; None before anything was found."""
        self.updates = 0
        """Of optimizers, those of no session included."""
        self.session: Session | None = None
        """The latest."""
        self._when_ended, self._options = when_ended, options
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that have been looked at."""
        self._models: list[torch.nn.Module] = []
        self._steps: AutomaticSteps | None = None
        self._calls = Calls()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._in_front(torch.optim.Optimizer, "__init__", self._optimizer_made)
        self._in_front(Session, "__init__", self._session_made)
        handle = register_optimizer_step_post_hook(self._updated)
        self._undo.callback(handle.remove)
        self._undo.callback(self._look_away)
        self._undo.callback(self._calls.end)
        return self

    def __exit__(self, *raised: Any) -> None:
        steps, self._steps = self._steps, None
        with self._undo:
            if steps is not None:
                steps.__exit__(*raised)

    def smallest_budget(self) -> Bytes | None:
        """What steps such as those so far need at least where every op is watched, by the model's forward and backward
        on tensors without content; None where that cannot be told."""
        optimizers = self._live()
        if not isinstance(self.session, TensorSession) or not self._models:
            return None
        nothing = BudgetInfeasible(needed=0, allowed=0, op="", op_index=0, smallest_budget=0, exact=False)
        engine = self.session._engine
        told = smallest_budget(nothing, engine, self._models, optimizers, None, self._calls.found)
        return told.smallest_budget if told.exact else None

    # ------------------------------------------------------------------ heard of the program

    def _in_front(self, kind: type[Any], name: str, hears: Callable[..., None]) -> None:
        """Have `hears` told of every call of a method, before it runs."""
        method = getattr(kind, name)

        def called(this: Any, *args: Any, **kwargs: Any) -> Any:
            hears(this)
            return method(this, *args, **kwargs)

        setattr(kind, name, called)
        self._undo.callback(setattr, kind, name, method)

    def _optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))
        self._look()

    def _session_made(self, session: Session) -> None:
        ours = {id(self), id(self._steps)} - {id(None)}
        if ours.isdisjoint(map(id, callers(sys._getframe(2)))):
            raise UsageError(
                "This script opens a session of Spillway itself: run it with python, or take spillway out of it."
            )

    def _updated(self, *_: Any) -> None:
        self.updates += 1

    def _look(self) -> None:
        """At calls of modules, from here on."""
        kind: Any = torch.nn.Module
        if "spillway" in vars(kind.__call__):
            return
        call = kind.__call__

        def looked_at(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._called(module)
            return call(module, *args, **kwargs)

        vars(looked_at)["spillway"] = call
        kind.__call__ = looked_at

    def _look_away(self) -> None:
        kind: Any = torch.nn.Module
        kind.__call__ = vars(kind.__call__).get("spillway", kind.__call__)

    # ------------------------------------------------------------------ what is found

    def _live(self) -> list[torch.optim.Optimizer]:
        return [one for each in self._optimizers if (one := each()) is not None and hasattr(one, "param_groups")]

    def _called(self, module: torch.nn.Module) -> None:
        if _redirected(module):
            return
        own = {id(parameter) for parameter in module.parameters()}
        new = [one for one in self._live() if one not in self._known]
        mine = [one for one in self._live() if not own.isdisjoint(map(id, _updated_by([one])))]
        if not new:
            self._look_away()
        elif any(one in new for one in mine):
            self._open(module, own, list(dict.fromkeys([*mine, *new])))

    def _open(self, module: torch.nn.Module, own: set[int], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._look_away()
        self._known.update(optimizers)
        rest = {id(one) for one in _updated_by(optimizers)} - own
        self.trainer = _trainer(module)
        self._models = [module, *_owners(rest, module)]
        if self._steps is not None:
            self._steps.close()
        self._steps = AutomaticSteps(self._models, optimizers, when_ended=self._ended, **self._options)
        self.session = self._steps.session
        self._calls.end()
        if self._options["budget"] is None:
            self._calls.begin(self._models)

    def _ended(self, session: Session) -> None:
        self.reports.append(session.history[-1])
        if len(session.history) > 1:
            self._when_ended(self)


def _redirected(module: torch.nn.Module) -> bool:
    """Whether a call of this module, or of what it wraps, runs a method that Lightning put in front of a forward."""
    inner = getattr(module, "module", None)
    forward = vars(inner if isinstance(inner, torch.nn.Module) else module).get("forward")
    return str(getattr(forward, "__qualname__", "")).startswith("_ForwardRedirection.")


def _updated_by(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


def _owners(parameters: set[int], module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost modules that own any of these parameters; those that contain `module` are none of them."""
    if not parameters:
        return []
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    everything = [one for one in modules if "_modules" in vars(one)]  # not those that are being made
    owners = [
        one for one in everything
        if any(id(parameter) in parameters for parameter in one.parameters())
        and all(part is not module for part in one.modules())
    ]  # fmt: skip
    inner = {id(part) for one in owners for part in one.modules() if part is not one}
    return [one for one in owners if id(one) not in inner]


def _trainer(module: torch.nn.Module) -> Trainer:
    for caller in callers(sys._getframe()):
        for kind in type(caller).__mro__:
            found = _TRAINERS.get((kind.__module__.partition(".")[0], kind.__name__))
            if found is not None:
                return found
    return "Accelerate" if getattr(module, "_is_accelerate_prepared", False) else "a loop"
