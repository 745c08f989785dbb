from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.pilots.architecture import Architecture, control_statements
from spillway.pilots.paths import BaseType, OpSignature, ParameterStorage, PathOp, ResolvedPath, Site
from spillway.pilots.program import Program


def architecture(ops: int = 8) -> Architecture:
    made = Architecture("toy", BaseType.LSTM)
    for number in range(ops):
        made.parameter(ParameterStorage(f"p{number}", 100 * (number + 1)))
        made.op(PathOp(Site(f"layer{number}", 0, 0), "aten.mm.default", (number,)))
        made.signature(OpSignature("aten.mm.default", (number, 2, 0), 4, 8, 12))
    return made


def path(known: Architecture, keys: Sequence[int]) -> ResolvedPath:
    return known.path(keys, range(len(keys) + 1), range(len(keys)))


def bits_of(known: Architecture, path: ResolvedPath) -> list[bool]:
    """Whether each part that does not always run is in a path."""
    return [bool(bit) for bit in Program(known).bits(path)]


def test_equal_paths_are_one_object() -> None:
    known = architecture()
    first = path(known, [0, 1, 3])
    assert path(known, [0, 2, 3]) is not first
    assert path(known, [0, 1, 3]) is first
    assert [one.number for one in known.paths] == [0, 1]


def test_paths_whose_ops_read_other_results_differ() -> None:
    known = architecture()
    assert known.path([0, 1, 2], [0, 0, 1, 2], [0, 0]) is not known.path([0, 1, 2], [0, 0, 1, 2], [0, 1])


def test_what_ran_always_is_no_decision_and_what_ran_together_is_one() -> None:
    known = architecture()
    together, skipped = path(known, [0, 1, 2, 3]), path(known, [0, 3])
    assert known.parts == [{0, 3}, {1, 2}]
    assert bits_of(known, together) == [True]
    assert bits_of(known, skipped) == [False]
    assert dict(known.rows()) == {0: [1, 3]}


def test_a_part_that_runs_in_pieces_becomes_several_decisions_and_older_paths_keep_theirs() -> None:
    known = architecture()
    whole = path(known, [0, 1, 2, 3])
    path(known, [0, 3])
    half = path(known, [0, 1, 3])
    assert known.decisions == 2
    assert bits_of(known, whole) == [True, True]
    assert sorted(bits_of(known, half)) == [False, True]


@given(st.lists(st.lists(st.integers(0, 7), unique=True, min_size=1), min_size=1, max_size=12))
def test_bits_resolve_which_ops_ran_and_say_nothing_twice(runs: list[list[int]]) -> None:
    known = architecture()
    paths = [path(known, keys) for keys in runs]
    bits = np.array([bits_of(known, one) for one in paths]).reshape(len(paths), -1)
    for one, of_it in zip(paths, bits, strict=True):
        ran = known.parts[0].union(*(known.parts[d + 1] for d in np.flatnonzero(of_it)))
        assert ran == set(one.keys.tolist())
    assert not bits.all(axis=0).any()
    assert bits.any(axis=0).all()
    assert len({column.tobytes() for column in bits.T}) == bits.shape[1]


@given(st.lists(st.lists(st.integers(0, 7), unique=True, min_size=1).map(sorted), min_size=1, max_size=12))
def test_every_op_that_ran_stands_once_in_the_order_of_the_program(runs: list[list[int]]) -> None:
    known = architecture()
    for keys in runs:
        path(known, keys)
    assert sorted(known.in_order()) == sorted({key for keys in runs for key in keys})


def test_it_prints_its_parts_and_the_statements_that_decide() -> None:
    known = architecture()
    known.statements[""] = ("if is_open",)
    path(known, [0, 1, 2])
    path(known, [0, 2])
    lines = str(known).splitlines()
    assert lines[0] == "toy (lstm): 8 ops, 8 parameters, 1 decisions, 2 paths seen"
    assert "    -> layer1[0].0 | layer2[0].0    by if is_open" in lines
    assert "  [0] layer1[0]: 1 op, 200 B of parameters" in lines


def test_a_parameter_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"p0 \(7 B\) was p0 \(100 B\) before"):
        architecture().parameter(ParameterStorage("p0", 7))


def test_control_statements_are_found_in_the_source() -> None:
    def forward(x: int) -> int:
        for _ in range(x):
            if x > 1:
                x -= 1
        return 1 if x else 0

    assert control_statements(forward) == ("for _ in range(x)", "if x > 1", "if x")
    assert control_statements(len) == ()
