"""What every session is to its user.

NOTE [Entering and leaving]. A Ctrl-C, or any other exception, at whatever line of entering a step, of leaving it and of
closing, loses nothing and locks nobody out:

 1. Signals wait before anything is taken, and are told to the user when the books are closed.
 2. What a step took is given back by functions that may be called again: what an interruption left half-way is done by
    the second call.
 3. A step that nobody can leave any more, because its `with` statement, its session or its thread is gone, is lost.
    Whoever comes next ends it first (`AbstractStep.lost`, `engines.tensors.turns`).
 4. Leaving and closing never hide what the user's own code raised: what goes wrong besides is a note on that.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Self, final

import torch

from spillway.engines.tensors.devices import allowed_bytes, device_of
from spillway.engines.tensors.native_hook import native_module
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.engines.tensors.torch_compile import check_not_compiling
from spillway.engines.tensors.turns import end_lost_steps, may_end
from spillway.errors import BudgetInfeasible, SessionError, SpillwayError
from spillway.internals.interrupts import WATCHED, DeferredInterrupts, deliver
from spillway.internals.machine_memory import machine_memory
from spillway.internals.private import process_groups
from spillway.internals.process_memory import ResidentSet, file_pages
from spillway.ir import BlocksAtPeak, Kind, RunWriter, StepReport, Timeline
from spillway.ir.reading import fits_on_a_line
from spillway.memory.budget import UNLIMITED
from spillway.report.figures import scalars
from spillway.report.html import render
from spillway.session.inputs import check_sharding, gradient_of, leaves, modules_of, signature_of, storages
from spillway.session.ranks import Ranks, ranks_now
from spillway.session.updates import Updates
from spillway.units import Bytes, format_bytes

if TYPE_CHECKING:
    from spillway.report.live import LiveLine, LiveView

VARYING: Final = 16
"""Of so many steps the latest tell whether batches vary in size."""
_SHAPE: Final = re.compile(r"\w+\[[^]]*\]")
"""Of a tensor in a signature, where numbers stand as well."""

_DATA_PTR: Final = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
"""As it is without an engine that brings bytes back."""

NAMED: Final = (Kind.PARAMETER, Kind.GRADIENT, Kind.BUFFER, Kind.OPTIMIZER_STATE)


def header(allowed: Bytes, method: str, device: torch.device) -> dict[str, Any]:
    """The first line of a run file."""
    return {
        "budget_bytes": None if allowed >= UNLIMITED else allowed,
        "method": method,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {format_bytes(machine_memory())}",
        "threads": torch.get_num_threads(),
        "device": str(device),
    }


class AbstractStep(ABC):
    """A step that is running."""

    def __init__(self, session: Session, batch: Any, owner: weakref.ref[Any]) -> None:
        self.logged: dict[str, float] = {}
        """What the user attached to it."""
        self.thread = threading.current_thread()
        self.within = sys.exception()
        """What was being handled when it began."""
        self.deferred = DeferredInterrupts(session._pending, session._uninterrupted)
        self._session = session
        self._batch = batch
        self._owner = owner
        """Who is to leave it."""

    @abstractmethod
    def begin(self) -> None:
        """Take what it needs. Where this raises, `end` gives back what was taken until then."""

    @abstractmethod
    def end(self) -> SpillwayError | None:
        """Give that back; what the user can reach is right afterwards. Called again, it does what was not done.

        Returns why it did not end under its budget, if it did not.
        """

    @abstractmethod
    def conclude(self) -> None:
        """Learn from it, and report it."""

    def told(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        """A refusal with the budget to ask for, where more is known of that now."""
        return refusal

    @property
    def refused(self) -> BudgetInfeasible | None:
        """What it was refused with last, said again."""
        return None

    @abstractmethod
    def micro_batch(self, batch: Any) -> None:
        """It goes on with inputs of another size."""

    def forget(self) -> None:
        """It is over, and nobody asks it anything: what it held of the user's goes now, and not when Python next looks
        for cycles."""
        self._batch = None

    @property
    def lost(self) -> bool:
        """Whether nobody can leave it any more, so that the running thread may."""
        gone = self._owner() is None or self.thread is not threading.current_thread()
        return gone and may_end(self.thread)

    def release(self) -> None:
        """End it, whatever becomes of that: what goes wrong has been told already, or comes before something else."""
        try:
            with contextlib.suppress(Exception):
                self.end()
        finally:
            if self._session._running is self:
                self._session._running = None
                self._session._updates.stepping = None  # updates are outside again

    def give_back(self) -> None:
        """The same, and signals wait no longer."""
        try:
            self.release()
            self.deferred.shut()
        except BaseException:
            self.release()
            self.deferred.shut()
            raise


@final
class _Within:
    """The step of a `with` statement, which holds this as long as it can leave the step."""

    def __init__(self, session: Session, batch: Any) -> None:
        self._session = session
        self._batch = batch
        self._step: AbstractStep | None = None

    def __enter__(self) -> Session:
        self._step = self._session._enter(self._batch, weakref.ref(self))
        return self._session

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._step is not None and self._session._running is self._step:  # else the session was closed inside
            self._session._leave(self._step, error)


class Session(ABC):
    """Training under one budget. Made by `manage`; a context manager that gives everything back at its end."""

    _uninterrupted: tuple[str, ...] = WATCHED
    """Modules in which signals wait while a step runs, by how their names begin."""
    _takes_shards = False
    """Whether parameters may be sharded by `fully_shard`."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        writer: RunWriter | None,
        live: LiveLine | LiveView | None,
    ) -> None:
        self.history: list[StepReport] = []
        """One report per finished step."""
        self.timeline: Timeline | None = None
        """The timeline of the step in which most bytes left and came back, of those that a window planned if there are
        any, if timelines are kept."""
        self._models = models
        self._optimizers = optimizers
        self._writer = writer
        self._live = live
        self._running: AbstractStep | None = None
        self._pending: list[Callable[[], None]] = []
        """Signals that wait."""
        self._closed = False
        """Whether no step may begin any more."""
        self._given_up = False
        """Whether closing is done."""
        self._closes_with_step = False
        self._told_left_out = self._told_eager = self._grouped = False
        self._ranks: Ranks | None = None
        """The other processes, where this one is in a process group."""
        self._updates = Updates(parameter for model in models for parameter in model.parameters())
        self._native = native_module()
        resident = ResidentSet()
        held = [one.nbytes() for one in storages(self._of_models()) if one.device.type == "cpu"]
        self._beside = max(resident.read() - sum(held), 0)
        """What the process takes of memory beside what the budget counts, without pages of files."""
        resident.close()

    @property
    @abstractmethod
    def allowed(self) -> Bytes:
        """The budget in bytes."""

    @property
    def budget(self) -> Bytes | None:
        """The budget in bytes; None where account is only kept.

        Between steps another can be named, in every way that `manage` takes. The next step begins by making room, or is
        refused. What the session has planned for the budget before is not used any more; what it has measured is.

        Raises:
            SessionError: Set while a step is running, or after the session was closed.
            BudgetError: Set to what cannot be read, or to more than there is.
        """
        return None if self.allowed >= UNLIMITED else self.allowed

    @budget.setter
    def budget(self, named: int | str | None) -> None:
        self._allow(self._changed(named))

    def _changed(self, named: int | str | None) -> Bytes:
        """The bytes of a budget that is named now. Raises what setting `budget` raises."""
        if self._closed:
            raise SessionError(
                "This session is closed, so that its budget cannot change; call spillway.manage() again."
            )
        if self._running is not None and not self._running.lost:
            raise SessionError(
                "The budget of a session changes between steps; set memory.budget when the step has ended."
            )
        return allowed_bytes(device_of(self._models), named)

    @abstractmethod
    def _allow(self, allowed: Bytes) -> None:
        """Another budget from the next step on; no step is running. Called again, it does what was not done."""

    @property
    def foresight(self) -> dict[str, Any] | None:
        """Of a method that foresees forwards: which pilot acts, how often each was right, what fetching as it foresaw
        would have spared, and the last mispredictions with what each cost, as `Referee.told` has it. None otherwise."""
        return None

    @property
    def explanation(self) -> tuple[str, ...]:
        """What the latest plan of `auto` does with each kind of block and why, in sentences. None of other methods, and
        before there is a plan."""
        return ()

    def step(self, batch: Any = None) -> AbstractContextManager[Session]:
        """One training step: forward, backward, optimizer. The batch's shapes and dtypes are its signature.

        Raises:
            SessionError: The session is closed, or a step is running.
            BudgetInfeasible: The step cannot run under the budget. Model and optimizer are as plain PyTorch leaves them
                when an op raises.
        """
        return _Within(self, batch)

    def begin(self, batch: Any = None) -> None:
        """Begin a step where no `with` statement can stand around it, as in callbacks; `end` is to end it.

        Raises:
            SessionError: As for `step`.
            BudgetInfeasible: As for `step`.
        """
        self._enter(batch, weakref.ref(self))

    def micro_batch(self, batch: Any) -> None:
        """Tell the running step, before a further forward, what that is called with: where gradients of several
        micro-batches are added up, a method of the block engine plans each by its own size. The first is given to
        `step` or `begin`.

        Raises:
            SessionError: No step is running.
        """
        if self._running is None:
            raise SessionError("micro_batch() belongs inside a step, between its forwards.")
        self._running.micro_batch(batch)

    def _call_began(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: B027
        """Tell a session whose step begins within a call of the model how that was called, for refusals. Of all later
        calls it hears by itself."""

    def _update_begins(self, optimizer: torch.optim.Optimizer, at_once: bool) -> Bytes | None:
        """Tell a session that was opened within an optimizer's closure, after which the optimizer changes something: in
        parts of so many bytes, or all at once, as it may have to. Of all later updates it hears by itself."""
        return None

    def end(self) -> None:
        """End the step that is running. While an exception of the step is being handled, in `except` or `finally`, the
        step counts as failed, and that exception is the one that is seen. Closing ends a running step too.

        Raises:
            SessionError: No step is running, or it began in another thread.
            BudgetInfeasible: As for `step`.
        """
        step, handled = self._running, sys.exception()
        if step is not None:
            self._leave(step, handled if handled is not step.within else None)
        elif handled is None and not self._closed:
            raise SessionError("No step is running that could be ended; memory.begin(batch) begins one.")

    def close(self) -> None:
        """Bring every byte back, give everything back to the system. A step that is running is ended first, and has no
        report. Closing twice is fine, and what was interrupted can be called again.

        Raises:
            SessionError: Another thread is in a step; the session closes when that thread leaves it.
        """
        if self._given_up:
            return
        step = self._running
        if step is not None and not may_end(step.thread):
            self._closes_with_step = True
            raise SessionError(
                f"Another thread, {step.thread.name!r}, is in a step of this session, and only that thread can leave "
                f"it; the session closes when it does."
            )
        deferred = step.deferred if step is not None else DeferredInterrupts(self._pending, self._uninterrupted)
        try:
            deferred.open()
            if step is not None:
                step.release()
            self._closed = True
            self._updates.close()
            if self._ranks is not None:
                if step is not None and step.refused is not None:  # and nobody has ended it since
                    self._ranks.abort(step.refused)
                self._ranks.close()
            self._give_up()
            deferred.shut()
            self._given_up = True
        except BaseException as error:
            deferred.shut()
            self._given_up = isinstance(error, Exception)  # all that can be given back has been
            raise
        self._deliver()

    def _leave_to(self, other: Session) -> None:
        """Close, and have another session go on with what is reported, which writes where this one did."""
        other.history, other._told_eager = self.history, self._told_eager
        self._writer = self._live = None
        self.close()

    @abstractmethod
    def _make_step(self, batch: Any, owner: weakref.ref[Any]) -> AbstractStep:
        """A step that has taken nothing yet."""

    @abstractmethod
    def _give_up(self) -> None:
        """Everything that the session took. Called again, it does what was not done."""

    @abstractmethod
    def _header(self) -> dict[str, Any]:
        """What a page says of the whole run."""

    def _held_by_blocks(self) -> BlocksAtPeak | None:
        """Of the step with the highest peak; None where no blocks ran."""
        return None

    def log(self, **numbers: Any) -> None:
        """Attach numbers to the running step: `memory.log(loss=loss)`. Tensors of one element are fine."""
        if self._running is None:
            raise SessionError("log() belongs inside a step: with memory.step(batch): ... memory.log(loss=loss).")
        for name, value in numbers.items():
            if not fits_on_a_line(name):
                raise SessionError(f"log({name!r}=...): give it a name that can be printed on one line.")
            self._running.logged[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)

    def scalars(self) -> dict[str, float]:
        """The last step for a logger, `wandb.log(memory.scalars())`: what was given to `log`, and the figures that the
        callbacks of trainers log by themselves. Peak, budget if there is one, seconds of stall and of recomputing."""
        return scalars(self.history[-1:]) | (self.history[-1].logged if self.history else {})

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page about the run so far."""
        timelines = [] if self.timeline is None else [self.timeline]
        told: dict[str, Any] = {"plan": " ".join(self.explanation)} if self.explanation else {}
        if any(step.peak_rss_bytes for step in self.history):
            told["start_rss_bytes"] = self._beside + file_pages()
        page = render(self._header() | told, self.history, timelines, self.foresight, self._held_by_blocks())
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)

    def _repr_html_(self) -> str:
        """What a notebook shows of a cell that ends in the session."""
        from spillway.report.live import LiveView

        return LiveView(self.history)._repr_html_()

    def __enter__(self) -> Self:
        if self._closed:
            raise SessionError("This session is closed; call spillway.manage() again.")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as fault:
            if error is None:
                raise
            _add_note(error, "Closing the session", fault)
        if self._ranks is not None and isinstance(error, Exception) and getattr(error, "rank", None) is None:
            told = self._ranks.cause_of(error)
            if told is not error:
                raise told from None

    def _deliver(self) -> None:
        """Raise what waited, now that the books are closed."""
        deliver(self._pending)

    # ------------------------------------------------------------------ for steps

    def _enter(self, batch: Any, owner: weakref.ref[Any]) -> AbstractStep:
        """See NOTE [Entering and leaving]."""
        if self._closed:
            raise SessionError("This session is closed; call spillway.manage() again.")
        check_not_compiling()
        self._meet_ranks()
        running = self._running
        if running is not None:
            if not running.lost:
                raise SessionError(
                    "A step is running already; steps do not nest. Leave it before the next begins: where no `with` "
                    "statement does that, by memory.end()."
                )
            running.give_back()
        end_lost_steps()
        step = self._make_step(batch, owner)
        try:
            step.deferred.open()
            self._running = step
            step.begin()
            self._updates.step_begins()
            self._deliver()
        except BaseException as error:
            step.give_back()
            told = _told(step, error) if isinstance(error, BudgetInfeasible) else error
            step.forget()
            told = self._stopped(told)
            try:
                if told is not error:
                    raise told from None
                raise
            finally:
                del told  # which holds this frame, and with it those of the step
        return step

    def _meet_ranks(self) -> None:
        """Raises what one of them has stopped all of them with."""
        self._grouped = bool(process_groups())
        if self._grouped:
            check_sharding(self._models, self._optimizers, by_block=self._takes_shards)  # since it was opened
        if self._grouped or self._ranks is not None:
            before, self._ranks = self._ranks, ranks_now(self._ranks)
            if self._ranks is not None and self._ranks is not before:
                weakref.finalize(self, self._ranks.stop_listening).atexit = False
        if self._ranks is not None and (error := self._ranks.error) is not None:
            raise error

    def _stopped(self, error: BaseException) -> BaseException:
        """What is to be raised where an error leaves a step: see NOTE [Stopping together] in `ranks.py`."""
        if self._ranks is None or not isinstance(error, Exception):
            return error
        return self._ranks.abort(error) if isinstance(error, SpillwayError) else self._ranks.cause_of(error)

    def _leave(self, step: AbstractStep, error: BaseException | None) -> None:
        """`error` is what the user's own code raised in it."""
        if not may_end(step.thread):
            raise SessionError("This step began in another thread, and has to be left by that thread.")
        late: SpillwayError | None = None
        fault: BaseException | None = None
        try:
            late = step.end()
            if error is None and late is None:
                step.conclude()
        except BaseException as raised:
            fault = raised
        finally:
            step.give_back()
        if error is not None and isinstance(fault, Exception):
            _add_note(error, "Ending the step", fault)
            fault = None
        if self._closes_with_step:
            self.__exit__(None, error or fault, None)
        try:
            self._deliver()
        except BaseException as waited:
            if isinstance(fault, Exception):
                _add_note(waited, "Ending the step", fault)
            raise
        if fault is not None:
            step.forget()
            try:
                raise fault
            finally:
                del fault, error  # which hold this frame, and with it those of the step
        refusal = error or late
        if isinstance(error, RuntimeError) and step.refused is not None and str(step.refused) in str(error):
            refusal = step.refused  # it passed through C++, as out of a callback, which tells its sentence on
        told = _told(step, refusal) if isinstance(refusal, BudgetInfeasible) else refusal
        step.forget()
        told = self._stopped(told) if told is not None else None
        try:
            if told is not error and told is not None:
                raise told from None
        finally:
            del told, refusal, late, error  # as above

    def _tensors(self, batch: Any) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Every tensor that is known by name, and what it is for."""
        yield from self._of_models()
        yield from self._beside_models(batch)

    def _of_models(self) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Those that models and optimizers have."""
        parameters, gradients, buffers, states = NAMED  # looking a member up takes as long as the rest
        tensor, mappings = torch.Tensor, (dict, Mapping)
        for module in modules_of(self._models):
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameters, parameter
                    if (gradient := gradient_of(parameter)) is not None:
                        yield gradients, gradient
            for buffer in module._buffers.values():
                if buffer is not None:
                    yield buffers, buffer
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                if isinstance(state, mappings):
                    for value in state.values():
                        if isinstance(value, tensor):
                            yield states, value
                        elif isinstance(value, (list, *mappings)):  # as LBFGS keeps directions
                            yield from ((states, leaf) for leaf in leaves(value) if isinstance(leaf, tensor))

    def _beside_models(self, batch: Any) -> Iterator[tuple[Kind, torch.Tensor]]:
        """What is known by name besides: the batch."""
        yield from ((Kind.INPUT, leaf) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))

    def _bytes_by_address(self, batch: Any) -> dict[int, Bytes]:
        """Of the storages of all these tensors, by the address of their memory."""
        usual = self._told_natively(batch)
        if usual is not None:
            return usual
        found: dict[int, Bytes] = {}
        for storage in storages(self._tensors(batch)):
            with contextlib.suppress(RuntimeError):  # some have a size, and no memory
                found[_DATA_PTR(storage)] = storage.nbytes()
        return found

    def _named_bytes(self, batch: Any) -> Bytes:
        """Of all of them together."""
        usual = self._told_natively(batch)
        if usual is not None:
            return sum(usual.values())
        return sum(storage.nbytes() for storage in storages(self._tensors(batch)))

    def _told_natively(self, batch: Any) -> dict[int, Bytes] | None:
        """None where a tensor, a module or a state is of no usual kind, and without native code."""
        if self._native is None:
            return None
        beside = tuple(tensor for _, tensor in self._beside_models(batch))
        told: dict[int, Bytes] | None = self._native.named(tuple(self._models), tuple(self._optimizers), beside)
        return told

    def _finish(self, report: StepReport) -> None:
        self.history.append(report)
        with contextlib.ExitStack() as stack:
            if self._live is not None:
                stack.callback(self._live.update, report)
            if self._writer is not None:
                self._write({"step": report.to_json()})

    def _say_what_ran_eagerly(self, engine: TensorEngine) -> None:
        """Of a step that this engine watched."""
        if engine.ran_eagerly and not self._told_eager:
            self._told_eager = True
            warnings.warn(
                "What torch.compile made ran op by op, with the results and at the speed of eager PyTorch, because "
                "this step was watched; outside of watched steps it runs compiled. A method of the block engine, such "
                "as method='mimose', keeps blocks compiled that were compiled by themselves (block.compile()).",
                stacklevel=6,
            )

    def _write(self, record: Mapping[str, Any]) -> None:
        """Into the run file, if there is one and it could be read afterwards."""
        try:
            if self._writer is not None:
                self._writer.append(record)
        except ValueError as left_out:
            if not self._told_left_out:
                self._told_left_out = True
                warnings.warn(str(left_out), stacklevel=7)


def _told(step: AbstractStep, refusal: BudgetInfeasible) -> BudgetInfeasible:
    try:
        told = step.told(refusal)
        signatures = (signature_of(step._batch), *(report.signature for report in step._session.history[-VARYING:]))
        if len({shapes for one in signatures if (shapes := tuple(_SHAPE.findall(one)))}) > 1:
            told.add_note("That is the budget for this step: batches vary in size, and larger ones may need more.")
        return told
    except Exception as fault:
        _add_note(refusal, "Telling the budget that works", fault)
        return refusal


def _add_note(error: BaseException, what: str, fault: Exception) -> None:
    """What the user's own code raised is what has to be seen."""
    error.add_note(f"{what} failed as well: {type(fault).__name__}: {fault}")
