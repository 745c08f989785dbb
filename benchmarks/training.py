"""What trains a workload step by step in a competitor's process: plainly, under a session, or with checkpoints."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import spillway
from benchmarks import models
from benchmarks.record import frozen
from benchmarks.timing import Clock
from spillway.engines.blocks.trace import AllocationTrace
from spillway.internals.process_memory import PeakMemory
from spillway.methods import LMS, LRU, AbstractPlanner, AbstractPolicy, Checkpoint, Delta, KeepAll, Mimose, Window
from spillway.methods.auto import Auto
from spillway.methods.by_block import AbstractBlockMethod
from spillway.native.arena import Arena
from spillway.native.arena import counts as counts_of_arena
from spillway.tiers.spill_file import SpillIO
from spillway.units import Bytes
from spillway.workloads import Batch, Workload
from spillway.workloads.deep_narrow import Layer
from spillway.workloads.resnet import BasicBlock
from spillway.workloads.stdlib_lm import Block

METHODS: Mapping[str, Callable[[], AbstractPolicy | AbstractPlanner | AbstractBlockMethod]] = MappingProxyType(
    {
        "lru": LRU,
        "lru that moves only": lambda: LRU(short_chain=0),
        "delta": Delta,
        "delta-published": Delta.as_published,
        "keep-all": KeepAll,
        "window": Window,
        "lms": LMS,
        "auto": Auto,
        "auto, no disk": lambda: Auto(moves=False),
        "mimose": Mimose,
        "checkpoint": Checkpoint,
    }
)
"""What a session of a competitor may be told."""

BLOCKS = (Block, BasicBlock, Layer, *models.BLOCKS)
"""The blocks of the models that come with Spillway, and of the benchmarks' own."""
BLOCKS_BY_NAME = ("BertLayer", "GPT2Block", "ViTLayer")
"""Those of transformers, which may not be installed."""
_aten = torch.ops.aten
KEPT = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default)
"""What selective checkpointing keeps: products of matrices, and convolutions, which are such products."""

NEARLY_LONGEST = 0.9
"""Batches count as long from this share of the longest on."""


