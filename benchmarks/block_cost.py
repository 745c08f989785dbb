"""What the block engine costs in time: beside plain steps where all is kept, beside torch's checkpoints where none is.

All competitors train one model in one process and take turns, step by step, in an order that is drawn each round: the
same weights at the same addresses. Only forward and backward are timed: the optimizer is the same everywhere.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, Final, TypeAlias, final

from torch.utils.checkpoint import checkpoint

from benchmarks import columns
from benchmarks.host_cost import CountsOps
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import Clock, median_ratio
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.methods.actions import Action
from spillway.workloads import Batch, Workload, get

PLAIN: Final = "plain"
BYPASSED: Final = "bypassed"
KEPT: Final = "kept, to be revoked"
RECOMPUTED: Final = "recomputed"
CHECKPOINT: Final = "torch.utils.checkpoint"

IDLE_LIMIT: Final = 1.01
"""Times the plain step."""
RECOMPUTED_LIMIT: Final = 1.02
"""Times the step in which `torch.utils.checkpoint` stands around every block."""
MOST_CALLS: Final = 12
"""Calls of Python functions that an idle engine may add to a call of a block, however many ops are in it."""
WARM: Final = 2
"""Rounds that do not count."""

Around: TypeAlias = Callable[[], AbstractContextManager[object]]


@frozen
class Model:
    """What is trained."""

    name: str
    """In the table."""
    build: Callable[[], Workload]
    """Makes it."""
    judged: bool = True
    """Whether the targets are for it: steps of a few milliseconds are there for what a call costs."""


@frozen
class Size:
    """How much is measured."""

    models: Sequence[Model]
    rounds: int
    """Steps of every competitor."""


@final
class Track:
    """One model, and what its steps stand in for each competitor."""

    def __init__(self, model: Model) -> None:
        self.workload = model.build()
        self.batch: Batch = next(iter(self.workload.batches(1)))
        self.blocks = discover(self.workload.model, lambda: self.workload.loss(self.workload.model, self.batch))
        self.arounds: Mapping[str, Around] = MappingProxyType(
            {
                PLAIN: contextlib.nullcontext,
                BYPASSED: partial(self._managed, Action.KEEP, bypassed=True),
                KEPT: partial(self._managed, Action.KEEP),
                RECOMPUTED: partial(self._managed, Action.RECOMPUTE),
                CHECKPOINT: self._checkpointed,
            }
        )
        # An engine that stays: what its first calls learn is known from then on.
        self._engine = BlockEngine(self.workload.model, self.blocks)
        for hook in self._engine._hooks:
            hook.remove()

    @contextlib.contextmanager
    def _managed(self, action: Action, *, bypassed: bool = False) -> Iterator[None]:
        self._engine.actions, self._engine.bypassed = lambda block, call: action, bypassed
        for hook in self._engine._hooks:
            hook.install()
        try:
            yield
        finally:
            for hook in self._engine._hooks:
                hook.remove()

    @contextlib.contextmanager
    def _checkpointed(self) -> Iterator[None]:
        modules = [self.workload.model.get_submodule(name) for name in self.blocks]
        for module in modules:
            vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
        try:
            yield
        finally:
            for module in modules:
                del vars(module)["forward"]

    def forward_and_backward(self) -> None:
        """What is timed."""
        loss = self.workload.loss(self.workload.model, self.batch)
        loss.backward()  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """What is not."""
        for optimizer in self.workload.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def python_calls(self, name: str) -> int:
        """Calls of functions that are written in Python, in one forward and backward."""
        with self.arounds[name]():
            self.forward_and_backward()  # what is done once is done
            fewest = min(_python_calls(self.forward_and_backward) for _ in range(3))  # the collector may come between
        self.end_step()
        return fewest

    def ops(self) -> int:
        """Ops of a plain forward and backward."""
        with CountsOps() as counting:
            self.forward_and_backward()
        self.end_step()
        return counting.ops


def _python_calls(function: Callable[[], None]) -> int:
    counted = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counted


def run(size: Size, tell: Tell) -> Result:
    """Measure every competitor on every model."""
    return Result(
        title="what a forward and a backward cost under the block engine",
        columns=COLUMNS,
        rows=[row for model in size.models for row in _rows(model, size.rounds, tell)],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", competitor="competitor", blocks="blocks", ops="ops"),
    *columns.seconds(seconds="time", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", cpu_ratio="CPU x plain", ratio_checkpoint="x checkpoint"),
    *columns.ratios(cpu_ratio_checkpoint="CPU x checkpoint"),
    *columns.shown("{:.0f}".format, us_per_call="us a block"),
    *columns.text(added="Python calls added"),
    *columns.shown("{:.1f}".format, added_per_call="a block"),
)

NOTES: Final = (
    "Ratios are medians over the rounds, each of which every competitor has one step in. us a block: the median "
    "difference to plain, by the blocks, on CPU time; of what recomputes it is mostly the second run. Python calls: "
    "what `sys.setprofile` counts in a forward and a backward beyond plain.",
    "Bypassed: what runs where everything fits. Kept, to be revoked: every saved tensor goes through a hook.",
)


def _rows(model: Model, rounds: int, tell: Tell) -> list[Row]:
    tell(model.name)
    track = Track(model)
    ops = track.ops()
    calls = {name: track.python_calls(name) for name in track.arounds}
    clocks = _measured(track, rounds, model.name, tell)
    blocks = len(track.blocks)
    return [
        {
            "model": model.name,
            "judged": model.judged,
            "competitor": name,
            "blocks": blocks,
            "ops": ops,
            **_times(clock, clocks, blocks),
            "added": None if name == PLAIN else calls[name] - calls[PLAIN],
            "added_per_call": None if name == PLAIN else (calls[name] - calls[PLAIN]) / blocks,
        }
        for name, clock in clocks.items()
    ]


def _measured(track: Track, rounds: int, model: str, tell: Tell) -> Mapping[str, Clock]:
    order, draw = list(track.arounds), random.Random(0)
    clocks = {name: Clock() for name in order}
    for number in range(rounds + WARM):
        if number % 20 == 0:
            tell(f"{model}: round {number} of {rounds + WARM}")
        draw.shuffle(order)
        for name in order:
            clock = clocks[name] if number >= WARM else Clock()
            with track.arounds[name](), clock.running():
                track.forward_and_backward()
            track.end_step()
    return clocks


def _times(clock: Clock, clocks: Mapping[str, Clock], blocks: int) -> dict[str, float]:
    plain, checkpointed = clocks[PLAIN], clocks[CHECKPOINT]
    over = [mine - theirs for mine, theirs in zip(clock.cpu, plain.cpu, strict=True)]
    return {
        "seconds": statistics.median(clock.wall),
        "cpu_seconds": statistics.median(clock.cpu),
        "ratio": median_ratio(clock.wall, plain.wall),
        "cpu_ratio": median_ratio(clock.cpu, plain.cpu),
        "ratio_checkpoint": median_ratio(clock.wall, checkpointed.wall),
        "cpu_ratio_checkpoint": median_ratio(clock.cpu, checkpointed.cpu),
        "us_per_call": statistics.median(over) / blocks * 1e6,
    }


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        if row["judged"]:
            yield from _of_row(row)


def _of_row(row: Row) -> Iterator[Check]:
    if row["competitor"] == BYPASSED:
        what = f"idle, times the plain step, {row['model']}"
        yield Check(what=what, measured=row["ratio"], at_most=IDLE_LIMIT)
        yield Check(what=f"{what}, CPU", measured=row["cpu_ratio"], at_most=IDLE_LIMIT)
        what = f"Python calls that idling adds to a call of a block, {row['model']}"
        yield Check(what=what, measured=row["added_per_call"], at_most=MOST_CALLS)
    if row["competitor"] == RECOMPUTED:
        what = f"every block recomputed, times torch.utils.checkpoint, {row['model']}"
        yield Check(what=what, measured=row["ratio_checkpoint"], at_most=RECOMPUTED_LIMIT)
        yield Check(what=f"{what}, CPU", measured=row["cpu_ratio_checkpoint"], at_most=RECOMPUTED_LIMIT)


def _bert(*, layers: int, width: int, batch: int, length: int, judged: bool = True) -> Model:
    build = partial(get, "bert-small", layers=layers, width=width, batch=batch, length=length)
    return Model(name=f"BERT, {layers} x {width}, {batch} x {length}", build=build, judged=judged)


def _resnet(**options: Any) -> Model:
    return Model(name=f"ResNet-34, width {options['width']}", build=partial(get, "resnet", **options))


BENCHMARK: Final = Benchmark(
    name="block_cost",
    run=run,
    judge=_checks,
    full=Size(
        models=(
            _bert(layers=6, width=256, batch=8, length=128),
            _resnet(width=16, batch=16),
            _bert(layers=6, width=64, batch=1, length=16, judged=False),
        ),
        rounds=100,
    ),
    quick=Size(models=(_bert(layers=2, width=64, batch=1, length=8), _resnet(width=2, batch=1)), rounds=2),
)
