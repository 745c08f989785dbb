"""What a session on the CPU costs besides copies: for every op that it watches, and for every storage that it handles.

A small model is trained under two budgets, each step beside a plain one: just below its peak, where next to nothing has
to leave, and at half of that. Its ops are large enough to push the engine's own Python out of the processor's caches,
as ops that are worth a budget do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, final

import torch

from spillway.engines.controller import UNLIMITED
from spillway.engines.tensors.engine import TensorEngine
from spillway.methods.lru import LRU
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


def measure_watching(directory: Path) -> Watching:
    """Measure it, in some seconds; what has to leave goes to `directory`.

    Raises SpillError as a session does.
    """
    peak = _Trainer(UNLIMITED, directory).peak()
    watched = _median(_Trainer(peak - 1, directory).steps())
    pressed = _median(_Trainer(peak // 2, directory).steps())
    op = max(watched.python / watched.ops, 0.0)
    return Watching(op=op, storage=max((pressed.python - op * pressed.ops) / max(pressed.handled, 1), 0.0))


class _Step(NamedTuple):
    """A step, and the plain one beside it."""

    plain: Seconds
    seconds: Seconds
    waited: Seconds
    """For copies, and for ops that ran again."""
    ops: int
    handled: int
    """Storages that left, storages that came back, and ops that ran again."""

    @property
    def python(self) -> Seconds:
        """What is left."""
        return self.seconds - self.plain - self.waited


def _median(steps: Iterable[_Step]) -> _Step:
    """Of every figure by itself: plain steps are disturbed at other moments than those beside them."""
    plain, seconds, waited, ops, handled = (statistics.median(figures) for figures in zip(*steps, strict=True))
    return _Step(plain, seconds, waited, round(ops), round(handled))


@final
class _Trainer:
    """Two copies of the model: one under the budget, one without."""

    def __init__(self, allowed: Bytes, directory: Path) -> None:
        self._allowed = allowed
        self._directory = directory
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._models = [_model(), _model()]
            self._optimizers = [torch.optim.AdamW(model.parameters()) for model in self._models]
            self._batch = torch.randn(_ROWS, _WIDTH)

    def peak(self) -> Bytes:
        """Of a step that keeps everything."""
        with torch.enable_grad():
            engine = TensorEngine(LRU(), self._allowed, self._directory)
            try:
                for _ in range(_WARM):
                    self._managed(engine)
                return engine.controller.peak
            finally:
                engine.close()

    def steps(self) -> Iterator[_Step]:
        """Those that count."""
        with torch.enable_grad():
            engine = TensorEngine(LRU(), self._allowed, self._directory)
            try:
                for number in range(_WARM + _ROUNDS):
                    step = self._beside(engine)
                    if number >= _WARM:
                        yield step
            finally:
                engine.close()

    def _beside(self, engine: TensorEngine) -> _Step:
        began = time.perf_counter()
        self._train(0)
        between = time.perf_counter()
        self._managed(engine)
        ended, counters = time.perf_counter(), engine.controller.counters
        return _Step(
            plain=between - began, seconds=ended - between, ops=engine.ops,
            waited=counters.stall_seconds + counters.recomputed_seconds,
            handled=counters.drops + counters.moves + counters.reloads + counters.recomputed_ops,
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
