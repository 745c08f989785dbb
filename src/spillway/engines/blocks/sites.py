"""A block of a model, and what its calls have taught about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from spillway.engines.blocks.compiled import is_compiled
from spillway.engines.blocks.module_state import ModuleState
from spillway.methods.actions import Action
from spillway.units import Bytes, Seconds


@final
class Site:
    """A module whose calls are frames.

    Attributes:
        name: Its name in the model.
        forward: What a call of it calls.
        compiled: Whether it or a part of it is compiled.
        calls: How many calls there were since the model's forward began.
        judged: Calls that a backward has come back to: it is known whether their arguments are written to.
        written: Pairs of a call and the number of a tensor among its arguments that is written to.
        rewritten: Pairs of a call and the number of a selected op whose result is written to.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.name = name
        self.module = module
        self.forward = forward
        self.state = ModuleState(module)
        self.compiled = any(is_compiled(part) for part in module.modules())
        self.calls = 0
        self.judged: set[int] = set()
        self.written: set[tuple[int, int]] = set()
        self.rewritten: set[tuple[int, int]] = set()
        self._may_checkpoint = hasattr(type(module), "gradient_checkpointing")

    def checkpoints_itself(self) -> bool:
        """Whether a layer of transformers was told to, after the engine was there."""
        return self._may_checkpoint and bool(self.module.gradient_checkpointing) and self.module.training


@dataclass(slots=True)
class Figures:
    """What one call of a block took so far; outlives the frame. The fields are those of `CallReport`."""

    block: str
    call: int
    action: Action
    seconds: Seconds = 0.0
    saved_bytes: Bytes = 0
    own_bytes: Bytes = 0
    argument_bytes: Bytes = 0
    kept_bytes: Bytes = 0
    packed_bytes: Bytes = 0
    recomputes: int = 0
    skipped_ops: int = 0
    recompute_seconds: Seconds = 0.0
    kept_because: str = ""
