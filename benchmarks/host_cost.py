"""What watching costs by op when nothing has to leave: with recipes and without, in the native hook and in Python.

The encoder's step is a small one on purpose: where ops take microseconds, every microsecond beside them shows. Between
the ops of real steps the processor's caches are cold.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from benchmarks import columns
from benchmarks.models import build
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import Clock, median_ratio
from benchmarks.training import METHODS, longest_batch
from benchmarks.turns import answered
from benchmarks.workers import Job
from spillway.units import GiB

PLAIN: Final = "plain"
NOTHING: Final = "a dispatch mode that does nothing"
TRACKING: Final = "tracking, keep-all"
_WITH_RECIPES: Final = ("lru", "delta", "delta-published")
RECIPES: Final = {f"with recipes, {method}": method for method in _WITH_RECIPES}
KNOWN: Final = {f"known to fit, {method}": method for method in _WITH_RECIPES}
"""The methods of competitors, by their names."""
LARGE: Final = ", large"
"""Ends the names of those on the large encoder."""

IN_PYTHON: Final = ", without the hook"
LIMITS: Final = {
    TRACKING: 2.0, **dict.fromkeys(RECIPES, 2.0), TRACKING + IN_PYTHON: 10.0, f"with recipes, lru{IN_PYTHON}": 12.0,
}  # fmt: skip
"""Microseconds per op over plain."""
KNOWN_LIMIT: Final = 1.01
"""Times plain, of a step of some milliseconds that is known to fit."""
REAL: Final = "real step, with recipes, lru"
REAL_LIMIT: Final = 4.0
"""Microseconds per op over plain, in steps of real models."""
ROOM: Final = 16 * GiB
"""A budget that nothing here comes near. Not None: without a budget, the engine leaves out what a budget needs."""


@frozen
class Shape:
    """An encoder and its input."""

    width: int
    layers: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, input {self.batch} x {self.length}"


@frozen
class Size:
    """How much is measured."""

    rounds: int
    """Turns that every competitor gets; the first does not count."""
    steps: int
    """Steps in a turn."""
    small: Shape
    """The encoder of the cost per op."""
    large: Shape
    """A step of a more usual length, for sessions that know that it fits."""
    large_steps: int
    """Steps of that in a turn."""
    real: Sequence[str]
    """Models of real steps."""


@final
class Encoder:
    """A transformer encoder with AdamW and one fixed input."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(shape.width, 4, 4 * shape.width, batch_first=True)
        self.model = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.input: Tensor = torch.randn(shape.batch, shape.length, shape.width)

    def step(self) -> None:
        loss: Tensor = self.model(self.input).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


class DoesNothing(TorchDispatchMode):
    """What any engine at this place pays before it has done anything."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without torch's wrapper against dynamo, as the engine's mode: with it, doing nothing costs twice as much.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class CountsOps(TorchDispatchMode):
    """Counts what the dispatcher hands over."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def ops_of(shape: Shape) -> int:
    """Ops of one step, once the optimizer has its state."""
    return _ops_of(Encoder(shape))


Around = Callable[[], AbstractContextManager[object]]
"""Makes what a step stands in."""


@final
class Turns:
    """One competitor: every call is a turn of several steps, each measured with and without what it stands in."""

    def __init__(self, encoder: Encoder | Real, arounds: Mapping[str, Around], steps: int) -> None:
        self._encoder = encoder
        self._arounds = arounds
        self._steps = steps

    def __call__(self) -> dict[str, list[dict[str, list[float]]]]:
        clocks = {name: (Clock(), Clock()) for name in self._arounds}
        for _ in range(self._steps):
            for name, around in self._arounds.items():
                whole, ops = clocks[name]
                with whole.running(), around(), ops.running():
                    self._encoder.step()
        return {name: [asdict(clock) for clock in pair] for name, pair in clocks.items()}


