"""`manage()`: a model trained step by step under a budget."""

from __future__ import annotations

import functools
import os
import platform
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from spillway.engines.controller import UNLIMITED
from spillway.engines.tensors.devices import device_of, engine_for, machine_memory
from spillway.engines.tensors.engine import TensorEngine
from spillway.engines.tensors.escapes import others_open
from spillway.engines.tensors.interrupts import DeferredInterrupts
from spillway.engines.tensors.places import CpuPlace
from spillway.engines.tensors.private import unheard
from spillway.engines.tensors.probe import smallest_budget
from spillway.engines.tensors.system import peak_rss, reset_peak
from spillway.engines.tensors.turns import check_thread, end_turn, take_turn
from spillway.engines.tiers.spill_file import SpillIO
from spillway.errors import BudgetInfeasible, ModelError, SessionError, SpillFullError
from spillway.ir import Kind, RunWriter, StepReport, Timeline
from spillway.methods import AbstractPolicy, resolve
from spillway.report.html import write_report
from spillway.report.live import LiveLine
from spillway.units import Bytes, format_bytes

Models = torch.nn.Module | Sequence[torch.nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def manage(
    model: Models,
    optimizer: Optimizers = None,
    *,
    budget: int | str | None,
    method: str | AbstractPolicy = "lru",
    host_budget: int | str | None = None,
    spill_directory: str | os.PathLike[str] | None = None,
    spill_io: SpillIO = "buffered",
    return_freed: bool = True,
    run_file: str | os.PathLike[str] | None = None,
    timeline: bool = False,
    live: bool = False,
) -> Session:
    """Train `model` under a memory budget, bit-identically to plain PyTorch.

    Arguments:
        model: The module, or several that train together. Nothing about them is changed.
        optimizer: Theirs, or several; used to know their state's storages.
        budget: Bytes, "6GiB", or a share of the memory of the model's device, "80%". It covers every storage that the
            step touches: parameters, gradients, optimizer state, inputs, activations; on CUDA also what the allocator
            hands out to anybody else in the process. None only keeps account.
        method: How to decide what leaves: a name or a policy object.
        host_budget: For models on CUDA: the most host memory that is pinned for what leaves the device, in bytes or as
            a share of the machine's memory; half of that by default.
        spill_directory: Where the spill file goes, the system's temporary directory by default. It needs room for what
            leaves; the file has no name and is gone with the process.
        spill_io: "direct" writes and reads past the system's page cache where the file system can (O_DIRECT), so that
            spilled bytes do not take its place; "buffered" is faster as long as there is memory for the cache.
        return_freed: Return freed memory to the system when the process's resident set is about to pass the budget
            by 5 %. False leaves it to the allocator: steps under pressure are faster, and the process may take twice
            the budget and more, because the allocator keeps what it cannot reuse.
        run_file: JSON lines with the figures of every step.
        timeline: Keep the memory timeline of the step in which most bytes left and came back, for `Session.report`.
        live: Show one line in the terminal while training.

    Raises:
        UsageError: Something given makes no sense; the message says what would.
        SpillDirectoryError: The spill directory cannot be used.
    """
    models: list[torch.nn.Module] = _several(model, torch.nn.Module)
    optimizers: list[torch.optim.Optimizer] = _several(optimizer, torch.optim.Optimizer)
    _check_models(models, optimizers)
    engine = engine_for(device_of(models), resolve(method), budget, host_budget, spill_directory, spill_io)
    allowed = engine.controller.allowed
    try:
        writer = RunWriter(run_file, _header(allowed, engine, return_freed)) if run_file is not None else None
        shown = LiveLine(allowed) if live else None
        return Session(models, optimizers, engine, writer, shown, keep_timeline=timeline, return_freed=return_freed)
    except BaseException:
        engine.close()
        raise


_NAMED: Final = (Kind.PARAMETER, Kind.GRADIENT, Kind.BUFFER, Kind.OPTIMIZER_STATE)


@final
class Session:
    """Training under one budget. Made by `manage`; a context manager that gives everything back at its end."""

    @unheard
    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        engine: TensorEngine,
        writer: RunWriter | None,
        live: LiveLine | None,
        *,
        keep_timeline: bool,
        return_freed: bool,
    ) -> None:
        self.history: list[StepReport] = []
        """One report per finished step."""
        self.timeline: Timeline | None = None
        """The timeline of the step in which most bytes left and came back, if timelines are kept."""
        self._models = models
        self._optimizers = optimizers
        self._engine = engine
        self._writer = writer
        self._live = live
        self._keep_timeline = keep_timeline
        self._return_freed = return_freed
        self._fits: dict[tuple[Any, ...], _Fit] = {}
        self._running: _Step | None = None
        self._closed = False
        self._most_pressure = (-1, 0)
        self._parts = [module for model in models for module in model.modules()]
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        known = sum(storage.nbytes() for storage in _storages(self._tensors(())))
        on_cpu = isinstance(engine.place, CpuPlace)
        self._base_rss = max(engine.resident_set.read() - known, 0) if return_freed and on_cpu else None

    @property
    def allowed(self) -> Bytes:
        """The budget in bytes."""
        return self._engine.controller.allowed + self._engine.place.measured().reserved

    def step(self, batch: Any = None) -> AbstractContextManager[Session]:
        """One training step: forward, backward, optimizer. The batch's shapes and dtypes are its signature.

        Raises:
            SessionError: The session is closed, or a step is running.
            BudgetInfeasible: At the op that cannot run under the budget. Model and optimizer are as plain PyTorch
                leaves them when an op raises.
        """
        return _Step(self, batch)

    def log(self, **numbers: Any) -> None:
        """Attach numbers to the running step: `memory.log(loss=loss)`. Tensors of one element are fine."""
        if self._running is None:
            raise SessionError("log() belongs inside a step: with memory.step(batch): ... memory.log(loss=loss).")
        for name, value in numbers.items():
            self._running.logged[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page about the run so far."""
        timelines = [] if self.timeline is None else [self.timeline]
        write_report(path, _header(self.allowed, self._engine, self._return_freed), self.history, timelines)

    def close(self) -> None:
        """Bring every byte back, give the spill file back to the system. Closing twice is fine."""
        if self._closed:
            return
        if self._running is not None:
            raise SessionError("The session cannot be closed inside a step; leave the step first.")
        with DeferredInterrupts(self._engine.interrupts), ExitStack() as stack:
            self._closed = True
            stack.callback(self._engine.close)
            if self._live is not None:
                stack.callback(self._live.close)
            if self._writer is not None:
                stack.callback(self._writer.close)
                if self.timeline is not None:
                    self._writer.append({"timeline": self.timeline.to_json()})
        self._engine.raise_interrupt()

    def __enter__(self) -> Self:
        if self._closed:
            raise SessionError("This session is closed; call spillway.manage() again.")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ for _Step

    def _tensors(self, batch: Any) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Every tensor that is known by name, and what it is for."""
        parameters, gradients, buffers, states = _NAMED  # looking a member up takes as long as the rest
        for module in (module for model in self._models for module in model.modules()):
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameters, parameter
                    if parameter.grad is not None:
                        yield gradients, parameter.grad
            for buffer in module._buffers.values():
                if buffer is not None:
                    yield buffers, buffer
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                if isinstance(state, dict | Mapping):
                    for value in state.values():
                        if isinstance(value, torch.Tensor):
                            yield states, value
        yield from ((Kind.INPUT, leaf) for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor))

    def _circumstances(self, signature: str) -> tuple[Any, ...]:
        """What a step on inputs of that signature depends on besides: what trains, and in which modes."""
        kind = self._engine.place.device.type
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        # Lists: a generator takes twice as long, and this is asked before every step, watched or not.
        training = tuple([module.training for module in self._parts])
        return signature, modes, training, tuple([parameter.requires_grad for parameter in self._parameters])

    def _state_entries(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def _versions(self) -> list[int]:
        """One number per optimizer that moves when it updates what it was made for; one for all without optimizers."""
        groups = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in self._optimizers]
        return [sum([parameter._version for parameter in parameters]) for parameters in groups or [self._parameters]]

    def _known_to_fit(self, circumstances: tuple[Any, ...], batch: Any) -> _Fit | None:
        """The same step on the same sizes, if it ran before, kept everything, and would again from where memory stands
        now.
        """
        fit = self._fits.get(circumstances)
        controller = self._engine.controller
        if fit is None or self._keep_timeline or controller.away:
            return None
        _, gradients, _, _ = _NAMED
        created = [(gradients, grad) for grad in [p.grad for p in self._parameters] if grad is not None]
        inputs = [(Kind.INPUT, leaf) for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._engine.label([*created, *inputs])  # what may have come without being watched
        return fit if fit.peak_from(controller.resident) <= controller.allowed else None

    def _presses_most(self, report: StepReport) -> bool:
        return _pressure(report) > self._most_pressure

    def _finish(self, report: StepReport, timeline: Timeline | None) -> None:
        self.history.append(report)
        if timeline is not None:
            self.timeline, self._most_pressure = timeline, _pressure(report)
        if self._writer is not None:
            self._writer.append({"step": report.to_json()})
        if self._live is not None:
            self._live.update(report)


def _pressure(report: StepReport) -> tuple[Bytes, Bytes]:
    return report.bytes_out + report.bytes_in + report.dropped_bytes, report.peak_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A step that kept everything."""

    start: Bytes
    """Resident bytes when it began."""
    growth: Bytes
    """Bytes from there to its peak."""

    def peak_from(self, resident: Bytes) -> Bytes:
        """The peak of such a step now; never less than it was, because what it found then may come again."""
        return max(resident, self.start) + self.growth


@final
class _Step:
    """The context of one step."""

    def __init__(self, session: Session, batch: Any) -> None:
        self._session = session
        self._batch = batch
        self.logged: dict[str, float] = {}

    @unheard
    def __enter__(self) -> Session:
        session = self._session
        if session._closed:
            raise SessionError("This session is closed; call spillway.manage() again.")
        if session._running is not None:
            raise SessionError("A step is running already; steps do not nest. Leave it before the next begins.")
        self._signature = signature_of(self._batch)
        engine = session._engine
        self._circumstances = session._circumstances(self._signature)
        self._fit = session._known_to_fit(self._circumstances, self._batch)
        self._aside = self._fit is not None
        if not self._aside:
            self._states, self._versions = session._state_entries(), session._versions()
        self._start = engine.controller.resident
        self._interrupts = DeferredInterrupts(engine.interrupts)
        self._began = time.perf_counter()
        named = functools.partial(session._tensors, self._batch)
        take_turn(engine, lambda: (tensor for _, tensor in named()), alone=not others_open(engine))
        if self._aside:
            engine.place.begin_aside()
        else:
            reset_peak()
            self._interrupts.__enter__()
        session._running = self
        if not self._aside:
            try:
                record = named if session._keep_timeline else None
                engine.begin_step(named(), base_rss=session._base_rss, record=record, signature=self._signature)
            except BudgetInfeasible as refusal:
                self._leave()
                raise self._told(refusal) from None
            except BaseException:
                self._leave()
                raise
        return session

    def _told(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        session = self._session
        return smallest_budget(refusal, session._engine, session._models, session._optimizers, self._batch)

    def _leave(self) -> None:
        self._session._running = None
        end_turn(self._session._engine)
        self._interrupts.__exit__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        engine = self._session._engine
        check_thread(engine)
        late: BaseException | None = None
        try:
            if not self._aside:
                engine.end_step()
        except (BudgetInfeasible, SpillFullError) as at_the_end:
            late = at_the_end  # everything is back all the same; what the body raised is what the user has to see
        finally:
            self._leave()
        engine.raise_interrupt()
        refusal = error or late
        if isinstance(refusal, BudgetInfeasible):
            raise self._told(refusal) from None
        if error is None and late is not None:
            raise late
        if error is None:
            self._conclude(time.perf_counter() - self._began)

    @unheard
    def _conclude(self, seconds: float) -> None:
        session, engine = self._session, self._session._engine
        report = self._aside_report(seconds) if self._aside else self._managed_report(seconds)
        timeline = None
        if not self._aside:
            kept_all = not (report.moves or report.drops or report.refusals or engine.controller.away)
            if kept_all and self._signature and self._is_whole():
                growth = report.peak_bytes - report.start_bytes
                session._fits[self._circumstances] = _Fit(start=report.start_bytes, growth=growth)
            if engine.history is not None:
                timeline = engine.history.stop(len(session.history) if session._presses_most(report) else None)
                engine.history = None
        elif engine.place.outgrown():
            session._fits.pop(self._circumstances, None)  # it grew: watch it again
        session._finish(report, timeline)

    def _is_whole(self) -> bool:
        """Whether every optimizer stepped, and none for the first time: an evaluation or a part of an accumulation
        needs less than the step that follows on inputs of the same size.
        """
        session = self._session
        updated = [one != other for one, other in zip(self._versions, session._versions(), strict=True)]
        if session._engine.fused_updates:  # which no version tells of
            fused = [bool(optimizer.defaults.get("fused")) for optimizer in session._optimizers]
            updated = [any(pair) for pair in zip(updated, fused, strict=True)] if fused else updated
        return all(updated) and self._states == session._state_entries()

    def _managed_report(self, seconds: float) -> StepReport:
        engine, counters = self._session._engine, self._session._engine.controller.counters
        measured = engine.place.measured()
        return StepReport(
            step=len(self._session.history), signature=self._signature, managed=True, allowed=self._session.allowed,
            start_bytes=engine.start_bytes, peak_bytes=engine.controller.peak, end_bytes=engine.controller.resident,
            peak_rss_bytes=peak_rss(), working_bytes=counters.floor_bytes, seconds=seconds,
            stall_seconds=counters.stall_seconds,
            recomputed_ops=counters.recomputed_ops, recomputed_seconds=counters.recomputed_seconds, ops=engine.ops,
            bytes_out=counters.bytes_out,
            bytes_in=counters.bytes_in, dropped_bytes=counters.dropped_bytes, drops=counters.drops,
            moves=counters.moves, refusals=dict(counters.refusals), escaped=engine.escaped_count(),
            unmanaged=engine.unmanaged, logged=self.logged, transfer_seconds=engine.transfers.seconds,
            hidden_seconds=engine.transfers.hidden_seconds, bytes_out_beside=counters.early_out,
            bytes_in_beside=counters.early_in, device_peak_bytes=measured.peak, reserved_bytes=measured.reserved,
        )  # fmt: skip

    def _aside_report(self, seconds: float) -> StepReport:
        controller, measured = self._session._engine.controller, self._session._engine.place.measured()
        peak = self._fit.peak_from(self._start) if self._fit is not None else 0
        return StepReport(
            step=len(self._session.history), signature=self._signature, managed=False, allowed=self._session.allowed,
            start_bytes=self._start, peak_bytes=peak,
            end_bytes=controller.resident, peak_rss_bytes=0, working_bytes=0, seconds=seconds, stall_seconds=0.0,
            recomputed_ops=0, recomputed_seconds=0.0, ops=0, bytes_out=0, bytes_in=0, dropped_bytes=0, drops=0, moves=0,
            refusals={}, escaped=0, unmanaged=0, logged=self.logged, device_peak_bytes=measured.peak,
            reserved_bytes=measured.reserved,
        )  # fmt: skip


def signature_of(batch: Any) -> str:
    """Shapes and dtypes of the tensors in a batch, and its numbers, in order; empty without tensors."""
    leaves = list(_leaves(batch))
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return ""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )


def _leaves(batch: Any) -> Iterator[torch.Tensor | bool | int | float]:
    if isinstance(batch, torch.Tensor | bool | int | float):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)


def _storages(tensors: Iterable[tuple[Kind, torch.Tensor]]) -> list[torch.UntypedStorage]:
    found = {t.untyped_storage()._cdata: t.untyped_storage() for _, t in tensors if t.layout is torch.strided}
    return list(found.values())


def _several(given: Any, kind: type[Any]) -> list[Any]:
    """One thing, several of them, or what `_check_models` then complains about."""
    if given is None:
        return []
    try:
        return [given] if isinstance(given, kind) else list(given)
    except TypeError:
        return [given]


def _check_models(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for given, kind, what in ((models, torch.nn.Module, "model"), (optimizers, torch.optim.Optimizer, "optimizer")):
        for item in given:
            if not isinstance(item, kind):
                raise ModelError(f"manage() needs a {kind.__name__} as {what} (or several), got {type(item).__name__}.")
    if not models:
        raise ModelError("manage() needs at least one model.")
    device_of(models)
    if any(isinstance(t, UninitializedParameter | UninitializedBuffer) for m in models for t in m.parameters()):
        raise ModelError("The model has lazy parameters without a size; run one batch through it before manage().")
    if not any(p.requires_grad for m in models for p in m.parameters()):
        warnings.warn("No parameter of the model requires a gradient.", stacklevel=3)


def _header(allowed: Bytes, engine: TensorEngine, return_freed: bool) -> dict[str, Any]:
    return {
        "budget_bytes": None if allowed == UNLIMITED else allowed,
        "method": engine.controller.policy.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {format_bytes(machine_memory())}",
        "threads": torch.get_num_threads(),
        "device": str(engine.place.device),
        "spill_io": engine.place.spill_io,
        "return_freed": return_freed,
    }
