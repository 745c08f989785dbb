"""Ops, openings and a policy that the tests of the controller share."""

from __future__ import annotations

from collections.abc import Generator
from typing import final

from spillway.memory.budget import UNLIMITED
from spillway.memory.records import NEVER, SCAFFOLD
from spillway.methods.base import AbstractPolicy, Drop, MemoryView, Proposal
from spillway.units import Bytes
from tests.pure.cells import Op
from tests.pure.memory_machine import Plain, Program

MAKE = Op(name="make", creates=(1,))
MAKE_TWO = Op(name="make two", creates=(1, 1))
WRITE = Op(name="write", writes=(0,))
EMPTY = Op(name="empty", creates=(1,), exactness=SCAFFOLD)
FILL = Op(name="fill", writes=(0,), fills=True)
NOISE = Op(name="noise", creates=(1,), seeded=True)
ONCE = Op(name="once", creates=(1,), exactness=NEVER)
FAIL = Op(name="fail", writes=(0,), fails=True)
SHAKE = Op(name="shake", writes=(0,), seeded=True)


def chain_of_ops(program: Program | Plain, length: int, *, keep: str = "") -> None:
    """x -> a1 -> a2 -> ... by `make`; every a but the last and those in `keep` is freed at once."""
    program.source("x", [3])
    program.run(MAKE, "x", "a1")
    for number in range(2, length + 1):
        program.run(MAKE, f"a{number - 1}", f"a{number}")
        if f"a{number - 1}" not in keep.split():
            program.free(f"a{number - 1}")


def started(allowed: Bytes = UNLIMITED, *, chain_cap: int = 32, tier_bytes: Bytes = UNLIMITED) -> Program:
    """A program whose `a` was made from the source `x`."""
    program = Program(allowed, chain_cap=chain_cap, tier_bytes=tier_bytes)
    program.source("x", [3])
    program.run(MAKE, "x", "a")
    return program


def made_from(*items: int) -> list[int]:
    """What `make` gives for one-item operands, asked of plain code."""
    plain = Plain()
    for place, item in enumerate(items):
        plain.source(f"s{place}", [item])
    plain.run(MAKE, " ".join(plain.names), "made")
    return plain.read("made")


@final
class Eager(AbstractPolicy):
    """Drops whatever it is allowed to drop, stalest first."""

    name = "eager"

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        for storage in view.candidates():
            yield Drop(storage)


@final
class Stubborn(AbstractPolicy):
    """Proposes the same thing for ever, when room is short and when it looks ahead."""

    name = "stubborn"
    foresees = True

    def __init__(self) -> None:
        self.proposal: Proposal | None = None

    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        while self.proposal is not None:
            yield self.proposal

    def foresee(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        return self.relieve(view, 0)
