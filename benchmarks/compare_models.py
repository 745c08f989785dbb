"""Every method on the steps of a dozen models that differ, under six budgets, on three devices: a row each.

What is looked for is a row that ends in an exception of ours, or says something that cannot be.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import columns, models
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.costs.device import DEVICES, Device
from spillway.ir import Phase, Step
from spillway.methods import METHODS, AbstractPlanner
from spillway.simulation.sweep import Failure, SweepProblem, compare, sweep_problem_of
from spillway.simulation.sweep import Row as Cell
from spillway.units import Seconds, format_bytes
from spillway.workloads import Batch, Workload, get, seed_everything
from spillway.workloads.recorded import record

DEVICES_ASKED: Final = ("a100", "v100-pcie", "slow link")
"""The last is the first with a link a hundredth as fast, both ways in turn: copies outlast the step that began them."""
SHARES: Final = (0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
"""Of what the plain step needs."""


@frozen
class Size:
    """How much is compared."""

    models: int
    shares: tuple[float, ...] = SHARES
    methods: tuple[str, ...] = tuple(METHODS)
    plan_seconds: Seconds = 0.5
    """What a method that searches may take."""


class Dense(nn.Module):
    """Every layer reads what all before it have made, as in DenseNet. [batch, 8, side, side] -> [batch, 4 more for each
    layer, side, side]"""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8 + 4 * number, 4, 3, padding=1) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], dim=1)
        return x


class Experts(nn.Module):
    """Every expert reads its share of each token. [batch, length, width] -> the same"""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + (made * shares.unsqueeze(-2)).sum(-1)


def _workload(name: str, model: nn.Module, shape: tuple[int, ...]) -> Workload:
    def batches(steps: int) -> Iterator[Batch]:
        for _ in range(steps):
            yield (torch.randn(shape, generator=torch.Generator().manual_seed(1)),)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return cast(Tensor, model(cast(tuple[Tensor], batch)[0])).square().mean()

    optimizers = (torch.optim.AdamW(model.parameters(), lr=1e-3),)
    return Workload(name=name, model=model, optimizers=optimizers, batches=batches, loss=loss)


def dense() -> Workload:
    """Layers that keep everything."""
    seed_everything(0)
    return _workload("dense", Dense(8), (8, 8, 32, 32))


def mixture() -> Workload:
    """A mixture of experts without routing by data, which tensors without content cannot follow."""
    seed_everything(0)
    return _workload("mixture", nn.Sequential(*(Experts(64, 4) for _ in range(2))), (8, 64, 64))


def perceptron() -> Workload:
    """Large weights and few activations: what optimizers keep decides."""
    seed_everything(0)
    layers = [layer for a, b in pairwise((256,) * 5) for layer in (nn.Linear(a, b), nn.Tanh())]
    return _workload("perceptron", nn.Sequential(*layers), (4, 256))


BUILDERS: Final[Mapping[str, Callable[[], Workload]]] = MappingProxyType(
    {
        "unet": partial(models.unet, levels=3, batch=4, side=48),
        "bert-small": partial(get, "bert-small", batch=4, length=64, layers=2),
        "lstm": partial(models.lstm, width=64, layers=2, batch=8, length=32),
        "dense": dense,
        "mixture": mixture,
        "resnext": partial(models.resnext, blocks=1, batch=4),
        "gpt-small": partial(get, "gpt-small", batch=4, length=64, layers=2),
        "perceptron": perceptron,
        "efficientnet": partial(models.efficientnet, blocks=1, batch=4),
        "deep-narrow": partial(get, "deep-narrow", layers=12),
        "t5": partial(get, "t5", batch=2, length=32, layers=1, width=128),
        "resnet": partial(get, "resnet", width=8, blocks=(1, 1), batch=4),
    }
)


def run(size: Size, tell: Tell) -> Result:
    """Record the steps on fake tensors, simulate every row in this process, and count how they end."""
    rows, told = list[Row](), list[str]()
    for name, build in list(BUILDERS.items())[: size.models]:
        recorded = record(build, fake=True)
        peak, ends = recorded.step.plain_peak(), Counter({"failed": 0, "odd": 0})
        budgets = sorted({int(share * peak) for share in size.shares})
        for device in DEVICES_ASKED:
            problem = sweep_problem_of(recorded, _device(device))
            for found in compare(
                problem, size.methods, budgets, plan_seconds=size.plan_seconds, bounds=False, processes=1
            ):
                if isinstance(found, Failure):
                    ends["failed"] += 1
                    told.append(f"{name} on {device}: {found}")
                elif isinstance(found, Cell):
                    ends[found.status] += 1
                    least = _least(recorded.step, problem, found.method)
                    faults = [f"{name} on {device}: {fault}" for fault in _faults(found, least)]
                    ends["odd"] += len(faults)
                    told += faults
            tell(f"{name} on {device}: {dict(ends)}")
        asked = len(DEVICES_ASKED) * len(size.methods) * len(size.shares)
        rows.append({"model": name, "ops": len(recorded.step.ops), "peak": peak, "asked": asked, **ends})
    return Result(
        title=f"{sum(row['asked'] for row in rows)} rows of {len(size.methods)} methods on {len(rows)} models, "
        f"{len(DEVICES_ASKED)} devices",
        columns=[
            *columns.text(model="model", ops="ops"), Column(key="peak", head="plain peak", show=format_bytes),
            *columns.text(ok="ok", oom="oom", thrash="thrash"),
        ],
        rows=rows,
        notes=(
            f"Steps recorded on fake tensors with their optimizer; budgets of {', '.join(map(str, size.shares))} of "
            f"the plain peak; on {', '.join(DEVICES_ASKED)}, the last of which is an a100 with a hundredth of its "
            f"link, out and in together. A method that searches has {size.plan_seconds} s for a plan. Cannot be: "
            f"a peak above the budget, less time than the plain step takes (of ZeRO-Offload, whose update the host "
            f"runs, than the plain step without it), a refusal that names a budget that was "
            f"given.",
            *told[:20],
        ),
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    rows = result.rows
    failed = sum(row["failed"] for row in rows)
    ended = sum(row.get(status, 0) for row in rows for status in ("ok", "oom", "thrash"))
    yield Check(what="rows that ended in an exception of ours", measured=failed)
    yield Check(what="things said that cannot be", measured=sum(row["odd"] for row in rows))
    yield Check(what="rows that are missing", measured=sum(row["asked"] for row in rows) - ended - failed)


def _device(name: str) -> Device:
    if name in DEVICES:
        return DEVICES[name]
    return replace(DEVICES["a100"], name=name, out_per_second=2e8, in_per_second=2e8, duplex=False)


def _least(step: Step, problem: SweepProblem, method: str) -> float:
    """What a step takes at least, times the plain one: of a method that sends ops to the host without their seconds."""
    planner = METHODS[method].on_paper()
    if not isinstance(planner, AbstractPlanner) or planner.as_run(step, problem.device)[0] is step:
        return 1.0
    here = sum(op.seconds or 0.0 for op in problem.step.ops if op.phase is not Phase.OPTIMIZER)
    return here / problem.plain_seconds


def _faults(row: Cell, least: float) -> Iterator[str]:
    under = f"{row.method} under {format_bytes(row.budget_bytes)}"
    if row.status == "ok" and (row.peak_bytes or 0) > row.budget_bytes:
        yield f"{under} has a peak of {row.peak_bytes}"
    if row.status == "ok" and (row.overhead or 0.0) < least - 1e-9:
        yield f"{under} takes {row.overhead} times the plain step"
    if row.status != "ok" and ("bug in" in row.why or not (row.why.endswith(".") and row.why.isprintable())):
        yield f"{under} says {row.why!r}"
    named = re.search(r"([0-9]+) bytes \(", row.why)
    if named is not None and int(named[1]) <= row.budget_bytes:
        yield f"{under} says {row.why!r}"


BENCHMARK: Final = Benchmark(
    name="compare_models",
    run=run,
    judge=_checks,
    full=Size(models=len(BUILDERS)),
    quick=Size(models=2, shares=(0.5, 0.9), methods=("lru", "delta", "uvm", "sqrt-n")),
)
