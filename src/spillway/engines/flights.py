"""What another thread reads and writes after the op that began it has returned: collectives in flight.

From the op until the work is known to be done, also beyond the end of a step,

- what it reads or writes stays where it is. Nothing comes to depend on what it writes, and what did came back before
  (rules 2 and 3).
- what it needs beside its operands counts as resident (rule 5).

When it is done, a next version begins of everything that it wrote, which no op made (rule 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from spillway.engines.records import TEMPORARY, Storage
from spillway.units import Bytes

if TYPE_CHECKING:
    from spillway.engines.controller import Controller


class Work(Protocol):
    """What is done by somebody else."""

    def done(self) -> bool:
        """Whether nothing is read or written any more."""

    def wait(self) -> bool:
        """Wait for that, where it comes about without anything that this thread would have to do; whether it did."""


class _Flight(NamedTuple):
    work: Work
    reads: Sequence[Storage]
    writes: Sequence[Storage]
    beside: Storage | None


@final
class Flights:
    """What is in flight. Callers hold the controller's lock."""

    __slots__ = ("_controller", "_flights")

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._flights: list[_Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def beside(self) -> Bytes:
        """What all need beside their operands."""
        return sum(flight.beside.nbytes for flight in self._flights if flight.beside is not None)

    def begin(self, work: Work, reads: Sequence[Storage], writes: Sequence[Storage], beside: Bytes = 0) -> None:
        """It has begun. All these are present; `beside` is what it needs besides, for which room was made."""
        for storage in reads:
            storage.locks += 1
        for storage in writes:
            self._controller.lending.lend(storage)
        needed = self._controller.adopt(TEMPORARY, beside, None, temporary=True) if beside else None
        if needed is not None:
            needed.locks += 1
        self._flights.append(_Flight(work, reads, writes, needed))

    def land(self, *, wait: bool = False) -> bool:
        """Let go of what is done; with `wait`, wait for what can be waited for. Whether anything was."""
        landed = [flight for flight in self._flights if flight.work.done() or (wait and flight.work.wait())]
        for flight in landed:
            self._flights.remove(flight)
            for storage in flight.reads:
                storage.locks -= 1
            for storage in flight.writes:
                self._controller.lending.take_back(storage)
            if flight.beside is not None:
                self._controller.bury(flight.beside)
        return bool(landed)

    def forget(self) -> None:
        """Nothing is ever moved again."""
        self._flights.clear()
