"""Where the pictures put things: no peak is lost, and what is drawn adds up to what happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.ir import Change, Event, Kind, StorageLine, Timeline
from spillway.ir.timeline import WindowAt
from spillway.report.charts import (
    COLUMNS,
    HEIGHT,
    WIDTH,
    WINDOW_HEIGHT,
    Chart,
    columns_of,
    draw,
    draw_window,
    round_bytes,
)
from spillway.report.figures import NO_BUDGET
from spillway.units import GiB, MiB

# Op 0 creates 60 bytes beside a parameter of 40, op 1 drops them, op 2 pages nothing in, op 3 brings them back.
DROPPED = Timeline(
    step=7,
    allowed=100,
    ops=4,
    storages=(
        StorageLine(storage=0, kind=Kind.PARAMETER, nbytes=40, present_at_start=True),
        StorageLine(storage=1, kind=Kind.ACTIVATION, nbytes=60, present_at_start=False),
    ),
    events=(
        Event(op=0, storage=1, change=Change.CREATE),
        Event(op=1, storage=1, change=Change.DROP),
        Event(op=3, storage=1, change=Change.RECOMPUTE),
        Event(op=3, storage=1, change=Change.DIE),
    ),
)
NOTHING = Timeline(step=0, allowed=NO_BUDGET, ops=0, storages=(), events=())


def with_budget(allowed: int) -> Chart:
    return draw(Timeline(step=0, allowed=allowed, ops=DROPPED.ops, storages=DROPPED.storages, events=DROPPED.events))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Storages that come, leave, come back and die in any order that makes sense."""
    sizes = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=5))
    kinds = draw(st.lists(st.sampled_from(Kind), min_size=len(sizes), max_size=len(sizes)))
    present = [False] * len(sizes)
    events = []
    for op in sorted(draw(st.lists(st.integers(0, 60), max_size=40))):
        storage = draw(st.integers(0, len(sizes) - 1))
        leaving, coming = (Change.DIE, Change.DROP, Change.MOVE), (Change.CREATE, Change.RECOMPUTE, Change.PAGE_IN)
        change = draw(st.sampled_from(leaving if present[storage] else coming))
        present[storage] = not present[storage]
        events.append(Event(op=op, storage=storage, change=change))
    lines = [
        StorageLine(storage=number, kind=kind, nbytes=nbytes, present_at_start=False)
        for number, (kind, nbytes) in enumerate(zip(kinds, sizes, strict=True))
    ]
    return Timeline(step=0, allowed=500, ops=60, storages=tuple(lines), events=tuple(events))


def test_a_short_step_has_a_column_for_every_op_and_one_for_what_came_after() -> None:
    columns = columns_of(DROPPED)
    assert [(column.first, column.last) for column in columns] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert [column.resident for column in columns] == [100, 100, 40, 100, 40]
    assert [column.changed[Change.DROP] for column in columns] == [0, 60, 0, 0, 0]
    assert [column.changed[Change.RECOMPUTE] for column in columns] == [0, 0, 0, 60, 0]


@given(timelines(), st.integers(1, 70))
def test_columns_cover_all_ops_keep_the_peak_and_add_up_to_what_happened(timeline: Timeline, most: int) -> None:
    columns = columns_of(timeline, most)
    nbytes = {line.storage: line.nbytes for line in timeline.storages}
    assert len(columns) <= most
    assert [op for column in columns for op in range(column.first, column.last + 1)] == list(range(timeline.ops + 1))
    assert max(column.resident for column in columns) == timeline.peak()
    for change in columns[0].changed:
        happened = sum(nbytes[event.storage] for event in timeline.events if event.change is change)
        assert sum(column.changed[change] for column in columns) == happened


@given(timelines())
def test_everything_drawn_lies_within_the_picture(timeline: Timeline) -> None:
    for area in draw(timeline).areas:
        points = [tuple(map(float, point.split(","))) for point in area.path.strip("MZ").replace("L", " ").split()]
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_a_long_step_is_drawn_in_a_bounded_number_of_columns() -> None:
    long = Timeline(step=0, allowed=100, ops=100_000, storages=DROPPED.storages, events=DROPPED.events)
    assert len(draw(long).columns) == COLUMNS


