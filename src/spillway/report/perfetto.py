"""A recorded step in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Lanes become threads, spans complete events, resident bytes and the budget counters, and an arrow leads from each copy
out to the copy in that brings the same storage back. Every timeline is a process of its own. The fields are those of
"Trace Event Format" (the Chromium project), sections "Complete Events", "Counter Events", "Flow Events" and "Metadata
Events"; times are microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from spillway.ir import Lane, Span, Timeline, Work
from spillway.report.charts import op_starts
from spillway.report.figures import NO_BUDGET
from spillway.units import Seconds

_MOST_AT_A_TIME: Final = 100
"""Threads set aside for each lane: two copies at a time need two."""


def write_trace(path: str | os.PathLike[str], header: Mapping[str, Any], timelines: Sequence[Timeline]) -> int:
    """Write the trace of all timelines with spans; returns the number of events. OSError where the system refuses. The
    `header` of a run file goes along as `otherData`."""
    document = trace(header, timelines)
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    return len(document["traceEvents"])


def trace(header: Mapping[str, Any], timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The document that `write_trace` writes."""
    events = [event for timeline in timelines if timeline.spans for event in _events(timeline)]
    other = {name: str(value) for name, value in header.items()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    process = timeline.step + 1  # 0 is the idle process to some viewers
    yield _named("process_name", process, 0, name=f"step {timeline.step}")
    threads = _threads(timeline.spans)
    for lane, thread in sorted(set(threads), key=lambda pair: pair[1]):
        again = thread % _MOST_AT_A_TIME
        yield _named("thread_name", process, thread, name=f"{lane} {again + 1}" if again else lane.value)
        yield _named("thread_sort_index", process, thread, sort_index=thread)
    for span, (_, thread) in zip(timeline.spans, threads, strict=True):
        what, of = "stall" if span.work is Work.STALL else span.lane.value, ""
        arguments: dict[str, Any] = {"op": span.op}
        if span.storage is not None:
            arguments["storage"], of = span.storage, f" of storage {span.storage}"
        if span.nbytes:
            arguments["bytes"] = span.nbytes
        if span.work is Work.COPY:
            arguments |= {"hidden_us": _micro(span.seconds - span.stalled), "stalled_us": _micro(span.stalled)}
        yield {
            "name": span.name or f"{what}{of}", "cat": span.work.value, "ph": "X", "ts": _micro(span.began),
            "dur": _micro(span.seconds), "pid": process, "tid": thread, "args": arguments,
        }  # fmt: skip
    yield from _arrows(timeline, threads, process)
    yield from _counters(timeline, process)


def _named(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": arguments}


def _threads(spans: Sequence[Span]) -> list[tuple[Lane, int]]:
    """A thread for every span: within one, spans nest or follow each other, as the format asks for; copies only
    follow."""
    open_ends: dict[int, list[Seconds]] = {}
    numbers: dict[int, int] = {}
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].began, -spans[i].ended)):
        span = spans[index]
        for number in count(_MOST_AT_A_TIME * (1 + list(Lane).index(span.lane))):
            ends = open_ends.setdefault(number, [])
            while ends and ends[-1] <= span.began:
                ends.pop()
            if not ends or (span.work is not Work.COPY and ends[-1] >= span.ended):
                ends.append(span.ended)
                numbers[index] = number
                break
    return [(span.lane, numbers[index]) for index, span in enumerate(spans)]


def _arrows(timeline: Timeline, threads: Sequence[tuple[Lane, int]], process: int) -> Iterator[dict[str, Any]]:
    """From the last copy out of a storage to every copy in that follows it."""
    left: dict[int, tuple[Span, int]] = {}
    number = 0
    for span, (_, thread) in zip(timeline.spans, threads, strict=True):
        if span.storage is None:
            continue
        if span.lane is Lane.COPY_OUT:
            left[span.storage] = span, thread
        elif span.lane is Lane.COPY_IN and span.storage in left:
            out, out_thread = left[span.storage]
            common = {"name": "comes back", "cat": "residency", "id": process << 32 | number, "pid": process}
            yield {**common, "ph": "s", "ts": _micro(out.began), "tid": out_thread}
            yield {**common, "ph": "f", "bp": "e", "ts": _micro(span.began), "tid": thread}
            number += 1


def _counters(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    """Resident bytes at the fullest moment of every op, from the op's begin, where they change; and the budget."""
    tracks = {"budget": [(0, timeline.allowed)]} if timeline.allowed < NO_BUDGET else {}
    starts = op_starts(timeline)
    for name, levels in {"resident": timeline.resident(), **tracks}.items():
        before = None
        for op, nbytes in levels:
            if nbytes != before:
                at = starts[op] if op else 0.0
                yield {"name": name, "ph": "C", "ts": _micro(at), "pid": process, "tid": 0, "args": {"bytes": nbytes}}
            before = nbytes


def _micro(seconds: Seconds) -> float:
    return round(seconds * 1e6, 3)
