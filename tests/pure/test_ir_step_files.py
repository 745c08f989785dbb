"""A step file gives back the step that was written, or one sentence that names the path and the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.errors import FileFormatError
from spillway.ir import Kind, Op, Phase, Recorded, Step, StorageInfo, Value, read_step, write_step
from spillway.ir.sealed import encoded, seal
from tests.pure.test_ir_properties import steps

STEP = Step(
    storages=(
        StorageInfo(
            id=0, nbytes=8, kind=Kind.PARAMETER, alive_from=0, alive_until=3, present_at_start=True,
            present_at_end=True, name="head.weight",
        ),
        StorageInfo(id=1, nbytes=16, kind=Kind.ACTIVATION, alive_from=0, alive_until=2),
        StorageInfo(id=2, nbytes=8, kind=Kind.GRADIENT, alive_from=1, alive_until=3, present_at_end=True),
    ),
    values=(
        Value(id=0, storage=0, version=0),
        Value(id=1, storage=1, version=0),
        Value(id=2, storage=2, version=0),
        Value(id=3, storage=0, version=1),
    ),
    ops=(
        Op(
            number=0, name="aten.bernoulli.default", phase=Phase.FORWARD, reads=(0,), creates=(1,), seconds=1.25e-5,
            seeded=True, module="head", flops=64, traffic=24,
        ),
        Op(number=1, name="aten.mm.default", phase=Phase.BACKWARD, reads=(1,), creates=(2,), replayable=False),
        Op(number=2, name="aten.add_.Tensor", phase=Phase.OPTIMIZER, reads=(0, 2), creates=(3,)),
    ),
    saved=(1, 0),
)  # fmt: skip
RECORDED = Recorded(step=STEP, workload="small", size=3, facts={"batch": 3, "machine": {"torch": "2.13.0"}})
LINES = [
    b'{"format":"spillway-step","version":1,"workload":"small","size":3,"facts":{"batch":3,"machine":{"torch":"2.13.0"}'
    b'},"storages":3,"ops":3,"plain_peak_bytes":32,"digest":"%b"' % STEP.digest().encode(),
    b'{"storage":0,"kind":"parameter","bytes":8,"alive":[0,3],"present":"start end","name":"head.weight"',
    b'{"storage":1,"kind":"activation","bytes":16,"alive":[0,2]',
    b'{"storage":2,"kind":"gradient","bytes":8,"alive":[1,3],"present":"end"',
    b'{"op":0,"name":"aten.bernoulli.default","phase":"forward","module":"head","reads":"s0@0","creates":"s1@0",'
    b'"seconds":1.25e-05,"flops":64,"traffic":24,"seeded":true',
    b'{"op":1,"name":"aten.mm.default","phase":"backward","reads":"s1@0","creates":"s2@0","replayable":false',
    b'{"op":2,"name":"aten.add_.Tensor","phase":"optimizer","reads":"s0@0 s2@0","creates":"s0@1"',
    b'{"values":[0,1,2,0],"saved":"s1@0 s0@0"',
]


def sealed(bodies: list[bytes]) -> bytes:
    content, checksum = b"", 0
    for body in bodies:
        line, checksum = seal(body, checksum)
        content += line
    return content


def refused(path: Path, content: bytes) -> FileFormatError:
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        read_step(path)
    assert caught.value.path == path
    assert str(caught.value).count(". ") == 0
    return caught.value


def test_the_file_is_what_its_description_says(tmp_path: Path) -> None:
    write_step(tmp_path / "step.jsonl", RECORDED)
    assert (tmp_path / "step.jsonl").read_bytes() == sealed(LINES)
    assert read_step(tmp_path / "step.jsonl") == RECORDED


@given(steps())
@settings(max_examples=60)
def test_any_step_comes_back_compressed_or_not(step: Step) -> None:
    recorded = Recorded(step=step, workload="any", facts={})
    with TemporaryDirectory() as folder:
        for name in ("step.jsonl", "step.jsonl.gz"):
            write_step(Path(folder) / name, recorded)
            assert read_step(Path(folder) / name) == recorded
        assert (Path(folder) / "step.jsonl.gz").read_bytes().startswith(b"\x1f\x8b")


@given(st.data())
@settings(max_examples=300)
def test_one_changed_byte_is_noticed(data: st.DataObject) -> None:
    content = bytearray(sealed(LINES))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
    with TemporaryDirectory() as folder:
        error = refused(Path(folder) / "step.jsonl", bytes(content))
    # A byte that becomes, or was, the end of a line is noticed on that line at the earliest.
    assert error.line >= bytes(content[:place]).count(b"\n") + 1 - (content[place] == ord("\n"))


@given(st.integers(0, len(sealed(LINES)) - 1))
def test_a_file_that_is_cut_anywhere_is_refused(end: int) -> None:
    with TemporaryDirectory() as folder:
        refused(Path(folder) / "step.jsonl", sealed(LINES)[:end])


@given(st.data())
@settings(max_examples=200)
def test_a_compressed_file_that_is_cut_or_damaged_is_refused_or_unharmed(data: st.DataObject) -> None:
    whole = gzip.compress(sealed(LINES), mtime=0)
    place = data.draw(st.integers(2, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.jsonl.gz"
        refused(path, whole[:place])
        path.write_bytes(damaged)
        try:
            assert read_step(path) == RECORDED  # the header of gzip has bytes that nobody reads
        except FileFormatError as error:
            assert error.path == path


@pytest.mark.parametrize(
    ("line", "body", "reason"),
    [
        (
            1,
            LINES[0].replace(b'"version":1', b'"version":2'),
            "version 2 of the format, and this Spillway reads up to 1",
        ),
        (1, LINES[0].replace(b"-step", b"-run"), "not the first line of a recorded step"),
        (1, LINES[0].replace(b'"ops":3', b'"ops":"3"'), "ops of the first line is '3', not a whole number"),
        (1, LINES[0].replace(b":32,", b":33,"), "is not the one that the first line announces"),
        (1, LINES[0].replace(b'"facts":{', b'"fact":{'), "'fact' is no field of a first line, which has workload"),
        (
            3,
            LINES[2].replace(b"activation", b"activity"),
            "kind of the storage is 'activity', none of",
        ),
        (3, LINES[2].replace(b"[0,2]", b"[0]"), "does not hold a storage"),
        (4, LINES[3].replace(b'"end"', b'"middle"'), "does not hold a storage"),
        (5, LINES[4].replace(b"s0@0", b"s9@0"), "'s9@0' is no value of this step"),
        (5, LINES[4].replace(b'"seeded":true', b'"seeded":7'), "seeded of the op is 7, neither true nor false"),
        (6, LINES[5].replace(b'"backward"', b'"sideward"'), "phase of the op is 'sideward', none of forward"),
        (7, LINES[6].replace(b'"op":2', b'"up":2'), "does not hold an op"),
        (8, LINES[7].replace(b"[0,1,2,0]", b'"0120"'), "values of the last line is '0120', not a list"),
        (8, LINES[7].replace(b"[0,1,2,0]", b"[0,1,2]"), "'s0@1' is no value of this step"),
        (8, LINES[6].replace(b'"op":2', b'"op":3') + b"", "'op' is no field of a last line"),
    ],
)
def test_a_line_that_says_something_else_is_refused_by_its_number(
    tmp_path: Path, line: int, body: bytes, reason: str
) -> None:
    bodies = [*LINES]
    bodies[line - 1] = body
    error = refused(tmp_path / "step.jsonl", sealed(bodies))
    assert reason in str(error)
    assert error.line == (7 if "s0@1" in reason else line)


def test_a_step_that_breaks_the_grammar_is_refused(tmp_path: Path) -> None:
    bodies = [*LINES]
    bodies[4] = LINES[4].replace(b'"reads":"s0@0"', b'"reads":"s2@0"')
    assert "op 0 (aten.bernoulli.default) names s2@0, which is not alive" in str(
        refused(tmp_path / "step.jsonl", sealed(bodies))
    )


def test_missing_and_added_lines_are_refused_although_their_checksums_fit(tmp_path: Path) -> None:
    assert "ends after 6 of the 7 lines" in str(refused(tmp_path / "step.jsonl", sealed(LINES[:-1])))
    assert "ends after 0 of the 7 lines" in str(refused(tmp_path / "step.jsonl", sealed(LINES[:1])))
    assert "more lines follow than the 7" in str(refused(tmp_path / "step.jsonl", sealed([*LINES, LINES[-1]])))


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"PK\x03\x04", b'{"format":"spillway-run","version":1}\n'])
def test_what_is_no_step_file_is_refused_on_its_first_line(tmp_path: Path, content: bytes) -> None:
    error = refused(tmp_path / "other", content)
    assert (error.line, "not the first line of a recorded step" in str(error)) == (1, True)


def test_facts_that_json_would_change_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "step.jsonl").write_text("what stood there")
    for facts in ({"shape": (1, 2)}, {"loss": float("nan")}):
        with pytest.raises(ValueError, match="come back from JSON"):
            write_step(tmp_path / "step.jsonl", Recorded(step=STEP, workload="small", facts=facts))
    with pytest.raises(TypeError):
        write_step(tmp_path / "step.jsonl", Recorded(step=STEP, workload="small", facts={"model": object()}))
    assert [path.name for path in tmp_path.iterdir()] == ["step.jsonl"]
    assert (tmp_path / "step.jsonl").read_text() == "what stood there"


def test_writing_where_there_is_no_room_leaves_what_stood_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path / "step.jsonl", RECORDED)
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_step(tmp_path / "step.jsonl", Recorded(step=STEP, workload="other", facts={}))
    assert read_step(tmp_path / "step.jsonl") == RECORDED
    assert [path.name for path in tmp_path.iterdir()] == ["step.jsonl"]


def test_the_same_step_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.gz", "two.gz"):
        write_step(tmp_path / name, RECORDED)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


def test_every_line_is_json_of_its_own() -> None:
    assert [json.loads(body + b"}") for body in LINES] == [
        json.loads(encoded(json.loads(b + b"}")) + b"}") for b in LINES
    ]
