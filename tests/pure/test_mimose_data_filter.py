"""Mimose's data filter, Fig. 12: the cases of the figure, and the counters of the public code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.engines.blocks.data_filter import ModuleCall, valid_calls


def call(name: str, inside: int | None = None, *, checkpointed: bool = False) -> ModuleCall:
    return ModuleCall(name=name, inside=inside, checkpointed=checkpointed)


@pytest.mark.parametrize(
    ("record", "valid"),
    [
        ([call("layer", checkpointed=True)], [False]),  # case 1
        ([call("model"), call("layer", 0, checkpointed=True)], [False, False]),  # case 2, a child was
        ([call("layer", checkpointed=True), call("attention", 0)], [False, False]),  # case 2, a parent was
        ([call("layer"), call("attention", 0), call("output", 0)], [True, True, True]),  # case 3
        (
            [call("model"), call("layer", 0), call("attention", 1), call("layer", 0, checkpointed=True), call("x", 3)],
            [False, True, True, False, False],
        ),
    ],
)
def test_a_call_counts_unless_it_or_one_above_or_below_was_checkpointed(
    record: list[ModuleCall], valid: list[bool]
) -> None:
    assert valid_calls(record) == valid


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12))
def test_the_filter_finds_what_counting_checkpoints_around_each_call_finds(shape: list[tuple[int, bool]]) -> None:
    """The public code keeps a counter: a record is kept if it stood still, and no checkpoint was open."""
    record: list[ModuleCall] = []
    for up, checkpointed in shape:
        inside = len(record) - 1 if record else None
        for _ in range(up):
            inside = record[inside].inside if inside is not None else None
        record.append(call(str(len(record)), inside, checkpointed=checkpointed))

    def count(place: int) -> tuple[int, int]:
        below = [count(other) for other, one in enumerate(record) if one.inside == place]
        return sum(n for n, _ in below) + record[place].checkpointed, 0

    def under(place: int | None) -> bool:
        return place is not None and (record[place].checkpointed or under(record[place].inside))

    assert valid_calls(record) == [count(place)[0] == 0 and not under(place) for place in range(len(record))]


def test_a_record_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Call 0 \(layer\) is made in call 1"):
        valid_calls([call("layer", 1), call("model")])
