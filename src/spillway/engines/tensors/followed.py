"""What stands around the ops of a step whose policy follows a plan."""

from __future__ import annotations

from array import array
from typing import Any, Final, final

from spillway.engines.tensors.abstract import AbstractTensorEngine, Around, Known
from spillway.internals.dispatch_key import Handler, unwatched
from spillway.memory.following import Following
from spillway.methods.base import NEVER

BEFORE: Final = 1
AFTER: Final = 2

HookedPlan = tuple[bytes, bytes, int, "Followed"]
"""Whether there is something to ask BEFORE and AFTER each op of the step, what each creates, as 64-bit numbers, on
which clock the first comes, and who is asked."""


@final
class Followed:
    """Asks the policy before an op and after it. A step whose policy does not follow has nothing of this around."""

    __slots__ = ("_asked_before", "_controller", "_engine", "_following", "newest")

    def __init__(self, engine: AbstractTensorEngine) -> None:
        self._engine = engine
        self._controller = engine.controller
        self._following = Following(engine.controller)
        self._asked_before = -1
        self.newest = 0
        """Number of the newest storage that there was as the last op ended."""

    def begin_step(self) -> None:
        """After the controller's."""
        with self._controller.lock, unwatched():
            self._following.begin_step(self._engine.present())
        self._asked_before, self.newest = -1, self._controller.newest

    def before_op(self) -> None:
        """Before an op; once more after the last. Asked again before the same op it does nothing."""
        if self._asked_before == (op := self._following.op):
            return
        self._asked_before = op
        with self._controller.lock, unwatched():
            self._following.before_op()

    def after_op(self) -> None:
        """After an op."""
        with self._controller.lock, unwatched():  # of what it created, what has died already is not among these
            self._following.after_op(self._engine.newer_than(self.newest))

    @property
    def asks(self) -> bool:
        """Whether the policy wants to be asked anything in the step that has begun."""
        return self._controller.policy.moments() is not NEVER

    def hooked(self) -> HookedPlan | None:
        """In the step that has begun; None if everywhere."""
        moments = self._controller.policy.moments()
        if moments is None:
            return None
        marks = bytearray(max((*moments.before, *moments.after), default=-1) + 1)
        for ops, mark in ((moments.before, BEFORE), (moments.after, AFTER)):
            for op in ops:
                marks[op] |= mark
        return bytes(marks), array("q", moments.creates).tobytes(), self._controller.first_op, self

    def around(self, inner: Around | None) -> Around:
        """What makes a handler ask; `inner` stands within. Views are no ops."""
        controller, following, moments = self._controller, self._following, self._controller.policy.moments()
        budget, creates = controller.budget, () if moments is None else moments.creates

        def asking(known: Known) -> Handler:
            handler = known.handler if inner is None else inner(known)
            if self._engine.infos[id(known.func)].view:
                return handler

            def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if moments is None or following.op in moments.before:
                    self.before_op()
                op, created = following.op, budget.created
                out = handler(mode, func, types, args, kwargs)
                ran = following.op > op
                other = ran and op < len(creates) and budget.created - created != creates[op]
                if moments is None or other or following.op - 1 in moments.after:
                    self.after_op()
                self.newest = controller.newest
                return out

            return handle

        return asking
