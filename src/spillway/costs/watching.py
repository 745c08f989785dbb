"""What a session on the CPU costs besides copies: for every op that it watches, and for every storage that it handles.

A small model is trained under two budgets, each step beside a plain one: just below its peak, where next to nothing has
to leave, and at half of that, there also by a method that looks ahead. Its ops are large enough to push the engine's
own Python out of the processor's caches, as ops that are worth a budget do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, NamedTuple, final

import torch

from spillway.engines.controller import UNLIMITED
from spillway.engines.tensors.engine import TensorEngine
from spillway.engines.tiers.speed import Speed
from spillway.methods import LRU, Delta
from spillway.methods.base import AbstractPolicy
from spillway.units import Bytes, Seconds

_LAYERS: Final = 16
_WIDTH: Final = 256
_ROWS: Final = 256
"""An activation is 256 KiB."""
_WARM: Final = 2
_ROUNDS: Final = 15


class Watching(NamedTuple):
    """What compute waits for Python."""

    op: Seconds
    """For every op."""
    storage: Seconds
    """For every storage that leaves or comes back, and every op that runs again."""
    look: Seconds
    """Whenever a policy that foresees is asked: as DELTA takes it."""
    copy: Seconds
    """What a copy takes beside its bytes, among ops and not among copies."""


def measure_watching(directory: Path, link: Speed) -> Watching:
    """Measure it, in some seconds; what has to leave goes to `directory`, which is as fast as `link` says.

    Raises SpillError as a session does.
    """
    peak = _Trainer(LRU(), UNLIMITED, directory).peak()
    watched = _median(_Trainer(LRU(), peak - 1, directory).steps())
    pressed = _median(_Trainer(LRU(), peak // 2, directory).steps())
    looking = _median(_Trainer(Delta(), peak // 2, directory).steps())
    op = _share(watched.python, watched.ops)
    storage = _share(pressed.python - op * pressed.ops, pressed.handled)
    look = _share(looking.python - op * looking.ops - storage * looking.handled, looking.looks)
    copying = pressed.bytes_out / link.out + pressed.bytes_in / link.back
    return Watching(op=op, storage=storage, look=look, copy=_share(pressed.stalled - copying, pressed.copies))


def _share(seconds: Seconds, count: int) -> Seconds:
    return max(seconds / max(count, 1), 0.0)


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
    looks: int
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

    def __init__(self, policy: AbstractPolicy, allowed: Bytes, directory: Path) -> None:
        self._policy = policy
        self._allowed = allowed
        self._directory = directory
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._models = [_model(), _model()]
            self._optimizers = [torch.optim.AdamW(model.parameters()) for model in self._models]
            self._batch = torch.randn(_ROWS, _WIDTH)

    def peak(self) -> Bytes:
        """Of a step that keeps everything."""
        with self._engine() as engine:
            for _ in range(_WARM):
                self._managed(engine)
            return engine.controller.peak

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
            looks=counters.looks, bytes_out=counters.bytes_out, bytes_in=counters.bytes_in,
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


def _model() -> torch.nn.Module:
    layers = [(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(_WIDTH)) for _ in range(_LAYERS)]
    return torch.nn.Sequential(*(module for layer in layers for module in layer))
