"""Bytes and seconds at sizes that nobody recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.costs import Law, fit_scaling
from spillway.costs.scaling import exact_laws, law_of
from spillway.ir import Step
from tests.pure.small_steps import Line, row

SIZES = (31, 48, 70, 101, 147, 200)


def up(size: int, quantum: int) -> int:
    return -(-size // quantum)


def of(*coefficients: int | str) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, coefficients))


# Laws


@given(
    st.lists(st.integers(0, 10**6), max_size=5),
    st.lists(st.integers(1, 2000), min_size=7, max_size=9, unique=True),
    st.integers(1, 4000),
)
def test_a_polynomial_is_found_exactly_and_holds_everywhere(
    coefficients: list[int], sizes: list[int], other: int
) -> None:
    def number(size: int) -> int:
        return sum(factor * size**power for power, factor in enumerate(coefficients))

    law = law_of(sorted(sizes), [number(size) for size in sorted(sizes)])
    assert law.at(other) == number(other)
    degree = max((power for power, factor in enumerate(coefficients) if factor), default=0)
    assert (max(len(law.coefficients) - 1, 0), law.quantum) == (degree, 1)


@pytest.mark.parametrize(
    ("numbers", "law"),
    [
        (lambda x: 768 * x, Law(coefficients=of(0, 768))),
        (lambda x: 4096, Law(coefficients=of(4096))),
        (lambda x: 0, Law(coefficients=())),
        (lambda x: x * (x + 1) // 2, Law(coefficients=of(0, "1/2", "1/2"))),  # whole though its coefficients are not
        (lambda x: 4 * up(x, 7) ** 2 * 49, Law(coefficients=of(0, 0, 196), quantum=7)),  # padded to whole windows
        (lambda x: 64 * (x // 2) ** 2, Law(coefficients=of(0, 0, 64), quantum=2, up=False)),  # the odd row left out
        (lambda x: 8 * up(up(up(x, 2), 2), 2), Law(coefficients=of(0, 8), quantum=8)),  # three convolutions, stride 2
        (lambda x: 4 * up(x, 28) ** 4 + 12, Law(coefficients=of(12, 0, 0, 0, 4), quantum=28)),
        (lambda x: 96 * x * (x // 3), Law(coefficients=of(0, 96), quantum=3, up=False, power=1)),  # a third as long
    ],
)
def test_the_simplest_law_is_found(numbers: Callable[[int], int], law: Law) -> None:
    sizes = (*SIZES, 222, 255, 301)
    assert law_of(sizes, [numbers(size) for size in sizes]) == law
    assert [law.at(size) for size in range(1, 600)] == [numbers(size) for size in range(1, 600)]


def test_a_law_needs_a_point_more_than_it_has_terms() -> None:
    numbers = [size**2 + size + 1 for size in SIZES]
    assert next(exact_laws(SIZES[:4], numbers[:4])).at(10) == 111
    assert not list(exact_laws(SIZES[:3], numbers[:3], [1]))
    assert law_of(SIZES[:3], numbers[:3]).at(10) == 111  # for lack of anything better
    assert list(exact_laws(SIZES[:3], [5 * size**2 for size in SIZES[:3]], [1]))  # one term
    assert not list(exact_laws(SIZES[:4], [size**3 + size**2 + size + 1 for size in SIZES[:4]], [1]))


def test_a_law_of_a_quantum_needs_two_points_more() -> None:
    sizes = (33, 48, 65, 90)
    assert law_of(sizes, [32 * up(size, 2) ** 2 for size in sizes]) == Law(coefficients=of(0, 0, 32), quantum=2)
    assert not list(exact_laws(sizes, [32 * up(size, 2) ** 2 + up(size, 2) + 1 for size in sizes]))


def test_numbers_without_a_law_get_the_nearest_polynomial() -> None:
    numbers = [1000 * size + offset for size, offset in zip(SIZES, (3, -5, 8, -2, 7, 1), strict=True)]
    law = law_of(SIZES, numbers)
    assert law.at(120) == pytest.approx(120_000, rel=2e-4)
    worst = max(abs(law.at(size) / number - 1) for size, number in zip(SIZES, numbers, strict=True))
    assert 0 < worst < 2e-4


def test_no_law_gives_less_than_nothing_or_parts_of_a_byte() -> None:
    assert Law(coefficients=(Fraction(-10), Fraction(1))).at(3) == 0
    assert Law(coefficients=(Fraction(0), Fraction(1, 2))).at(3) == 2


def test_sizes_that_show_no_padding_leave_several_laws() -> None:
    even = (32, 48, 64, 96, 128)
    laws = list(exact_laws(even, [4 * size for size in even]))
    assert {law.at(80) for law in laws} == {320}
    assert {law.at(81) for law in laws} >= {324, 320, 328, 384}


# Scaling

NUMBERS = Callable[[int], int]


def step(size: int, nbytes: Sequence[NUMBERS], *, seconds: float | None = None) -> Step:
    lines = [Line(nbytes=n(size), flops=2 * n(size), traffic=3 * n(size), seconds=seconds) for n in nbytes]
    return row(*lines, source=8 * size)


def steps(sizes: Sequence[int], *nbytes: NUMBERS) -> dict[int, Step]:
    return {size: step(size, nbytes) for size in sizes}


BERT = (lambda x: 3072 * x, lambda x: 48 * x**2, lambda x: 3072)


@pytest.mark.parametrize("size", [1, 17, 64, 512, 5000])
def test_a_step_at_a_size_never_seen_is_the_step_that_would_have_been_recorded(size: int) -> None:
    scaling = fit_scaling(steps(SIZES, *BERT))
    assert scaling.step_at(size) == step(size, BERT)
    assert scaling.doubtful(size) == ()


def test_the_recorded_steps_come_back_as_they_were() -> None:
    recorded = steps(SIZES, lambda x: 7 * up(x, 32), *BERT)
    scaling = fit_scaling(recorded)
    assert {size: scaling.step_at(size) for size in SIZES} == recorded
    assert scaling.sizes == SIZES


def test_a_storage_without_a_law_is_named_and_stays_near() -> None:
    crooked = dict(zip(SIZES, (3001, 4803, 6999, 10104, 14702, 20001), strict=True))
    scaling = fit_scaling(steps(SIZES, BERT[0], lambda x: crooked.get(x, 0)))
    assert scaling.doubtful(64) == (2,)
    assert scaling.step_at(120).storages[2].nbytes == pytest.approx(12_000, rel=0.01)


def test_sizes_between_which_padding_may_hide_are_doubtful() -> None:
    scaling = fit_scaling(steps((32, 64, 96, 128, 160), lambda x: 4 * x))
    assert scaling.doubtful(192) == ()
    assert scaling.doubtful(100) == (0, 1)
    assert fit_scaling(steps((31, 64, 97, 128, 165), lambda x: 4 * x)).doubtful(100) == ()


def test_rounding_up_and_down_are_told_apart_by_a_size_without_remainder() -> None:
    odd, even = (31, 45, 69, 101, 147, 199), (31, 48, 69, 101, 147, 199)
    assert fit_scaling(steps(odd, lambda x: 64 * up(x, 2))).doubtful(100) == (0, 1)
    assert fit_scaling(steps(even, lambda x: 64 * up(x, 2))).doubtful(100) == ()


@given(st.permutations(SIZES))
def test_the_order_of_recording_does_not_matter(order: list[int]) -> None:
    assert fit_scaling(steps(order, *BERT)) == fit_scaling(steps(SIZES, *BERT))


def test_seconds_grow_by_the_degree_that_foretells_them_best() -> None:
    def at(size: int, noise: float) -> Step:
        constant, linear, square = 5e-6, 2e-6 * size, 1e-8 * size**2
        times = (constant, linear, square)
        return row(*(Line(seconds=seconds * noise) for seconds in times))

    noise = (1.01, 0.99, 1.0, 1.01, 0.99, 1.0)
    scaling = fit_scaling({size: at(size, n) for size, n in zip(SIZES, noise, strict=True)})
    curves = [curve for curve in scaling.seconds if curve is not None]
    assert [len(curve) - 1 for curve in curves] == [0, 1, 2]
    for found, true in zip(scaling.step_at(128).ops, at(128, 1.0).ops, strict=True):
        assert found.seconds == pytest.approx(true.seconds, rel=0.03)


def test_seconds_never_fall_below_nothing_and_are_left_out_where_a_size_has_none() -> None:
    timed = {size: row(Line(seconds=1e-6 * (size - 30)), Line(seconds=1.0)) for size in SIZES}
    assert fit_scaling(timed).step_at(1).ops[0].seconds == 0
    untimed = timed | {SIZES[0]: row(Line(seconds=1.0), Line())}
    assert [op.seconds is None for op in fit_scaling(untimed).step_at(64).ops] == [False, True]


# Steps that are not alike


def test_steps_of_different_ops_are_refused_with_the_op_at_fault() -> None:
    recorded = steps(SIZES, *BERT)
    tanh = replace(recorded[101].ops[1], name="aten.tanh.default")
    recorded[101] = replace(recorded[101], ops=(recorded[101].ops[0], tanh, *recorded[101].ops[2:]))
    said = "sizes 31 and 101 are not the same ops: op 1 is aten.relu.default in one and aten.tanh.default in the other"
    with pytest.raises(ValueError, match=said):
        fit_scaling(recorded)


def test_a_loop_that_runs_once_more_is_refused() -> None:
    recorded = steps(SIZES, *BERT) | {200: step(200, (*BERT, *BERT))}
    with pytest.raises(ValueError, match="one has 3 ops and the other 6"):
        fit_scaling(recorded)


def test_an_op_that_reads_something_else_is_refused() -> None:
    recorded = steps(SIZES, *BERT)
    ops = recorded[70].ops
    recorded[70] = replace(recorded[70], ops=(ops[0], replace(ops[1], reads=(0,)), *ops[2:]))
    with pytest.raises(ValueError, match=r"op 1 \(aten.relu.default\) reads, creates or does something else"):
        fit_scaling(recorded)


def test_a_storage_that_dies_elsewhere_is_refused() -> None:
    recorded = steps(SIZES, *BERT)
    dying = replace(recorded[48].storages[3], present_at_end=False)
    recorded[48] = replace(recorded[48], storages=(*recorded[48].storages[:3], dying))
    with pytest.raises(ValueError, match="storage 3 is another"):
        fit_scaling(recorded)


def test_autograd_that_saves_something_else_is_refused() -> None:
    recorded = steps(SIZES, *BERT)
    recorded[48] = replace(recorded[48], saved=(1,))
    with pytest.raises(ValueError, match="autograd saves others"):
        fit_scaling(recorded)


@pytest.mark.parametrize("sizes", [(31, 48), (), (0, 1, 2)])
def test_too_few_sizes_are_refused(sizes: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="3 sizes above 0 or more"):
        fit_scaling({size: step(size, BERT) for size in sizes} if sizes else {})


def test_an_input_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a size above 0, not 0"):
        fit_scaling(steps(SIZES, *BERT)).step_at(0)
