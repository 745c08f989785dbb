"""What fills memory at the peak: by module, op and line."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from urllib.parse import unquote

from spillway.ir import Change, Event, Kind, Origin, StepReport, StorageLine, Timeline
from spillway.report.charts import COLUMNS, draw, draw_steps
from spillway.report.holders import NO_MODULE, at_peak, largest_at
from spillway.report.html import render
from tests.pure.spans import LANES, again, op, told_by
from tests.pure.test_report_html import HEADER, STEP

SIZES = {0: 8, 1: 16, 2: 16, 3: 30, 4: 4, 5: 6}
KINDS = {0: Kind.PARAMETER, 3: Kind.TEMPORARY, 5: Kind.OPTIMIZER_STATE}
TIMELINE = Timeline(
    step=0, allowed=100, ops=3,
    storages=tuple(
        StorageLine(
            storage=number, kind=KINDS.get(number, Kind.ACTIVATION), nbytes=nbytes, present_at_start=number in (0, 5)
        )
        for number, nbytes in SIZES.items()
    ),
    events=tuple(Event(op=min(number - 1, 2), storage=number, change=Change.CREATE) for number in (1, 2, 3, 4)),
    origins=(
        Origin(storage=0, name="layers.0.weight", op="", module="", line=""),
        Origin(storage=1, name="", op="aten::mm", module="layers.0", line="train.py:7"),
        Origin(storage=2, name="", op="aten::mm", module="layers.1", line="train.py:7"),
        Origin(storage=4, name="", op="aten.add.default", module="", line="train.py:9"),
        Origin(storage=5, name="layers.0.weight", op="", module="", line=""),
    ),
)  # fmt: skip


def test_storages_of_one_origin_are_taken_together_and_modules_of_a_list_too() -> None:
    found = at_peak(TIMELINE)
    assert found is not None
    assert (found.op, found.nbytes) == (2, sum(SIZES.values()))
    rows = [(one.nbytes, one.storages, one.kind, one.module, one.op, one.line) for one in found.by_origin]
    assert rows == [
        (32, 2, "activation", "layers.* (2)", "mm", "train.py:7"),
        (30, 1, "temporary", NO_MODULE, "recomputing", ""),
        (8, 1, "parameter", "layers.0", "", ""),
        (6, 1, "optimizer state", "layers.0", "", ""),
        (4, 1, "activation", NO_MODULE, "add", "train.py:9"),
    ]


def test_the_op_at_the_peak_is_the_one_that_ran_and_not_what_ran_again_for_it() -> None:
    clocked = replace(TIMELINE, spans=(again(2, 0.0, 1.0),))
    assert at_peak(clocked).name == ""  # type: ignore[union-attr]
    assert at_peak(replace(clocked, spans=(*clocked.spans, op(2, 0.0, 2.0)))).name == "mm"  # type: ignore[union-attr]


def test_by_module_every_module_stands_alone_with_all_kinds() -> None:
    found = at_peak(TIMELINE)
    assert found is not None
    assert [(one.nbytes, one.kind, one.module) for one in found.by_module] == [
        (34, "temporary, activation", NO_MODULE),
        (30, "parameter, activation, optimizer state", "layers.0"),
        (16, "activation", "layers.1"),
    ]


def test_the_largest_are_told_in_a_line_each_and_nothing_where_nobody_knows() -> None:
    assert largest_at(TIMELINE, [2])[2][:2] == [
        "32 B activation of layers.* (2): mm at train.py:7", f"30 B temporary of {NO_MODULE}: recomputing",
    ]  # fmt: skip
    bare = replace(TIMELINE, origins=())
    assert at_peak(bare) is None
    assert largest_at(bare, [2]) == {}


def test_a_page_lists_them_and_tells_them_at_the_column() -> None:
    text = render(HEADER, [STEP], [TIMELINE])
    assert "What fills memory at the peak" in text
    assert "train.py:7" in text
    assert "most: 32 B activation of layers.* (2): mm at train.py:7" in told_by(text)[2]
    assert "What fills memory at the peak" not in render(HEADER, [STEP], [replace(TIMELINE, origins=())])


def test_the_plain_peak_is_a_line_where_it_is_above_the_peak() -> None:
    assert draw(LANES, LANES.plain_peak()).plain_y is None
    drawn = draw(LANES, 150)
    assert drawn.plain_y is not None
    assert drawn.budget_y is not None
    assert drawn.plain_y < drawn.budget_y  # higher up
    assert draw(LANES, 10_000).plain_y is None


def steps(number: int, **figures: object) -> list[StepReport]:
    return [replace(STEP, step=at, **figures) for at in range(number)]


def test_a_curve_over_all_steps_has_at_most_so_many_columns_and_tells_of_every_step() -> None:
    assert draw_steps(steps(1), [1], 0, 0) is None
    drawn = draw_steps(steps(3), [40 << 20], 0, 0)
    assert drawn is not None
    assert [curve.name for curve in drawn.curves] == ["peak", "time", "loss"]
    assert drawn.told[1] == ["step 1", "peak: 39.00 MiB", "time: 1.25 s", "loss: 5.5625"]
    many = draw_steps(steps(10 * COLUMNS + 7), [40 << 20], 0, 0)
    assert many is not None
    assert len(many.told) == COLUMNS
    assert many.told[0][0].startswith("steps 0 to ")
    assert many.told[-1][0].endswith(f" to {10 * COLUMNS + 6}")


def test_the_resident_set_above_start_is_drawn_where_it_is_known_and_near() -> None:
    rss = STEP.peak_rss_bytes
    near = draw_steps(steps(3), [40 << 20], 0, rss - (41 << 20))
    assert near is not None
    assert near.curves[0].resident
    assert "resident set above start: 41.00 MiB" in near.told[0]
    far = draw_steps(steps(3), [40 << 20], 0, 1)
    assert far is not None
    assert not far.curves[0].resident
    text = render(HEADER | {"rss_above_start_bytes": 41 << 20}, steps(3), [])
    assert "<dt>resident set above start</dt><dd>41.00 MiB</dd>" in text
    assert "102 % of the budget" in text


def test_the_budget_of_every_step_is_drawn_where_it_changed_within_the_run() -> None:
    changed = [replace(STEP, step=at, allowed=allowed << 20) for at, allowed in enumerate((60, 60, 40, 1 << 42, 80))]
    header = HEADER | {"budget_bytes": 99 << 20}  # of a session whose budget was set before the first step, or after
    text = render(header, changed, [])
    assert "<h1>stdlib-lm under a budget of 60.00 MiB, then 40.00 MiB, then no budget, then 80.00 MiB</h1>" in text
    assert "99.00 MiB" not in text
    assert "the budget, which changed within the run" in text
    drawn = draw_steps(changed, [60 << 20, 40 << 20, 1 << 62, 80 << 20], 0, 0)
    assert drawn is not None
    peak = drawn.curves[0]
    assert peak.budget_y is None
    assert (peak.budget.count("M"), peak.budget.count("L")) == (2, 2), "a step without a budget breaks the line"
    assert [[line for line in told if line.startswith("budget")] for told in drawn.told] == [
        ["budget: 60.00 MiB"], ["budget: 60.00 MiB"], ["budget: 40.00 MiB"], [], ["budget: 80.00 MiB"]
    ]  # fmt: skip
    always = render(header, changed[:2], [])
    assert "under a budget of 60.00 MiB</h1>" in always
    assert "which changed within the run" not in always


def test_a_number_that_is_none_breaks_the_line() -> None:
    drawn = draw_steps([*steps(2), *steps(1, logged={"loss": float("nan")}), *steps(2)], [], 0, 0)
    assert drawn is not None
    assert drawn.curves[-1].path.count("M") == 2


def test_a_number_too_far_from_others_breaks_the_line_too() -> None:
    drawn = draw_steps([*steps(2), *steps(1, logged={"loss": -1.7e308}), *steps(1, logged={"loss": 1.7e308})], [], 0, 0)
    assert drawn is not None
    assert drawn.curves[-1].path.count("M") == 1
    assert all(math.isfinite(tick.at) for tick in drawn.curves[-1].ticks)


def test_every_figure_of_every_step_is_in_the_file_that_the_page_offers() -> None:
    text = render(HEADER, steps(900), [])
    (address,) = re.findall(r'href="(data:text/csv[^"]*)"', text)
    lines = unquote(address).splitlines()
    assert len(lines) == 901
    assert "logged loss" in lines[0]
    assert "device_peak_bytes" not in lines[0]  # always nothing
