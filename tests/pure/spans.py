"""A step with lanes, for the tests of the pictures."""

from __future__ import annotations

import re

from spillway.ir import Change, Event, Kind, Lane, Span, StorageLine, Timeline, Work


def op(number: int, began: float, ended: float, name: str = "aten::mm") -> Span:
    return Span(
        lane=Lane.COMPUTE, work=Work.OP, began=began, ended=ended, op=number, name=name, storage=None, nbytes=0,
        stalled=0.0,
    )  # fmt: skip


def stall(number: int, began: float, ended: float, storage: int | None = 1) -> Span:
    return Span(
        lane=Lane.COMPUTE, work=Work.STALL, began=began, ended=ended, op=number, name="", storage=storage, nbytes=60,
        stalled=0.0,
    )  # fmt: skip


def again(number: int, began: float, ended: float) -> Span:
    return Span(
        lane=Lane.COMPUTE, work=Work.RECOMPUTE, began=began, ended=ended, op=number, name="aten::relu", storage=None,
        nbytes=60, stalled=0.0,
    )  # fmt: skip


def copy(lane: Lane, number: int, began: float, ended: float, stalled: float = 0.0, storage: int = 1) -> Span:
    return Span(
        lane=lane, work=Work.COPY, began=began, ended=ended, op=number, name="", storage=storage, nbytes=60,
        stalled=stalled,
    )  # fmt: skip


# Op 0 creates storage 1, which a worker copies out during ops 1 and 2 and which leaves then; op 3 takes from 5 to 10,
# because the storage has to come back for it, from 5 to 7, and something is recomputed from 7 to 8.
SPANS = (
    op(0, 0.0, 1.0),
    op(1, 1.0, 3.0),
    copy(Lane.COPY_OUT, 1, 1.5, 3.5),
    copy(Lane.DISK, 1, 1.5, 3.0),
    op(2, 3.0, 5.0),
    op(3, 5.0, 10.0, "aten::add"),
    stall(3, 5.0, 7.0),
    copy(Lane.COPY_IN, 3, 5.0, 7.0, stalled=2.0),
    copy(Lane.DISK, 3, 5.0, 6.0, stalled=1.0),
    again(3, 7.0, 8.0),
)
LANES = Timeline(
    step=4,
    allowed=100,
    ops=4,
    storages=(
        StorageLine(storage=0, kind=Kind.PARAMETER, nbytes=40, present_at_start=True),
        StorageLine(storage=1, kind=Kind.ACTIVATION, nbytes=60, present_at_start=False),
    ),
    events=(
        Event(op=0, storage=1, change=Change.CREATE),
        Event(op=2, storage=1, change=Change.MOVE),
        Event(op=3, storage=1, change=Change.PAGE_IN),
        Event(op=3, storage=1, change=Change.DIE),
    ),
    spans=SPANS,
)


def told_by(text: str) -> list[list[str]]:
    """What stands as text below the first picture, column by column, and is shown to who points at a column."""
    listed = re.search(r'<details class="as-text">.*?</details>', text, flags=re.DOTALL)
    assert listed is not None
    return [re.findall("<span>(.*?)</span>", item) for item in re.findall("<li>(.*?)</li>", listed[0])]
