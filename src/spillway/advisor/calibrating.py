"""What this machine's ops take, found from small networks that are trained on it, and how well one foretells another.

Of each network a step is recorded and its ops are timed one by one, the device waited for. Shares and sizes are fitted
to all of them. Each network is also foretold by a fit to the others: how far its plain steps are from that is what
anything modelled with these figures is worth.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.calibration.measured import measure
from spillway.costs.device import Device
from spillway.costs.efficiency import OpKind
from spillway.costs.fitting import LeftOut, Timed, fit, leave_one_out, spread_of
from spillway.costs.roofline import Reckoned, launches_of, paced, work_of
from spillway.ir.step import Step
from spillway.units import Seconds
from spillway.workloads.recorded import record
from spillway.workloads.workload import Batch, Workload

TIMES: Final = 7
"""Steps whose ops are timed, and as many that run plainly: medians count."""
SIZES: Final = MappingProxyType({"cpu": (16, 24), "cuda": (32, 64, 128)})
"""Of the networks, where nobody says; those of a CPU take a minute or two."""
TINY: Final = 16
"""Of the smallest sizes, at which a GPU waits for its host."""
_SHORTEST: Final[Seconds] = 1e-9


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What was found out."""

    device: Device
    """With its efficiency and, of a GPU, its host's seconds for an op."""
    networks: Sequence[LeftOut]
    """Each foretold by the others, op by op."""
    steps: Mapping[str, tuple[Seconds, Seconds]]
    """Of each network a plain step, measured and foretold by the others."""


class Attention(nn.Module):
    """Attention with its scores in memory. [batch, length, width] -> the same"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.three, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = math.gcd(width, max(width // 32, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.three(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        scores = F.dropout((query @ key.transpose(-1, -2) / (width / self.heads) ** 0.5).softmax(-1), 0.1)
        return x + cast(Tensor, self.out((scores @ value).transpose(1, 2).reshape(x.shape)))


class Feed(nn.Module):
    """Two linear layers and a GELU between. [..., width] -> the same"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.layers(x))


class Beside(nn.Module):
    """What a module makes of its input, beside that."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + cast(Tensor, self.module(x)))


class Words(nn.Module):
    """Blocks between an embedding and a head. int64 [batch, length] -> [batch * length, words]"""

    def __init__(self, width: int, *blocks: nn.Module) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(8 * width, width), nn.Sequential(*blocks)
        self.head = nn.Linear(width, 8 * width)

    def forward(self, words: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.blocks(self.table(words)))).flatten(0, 1)


def _convolution(channels: int, into: int, window: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, into, window, stride, window // 2, groups=groups, bias=False), nn.BatchNorm2d(into),
        nn.ReLU(),
    )  # fmt: skip


def _pictures(side: int, width: int, body: Sequence[nn.Module], into: int) -> tuple[nn.Module, Batch]:
    model = nn.Sequential(
        _convolution(3, width, 3), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10)
    )  # fmt: skip
    return model, (torch.randn(16, 3, side, side), torch.randint(10, (16,)))


def plain_convolutions(size: int) -> tuple[nn.Module, Batch]:
    """Windows of 3 x 3, pooled in between."""
    return _pictures(
        size, size, [_convolution(size, size, 3), nn.MaxPool2d(2), _convolution(size, 2 * size, 3),
                     _convolution(2 * size, 2 * size, 3)], 2 * size
    )  # fmt: skip


def bottlenecks(size: int) -> tuple[nn.Module, Batch]:
    """Windows of 1 x 1 around one of 3 x 3, and strides."""
    inner = nn.Sequential(_convolution(2 * size, size, 1), _convolution(size, size, 3), _convolution(size, 2 * size, 1))
    body = [_convolution(size, 2 * size, 3, 2), Beside(inner), _convolution(2 * size, 4 * size, 1, 2)]
    return _pictures(size, size, body, 4 * size)


def depthwise(size: int) -> tuple[nn.Module, Batch]:
    """Windows over one channel each, between windows of 1 x 1."""
    inner = nn.Sequential(
        _convolution(size, 4 * size, 1), _convolution(4 * size, 4 * size, 3, groups=4 * size),
        _convolution(4 * size, size, 1), nn.AvgPool2d(3, 1, 1),
    )  # fmt: skip
    return _pictures(size, size, [Beside(inner), _convolution(size, 2 * size, 3, 2)], 2 * size)


def transformer(size: int) -> tuple[nn.Module, Batch]:
    """Attention and linear layers by turns."""
    model = Words(4 * size, *(block for _ in range(2) for block in (Attention(4 * size), Feed(4 * size))))
    return model, _words(size, 4 * size)


def gated(size: int) -> tuple[nn.Module, Batch]:
    """Linear layers alone."""
    return Words(4 * size, *(Feed(4 * size) for _ in range(4))), _words(size, 4 * size)


def _words(size: int, width: int) -> Batch:
    words = torch.randint(8 * width, (8, 2 * size))
    return words, words.flatten()


NETWORKS: Final[Mapping[str, Callable[[int], tuple[nn.Module, Batch]]]] = {
    "plain convolutions": plain_convolutions, "bottlenecks": bottlenecks, "depthwise": depthwise,
    "transformer": transformer, "linear layers": gated,
}  # fmt: skip


def workload_of(name: str, size: int, where: str, *, half: bool = False) -> Workload:
    """One of the networks, in a size, on a device as torch names it, with AdamW."""
    torch.manual_seed(0)
    model, batch = NETWORKS[name](size)
    if where != "cpu":  # which would not work among fake tensors
        model.to(where)
    placed = tuple(tensor.to(where) for tensor in cast(tuple[Tensor, ...], batch))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        given, labels = cast(tuple[Tensor, Tensor], batch)
        with torch.autocast(torch.device(where).type, dtype=torch.float16, enabled=half):
            return F.cross_entropy(model(given).float(), labels)

    return Workload(
        name=name, model=model.train(), optimizers=(torch.optim.AdamW(model.parameters()),),
        batches=partial(repeat, placed), loss=loss,
    )  # fmt: skip


def calibrate_here(directory: Path, sizes: Sequence[int], tell: Callable[[str], None]) -> Calibrated:
    """`calibrate` for the machine that this runs on: its first CUDA device if it has one, else its CPU. Bytes are
    spilled to the directory; no sizes are the usual ones."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    tell("rates of this machine")
    return calibrate(measure(directory), where, sizes or SIZES[where], tell)


