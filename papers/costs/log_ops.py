"""Ops of DTR's published logs with what they compute and move, which the logs do not say.

A log has bytes of tensors and nanoseconds of operators. Shapes are told from these:

- Channels of a picture are the numbers in a batch norm's weight, and the same along elementwise ops and pools.
- Of a convolution, channels and bytes of picture, weight and result leave a few windows and strides: the one is taken
  for which the sides agree best.
- A product [m, k] x [k, n] has m = sqrt(mk * mn / kn), and so on. Of several products, as many are there as samples
  times heads: BATCHES.

An operator that writes in place copied its tensor first, as DTR's prototype does to every operator that writes (section
5). Where an operand is larger than an elementwise op's result, a view of it was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

from spillway.costs import Device, Efficiency, OpKind, Share
from spillway.costs.fitting import Timed
from spillway.costs.roofline import Work, work_of
from spillway.ir import Op, Phase, Step
from spillway.ir.dtr_log import Call, Constant, Copy, CopyFrom, Mutate, read_dtr_log
from spillway.units import Bytes, Seconds

LOGS: Final[Mapping[str, int]] = {
    "unet": 6, "resnet32": 56, "inceptionv4": 64, "tv_densenet121": 84, "transformer": 10
}  # fmt: skip
"""The published logs, and the samples of their batches."""
BATCHES: Final = 160
"""Products of the transformer's attention: 10 samples of 16 heads."""
TITAN_V: Final = Device(
    name="titan-v", flops_per_second=14.9e12, bytes_per_second=653e9, memory=12 * 10**9, out_per_second=12e9,
    in_per_second=12e9, half_flops_per_second=110e12, multiprocessors=80,
    source="the vendor's data sheet; DTR's logs were measured on it (section 5.1)",
)  # fmt: skip
WINDOWS: Final = ((1, 1), (3, 3), (5, 5), (7, 7), (1, 7), (1, 3), (2, 2))
FLOAT: Final[Bytes] = 4
PICTURE: Final = 3
"""Channels of what a network of pictures is given."""
SLACK: Final = 0.6
"""How far the places of picture and result may be apart, as a share, beside a stride of 1 or of 2 both ways."""
_ALIKE: Final = ("relu", "threshold_backward", "add")
_BROADCAST: Final = (*_ALIKE, "mul", "div")
_POOLS: Final = ("avg_pool2d", "max_pool2d_backward", "max_pool2d_with_indices", "upsample_bilinear2d")
_NO_TRACE: Final = ("t", "view", "slice", "as_strided", "expand", "split", "constant")


@final
class Entry(NamedTuple):
    """An operator that ran."""

    name: str
    given: tuple[int, ...]
    """Tensors, by number."""
    made: tuple[int, ...]
    seconds: Seconds


