"""What a session on the CPU costs besides copies: for every op that it watches, every storage that it handles, and
every question that its method asks.

A small model is trained, each step beside a plain one: just below its peak, where next to nothing has to leave, with
batches of several sizes; and at half of that, there also by a method that asks much.

NOTE [Cold caches]. The longer an op ran, the more of the engine's own Python and of its records it pushed out of the
processor's caches, and the longer takes what the engine does around it: about 10 us after an op of no length, 25 after
one of 50 us, 80 after one of a millisecond. Over that range it grows as the square root of the op's seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import inf, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, Delta
from spillway.methods.base import AbstractPolicy
from spillway.tiers.speed import Speed
from spillway.units import Bytes, Seconds

_WIDTH: Final = 256
_WARM: Final = 2
_ROUNDS: Final = 11
_TIMED: Final = 3
"""Steps whose ops are timed."""


class _Shape(NamedTuple):
    """Of the model and its batch; an activation has a KiB for every row."""

    layers: int
    rows: int


_PRESSED: Final = (_Shape(layers=16, rows=16), _Shape(layers=16, rows=256))
_WATCHED: Final = (*_PRESSED, _Shape(layers=8, rows=1024), _Shape(layers=4, rows=4096))


class Watching(NamedTuple):
    """What compute waits for Python."""

    op: Seconds
    root: float
    """For every op besides, times the square root of its own seconds (NOTE [Cold caches])."""
    storage: Seconds
    """For every storage that leaves or comes back, and every op that runs again."""
    question: Seconds
    """For every question that a policy asks about a storage."""
    copy: Seconds
    """What a copy takes beside its bytes, among ops and not among copies."""


def measure_watching(directory: Path, link: Speed) -> Watching:
    """Measure it, in some seconds; what has to leave goes to `directory`, which is as fast as `link` says.

    Raises SpillError as a session does.
    """
    roots, peaks, watched = dict[_Shape, float](), dict[_Shape, Bytes](), dict[_Shape, _Step]()
    for shape in _WATCHED:
        trainer = _Trainer(shape, LRU(), UNLIMITED, directory)
        roots[shape] = sum(map(sqrt, trainer.op_seconds()))
        peaks[shape] = trainer.peak()
        watched[shape] = _median(_Trainer(shape, LRU(), peaks[shape] - 1, directory).steps())
    op, root = _law([(step.ops, roots[shape], step.python, step.python) for shape, step in watched.items()])

    def pressed(policy: Callable[[], AbstractPolicy]) -> Iterator[tuple[_Step, Seconds]]:
        """At half of the peak: a step, and its Python but for that of ops."""
        for shape in _PRESSED:
            step = _median(_Trainer(shape, policy(), peaks[shape] // 2, directory).steps())
            yield step, step.python - op * step.ops - root * roots[shape]

    handling, asking = list(pressed(LRU)), list(pressed(Delta))
    storage, question = _law([(step.handled, step.questions, rest, step.python) for step, rest in (*handling, *asking)])
    waited = sum(step.stalled - step.bytes_out / link.out - step.bytes_in / link.back for step, _ in handling)
    copy = max(waited / max(sum(step.copies for step, _ in handling), 1), 0.0)
    return Watching(op=op, root=root, storage=storage, question=question, copy=copy)


def _law(steps: Sequence[tuple[float, float, Seconds, Seconds]]) -> tuple[Seconds, Seconds]:
    """What each of one thing and of another takes, by least squares; neither is negative. Of each step there is how
    much it has of the one and of the other, the seconds that all took, and those that an error is a share of."""
    known = [(one / unit, other / unit, seconds / unit) for one, other, seconds, unit in steps if unit > 0]
    best = (inf, 0.0, 0.0)
    for uses in ((True, True), (True, False), (False, True)):  # what would be negative is left out
        columns = [[value for value, used in zip(row, uses, strict=False) if used] for row in known]
        if not columns:
            break
        found = iter(np.linalg.lstsq(np.array(columns), np.array([row[-1] for row in known]), rcond=None)[0])
        first, second = (float(next(found)) if used else 0.0 for used in uses)
        off = sum((first * one + second * other - seconds) ** 2 for one, other, seconds in known)
        if min(first, second) >= 0:
            best = min(best, (off, first, second))
    return best[1:]


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
            self._models = [_model(shape.layers), _model(shape.layers)]
            self._optimizers = [torch.optim.AdamW(model.parameters()) for model in self._models]
            self._batch = torch.randn(shape.rows, _WIDTH)

    def peak(self) -> Bytes:
        """Of a step that keeps everything."""
        with self._engine() as engine:
            for _ in range(_WARM):
                self._managed(engine)
            return engine.controller.budget.peak

    def op_seconds(self) -> list[Seconds]:
        """Of every op of a plain step, the median of some."""
        clocks = [_Clock() for _ in range(_WARM + _TIMED)]
        for clock in clocks:
            with clock:
                self._train(0)
        return list(map(statistics.median, zip(*(clock.seconds for clock in clocks[_WARM:]), strict=True)))

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
            questions=counters.questions, bytes_out=counters.bytes_out, bytes_in=counters.bytes_in,
        )  # fmt: skip

    def _managed(self, engine: TensorEngine) -> None:
        engine.begin_step([("parameter", parameter) for parameter in self._models[1].parameters()])
        try:
            self._train(1)
        finally:
            engine.end_step()

    def _train(self, which: int) -> None:
        self._models[which](self._batch).sum().backward()
        self._optimizers[which].step()
        self._optimizers[which].zero_grad()


@final
class _Clock(cast(Any, TorchDispatchMode)):  # type: ignore[misc]  # torch's class has no annotations
    """Times every op that is more than a view."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[Seconds] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        result = op(*args, **kwargs or {})
        if not op.is_view:
            self.seconds.append(time.perf_counter() - began)
        return result


def _model(layers: int) -> torch.nn.Module:
    built = [(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(_WIDTH)) for _ in range(layers)]
    return torch.nn.Sequential(*(module for layer in built for module in layer))
