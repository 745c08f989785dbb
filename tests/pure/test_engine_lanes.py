"""What the clock saw of copies and stalls: nothing counts twice, and no wait is lost."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest

from spillway.ir import Lane
from spillway.memory import lanes
from spillway.memory.lanes import CopySpan, Stall, TransferLog, stalled_intervals, transfers_beside, unseen

PLACE = SimpleNamespace(nbytes=1, storage=1)


def stall(began: float, ended: float) -> Stall:
    return Stall(began, ended, 1, 1)


def copy(began: float, ended: float) -> CopySpan:
    return CopySpan(Lane.COPY_OUT, PLACE, began, began, ended)


def test_a_copy_that_compute_waits_for_is_hidden_in_no_part() -> None:
    transfers = transfers_beside([copy(1, 3)], stalled_intervals([stall(0, 4)]))
    assert (transfers.seconds, transfers.hidden_seconds) == (2, 0)


def test_of_two_copies_at_a_time_each_is_hidden_for_itself() -> None:
    transfers = transfers_beside([copy(0, 4), copy(2, 6)], stalled_intervals([stall(3, 5)]))
    assert (transfers.seconds, transfers.hidden_seconds) == (8, 5)


def test_a_wait_within_a_stall_is_no_other_stall() -> None:
    assert unseen([stall(1, 2), stall(3, 5), stall(6, 7)], [stall(0, 4)]) == [stall(3, 5), stall(6, 7)]


def test_who_waits_for_a_worker_is_noted_and_who_need_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    log, done, busy = TransferLog(), Future[None](), Future[None]()
    done.set_result(None)
    log.wait([done])
    assert log.waits == []

    def until_it_is_done(futures: Collection[Future[None]]) -> None:
        busy.set_result(None)
        wait(futures)

    monkeypatch.setattr(lanes, "wait", until_it_is_done)
    log.wait([done, busy])
    (waited,) = log.waits
    assert waited.began < waited.ended


def test_a_step_begins_with_an_empty_log() -> None:
    log = TransferLog()
    log.transfers.append(copy(0, 1))
    log.waits.append(stall(0, 1))
    log.begin_step()
    assert (log.transfers, log.waits) == ([], [])
