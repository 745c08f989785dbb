"""A run file gives back what was written, or one sentence that names the path and the line."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import FileFormatError
from spillway.ir import (
    BlocksAtPeak,
    Change,
    Event,
    HeldByBlock,
    Kind,
    RunFile,
    RunWriter,
    StepReport,
    StorageLine,
    Timeline,
    files,
    read_run,
    reading,
)
from spillway.ir.spans import Lane, Span, Work
from spillway.ir.timeline import MOST_OPS

TIMELINE = Timeline(
    step=1,
    allowed=100,
    ops=2,
    storages=(StorageLine(storage=0, kind=Kind.OPTIMIZER_STATE, nbytes=64, present_at_start=True),),
    events=(Event(op=1, storage=0, change=Change.MOVE),),
)
HEADER = {"budget_bytes": 100, "method": "lru"}


def report(step: int, **figures: Any) -> StepReport:
    counts = {field.name: 0 for field in fields(StepReport) if field.type in ("int", "Bytes", "Seconds")}
    others = {"signature": "", "managed": True, "refusals": {}, "logged": {}}
    return StepReport(**{**counts, **others, "step": step, **figures})


REPORTS = [report(0, peak_bytes=90, logged={"loss": 1.5}), report(1, peak_bytes=95, logged={"loss": 1.25})]
RECORDS: list[dict[str, Any]] = [*({"step": one.to_json()} for one in REPORTS), {"timeline": TIMELINE.to_json()}]
FULL_HEADER = {"format": "spillway-run", "version": 3, "budget_bytes": 100, "method": "lru"}

VERSION_1 = (
    b'{"format":"spillway-run","version":1,"budget_bytes":100,"method":"lru","crc32":"501a39ee"}\n'
    b'{"step":{"step":0,"signature":"float32[2]","managed":true,"allowed":100,"start_bytes":64,"'
    b'peak_bytes":90,"end_bytes":64,"peak_rss_bytes":0,"working_bytes":8,"seconds":0.5,"stall_se'
    b'conds":0.25,"recomputed_ops":0,"recomputed_seconds":0.0,"ops":2,"bytes_out":64,"bytes_in":'
    b'0,"dropped_bytes":0,"drops":0,"moves":1,"refusals":{},"escaped":0,"unmanaged":0,"logged":{'
    b'"loss":1.5}},"crc32":"94e48f58"}\n'
    b'{"timeline":{"step":0,"allowed":100,"ops":2,"storages":[[0,"optimizer state",64,true]],"ev'
    b'ents":[[1,0,"move"]]},"crc32":"5a0ae636"}\n'
)


def written(path: Path) -> bytes:
    with RunWriter(path, HEADER) as run:
        for record in RECORDS:
            run.append(record)
    return path.read_bytes()


def refused(path: Path, content: bytes) -> FileFormatError:
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        read_run(path)
    assert caught.value.path == path
    return caught.value


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written(tmp_path / "run.jsonl")
    assert read_run(tmp_path / "run.jsonl") == RunFile(
        header=FULL_HEADER, steps=REPORTS, timelines=[TIMELINE], damaged_tail=0
    )


def test_every_line_is_json_that_names_what_it_is(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in written(tmp_path / "run.jsonl").splitlines()]
    assert [set(line) - {"crc32"} for line in lines] == [set(FULL_HEADER), {"step"}, {"step"}, {"timeline"}]
    assert written(tmp_path / "run.jsonl").startswith(b'{"format":"spillway-run","version":3,"budget_bytes":100,')


def test_a_loss_that_is_not_a_number_is_kept(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run.jsonl", {}) as run:
        run.append({"step": report(0, logged={"loss": math.nan, "norm": math.inf}).to_json()})
    (step,) = read_run(tmp_path / "run.jsonl").steps
    assert math.isnan(step.logged["loss"])
    assert step.logged["norm"] == math.inf


def test_a_record_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        run.append(RECORDS[0])
        assert read_run(tmp_path / "run.jsonl").steps == REPORTS[:1]


def test_a_new_run_replaces_the_file(tmp_path: Path) -> None:
    written(tmp_path / "run.jsonl")
    RunWriter(tmp_path / "run.jsonl", HEADER).close()
    assert read_run(tmp_path / "run.jsonl").steps == []


def test_closing_twice_does_no_harm(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run.jsonl", HEADER)
    run.close()
    run.close()
    with pytest.raises(ValueError, match="closed file"):
        run.append(RECORDS[0])


@pytest.mark.parametrize("name", ["format", "version", "crc32"])
def test_a_header_cannot_take_the_names_of_the_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"the header of a run file names its own {name}"):
        RunWriter(tmp_path / "run.jsonl", {name: 1})
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("record", [{}, {"note": 1}, {"step": {}, "timeline": {}}])
def test_a_record_that_could_not_be_read_is_not_written(tmp_path: Path, record: dict[str, Any]) -> None:
    with (
        RunWriter(tmp_path / "run.jsonl", HEADER) as run,
        pytest.raises(ValueError, match="one step, one timeline or one of blocks"),
    ):
        run.append(record)
    assert read_run(tmp_path / "run.jsonl").steps == []


def test_a_record_that_json_cannot_hold_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        with pytest.raises(TypeError, match="not JSON serializable"):
            run.append({"step": {"loss": object()}})
        run.append(RECORDS[0])
    assert read_run(tmp_path / "run.jsonl").steps == REPORTS[:1]


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the system refuse to make any file larger, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 100_000])
def test_a_record_that_met_a_full_disk_is_written_whole_before_the_next(tmp_path: Path, room: int) -> None:
    large = report(5, signature="x" * 300_000)
    with RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        begun = (tmp_path / "run.jsonl").stat().st_size
        with largest_file(begun + room), pytest.raises(OSError, match="File too large"):
            run.append({"step": large.to_json()})
        assert read_run(tmp_path / "run.jsonl").damaged_tail == (room > 0)
        run.append(RECORDS[0])
    assert read_run(tmp_path / "run.jsonl").steps == [large, REPORTS[0]]


def test_a_record_whose_writing_was_interrupted_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def interrupted(file: int, content: bytes, offset: int) -> int:
        pwrite(file, content, offset)
        raise KeyboardInterrupt

    with RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        monkeypatch.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.append(RECORDS[0])
        monkeypatch.undo()
        run.append(RECORDS[1])
    assert read_run(tmp_path / "run.jsonl").steps == REPORTS


def test_a_file_is_closed_even_if_the_disk_stays_full(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run.jsonl", HEADER)
    with largest_file((tmp_path / "run.jsonl").stat().st_size):
        with pytest.raises(OSError, match="File too large"):
            run.append(RECORDS[0])
        with pytest.raises(OSError, match="File too large"):
            run.close()
    run.close()
    assert read_run(tmp_path / "run.jsonl").steps == []


def test_a_file_that_cannot_be_begun_is_the_systems_error_and_is_closed(tmp_path: Path) -> None:
    with largest_file(10), pytest.raises(OSError, match="File too large") as caught:
        RunWriter(tmp_path / "run.jsonl", HEADER)
    assert caught.value.strerror == "File too large"
    assert str(tmp_path / "run.jsonl") not in {
        os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")
    }


def test_an_incomplete_last_line_is_dropped_and_counted(tmp_path: Path) -> None:
    content = written(tmp_path / "run.jsonl")
    (tmp_path / "run.jsonl").write_bytes(content[:-20])
    run = read_run(tmp_path / "run.jsonl")
    assert (len(run.steps), run.timelines, run.damaged_tail) == (2, [], 1)


def test_a_changed_digit_is_noticed(tmp_path: Path) -> None:
    content = written(tmp_path / "run.jsonl")
    error = refused(tmp_path / "run.jsonl", content.replace(b'"peak_bytes":95', b'"peak_bytes":85'))
    sentence = "the line is damaged, or lines before it are missing: its checksum does not fit"
    assert f"{tmp_path / 'run.jsonl'}, line 3: {sentence}" in str(error)
    assert error.line == 3


def test_a_missing_line_is_noticed(tmp_path: Path) -> None:
    lines = written(tmp_path / "run.jsonl").splitlines(keepends=True)
    assert refused(tmp_path / "run.jsonl", b"".join([lines[0], *lines[2:]])).line == 2


def test_a_line_without_a_checksum_is_noticed(tmp_path: Path) -> None:
    content = written(tmp_path / "run.jsonl")
    error = refused(tmp_path / "run.jsonl", content + b'{"step":{"step":2}}\n')
    assert "line 5: the line is damaged: it does not end in a checksum" in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b'{"format":"spillway-run","ver',
        b"step,loss\n1,2.5\n",
        b'{"step": 1}\n',
        b"[1, 2]\n",
        b"PK\x03\x04\x00\xff\n\x00",
        b'{"format":"spillway-step","version":1}\n',
        b'{"format":"spillway-run"}\n',
        b'{"format":"spillway-run","version":"1"}\n',
        b'{"format":["spillway-run"],"version":1}\n',
        b"[" * 200_000,
        b"9" * 10_000,
    ],
)
def test_a_foreign_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    error = refused(tmp_path / "foreign", content)
    assert "line 1: this is not the first line of a run file: the file is foreign, empty or damaged" in str(error)


def test_blocks_are_read_as_they_were_written_and_files_of_version_2_have_none(tmp_path: Path) -> None:
    block = HeldByBlock(
        block="layers.0", kind="Layer", line="model.py:7", action="recompute", saved_bytes=90, held_bytes=0
    )
    blocks = BlocksAtPeak(step=3, peak_bytes=100, start_bytes=10, blocks=[block])
    with RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        run.append({"blocks": blocks.to_json()})
    assert read_run(tmp_path / "run.jsonl").blocks == blocks
    with pytest.raises(FileFormatError, match="line 2: "), RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        run.append({"blocks": blocks.to_json() | {"peak_bytes": -1}})
        read_run(tmp_path / "run.jsonl")
    (tmp_path / "run.jsonl").write_bytes(VERSION_1)
    assert read_run(tmp_path / "run.jsonl").blocks is None


def test_a_newer_file_is_refused_with_both_versions(tmp_path: Path) -> None:
    error = refused(tmp_path / "run.jsonl", b'{"format":"spillway-run","version":4,"sealed":"otherwise"}\n')
    assert "line 1: written in version 4 of the format, and this Spillway reads up to 3" in str(error)


def test_a_file_of_version_1_is_read(tmp_path: Path) -> None:
    # Written by Spillway 0.1.0: neither spans nor seconds of transfers.
    (tmp_path / "run.jsonl").write_bytes(VERSION_1)
    run = read_run(tmp_path / "run.jsonl")
    (step,), (timeline,) = run.steps, run.timelines
    assert (run.header["version"], step.peak_bytes, timeline.peak(), timeline.spans) == (1, 90, 64, ())
    assert (step.transfer_seconds, step.hidden_share) == (0.0, 0.0)


def test_a_step_report_may_lack_what_has_a_default_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(VERSION_1)
    (old,) = read_run(tmp_path / "run.jsonl").steps
    assert StepReport.from_json(old.to_json()) == old
    with pytest.raises(ValueError, match="'colour' is no field of a step report, which has step, signature"):
        StepReport.from_json({**old.to_json(), "colour": 1})
    with pytest.raises(ValueError, match="the step report lacks ops"):
        StepReport.from_json({name: value for name, value in old.to_json().items() if name != "ops"})


def test_a_record_that_is_whole_but_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        run.append({"timeline": {"step": 1}})
    error = refused(tmp_path / "run.jsonl", (tmp_path / "run.jsonl").read_bytes())
    assert "line 2: the timeline lacks allowed, ops, storages, events" in str(error)
    with RunWriter(tmp_path / "run.jsonl", HEADER) as run:
        run.append({"step": 3})
    error = refused(tmp_path / "run.jsonl", (tmp_path / "run.jsonl").read_bytes())
    assert "line 2: 3 is no step report" in str(error)


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "run.jsonl")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content, cut off, or with a few bytes changed, added or taken out, or two lines swapped."""
    lines = content.splitlines(keepends=True)
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(start + 40, len(content))))
    patch = draw(st.binary(max_size=8) | st.sampled_from([b"\n", b"}", b'"', b"0", content[end : end + 9]]))
    first, second = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    swapped = list(lines)
    swapped[first], swapped[second] = lines[second], lines[first]
    without = [line for number, line in enumerate(lines) if number != first]
    patched = content[:start] + patch + content[end:]
    return draw(st.sampled_from([content[:start], patched, b"".join(swapped), b"".join(without)]))


