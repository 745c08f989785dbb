"""Compiled blocks under the block engine, beside the same blocks without a session, each in a process of its own.

Where everything fits, an engine that compiled blocks keep their speed under costs nothing but a hook; where blocks are
recomputed, the second run is compiled too, and what it is held to is torch's own checkpoint around the compiled block.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from benchmarks.timing import Clock, median_ratio
from benchmarks.turns import answered, verdict
from benchmarks.workers import Job
from spillway.units import GiB

LIMIT: Final = 1.03
"""Times the compiled step without a session where everything fits, times torch's checkpoint where it recomputes."""
PLAIN: Final = "compiled, no session"
TORCHS: Final = "compiled, torch's checkpoint"
FITS: Final = {"mimose": "mimose, fits", "auto": "auto, fits", "lru": "lru, fits"}
RECOMPUTES: Final = "checkpoint, recomputes"
EAGER: Final = "not compiled, no session"


@frozen
class Size:
    """How much is measured."""

    width: int
    layers: int
    batch: int
    length: int
    warm: int
    """Steps that compile, find blocks and measure, and do not count."""
    steps: int
    backend: str


def run(size: Size, tell: Tell) -> Result:
    """A step of each in turn."""
    shape = {"width": size.width, "layers": size.layers, "batch": size.batch, "length": size.length}
    kinds: dict[str, dict[str, Any]] = {
        PLAIN: {}, EAGER: {"backend": None}, TORCHS: {"checkpoints": True}, RECOMPUTES: {"method": "checkpoint"},
        **{name: {"method": method} for method, name in FITS.items()},
    }  # fmt: skip
    jobs = {
        name: Job(function="benchmarks.compiled:trainer", options={**shape, "backend": size.backend, **more})
        for name, more in kinds.items()
    }
    answers = answered(jobs, size.warm + size.steps, tell)
    return Result(
        title=f"{size.layers} blocks of width {size.width}, input {size.batch} x {size.length}, {size.backend}",
        columns=(
            *columns.text(competitor="step", against="against"),
            *columns.seconds(seconds="takes"),
            *columns.ratios(ratio="times", cpu_ratio="times, CPU"),
            *columns.text(graphs="graphs", breaks="graph breaks", losses="losses"),
            *columns.nbytes(rss_bytes="highest resident set"),
        ),
        rows=[_row(name, answers, size.warm) for name in jobs],
        notes=NOTES,
    )


def _checks(result: Result) -> Iterator[Check]:
    of = {row["competitor"]: row for row in result.rows}
    held = [of[name] for name in (*(name for method, name in FITS.items() if method != "lru"), RECOMPUTES)]
    for row in held:
        yield Check(what=f"{row['competitor']} / {row['against']}", measured=row["ratio"], at_most=LIMIT)
    for what in ("breaks", "graphs"):
        added = max(row[what] for row in held) - of[PLAIN][what]
        yield Check(what={"breaks": "graph breaks added", "graphs": "graphs added"}[what], measured=added)
    yield Check(what="losses that differ", measured=sum(row["losses"] != verdict(True) for row in held))


NOTES: Final = (
    "Steps of forward, backward and AdamW, in turns; medians of the ratios of a round. `lru` watches every op, so that "
    "what is compiled runs op by op in its first steps, and compiled where a step is known to fit. Losses of the step "
    "that is not compiled differ in their last bits, as the compiler has other kernels.",
)


class Block(nn.Module):
    """A transformer's block, of functions that the compiler fuses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        grown: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return grown


class Model(nn.Module):
    """Blocks in a row."""

    def __init__(self, width: int, layers: int, *, checkpoints: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self._checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoints else block(x)
        return x


@final
class Trainer:
    """Every call is a step."""

    def __init__(self, model: Model, batch: Tensor, session: spillway.Session | None, optimizer: Any) -> None:
        self._model, self._batch, self._session, self._optimizer = model, batch, session, optimizer

    def __call__(self) -> dict[str, Any]:
        clock = Clock()
        with clock.running():
            if self._session is None:
                loss = self._step()
            else:
                with self._session.step(self._batch):
                    loss = self._step()
        counted: Any = torch._dynamo.utils.counters
        return {
            "wall": clock.wall[0], "cpu": clock.cpu[0], "loss": loss, "graphs": counted["stats"]["unique_graphs"],
            "breaks": sum(counted["graph_break"].values()),
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }  # fmt: skip

    def _step(self) -> float:
        loss: Tensor = self._model(self._batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def trainer(
    *, width: int, layers: int, batch: int, length: int, backend: str | None, checkpoints: bool = False,
    method: str | None = None,
) -> Callable[[], dict[str, Any]]:  # fmt: skip
    """A competitor; without a backend its blocks are not compiled, without a method there is no session."""
    torch.manual_seed(0)
    model = Model(width, layers, checkpoints=checkpoints)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if backend is not None:
        for block in model.blocks:
            block.compile(backend=backend)
    session = None if method is None else spillway.manage(model, optimizer, budget=8 * GiB, method=method)
    return Trainer(model, torch.randn(batch, length, width), session, optimizer)


def _row(name: str, answers: dict[str, Sequence[dict[str, Any]]], warm: int) -> Row:
    against = TORCHS if name == RECOMPUTES else PLAIN
    found, other = answers[name][warm:], answers[against][warm:]
    walls, cpus = ([[one[clock] for one in steps] for steps in (found, other)] for clock in ("wall", "cpu"))
    return {
        "competitor": name, "against": against, "seconds": statistics.median(walls[0]), "ratio": median_ratio(*walls),
        "cpu_ratio": median_ratio(*cpus), "graphs": answers[name][-1]["graphs"], "breaks": answers[name][-1]["breaks"],
        "losses": verdict([one["loss"] for one in answers[name]] == [one["loss"] for one in answers[PLAIN]]),
        "rss_bytes": answers[name][-1]["rss"],
    }  # fmt: skip


BENCHMARK: Final = Benchmark(
    name="compiled",
    run=run,
    judge=_checks,
    full=Size(width=192, layers=4, batch=8, length=128, warm=8, steps=20, backend="inductor"),
    quick=Size(width=32, layers=2, batch=2, length=16, warm=4, steps=2, backend="aot_eager"),
)