def test_the_outline_of_an_area_is_a_staircase_there_and_back() -> None:
    parameter, activation = draw(DROPPED).areas
    # 40 and 100 bytes of the 106 that the picture is high; every op is a fifth of its width.
    assert parameter.path == "M0.0,186.8 960.0,186.8L960.0,300.0 0.0,300.0Z"
    assert activation.path == (
        "M0.0,17.0 384.0,17.0 384.0,186.8 576.0,186.8 576.0,17.0 768.0,17.0 768.0,186.8 960.0,186.8"
        "L960.0,186.8 0.0,186.8Z"
    )


def test_kinds_are_stacked_in_their_order_with_the_most_bytes_of_each() -> None:
    assert [(area.name, area.most) for area in draw(DROPPED).areas] == [("parameter", 40), ("activation", 60)]


def test_what_came_back_is_drawn_upwards_and_what_left_downwards() -> None:
    recomputed, dropped = draw(DROPPED).bars
    assert (recomputed.name, recomputed.most, dropped.name, dropped.most) == ("recompute", 60, "drop", 60)
    assert "576.0,4.0 768.0,4.0" in recomputed.path
    assert "192.0,126.0 384.0,126.0" in dropped.path


def test_the_budget_line_stands_at_its_height_if_it_is_near_what_was_resident() -> None:
    assert with_budget(100).budget_y == pytest.approx(HEIGHT * (1 - 1 / 1.06))
    assert with_budget(400).budget_y == pytest.approx(HEIGHT * (1 - 1 / 1.06))
    assert with_budget(401).budget_y is None
    assert with_budget(NO_BUDGET).budget_y is None


def test_a_step_that_touched_nothing_is_drawn_empty() -> None:
    drawn = draw(NOTHING)
    assert (drawn.areas, drawn.bars, drawn.budget_y, [tick.text for tick in drawn.ticks]) == ([], [], None, ["op 0"])


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (5.3, [0, 1, 2, 3, 4, 5]),
        (203 * MiB, [0, 50 * MiB, 100 * MiB, 150 * MiB, 200 * MiB]),
        (1.5 * GiB, [0, 500 * MiB, 1000 * MiB, 1500 * MiB]),
        (9.9 * GiB, [0, 2 * GiB, 4 * GiB, 6 * GiB, 8 * GiB]),
    ],
)
def test_ticks_are_round_numbers_of_bytes(top: float, expected: list[int]) -> None:
    assert round_bytes(top) == expected


@given(st.floats(1, 1e18))
def test_there_are_neither_too_many_ticks_nor_too_few(top: float) -> None:
    assert 2 <= len(round_bytes(top)) <= 7


def slid(*rows: tuple[int, int, int, int, int]) -> tuple[WindowAt, ...]:
    names = ("until", "swapped_in", "cancelled", "waited", "precleared")
    return tuple(WindowAt(**dict(zip(names, row, strict=True))) for row in rows)


def test_the_window_reaches_from_the_op_that_runs_to_the_last_that_it_holds() -> None:
    window = slid((2, 60, 0, 0, 0), (3, 0, 8, 40, 0), (4, 0, 0, 0, 20), (4, 0, 0, 0, 0))
    drawn = draw_window(replace(DROPPED, window=window))
    assert drawn is not None
    # Five columns of 192, the last for what came after; four ops are 180 high, and the band ends at the top.
    half, quarter = WINDOW_HEIGHT / 2, WINDOW_HEIGHT / 4
    assert drawn.reach.startswith(f"M0.0,{half:.1f} 192.0,{half:.1f} 192.0,{quarter:.1f} 384.0,{quarter:.1f} 384.0,0.0")
    assert f"L{WIDTH:.1f},0.0" in drawn.reach
    assert [(bar.name, bar.most) for bar in drawn.bars] == [
        ("swapped in", 60), ("cancelled", 8), ("waited for", 40), ("precleared", 20),
    ]  # fmt: skip
    assert draw_window(DROPPED) is None


def test_a_long_step_is_drawn_in_as_many_columns_and_loses_no_bytes() -> None:
    ops = 10 * COLUMNS + 7
    window = slid(*((min(op + 5, ops), 1, 2, 3, 4) for op in range(ops)))
    drawn = draw_window(Timeline(step=0, allowed=1, ops=ops, storages=(), events=(), window=window))
    assert drawn is not None
    assert [bar.most for bar in drawn.bars] == [ops, 2 * ops, 3 * ops, 4 * ops]
    assert drawn.reach.count(",") < 5 * COLUMNS
