"""What stands around the ops of a step whose policy follows a plan."""

from __future__ import annotations

from typing import Any, final

from spillway.engines.tensors.abstract import AbstractTensorEngine, Around, Known
from spillway.internals.dispatch_key import Handler, unwatched
from spillway.memory.following import Following
from spillway.memory.records import Storage


@final
class Followed:
    """Asks the policy before an op and after it. A step whose policy does not follow has nothing of this around."""

    def __init__(self, engine: AbstractTensorEngine) -> None:
        self._engine = engine
        self._controller = engine.controller
        self._following = Following(engine.controller)
        self._newest = 0

    def begin_step(self) -> None:
        """After the controller's."""
        with self._controller.lock, unwatched():
            self._following.begin_step(self._engine.present())
        self._created()

    def before_op(self) -> None:
        """Before an op; once more after the last."""
        if self._following.acts():
            with self._controller.lock, unwatched():
                self._following.before_op()

    def around(self, inner: Around | None) -> Around:
        """What makes a handler ask; `inner` stands within. Views are no ops."""
        controller, acts = self._controller, self._following.acts

        def asking(known: Known) -> Handler:
            handler = known.handler if inner is None else inner(known)
            if self._engine.infos[id(known.func)].view:
                return handler

            def handle(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if acts():
                    self.before_op()
                out = handler(mode, func, types, args, kwargs)
                if controller.newest != self._newest or acts():
                    with self._controller.lock, unwatched():
                        self._following.after_op(self._created())
                return out

            return handle

        return asking

    def _created(self) -> list[Storage]:
        """Storages taken into account since the last time."""
        found = self._engine.newer_than(self._newest)
        self._newest = self._controller.newest  # those that have died already are not among them
        return found