def calibrate(device: Device, where: str, sizes: Sequence[int], tell: Callable[[str], None]) -> Calibrated:
    """Train the networks at these sizes, and see what the device gives to their ops.

    Args:
        device: Its rates, as `this_machine` measures them.
        where: As torch names it: `cpu`, `cuda`.
        sizes: Channels and sides of pictures, quarters of a width; larger ones take longer.
        tell: Called with a line for each network.
    """
    timed: list[Timed] = []
    plain: dict[str, list[tuple[Step, Seconds]]] = {}
    for name in NETWORKS:
        found: list[tuple[Step, Seconds]] = []
        for size in sizes:
            for half in (False, True) if where != "cpu" else (False,):
                workload = workload_of(name, size, where, half=half)
                took = _plain_seconds(workload, where)
                found.append((record(workload, timed_steps=TIMES - 1).step, took))
        pairs = [(work_of(step, op), max(op.seconds or 0.0, _SHORTEST)) for step, _ in found for op in step.ops]
        kept = [(work, took) for work, took in pairs if work.kind is not OpKind.NOTHING]
        timed.append(Timed(name=name, works=[work for work, _ in kept], seconds=[took for _, took in kept]))
        plain[name] = found
        tell(f"{name}: {len(kept)} ops")
    host = _host_seconds(where)
    left = leave_one_out(timed, device)
    efficiency = fit(timed, device)
    told = {}
    for one in left:
        measured = foretold = 0.0
        for step, took in plain[one.name]:
            works = [work_of(step, op) for op in step.ops]
            foretold += float(paced(Reckoned(works, device).seconds(one.by), launches_of(step, works) * host).sum())
            measured += took
        told[one.name] = measured, foretold
    spread = spread_of([measured / foretold for measured, foretold in told.values()])
    ops = spread_of([one.seconds / one.foretold for one in left])
    efficiency = replace(
        efficiency, step_spread=spread, extra_spread=ops,
        source=f"{sum(len(group.works) for group in timed)} ops of {len(timed)} networks, timed here",
    )  # fmt: skip
    return Calibrated(device=replace(device, efficiency=efficiency, host_seconds=host), networks=left, steps=told)


def _host_seconds(where: str) -> Seconds:
    """For an op, of a network so small that a GPU waits for its host; 0 where ops run on the host itself."""
    if where == "cpu":
        return 0.0
    workload = workload_of("transformer", TINY, where)
    took = _plain_seconds(workload, where)
    step = record(workload).step
    return took / float(launches_of(step, [work_of(step, op) for op in step.ops]).sum())


def _plain_seconds(workload: Workload, where: str) -> Seconds:
    batch: Any = next(iter(workload.batches(1)))
    taken = []
    for _ in range(TIMES + 1):  # the first one warms up
        began = time.perf_counter()
        workload.train_step(batch)
        if where != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
