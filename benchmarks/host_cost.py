"""What watching costs by op when nothing has to leave, with recipes and without.

The step is a small one on purpose: where ops take microseconds, every microsecond beside them shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import Clock, median_ratio
from benchmarks.training import METHODS
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

LIMITS: Final = {TRACKING: 10.0, **dict.fromkeys(RECIPES, 12.0)}
"""Microseconds per op over plain."""
NOTHING_THERE: Final = 6.9
"""What the mode that does nothing costs where these limits were set, in microseconds."""
KNOWN_LIMIT: Final = 10.0
"""Microseconds per op over plain, in a step that is known to fit."""
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
    encoder = Encoder(shape)
    encoder.step()
    with CountsOps() as counting:
        encoder.step()
    return counting.ops


Around = Callable[[], AbstractContextManager[object]]
"""Makes what a step stands in."""


@final
class Turns:
    """One competitor: every call is a turn of several steps, each measured with and without what it stands in."""

    def __init__(self, encoder: Encoder, arounds: Mapping[str, Around], steps: int) -> None:
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


def competitor(*, kind: str, shape: dict[str, int], steps: int) -> Turns:
    """A competitor by its name. Where the step is known to fit it takes turns with plain steps, in one process."""
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
    method = {TRACKING: "keep-all", **RECIPES, **KNOWN}[kind]
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
    kinds = (PLAIN, NOTHING, TRACKING, *RECIPES)
    rows = _beside_nothing([_row(kind, size.small, ops, _Times(answers[kind], kind), plain) for kind in kinds])
    known = [_known_row(kind, size.small, ops, answers[kind]) for kind in KNOWN]
    known += [_known_row(kind, size.large, ops_of(size.large), answers[kind + LARGE]) for kind in KNOWN]
    return Result(
        title="what a step costs beyond plain when nothing has to leave",
        columns=COLUMNS,
        rows=[*rows, *known],
        checks=[*(check for row in rows for check in _both_ways(row)), *_known_checks(known)],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(competitor="competitor", shape="layers x width", ops="ops"),
    *columns.seconds(seconds="time", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", cpu_ratio="CPU x plain"),
    *columns.shown("{:.2f}".format, us_per_op="us/op", cpu_us_per_op="CPU us/op", times_nothing="x nothing"),
    *columns.shown("{:.0f}".format, edges_us="begin, end us"),
)

NOTES: Final = (
    "Times are medians of whole steps, begin and end of the session's step included. us/op: the difference to plain, "
    "by the ops that the dispatcher hands over, views included. Its target is checked on CPU time. x nothing: the "
    "same as a multiple of what the mode that does nothing costs: what any engine in Python pays on this machine. The "
    f"targets were set where that is {NOTHING_THERE} us; scaled to it they are checked as well. begin, end: what of it "
    "the step takes beside its ops (CPU).",
    "Known to fit: watched without recipes. Plain steps and steps of the session alternate in one process; the ratio "
    "is the median over pairs.",
)


def _measured(size: Size, tell: Tell) -> dict[str, list[dict[str, Any]]]:
    small, large = asdict(size.small), asdict(size.large)
    jobs = {kind: _job(kind, small, size.steps) for kind in (PLAIN, NOTHING, TRACKING, *RECIPES, *KNOWN)}
    jobs |= {kind + LARGE: _job(kind, large, size.large_steps) for kind in KNOWN}
    return {name: found[1:] for name, found in answered(jobs, size.rounds, tell).items()}


def _job(kind: str, shape: dict[str, int], steps: int) -> Job:
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


def _row(kind: str, shape: Shape, ops: int, times: _Times, plain: _Times) -> dict[str, Any]:
    seconds, cpu = statistics.median(times.wall), statistics.median(times.cpu)
    over, over_cpu = seconds - statistics.median(plain.wall), cpu - statistics.median(plain.cpu)
    row = {
        "competitor": kind, "shape": str(shape), "ops": ops, "seconds": seconds, "cpu_seconds": cpu,
        "ratio": seconds / statistics.median(plain.wall), "cpu_ratio": cpu / statistics.median(plain.cpu),
    }  # fmt: skip
    added = {"us_per_op": over / ops * 1e6, "cpu_us_per_op": over_cpu / ops * 1e6, "edges_us": times.edges() * 1e6}
    return row | (dict.fromkeys(added) if kind == PLAIN else added)


def _beside_nothing(rows: Sequence[Row]) -> list[Row]:
    """The rows with their cost per op as a multiple of that of the mode that does nothing."""
    nothing = next(row["cpu_us_per_op"] for row in rows if row["competitor"] == NOTHING)
    costs = [row["cpu_us_per_op"] for row in rows]
    return [
        {**row, "times_nothing": None if cost is None else cost / nothing}
        for row, cost in zip(rows, costs, strict=True)
    ]


def _known_row(kind: str, shape: Shape, ops: int, turns: Sequence[Any]) -> Row:
    times, plain = _Times(turns, kind), _Times(turns, PLAIN)
    ratios = {"ratio": median_ratio(times.wall, plain.wall), "cpu_ratio": median_ratio(times.cpu, plain.cpu)}
    return _row(kind, shape, ops, times, plain) | ratios


def _both_ways(row: Row) -> list[Check]:
    """As measured, and as it would be where the mode that does nothing costs what it did when the limit was set."""
    limit = LIMITS.get(row["competitor"])
    if limit is None:
        return []
    what = f"CPU us per op over plain, {row['competitor']}"
    scaled = row["times_nothing"] * NOTHING_THERE
    return [
        Check(what=what, measured=row["cpu_us_per_op"], at_most=limit),
        Check(what=f"{what}, scaled", measured=scaled, at_most=limit),
    ]


def _known_checks(rows: Sequence[Row]) -> list[Check]:
    return [
        Check(
            what=f"CPU us per op over plain, {row['competitor']}, {row['shape']}",
            measured=row["cpu_us_per_op"], at_most=KNOWN_LIMIT,
        )
        for row in rows
    ]  # fmt: skip


BENCHMARK: Final = Benchmark(
    name="host_cost",
    run=run,
    full=Size(
        rounds=31,
        steps=10,
        small=Shape(width=64, layers=4, batch=2, length=16),
        large=Shape(width=256, layers=4, batch=4, length=128),
        large_steps=2,
    ),
    quick=Size(
        rounds=2,
        steps=2,
        small=Shape(width=16, layers=1, batch=2, length=4),
        large=Shape(width=16, layers=1, batch=2, length=8),
        large_steps=1,
    ),
)
