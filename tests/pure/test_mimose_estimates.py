"""Estimates of many blocks asked at once: every answer is the one that the estimate gives alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.methods.by_block import InputSize
from spillway.methods.mimose.estimator import SEVERAL, Estimate, Estimates, Laws
from spillway.units import Bytes

SIZES = (31, 47, 60, 88, 101, 150)
ASKED = (1, 31, 40, 101, 149, 150, 151, 400, 4096)


def estimates(samples: list[dict[InputSize, Bytes]], *, batched: bool = False) -> list[Estimate]:
    laws: Laws = {}
    found = []
    for one in samples:
        found.append(Estimate(batched=batched, laws=laws))
        for size, nbytes in one.items():
            found[-1].observe(size, nbytes)
    return found


def assert_as_alone(asked: list[Estimate], sizes: list[InputSize]) -> None:
    together = Estimates(asked)
    for size in sizes:
        assert together.at(size) == [one.at(size) for one in asked]


def on_a_law(square: int, linear: int, constant: int, over: int = 1) -> dict[InputSize, Bytes]:
    return {(x,): -(-(square * x * x + linear * x + constant) // over) for x in SIZES}


def test_many_blocks_on_laws_of_their_own_with_fractions_windows_and_some_that_share_one() -> None:
    laws = [on_a_law(4 * block, 1000 + block, 17) for block in range(32)]
    halves: list[dict[InputSize, Bytes]] = [{(x,): x * (x + 1) // 2 + block for x in SIZES} for block in range(3)]
    windows: dict[InputSize, Bytes] = {(x,): 500 * (-(-x // 7)) ** 2 for x in (30, 44, 60, 88, 101, 150, 171)}
    asked = estimates([*laws, windows, *halves, laws[3], windows])
    assert all(one.law() is not None for one in asked)
    assert_as_alone(asked, [(size,) for size in ASKED])


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 10**9), min_size=len(SIZES), max_size=len(SIZES)), min_size=1, max_size=SEVERAL + 4
    ),
    st.sampled_from(ASKED),
)
def test_blocks_without_a_law(samples: list[list[int]], size: int) -> None:
    asked = estimates([{(x,): nbytes for x, nbytes in zip(SIZES, one, strict=True)} for one in samples])
    assert_as_alone(asked, [(size,), (SIZES[2],)])


def test_blocks_that_were_measured_at_different_sizes_or_at_one() -> None:
    one = [{(50 + block,): 1000 * block} for block in range(SEVERAL)]
    few: list[dict[InputSize, Bytes]] = [{(50,): 7 * block * block, (80,): 900} for block in range(SEVERAL)]
    assert_as_alone(estimates([*one, *few]), [(size,) for size in ASKED])


@pytest.mark.parametrize("batched", [False, True])
def test_sizes_of_two_numbers(batched: bool) -> None:
    sizes = [(2, 30), (3, 41), (4, 57), (5, 20), (7, 33), (6, 90), (2, 77), (3, 64)]
    samples: list[dict[InputSize, Bytes]] = [
        {(a, b): a * (100 * b + block * b * b) + block % 2 * (a * 7919 % 13) for a, b in sizes}
        for block in range(SEVERAL + 1)
    ]
    assert_as_alone(estimates(samples, batched=batched), [(2, 30), (4, 100), (9, 9)])