@final
class Real:
    """A model's own training, on its longest batch."""

    def __init__(self, name: str) -> None:
        self._workload = build(name, {})
        self.input = longest_batch(self._workload, among=4)
        self.model, self.optimizer = self._workload.model, self._workload.optimizers

    def step(self) -> None:
        self._workload.train_step(self.input)


def competitor(*, kind: str, shape: dict[str, int] | str, steps: int) -> Turns:
    """A competitor by its name. A step that is known to fit, or a real one, takes turns with plain ones."""
    if kind.endswith(IN_PYTHON):
        os.environ["SPILLWAY_NATIVE"] = "arena"  # of this worker
    if isinstance(shape, str):
        real = Real(shape)
        memory = spillway.manage(real.model, real.optimizer, budget=ROOM, method=METHODS["lru"]())
        return Turns(real, {PLAIN: nullcontext, kind: memory.step}, steps)
    encoder = Encoder(Shape(**shape))
    if kind in KNOWN:
        return Turns(encoder, {PLAIN: nullcontext, kind: _known(encoder, kind)}, steps)
    nothing = DoesNothing()
    arounds: dict[str, Around] = {PLAIN: nullcontext, NOTHING: lambda: nothing}
    if kind in LIMITS:
        # Entered without a batch, so that no size is ever known to fit.
        arounds[kind] = _session(encoder, kind).step
    return Turns(encoder, {kind: arounds[kind]}, steps)


def _session(encoder: Encoder, kind: str) -> spillway.Session:
    method = {TRACKING: "keep-all", **RECIPES, **KNOWN}[kind.removesuffix(IN_PYTHON)]
    return spillway.manage(encoder.model, encoder.optimizer, budget=ROOM, method=METHODS[method]())


def _known(encoder: Encoder, kind: str) -> Around:
    memory = _session(encoder, kind)
    while not memory.history or memory.history[-1].managed:
        if len(memory.history) == 5:
            raise RuntimeError("After five steps of one size the session does not know that it fits.")
        with memory.step(encoder.input):
            encoder.step()
    return lambda: memory.step(encoder.input)


def run(size: Size, tell: Tell) -> Result:
    """Measure every competitor on the small encoder, and sessions that know that it fits on both."""
    answers = _measured(size, tell)
    ops = ops_of(size.small)
    plain = _Times(answers[PLAIN], PLAIN)
    rows = [_row(kind, size.small, ops, _Times(answers[kind], kind), plain) for kind in SMALL]
    known = [_known_row(kind, size.small, ops, answers[kind]) for kind in KNOWN]
    known += [_known_row(kind, size.large, ops_of(size.large), answers[kind + LARGE]) for kind in KNOWN]
    real = [_known_row(REAL, name, _ops_of(Real(name)), answers[name]) for name in size.real]
    return Result(
        title="what a step costs beyond plain when nothing has to leave",
        columns=COLUMNS,
        rows=[*rows, *known, *real],
        notes=NOTES,
    )


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        kind, of = row["competitor"], f"{row['competitor']}, {row['shape']}"
        if kind in KNOWN:
            what = f"CPU of a step over plain, {of}"
            yield Check(what=what, measured=row["cpu_ratio"], at_most=KNOWN_LIMIT)
        elif kind == REAL or kind in LIMITS:
            limit = REAL_LIMIT if kind == REAL else LIMITS[kind]
            yield Check(what=f"CPU us per op over plain, {of}", measured=row["cpu_us_per_op"], at_most=limit)


def _ops_of(trained: Encoder | Real) -> int:
    trained.step()
    with CountsOps() as counting:
        trained.step()
    return counting.ops


SMALL: Final = (PLAIN, NOTHING, TRACKING, *RECIPES, *(kind for kind in LIMITS if kind.endswith(IN_PYTHON)))
"""Competitors on the small encoder, each in a process of its own."""