@given(st.data())
def test_no_damage_is_read_as_something_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    content = written(path)
    path.write_bytes(data.draw(damaged(content)))
    try:
        run = read_run(path)
    except FileFormatError:
        return
    steps = [{"step": step.to_json()} for step in run.steps]
    read = [*steps, *({"timeline": timeline.to_json()} for timeline in run.timelines)]
    assert run.header == FULL_HEADER
    assert read == RECORDS[: len(read)]
    # What is missing from a right reading is the end alone, and an end that was cut within a line is counted.
    assert run.damaged_tail == (not path.read_bytes().endswith(b"\n"))


FIGURES = st.fixed_dictionaries(
    {"peak_bytes": st.integers(0, 2**63 - 1), "seconds": st.floats(0, 1e15), "managed": st.booleans()},
    optional={
        "logged": st.dictionaries(st.text("abé_ <>&", max_size=5), st.floats(allow_nan=False), max_size=3),
        "refusals": st.dictionaries(st.text("abé_ <>&", max_size=5), st.integers(0, 99), max_size=3),
        "input_size": st.lists(st.integers(0, 99), max_size=3),
    },
)


@given(st.lists(FIGURES, max_size=4))
def test_every_report_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, figures: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "reports.jsonl"
    reports = [report(number, **more) for number, more in enumerate(figures)]
    with RunWriter(path, HEADER) as run:
        for one in reports:
            run.append({"step": one.to_json()})
    assert read_run(path).steps == reports


