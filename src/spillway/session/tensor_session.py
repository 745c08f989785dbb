"""Sessions of the tensor engine: every storage, whatever the model."""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

import torch

from spillway.engines.tensors.cpu_backend import CpuBackend
from spillway.engines.tensors.history import ByName
from spillway.engines.tensors.origins import modules_by_id, named_tensors
from spillway.engines.tensors.probe import smallest_budget
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.engines.tensors.torch_patches import others_open
from spillway.engines.tensors.turns import end_turn, take_turn
from spillway.errors import BudgetInfeasible, SessionError, SpillFullError, SpillwayError
from spillway.internals.private import process_groups, unheard
from spillway.internals.process_memory import peak_rss, reset_peak
from spillway.ir import RunWriter, StepReport, Timeline
from spillway.ir.timeline import WindowAt
from spillway.memory.budget import UNLIMITED
from spillway.methods.dynn_offload import DynnOffload
from spillway.methods.planned import Planned, SelfPlanned
from spillway.session.abstract_session import AbstractStep, Session, header
from spillway.session.called import Calls
from spillway.session.foreseen_steps import ForeseenSteps
from spillway.session.inputs import circumstances, leaves, signature_of
from spillway.session.planned_steps import PlannedSteps
from spillway.units import Bytes, Seconds

if TYPE_CHECKING:
    from spillway.report.live import LiveLine, LiveView

