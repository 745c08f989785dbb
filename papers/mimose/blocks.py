"""What each block holds, and what recomputing each one alone does to the peak: Figures 10 and 11 of Mimose's paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks import columns
from benchmarks.drawing import Line, Panel, drawn
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.mimose.lab import Subject, Taken, Trace, blocks_at, build, tracing
from spillway.methods.actions import Action
from spillway.units import Bytes, MiB, format_bytes


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


def run(size: Size, tell: Tell) -> Result:
    """Measure the blocks of every model, then the peak with each encoder recomputed alone."""
    taken: dict[str, dict[int, list[Taken]]] = {}
    for figure, model in size.pictures.items():
        tell(f"{model.name} at {', '.join(map(str, model.sizes))}")
        taken[figure] = _blocks(model)
    measured = _peaks(size.encoders, tell)
    rows = [row for figure, blocks in taken.items() for row in _block_rows(figure, size.pictures[figure], blocks)]
    rows += _peak_rows(measured)
    pictures = drawn("mimose_blocks_10.png", [_drawn(size.pictures[figure], taken[figure]) for figure in taken])
    pictures |= drawn("mimose_blocks_11.png", [_drawn_peaks(measured)])
    return Result(
        title=TITLE, columns=COLUMNS, rows=rows, notes=NOTES, pictures=pictures,
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


FIGURE_11: Final = "11"


def _peaks(model: Model, tell: Tell) -> dict[int, list[Bytes]]:
    """By length: the peak with each block recomputed alone, and at the end that with none."""
    subject = build(model.name, model.options)
    with subject.engine(model.sizes[0]) as engine:
        subject = replace(subject, blocks=engine.blocks)
    peaks = {}
    for length in model.sizes:
        tell(f"length {length}, each of {len(subject.blocks)} blocks recomputed alone")
        peaks[length] = [_peak(subject, length, block) for block in (*subject.blocks, None)]
    return peaks


def _peak(subject: Subject, length: int, recomputed: str | None) -> Bytes:
    """Of a forward and a backward, after one that shows what the blocks write to."""

    def action(block: str, call: int) -> Action:
        return Action.RECOMPUTE if block == recomputed else Action.KEEP

    with subject.engine(length, actions=action):
        subject.loss(length).backward()  # type: ignore[no-untyped-call]
        subject.model.zero_grad()  # the trace knows no sizes of what was there before, so nothing of it may go
        with tracing() as profiler:
            subject.loss(length).backward()  # type: ignore[no-untyped-call]
        return Trace(profiler).peak()


def _peak_rows(measured: Mapping[int, list[Bytes]]) -> list[Row]:
    (count,) = {len(peaks) for peaks in measured.values()}
    names = [f"BERT, encoder {number} alone recomputed" for number in range(count - 1)] + ["BERT, none recomputed"]
    return [
        {
            "figure": FIGURE_11, "what": name, "sizes": list(measured),
            "measured": [peaks[at] for peaks in measured.values()],
        }
        for at, name in enumerate(names)
    ]  # fmt: skip


def _drawn_peaks(measured: Mapping[int, list[Bytes]]) -> Panel:
    lines = []
    for number, (length, peaks) in enumerate(measured.items()):
        *alone, none = peaks
        lines += [
            Line(label=f"{length} words", y=[one / MiB for one in alone], colour=number),
            Line(label="none recomputed", y=[none / MiB] * len(alone), colour=number, style=":"),
        ]
    return Panel(
        title=f"BERT, one of {len(alone)} encoders recomputed",
        x=range(len(alone)), across="the encoder that is recomputed", up="peak, MiB", lines=lines,
    )  # fmt: skip


# ---------------------------------------------------------------------- what is shown


def _checks(result: Result) -> Iterator[Check]:
    unlike = sum(
        freed != nbytes
        for row in result.rows if row["figure"] != FIGURE_11
        for freed, nbytes in zip(row["allocator"], row["measured"], strict=True)
    )  # fmt: skip
    yield Check(what="blocks of which the allocator does not get back what is counted", measured=unlike)
    # At the longest input, which comes last.
    first, *_, last, none = (row["measured"][-1] for row in result.rows if row["figure"] == FIGURE_11)
    # A first encoder that saves nothing has no share that the last one could have less of.
    share = (none - last) / (none - first) if none > first else 1.0
    what = "of what the first encoder saves the peak, what the last one does"
    yield Check(what=what, measured=round(share, 4), at_most=0.1)


def _list_of(show: Callable[[Any], str]) -> Callable[[Sequence[Any]], str]:
    return lambda values: ", ".join(map(show, values))


TITLE: Final = "what blocks hold by input size, and the peak with one of them recomputed (Mimose's Figures 10 and 11)"

COLUMNS: Final = (
    *columns.text(figure="Fig.", what="what"),
    *columns.shown(_list_of(str), sizes="sizes"),
    *columns.shown(_list_of(format_bytes), measured="measured", allocator="from the allocator"),
)

NOTES: Final = (
    "Fig. 10: bytes that autograd saves in each block, as the engine counts them, beside what torch's allocator got "
    "back when the block was given up (torch.profiler, exact), its result left out, at four sides of square pictures. "
    "Swin-T and ResNet-50 by their depths, a third and a half of their width, one picture.",
    "Fig. 11: the exact peak of a forward and a backward above what was there before, with one encoder of BERT "
    "recomputed and all others kept; 12 encoders, a third of the width, 4 rows of words. To recompute the last encoder "
    "saves nothing, because its bytes come back while those of all others are still there.",
)


BENCHMARK: Final = Benchmark(
    name="mimose_blocks",
    run=run,
    judge=_checks,
    full=Size(
        pictures={
            "10a": Model(name="Swin", options={"depths": (2, 2, 6, 2), "width": 32, "batch": 1},
                         sizes=(256, 320, 384, 448)),
            "10b": Model(name="ResNet", options={"depths": (3, 4, 6, 3), "width": 32, "batch": 1},
                         sizes=(160, 224, 288, 352)),
        },
        encoders=Model(name="TC-Bert", options={"layers": 12, "width": 256, "batch": 4}, sizes=(64, 128, 192, 256)),
    ),
    quick=Size(
        pictures={"10b": Model(name="ResNet", options={"depths": (1, 1), "width": 8, "batch": 1}, sizes=(33, 65))},
        encoders=Model(name="TC-Bert", options={"layers": 3, "width": 64, "batch": 2}, sizes=(32,)),
    ),
)  # fmt: skip
