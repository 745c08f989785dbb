"""A timeline adds up what was resident, refuses what cannot have happened, and survives JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.ir import Change, Event, Kind, Lane, Origin, Span, StorageLine, Timeline, Work
from spillway.ir.timeline import WindowAt


def line(storage: int, nbytes: int, kind: Kind = Kind.ACTIVATION, *, present: bool = False) -> StorageLine:
    return StorageLine(storage=storage, kind=kind, nbytes=nbytes, present_at_start=present)


def event(op: int, storage: int, change: Change) -> Event:
    return Event(op=op, storage=storage, change=change)


TIMELINE = Timeline(
    step=7,
    allowed=60,
    ops=4,
    storages=(line(0, 10, Kind.PARAMETER, present=True), line(1, 20), line(2, 30)),
    events=(
        event(0, 1, Change.CREATE),
        event(1, 0, Change.MOVE),
        event(1, 2, Change.CREATE),
        event(1, 1, Change.DROP),
        event(3, 1, Change.RECOMPUTE),
        event(3, 2, Change.DIE),
        event(4, 0, Change.PAGE_IN),
        event(4, 1, Change.DIE),
    ),
)


def test_an_op_counts_with_its_fullest_moment() -> None:
    assert TIMELINE.resident() == [(0, 30), (1, 50), (2, 30), (3, 50), (4, 30)]


def test_the_peak_is_the_fullest_moment_of_all() -> None:
    assert TIMELINE.peak() == 50


def test_kinds_add_up_to_what_is_resident_at_the_same_moment() -> None:
    assert TIMELINE.by_kind() == {
        Kind.PARAMETER: [(0, 10), (1, 0), (2, 0), (3, 0), (4, 10)],
        Kind.ACTIVATION: [(0, 20), (1, 50), (2, 30), (3, 50), (4, 20)],
    }


def test_what_leaves_before_the_first_op_ends_counts_at_its_start() -> None:
    moved = Timeline(step=0, allowed=9, ops=1, storages=(line(0, 9, present=True),), events=(event(0, 0, Change.MOVE),))
    assert moved.resident() == [(0, 9), (1, 0)]


def test_an_absent_storage_may_die_and_changes_nothing() -> None:
    events = (event(0, 0, Change.DROP), event(0, 0, Change.DIE))
    dead = Timeline(step=0, allowed=9, ops=1, storages=(line(0, 9, present=True),), events=events)
    assert dead.resident() == [(0, 9), (1, 0)]


def test_a_step_without_ops_has_the_peak_it_begins_with() -> None:
    empty = Timeline(step=0, allowed=9, ops=0, storages=(line(0, 5, present=True),), events=())
    assert (empty.peak(), empty.resident()) == (5, [(0, 5)])


def test_json_holds_a_row_for_every_storage_and_event() -> None:
    assert TIMELINE.to_json() == {
        "step": 7,
        "allowed": 60,
        "ops": 4,
        "storages": [[0, "parameter", 10, True], [1, "activation", 20, False], [2, "activation", 30, False]],
        "events": [
            [0, 1, "create"],
            [1, 0, "move"],
            [1, 2, "create"],
            [1, 1, "drop"],
            [3, 1, "recompute"],
            [3, 2, "die"],
            [4, 0, "page-in"],
            [4, 1, "die"],
        ],
        "spans": [],
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (event(0, 0, Change.CREATE), "op 0: create of storage 0, which is present"),
        (event(0, 0, Change.RECOMPUTE), "op 0: recompute of storage 0, which is present"),
        (event(0, 0, Change.PAGE_IN), "op 0: page-in of storage 0, which is present"),
        (event(0, 1, Change.DROP), "op 0: drop of storage 1, which is absent"),
        (event(0, 1, Change.MOVE), "op 0: move of storage 1, which is absent"),
        (event(0, 3, Change.DIE), "op 0: die of storage 3, which is not listed"),
        (event(5, 1, Change.CREATE), "an event of op 5 stands after op 0 in a timeline of 4 ops"),
        (event(-1, 1, Change.CREATE), "an event of op -1 stands after op 0 in a timeline of 4 ops"),
    ],
)
def test_an_event_that_cannot_have_happened_is_refused(change: Event, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(TIMELINE, events=(change,))


def test_events_stand_in_order() -> None:
    with pytest.raises(ValueError, match="an event of op 0 stands after op 1"):
        replace(TIMELINE, events=(event(1, 1, Change.CREATE), event(0, 2, Change.CREATE)))


def test_two_storages_cannot_have_the_same_number() -> None:
    with pytest.raises(ValueError, match="two storages of a timeline have the same number"):
        replace(TIMELINE, storages=(*TIMELINE.storages, line(2, 4)))


def test_a_storage_cannot_have_less_than_no_bytes() -> None:
    with pytest.raises(ValueError, match="storage 1 has -1 bytes"):
        line(1, -1)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({"step": "7"}, "step of the timeline is '7', not a whole number"),
        ({"events": None}, "events of the timeline is None, not a list"),
        (
            {"storages": [[0, "parameter", 10]]},
            r"\[0, 'parameter', 10\] is no storage line: storage",
        ),
        (
            {"storages": [[0, "parameters", 10, True]]},
            "kind of the storage line is 'parameters'",
        ),
        ({"events": [[0, 1]]}, r"\[0, 1\] is no event: op, storage, change"),
        ({"events": [[0, 1, "melt"]]}, "change of the event is 'melt', none of create, die"),
        ({"events": [0]}, "0 is no event"),
        ({"spans": None}, "spans of the timeline is None, not a list"),
        ({"ops": 1_000_001}, "ops of the timeline is 1000001, not a whole number from 0 to 1e\\+06"),
        ({"allowed": -1}, "allowed of the timeline is -1, not a whole number from 0"),
        ({"allowed": True}, "allowed of the timeline is True, not a whole number"),
        ({"spans": [["compute", "op", 0.0, 1.0, 0, "mm", None, 0]]}, "is no span: lane, work, began"),
        (
            {"spans": [["compute", "op", "0", 1.0, 0, "mm", None, 0, 0]]},
            "began of the span is '0', not a number",
        ),
        (
            {"spans": [["road", "op", 0.0, 1.0, 0, "mm", None, 0, 0]]},
            "lane of the span is 'road', none of",
        ),
        ({"spans": [["compute", "op", 2.0, 1.0, 0, "mm", None, 0, 0]]}, "op on compute from 2.0 to 1.0"),
        ({"spans": [["compute", "op", 0.0, 1.0, 9, "mm", None, 0, 0]]}, "a span of op 9 in a timeline of 4 ops"),
        (
            {"spans": [["disk", "copy", at, 9.0, 0, "", None, 0, 0] for at in (2.0, 1.0)]},
            "a span that began at 1.0 stands after one of 2.0",
        ),
    ],
)
def test_json_of_something_else_is_refused(damage: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Timeline.from_json(TIMELINE.to_json() | damage)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any timeline that can have happened: each event is drawn from those that are possible at its moment."""
    storages = [
        line(number, draw(st.integers(0, 2**40)), draw(st.sampled_from(Kind)), present=draw(st.booleans()))
        for number in draw(st.lists(st.integers(0, 99), max_size=5, unique=True))
    ]
    present = {entry.storage: entry.present_at_start for entry in storages}
    ops = draw(st.integers(0, 9))
    events = []
    for op in sorted(draw(st.lists(st.integers(0, ops), max_size=20))) if storages else []:
        storage = draw(st.sampled_from(sorted(present)))
        leaving = {Change.DIE, Change.DROP, Change.MOVE}
        change = draw(st.sampled_from(sorted(leaving if present[storage] else (set(Change) - leaving) | {Change.DIE})))
        present[storage] = change not in leaving
        events.append(event(op, storage, change))
    step, allowed = draw(st.integers(0, 10**6)), draw(st.integers(0, 2**50))
    spans = tuple(sorted(draw(st.lists(spans_of(ops), max_size=4)), key=lambda span: span.began))
    return Timeline(step=step, allowed=allowed, ops=ops, storages=tuple(storages), events=tuple(events), spans=spans)


