"""Sessions of the tensor engine: every storage, whatever the model."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from spillway.engines.tensors.engine import TensorEngine
from spillway.engines.tensors.escapes import others_open
from spillway.engines.tensors.interrupts import DeferredInterrupts
from spillway.engines.tensors.places import CpuPlace
from spillway.engines.tensors.private import unheard
from spillway.engines.tensors.probe import smallest_budget
from spillway.engines.tensors.system import peak_rss, reset_peak
from spillway.engines.tensors.turns import check_thread, end_turn, take_turn
from spillway.errors import BudgetInfeasible, SpillFullError
from spillway.ir import Kind, RunWriter, StepReport, Timeline
from spillway.report.live import LiveLine
from spillway.session.base import NAMED, Session, header
from spillway.session.inputs import leaves, signature_of
from spillway.units import Bytes

_TRAINING: Final = operator.attrgetter("training")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")


@final
class TensorSession(Session):
    """A session that watches every op."""

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
        super().__init__(models, optimizers, writer, live)
        self._engine = engine
        self._keep_timeline = keep_timeline
        self._return_freed = return_freed
        self._fits: dict[tuple[Any, ...], _Fit] = {}
        self._most_pressure = (-1, 0)
        self._parts = [module for model in models for module in model.modules()]
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        known = self._named_bytes(())
        on_cpu = isinstance(engine.place, CpuPlace)
        self._base_rss = max(engine.resident_set.read() - known, 0) if return_freed and on_cpu else None

    @property
    def allowed(self) -> Bytes:
        """The budget in bytes."""
        return self._engine.controller.allowed + self._engine.place.measured().reserved

    def step(self, batch: Any = None) -> AbstractContextManager[Session]:
        return _Step(self, batch)

    def _header(self) -> dict[str, Any]:
        return tensor_header(self.allowed, self._engine, return_freed=self._return_freed)

    def close(self) -> None:
        if self._closed:
            return
        self._check_may_close()
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

    # ------------------------------------------------------------------ for _Step

    def _circumstances(self, signature: str) -> tuple[Any, ...]:
        """What a step on inputs of that signature depends on besides: what trains, and in which modes."""
        kind = self._engine.place.device.type
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        # `map` over getters in C: this is asked before every step, watched or not.
        return signature, modes, tuple(map(_TRAINING, self._parts)), tuple(map(_REQUIRES_GRAD, self._parameters))

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
        _, gradients, _, _ = NAMED
        created = [(gradients, grad) for grad in [p.grad for p in self._parameters] if grad is not None]
        inputs = [(Kind.INPUT, leaf) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._engine.label([*created, *inputs])  # what may have come without being watched
        return fit if fit.peak_from(controller.resident) <= controller.allowed + controller.reserved else None

    def _presses_most(self, report: StepReport) -> bool:
        return _pressure(report) > self._most_pressure

    def _conclude(self, report: StepReport, timeline: Timeline | None) -> None:
        if timeline is not None:
            self.timeline, self._most_pressure = timeline, _pressure(report)
        self._finish(report)


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

    def __init__(self, session: TensorSession, batch: Any) -> None:
        self._session = session
        self._batch = batch
        self.logged: dict[str, float] = {}

    @unheard
    def __enter__(self) -> Session:
        session = self._session
        session._check_may_begin()
        self._signature = signature_of(self._batch)
        engine = session._engine
        self._circumstances = session._circumstances(self._signature)
        self._fit = session._known_to_fit(self._circumstances, self._batch)
        self._aside = self._fit is not None
        if self._fit is None:
            self._states, self._versions = session._state_entries(), session._versions()
        self._start = engine.controller.resident
        self._interrupts = DeferredInterrupts(engine.interrupts)
        self._began = time.perf_counter()
        named = functools.partial(session._tensors, self._batch)
        take_turn(engine, lambda: (tensor for _, tensor in named()), alone=not others_open(engine))
        if self._fit is not None:
            engine.place.begin_aside(self._fit.growth)
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
        session._conclude(report, timeline)

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
            step=len(self._session.history), signature=self._signature, managed=False,
            allowed=controller.allowed + measured.reserved, start_bytes=self._start, peak_bytes=peak,
            end_bytes=controller.resident, peak_rss_bytes=0, working_bytes=0, seconds=seconds, stall_seconds=0.0,
            recomputed_ops=0, recomputed_seconds=0.0, ops=0, bytes_out=0, bytes_in=0, dropped_bytes=0, drops=0, moves=0,
            refusals={}, escaped=0, unmanaged=0, logged=self.logged, device_peak_bytes=measured.peak,
            reserved_bytes=measured.reserved - controller.reserved,  # which such a step does not do without
        )  # fmt: skip


def tensor_header(allowed: Bytes, engine: TensorEngine, *, return_freed: bool) -> dict[str, Any]:
    """The first line of a run file."""
    own = {"spill_io": engine.place.spill_io, "return_freed": return_freed}
    return header(allowed, engine.controller.policy.name, engine.place.device) | own
