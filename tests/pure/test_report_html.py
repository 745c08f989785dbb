"""The page stands alone, says what was measured, and survives whatever a run holds."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from spillway.ir import Change, Event, Kind, StepReport, StorageLine, Timeline
from spillway.ir.timeline import WindowAt
from spillway.report.charts import draw_sizes
from spillway.report.figures import NO_BUDGET
from spillway.report.html import ROWS, render
from spillway.units import MiB
from tests.pure.spans import told_by

STEP = StepReport(
    step=0,
    signature="int64[4, 112]",
    managed=True,
    allowed=40 * MiB,
    start_bytes=10 * MiB,
    peak_bytes=39 * MiB,
    end_bytes=12 * MiB,
    peak_rss_bytes=300 * MiB,
    working_bytes=5 * MiB,
    seconds=1.25,
    stall_seconds=0.125,
    recomputed_ops=30,
    recomputed_seconds=0.0625,
    ops=600,
    bytes_out=7 * MiB,
    bytes_in=6 * MiB,
    dropped_bytes=5 * MiB,
    drops=3,
    moves=2,
    refusals={"chain too long": 4},
    escaped=1,
    unmanaged=0,
    logged={"loss": 5.5625},
)
TIMELINE = Timeline(
    step=3,
    allowed=40 * MiB,
    ops=4,
    storages=(
        StorageLine(storage=0, kind=Kind.OPTIMIZER_STATE, nbytes=10 * MiB, present_at_start=True),
        StorageLine(storage=1, kind=Kind.ACTIVATION, nbytes=29 * MiB, present_at_start=False),
    ),
    events=(
        Event(op=0, storage=1, change=Change.CREATE),
        Event(op=1, storage=1, change=Change.DROP),
        Event(op=2, storage=0, change=Change.MOVE),
        Event(op=3, storage=1, change=Change.RECOMPUTE),
        Event(op=4, storage=0, change=Change.PAGE_IN),
    ),
)
HEADER = {"budget_bytes": 40 * MiB, "method": "lru", "torch": "2.13.0", "workload": "stdlib-lm"}
EMPTY = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "line", "path", "source"}


class Page(HTMLParser):
    """Reads a page; an end tag without its start tag fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.rows += tag == "tr"
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def page(
    header: dict[str, Any] = HEADER, steps: tuple[StepReport, ...] = (STEP,), timelines: tuple[Timeline, ...] = ()
) -> Page:
    return Page(render(header, steps, timelines))


def test_a_page_is_well_formed_and_asks_for_nothing_from_outside() -> None:
    text = render(HEADER, [STEP], [TIMELINE])
    read = Page(text)
    assert read.open == []
    assert {name for name, _ in read.attributes} & {"src", "srcset", "data", "action"} == set()
    assert all((value or "").startswith("data:text/csv") for name, value in read.attributes if name == "href")
    assert re.findall(r"https?:|url\(|@import|fetch\(|import\(", text) == []


def test_a_page_says_what_the_run_was_and_what_it_measured() -> None:
    text = page().text
    for said in ("stdlib-lm under a budget of 40.00 MiB", "lru", "2.13.0", "39.00 MiB"):
        assert said in text
    assert "measured, by our account; 98 % of the budget" in text
    assert "measured; 30 ops ran again, for 5.00 MiB dropped" in text
    assert "4 chain too long" in text


def test_the_pictures_are_xml_with_an_area_for_every_kind_and_a_bar_for_every_change() -> None:
    pictures = re.findall(r"<svg.*?</svg>", render(HEADER, [STEP], [TIMELINE]), flags=re.DOTALL)
    memory, changes = (ElementTree.fromstring(picture) for picture in pictures)
    assert [path.get("class") for path in memory.iter("path")] == ["optimizer-state", "activation"]
    assert [path.get("class") for path in changes.iter("path")] == ["recompute", "page-in", "drop", "move"]
    assert [line.get("class") for line in memory.iter("line")].count("budget") == 1
    assert "budget 40.00 MiB" in [text.text for text in memory.iter("text")]


