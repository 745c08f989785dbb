"""Seconds to quantize a tensor and to bring it back, op by op and compiled, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import Clock, median_ratio
from spillway.engines.blocks.arithmetic import Arithmetic, compiled, decode_straight, encode_straight
from spillway.engines.blocks.quantize import pack
from spillway.units import MiB

BITS: Final = 4
WARM: Final = 2
"""Rounds that do not count."""
OP_BY_OP: Final = "op by op"
STRAIGHT: Final = "without branches"
COMPILED: Final = "the same, compiled"
KINDS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"any numbers": lambda some: some, "with zeros": Tensor.relu}
"""What is quantized; groups with zeros take another way."""


@frozen
class Size:
    """How much is measured."""

    nbytes: int
    """Of a tensor of float32."""
    rounds: int
    compiles: bool
    """Whether the compiled way takes part; it takes a C++ compiler, and seconds."""


def run(size: Size, tell: Tell) -> Result:
    """Both kinds, all ways in turns."""
    torch.set_num_threads(1)
    ways: dict[str, Arithmetic | None] = {OP_BY_OP: None, STRAIGHT: Arithmetic(encode_straight, decode_straight)}
    if size.compiles:
        tell("compiling")
        ways[COMPILED] = compiled(torch.device("cpu"))
    rows: list[Row] = []
    for kind, made in KINDS.items():
        tell(kind)
        rows += _rows(kind, made(torch.randn(size.nbytes // 4, generator=torch.Generator().manual_seed(0))), ways, size)
    return Result(
        title=f"{size.nbytes / MiB:.0f} MiB of float32 to {BITS} bits and back", columns=COLUMNS, rows=rows,
        checks=list(_checks(rows)), notes=NOTES,
    )  # fmt: skip


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(kind="elements", way="computed"),
    *columns.seconds(packing="packed in", unpacking="unpacked in"),
    *columns.ratios(packing_ratio="x op by op", unpacking_ratio="x op by op"),
)
NOTES: Final = (
    "Medians of wall clock time on one thread, a tensor each way in turn. Packing draws a random number for every "
    "element, which compiling leaves as it is. The bytes are the same either way.",
)


def _rows(kind: str, flat: Tensor, ways: Mapping[str, Arithmetic | None], size: Size) -> list[Row]:
    clocks = {way: (Clock(), Clock()) for way in ways}
    differing = dict.fromkeys(ways, 0)
    for _ in range(WARM + size.rounds):
        made = []
        for way, arithmetic in ways.items():
            generator = torch.Generator().manual_seed(0)
            with clocks[way][0].running():
                packed: Any = pack(flat, BITS, generator, arithmetic)
            data, packing = packed
            with clocks[way][1].running():
                back = packing.unpack(data)
            made.append((data, back))
        for way, (data, back) in zip(ways, made, strict=True):
            differing[way] += not (torch.equal(data, made[0][0]) and torch.equal(back, made[0][1]))
    return [{**_row(kind, way, clocks), "differing": differing[way]} for way in ways]


def _row(kind: str, way: str, clocks: Mapping[str, tuple[Clock, Clock]]) -> Row:
    (packing, unpacking), (plain, plain_back) = clocks[way], clocks[OP_BY_OP]
    return {
        "kind": kind, "way": way,
        "packing": statistics.median(packing.wall[WARM:]), "unpacking": statistics.median(unpacking.wall[WARM:]),
        "packing_ratio": median_ratio(packing.wall[WARM:], plain.wall[WARM:]),
        "unpacking_ratio": median_ratio(unpacking.wall[WARM:], plain_back.wall[WARM:]),
    }  # fmt: skip


def _checks(rows: Sequence[Row]) -> Iterator[Check]:
    differing = sum(row["differing"] for row in rows)
    yield Check(what="rounds with other bits than op by op", measured=differing)
    for row in rows:
        if row["way"] == COMPILED:
            yield Check(what=f"packing {row['kind']}, compiled, times op by op", measured=row["packing_ratio"],
                        at_most=1.0)  # fmt: skip


BENCHMARK: Final = Benchmark(
    name="packing",
    run=run,
    full=Size(nbytes=4 * MiB, rounds=25, compiles=True),
    quick=Size(nbytes=MiB // 4, rounds=2, compiles=False),
)
