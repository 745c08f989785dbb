"""The models of Mimose's paper from their configurations, and what their blocks take, counted and by the allocator.

A block's bytes are counted by the engine, and freed one block after the other under torch's profiler, whose trace of
the allocator is exact. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.models import bottleneck_resnet, swin_transformer
from benchmarks.record import frozen
from papers.mimose.tasks_models import CHOICES, network
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.units import Bytes
from spillway.workloads import seed_everything

_VOCABULARY: Final = 1000

Inputs = Mapping[str, Tensor]


@frozen
class Subject:
    """A model and its inputs of any size."""

    model: nn.Module
    inputs: Callable[[int], Inputs]
    """By words of a row, or by pixels along a side."""
    blocks: Sequence[str]
    """Their names; empty if they are to be found."""

    def loss(self, size: int) -> Tensor:
        """Of one forward."""
        return cast(Tensor, cast(Any, self.model)(**self.inputs(size)).loss)

    def engine(self, size: int, **options: Any) -> BlockEngine:
        """One around the model, with all its blocks kept unless told otherwise."""
        return BlockEngine(self.model, self.blocks or discover(self.model, partial(self.loss, size)), **options)


# ---------------------------------------------------------------------- the models


def build(task: str, options: Mapping[str, Any]) -> Subject:
    """The model of a task of the paper's Table 1 or of its Fig. 10, with the same weights every time."""
    seed_everything(0)
    return (_of_pictures if task in ("ResNet", "Swin") else _of_words)(task, **options)


def _of_words(task: str, *, layers: int, width: int, batch: int) -> Subject:
    """Rows of words of which all but the first are padded, by one word more each."""
    positions = {} if task == "QA-XLNet" else {"max_position_embeddings": 514}
    model = network(task, layers=layers, width=width, vocab_size=_VOCABULARY, **positions)
    choices = CHOICES if task == "MC-Roberta" else 1
    place = torch.arange(batch) % 7 + 1
    answers = {"start_positions": place, "end_positions": place}
    told = answers if task.startswith("QA") else {"labels": torch.arange(batch) % 2}

    def inputs(length: int) -> Inputs:
        rows = torch.arange(batch * choices * length).reshape(batch * choices, length) % (_VOCABULARY - 2) + 2
        mask = (torch.arange(length) < length - torch.arange(batch * choices)[:, None] % (length // 2)).long()
        shape = (batch, choices, length) if choices > 1 else (batch, length)
        return {"input_ids": rows.reshape(shape), "attention_mask": mask.reshape(shape), **told}

    return Subject(model=model.train(), inputs=inputs, blocks=())


def _of_pictures(task: str, *, depths: Sequence[int], width: int, batch: int) -> Subject:
    """ResNet of bottlenecks, whose blocks are the residual ones, which the search would take apart; or Swin, padded to
    whole windows of 7."""
    if task == "ResNet":
        model, path = bottleneck_resnet(depths, width, 10), "resnet.encoder.stages.{}.layers.{}"
    else:
        model, path = swin_transformer(depths, width, num_labels=10), "swin.encoder.layers.{}.blocks.{}"

    def inputs(side: int) -> Inputs:
        pictures = torch.linspace(-1, 1, batch * 3 * side * side).reshape(batch, 3, side, side)
        return {"pixel_values": pictures, "labels": torch.arange(batch) % 10}

    names = [path.format(stage, number) for stage, layers in enumerate(depths) for number in range(layers)]
    return Subject(model=model.train(), inputs=inputs, blocks=names)


# ---------------------------------------------------------------------- what they take


@frozen
class Taken:
    """What one block took in one forward."""

    block: str
    nbytes: Bytes
    """Saved inside it, as the engine counts."""
    freed: Bytes
    """What the allocator got back when they were given up."""


def counted_at(subject: Subject, engine: BlockEngine, size: int) -> list[Bytes]:
    """What each block saves in a forward, as the engine counts it."""
    loss = subject.loss(size)
    counted = [call.own_bytes for call in engine.calls]
    del loss
    return counted


def blocks_at(subject: Subject, engine: BlockEngine, size: int) -> list[Taken]:
    """A forward with every block kept, which are then given up one by one.

    All results are held: what a block hands on is not its own, and the paper's collector leaves it out as well. Raises
    RuntimeError if a block could not be given up.
    """
    results: list[Any] = []
    with ExitStack() as hooks:
        for name in engine.blocks:
            module = subject.model.get_submodule(name)
            hook = module.register_forward_hook(lambda _module, _args, result: results.append(result))
            hooks.callback(hook.remove)
        with tracing() as profiler:
            loss = subject.loss(size)
            calls = engine.calls
            for number, call in enumerate(calls):
                with record_function(f"{MARK}{number}"):
                    engine.revoke(call.block, call.call)
    del loss
    trace = Trace(profiler)
    kept = [call for call in engine.calls if call.kept_because]
    if kept:
        raise RuntimeError(f"{kept[0].block} was not given up, because {kept[0].kept_because}.")
    return [
        Taken(block=call.block, nbytes=call.own_bytes, freed=-sum(trace.changes(number)))
        for number, call in enumerate(calls)
    ]


MARK: Final = "spillway mark "


def tracing() -> profile:
    """A context whose allocations `Trace` reads when it is over."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


@final
class Trace:
    """Everything that torch's allocator hands out and gets back, in order, and marks in between."""

    def __init__(self, profiler: profile) -> None:
        result: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
        self._events = _changes(result)
        self._marks = {
            int(event.name().removeprefix(MARK)): (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in result.events()
            if event.name().startswith(MARK)
        }

    def changes(self, mark: int) -> list[Bytes]:
        """Within a mark."""
        begin, end = self._marks[mark]
        return [nbytes for at, nbytes in self._events if begin <= at <= end]

    def peak(self) -> Bytes:
        """Most bytes above those at the start."""
        return max(accumulate((nbytes for _, nbytes in self._events), initial=0))


def _changes(result: Any) -> list[tuple[int, Bytes]]:
    """Time and bytes of what was allocated, and of its releases with a minus.

    Releases of what was there before do not count: torch gives them the size of what it last saw at that address.
    """
    found, left = [], list(result.experimental_event_tree())
    while left:
        event = left.pop()
        left.extend(event.children)
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    sizes: dict[int, Bytes] = {}
    changes = []
    for at, nbytes, address in sorted(found, key=lambda one: one[0]):
        if nbytes > 0:
            sizes[address] = nbytes
        changes.append((at, nbytes if nbytes > 0 else -sizes.pop(address, 0)))
    return changes
