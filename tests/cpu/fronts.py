"""What stands between the ops of a step and the handlers of an engine.

A dispatch mode above the engine would be shown the same ops and change them: under one torch picks other formulas and
counts the versions of what some ops write otherwise, and what is found would be its own doing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spillway.engines.tensors.mode import Around
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.internals.dispatch_key import Handler

Front = Callable[[Any, Handler], Handler]
"""Makes of an op's handler what stands before it."""


def stand_before(engine: TensorEngine, front: Front) -> None:
    """From the next step on."""
    around = engine._around

    def fronted() -> Around:
        inner = around() or (lambda known: known.handler if engine.recording else known.unrecorded)
        return lambda known: front(known.func, inner(known))

    engine._around = fronted  # type: ignore[method-assign]
