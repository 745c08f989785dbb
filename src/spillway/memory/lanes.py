"""What a step's clock saw away from the short way of an op: copies, what waited for them, replays.

Every entry belongs to something slow, so the lists are always kept, and forgotten when the next step begins. Times are
those of `Machine.now`, which is `time.perf_counter` where bytes are real. A tier appends from the threads that copy;
the rest comes from the thread that computes.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection
from concurrent.futures import Future, wait
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, final

from spillway.ir.spans import Interval, Lane, Transfers, merged, overlap, total
from spillway.units import Bytes, Seconds


class CopiedBytes(Protocol):
    """What a copy is of."""

    @property
    def nbytes(self) -> Bytes:
        """How many bytes."""

    @property
    def storage(self) -> int:
        """Number of the storage that they are of; negative if of none."""


class CopySpan(NamedTuple):
    """One copy."""

    lane: Lane
    """`COPY_OUT` or `COPY_IN`."""
    copied: CopiedBytes
    began: Seconds
    on_disk: Seconds
    """Until when the file was written or read, from `began`; `began` itself if no file was."""
    ended: Seconds


class Stall(NamedTuple):
    """Compute waited."""

    began: Seconds
    ended: Seconds
    storage: int | None
    nbytes: Bytes


class Again(NamedTuple):
    """An op ran again."""

    began: Seconds
    ended: Seconds
    name: str
    nbytes: Bytes


class OnDevice(NamedTuple):
    """What a device with a clock of its own saw of a step, in times of the host's clock.

    The host saw no more of it than when the device was told.
    """

    transfers: list[CopySpan]
    stalls: list[Stall]
    replays: list[Again]
    synchronised: bool
    """Whether the host waited for the device around every op: copies were done before an op could wait for them, which
    says nothing of other steps."""


@final
class TransferLog:
    """A tier's list of what it copied, and of what was waited for at moments that the controller does not see."""

    __slots__ = ("transfers", "waits")

    def __init__(self) -> None:
        self.transfers: list[CopySpan] = []
        self.waits: list[Stall] = []

    def begin_step(self) -> None:
        """Forget what was before."""
        self.transfers, self.waits = [], []

    def wait(self, futures: Collection[Future[Any]]) -> None:
        """Wait for copies that workers make, in the thread that computes."""
        if any(not future.done() for future in futures):
            began = time.perf_counter()
            wait(futures)
            self.waits.append(Stall(began, time.perf_counter(), None, 0))


def stalled_intervals(stalls: Collection[Stall]) -> list[Interval]:
    """When compute waited, in order and without overlaps."""
    return merged((stall.began, stall.ended) for stall in stalls)


def unseen(waits: Collection[Stall], stalls: Collection[Stall]) -> list[Stall]:
    """Those of the waits that do not lie within one of the stalls."""
    stalled = stalled_intervals(stalls)
    return [one for one in waits if overlap((one.began, one.ended), stalled) < one.ended - one.began]


def transfers_beside(transfers: Collection[CopySpan], stalled: list[Interval]) -> Transfers:
    """Seconds of the copies, and those of them in which compute did not wait."""
    begins = [began for began, _ in stalled]
    before = [0.0, *accumulate(ended - began for began, ended in stalled)]

    def stalled_until(at: Seconds) -> Seconds:
        place = bisect_right(begins, at)
        return before[place - 1] + min(at, stalled[place - 1][1]) - begins[place - 1] if place else 0.0

    seconds = total((transfer.began, transfer.ended) for transfer in transfers)
    waited = sum(stalled_until(transfer.ended) - stalled_until(transfer.began) for transfer in transfers)
    hidden = max(seconds - waited, 0.0)
    return Transfers(seconds=seconds, hidden_seconds=min(round(hidden, 9), seconds))
