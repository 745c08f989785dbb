"""A CUDA device as the backend of a session."""

from __future__ import annotations

import time
from typing import Any, Final, final

import torch

from spillway.engines.environment import CUDA, GENERAL
from spillway.engines.tensors.abstract import AbstractBackend, AbstractTensorEngine, Measured
from spillway.engines.tensors.bindings import Binding, quickest_call
from spillway.engines.tensors.cuda_machine import CudaMachine, Exchanged, Resized
from spillway.engines.tensors.cuda_ops import HUNGRY, fit_for_cuda
from spillway.engines.tensors.custom_functions import CUSTOM_FUNCTIONS, GRAPHS_REFUSED
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.reserve import Meter, Reserve, Workspaces
from spillway.engines.tensors.retry import Retry
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import SessionError
from spillway.internals.private import CAN_SWAP
from spillway.memory.budget import UNLIMITED, Budget
from spillway.memory.lanes import OnDevice, TransferLog
from spillway.memory.records import Recipe
from spillway.methods.base import AbstractPolicy
from spillway.tiers.cuda_streams import CudaStreams
from spillway.tiers.host import HostPool
from spillway.units import Bytes, Seconds

_MOST_COSTS: Final = 1 << 14
"""Calls whose seconds are remembered."""


@final
class DeviceClock:
    """Seconds of ops as the device needs them, and not as long as the host takes to launch them.

    The first watched step of a signature runs synchronised: the host waits for the device around every op. From then
    on what was measured there is taken. (Published costs of recomputation are of launches, where nobody waited:
    DELTA's table V.)
    """

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._costs: dict[Any, Seconds] = {}
        self._met: set[str] = set()
        self.synchronised = False
        """Whether the host waits around every op."""

    def __call__(self) -> Seconds:
        if self.synchronised:
            self._streams.synchronize()
        return time.perf_counter()

    def begin_step(self, signature: str, *, wanted: bool) -> None:
        """Whether costs are measured in the step that begins."""
        self.synchronised = wanted and signature not in self._met
        if self.synchronised:
            self._met.add(signature)

    def learn(self, recipes: list[Recipe]) -> None:
        """A step's ops ran."""
        if not self.synchronised:
            return
        self.synchronised = False
        if len(self._costs) > _MOST_COSTS:
            self._costs.clear()
        for recipe in recipes:
            self._costs[_key(recipe)] = recipe.seconds

    def seconds_of(self, recipe: Recipe) -> Seconds:
        """What the op takes on the device; by the host's clock if nothing like it was measured."""
        return recipe.seconds if self.synchronised else self._costs.get(_key(recipe), recipe.seconds)


def _key(recipe: Recipe) -> tuple[Any, ...]:
    return recipe.name, recipe.nbytes, *(read.storage.nbytes for read in recipe.reads)


