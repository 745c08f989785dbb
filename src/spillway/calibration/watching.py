"""What a session on the CPU costs besides copies: for every op that it watches, every storage that it handles and
every question that its method asks.

A small model is trained with batches of several sizes, each step beside a plain one: just below its peak, where next to
nothing has to leave; at less than that, by methods that ask little and much; and by a plan. One law of all these steps
is fitted at once.

NOTE [Cold caches]. The longer an op ran, the more of the engine's own Python and of its records it pushed out of the
processor's caches, and the longer takes all that is done around it, as the square root of the op's seconds. By how much
cannot be told in seconds: steps of some milliseconds say anything from nothing to twice as long. Timed by itself, what
DELTA does ahead of ops takes 1.2 times as long among ops of 25 us (a deep narrow network) as among shorter ones, 1.5
times among those of 110 us (a language model) and 1.9 times among those of 480 us (a ResNet).

NOTE [Copies beside ops]. Threads that copy need Python's lock before and after each copy. A short op ends while one of
them has it, and compute waits until the system has woken it up again; a long one does not notice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import product
from math import inf, sqrt
from pathlib import Path
from typing import Final, NamedTuple, Self, final

import numpy as np
import torch

from spillway.costs import DEVICES
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.ir import Step
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, Delta, KeepAll, Planned, Problem, Window
from spillway.methods.base import AbstractPolicy
from spillway.recording.steps import named_tensors, record_step
from spillway.tiers.speed import Speed
from spillway.units import Bytes, Seconds

_WIDTH: Final = 256
_SIDE: Final = 16
"""Of a picture."""
_WARM: Final = 2
_ROUNDS: Final = 8
_TIMED: Final = 3
"""Steps whose ops are timed."""
_PART: Final = 2
"""Of the peak, what a plan keeps."""
_NOISE: Final = 0.01
"""Of a plain step, by how much two medians differ by chance."""
COLD_ROOT: Final = 75.0
"""By what share Python takes longer, over the square root of an op's seconds (NOTE [Cold caches])."""


class _Shape(NamedTuple):
    """Of the model and its batch."""

    layers: int
    rows: int
    channels: int = 0
    """Of convolutions, which leave the processor's caches colder; 0 for products of matrices."""


_SHAPES: Final = (
    _Shape(16, rows=16), _Shape(16, rows=256), _Shape(8, rows=1024), _Shape(8, rows=16, channels=64),
    _Shape(4, rows=64, channels=64),
)  # fmt: skip
_SHARES: Final = (0.75, 0.5)
"""Of the peak, budgets under which much has to leave."""


class Watching(NamedTuple):
    """What compute waits for Python."""

    op: Seconds
    """For every op."""
    storage: Seconds
    """For every storage that leaves or comes back, and every op that runs again."""
    question: Seconds
    """For every question that a policy asks about a storage."""
    beside: Seconds
    """For every copy besides that begins while ops run (NOTE [Copies beside ops])."""
    copy: Seconds
    """What a copy takes beside its bytes, among ops and not among copies."""


