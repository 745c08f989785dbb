"""In which order what was moved is expected back, and how often a policy is asked what to do about it."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from spillway.engines.controller import UNLIMITED
from tests.pure.memory_machine import Program, audit
from tests.pure.small_programs import Stubborn

NAMES = ("a", "b", "c", "d", "e")

Act = tuple[Literal["move", "read"], str]

acts = st.lists(st.tuples(st.sampled_from(["move", "move", "read"]), st.sampled_from(NAMES)), max_size=24)


class Order:
    """What is expected back, looked up from scratch each time."""

    def __init__(self) -> None:
        self.moved: set[str] = set()
        self.last: list[str] = []
        self.this: list[str] = []
        self.after = 0

    def begin_step(self) -> None:
        self.last, self.this, self.after = self.this, [], 0

    def read(self, name: str) -> None:
        if name in self.moved:
            self.moved.remove(name)
            self.this.append(name)
            self.after = self._place(name, self.after - 1) + 1

    def _place(self, name: str, default: int = -1) -> int:
        return max((place for place, other in enumerate(self.last) if other == name), default=default)

    def due(self) -> list[str]:
        return sorted((name for name in self.moved if self._place(name) >= self.after), key=self._place)


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
            elif program.move(name):
                order.moved.add(name)
            assert [names[storage.number] for storage in program.controller.view.due()] == order.due()
        program.end_step()
        audit(program)


def test_a_policy_is_left_alone_for_as_many_ops_as_it_wants() -> None:
    policy = Stubborn()
    policy.looks_after = 3
    controller = Program(UNLIMITED, policy).controller
    asked = []
    for controller.clock in range(100, 110):
        asked += [controller.clock] if controller.copies.asks() else []
    assert asked == [100, 103, 106, 109]