SPARE: Final = 32
"""One part in so many of what a step takes has to be left for it to run unwatched."""


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
        live: LiveLine | LiveView | None,
        *,
        opens: Callable[..., TensorEngine],
        keep_timeline: bool,
        return_freed: bool,
    ) -> None:
        super().__init__(models, optimizers, writer, live)
        self._opens = opens
        """Opens another engine, for another budget."""
        self._keep_timeline = keep_timeline
        self._return_freed = return_freed
        self._fits: dict[Hashable, tuple[Bytes, Bytes]] = {}
        """Of steps that kept everything, resident bytes when they began and from there to the peak. Another like one is
        expected to, not promised: it is watched all the same."""
        self._unwatched: dict[Hashable, tuple[Bytes, Bytes]] = {}
        """Of those that may run unwatched, bytes from when they began to the peak, of what ops take for themselves too,
        and of what they use that they do not make."""
        self._varying: set[Hashable] = set()
        """Of those that did and took more than the budget: they are watched."""
        self._most_pressure = (False, -1, 0)
        self._told_other = False
        self._unwritten: Timeline | None = None
        """The timeline, until it stands in the run file."""
        self._plans: PlannedSteps | ForeseenSteps | None = None
        self._take(engine)
        self._parts = [module for model in models for module in model.modules()]
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        known = self._named_bytes(())
        on_cpu = isinstance(engine.backend, CpuBackend)
        self._base_rss = max(engine.resident_set.read() - known, 0) if return_freed and on_cpu else None

    @property
    def allowed(self) -> Bytes:
        return self._engine.budget.named

    @property
    def foresight(self) -> dict[str, Any] | None:
        return self._plans.told() if isinstance(self._plans, ForeseenSteps) else None

    def _call_began(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(self._running, _Step) and not self._running._unwatched:
            self._running._calls(model, args, kwargs)

    def _take(self, engine: TensorEngine) -> None:
        """Steps run under this engine from here on."""
        policy, plans = engine.controller.policy, self._plans
        self._plans = None
        if isinstance(plans, ForeseenSteps):
            plans.close()
        if isinstance(policy, SelfPlanned):
            self._plans = PlannedSteps(policy, engine, self._models, self._optimizers)
        elif isinstance(policy, DynnOffload):
            self._plans = ForeseenSteps(policy, engine, self._models, self._optimizers)
        self._engine, self._pending = engine, engine.interrupts

    @unheard
    def _allow(self, allowed: Bytes) -> None:
        """Whether there is a budget at all is built into an engine; how large it is is not."""
        before = self._engine
        if before.budget.limited == (allowed < UNLIMITED):
            if isinstance(self._plans, PlannedSteps):
                self._plans.forget()
            before.budget.allow(allowed)
            return
        self._take(self._opens(allowed=allowed))
        self._engine.leave_as(before)
        self._fits.clear()
        self._unwatched.clear()
        before.close()

    def _make_step(self, batch: Any, owner: weakref.ref[Any]) -> AbstractStep:
        return _Step(self, batch, owner)

    def _deliver(self) -> None:
        self._engine.raise_interrupt()

    def _header(self) -> dict[str, Any]:
        return tensor_header(self.allowed, self._engine, return_freed=self._return_freed)

    def _give_up(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._engine.close)
            if isinstance(self._plans, ForeseenSteps):
                stack.callback(self._plans.close)
            if self._live is not None:
                stack.callback(self._live.close)
            if self._writer is not None:
                stack.callback(self._writer.close)
                unwritten, self._unwritten = self._unwritten, None
                if unwritten is not None:
                    self._write({"timeline": unwritten.to_json()})

    # ------------------------------------------------------------------ for _Step

    def _check_no_nccl(self) -> None:
        """What NCCL has under way is ordered by streams, which was never tried here. Raises SessionError if collectives
        might run on a CUDA device."""
        if self._engine.backend.device.type != "cpu" and process_groups():
            raise SessionError(
                f"A process group of {torch.distributed.get_world_size()} is initialised, and on a CUDA device what "
                f"collectives write is not seen by methods that watch every op: use a method of the block engine, such "
                f"as method='mimose', or leave the process group (torch.distributed.destroy_process_group()) before "
                f"the step."
            )

    def _state_entries(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def _versions(self) -> list[int]:
        """One number per optimizer that moves when it updates what it was made for; one for all without optimizers."""
        groups = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in self._optimizers]
        return [sum([parameter._version for parameter in parameters]) for parameters in groups or [self._parameters]]

    def _known_to_fit(self, circumstances: Hashable) -> bool:
        """Whether the same step on the same sizes ran before, kept everything, and would again from where memory stands
        now, or stood then: what it found there may come again."""
        controller = self._engine.controller
        policy, most = controller.policy, controller.budget.allowed
        start, growth = self._fits.get(circumstances, (0, most + 1))
        every = policy.follows and not (isinstance(policy, SelfPlanned) and not policy.asked)
        if self._keep_timeline or controller.away or every:
            return False
        return max(self._engine.resident, start) + growth <= most

    def _needs_no_watch(self, circumstances: Hashable) -> bool:
        """Whether the arena alone is to watch over a step that is known to fit. It counts small blocks as malloc gives
        them, so that a little has to be left."""
        engine, meter = self._engine, self._engine.backend.unwatched
        growth, unseen = self._unwatched.get(circumstances, (0, -1))
        if meter is None or unseen < 0 or engine.recorded is not None:
            return False
        needed = meter.counted(engine.budget.resident) + growth + growth // SPARE + unseen
        return needed <= engine.budget.allowed and not self._grouped

    def _learn_to_fit(self, circumstances: Hashable, report: StepReport) -> None:
        """A step kept everything, and was a whole one."""
        growth = report.peak_bytes - report.start_bytes
        self._fits[circumstances] = report.start_bytes, growth
        if circumstances not in self._varying and self._engine.needs_no_watch:
            with_ops = max(report.device_peak_bytes - report.start_bytes, growth)
            self._unwatched[circumstances] = with_ops, self._engine.from_outside

    def _forget_to_fit(self, circumstances: Hashable) -> None:
        self._fits.pop(circumstances, None)
        self._unwatched.pop(circumstances, None)

    def _say_that_the_plan_is_of_another_step(self) -> None:
        policy, ops = self._engine.controller.policy, self._engine.ops
        if not isinstance(policy, Planned) or self._told_other or self._engine.following is None:
            return
        if policy.diverged is not None or ops != policy.ops:
            self._told_other = True
            at = min(ops, policy.ops) if policy.diverged is None else policy.diverged
            warnings.warn(
                f"The plan is for another step, of {policy.ops} ops: this one, of {ops}, is different from op {at} on, "
                f"and from there the stalest storages were moved when room got short; record the step that is trained, "
                f"and plan that.",
                stacklevel=6,
            )


@final
class _Step(AbstractStep):
    """One step, watched op by op."""

    _session: TensorSession

    def __init__(self, session: TensorSession, batch: Any, owner: weakref.ref[Any]) -> None:
        super().__init__(session, batch, owner)
        self._engine = session._engine
        self._calls = Calls()
        self._ended = self._unwatched = self._varies = False
        self._taken = (0, 0)

    @unheard
    def begin(self) -> None:
        session, engine = self._session, self._engine
        session._check_no_nccl()
        self._signature = self._latest = signature_of(self._batch)
        device = engine.backend.device
        self._circumstances = circumstances(self._signature, device, session._parts, session._parameters)
        self._began = time.perf_counter()
        named = functools.partial(session._tensors, self._batch)
        plans = [] if session._plans is None else [session._plans.end]
        abandon = functools.partial(self._calls.abandon, *plans, engine.close, self.deferred.shut)
        take_turn(engine, self, lambda: (tensor for _, tensor in named()), abandon, alone=not others_open(engine))
        if self._circumstances in session._unwatched:
            engine.meet(session._models, session._optimizers, functools.partial(session._tensors, ()))
        known_to_fit = session._known_to_fit(self._circumstances)
        if known_to_fit and session._needs_no_watch(self._circumstances):
            self._unwatched = True
            inputs = (leaf for leaf in leaves(self._batch) if isinstance(leaf, torch.Tensor))
            engine.begin_unwatched(inputs, session._unwatched[self._circumstances][1])
            return
        self._states, self._versions = session._state_entries(), session._versions()
        if session._plans is not None:
            session._plans.begin(None if known_to_fit else self._circumstances, self._batch)
        record = None
        if session._keep_timeline:
            models = session._models
            record = ByName(
                named, lambda: named_tensors(models, session._optimizers), lambda: modules_by_id(models)
            )  # fmt: skip
        reset_peak()
        engine.begin_step(
            named(), base_rss=session._base_rss, record=record,
            signature=self._signature, recipes=not known_to_fit,
        )  # fmt: skip
        self._calls.begin(session._models)

    def micro_batch(self, batch: Any) -> None:
        """Nothing is learned of a step whose sizes differ: the next one that begins like it may go on otherwise."""
        told = signature_of(batch)
        if told and told != self._latest:
            self._varies, self._latest = True, told
            self._signature += f", {told}"

    def end(self) -> SpillwayError | None:
        self._calls.end()
        if self._ended:
            return None
        late: SpillwayError | None = None
        try:
            if self._unwatched:
                # What took more than there was room for is watched the next time.
                session = self._session
                self._taken = self._engine.end_unwatched()
                if self._taken[1]:
                    session._varying.add(self._circumstances)
                    session._forget_to_fit(self._circumstances)
                    session._engine.bring_into_memory(tensor for _, tensor in session._tensors(()))
            self._engine.end_step()
        except (BudgetInfeasible, SpillFullError) as at_the_end:
            late = at_the_end  # everything is back all the same; what the body raised is what the user has to see
        finally:
            if self._session._plans is not None:
                self._session._plans.end()
            end_turn(self._engine)
        self._ended = True
        return late

    @property
    def refused(self) -> BudgetInfeasible | None:
        return self._engine.budget.refused

    def told(self, refusal: BudgetInfeasible) -> BudgetInfeasible:
        session = self._session
        found = self._calls.found
        return smallest_budget(refusal, session._engine, session._models, session._optimizers, self._batch, found)

    @unheard
    def conclude(self) -> None:
        session, engine = self._session, self._engine
        seconds = time.perf_counter() - self._began
        if self._varies:
            session._varying.add(self._circumstances)
            session._forget_to_fit(self._circumstances)
        if self._unwatched:
            session._finish(self._unwatched_report(seconds))
            return
        report = report_of(engine, len(session.history), self._signature, seconds, self.logged)
        kept_all = not (report.moves or report.drops or report.refusals or engine.controller.away)
        if not kept_all:
            session._forget_to_fit(self._circumstances)
        elif self._signature and not self._varies and self._is_whole():
            session._learn_to_fit(self._circumstances, report)
        if engine.history is not None:
            pressure = self._pressure(report)
            timeline = engine.history.stop(len(session.history) if pressure > session._most_pressure else None)
            engine.history = None
            if timeline is not None:
                session._most_pressure = pressure
                session.timeline = session._unwritten = replace(timeline, window=self._window)
        session._finish(report)
        session._say_what_ran_eagerly(engine)
        if self._is_whole():  # a first one makes the optimizer's state
            session._say_that_the_plan_is_of_another_step()
        if session._plans is not None:
            session._plans.conclude(seconds)

    def forget(self) -> None:
        super().forget()
        if isinstance(self._session._plans, PlannedSteps):
            self._session._plans.over()

    @property
    def _window(self) -> tuple[WindowAt, ...]:
        plans = self._session._plans
        return plans.window if isinstance(plans, PlannedSteps) else ()

    def _pressure(self, report: StepReport) -> tuple[bool, Bytes, Bytes]:
        """By which the step is chosen whose timeline is kept: one that a window planned before any other."""
        return bool(self._window), report.bytes_out + report.bytes_in + report.dropped_bytes, report.peak_bytes

    def _unwatched_report(self, seconds: Seconds) -> StepReport:
        """What the arena counted."""
        engine, (peak, beyond) = self._engine, self._taken
        return StepReport(
            step=len(self._session.history), signature=self._signature, managed=False, allowed=engine.budget.named,
            start_bytes=engine.start_bytes, peak_bytes=peak, end_bytes=engine.resident, peak_rss_bytes=0,
            working_bytes=0, seconds=seconds, stall_seconds=0.0, recomputed_ops=0, recomputed_seconds=0.0, ops=0,
            bytes_out=0, bytes_in=0, dropped_bytes=0, drops=0, moves=0, refusals={}, escaped=0, unmanaged=0,
            logged=self.logged, device_peak_bytes=peak, beyond_bytes=beyond, reserved_bytes=engine.budget.reserved,
        )  # fmt: skip

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


def tensor_header(allowed: Bytes, engine: TensorEngine, *, return_freed: bool) -> dict[str, Any]:
    """The first line of a run file."""
    own = {"spill_io": engine.backend.spill_io, "return_freed": return_freed}
    return header(allowed, engine.controller.policy.name, engine.backend.device) | own


def report_of(
    engine: TensorEngine, number: int, signature: str, seconds: Seconds, logged: dict[str, float]
) -> StepReport:
    """Of the step that the engine has just ended."""
    counters, measured = engine.controller.counters, engine.backend.measured()
    return StepReport(
        step=number, signature=signature, managed=engine.recording,
        allowed=engine.budget.named, start_bytes=engine.start_bytes, peak_bytes=engine.budget.peak,
        end_bytes=engine.resident, peak_rss_bytes=peak_rss(), working_bytes=counters.floor_bytes,
        seconds=seconds, stall_seconds=counters.stall_seconds,
        recomputed_ops=counters.recomputed_ops, recomputed_seconds=counters.recomputed_seconds, ops=engine.ops,
        bytes_out=counters.bytes_out,
        bytes_in=counters.bytes_in, dropped_bytes=counters.dropped_bytes, drops=counters.drops,
        moves=counters.moves, refusals=dict(counters.refusals), escaped=engine.escaped_count(),
        unmanaged=engine.unmanaged, logged=logged, transfer_seconds=engine.transfers.seconds,
        hidden_seconds=engine.transfers.hidden_seconds, bytes_out_beside=counters.early_out,
        bytes_in_beside=counters.early_in, device_peak_bytes=measured.peak, beyond_bytes=measured.beyond,
        reserved_bytes=engine.budget.reserved,
    )  # fmt: skip