def test_what_a_run_file_could_not_be_read_with_is_not_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timeline(ops: int, name: str = "") -> dict[str, Any]:
        span = Span(
            lane=Lane.COMPUTE, work=Work.OP, began=0.0, ended=1.0, op=0, name=name, storage=None, nbytes=0, stalled=0.0
        )
        return {"timeline": Timeline(step=0, allowed=1, ops=ops, storages=(), events=(), spans=(span,)).to_json()}

    for module in (files, reading):
        monkeypatch.setattr(module, "LONGEST", 2_000)
        monkeypatch.setattr(module, "MOST", 6_000)
    with RunWriter(tmp_path / "run", {}) as writer:
        writer.append(timeline(MOST_OPS))
        with pytest.raises(ValueError, match=r"leaves out .* a timeline of 1000001 ops, where 1000000 is the most"):
            writer.append(timeline(MOST_OPS + 1))
        with pytest.raises(ValueError, match=r"with which the line would be longer than 1\.95 KiB\.$"):
            writer.append(timeline(1, "a" * 2_000))
        for _ in range(4):
            writer.append(timeline(1, "a" * 1_200))
        with pytest.raises(ValueError, match=r"with which the file would be longer than 5\.86 KiB\.$"):
            writer.append(timeline(1, "a" * 1_200))
    assert [one.ops for one in read_run(tmp_path / "run").timelines] == [MOST_OPS, 1, 1, 1, 1]
