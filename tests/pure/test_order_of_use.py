"""In which order what was moved is expected back, and how often a policy is asked what to do about it."""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice, pairwise
from typing import Final, Literal, final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.memory.budget import UNLIMITED
from spillway.methods.base import AbstractPolicy, Fetch, MemoryView, Move, Proposal
from spillway.simulation.simulated_engine import simulate
from spillway.units import Bytes
from tests.pure.memory_machine import Program, audit
from tests.pure.recorded import DEVICE, layers

NAMES = ("a", "b", "c", "d", "e")

Act = tuple[Literal["move", "read", "fetch", "due", "first"], str]

KINDS: Final = ("move", "move", "read", "fetch", "due", "first")

acts = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES)), max_size=32)


class Order:
    """What is expected back, looked up from scratch each time."""

    def __init__(self) -> None:
        self.moved: set[str] = set()
        self.under_way: set[str] = set()
        self.last: list[str] = []
        self.this: list[str] = []
        self.after = 0

    def begin_step(self) -> None:
        self.last, self.this, self.after = self.this, [], 0
        self.under_way.clear()

    def read(self, name: str) -> None:
        if name in self.moved:
            self.moved.remove(name)
            self.this.append(name)
            if name not in self.under_way:
                self.after = self._place(name, self.after - 1) + 1
            self.under_way.discard(name)

    def _place(self, name: str, default: int = -1) -> int:
        return max((place for place, other in enumerate(self.last) if other == name), default=default)

    def due(self) -> list[str]:
        away = self.moved - self.under_way
        return sorted((name for name in away if self._place(name) >= self.after), key=self._place)


@given(st.lists(acts, min_size=2, max_size=4))
def test_what_is_moved_is_due_in_the_order_in_which_the_last_step_wanted_it(steps: list[list[Act]]) -> None:
    program, order = Program(UNLIMITED), Order()
    for place, name in enumerate(NAMES):
        program.source(name, [place], 8192)
    names = {program.names[name].number: name for name in NAMES}
    for step in steps:
        program.begin_step()
        order.begin_step()
        for act, name in step:
            if act == "read":
                program.read(name)
                order.read(name)
            elif act == "move":
                if program.move(name):
                    order.moved.add(name)
            elif act == "fetch":
                if program.controller.grant(Fetch(program.names[name])):
                    order.under_way.add(name)
            else:  # some of it, or all
                due = (names[storage.number] for storage in program.controller.view.due())
                assert list(islice(due, 1 if act == "first" else None)) == order.due()[: 1 if act == "first" else None]
        program.end_step()
        audit(program)


@final
class Asked(AbstractPolicy):
    """Notes before which ops it was asked."""

    name = "asked"
    foresees = True

    def __init__(self, looks_after: int) -> None:
        self.looks_after = looks_after
        self.at: list[int] = []

    def looks(self, view: MemoryView) -> bool:
        self.at.append(view.clock)
        return False

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        yield from (Move(storage) for storage in view.candidates())


def test_in_every_step_a_policy_is_left_alone_for_as_many_ops_as_it_wants() -> None:
    controller = Program(UNLIMITED, Asked(3)).controller
    asked = []
    for clock in range(100, 110):
        controller.clock = clock
        if clock == 108:
            controller.begin_step()
        asked += [clock] if controller.copies.asks() else []
    assert asked == [100, 103, 106, 108]


@pytest.mark.parametrize("looks_after", [1, 4])
def test_on_paper_a_policy_is_asked_as_often_as_it_wants_and_no_more(looks_after: int) -> None:
    policy, step = Asked(looks_after), layers(16)
    ran = simulate(step, allowed=step.plain_peak() // 2, method=policy, device=DEVICE, steps=1)
    assert ran.status == "ok"
    gaps = [later - earlier for earlier, later in pairwise(policy.at)]
    assert len(policy.at) > len(step.ops) // looks_after // 2
    assert min(gaps) == looks_after
