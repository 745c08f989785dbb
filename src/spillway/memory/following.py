"""A policy that is asked around ops: what an engine calls for one that `follows`."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import final

from spillway.memory.controller import Controller
from spillway.memory.records import Storage
from spillway.methods.base import Proposal


@final
class Following:
    """Asks the policy, and grants or refuses what it proposes. Nothing that it proposes here is necessary."""

    __slots__ = ("_controller",)

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @property
    def op(self) -> int:
        """How many ops of the step have run: the number of the next."""
        return self._controller.clock - self._controller.first_op

    def begin_step(self, storages: Iterable[Storage]) -> None:
        """After the controller's `begin_step`, with every storage that there is, in an order that stays the same."""
        present = [storage for storage in storages if storage.value is not None]
        self._grant(self._controller.policy.begin_step(self._controller.view, present))

    def before_op(self) -> None:
        """Before the clock moves on; once more when the last op has run."""
        self._grant(self._controller.policy.before_op(self._controller.view, self.op))

    def after_op(self, created: Sequence[Storage]) -> None:
        """After everything that the op did is in the account."""
        self._grant(self._controller.policy.after_op(self._controller.view, self.op - 1, created))

    def _grant(self, proposals: Generator[Proposal, bool, None]) -> None:
        self._controller.collect_dead()
        self._controller.grant_in_turn(proposals, lambda: False)