COLUMNS: Final[Sequence[Column]] = (
    *columns.text(competitor="competitor", shape="layers x width", ops="ops"),
    *columns.seconds(seconds="time", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", cpu_ratio="CPU x plain"),
    *columns.shown("{:.2f}".format, us_per_op="us/op", cpu_us_per_op="CPU us/op"),
    *columns.shown("{:.0f}".format, edges_us="begin, end us"),
)

NOTES: Final = (
    "Times are medians of whole steps, begin and end of the session's step included. us/op: the difference to plain, "
    "by the ops that the dispatcher hands over, views included. Its target is checked on CPU time. begin, end: what of "
    "it the step takes beside its ops (CPU). Without the hook: `SPILLWAY_NATIVE=arena`.",
    "Known to fit: nobody watches the step but the arena. There and in real steps plain steps and steps of the session "
    "alternate in one process; the ratio is the median over pairs.",
)


def _measured(size: Size, tell: Tell) -> dict[str, list[dict[str, Any]]]:
    small, large = asdict(size.small), asdict(size.large)
    jobs = {kind: _job(kind, small, size.steps) for kind in (*SMALL, *KNOWN)}
    jobs |= {kind + LARGE: _job(kind, large, size.large_steps) for kind in KNOWN}
    jobs |= {name: _job(REAL, name, 1) for name in size.real}
    return {name: found[1:] for name, found in answered(jobs, size.rounds, tell).items()}


def _job(kind: str, shape: dict[str, int] | str, steps: int) -> Job:
    return Job(function="benchmarks.host_cost:competitor", options={"kind": kind, "shape": shape, "steps": steps})


@final
class _Times:
    """All measurements of a competitor: whole steps, and the ops inside."""

    def __init__(self, turns: Sequence[dict[str, Any]], kind: str) -> None:
        pairs = [turn[kind] for turn in turns]
        self.wall = [seconds for whole, _ in pairs for seconds in whole["wall"]]
        self.cpu = [seconds for whole, _ in pairs for seconds in whole["cpu"]]
        self.ops_cpu = [seconds for _, ops in pairs for seconds in ops["cpu"]]

    def edges(self) -> float:
        """Seconds of CPU at the begin and end of a step."""
        return statistics.median(whole - ops for whole, ops in zip(self.cpu, self.ops_cpu, strict=True))


def _row(kind: str, shape: Shape | str, ops: int, times: _Times, plain: _Times) -> dict[str, Any]:
    seconds, cpu = statistics.median(times.wall), statistics.median(times.cpu)
    over, over_cpu = seconds - statistics.median(plain.wall), cpu - statistics.median(plain.cpu)
    row = {
        "competitor": kind, "shape": str(shape), "ops": ops, "seconds": seconds, "cpu_seconds": cpu,
        "ratio": seconds / statistics.median(plain.wall), "cpu_ratio": cpu / statistics.median(plain.cpu),
    }  # fmt: skip
    added = {"us_per_op": over / ops * 1e6, "cpu_us_per_op": over_cpu / ops * 1e6, "edges_us": times.edges() * 1e6}
    return row | (dict.fromkeys(added) if kind == PLAIN else added)


def _known_row(kind: str, shape: Shape | str, ops: int, turns: Sequence[Any]) -> Row:
    times, plain = _Times(turns, kind), _Times(turns, PLAIN)
    ratios = {"ratio": median_ratio(times.wall, plain.wall), "cpu_ratio": median_ratio(times.cpu, plain.cpu)}
    return _row(kind, shape, ops, times, plain) | ratios


BENCHMARK: Final = Benchmark(
    name="host_cost",
    run=run,
    judge=_checks,
    full=Size(
        rounds=31,
        steps=10,
        small=Shape(width=64, layers=4, batch=2, length=16),
        large=Shape(width=256, layers=4, batch=4, length=128),
        large_steps=2,
        real=("stdlib-lm", "resnet"),
    ),
    quick=Size(
        rounds=2,
        steps=2,
        small=Shape(width=16, layers=1, batch=2, length=4),
        large=Shape(width=16, layers=1, batch=2, length=8),
        large_steps=1,
        real=("resnet",),
    ),
)