def measure_watching(directory: Path, link: Speed) -> Watching:
    """Measure it, in some seconds; what has to leave goes to `directory`, which is as fast as `link` says.

    Raises SpillError as a session does.
    """
    samples, waited, copies = list[_Sample](), 0.0, 0
    for shape in _SHAPES:
        trainer = _Trainer(shape, LRU(), UNLIMITED, directory)
        root, peak = sum(map(sqrt, trainer.op_seconds())), trainer.peak()
        steps = [_median(_Trainer(shape, LRU(), peak - 1, directory).steps())]
        steps.append(_median(_Trainer.following(shape, peak // _PART, directory).steps()))
        for share in _SHARES:
            steps.append(_median(_Trainer(shape, Delta(), int(share * peak), directory).steps()))
            steps.append(_median(_Trainer(shape, LRU(), int(share * peak), directory).steps()))
            waited += steps[-1].stalled - steps[-1].bytes_out / link.out - steps[-1].bytes_in / link.back
            copies += steps[-1].copies
        for step in steps:
            cold = 1 + COLD_ROOT * root / step.ops
            counts = (step.ops, step.handled, step.questions, step.early)
            samples.append(([cold * count for count in counts], step.python, step.python + _NOISE * step.plain))
    op, storage, question, beside = _law(samples)
    return Watching(op, storage, question, beside, copy=max(waited / max(copies, 1), 0.0))


_Sample = tuple[Sequence[float], Seconds, Seconds]
"""A step: how much it has of each thing, the seconds that all took, and those that an error is a share of."""


def _law(steps: Sequence[_Sample]) -> tuple[Seconds, ...]:
    """What each of some things takes, by least squares; none is negative."""
    known = [(*(float(one) / unit for one in things), seconds / unit) for things, seconds, unit in steps if unit > 0]
    count = len(steps[0][0])
    best = (inf, (0.0,) * count)
    for uses in product((True, False), repeat=count):  # what would be negative is left out
        if not known or not any(uses):
            continue
        table = np.array(known)
        used = np.flatnonzero(uses)
        found = np.zeros(count)
        found[used] = np.linalg.lstsq(table[:, used], table[:, -1], rcond=None)[0]
        off = float(np.sum((table[:, :-1] @ found - table[:, -1]) ** 2))
        if found.min() >= 0:
            best = min(best, (off, tuple(map(float, found))))
    return best[1]


class _Step(NamedTuple):
    """A step, and the plain one beside it."""

    plain: Seconds
    seconds: Seconds
    stalled: Seconds
    recomputing: Seconds
    ops: int
    copies: int
    """Out and in."""
    handled: int
    """Storages that left, storages that came back, and ops that ran again."""
    questions: int
    """That the policy asked about storages."""
    early: int
    """Copies that began while ops ran."""
    bytes_out: Bytes
    bytes_in: Bytes

    @property
    def python(self) -> Seconds:
        """What is left."""
        return self.seconds - self.plain - self.stalled - self.recomputing


def _median(steps: Iterable[_Step]) -> _Step:
    """Of every figure by itself: plain steps are disturbed at other moments than those beside them."""
    return _Step(*(statistics.median_low(figures) for figures in zip(*steps, strict=True)))


@final
class _Trainer:
    """Two copies of the model: one under the budget, one without."""

    def __init__(self, shape: _Shape, policy: AbstractPolicy, allowed: Bytes, directory: Path) -> None:
        self._policy = policy
        self._allowed = allowed
        self._directory = directory
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._models = [_model(shape), _model(shape)]
            self._optimizers = [torch.optim.AdamW(model.parameters()) for model in self._models]
            self._batch = torch.randn(shape.rows, *((shape.channels, _SIDE, _SIDE) if shape.channels else (_WIDTH,)))

    @classmethod
    def following(cls, shape: _Shape, allowed: Bytes, directory: Path) -> Self:
        """By the plan of an out-of-core window, which asks nothing of the device."""
        trainer = cls(shape, KeepAll(), UNLIMITED, directory)
        step, planner = trainer._recorded(1), Window()
        plan = planner.plan(Problem(step=step, allowed=allowed, device=DEVICES["h200"]))
        trainer._policy, trainer._allowed = Planned.as_meant(plan, step, planner), allowed
        return trainer

    def _recorded(self, which: int, *, warm_up: int = 1, timed_steps: int = 0) -> Step:
        return record_step(
            lambda: self._train(which), models=self._models[which], optimizers=self._optimizers[which],
            batch=self._batch, warm_up=warm_up, timed_steps=timed_steps,
        )  # fmt: skip

    def peak(self) -> Bytes:
        """Of a step that keeps everything."""
        with self._engine() as engine:
            for _ in range(_WARM):
                self._managed(engine)
            return engine.controller.budget.peak

    def op_seconds(self) -> list[Seconds]:
        """Of every op of a plain step, the median of some."""
        return [op.seconds or 0.0 for op in self._recorded(0, warm_up=_WARM, timed_steps=_TIMED - 1).ops]

    def steps(self) -> Iterator[_Step]:
        """Those that count."""
        with self._engine() as engine:
            for number in range(_WARM + _ROUNDS):
                step = self._beside(engine)
                if number >= _WARM:
                    yield step

    @contextmanager
    def _engine(self) -> Iterator[TensorEngine]:
        with torch.enable_grad(), closing(TensorEngine(self._policy, self._allowed, self._directory)) as engine:
            yield engine

    def _beside(self, engine: TensorEngine) -> _Step:
        began = time.perf_counter()
        self._train(0)
        between = time.perf_counter()
        self._managed(engine)
        ended, counters = time.perf_counter(), engine.controller.counters
        return _Step(
            plain=between - began, seconds=ended - between, stalled=counters.stall_seconds,
            recomputing=counters.recomputed_seconds, ops=engine.ops, copies=counters.moves + counters.reloads,
            handled=counters.drops + counters.moves + counters.reloads + counters.recomputed_ops,
            questions=counters.questions, early=counters.early,
            bytes_out=counters.bytes_out, bytes_in=counters.bytes_in,
        )  # fmt: skip

    def _managed(self, engine: TensorEngine) -> None:
        named = named_tensors(self._models[1:], self._optimizers[1:], self._batch)
        engine.begin_step([(kind.value, tensor) for kind, _, tensor in named])
        try:
            self._train(1)
        finally:
            engine.end_step()

    def _train(self, which: int) -> None:
        self._models[which](self._batch).sum().backward()
        self._optimizers[which].step()
        self._optimizers[which].zero_grad()


def _model(shape: _Shape) -> torch.nn.Module:
    nn, channels = torch.nn, shape.channels
    built: list[torch.nn.Module] = []
    for _ in range(shape.layers):
        if channels:
            built += [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        else:
            built += [nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH)]
    return nn.Sequential(*built)
