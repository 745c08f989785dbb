"""A step is checked when it is built, can be read by a person, and has a digest."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import spillway.ir
from spillway.ir import Kind, Op, Phase, Step, StorageInfo, Value

WEIGHT = StorageInfo(
    id=0,
    nbytes=8,
    kind=Kind.PARAMETER,
    alive_from=0,
    alive_until=3,
    present_at_start=True,
    present_at_end=True,
)
OUTPUT = StorageInfo(id=1, nbytes=8, kind=Kind.ACTIVATION, alive_from=0, alive_until=2)
GRADIENT = StorageInfo(id=2, nbytes=8, kind=Kind.GRADIENT, alive_from=1, alive_until=3)
VALUES = (
    Value(id=0, storage=0, version=0),
    Value(id=1, storage=1, version=0),
    Value(id=2, storage=2, version=0),
    Value(id=3, storage=0, version=1),
)
RELU = Op(number=0, name="aten.relu.default", phase=Phase.FORWARD, reads=(0,), creates=(1,), seconds=0.0012)
BACKWARD = Op(number=1, name="aten.threshold_backward.default", phase=Phase.BACKWARD, reads=(1,), creates=(2,))
ADD = Op(number=2, name="aten.add_.Tensor", phase=Phase.OPTIMIZER, reads=(0, 2), creates=(3,))
STEP = Step(storages=(WEIGHT, OUTPUT, GRADIENT), values=VALUES, ops=(RELU, BACKWARD, ADD))

LISTING = """\
step of 3 ops, 3 storages, 4 values, plain peak 24 B
  s0  parameter  8 B  ops [0, 3) present at start, present at end
  s1  activation  8 B  ops [0, 2)
  s2  gradient  8 B  ops [1, 3)
  0  forward  aten.relu.default  s0@0 -> s1@0  1.2 ms
  1  backward  aten.threshold_backward.default  s1@0 -> s2@0
  2  optimizer  aten.add_.Tensor  s0@0 s2@0 -> s0@1"""


def with_op(op: Op) -> Step:
    """The literal step with the op of the same number replaced."""
    return replace(STEP, ops=tuple(op if old.number == op.number else old for old in STEP.ops))


def with_storage(storage: StorageInfo) -> Step:
    """The literal step with the storage of the same id replaced."""
    return replace(STEP, storages=tuple(storage if old.id == storage.id else old for old in STEP.storages))


def test_a_step_lists_itself_for_a_reader() -> None:
    assert str(STEP) == LISTING


def test_the_listing_in_the_readme_is_what_the_step_prints() -> None:
    readme = Path(spillway.ir.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert LISTING in readme


def test_a_listing_shows_what_a_replay_has_to_know() -> None:
    drawn = replace(RELU, reads=(), seconds=None, seeded=True, replayable=False)
    assert "0  forward  aten.relu.default  () -> s1@0  seeded  not replayable" in str(with_op(drawn)).splitlines()[4]


def test_the_plain_peak_is_that_of_the_fullest_op() -> None:
    assert STEP.plain_peak() == 24


def test_a_storage_that_dies_before_another_is_created_does_not_add_to_the_peak() -> None:
    step = with_storage(replace(OUTPUT, alive_until=3))
    late = replace(GRADIENT, alive_from=2)
    step = replace(
        step,
        storages=(WEIGHT, replace(OUTPUT, alive_until=2), late),
        ops=(RELU, replace(BACKWARD, creates=()), replace(ADD, reads=(0,), creates=(2, 3))),
    )
    assert step.plain_peak() == 16


def test_a_step_without_ops_is_a_step() -> None:
    assert Step(storages=(), values=(), ops=()).plain_peak() == 0


def test_a_storage_that_is_present_and_never_used_counts() -> None:
    idle = replace(WEIGHT, id=3, nbytes=100)
    step = replace(STEP, storages=(*STEP.storages, idle), values=(*VALUES, Value(id=4, storage=3, version=0)))
    assert step.plain_peak() == 124


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert STEP.digest() == "765bdb156bc9122018d9ff5e2eea5e7599d2efee18bd00ae8de55130df774e1f"


def test_the_digest_does_not_depend_on_costs() -> None:
    assert with_op(replace(RELU, seconds=3.5)).digest() == STEP.digest()


@pytest.mark.parametrize(
    "other",
    [
        with_op(replace(RELU, name="aten.gelu.default")),
        with_op(replace(RELU, phase=Phase.BACKWARD)),
        with_op(replace(RELU, seeded=True)),
        with_op(replace(RELU, replayable=False)),
        with_op(replace(RELU, reads=())),
        with_storage(replace(OUTPUT, nbytes=9)),
        with_storage(replace(OUTPUT, kind=Kind.TEMPORARY)),
        with_storage(replace(OUTPUT, alive_until=3)),
        with_storage(replace(WEIGHT, present_at_end=False)),
    ],
)
def test_the_digest_depends_on_everything_else(other: Step) -> None:
    assert other.digest() != STEP.digest()


def test_an_in_place_op_may_fill_a_storage_without_reading_it() -> None:
    assert with_op(replace(ADD, reads=(2,))).ops[2].creates == (3,)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_an_op_takes_a_finite_time(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"op 0 \(aten.relu.default\) takes .* seconds"):
        replace(RELU, seconds=seconds)


@pytest.mark.parametrize("twice", [{"reads": (0, 0)}, {"creates": (1, 1)}])
def test_an_op_lists_a_value_once(twice: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"op 0 \(aten.relu.default\) lists a value twice"):
        replace(RELU, **twice)


def test_ops_are_numbered_without_a_hole() -> None:
    with pytest.raises(ValueError, match="op 2 stands at place 1"):
        replace(STEP, ops=(RELU, ADD))


def test_storages_are_numbered_from_zero() -> None:
    with pytest.raises(ValueError, match="storage 1 stands at place 0"):
        replace(STEP, storages=(OUTPUT, WEIGHT, GRADIENT))


def test_values_are_numbered_in_order() -> None:
    with pytest.raises(ValueError, match="value 1 stands at place 0"):
        replace(STEP, values=(VALUES[1], VALUES[0], *VALUES[2:]))


@pytest.mark.parametrize(
    ("storage", "sentence"),
    [
        (replace(OUTPUT, nbytes=-1), "storage 1 has -1 bytes"),
        (replace(OUTPUT, alive_from=2, alive_until=1), r"storage 1 is alive during \[2, 1\) of 3 ops"),
        (replace(GRADIENT, alive_until=4), r"storage 2 is alive during \[1, 4\) of 3 ops"),
        (replace(GRADIENT, alive_from=-1), r"storage 2 is alive during \[-1, 3\) of 3 ops"),
        (replace(GRADIENT, present_at_start=True), "storage 2 is present at the start but alive only from op 1"),
        (replace(OUTPUT, present_at_end=True), "storage 1 is present at the end but alive only until op 2 of 3"),
        (replace(GRADIENT, alive_from=0), r"creates s2@0, whose storage is alive from op 0"),
        (replace(GRADIENT, alive_from=2), r"op 1 \(aten.threshold_backward.default\) names s2@0, which is not alive"),
        (replace(OUTPUT, alive_until=1), r"op 1 \(aten.threshold_backward.default\) names s1@0, which is not alive"),
        (replace(WEIGHT, present_at_start=False), r"op 0 .* reads s0@0, which no earlier op creates"),
        (replace(OUTPUT, present_at_start=True), "creates s1@0, but the next version of that storage is 1"),
    ],
)
def test_a_storage_has_to_agree_with_the_ops(storage: StorageInfo, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        with_storage(storage)


@pytest.mark.parametrize(
    ("op", "sentence"),
    [
        (replace(RELU, reads=(2,)), "op 0 .* names s2@0, which is not alive then"),
        (replace(RELU, reads=(1,)), "op 0 .* reads s1@0, which no earlier op creates and which is no source"),
        (replace(RELU, reads=(3,)), "op 0 .* reads s0@1, which no earlier op creates and which is no source"),
        (replace(RELU, reads=(4,)), "op 0 .* names value 4, which is not listed"),
        (replace(RELU, reads=(-1,)), "op 0 .* names value -1, which is not listed"),
        (replace(RELU, creates=(1, 3)), r"op 2 .* reads s0@0, which has been overwritten by version 1"),
        (replace(BACKWARD, creates=(2, 1)), "op 1 .* creates s1@0, but the next version of that storage is 1"),
        (replace(ADD, creates=()), r"value 3 \(s0@1\) is created by no op"),
    ],
)
def test_an_op_has_to_agree_with_the_values(op: Op, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        with_op(op)


def test_two_ops_cannot_create_the_same_value() -> None:
    again = replace(ADD, number=3, reads=())
    longer = tuple(replace(s, alive_until=4) if s.id != 1 else s for s in STEP.storages)
    with pytest.raises(ValueError, match=r"op 3 .* creates s0@1, but the next version of that storage is 2"):
        replace(STEP, storages=longer, ops=(*STEP.ops, again))


def test_one_op_cannot_create_two_versions_of_a_storage() -> None:
    values = (*VALUES, Value(id=4, storage=0, version=2))
    with pytest.raises(ValueError, match=r"op 2 .* creates s0@2, but the next version of that storage is 1"):
        replace(STEP, values=values, ops=(RELU, BACKWARD, replace(ADD, creates=(3, 4))))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (Value(id=3, storage=0, version=2), r"value 3 is s0@2, but versions increase by one from 0"),
        (Value(id=3, storage=0, version=0), r"value 3 is s0@0, but versions increase by one from 0"),
        (Value(id=3, storage=7, version=0), "value 3 is of storage 7, which is not listed"),
    ],
)
def test_versions_increase_by_one(value: Value, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(STEP, values=(*VALUES[:3], value))


def test_every_storage_has_a_value() -> None:
    with pytest.raises(ValueError, match="storage 3 has no value"):
        replace(STEP, storages=(*STEP.storages, replace(OUTPUT, id=3)))