@final
class CudaBackend(AbstractBackend):
    """Device memory, with at most `host_budget` bytes of pinned host memory below it. `exchanges` says whether bytes
    can be exchanged under a storage; by default whether this torch can do it."""

    def __init__(self, streams: CudaStreams, host_budget: Bytes, *, exchanges: bool = CAN_SWAP) -> None:
        self.streams = streams
        self.device, self.memory = streams.device, streams.total
        self.devices = frozenset({streams.device})
        self.pool = HostPool(streams.pin, host_budget)
        self.machine = self._machine = CudaMachine(streams, self.pool, Exchanged(streams) if exchanges else Resized())
        self.log = TransferLog()
        self.creations = self.reserve = Reserve(streams)
        self.reserve.twice = lambda: self._machine.largest_given
        self.meter = Meter(streams)
        self.workspaces = Workspaces(self.meter, HUNGRY)
        self.retry = Retry(streams)
        self.generator = streams.generator
        self.settings = GENERAL + CUDA
        self.now = self.clock = DeviceClock(streams)
        self.moment, self.when = streams.moment, streams.when
        self._machine.seconds_of = self.clock.seconds_of
        self._engine: AbstractTensorEngine | None = None
        self._limited = False
        self._lanes: OnDevice | None = None
        self._synchronised = False
        self._peak: Bytes = 0

    def attach(self, engine: AbstractTensorEngine) -> None:
        """From here on ops that find no memory run again, and custom functions find their tensors."""
        self._engine = engine
        self._limited = engine.controller.budget.allowed < UNLIMITED
        self.reserve.attach(engine.budget)
        self.retry.attach(engine)
        self._machine.allocate = lambda run, nbytes: self.retry.run(run, "bringing a storage back", nbytes)
        self._machine.again = self.retry.run
        CUSTOM_FUNCTIONS.add(engine)
        self._machine.spare = self.reserve.unused

    def learn_op(self, info: OpInfo) -> None:
        """What need not be the same twice, and what needs much for itself."""
        fit_for_cuda(info)
        info.call = self._in_order(self.retry.guarded(info, info.call))

    def calls(self, info: OpInfo) -> tuple[Binding, Binding]:
        """The quickest, run again when they find no memory."""
        call, call_with = quickest_call(info.func)
        return self._in_order(self.retry.guarded(info, call)), self._in_order(self.retry.guarded(info, call_with))

    def _in_order(self, call: Binding) -> Binding:
        """`call`, on whatever stream, after what came before. Where nothing leaves, streams are the user's business."""
        if not self._limited:
            return call
        follow = self.streams.follow

        def following(*args: Any, **kwargs: Any) -> Any:
            follow()
            return call(*args, **kwargs)

        return following

    def follow(self) -> None:
        """As an op does."""
        if self._limited:
            self.streams.follow()

    # ------------------------------------------------------------------ steps

    def begin_step(self, allowed: Bytes, base_rss: Bytes | None, signature: str) -> None:
        """Look what is on the device beside the account; measure from here. What was given to any stream until now is
        done first: nobody knows what it uses, and what it copied is nobody's. Raises SessionError if a CUDA graph is
        being captured."""
        if self.streams.capturing():
            raise SessionError(GRAPHS_REFUSED)
        engine = self._attached()
        self.streams.synchronize()
        policy, limited = engine.controller.policy, engine.controller.budget.allowed < UNLIMITED
        if limited and (policy.uses_recipes or policy.foresees or policy.follows):  # it weighs or begins copies
            self._machine.measure_link()
        self.reserve.look()
        self.meter.begin()
        self.clock.begin_step(signature, wanted=policy.uses_recipes and limited)
        self._synchronised, self._lanes = self.clock.synchronised, None
        self._machine.forget_times()

    def finish_ops(self) -> None:
        """What the ops cost is known now."""
        self.clock.learn(self._attached().controller.recipes)

    def end_step(self) -> None:
        """Without storages that can be read in place everything comes back. Then the device is waited for: what a
        report says of a step is of all of it.
        """
        engine = self._attached()
        try:
            if not self._machine.readable_in_place:
                with engine.controller.lock:
                    engine.restore_all()
        finally:
            self.streams.synchronize()
            self._lanes = self._machine.lanes(synchronised=self._synchronised)
            self._peak = self.meter.peak()
            self.reserve.learn(self._peak)
            self._machine.reap()

    def measured(self) -> Measured:
        """Peak of the allocator, and what the lanes did."""
        return Measured(peak=self._peak, lanes=self._lanes)

    def close(self) -> None:
        """Give the pinned memory back."""
        if self._engine is not None:
            CUSTOM_FUNCTIONS.remove(self._engine)
        self._machine.close()

    def _attached(self) -> AbstractTensorEngine:
        assert self._engine is not None, "attach() comes first"
        return self._engine


def cuda_engine(
    policy: AbstractPolicy, budget: Bytes | Budget, streams: CudaStreams, host_budget: Bytes, *,
    exchanges: bool = CAN_SWAP,
) -> TensorEngine:  # fmt: skip
    """An engine for the tensors of one CUDA device. In the budget, or the account of it, is what is set aside for
    libraries; `host_budget` is of pinned host memory."""
    warm_up(streams.device)
    return TensorEngine(policy, budget, backend=CudaBackend(streams, host_budget, exchanges=exchanges))


def warm_up(device: torch.device) -> None:
    """Let the libraries take their workspaces, forward and backward, so that they are seen when memory is counted."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        weight = torch.ones(64, 64, device=device, requires_grad=True)
        out = torch.nn.functional.linear(weight @ weight, weight, weight[0])
        torch.autograd.grad(out.sum(), weight)
