"""Steps of a network whose forward is foreseen: what a session tells `dynn-offload`, and what pilots learn of it.

NOTE [A foreseen step].

 1. Ops of the forward are written down as they run, by their sites, until a backward begins outside of all modules;
    what stood around the ops is taken away there. Each op is looked up in what is foreseen (`pilots/course.py`).
 2. When the sample is embedded the pilot that acts is asked what will run, and one that has more to say then is asked
    again whenever the host was handed a number, one op later.
 3. When the forward is over pilots are judged by it and learn it, in a thread of their own beside the backward. The
    next step waits for that.
 4. A pilot costs time and never a bit. Where anything of this fails the step goes on, and a warning says so.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import dropwhile
from typing import Any, Final, final

import numpy as np
import torch

from spillway.engines.tensors.abstract import Around, Known
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import FileFormatError
from spillway.internals.dispatch_key import Handler
from spillway.internals.private import unheard, unheard_by_modes
from spillway.memory.records import Storage
from spillway.methods.dynn_offload import DynnOffload
from spillway.pilots.architecture import Architecture
from spillway.pilots.course import Course
from spillway.pilots.paths import BaseType, Dynamism, Numbers, ResolvedPath, Sample
from spillway.pilots.pilot import AbstractPilot
from spillway.pilots.pilot_files import TrainedPilot, read_pilot
from spillway.pilots.program import Program
from spillway.pilots.referee import Referee
from spillway.recording.path_recorder import ForwardRecorder
from spillway.session.inputs import leaves
from spillway.session.planned_steps import StoppedClock, device_here
from spillway.units import Seconds

SHARE: Final = 0.5
"""Of the budget for parameters in use, there and on their way, where pilots are judged."""
_NOTHING: Final = np.zeros(0, np.int32)


@final
class ForeseenSteps:
    """See NOTE [A foreseen step]."""

    def __init__(
        self,
        policy: DynnOffload,
        engine: TensorEngine,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._policy, self._engine = policy, engine
        self._models, self._optimizers = models, optimizers
        self._dynamism = policy.dynamism or described(models)
        network = type(models[0]).__name__
        trained = self._loaded()
        program = trained.program if trained is not None else Program(Architecture(network, self._dynamism.base))
        self._program, self._course = program, Course(program)
        self._recorder = ForwardRecorder(program.architecture, models, self._dynamism)
        pilots: list[AbstractPilot] = [
            trained if trained is not None and make is type(trained) else make(program) for make in policy.pilots
        ]
        if trained is not None and trained not in pilots:
            pilots.append(trained)
        self._pilots = pilots
        self.referee: Referee | None = None
        """Who acts, and how each has done; None before the first step."""
        self._learner = ThreadPoolExecutor(1, thread_name_prefix="spillway-pilots")
        self._learning: Future[None] | None = None
        self._process = os.getpid()
        self._open = ExitStack()
        self._sizes: tuple[float, ...] = ()
        self._structure: tuple[float, ...] = ()
        self._steps = 0
        self._over, self._told, self._running = True, False, False
        self._asked = -2
        self._ends: list[Seconds] = []
        self._clock: Callable[[], Seconds] = time.perf_counter
        self._hooks = ExitStack()
        for optimizer in optimizers:  # a step may end in such a hook, when none can be taken away
            self._hooks.callback(optimizer.register_step_pre_hook(self._update_begins).remove)
            self._hooks.callback(optimizer.register_step_post_hook(self._update_ended).remove)

    def _loaded(self) -> TrainedPilot | None:
        """The pilot of the policy's file, if it is one of this network."""
        if self._policy.pilot_file is None:
            return None
        known = {
            name: one.untyped_storage().nbytes() for model in self._models for name, one in model.named_parameters()
        }
        try:
            pilot = read_pilot(self._policy.pilot_file).pilot
            for one in pilot.program.architecture.parameters:
                if known.get(one.name) != one.nbytes:
                    raise ValueError(f"it is of a network with a parameter {one}, which this model has not")
        except (FileFormatError, OSError, ValueError) as error:
            why = str(error).rstrip(".")
            warnings.warn(
                f"The pilot {self._policy.pilot_file} is not used: {why}. Steps begin in the order of the program, and "
                f"pilots learn as they run.",
                stacklevel=5,
            )
            return None
        return pilot

    # ------------------------------------------------------------------ steps

    def begin(self, kind: Hashable | None, batch: Any) -> None:
        """Before the engine begins a step."""
        self._wait()
        if not self._engine.budget.limited:
            return
        try:
            self._sizes, self._structure = self._dynamism.sizes(batch), tuple(self._dynamism.structure(batch))
        except Exception as error:
            self._give_up(error)
            return
        self._open.callback(self._let_go)
        self._open.enter_context(self._recorder.watching())
        self._engine.recorded, self._running = self._around, True

    def end(self) -> None:
        """When the engine has ended it. Calling it again does nothing."""
        self._open.close()

    def conclude(self, seconds: Seconds) -> None:
        """Of a step that nothing went wrong in: the forward of one without a backward is over now."""
        self._forward_is_over()

    def told(self) -> dict[str, Any] | None:
        """What the referee tells, when the last forward is learned; None before the first step."""
        self._wait()
        return None if self.referee is None else self.referee.told()

    def close(self) -> None:
        """Nobody learns any more. Calling it again does nothing."""
        self._hooks.close()
        self._learner.shutdown(wait=os.getpid() == self._process, cancel_futures=True)

    def _let_go(self) -> None:
        self._engine.recorded, self._running = None, False

    def _wait(self) -> None:
        """For what is being learned."""
        learning, self._learning = self._learning, None
        if learning is not None and os.getpid() == self._process:  # a forked child has no thread of pilots
            try:
                learning.result()
            except Exception as error:
                self._say(error)

    def _say(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"A forward of {self._program.architecture.network} could not be foreseen or learned "
                f"({type(error).__name__}: {error}); steps go on as before.",
                stacklevel=6,
            )

    # ------------------------------------------------------------------ the forward

    def _around(self, inner: Around | None) -> Around:
        """What hears of each op; here the engine knows what the step begins with."""
        self._over, self._asked, self._ends = False, -2, []
        stalls = self._engine.controller.counters.stalls
        self._clock = StoppedClock(lambda: stalls, len(stalls))
        if self.referee is None:
            device, room = device_here(self._engine, ()), max(int(self._engine.budget.allowed * SHARE), 1)
            self.referee = Referee(self._program, self._pilots, device=device, room=room)
        self._course.begin()
        members: list[list[Storage]] = [[] for _ in self._program.nbytes]
        for number, parameter in self._recorder.parameters.items():
            group, storage = self._program.group_of.get(number), self._engine.find(parameter)
            if group is not None and storage is not None:
                members[group].append(storage)
        self._policy.begin_forward(
            self._course, members, list(self._updated(self._optimizers, all_have_gradients=True))
        )

        def asking(known: Known) -> Handler:
            handler = known.handler if inner is None else inner(known)
            if self._engine.infos[id(known.func)].view:
                return handler

            def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if self._over:
                    return handler(mode, func, types, args, kwargs)
                if torch._C._current_graph_task_id() >= 0 and not self._recorder.in_module:
                    self._policy.begin_backward(self._engine.controller.clock)
                    self._forward_is_over()
                    if inner is None:
                        self._engine.record_no_further()
                    return handler(mode, func, types, args, kwargs)
                return self._written_down(handler, mode, func, types, args, kwargs)

            return handle

        return asking

    @unheard
    def _written_down(self, handler: Handler, mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            met = self._recorder.before(func, args, kwargs or {})
        except Exception as error:
            self._give_up(error)
            met = None
        out = handler(mode, func, types, args, kwargs)
        if met is not None and not self._over:
            try:
                self._ends.append(self._clock())
                self._course.passed(self._recorder.after(met, out), self._engine.controller.clock)
                if (asked := self._recorder.forward.asked) > self._asked:
                    self._asked = asked
                    self._foresee(asked)
            except Exception as error:
                self._give_up(error)
        return out

    def _give_up(self, error: Exception) -> None:
        """What was written down of this forward is of no use."""
        self._over = True
        self._say(error)

    def _foresee(self, asked: int) -> None:
        """Ask who acts, once the sample is embedded, and whenever the host was handed a number."""
        referee = self.referee
        acting = None if referee is None else referee.acting
        if asked < 0 or acting is None or (asked and not acting.redirects):
            return
        self._course.expect(acting.foresee(self._sample(asked), asked))

    def _sample(self, asked: int) -> Sample:
        """What is known of it so far. Ops that no forward before had are left out: nobody has learned them."""
        forward = self._recorder.forward
        known = len(self._program.rank)
        reached = forward.asked_at[asked - 1] + 2 if asked else 0
        keys = np.array([key for key in forward.keys[:reached] if key < known], np.int32)
        return self._of(ResolvedPath(-1, keys, _NOTHING, _NOTHING), _NOTHING)

    def _of(self, path: ResolvedPath, signatures: Numbers) -> Sample:
        forward = self._recorder.forward
        assert forward.embedding is not None
        width = len(forward.embedding)
        hidden = [one for one in forward.hidden if len(one) == width]
        asked_at = [at for at, one in zip(forward.asked_at, forward.hidden, strict=True) if len(one) == width]
        return Sample(
            step=self._steps, sizes=self._sizes, structure=self._structure, embedding=forward.embedding,
            base=self._dynamism.base, path=path, signatures=signatures,
            asked_at=np.array(asked_at, np.int32),
            hidden=np.array(hidden, np.float32).reshape(-1, width),
        )  # fmt: skip

    # ------------------------------------------------------------------ what follows

    def _forward_is_over(self) -> None:
        """Pilots learn it meanwhile."""
        forward, referee = self._recorder.forward, self.referee
        if self._over:
            return
        self._over = True
        if referee is None or forward.embedding is None or not forward.keys:
            return
        try:
            sample = self._of(ResolvedPath(-1, _NOTHING, _NOTHING, _NOTHING), np.array(forward.signatures, np.int32))
            seconds = np.diff(np.array([self._ends[0], *self._ends]))
            self._learning = self._learner.submit(
                _learn, referee, self._program.architecture, sample, forward.keys, forward.starts, forward.operands,
                seconds,
            )  # fmt: skip
        except Exception as error:
            self._say(error)
        self._steps += 1

    @unheard_by_modes
    def _update_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running:
            return
        later = [*dropwhile(lambda one: one is not optimizer, self._optimizers)]
        updated = self._updated(later, all_have_gradients=False)
        self._policy.begin_update(self._engine.controller.clock + 1, list(updated))

    def _update_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._policy.end_update()

    def _updated(self, optimizers: Iterable[torch.optim.Optimizer], *, all_have_gradients: bool) -> Iterator[Storage]:
        """What optimizers use, in their order: of every parameter that has a gradient the gradient, the state, and
        itself. Before the backward it is taken that all will have one."""
        find = self._engine.find
        for optimizer in optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter.grad is None and not all_have_gradients:
                    continue
                state = optimizer.state.get(parameter, {})
                held = state.values() if isinstance(state, dict) else ()
                for one in (parameter.grad, *held, parameter):
                    storage = find(one) if isinstance(one, torch.Tensor) else None
                    if storage is not None:
                        yield storage


def _learn(
    referee: Referee, architecture: Architecture, sample: Sample, keys: list[int], starts: list[int],
    operands: list[int], seconds: Any,
) -> None:  # fmt: skip
    """In the thread of pilots."""
    referee.learn(replace(sample, path=architecture.path(keys, starts, operands)), seconds)


def described(models: Sequence[torch.nn.Module]) -> Dynamism:
    """What pilots are told of a network of which nobody has said more: what its first embedding makes of a sample (or
    its first layer, where there is no embedding), and the shape of the batch's first tensor."""
    modules = [(name, module) for name, module in models[0].named_modules() if name]
    embeds = [name for name, one in modules if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    layers = [name for name, one in modules if any(True for _ in one.parameters(recurse=False))]
    kinds = {type(one) for _, one in modules}
    base = BaseType.TRANSFORMER
    if any(issubclass(kind, torch.nn.RNNBase | torch.nn.RNNCellBase) for kind in kinds):
        base = BaseType.LSTM
    elif any(issubclass(kind, torch.nn.modules.conv._ConvNd) for kind in kinds):
        base = BaseType.CNN
    return Dynamism(base=base, embedding=next(iter([*embeds, *layers]), ""), sizes=_shape)


def _shape(batch: Any) -> tuple[float, ...]:
    """How many tensors there are, how many elements they have, and the leading dimensions of the first."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    first = [*(tensors[0].shape if tensors else ()), 0, 0, 0][:3]
    return float(len(tensors)), float(sum(one.numel() for one in tensors)), *map(float, first)
