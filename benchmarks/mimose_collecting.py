"""Ways to train a BERT with every block recomputed, that count what blocks save or do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.mimose_lab import Subject, build
from spillway.engines.blocks.actions import Action
from spillway.engines.blocks.engine import BlockEngine
from spillway.engines.blocks.frame import Frame
from spillway.units import Bytes, Seconds

RECOMPUTED: Final = "every block recomputed, nothing counted"
COUNTED: Final = "every block recomputed, as it is"
CHECKPOINTED: Final = "torch.utils.checkpoint on every block"
SHUTTLED: Final = "shuttling, two forwards"
PLAIN: Final = "plain"
WAYS: Final = (PLAIN, RECOMPUTED, COUNTED, CHECKPOINTED, SHUTTLED)


def stepper(*, way: str, layers: int, width: int, batch: int, length: int) -> Callable[[], Seconds]:
    """Built in a process of its own: every call is a forward and a backward, and tells their processor time."""
    subject = build("TC-Bert", {"layers": layers, "width": width, "batch": batch})
    engine = None
    if way in (RECOMPUTED, COUNTED):
        engine = subject.engine(length, actions=lambda block, call: Action.RECOMPUTE)
        if way == RECOMPUTED:
            _count_nothing()
    elif way != PLAIN:
        _wrap_every_layer(subject, _shuttled if way == SHUTTLED else _checkpointed)

    def step() -> Seconds:
        began = time.process_time()
        subject.loss(length).backward()  # type: ignore[no-untyped-call]
        taken = time.process_time() - began
        subject.model.zero_grad()
        if way == COUNTED:
            _assert_counted(engine)
        return taken

    return step


def _assert_counted(engine: BlockEngine | None) -> None:
    if engine is None or any(call.own_bytes == 0 or call.recomputes != 1 for call in engine.calls):
        raise RuntimeError("The engine has not counted, or not recomputed every block once.")


def _count_nothing() -> None:
    """Take out of the engine, in this process, all that only tells what blocks save: no step depends on it."""

    def measure(frame: Frame, *_: Any) -> None:
        """Instead of `_measure`."""

    def revoke(frame: Frame) -> Bytes:
        """Instead of `revoke`, which also adds up what it frees."""
        if frame.ended and frame._may_go():
            frame._let_go()
        return 0

    Frame._measure = measure  # type: ignore[method-assign]
    Frame.revoke = revoke  # type: ignore[method-assign]


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
