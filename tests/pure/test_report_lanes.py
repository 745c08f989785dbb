"""The picture of the lanes: what ran is where it ran, no wider than the page and no longer than needed."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from spillway.ir import Change, Lane, Timeline
from spillway.report.charts import (
    COLUMNS,
    NARROWEST,
    PITCH,
    ROW,
    WIDTH,
    columns_of,
    draw_lanes,
    op_ranges,
    op_starts,
    ticks,
)
from spillway.report.html import render
from tests.pure.spans import LANES, op, stall, told_by

Box = tuple[float, float, float]


def boxes(path: str) -> list[Box]:
    """Left edge, upper edge and width of everything that a path outlines."""
    return [(float(x), float(y), float(wide)) for x, y, wide in re.findall(r"M([\d.]+),([\d.]+)h([\d.]+)v", path)]


def drawn() -> dict[tuple[Lane, str], list[Box]]:
    lanes = draw_lanes(LANES)
    assert lanes is not None
    return {(row.lane, name): boxes(path) for row in lanes.rows for name, path in row.marks.items()}


def test_every_lane_has_a_row_and_what_ran_on_it_stands_at_its_time() -> None:
    second = WIDTH / 10
    assert drawn() == {
        (Lane.COMPUTE, "op"): [(0, 0, WIDTH)],
        (Lane.COMPUTE, "recompute"): [(7 * second, 0, second)],
        (Lane.COMPUTE, "stall"): [(5 * second, 0, 2 * second)],
        (Lane.COPY_OUT, "hidden"): [(1.5 * second, PITCH, 2 * second)],
        (Lane.COPY_IN, "waited"): [(5 * second, 2 * PITCH, 2 * second)],
        (Lane.DISK, "hidden"): [(1.5 * second, 3 * PITCH, 1.5 * second)],
        (Lane.DISK, "waited"): [(5 * second, 3 * PITCH, second)],
    }


def test_the_key_has_the_seconds_of_every_class_and_an_op_none_of_what_was_done_for_it() -> None:
    lanes = draw_lanes(LANES)
    assert lanes is not None
    assert dict(lanes.key) == {"op": 7, "recompute": 1, "stall": 2, "hidden": 2, "waited": 2}
    assert (lanes.transfers.seconds, lanes.transfers.hidden_seconds, lanes.stall_seconds) == (4, 2, 2)


def test_a_copy_that_compute_waits_for_in_part_is_drawn_in_two() -> None:
    spans = tuple(dataclasses.replace(span, began=3.0) if span.work == "stall" else span for span in LANES.spans)
    lanes = draw_lanes(dataclasses.replace(LANES, spans=tuple(sorted(spans, key=lambda span: span.began))))
    assert lanes is not None
    out = {name: boxes(path) for name, path in lanes.rows[1].marks.items()}
    second = WIDTH / 10
    assert out == {"hidden": [(1.5 * second, PITCH, 1.5 * second)], "waited": [(3 * second, PITCH, 0.5 * second)]}


def long_step(ops: int, gap: float) -> Timeline:
    spans = tuple(op(number, number * (1 + gap), number * (1 + gap) + 1) for number in range(ops))
    return Timeline(step=0, allowed=100, ops=ops, storages=LANES.storages, events=(), spans=spans)


@pytest.mark.parametrize("gap", [0.0, 0.3, 5.0])
def test_a_picture_does_not_grow_with_the_ops_of_the_step(gap: float) -> None:
    lanes = draw_lanes(long_step(20_000, gap))
    assert lanes is not None
    (path,) = lanes.rows[0].marks.values()
    assert len(boxes(path)) <= WIDTH / NARROWEST
    assert all(x >= 0 and x + wide <= WIDTH + 0.11 for x, _, wide in boxes(path))
    assert len(lanes.told) == len(columns_of(long_step(20_000, gap))) == COLUMNS


def test_what_is_short_is_drawn_all_the_same_and_within_the_picture() -> None:
    spans = (op(0, 0.0, 10.0), stall(0, 9.9999, 10.0))
    lanes = draw_lanes(dataclasses.replace(LANES, spans=spans))
    assert lanes is not None
    _, short = lanes.rows[0].marks.values()
    assert boxes(short) == [(WIDTH - NARROWEST, 0, NARROWEST)]


def test_without_a_clock_there_are_no_lanes() -> None:
    assert draw_lanes(dataclasses.replace(LANES, spans=())) is None


def test_memory_is_drawn_over_the_same_time() -> None:
    assert op_starts(LANES) == [0.0, 1.0, 3.0, 5.0, 10.0]
    assert op_ranges(LANES, 10) == [(0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4), (3, 4), (3, 4), (3, 5)]
    columns = columns_of(LANES, 10)
    assert [column.resident for column in columns] == [100, 100, 100, 100, 100, 100, 100, 100, 100, 100]
    assert [column.changed[Change.MOVE] for column in columns] == [0, 0, 0, 60, 0, 0, 0, 0, 0, 0]
    assert [column.changed[Change.PAGE_IN] for column in columns] == [0, 0, 0, 0, 0, 60, 0, 0, 0, 0]
    assert max(column.resident for column in columns) == LANES.peak()


def test_the_axis_has_round_numbers_of_seconds() -> None:
    assert [(tick.at, tick.text) for tick in ticks(LANES)] == [
        (0, "0 s"), (192, "2 s"), (384, "4 s"), (576, "6 s"), (768, "8 s"), (960, "10 s")
    ]  # fmt: skip


def test_the_page_has_three_pictures_on_one_axis_and_says_what_was_hidden() -> None:
    text = render({"budget_bytes": 100}, [], [LANES])
    pictures = [ElementTree.fromstring(picture) for picture in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]
    assert [picture.get("viewBox", "").split()[0::2] for picture in pictures] == [["-90", str(WIDTH + 100)]] * 3
    lanes = pictures[1]
    assert [rect.get("height") for rect in lanes.iter("rect")] == [str(ROW)] * len(Lane)
    named = [text.text for text in lanes.iter("text") if text.get("text-anchor") == "end"]
    assert named == ["compute", "copy-out", "copy-in", "disk"]
    said = " ".join(re.sub(r"<[^>]+>", " ", text).split())
    assert "Copies took 4.00 s in all, out and in: 50 % of that (2.00 s) was hidden behind compute." in said
    assert "Compute stalled for 2.00 s of 10.00 s." in said
    assert "Memory over the time of step 4" in said
    told = told_by(text)
    assert told[COLUMNS // 2 + 1][-3:] == ["stall: 20.8 ms", "copy-in: 20.8 ms", "disk: 20.8 ms"]


def test_a_step_in_which_nothing_was_copied_says_so() -> None:
    quiet = dataclasses.replace(LANES, spans=LANES.spans[:1])
    assert "Nothing was copied." in render({}, [], [quiet])