@final
class Checkpointed(nn.Module):
    """A block that keeps its input, and products of matrices if it is selective, and runs again in the backward."""

    def __init__(self, block: nn.Module, *, selective: bool = False) -> None:
        super().__init__()
        self.block = block
        self._how: dict[str, Any] = {"use_reentrant": False}
        if selective:
            self._how["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, **self._how, **kwargs)


def checkpoint_every_block(model: nn.Module, *, selective: bool = False) -> int:
    """Put `torch.utils.checkpoint` around every block of a model; how many there were."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    blocks = [place for place in found if isinstance(place[2], BLOCKS) or type(place[2]).__name__ in BLOCKS_BY_NAME]
    for parent, name, block in blocks:
        setattr(parent, name, Checkpointed(block, selective=selective))
    return len(blocks)


def without_dropout(model: nn.Module) -> None:
    """Let a model drop nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


def size_of(batch: Batch) -> int:
    """Elements of the largest tensor of a batch."""
    return max(tensor.numel() for tensor in (batch.values() if isinstance(batch, Mapping) else batch))


def long_batches(workload: Workload, count: int) -> list[Batch]:
    """Batches within a tenth of the longest; where all are of one size, the first."""
    drawn = list(workload.batches(8 * count))
    longest = max(map(size_of, drawn))
    return [batch for batch in drawn if size_of(batch) >= NEARLY_LONGEST * longest][:count]


def longest_batch(workload: Workload, among: int) -> Batch:
    """The longest of the first batches."""
    return max(workload.batches(among), key=size_of)


@frozen
class Account:
    """What a session that only keeps account says of a few steps of one batch."""

    peak: Bytes
    losses: tuple[str, ...]
    """Exactly, as `float.hex` writes them."""


def account(workload: Workload, batch: Batch, steps: int) -> Account:
    """Train steps of one batch with nothing leaving; from the second on the optimizer has its state."""
    with spillway.manage(workload.model, workload.optimizers, budget=None, method="keep-all") as memory:
        losses = tuple(managed_step(workload, batch, memory) for _ in range(steps))
    return Account(peak=max(report.peak_bytes for report in memory.history), losses=losses)


def managed_step(workload: Workload, batch: Batch, memory: spillway.Session) -> str:
    """One step under a session; the loss, exactly."""
    with memory.step(batch):
        loss = workload.train_step(batch)
    return float(loss).hex()


@final
class Trainer:
    """One competitor: every call is one step on the next batch."""

    def __init__(
        self, workload: Workload, batches: list[Batch], session: spillway.Session | None, memory: PeakMemory,
        arena: Arena | None = None, *, on_cpu: bool = False,
    ) -> None:  # fmt: skip
        self._on_cpu = on_cpu
        self.workload = workload
        self._batches: Iterator[Batch] = cycle(batches)
        self.session = session
        self._memory = memory
        self._arena = arena  # which serves as long as somebody has it

    def __call__(self) -> dict[str, Any]:
        clock, batch = Clock(), next(self._batches)
        before = resource.getrusage(resource.RUSAGE_SELF)
        with clock.running(), self._step(batch):
            loss = float(self.workload.train_step(batch))
        after = resource.getrusage(resource.RUSAGE_SELF)
        report = None if self.session is None else self.session.history[-1].to_json()
        return {
            "wall": clock.wall[0],
            "cpu": clock.cpu[0],
            "system": after.ru_stime - before.ru_stime,
            "faults": after.ru_minflt - before.ru_minflt,
            "loss": loss.hex(),
            "rss": self._memory.above_start(),
            "report": report,
            "arena": counts_of_arena().peak_resident,
        }

    def _step(self, batch: Batch) -> AbstractContextManager[object]:
        step = nullcontext() if self.session is None else self.session.step(batch)
        if not self._on_cpu:
            return step
        both = ExitStack()
        both.enter_context(step)
        both.enter_context(save_on_cpu())
        return both


def trainer(
    *, workload: str, options: dict[str, Any], batches: int = 1, method: str | None = None, budget: Bytes | None = None,
    still: bool = False, checkpoints: bool = False, selective: bool = False, on_cpu: bool = False,
    return_freed: bool = True, activation_budget: float | None = None, arena: bool = False, native: bool = True,
    io: SpillIO = "buffered",
) -> Trainer:  # fmt: skip
    """A competitor that trains a workload on its long batches.

    Arguments:
        options: The workload's own.
        batches: How many of them are trained on in turn.
        method: A name in `METHODS`; None for no session.
        budget: Of the session; None only keeps account.
        still: Whether dropout is off.
        checkpoints: Whether every block is checkpointed.
        selective: The same, with products of matrices kept.
        on_cpu: Whether what autograd saves is copied to host memory, by torch's `save_on_cpu`.
        return_freed: As of `spillway.manage`.
        activation_budget: Share of the activations that `torch.compile` keeps; None runs without it.
        arena: Whether tensors are born in the arena without a session, as they are with one.
        native: Whether sessions may use the native part.
        io: As of `spillway.SpillOptions`.
    """
    if not native:  # in a process of its own
        os.environ["SPILLWAY_NATIVE"] = "0"
    served = Arena() if arena else None
    inputs = long_batches(models.build(workload, options), batches)
    warm_up()
    memory = PeakMemory()
    built = models.build(workload, options)
    if still:
        without_dropout(built.model)
    if checkpoints or selective:
        checkpoint_every_block(built.model, selective=selective)
    if activation_budget is not None:
        torch._functorch.config.activation_memory_budget = activation_budget
        built.model.compile(backend="aot_eager", dynamic=False)
    session = None
    if method is not None:
        session = spillway.manage(
            built.model, built.optimizers, budget=budget, method=METHODS[method](),
            spill=spillway.SpillOptions(return_freed=return_freed, io=io),
        )  # fmt: skip
    return Trainer(built, inputs, session, memory, served, on_cpu=on_cpu)


def warm_up() -> None:
    """A small step of a small model loads what the first step of a process loads: it is torch's, not the workload's."""
    model = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, 64)).sum().backward()
    optimizer.step()


def bits_of_state(workload: Workload) -> list[int]:
    """Sums of the bits of all parameters and of the optimizers' state, read where they are."""
    tensors = [parameter.detach() for parameter in workload.model.parameters()]
    for optimizer in workload.optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [int(tensor.view(torch.int32).sum()) for tensor in tensors]


def profiled(**options: Any) -> Callable[[], dict[str, Any]]:
    """A competitor that tells nothing but the peak of each step, for what no session can watch."""
    step = trainer(**options)

    def measured() -> dict[str, Any]:
        held = _held(step.workload)
        trace = AllocationTrace(held)
        trace.mark()
        step()
        (window,) = trace.stop()
        return {"peak": sum(held.values()) + window.peak}

    return measured


def _held(workload: Workload) -> dict[int, Bytes]:
    """Bytes of parameters, buffers, gradients and optimizer state, by their address."""
    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    tensors += [p.grad for p in workload.model.parameters() if p.grad is not None]
    states = [state for optimizer in workload.optimizers for state in optimizer.state.values()]
    tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
