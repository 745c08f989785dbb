"""A trace has the fields that the Trace Event Format asks for, and nothing in it overlaps that may not."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.ir import Lane, Span, Timeline
from spillway.report.figures import NO_BUDGET
from spillway.report.perfetto import trace, write_trace
from tests.pure.spans import LANES, SPANS, again, copy, op, stall

NEEDED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id", "bp"},
}
"""What each phase of an event has; the format asks for no less."""


def events(timeline: Timeline = LANES) -> list[dict[str, Any]]:
    return list(trace({}, [timeline])["traceEvents"])


def of_phase(phase: str, timeline: Timeline = LANES) -> list[dict[str, Any]]:
    return [event for event in events(timeline) if event["ph"] == phase]


def check(found: list[dict[str, Any]]) -> None:
    """Fields, their types, and that complete events of one thread nest or follow each other."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in found:
        assert set(event) == NEEDED[event["ph"]]
        assert all(isinstance(event[name], int) for name in ("pid", "tid"))
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        open_ends: list[float] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= began + 1e-3:
                open_ends.pop()
            assert not open_ends or ended <= open_ends[-1] + 1e-3
            open_ends.append(ended)


def test_every_event_has_the_fields_of_its_phase() -> None:
    check(events())
    assert {event["ph"] for event in events()} == set(NEEDED)


def test_lanes_are_threads_and_spans_complete_events_in_microseconds() -> None:
    names = {event["tid"]: event["args"]["name"] for event in of_phase("M") if event["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "copy-out", "copy-in", "disk"]
    found = [(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in of_phase("X")]
    assert len(found) == len(SPANS)
    assert ("compute", "aten::add", 5e6, 5e6) in found
    assert ("compute", "stall of storage 1", 5e6, 2e6) in found
    assert ("copy-out", "copy-out of storage 1", 1.5e6, 2e6) in found


def test_a_copy_says_what_it_moved_and_how_much_of_it_was_hidden() -> None:
    (back,) = [event for event in of_phase("X") if event["name"] == "copy-in of storage 1"]
    assert back["args"] == {"op": 3, "storage": 1, "bytes": 60, "hidden_us": 0.0, "stalled_us": 2e6}


def test_an_arrow_leads_from_a_copy_out_to_the_copy_in_of_the_same_storage() -> None:
    (begin,), (end,) = of_phase("s"), of_phase("f")
    assert begin["id"] == end["id"]
    assert (begin["ts"], end["ts"], end["bp"]) == (1.5e6, 5e6, "e")
    other = tuple(dataclasses.replace(s, storage=2) if s.lane is Lane.COPY_OUT else s for s in SPANS)
    assert of_phase("s", dataclasses.replace(LANES, spans=other)) == []


def test_counters_show_resident_bytes_where_they_change_and_the_budget() -> None:
    found = [(event["name"], event["ts"], event["args"]["bytes"]) for event in of_phase("C")]
    assert found == [("resident", 0.0, 100), ("resident", 10e6, 40), ("budget", 0.0, 100)]
    free = dataclasses.replace(LANES, allowed=NO_BUDGET)
    assert {event["name"] for event in of_phase("C", free)} == {"resident"}


def test_every_step_is_a_process_and_one_without_lanes_is_left_out() -> None:
    later = dataclasses.replace(LANES, step=9)
    found = trace({}, [LANES, later, dataclasses.replace(LANES, step=11, spans=())])["traceEvents"]
    names = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert names == ["step 4", "step 9"]
    assert len({event["pid"] for event in found}) == 2
    ids = [event["id"] for event in found if event["ph"] == "s"]
    assert len(set(ids)) == len(ids) == 2


def test_copies_at_the_same_time_are_on_threads_of_their_own() -> None:
    spans = (copy(Lane.COPY_IN, 0, 0.0, 4.0), copy(Lane.COPY_IN, 0, 1.0, 3.0, storage=2))
    timeline = dataclasses.replace(LANES, spans=spans)
    check(events(timeline))
    assert len({event["tid"] for event in of_phase("X", timeline)}) == 2


@st.composite
def spans(draw: st.DrawFn) -> tuple[Span, ...]:
    """Ops one after the other with something inside them, and copies at any time."""
    made, at = [], 0.0
    for number in range(draw(st.integers(0, 4))):
        inside = draw(st.floats(0, 1))
        made += [op(number, at, at + 2), draw(st.sampled_from([stall, again]))(number, at + inside, at + 1)]
        at += draw(st.floats(2, 3))
    for _ in range(draw(st.integers(0, 8))):
        began, length = draw(st.floats(0, 10)), draw(st.floats(0, 5))
        lane = draw(st.sampled_from([Lane.COPY_OUT, Lane.COPY_IN, Lane.DISK]))
        made.append(copy(lane, 0, began, began + length, storage=draw(st.integers(0, 2))))
    return tuple(sorted(made, key=lambda span: span.began))


@given(spans())
def test_any_step_makes_a_trace_that_nests(drawn: tuple[Span, ...]) -> None:
    found = events(dataclasses.replace(LANES, spans=drawn))
    check(found)
    assert sum(event["ph"] == "X" for event in found) == len(drawn)


def test_the_file_is_one_json_document(tmp_path: Path) -> None:
    number = write_trace(tmp_path / "trace.json", {"method": "delta", "budget_bytes": 100}, [LANES])
    document = json.loads((tmp_path / "trace.json").read_text("utf-8"))
    assert len(document["traceEvents"]) == number
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"] == {"method": "delta", "budget_bytes": "100"}


def test_a_place_that_cannot_be_written_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_trace(tmp_path / "missing" / "trace.json", {}, [LANES])