PRINTABLE = st.characters(categories=("L", "M", "N", "P", "S"))


@st.composite
def spans_of(draw: st.DrawFn, ops: int) -> Span:
    """Any span of a step of so many ops."""
    lane = draw(st.sampled_from(Lane))
    work = draw(st.sampled_from([Work.OP, Work.RECOMPUTE, Work.STALL])) if lane is Lane.COMPUTE else Work.COPY
    began = draw(st.floats(0, 1e4))
    ended = began + draw(st.floats(0, 10))
    return Span(
        lane=lane, work=work, began=began, ended=ended, op=draw(st.integers(0, ops)),
        name=draw(st.text(PRINTABLE, max_size=3)),
        storage=draw(st.none() | st.integers(0, 99)), nbytes=draw(st.integers(0, 2**40)),
        stalled=draw(st.floats(0, 1)) * (ended - began),
    )  # fmt: skip


@given(timelines())
def test_every_timeline_survives_json(timeline: Timeline) -> None:
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_a_timeline_of_version_1_has_no_spans() -> None:
    data = TIMELINE.to_json()
    del data["spans"]
    assert Timeline.from_json(data) == TIMELINE
    assert (TIMELINE.seconds(), TIMELINE.transfers().seconds) == (0, 0)


@given(timelines())
def test_every_timeline_adds_up(timeline: Timeline) -> None:
    kinds = timeline.by_kind().values()
    assert timeline.resident() == [(op, sum(row[op][1] for row in kinds)) for op in range(timeline.ops + 1)]
    assert timeline.peak() == peak_by_hand(timeline)