def test_the_key_names_kinds_and_changes_with_their_bytes() -> None:
    text = page(timelines=(TIMELINE,)).text
    for said in ("activation, at most 29.00 MiB", "optimizer state, at most 10.00 MiB", "↓ dropped, 29.00 MiB"):
        assert said in text
    for said in ("↓ moved, 10.00 MiB", "↑ recomputed, 29.00 MiB", "↑ paged in, 10.00 MiB", "Measured."):
        assert said in text


def test_pointing_at_a_column_tells_what_was_resident_and_what_changed() -> None:
    told = told_by(render(HEADER, [STEP], [TIMELINE]))
    assert told[1] == [
        "op 1: 39.00 MiB resident",
        "activation: 29.00 MiB",
        "optimizer state: 10.00 MiB",
        "drop: 29.00 MiB",
    ]
    assert len(told) == TIMELINE.ops + 1


def test_a_page_without_a_timeline_says_how_to_get_one() -> None:
    text = page().text
    assert 'spillway.manage(..., method="lru", report=spillway.ReportOptions(timeline=True))' in text
    assert "spillway train WORKLOAD --budget BUDGET --run-file run.jsonl --output report.html" in text


def test_a_step_in_which_nothing_left_says_so() -> None:
    quiet = dataclasses.replace(TIMELINE, events=TIMELINE.events[:1])
    assert "Nothing left memory in this step" in page(timelines=(quiet,)).text


def test_every_timeline_is_drawn() -> None:
    text = page(timelines=(TIMELINE, dataclasses.replace(TIMELINE, step=9))).text
    assert "Memory over the ops of step 3" in text
    assert "Memory over the ops of step 9" in text


def test_a_peak_that_was_not_measured_is_called_expected() -> None:
    guessed = dataclasses.replace(STEP, step=1, peak_measured=False, peak_bytes=40 * MiB)
    read = page(steps=(STEP, guessed))
    assert "40.00 MiB expected" in read.text
    assert "39.00 MiB measured, by our account" in read.text
    assert "40.00 MiB expected, by our account" in page(steps=(guessed,)).text
    assert "expected" not in page().text


def test_a_run_without_a_budget_has_no_budget_line() -> None:
    step = dataclasses.replace(STEP, allowed=NO_BUDGET)
    timeline = dataclasses.replace(TIMELINE, allowed=NO_BUDGET)
    text = render({"budget_bytes": None}, [step], [timeline])
    assert "A run under no budget" in text
    assert 'class="budget"' not in text
    assert "of the budget" not in text


def test_a_run_on_paper_is_said_to_be_simulated_and_nowhere_measured() -> None:
    header = {"budget_bytes": 40 * MiB, "workload": "bert", "simulated": {"device": "a100"}}
    text = re.sub("<[^>]*>", " ", render(header, [dataclasses.replace(STEP, peak_rss_bytes=0)], [TIMELINE]))
    assert "bert, simulated, under a budget of" in text
    assert "All figures are simulated" in text
    assert "easured" not in text
    assert "imulated" not in page().text


def test_a_budget_of_nothing_is_no_reason_to_divide_by_it() -> None:
    step = dataclasses.replace(STEP, allowed=0)
    assert "0 B" in render({"budget_bytes": 0}, [step], [dataclasses.replace(TIMELINE, allowed=0)])


def test_a_run_without_steps_says_so() -> None:
    assert "This run has no finished step" in page(steps=()).text
    assert Page(render({}, [], [])).open == []


def test_what_a_run_file_holds_is_shown_as_text_and_never_as_a_tag() -> None:
    nasty = "</script><script>alert(1)</script>"
    step = dataclasses.replace(STEP, signature=nasty, logged={nasty: 1.0}, refusals={nasty: 1})
    read = page({"workload": nasty, nasty: nasty}, (step,), (TIMELINE,))
    assert "alert(1)" in read.text
    assert "<script>alert" not in render({"workload": nasty, nasty: nasty}, [step], [TIMELINE])


def test_a_loss_that_is_not_a_number_is_shown() -> None:
    step = dataclasses.replace(STEP, logged={"loss": math.nan, "norm": math.inf})
    text = page(steps=(step, STEP)).text
    assert "nan" in text
    assert "inf" in text