@final
class Log:
    """Operators of a log in order, and the bytes of their tensors."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.samples = name, LOGS[name]
        self.nbytes: list[Bytes] = []
        self.entries: list[Entry] = []
        self._names: dict[str, int] = {}
        for line in read_dtr_log(f"{path}:{name}"):
            match line:
                case Constant():
                    self._tensor(line.name, line.nbytes)
                case Call():
                    given = tuple(self._names[one] for one in line.args)
                    made = tuple(self._tensor(one.name, one.nbytes) for one in line.results)
                    if any(one.alias is None for one in line.results):
                        self.entries.append(Entry(line.operator, given, made, line.nanoseconds / 1e9))
                case Mutate():
                    given = tuple(self._names[one] for one in line.args)
                    self.entries.append(Entry(line.operator, given, (), line.nanoseconds / 1e9))
                case Copy() | CopyFrom():
                    self._names[line.destination] = self._names[line.source]
                case _:
                    pass
        self.channels = self._channels()

    def timed(self) -> Timed:
        """All operators that do something, their work and their seconds."""
        found = [(self._work(entry), entry.seconds) for entry in self.entries if entry.name not in _NO_TRACE]
        return Timed(name=self.name, works=[work for work, _ in found], seconds=[seconds for _, seconds in found])

    def _tensor(self, name: str, nbytes: Bytes) -> int:
        self._names[name] = len(self.nbytes)
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def _floats(self, tensor: int) -> int:
        return self.nbytes[tensor] // FLOAT

    def _channels(self) -> dict[int, int]:
        """Channels of tensors, as far as they are told."""
        found: dict[int, int] = {}
        for _ in range(3):  # forwards and backwards, until what is told at one end has come to the other
            for entry in (*self.entries, *reversed(self.entries)):
                alike, count = self._alike(entry, found)
                if count:
                    found.update(dict.fromkeys(alike, count))
        return found

    def _alike(self, entry: Entry, known: Mapping[int, int]) -> tuple[Sequence[int], int]:
        """Tensors of an operator that have the same channels, and how many; 0 if that is not told."""
        given, made = entry.given, entry.made
        if entry.name == "cudnn_batch_norm":
            return (given[0], made[0]), self._floats(given[1])
        if entry.name == "cudnn_batch_norm_backward":
            return (*given[:2], made[0]), self._floats(made[1])
        if entry.name == "_cat":
            return made, sum(known.get(one, 0) for one in given) if all(one in known for one in given) else 0
        if entry.name not in (*_ALIKE, *_POOLS) or not made:
            return (), 0
        both = (given[0], made[0])
        if entry.name in _ALIKE:
            both = tuple(one for one in (*given, *made) if self.nbytes[one] == self.nbytes[made[0]])
        return both, next((known[one] for one in both if one in known), 0)

    # -------------------------------------------------------------- work

    def _work(self, entry: Entry) -> Work:
        given, made = ([self.nbytes[one] for one in tensors] for tensors in (entry.given, entry.made))
        traffic = _traffic(entry.name, given, made)
        flops, shape = 0, tuple[int, ...]()
        if entry.name.startswith("cudnn_convolution"):
            shape = self._convolution(entry)
            samples, channels, results, places, height, width, _, _ = shape
            flops = 2 * samples * channels * results * places * height * width
            if entry.name.endswith("backward"):
                flops, traffic = 2 * flops, 2 * (given[0] + min(made[0], given[0])) + given[1]
        elif entry.name in ("mm", "addmm", "bmm"):
            products = BATCHES if entry.name == "bmm" else 1
            one, other, out = (nbytes / FLOAT / products for nbytes in (*given[-2:], made[0]))
            lengths = [math.sqrt(square) for square in (one * out / other, other * out / one, one * other / out)]
            shape = (products, *(max(round(length), 1) for length in lengths))
            flops = round(2 * products * math.sqrt(one * other * out))
        elif "batch_norm" in entry.name:
            shape = (self._floats(entry.given[1] if made[1:2] == [given[1]] else entry.made[1]),)
        op = Op(
            number=0, name=entry.name, phase=Phase.FORWARD, reads=(), creates=(), flops=flops, traffic=traffic,
            shape=shape,
        )  # fmt: skip
        return work_of(_NO_STEP, op)

    def _convolution(self, entry: Entry) -> tuple[int, ...]:
        """`Op.shape`, by the window, channels and stride that fit best."""
        backward = entry.name.endswith("backward")
        picture, weight = entry.given[0], entry.given[2 if backward else 1]
        result = entry.given[1] if backward else entry.made[0]
        sizes = self._floats(picture), self._floats(weight), self._floats(result)
        known = self.channels.get(picture, PICTURE if sizes[1] % PICTURE == 0 and self._first(entry) else 0)
        fitting = sorted(self._fits(sizes, known, self.channels.get(result, 0)))
        if not fitting:  # the gradient is part of a larger tensor: its places are those of the picture
            count = known or 1
            window = (3, 3) if sizes[1] % (9 * count) == 0 else (1, 1)
            inner = count * math.prod(window)
            return (self.samples, count, sizes[1] // inner, sizes[0] // (self.samples * count), *window, 1, 1)
        return fitting[0][1:]

    def _first(self, entry: Entry) -> bool:
        return entry.name == "cudnn_convolution" and entry is next(
            one for one in self.entries if one.name == "cudnn_convolution"
        )

    def _fits(self, sizes: tuple[int, int, int], channels: int, results: int) -> Iterator[tuple[float | int, ...]]:
        picture, weight, result = sizes
        for height, width in WINDOWS:
            pairs, over = divmod(weight, height * width)
            if over:
                continue
            tried = [channels] if channels else [pairs // results] if results else range(1, pairs + 1)
            for inner in tried:
                if not inner or pairs % inner or (results and pairs // inner != results):
                    continue
                outer = pairs // inner
                if picture % (self.samples * inner) or result % (self.samples * outer):
                    continue
                places = result // (self.samples * outer)
                ratio = picture / (self.samples * inner) / places
                apart = min(abs(ratio - 1), abs(ratio - 4))
                if not channels and not results:
                    apart += abs(math.log2(outer / inner)) / 1000
                if ratio > 0.99 and apart < SLACK:
                    stride = 4 if ratio > 2.5 else 1
                    yield (apart, self.samples, inner, outer, places, height, width, 2 if stride > 1 else 1, 1)


_NO_STEP: Final = Step(storages=(), values=(), ops=())


def _traffic(name: str, given: Sequence[Bytes], made: Sequence[Bytes]) -> Bytes:
    """Bytes that an operator reads and writes."""
    match name:
        case "clone" | "constant_pad_nd" | "slice_backward":
            return 2 * min(given[0], made[0])
        case "split_backward":
            return sum(given) + made[0]
        case "max_pool2d_backward":
            return given[0] + sum(made)
        case "_fused_droupout_":
            return 2 * made[0] + made[1]
    if not made:
        return sum(given) + 3 * given[0]
    if name in _BROADCAST:
        return sum(min(one, made[0]) for one in given) + made[0]
    return sum(given) + sum(made)


def _assumed(kind: OpKind) -> Share:
    compute = {
        OpKind.WINOGRAD: 1.5, OpKind.WINOGRAD_BACKWARD: 1.4, OpKind.MATMUL: 0.9, OpKind.CONVOLUTION: 0.9,
        OpKind.STRIDED_BACKWARD: 0.5, OpKind.BATCHED: 0.5,
    }  # fmt: skip
    nothing = kind is OpKind.NOTHING
    return Share(compute=compute.get(kind, 0.7), memory=0.7, launch=0.0 if nothing else 1.0)


ASSUMED: Final = Efficiency(
    shares={kind: _assumed(kind) for kind in OpKind}, columns=16.0, inner=32.0, waves=0.5, winograd_columns=32.0,
    winograd_inner=32.0, channels=10.0, source="assumed before any log was read",
)  # fmt: skip
"""What a fit begins with that a left-out log must not have touched: round numbers. Winograd's convolutions of 2 x 2
results multiply 2.25 times less often."""
