"""What 4 bits cost: bytes that blocks hold between forward and backward, bias of gradients, and the loss in the end."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks import columns, workloads
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.engines.blocks.meter import meter_for
from spillway.methods.actions import Action, ActionOptions
from spillway.units import Bytes
from spillway.workloads import Batch, Workload

BITS: Final = (2, 4, 8)
ISSUE: Final = 4
"""The bits that have targets."""
HELD: Final = 0.25
"""Of what blocks hold. Tests hold shares of single tensors: 0.1328 of float32, and a bit for an element of a mask."""
BIAS: Final = 1.2
"""The norm of what should be zero is 1 in units of its own noise, give or take little in many dimensions."""
LOSS: Final = 0.02
LAST: Final = 20
"""Steps whose mean loss is the final one."""

TINY: Final = "small language model"
MODELS: Final[Mapping[str, Callable[[int], Workload]]] = MappingProxyType(
    {"language model": workloads.small_lm, "residual network": workloads.small_resnet, TINY: workloads.tiny_lm}
)


@frozen
class Size:
    """How much is measured."""

    models: Sequence[str]
    draws: int
    nets: Sequence[str]
    steps: int
    trained: Sequence[tuple[str, Action, int]]
    """What is trained: a model, what becomes of its blocks, and in how many bits."""


def run(size: Size, tell: Tell) -> Result:
    """Bytes, gradients, training."""
    tell("bytes")
    rows = [_bytes(name, bits) for name in size.models for bits in BITS]
    for name in size.nets:
        tell(f"gradients of {name}, {size.draws} draws")
        rows.append(_gradients(name, size.draws))
    rows += _training(size, tell)
    return Result(
        title=f"Saved tensors in 2, 4 and 8 bits; {size.draws} draws, {size.steps} steps",
        columns=COLUMNS,
        rows=rows,
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(what="what", subject="of", bits="bits"),
    *columns.nbytes(before="bytes", after="in fewer"),
    *columns.ratios(ratio="share"),
    *columns.shown("{:.2%}".format, noise="noise of one draw"),
    *columns.ratios(bias="bias x its noise"),
    *columns.shown("{:.4f}".format, loss="final loss"),
    *columns.shown("{:+.2%}".format, beyond="beyond the plain one"),
)

NOTES: Final = (
    "Held: what the allocator has handed out between forward and backward, less what it had before: with what is not "
    "quantized, such as statistics of normalizations, and what lies outside of blocks.",
    "Bias: the norm of the mean over the draws less the exact gradient of all weights together, in units of what "
    "chance alone leaves of it (the root of the summed variances of the mean): 1 where there is no bias, and the "
    f"target is {BIAS}. Linear layers and convolutions between ReLUs read what was saved once and linearly, and which "
    "elements are zero is exact: no bias. GELU and tanh are not linear in what they saved, and show what the target "
    "would catch. Noise: that of one draw, as a share of the exact norm.",
    f"Final loss: the mean of the last {LAST} steps, on the same batches with the same dropout as plainly.",
)


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        subject = row["subject"]
        if row["what"] == "held" and row["bits"] == ISSUE:
            yield Check(what=f"share of what blocks of the {subject} hold", measured=row["ratio"], at_most=HELD)
        if subject in UNBIASED:
            yield Check(what=f"bias of weight gradients, {subject} x its noise", measured=row["bias"], at_most=BIAS)
        if row.get("action") == Action.COMPRESS.value and row["bits"] == ISSUE:
            what = f"final loss of the {subject}, off the plain one"
            yield Check(what=what, measured=abs(row["beyond"]), at_most=LOSS)


def _engine(workload: Workload, bits: int) -> BlockEngine:
    batch = next(iter(workload.batches(1)))
    blocks = discover(workload.model, lambda: workload.loss(workload.model, batch))
    return BlockEngine(workload.model, blocks, lossy=True, options=_in(bits))


def _in(bits: int) -> dict[Action, ActionOptions]:
    return {action: ActionOptions(bits=bits) for action in Action}


# --------------------------------------------------------------------------------------------------------------- bytes


def _bytes(name: str, bits: int) -> Row:
    workload = MODELS[name](0)
    batch = next(iter(workload.batches(1)))
    engine = _engine(workload, bits)
    before = _held(workload, batch)
    engine.actions = lambda block, call: Action.COMPRESS
    after = _held(workload, batch)
    engine.close()
    return {
        "what": "held", "subject": name, "bits": bits, "before": before, "after": after, "ratio": after / before,
    }  # fmt: skip


def _held(workload: Workload, batch: Batch) -> Bytes:
    """Between forward and backward, of the second step."""
    meter = meter_for(torch.device("cpu"))
    workload.loss(workload.model, batch).backward()  # type: ignore[no-untyped-call]
    gc.collect()
    before = meter.read()
    loss = workload.loss(workload.model, batch)
    taken = meter.read() - before
    loss.backward()  # type: ignore[no-untyped-call]
    meter.close()
    return taken


# ----------------------------------------------------------------------------------------------------------- gradients


def _linear(activation: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), activation()) for _ in range(3)))


def _convolutions() -> nn.Sequential:
    layers = ((3, 8), (8, 8), (8, 8))
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(*one, 3, padding=1), nn.ReLU()) for one in layers))


NETS: Final[Mapping[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]]] = MappingProxyType(
    {
        "linear layers, ReLU": (partial(_linear, nn.ReLU), (32, 64)),
        "convolutions, ReLU": (_convolutions, (4, 3, 12, 12)),
        "linear layers, GELU": (partial(_linear, nn.GELU), (32, 64)),
        "linear layers, tanh": (partial(_linear, nn.Tanh), (32, 64)),
    }
)
UNBIASED: Final = ("linear layers, ReLU", "convolutions, ReLU")


def _gradients(name: str, draws: int) -> Row:
    """The mean of draws of the gradient beside the exact one, in norms of what chance leaves."""
    build, shape = NETS[name]
    torch.manual_seed(0)
    net, x = build(), torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    with BlockEngine(net, [str(number) for number in range(len(net))], lossy=True, options=_in(ISSUE)) as engine:
        exact = _gradient(net, x)
        engine.actions = lambda block, call: Action.COMPRESS
        total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
        for _ in range(draws):
            off = _gradient(net, x) - exact
            total += off
            squares += off.square()
    mean = total / draws
    noise = math.sqrt(float((squares / draws - mean.square()).sum()) * draws / max(draws - 1, 1))
    return {
        "what": "gradient", "subject": name, "bits": ISSUE, "noise": noise / float(exact.norm()),
        "bias": float(mean.norm()) / (noise / math.sqrt(draws)),
    }  # fmt: skip


def _gradient(net: nn.Module, x: Tensor) -> Tensor:
    net.zero_grad()
    net(x).square().mean().backward()
    weights = (p.grad for p in net.parameters() if p.grad is not None and p.dim() > 1)
    return torch.cat([one.flatten() for one in weights]).double()


# ------------------------------------------------------------------------------------------------------------ training


def _training(size: Size, tell: Tell) -> list[Row]:
    rows: list[Row] = []
    for name in dict.fromkeys(name for name, *_ in size.trained):
        plain = _final(name, Action.KEEP, ISSUE, size.steps, tell)
        rows.append({"what": "training", "subject": name, "bits": "plain", "loss": plain})
        for action, bits in (how for of, *how in size.trained if of == name):
            loss = _final(name, action, bits, size.steps, tell)
            told = {"what": "training", "subject": name, "bits": bits, "action": action.value}
            rows.append({**told, "loss": loss, "beyond": loss / plain - 1})
    return rows


def _final(name: str, action: Action, bits: int, steps: int, tell: Tell) -> float:
    tell(f"{name}, {action.value} in {bits} bits: {steps} steps")
    workload = MODELS[name](0)
    before = torch.get_rng_state()
    engine = _engine(workload, bits)
    torch.set_rng_state(before)  # blocks were found in a forward, which draws
    engine.actions = lambda block, call: action
    losses = [float(workload.train_step(batch)) for batch in workload.batches(steps)]
    engine.close()
    last = losses[-LAST:]
    return sum(last) / len(last)


BENCHMARK: Final = Benchmark(
    name="compression",
    run=run,
    judge=_checks,
    full=Size(
        models=("language model", "residual network"),
        draws=1000,
        nets=tuple(NETS),
        steps=300,
        trained=(*((TINY, Action.COMPRESS, bits) for bits in (4, 2, 8)), ("residual network", Action.COMPRESS, 4)),
    ),
    quick=Size(models=(TINY,), draws=3, nets=UNBIASED, steps=2, trained=((TINY, Action.COMPRESS, 4),)),
)