def test_of_very_many_steps_the_first_and_the_last_are_listed_and_the_rest_counted() -> None:
    steps = tuple(dataclasses.replace(STEP, step=number, signature=f"number {number}") for number in range(ROWS + 7))
    read = page(steps=steps)
    assert read.rows == 1 + ROWS + 1
    assert "7 steps are not shown." in read.text
    for number, shown in ((0, True), (ROWS // 2 - 1, True), (ROWS // 2, False), (ROWS + 6, True)):
        assert (f"number {number} " in read.text) is shown


def sized(step: int, size: tuple[int, ...], peak: int, **figures: Any) -> StepReport:
    return dataclasses.replace(
        STEP, step=step, input_size=list(size), peak_bytes=peak, blocks=4, recomputed_ops=0, ops=0, **figures
    )


def test_steps_with_an_input_size_are_drawn_against_it() -> None:
    steps = (
        sized(0, (64,), 20 * MiB, recomputed_blocks=4),
        sized(1, (128,), 30 * MiB, recomputed_blocks=2, projected_bytes=30 * MiB),
        sized(2, (128,), 31 * MiB, projected_bytes=31 * MiB, peak_measured=False),
    )
    shown = page(steps=steps)
    assert "Memory against input size" in shown.text
    assert "every block recomputed and measured" in shown.text
    assert "4 of 4" in shown.text
    assert "expected" in shown.text
    drawn = draw_sizes(steps, 40 * MiB)
    assert drawn is not None
    assert [point.name for point in drawn.points] == ["collecting", "planned", "expected"]
    assert [point.told for point in drawn.points][:1] == ["step 0, size 64: 20 MiB, 4 of 4 blocks recomputed"]
    assert drawn.points[0].x == pytest.approx(drawn.points[1].x / 2)
    assert drawn.budget_y is not None
    assert drawn.budget_y < min(point.y for point in drawn.points)  # higher up


def test_sizes_of_several_numbers_are_multiplied_and_without_a_budget_there_is_no_line() -> None:
    drawn = draw_sizes([sized(0, (2, 64), 20 * MiB), sized(1, (4, 64), 30 * MiB)], None)
    assert drawn is not None
    assert drawn.axis == "input size, all numbers multiplied"
    assert drawn.budget_y is None
    assert drawn.points[0].x == pytest.approx(drawn.points[1].x / 2)
    assert draw_sizes([STEP], 40 * MiB) is None


def test_sizes_of_nothing_are_drawn_and_sizes_that_are_none_are_not() -> None:
    drawn = draw_sizes([sized(0, (0,), 20 * MiB), sized(1, (2**62,) * 20, 20 * MiB)], None)
    assert drawn is not None
    assert [(point.x, point.told.partition(":")[0]) for point in drawn.points] == [(0.0, "step 0, size 0")]
    assert draw_sizes([sized(0, (2**62,) * 20, 20 * MiB)], None) is None


@pytest.mark.parametrize("told", [-1, 0, True, 10**400, "60 MiB"])
def test_a_budget_that_is_no_number_of_bytes_is_none(told: object) -> None:
    assert "under no budget</h1>" in render({"budget_bytes": told}, [], [])


def test_the_window_that_planned_a_step_is_drawn_without_a_script_and_nothing_is_where_none_did() -> None:
    names = ("until", "swapped_in", "cancelled", "waited", "precleared")
    rows = ((2, 29, 0, 0, 0), (3, 0, 10, 0, 0), (4, 0, 0, 10, 0), (4, 0, 0, 0, 29))
    window = tuple(WindowAt(**dict(zip(names, row, strict=True))) for row in rows)
    page = render({"simulated": {}}, [STEP], [dataclasses.replace(TIMELINE, window=window)])
    section = page.partition("The window over the step")[2].partition("</figure>")[0]
    for what in ("in the window", "swapped in, 29 B", "cancelled, 10 B", "waited for, 10 B", "precleared, 29 B"):
        assert what in section
    assert section.count("<path") == 5
    assert "The window over the step" not in render({}, [STEP], [TIMELINE])
