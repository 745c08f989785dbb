"""Collectives in flight: what another thread still reads and writes."""

from __future__ import annotations

import pytest

from spillway.errors import BudgetInfeasible
from spillway.memory.records import Storage
from spillway.methods.lru import LRU
from tests.pure.cells import ITEM
from tests.pure.memory_machine import Program

BIG = 1 << 16


class Work:
    def __init__(self, *, by_itself: bool) -> None:
        self.finished = False
        self.waits = 0
        self._by_itself = by_itself

    def done(self) -> bool:
        return self.finished

    def wait(self) -> bool:
        self.waits += 1
        self.finished = self._by_itself
        return self._by_itself


def program(*, allowed: int = 3 * BIG) -> tuple[Program, Storage, Storage]:
    made = Program(allowed, LRU(short_chain=0))
    for name in ("read", "written"):
        made.source(name, [1, 2], BIG)
    return made, made.names["read"], made.names["written"]


def test_what_is_in_flight_does_not_leave_and_lands_as_another_version() -> None:
    run, read, written = program()
    flights, before, work = run.controller.flights, written.value, Work(by_itself=False)
    flights.begin(work, [read], [written])
    assert not any(run.controller.may_leave(storage) for storage in (read, written))
    assert not flights.land()
    assert written.value is before
    work.finished = True
    assert flights.land()
    assert written.value is not before
    assert read.value is not None
    assert all(run.controller.may_leave(storage) for storage in (read, written))


def test_what_a_collective_needs_besides_is_resident_until_it_lands() -> None:
    run, read, written = program()
    work = Work(by_itself=False)
    resident = run.controller.budget.resident
    run.controller.flights.begin(work, [read], [written], BIG)
    assert run.controller.budget.resident == resident + BIG
    assert run.controller.flights.beside == BIG
    work.finished = True
    run.controller.flights.land()
    assert run.controller.budget.resident == resident


def test_before_a_refusal_what_ends_by_itself_is_waited_for() -> None:
    run, read, written = program()
    work = Work(by_itself=True)
    run.controller.flights.begin(work, [read], [written])
    run.controller.make_room(2 * BIG, "op")
    assert work.waits == 1
    assert run.controller.budget.resident + 2 * BIG <= run.controller.budget.allowed


def test_what_ends_only_when_somebody_waits_is_not_waited_for() -> None:
    run, read, written = program()
    work = Work(by_itself=False)
    run.controller.flights.begin(work, [read], [written])
    with pytest.raises(BudgetInfeasible):
        run.controller.make_room(2 * BIG, "op")
    assert len(run.controller.flights) == 1


def test_an_empty_storage_does_not_leave() -> None:
    run, read, _ = program()
    run.controller.resize(read, 0)
    assert not run.controller.may_leave(read)
    run.controller.resize(read, 2 * ITEM)
    assert run.controller.may_leave(read)
