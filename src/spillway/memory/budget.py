"""The account of one session: what the user named, and what of it is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Final, final

from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

UNLIMITED: Final[Bytes] = 1 << 62
"""The budget of a session that only keeps account."""


@final
class Budget:
    """Bytes of device memory. Nobody else changes these numbers; whoever takes memory or gives it up says so here.
    `named` is what the user allows; `UNLIMITED` keeps account only."""

    __slots__ = ("_spendable", "allowed", "claimed", "created", "named", "peak", "refused", "reserved", "resident")

    def __init__(self, named: Bytes) -> None:
        self.named = named
        self.reserved: Bytes = 0
        """Set aside inside the budget for what the account does not see."""
        self.allowed = named
        """What may be resident: what is named less what is reserved."""
        self.resident: Bytes = 0
        """What is there, copies in flight included (rule 5)."""
        self.claimed: Bytes = 0
        """What the block that runs next is expected to need above what is there."""
        self.peak: Bytes = 0
        """The most that was there since the step began."""
        self.created: Bytes = 0
        """All that was ever new."""
        self.refused: BudgetInfeasible | None = None
        """What was said last; never raised itself, or it would hold frames."""
        self._spendable = False

    @property
    def limited(self) -> bool:
        """Whether anything can be refused at all."""
        return self.allowed < UNLIMITED

    # ------------------------------------------------------------------ what is there

    def create(self, nbytes: Bytes) -> None:
        """So many bytes are new."""
        self.created += nbytes
        self.take(nbytes)

    def take(self, nbytes: Bytes) -> None:
        """So many bytes are there from now on; with a minus, fewer than before."""
        self.resident = resident = self.resident + nbytes
        if resident > self.peak:
            self.peak = resident

    def free(self, nbytes: Bytes) -> None:
        """So many bytes are not there any more."""
        self.resident -= nbytes

    def begin(self, resident: Bytes | None = None) -> None:
        """A step begins, with so much there; by default what is. The peak begins anew."""
        self.peak = self.resident = self.resident if resident is None else resident
        self.claimed, self.refused = 0, None

    def observe(self, resident: Bytes, *, peak: Bytes | None = None) -> None:
        """Somebody has looked: so much is there. With a peak, what was taken for the most until now was wrong."""
        self.resident = resident
        self.peak = max(self.peak if peak is None else peak, resident)

    def claim(self, nbytes: Bytes) -> None:
        """What runs next is expected to need so much; what was claimed before it is not any more."""
        self.claimed = nbytes

    def short(self, needed: Bytes) -> Bytes:
        """By how much too little is left for so many more bytes; 0 or less if they fit."""
        return self.resident + self.claimed + needed - self.allowed

    # ------------------------------------------------------------------ what is allowed

    def reserve(self, nbytes: Bytes, *, spendable: bool = False) -> None:
        """Set so much aside, no longer what was. What is spendable is rather taken than an op refused."""
        self.reserved, self._spendable = nbytes, spendable
        self.allowed = max(self.named - nbytes, 0)

    def spend_reserve(self) -> bool:
        """Rather than refuse: until it is reserved again the whole budget is allowed. False if nothing is gained."""
        if not (self._spendable and self.reserved):
            return False
        self.reserve(0)
        return True

    @contextlib.contextmanager
    def keeping_reserve(self) -> Iterator[None]:
        """What is made room for here is not needed: what is reserved stays so."""
        spendable, self._spendable = self._spendable, False
        try:
            yield
        finally:
            self._spendable = spendable

    @contextlib.contextmanager
    def as_if(self, allowed: Bytes) -> Iterator[None]:
        """Another number is allowed meanwhile: none, where right comes before small (rule 12); less, where more has to
        leave than the account knows of."""
        before, self.allowed = self.allowed, allowed
        try:
            yield
        finally:
            self.allowed = before

    def allow(self, named: Bytes) -> None:
        """Another budget is named from here on; what is reserved stays so."""
        self.named = named
        self.reserve(self.reserved, spendable=self._spendable)

    def refusal(self, needed: Bytes, op: str, op_index: int, smallest: Bytes, *, exact: bool) -> BudgetInfeasible:
        """What is said where `needed` bytes at once are more than is allowed; `refused` has a copy of it."""
        said = partial(
            BudgetInfeasible, needed=needed, allowed=self.allowed, op=op, op_index=op_index, smallest_budget=smallest,
            exact=exact,
        )  # fmt: skip
        self.refused = said()
        return said()
