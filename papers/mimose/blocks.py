"""What each block holds, and what recomputing each one alone does to the peak: Figures 10 and 11 of Mimose's paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

from torch import Tensor
from torch.profiler import record_function

from benchmarks import columns
from benchmarks.drawing import Line, Panel, drawn
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.mimose.lab import MARK, Subject, Taken, Trace, blocks_at, build, tracing
from spillway.engines.blocks.block_engine import BlockEngine, CallReport
from spillway.methods.actions import Action
from spillway.methods.mimose import BlockSample, Forecast, Options, StepSample, simulate
from spillway.methods.mimose.planning import SimulatedPlanning
from spillway.units import Bytes, MiB, format_bytes

TOO_HIGH: Final = 0.01
"""Target for the share by which peaks are foretold too high."""


@frozen
class Model:
    """A model and the sizes of its inputs."""

    name: str
    options: Mapping[str, Any]
    sizes: Sequence[int]


@frozen
class Size:
    """How much is measured."""

    pictures: Mapping[str, Model]
    """By the part of Fig. 10."""
    encoders: Model
    """Of Fig. 11."""
    learned: Sequence[int]
    """Lengths of the steps, every encoder recomputed, that the peaks are foretold from."""


def run(size: Size, tell: Tell) -> Result:
    """Measure the blocks of every model, then the peak with each encoder recomputed alone."""
    taken: dict[str, dict[int, list[Taken]]] = {}
    for figure, model in size.pictures.items():
        tell(f"{model.name} at {', '.join(map(str, model.sizes))}")
        taken[figure] = _blocks(model)
    peaks = _Peaks(size.encoders, tell)
    forecasts = peaks.forecasts(size.learned)
    measured = {length: peaks.alone(length) for length in size.encoders.sizes}
    foretold = {length: _foretold(forecasts[length]) for length in measured}
    rows = [row for figure, blocks in taken.items() for row in _block_rows(figure, size.pictures[figure], blocks)]
    rows += _peak_rows(measured, foretold)
    pictures = drawn("mimose_blocks_10.png", [_drawn(size.pictures[figure], taken[figure]) for figure in taken])
    pictures |= drawn("mimose_blocks_11.png", [_drawn_peaks(measured, foretold)])
    return Result(
        title=TITLE, columns=COLUMNS, rows=rows, checks=_checks(size, taken, measured, foretold),
        notes=NOTES, pictures=pictures,
    )  # fmt: skip


# ---------------------------------------------------------------------- Fig. 10


def _blocks(model: Model) -> dict[int, list[Taken]]:
    subject = build(model.name, model.options)
    with subject.engine(model.sizes[0]) as engine:
        subject.loss(model.sizes[0])  # shows which buffers a block writes to; until then none of them can be given up
        return {size: blocks_at(subject, engine, size) for size in model.sizes}


def _block_rows(figure: str, model: Model, blocks: Mapping[int, Sequence[Taken]]) -> list[Row]:
    return [
        {
            "figure": figure, "what": f"{model.name}, {each[0].block}", "sizes": list(blocks),
            "measured": [one.nbytes for one in each], "allocator": [one.freed for one in each],
        }
        for each in zip(*blocks.values(), strict=True)
    ]  # fmt: skip


def _drawn(model: Model, blocks: Mapping[int, Sequence[Taken]]) -> Panel:
    (count,) = {len(each) for each in blocks.values()}
    return Panel(
        title=f"{model.name}, {count} blocks", x=range(count), across="block", up="saved by the block, MiB",
        lines=[
            Line(label=f"{size} x {size}", y=[one.nbytes / MiB for one in each], colour=number)
            for number, (size, each) in enumerate(blocks.items())
        ],
    )  # fmt: skip


# ---------------------------------------------------------------------- Fig. 11


@final
class _Peaks:
    """Steps of a model, each traced.

    Arguments:
        model: Its sizes are those whose peaks are wanted.
        tell: Told of every size.
    """

    def __init__(self, model: Model, tell: Tell) -> None:
        subject: Subject = build(model.name, model.options)
        with subject.engine(model.sizes[0]) as engine:
            self._blocks = engine.blocks
        self._subject = replace(subject, blocks=self._blocks)
        self._sizes = model.sizes
        self._tell = tell

    def forecasts(self, learned: Sequence[int]) -> dict[int, Forecast]:
        """What a step of each size is expected to need, from steps of others that recompute every block."""
        planning, everything = SimulatedPlanning(Options()), set(self._blocks)
        gradients = [
            sum(parameter.nbytes for parameter in self._subject.model.get_submodule(block).parameters())
            for block in self._blocks
        ]
        for length in learned:
            self._tell(f"length {length}, every block recomputed")
            trace, calls = self._traced(length, everything)
            working = _working(trace, calls, gradients)
            samples = [
                BlockSample(
                    block=block, size=(length,), nbytes=call.own_bytes, seconds=call.seconds, working=working[block],
                    gradients=gradients[block],
                )
                for block, call in enumerate(calls)
            ]  # fmt: skip
            turn, back = ENDED + len(calls) - 1, REACHED + len(calls) - 1
            step = StepSample(
                size=(length,), recomputed=frozenset(range(len(calls))), peak=trace.peak(),
                turn_peak=trace.peak(since=turn, until=back),
                backward_peak=max(trace.peak(until=turn), trace.peak(since=back)),
            )  # fmt: skip
            planning.observe(step, samples, whole=True)
        return {length: planning.forecast((length,)) for length in self._sizes}

    def alone(self, length: int) -> list[Bytes]:
        """The peak with each block recomputed alone, and at the end that with none."""
        self._tell(f"length {length}, each of {len(self._blocks)} blocks recomputed alone")
        return [self._traced(length, {block})[0].peak() for block in self._blocks] + [
            self._traced(length, set())[0].peak()
        ]

    def _traced(self, length: int, recomputed: set[str]) -> tuple[Trace, list[CallReport]]:
        """A forward and a backward, after one that shows what the blocks write to."""
        subject = self._subject

        def action(block: str, call: int) -> Action:
            return Action.RECOMPUTE if block in recomputed else Action.KEEP

        with subject.engine(length, actions=action) as engine:
            self._step(engine, self._sizes[0])
            subject.model.zero_grad()  # the trace knows no sizes of what was there before, so nothing of it may go
            with tracing() as profiler:
                self._step(engine, length)
            return Trace(profiler), engine.calls

    def _step(self, engine: BlockEngine, length: int) -> None:
        with ExitStack() as hooks:
            for number, name in enumerate(engine.blocks):
                block = self._subject.model.get_submodule(name)
                for hook in (
                    block.register_forward_pre_hook(partial(_mark, BEGINS + number)),
                    block.register_forward_hook(partial(_mark_both, number)),
                ):
                    hooks.callback(hook.remove)
            self._subject.loss(length).backward()  # type: ignore[no-untyped-call]


BEGINS, ENDED, REACHED = 1000, 2000, 3000
"""Marks are these plus the number of a block: its forward begins or has ended, the backward reaches it."""


def _mark_both(number: int, _module: Any, _args: Any, output: Any) -> None:
    """The forward has ended, and the backward reaches the block when the gradient of its result is there."""
    _mark(ENDED + number)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    result.register_hook(partial(_mark, REACHED + number))


def _mark(mark: int, *_: Any) -> None:
    with record_function(f"{MARK}{mark}"):
        pass


def _working(trace: Trace, calls: Sequence[CallReport], gradients: Sequence[Bytes]) -> list[Bytes]:
    """What each block needs on top of what it saves, in a step that recomputes all; the least that any needs left out.

    As a session measures it: what is left out is part of the rest of the step, and of every block the worse of its
    forward and its backward counts.
    """
    totals: list[Bytes] = []
    for block, call in enumerate(calls):
        forward = trace.peak(since=BEGINS + block, until=ENDED + block)
        backward = trace.peak(since=REACHED + block, until=REACHED + block - 1 if block else None)
        totals.append(max(forward, backward - sum(gradients[block:])) - call.own_bytes)
    return [nbytes - min(totals) for nbytes in totals]


def _foretold(forecast: Forecast) -> list[Bytes]:
    blocks = len(forecast.saved)
    return [simulate(forecast, {block}).nbytes for block in range(blocks)] + [simulate(forecast, ()).nbytes]


def _peak_rows(measured: Mapping[int, list[Bytes]], foretold: Mapping[int, list[Bytes]]) -> list[Row]:
    (count,) = {len(peaks) for peaks in measured.values()}
    names = [f"BERT, encoder {number} alone recomputed" for number in range(count - 1)] + ["BERT, none recomputed"]
    return [
        {
            "figure": "11", "what": name, "sizes": list(measured),
            "measured": [peaks[at] for peaks in measured.values()],
            "foretold": [peaks[at] for peaks in foretold.values()],
            "apart": max(
                (foretold[length][at] / peaks[at] - 1 for length, peaks in measured.items()), key=abs, default=0.0
            ),
        }
        for at, name in enumerate(names)
    ]  # fmt: skip


def _drawn_peaks(measured: Mapping[int, list[Bytes]], foretold: Mapping[int, list[Bytes]]) -> Panel:
    lines = []
    for number, (length, peaks) in enumerate(measured.items()):
        *alone, none = peaks
        lines += [
            Line(label=f"{length} words", y=[one / MiB for one in alone], colour=number, style="o"),
            Line(label="foretold", y=[one / MiB for one in foretold[length][:-1]], colour=number, style="-"),
            Line(label="none recomputed", y=[none / MiB] * len(alone), colour=number, style=":"),
        ]
    return Panel(
        title=f"BERT, one of {len(alone)} encoders recomputed",
        x=range(len(alone)), across="the encoder that is recomputed", up="peak, MiB", lines=lines,
    )  # fmt: skip


# ---------------------------------------------------------------------- what is shown


def _checks(
    size: Size, taken: Mapping[str, Mapping[int, Sequence[Taken]]], measured: Mapping[int, list[Bytes]],
    foretold: Mapping[int, list[Bytes]],
) -> list[Check]:  # fmt: skip
    everything = [one for blocks in taken.values() for each in blocks.values() for one in each]
    pairs = [pair for length in measured for pair in zip(measured[length], foretold[length], strict=True)]
    largest = measured[max(measured)]
    return [
        Check(what="blocks of which the allocator does not get back what is counted",
              measured=sum(one.freed != one.nbytes for one in everything)),
        Check(what="peaks above those foretold", measured=sum(real > told for real, told in pairs)),
        Check(what="share by which a peak is foretold too high, at worst",
              measured=round(max(told / real - 1 for real, told in pairs), 4), at_most=TOO_HIGH),
        Check(what="of what the first encoder saves the peak, what the last one does",
              measured=round((largest[-1] - largest[-2]) / (largest[-1] - largest[0]), 4), at_most=0.1),
    ]  # fmt: skip


def _list_of(show: Callable[[Any], str]) -> Callable[[Sequence[Any]], str]:
    return lambda values: ", ".join(map(show, values))


TITLE: Final = "what blocks hold by input size, and the peak with one of them recomputed (Mimose's Figures 10 and 11)"

COLUMNS: Final = (
    *columns.text(figure="Fig.", what="what"),
    *columns.shown(_list_of(str), sizes="sizes"),
    *columns.shown(_list_of(format_bytes), measured="measured", allocator="from the allocator", foretold="foretold"),
    *columns.shown("{:+.2%}".format, apart="foretold, at worst"),
)

NOTES: Final = (
    "Fig. 10: bytes that autograd saves in each block, as the engine counts them, beside what torch's allocator got "
    "back when the block was given up (torch.profiler, exact), its result left out, at four sides of square pictures. "
    "Swin-T and ResNet-50 by their depths, a third and a half of their width, one picture.",
    "Fig. 11: the exact peak of a forward and a backward above what was there before, with one encoder of BERT "
    "recomputed and all others kept; 12 encoders, a third of the width, 4 rows of words. Foretold: by "
    "`methods.mimose.peaks.simulate`, from steps of five other lengths with every encoder recomputed, of which the "
    "peak at every block was measured as a session does. To recompute the last encoder saves nothing, because its "
    "bytes come back while those of all others are still there.",
)


BENCHMARK: Final = Benchmark(
    name="mimose_blocks",
    run=run,
    full=Size(
        pictures={
            "10a": Model(name="Swin", options={"depths": (2, 2, 6, 2), "width": 32, "batch": 1},
                         sizes=(256, 320, 384, 448)),
            "10b": Model(name="ResNet", options={"depths": (3, 4, 6, 3), "width": 32, "batch": 1},
                         sizes=(160, 224, 288, 352)),
        },
        encoders=Model(name="TC-Bert", options={"layers": 12, "width": 256, "batch": 4}, sizes=(64, 128, 192, 256)),
        learned=(40, 90, 150, 210, 300),
    ),
    quick=Size(
        pictures={"10b": Model(name="ResNet", options={"depths": (1, 1), "width": 8, "batch": 1}, sizes=(33, 65))},
        encoders=Model(name="TC-Bert", options={"layers": 3, "width": 64, "batch": 2}, sizes=(32,)),
        learned=(12, 20, 40),
    ),
)  # fmt: skip
