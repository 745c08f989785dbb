"""Ways to train a BERT with every block recomputed, that count what blocks save or do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from papers.mimose.lab import Subject, build
from spillway.engines.blocks.frame import Frame
from spillway.engines.blocks.trace import AllocationTrace
from spillway.methods.actions import Action
from spillway.units import Bytes, Seconds

RECOMPUTED: Final = "every block recomputed, nothing counted"
COUNTED: Final = "every block recomputed, as it is"
TRACED: Final = "every block recomputed, traced as a session collects"
CHECKPOINTED: Final = "torch.utils.checkpoint on every block"
SHUTTLED: Final = "shuttling, two forwards"
PLAIN: Final = "plain"
WAYS: Final = (PLAIN, RECOMPUTED, COUNTED, TRACED, CHECKPOINTED, SHUTTLED)


def stepper(*, way: str, layers: int, width: int, batch: int, length: int) -> Callable[[], Seconds]:
    """Every call is a forward and a backward of a model of its own, and tells their processor time."""
    subject = build("TC-Bert", {"layers": layers, "width": width, "batch": batch})
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    if way in (RECOMPUTED, COUNTED, TRACED):
        subject.engine(length, actions=lambda block, call: Action.RECOMPUTE)
        around = {RECOMPUTED: nothing_counted, TRACED: traced}.get(way, nullcontext)
    elif way != PLAIN:
        _wrap_every_layer(subject, _shuttled if way == SHUTTLED else _checkpointed)

    def step() -> Seconds:
        began = time.process_time()
        with around():
            subject.loss(length).backward()  # type: ignore[no-untyped-call]
        taken = time.process_time() - began
        subject.model.zero_grad()
        return taken

    return step


@contextmanager
def traced() -> Iterator[None]:
    """With every allocation traced, and read in the end: what a session adds to a step that it learns from."""
    trace = AllocationTrace({})
    trace.mark()
    yield
    trace.stop()


@contextmanager
def nothing_counted() -> Iterator[None]:
    """Without what the engine does only to tell what blocks save: no step depends on it."""

    def measure(frame: Frame, *_: Any) -> None:
        """Instead of `_measure`."""

    def revoke(frame: Frame) -> Bytes:
        """Instead of `revoke`, which also adds up what it frees."""
        if frame.ended and frame._may_go():
            frame._let_go()
        return 0

    with mock.patch.object(Frame, "_measure", measure), mock.patch.object(Frame, "revoke", revoke):
        yield


Wrap = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _wrap_every_layer(subject: Subject, wrap: Wrap) -> None:
    layers: Any = subject.model.get_submodule("bert.encoder.layer")
    for layer in layers:
        _wrap(layer, wrap)


def _wrap(layer: nn.Module, wrap: Wrap) -> None:
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: wrap(inner, args, kwargs)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _shuttled(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Section 4.2: once with everything saved, to be measured and dropped, and once with nothing saved."""
    state = torch.get_rng_state()
    forward(*args, **kwargs)
    torch.set_rng_state(state)
    return _checkpointed(forward, args, kwargs)