def peak_by_hand(timeline: Timeline) -> int:
    """The peak from the list of what is present after every event."""
    sizes = {entry.storage: entry.nbytes for entry in timeline.storages}
    present = {entry.storage for entry in timeline.storages if entry.present_at_start}
    levels = [sum(sizes[storage] for storage in present)]
    for happened in timeline.events:
        if happened.change in ("create", "recompute", "page-in"):
            present = present | {happened.storage}
        else:
            present = present - {happened.storage}
        levels.append(sum(sizes[storage] for storage in present))
    return max(levels)


def at(until: int) -> WindowAt:
    return WindowAt(until=until, swapped_in=1, cancelled=2, waited=3, precleared=4)


def test_what_a_window_did_survives_json_and_a_timeline_without_one_says_nothing_of_it() -> None:
    slid = replace(TIMELINE, window=tuple(at(until) for until in (2, 3, 4, 4)))
    assert slid.to_json()["window"] == [[until, 1, 2, 3, 4] for until in (2, 3, 4, 4)]
    assert Timeline.from_json(json.loads(json.dumps(slid.to_json()))) == slid
    assert "window" not in TIMELINE.to_json()


@pytest.mark.parametrize(
    ("untils", "says"), [((4,), "over 1 ops"), ((4, 4, 5, 4), "reaches to op 5")]
)  # fmt: skip
def test_a_window_over_other_ops_is_refused(untils: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(TIMELINE, window=tuple(at(until) for until in untils))


def test_the_storages_of_the_fullest_moments_add_up_to_what_was_resident() -> None:
    timeline = Timeline(
        step=0, allowed=100, ops=3,
        storages=(line(0, 10, present=True), line(1, 20), line(2, 30), line(3, 40)),
        events=(
            Event(op=0, storage=1, change=Change.CREATE), Event(op=0, storage=1, change=Change.DROP),
            Event(op=1, storage=2, change=Change.CREATE), Event(op=2, storage=2, change=Change.DIE),
            Event(op=2, storage=1, change=Change.RECOMPUTE), Event(op=3, storage=3, change=Change.PAGE_IN),
        ),
    )  # fmt: skip
    found = timeline.present_at(range(4))
    assert {op: {one.storage for one in lines} for op, lines in found.items()} == {
        0: {0, 1}, 1: {0, 2}, 2: {0, 2}, 3: {0, 1, 3}
    }  # fmt: skip
    assert [sum(one.nbytes for one in found[op]) for op in range(4)] == [nbytes for _, nbytes in timeline.resident()]
    assert timeline.present_at([2]) == {2: found[2]}


def test_the_plain_peak_counts_what_was_absent_and_what_was_absent_from_the_start() -> None:
    timeline = Timeline(
        step=0, allowed=100, ops=3, storages=(line(0, 10, present=True), line(1, 20), line(2, 30), line(3, 5)),
        events=(
            Event(op=0, storage=1, change=Change.CREATE), Event(op=0, storage=1, change=Change.DROP),
            Event(op=1, storage=2, change=Change.CREATE), Event(op=1, storage=2, change=Change.DIE),
            Event(op=1, storage=1, change=Change.DIE), Event(op=2, storage=3, change=Change.PAGE_IN),
        ),
    )  # fmt: skip
    assert timeline.peak() == 40
    assert timeline.plain_peak() == 10 + 20 + 30 + 5


def test_origins_come_back_from_json_and_are_left_out_where_nobody_knows_any() -> None:
    origin = Origin(storage=0, name="layers.0.weight", op="", module="layers.0", line="train.py:7")
    bare = Timeline(step=0, allowed=1, ops=0, storages=(line(0, 10, present=True),), events=())
    timeline = replace(bare, origins=(origin,))
    assert timeline.to_json()["origins"] == [[0, "layers.0.weight", "", "layers.0", "train.py:7"]]
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert "origins" not in bare.to_json()
