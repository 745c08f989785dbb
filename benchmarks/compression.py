"""What 4 bits cost: bytes that saved tensors become, bias of values and gradients, and the loss after training."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias, final
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import columns, workloads
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.compress import CompressedStorage, Compressor
from spillway.engines.blocks.meter import meter_for
from spillway.engines.blocks.quantize import pack
from spillway.methods.actions import Action, ActionOptions
from spillway.units import Bytes
from spillway.workloads import Batch, Workload

BITS: Final = (2, 4, 8)
ISSUE: Final = 4
"""The bits that have targets."""
PLAIN_RATIO: Final = 0.135
RELU_RATIO: Final = 0.165
"""With exact masks. Apart, a mask would take an eighth of what four bits take; here it takes one of sixteen codes."""
BIAS: Final = 1.2
"""The norm of what should be zero is 1 in units of its own noise, give or take little in many dimensions."""
LOSS: Final = 0.02
LAST: Final = 20
"""Steps whose mean loss is the final one."""

TINY: Final = "small language model"
Build: TypeAlias = Callable[[int], Workload]
MODELS: Final[Mapping[str, Build]] = MappingProxyType(
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
    """Bytes, values, gradients, training."""
    tell("bytes")
    rows = [row for name in size.models for bits in BITS for row in _bytes(name, bits)]
    tell(f"values, {size.draws} draws")
    rows += [_values(name, size.draws) for name in VALUES]
    for name in size.nets:
        tell(f"gradients of {name}, {size.draws} draws")
        rows.append(_gradients(name, size.draws))
    rows += _training(size, tell)
    return Result(
        title=f"Saved tensors in 2, 4 and 8 bits; {size.draws} draws, {size.steps} steps",
        columns=COLUMNS,
        rows=rows,
        checks=list(_checks(rows, size)),
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
    "Bytes: storages that autograd saved in the blocks of one step, each once, before and after. Held: what the "
    "allocator has handed out between forward and backward, less what it had before: with what is not quantized, such "
    "as statistics of normalizations, and what lies outside of blocks. In 4 bits a group of 256 elements takes 128 "
    "bytes and 8 for its smallest value and step. Zeros exact: what is never negative and somewhere zero, such as "
    "results of ReLU and attention under a causal mask; it takes no more, since one of the codes stands for zero "
    "alone. Masks take one bit and come back exactly.",
    "Bias: the norm of the mean over the draws less the exact value, in units of what chance alone leaves of it (the "
    f"root of the summed variances of the mean): 1 where there is no bias, and the target is {BIAS}. "
    "Gradients are those of all weights together. Linear layers and convolutions between ReLUs read "
    "what was saved once and linearly, and which elements are zero is exact: no bias. Functions that are not linear "
    "in what they saved may have one: GELU and tanh show what the target would catch. Noise: that of one draw, as a "
    "share of the exact norm.",
    f"Final loss: the mean of the last {LAST} steps, on the same batches with the same dropout as plainly.",
)


def _checks(rows: Sequence[Row], size: Size) -> Iterator[Check]:
    def of(what: str, bits: int = ISSUE) -> list[Row]:
        return [row for row in rows if row["what"] == what and row["bits"] == bits]

    for what, most in (("values", PLAIN_RATIO), (EXACT_ZEROS, RELU_RATIO)):
        found = of(what)
        if found:
            measured = max(row["ratio"] for row in found)
            yield Check(what=f"share of float32 bytes, {ISSUE} bits, {what}", measured=measured, at_most=most)
    for row in of("unpacked"):
        yield Check(what=f"bias of unpacked {row['subject']} x its noise", measured=row["bias"], at_most=BIAS)
    for row in of("gradient"):
        if row["subject"] in UNBIASED:
            what = f"bias of weight gradients, {row['subject']} x its noise"
            yield Check(what=what, measured=row["bias"], at_most=BIAS)
    for row in of("training"):
        if row["action"] == Action.COMPRESS.value:
            what = f"final loss of the {row['subject']} after {size.steps} steps, off the plain one"
            yield Check(what=what, measured=abs(row["beyond"]), at_most=LOSS)


# --------------------------------------------------------------------------------------------------------------- bytes


def _bytes(name: str, bits: int) -> list[Row]:
    workload = MODELS[name](0)
    batch = next(iter(workload.batches(1)))
    counts: Counter[str] = Counter()
    engine = _engine(workload, bits)
    before = _held(workload, batch, contextlib.nullcontext())
    engine.actions = lambda block, call: Action.COMPRESS
    after = _held(workload, batch, _counted(counts))
    engine.close()
    kinds = {kind: (counts[f"{kind}, before"], counts[f"{kind}, after"]) for kind in KINDS} | {"held": (before, after)}
    return [
        {"what": kind, "subject": name, "bits": bits, "before": one, "after": other, "ratio": other / one}
        for kind, (one, other) in kinds.items()
        if one
    ]


EXACT_ZEROS: Final = "values, zeros exact"
KINDS: Final = ("values", EXACT_ZEROS, "masks")


def _in(bits: int) -> dict[Action, ActionOptions]:
    return {action: ActionOptions(bits=bits) for action in Action}


def _engine(workload: Workload, bits: int) -> BlockEngine:
    batch = next(iter(workload.batches(1)))
    return BlockEngine(
        workload.model, sample=lambda: workload.loss(workload.model, batch), lossy=True, options=_in(bits)
    )


def _held(workload: Workload, batch: Batch, around: contextlib.AbstractContextManager[None]) -> Bytes:
    """Between forward and backward, of the second step."""
    meter = meter_for(torch.device("cpu"))
    workload.loss(workload.model, batch).backward()  # type: ignore[no-untyped-call]
    gc.collect()
    before = meter.read()
    with around:
        loss = workload.loss(workload.model, batch)
    taken = meter.read() - before
    loss.backward()  # type: ignore[no-untyped-call]
    meter.close()
    return taken


@contextlib.contextmanager
def _counted(counts: Counter[str]) -> Iterator[None]:
    """Bytes of every float32 storage that is compressed, before and after."""
    compress = Compressor.compress

    def counting(
        self: Compressor, tensor: Tensor, options: ActionOptions | None
    ) -> tuple[CompressedStorage, Bytes] | None:
        found = compress(self, tensor, options)
        if found is not None and found[1] and tensor.dtype is torch.float32:
            whole = torch.empty(0).set_(tensor.untyped_storage())  # type: ignore[call-overload]
            kind = "masks" if found[0].exact else "values" if float(whole.min()) != 0 else EXACT_ZEROS
            counts.update({f"{kind}, before": whole.nbytes, f"{kind}, after": found[1]})
        return found

    with mock.patch.object(Compressor, "compress", counting):
        yield


# ------------------------------------------------------------------------------------------------- values and gradients


@final
class _Bias:
    """Mean and variance of draws of something whose exact value is known."""

    def __init__(self, exact: Tensor) -> None:
        self._exact = exact.double()
        self._sum, self._squares = torch.zeros_like(self._exact), torch.zeros_like(self._exact)
        self._count = 0

    def add(self, draw: Tensor) -> None:
        """Another draw."""
        off = draw.double() - self._exact
        self._sum += off
        self._squares += off.square()
        self._count += 1

    def row(self, what: str, subject: str) -> Row:
        """Norms of what is left of it, and of what chance leaves."""
        mean = self._sum / self._count
        variance = (self._squares / self._count - mean.square()) * self._count / max(self._count - 1, 1)
        one = math.sqrt(float(variance.sum()))
        return {
            "what": what,
            "subject": subject,
            "bits": ISSUE,
            "noise": one / float(self._exact.norm()),
            "bias": float(mean.norm()) / (one / math.sqrt(self._count)),
        }


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


VALUES: Final[Mapping[str, Callable[[], Tensor]]] = MappingProxyType(
    {
        "normal values": lambda: _normal(1 << 12),
        "results of ReLU": lambda: _normal(1 << 12).relu(),
        "values in bfloat16": lambda: _normal(1 << 12).bfloat16(),
    }
)


def _values(name: str, draws: int) -> Row:
    flat, generator = VALUES[name](), torch.Generator().manual_seed(0)
    bias = _Bias(flat)
    for _ in range(draws):
        packed = pack(flat, ISSUE, generator)
        assert packed is not None
        bias.add(packed[1].unpack(packed[0]))
    return bias.row("unpacked", name)


def _linear(activation: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), activation()) for _ in range(3)))


def _convolutions(*between: Callable[[], nn.Module]) -> nn.Sequential:
    layers = ((3, 8), (8, 8), (8, 8))
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(*one, 3, padding=1), *(b() for b in between)) for one in layers))


NETS: Final[Mapping[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]]] = MappingProxyType(
    {
        "linear layers, ReLU": (partial(_linear, nn.ReLU), (32, 64)),
        "convolutions, ReLU": (partial(_convolutions, nn.ReLU), (4, 3, 12, 12)),
        "linear layers, GELU": (partial(_linear, nn.GELU), (32, 64)),
        "linear layers, tanh": (partial(_linear, nn.Tanh), (32, 64)),
        "convolutions, BatchNorm, ReLU": (
            partial(_convolutions, partial(nn.BatchNorm2d, 8), nn.ReLU),
            (4, 3, 12, 12),
        ),
    }
)
UNBIASED: Final = ("linear layers, ReLU", "convolutions, ReLU")


def _gradients(name: str, draws: int) -> Row:
    build, shape = NETS[name]
    torch.manual_seed(0)
    net, x = build(), _normal(*shape)
    with BlockEngine(net, [str(number) for number in range(len(net))], lossy=True, options=_in(ISSUE)) as engine:
        bias = _Bias(_gradient(net, x))
        engine.actions = lambda block, call: Action.COMPRESS
        for _ in range(draws):
            bias.add(_gradient(net, x))
    return bias.row("gradient", name)


def _gradient(net: nn.Module, x: Tensor) -> Tensor:
    net.zero_grad()
    net(x).square().mean().backward()
    weights = (p.grad for p in net.parameters() if p.grad is not None and p.dim() > 1)
    return torch.cat([one.flatten() for one in weights])


# ------------------------------------------------------------------------------------------------------------- training


def _training(size: Size, tell: Tell) -> list[Row]:
    plain: dict[str, float] = {}
    rows: list[Row] = []
    for name, action, bits in size.trained:
        if name not in plain:
            plain[name] = _final(name, Action.KEEP, ISSUE, size.steps, tell)
            rows.append({"what": "training", "subject": name, "bits": "plain", "action": "", "loss": plain[name]})
        loss = _final(name, action, bits, size.steps, tell)
        rows.append(
            {
                "what": "training",
                "subject": name if action is Action.COMPRESS else f"{name}, {action.value}",
                "bits": bits,
                "action": action.value,
                "loss": loss,
                "beyond": loss / plain[name] - 1,
            }
        )
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
    full=Size(
        models=("language model", "residual network"),
        draws=1000,
        nets=tuple(NETS),
        steps=300,
        trained=(
            (TINY, Action.COMPRESS, 4),
            (TINY, Action.COMPRESS, 2),
            (TINY, Action.COMPRESS, 8),
            (TINY, Action.RECOMPUTE_COMPRESSED, 4),
            ("residual network", Action.COMPRESS, 4),
        ),
    ),
    quick=Size(models=(TINY,), draws=3, nets=UNBIASED, steps=2, trained=((TINY, Action.COMPRESS, 4),)),
)
