"""DTR's operator logs: every instruction is read, and they tell of a step."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import FileFormatError
from spillway.ir import Kind, Phase, Plan, verify
from spillway.ir.dtr_log import (
    Annotate,
    Call,
    Constant,
    Copy,
    CopyFrom,
    Mutate,
    Release,
    Result,
    read_dtr_log,
    step_of_log,
)
from spillway.ir.loading import load_step
from tests.shared import shared

MODELS = {
    "unet": "U-Net (6)",
    "resnet32": "ResNet-32 (56)",
    "inceptionv4": "InceptionV4 (64)",
    "transformer": "Transformer (10)",
    "tv_densenet121": "DenseNet-121 (84)",
}

LOG: list[dict[str, Any]] = [
    {"ANNOTATION": "START", "INSTRUCTION": "ANNOTATE"},
    {"INSTRUCTION": "CONSTANT", "NAME": "w"},
    {"INSTRUCTION": "MEMORY", "MEMORY": "8", "NAME": "w"},
    {"DST": "weight", "INSTRUCTION": "COPY", "SRC": "w"},
    {"INSTRUCTION": "RELEASE", "NAME": "w"},
    {"INSTRUCTION": "CONSTANT", "NAME": "x"},
    {"INSTRUCTION": "MEMORY", "MEMORY": "16", "NAME": "x"},
    {"ARGS": ["weight"], "INSTRUCTION": "CALL", "NAME": "t", "RESULT": ["wt"], "TIME": "500"},
    {"INSTRUCTION": "MEMORY", "MEMORY": "8", "NAME": "wt"},
    {"ALIAS": "0", "INSTRUCTION": "ALIAS", "NAME": "wt"},
    {"ARGS": ["x", "wt", "x"], "INSTRUCTION": "CALL", "NAME": "_fused_droupout_", "RESULT": ["y", "mask"],
     "TIME": "1500"},
    {"INSTRUCTION": "MEMORY", "MEMORY": "32", "NAME": "y"},
    {"ALIAS": "-1", "INSTRUCTION": "ALIAS", "NAME": "y"},
    {"INSTRUCTION": "MEMORY", "MEMORY": "4", "NAME": "mask"},
    {"ALIAS": "-1", "INSTRUCTION": "ALIAS", "NAME": "mask"},
    {"INSTRUCTION": "RELEASE", "NAME": "wt"},
    {"INSTRUCTION": "CONSTANT", "NAME": "one"},
    {"INSTRUCTION": "MEMORY", "MEMORY": "2", "NAME": "one"},
    {"ARGS": ["y", "one"], "INSTRUCTION": "MUTATE", "MUTATE": [0], "NAME": "add_", "TIME": "250"},
    {"DST": "one", "INSTRUCTION": "COPY_FROM", "SRC": "y"},
    {"ANNOTATION": "BACKWARD", "INSTRUCTION": "ANNOTATE"},
    {"ARGS": ["y", "mask"], "INSTRUCTION": "CALL", "NAME": "mm", "RESULT": ["g"], "TIME": "1000"},
    {"INSTRUCTION": "MEMORY", "MEMORY": "8", "NAME": "g"},
    {"ALIAS": "-1", "INSTRUCTION": "ALIAS", "NAME": "g"},
    {"INSTRUCTION": "RELEASE", "NAME": "y"},
    {"INSTRUCTION": "RELEASE", "NAME": "one"},
]  # fmt: skip

STEP = """\
step of 5 ops, 6 storages, 7 values, plain peak 68 B
  s0  parameter  8 B  ops [0, 5) present at start, present at end
  s1  input  16 B  ops [0, 5) present at start, present at end
  s2  activation  32 B  ops [1, 5)
  s3  activation  4 B  ops [1, 5) present at end
  s4  temporary  2 B  ops [2, 4)
  s5  gradient  8 B  ops [4, 5) present at end
  0  forward  t  s0@0 -> ()  0.5 us
  1  forward  _fused_droupout_  s1@0 s0@0 -> s2@0 s3@0  1.5 us  seeded
  2  forward  constant  () -> s4@0  0.0 us  not replayable
  3  forward  add_  s2@0 s4@0 -> s2@1  0.2 us
  4  backward  mm  s2@1 s3@0 -> s5@0  1.0 us"""


def log_of(records: list[Any]) -> bytes:
    return b"\n".join(json.dumps(record).encode() for record in records)


def test_every_instruction_is_read_with_what_belongs_to_it() -> None:
    assert read_dtr_log(log_of(LOG)) == [
        Annotate(line=1, text="START"),
        Constant(line=2, name="w", nbytes=8),
        Copy(line=4, source="w", destination="weight"),
        Release(line=5, name="w"),
        Constant(line=6, name="x", nbytes=16),
        Call(
            line=8, operator="t", args=("weight",), results=(Result(name="wt", nbytes=8, alias=0),), nanoseconds=500
        ),
        Call(
            line=11, operator="_fused_droupout_", args=("x", "wt", "x"), nanoseconds=1500,
            results=(Result(name="y", nbytes=32, alias=None), Result(name="mask", nbytes=4, alias=None)),
        ),
        Release(line=16, name="wt"),
        Constant(line=17, name="one", nbytes=2),
        Mutate(line=19, operator="add_", args=("y", "one"), mutated=(0,), nanoseconds=250),
        CopyFrom(line=20, source="y", destination="one"),
        Annotate(line=21, text="BACKWARD"),
        Call(
            line=22, operator="mm", args=("y", "mask"), results=(Result(name="g", nbytes=8, alias=None),),
            nanoseconds=1000,
        ),
        Release(line=25, name="y"),
        Release(line=26, name="one"),
    ]  # fmt: skip


def test_a_log_is_a_step_in_which_aliases_share_and_mutations_make_versions() -> None:
    assert str(step_of_log(read_dtr_log(log_of(LOG)))) == STEP


@pytest.mark.parametrize(
    ("line", "record", "reason"),
    [
        (1, {"INSTRUCTION": "FLY"}, "'FLY' has no place here"),
        (1, {"NAME": "x"}, "no line of an operator log of DTR"),
        (1, [], "no line of an operator log of DTR"),
        (
            3,
            {"INSTRUCTION": "MEMORY", "MEMORY": "8", "NAME": "x"},
            "the MEMORY of w, named in line 2, has to stand here",
        ),
        (3, {"INSTRUCTION": "MEMORY", "MEMORY": 8, "NAME": "w"}, "MEMORY is 8, not a whole number from 0 on"),
        (
            3,
            {"INSTRUCTION": "MEMORY", "MEMORY": "-8", "NAME": "w"},
            "MEMORY is -8, not a whole number from 0",
        ),
        (4, {"INSTRUCTION": "MEMORY", "MEMORY": "8", "NAME": "w"}, "'MEMORY' has no place here"),
        (8, LOG[7] | {"TIME": "soon"}, "TIME is 'soon'"),
        (8, LOG[7] | {"ARGS": [7]}, "[7] are not names"),
        (8, LOG[9] | {"ALIAS": "1"}, "t shares"),
        (10, LOG[9] | {"ALIAS": "x"}, "ALIAS is 'x', not a whole number from -1 on"),
        (10, LOG[9] | {"NAME": "x"}, "the ALIAS of wt, named in line 8, has to stand here"),
        (19, LOG[18] | {"MUTATE": [2]}, "2 is no place of one of 2 arguments"),
    ],
)
def test_what_is_no_log_is_refused_by_its_line(tmp_path: Path, line: int, record: Any, reason: str) -> None:
    records = [*LOG]
    records[9 if reason == "t shares" else line - 1] = record
    (tmp_path / "some.log").write_bytes(log_of(records))
    with pytest.raises(FileFormatError) as caught:
        read_dtr_log(tmp_path / "some.log")
    assert caught.value.line == line
    assert reason in str(caught.value) or "shares the storage of argument 1 of t, which has 1" in str(caught.value)


@given(st.integers(0, len(log_of(LOG)) - 1), st.binary(max_size=3))
def test_a_damaged_log_is_read_or_refused_in_one_sentence(place: int, instead: bytes) -> None:
    content = log_of(LOG)
    try:
        step_of_log(read_dtr_log(content[:place] + instead + content[place + 1 :]))
    except FileFormatError as error:
        assert error.line >= 1


@pytest.mark.parametrize(("line", "name"), [(5, "v"), (8, "weigth"), (20, "nobody")])
def test_a_name_that_nobody_gave_is_refused_by_its_line(line: int, name: str) -> None:
    records = [*LOG]
    field = {5: {"NAME": name}, 8: {"ARGS": [name]}, 20: {"SRC": name}}[line]
    records[line - 1] = records[line - 1] | field
    with pytest.raises(FileFormatError, match=f"line {line}: nothing has the name {name}"):
        step_of_log(read_dtr_log(log_of(records)))


def test_a_log_with_a_name_that_nobody_gave_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "some.log").write_bytes(log_of([*LOG, {"INSTRUCTION": "RELEASE", "NAME": "nobody"}]))
    with pytest.raises(FileFormatError) as caught:
        load_step(tmp_path / "some.log")
    assert (caught.value.path, caught.value.line) == (tmp_path / "some.log", len(LOG) + 1)


def test_a_name_that_is_given_to_its_own_tensor_stays() -> None:
    records = [*LOG[:16], {"INSTRUCTION": "COPY_FROM", "SRC": "y", "DST": "y"}, *LOG[16:19]]
    assert step_of_log(read_dtr_log(log_of(records))) == step_of_log(read_dtr_log(log_of(LOG[:19])))


def test_a_step_is_loaded_from_whatever_holds_one(tmp_path: Path) -> None:
    (tmp_path / "some.log").write_bytes(log_of(LOG))
    with ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.writestr("some.log", log_of(LOG))
    loaded = [load_step(tmp_path / "some.log"), load_step(f"{tmp_path}/logs.zip:some.log")]
    loaded.append(load_step(f"{tmp_path}/logs.zip:some"))
    assert {(one.workload, one.step.digest()) for one in loaded} == {("some", loaded[0].step.digest())}
    with pytest.raises(FileFormatError, match=r"there is no log 'other' in it; there are 'some'\."):
        load_step(f"{tmp_path}/logs.zip:other")
    (tmp_path / "broken.zip").write_bytes(b"PK")
    with pytest.raises(FileFormatError, match="no zip file that can be read"):
        load_step(f"{tmp_path}/broken.zip:some")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(FileFormatError, match="not the first line of a recorded step"):
        load_step(tmp_path / "empty")
    with pytest.raises(FileFormatError, match="the log is empty"):
        read_dtr_log(b"")


@pytest.mark.parametrize("name", MODELS)
def test_a_published_log_takes_the_bytes_and_the_seconds_that_its_authors_simulator_says(name: str) -> None:
    with shared("data/dtr/baselines.csv").open() as file:
        expected = {row["model"]: row for row in csv.DictReader(file)}[MODELS[name]]
    step = load_step(f"{shared('data/dtr/logs.zip')}:{name}").step
    peak = step.plain_peak()
    assert peak == int(expected["base_mem_bytes"])
    assert sum(round((op.seconds or 0) * 1e9) for op in step.ops) == int(expected["base_compute_ns"])
    verify(Plan(step=step.digest(), allowed=peak, projected=peak, gaps=()), step, peak)
    assert {op.phase for op in step.ops} == {Phase.FORWARD, Phase.BACKWARD}
    assert {Kind.PARAMETER, Kind.GRADIENT, Kind.ACTIVATION} <= {storage.kind for storage in step.storages}
