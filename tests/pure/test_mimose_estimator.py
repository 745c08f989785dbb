"""Bytes and seconds at sizes that were not measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.methods.by_block import InputSize
from spillway.methods.mimose.estimator import Estimate, Laws, Quadratics, at_most, fit_quadratic
from spillway.methods.mimose.exact import exact_polynomial, monomials

LENGTHS = (35, 48, 61, 77, 90, 102, 118, 126, 133, 141)
"""Ten lengths of the paper's SWAG range."""


def estimate(samples: dict[InputSize, int], *, batched: bool = False) -> Estimate:
    found = Estimate(batched=batched, laws={})
    for size, nbytes in samples.items():
        found.observe(size, nbytes)
    return found


def bert(length: int) -> int:
    """What a layer of 768 features and 12 heads saves of 16 samples: products with one and with two lengths."""
    return 16 * (4 * 17 * 768 * length + 9 * 12 * length * length) + 64


def up(length: int, quantum: int) -> int:
    return -(-length // quantum)


# The published quadratic


def test_the_quadratic_is_the_one_of_polyfit() -> None:
    noisy = [((x,), bert(x) * (1 + 0.01 * (-1) ** x)) for x in LENGTHS]
    fit = fit_quadratic(noisy)
    wanted = numpy.polyfit([x for (x,), _ in noisy], [y for _, y in noisy], 2)
    assert list(reversed(fit.coefficients)) == pytest.approx(list(wanted), rel=1e-6)
    assert fit.at((100,)) == pytest.approx(float(numpy.polyval(wanted, 100)), rel=1e-9)


@pytest.mark.parametrize(("different", "degree"), [(1, 0), (2, 1), (3, 2), (9, 2)])
def test_fewer_sizes_than_coefficients_give_a_lower_degree(different: int, degree: int) -> None:
    samples = [((LENGTHS[place],), float(bert(LENGTHS[place]))) for place in range(different)]
    fit = fit_quadratic(samples * 2)  # measuring a size again does not make it another
    assert fit.degree == degree
    wanted = [nbytes for _, nbytes in samples]
    assert degree == 0 or [fit.at(size) for size, _ in samples] == pytest.approx(wanted)


def test_a_fit_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="not of \\[\\]"):
        fit_quadratic([])
    with pytest.raises(ValueError, match="not of \\[1, 2\\]"):
        fit_quadratic([((1,), 1.0), ((1, 2), 1.0)])


def test_several_quadratics_are_evaluated_at_once_whatever_their_degrees() -> None:
    fits = [fit_quadratic([((x,), y(x)) for x in xs]) for y, xs in [(lambda x: -5.0, (1,)), (bert, (3, 9, 20))]]
    assert Quadratics(fits).at((12,)) == pytest.approx([0.0, bert(12)])


# Exact laws


def test_features_of_two_lengths_are_those_of_attention_between_them() -> None:
    assert monomials((3, 5), 2, batched=False) == (1, 3, 5, 9, 15, 25)
    assert monomials((2, 3, 5), 2, batched=True) == (2, 6, 10, 18, 30, 50)
    assert monomials((2, 3), 1, batched=True) == (2, 6)


@pytest.mark.parametrize(
    "law", [bert, lambda x: 4096, lambda x: 0, lambda x: x * (x + 1) // 2, lambda x: 196 * up(x, 7) ** 2 + 3 * up(x, 7)]
)
def test_bytes_on_a_law_are_exact_at_every_length(law: Callable[[int], int]) -> None:
    found = estimate({(x,): law(x) for x in LENGTHS})
    assert [found.at((x,)) for x in range(1, 600)] == [law(x) for x in range(1, 600)]


@pytest.mark.parametrize(
    "law", [lambda x: 4096 * x, lambda x: 4096, lambda x: 512 * up(x, 8), lambda x: 96 * up(x, 4) * x, lambda x: x**5]
)
def test_an_empty_batch_is_a_size_like_others(law: Callable[[int], int]) -> None:
    found = estimate({(x,): law(x) for x in (0, 8, 20, 33, 64, 77, 90, 101)})
    assert [found.at((x,)) for x in (0, 8, 33, 101)] == [law(x) for x in (0, 8, 33, 101)]
    assert found.at((50,)) >= law(8)
    assert found.at((400,)) >= law(101)


def t5(batch: int, encoder: int, decoder: int) -> int:
    return batch * (64 + 768 * encoder + 512 * decoder + 8 * encoder**2 + 12 * encoder * decoder + 4 * decoder**2)


PAIRS = ((35, 10), (60, 12), (48, 30), (90, 25), (120, 40), (77, 61), (101, 55), (133, 18))


def test_bytes_of_an_encoder_and_a_decoder_are_exact_after_eight_samples() -> None:
    found = estimate({(4 + i % 3, e, d): t5(4 + i % 3, e, d) for i, (e, d) in enumerate(PAIRS)}, batched=True)
    assert [found.at((b, e, d)) for b in (1, 7) for e in (20, 200) for d in (5, 90)] == [
        t5(b, e, d) for b in (1, 7) for e in (20, 200) for d in (5, 90)
    ]


def test_pictures_padded_to_whole_windows_are_exact() -> None:
    def swin(height: int, width: int) -> int:
        return 49 * 96 * 4 * up(height, 28) * up(width, 28) + 1000

    sides = [(224, 224), (256, 320), (300, 224), (351, 288), (400, 416), (317, 512), (480, 333), (288, 480), (600, 500)]
    found = estimate({side: swin(*side) for side in sides})
    assert [found.at(side) for side in ((230, 500), (640, 225), (700, 700))] == [
        swin(230, 500), swin(640, 225), swin(700, 700)
    ]  # fmt: skip


SIDES = (107, 163, 195, 221, 250, 291, 362)


@pytest.mark.parametrize(
    "law",
    [
        lambda x: 4 + 1296 * up(x, 4) ** 2 + 40964 * up(x, 28) ** 2,  # a block of Swin, measured
        lambda x: 5120 + 512 * up(x, 8) ** 2 + 2560 * up(x, 16) ** 2,  # the first block of a stage of ResNet, measured
        lambda x: 700 * (x // 2) + 96 * (x // 14),
    ],
)
def test_windows_of_two_widths_are_exact_after_seven_samples(law: Callable[[int], int]) -> None:
    found = estimate({(x,): law(x) for x in SIDES})
    assert [found.at((x,)) for x in range(90, 700)] == [law(x) for x in range(90, 700)]


def test_windows_of_two_widths_are_exact_for_heights_and_widths_and_samples() -> None:
    def swin(samples: int, height: int, width: int) -> int:
        return samples * (1296 * up(height, 4) * up(width, 4) + 40964 * up(height, 28) * up(width, 28))

    others = (300, 190, 401, 222, 333, 187, 254)
    sizes = [(1 + side % 3, side, other) for side, other in zip(SIDES, others, strict=True)]
    found = estimate({size: swin(*size) for size in sizes}, batched=True)
    assert [found.at(size) for size in ((2, 230, 500), (9, 100, 101))] == [swin(2, 230, 500), swin(9, 100, 101)]


def test_of_several_pairs_of_windows_that_fit_the_largest_counts() -> None:
    def padded(x: int) -> int:
        return 10 * up(x, 4) ** 2 + 77 * up(x, 28) ** 2

    even = {(x,): padded(x) for x in (112, 160, 192, 224, 288, 320, 352)}  # as many windows of 4 as pairs of 2
    law = exact_polynomial(even, batched=False)
    assert law is not None
    assert all((law((x,)) or 0) >= padded(x) for x in range(100, 400))


def test_windows_of_two_widths_take_five_different_samples() -> None:
    def law(x: int) -> int:
        return 4 + 1296 * up(x, 4) ** 2 + 40964 * up(x, 28) ** 2

    assert exact_polynomial({(x,): law(x) for x in SIDES[:4]}, batched=False) is None
    assert exact_polynomial({(x,): law(x) for x in (107, 108, 163, 164, 195, 196)}, batched=False) is None
    assert exact_polynomial({(x,): law(x) for x in SIDES[:5]}, batched=False) is not None


def test_as_many_samples_as_terms_prove_nothing() -> None:
    assert exact_polynomial({(x,): bert(x) for x in LENGTHS[:3]}, batched=False) is None
    assert exact_polynomial({(x,): bert(x) for x in LENGTHS[:4]}, batched=False) is not None
    six = {(e, d): t5(1, e, d) for e, d in PAIRS[:6]}
    assert exact_polynomial(six, batched=False) is None
    assert exact_polynomial(six | {(e, d): t5(1, e, d) for e, d in PAIRS[6:7]}, batched=False) is not None


def test_samples_along_a_line_say_nothing_beside_it() -> None:
    along = exact_polynomial({(x, x): t5(1, x, x) for x in LENGTHS}, batched=False)
    assert along is not None
    assert along((55, 55)) == t5(1, 55, 55)
    assert along((55, 40)) is None
    beside = estimate({(x, x): t5(1, x, x) for x in LENGTHS}).at((55, 40))
    assert beside >= t5(1, 55, 40)


def test_lengths_that_are_all_even_leave_odd_ones_to_the_largest_of_the_laws_that_fit() -> None:
    def padded(x: int) -> int:
        return 100 * up(x, 8) * 8

    even = exact_polynomial({(x,): padded(x) for x in range(16, 160, 16)}, batched=False)
    assert even is not None
    assert even((32,)) == padded(32)
    assert all((even((x,)) or 0) >= padded(x) for x in range(16, 160))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 10**6), min_size=6, max_size=6),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=9, max_size=12, unique=True),
    st.tuples(st.integers(1, 900), st.integers(1, 900)),
)
def test_a_polynomial_of_two_lengths_is_exact_wherever_the_samples_settle_it(
    coefficients: list[int], sizes: list[tuple[int, int]], other: tuple[int, int]
) -> None:
    def nbytes(size: InputSize) -> int:
        return sum(c * feature for c, feature in zip(coefficients, monomials(size, 2, batched=False), strict=True))

    found = exact_polynomial({size: nbytes(size) for size in sizes}, batched=False)
    if found is not None:
        assert all(found(size) == nbytes(size) for size in sizes)
        assert found(other) in (nbytes(other), None)


# Where there is no law


def lawless(x: int) -> int:
    """Grows with the square at most, and by steps that no window explains."""
    return 1000 * x + x * x + 4000 * ((x * x * 31 % 97) % 13)


def test_a_measured_size_is_remembered() -> None:
    found = estimate({(x,): lawless(x) for x in LENGTHS})
    assert found.law() is None
    assert [found.at((x,)) for x in LENGTHS] == [lawless(x) for x in LENGTHS]


def test_the_most_that_was_measured_of_a_size_counts_and_no_law_is_believed_any_more() -> None:
    found = estimate({(x,): bert(x) for x in LENGTHS})
    assert found.observe((61,), bert(61) + 100)
    assert not found.observe((61,), bert(61) + 50)
    assert (found.law(), found.at((61,))) == (None, bert(61) + 100)


def test_a_sample_that_is_on_the_law_changes_nothing() -> None:
    found = estimate({(x,): bert(x) for x in LENGTHS})
    found.at((50,))
    assert not found.observe((50,), bert(50))
    assert found.observe((51,), bert(51) + 1)


def test_a_fit_is_raised_by_the_most_that_a_sample_lies_above_it() -> None:
    samples = {(x,): lawless(x) for x in LENGTHS}
    fit = fit_quadratic([(size, float(nbytes)) for size, nbytes in samples.items()])
    above = max(nbytes - fit.at(size) for size, nbytes in samples.items())
    assert estimate(samples).at((100,)) == pytest.approx(fit.at((100,)) + above, abs=1)


def test_sizes_outside_the_range_have_what_samples_allow_for_at_most() -> None:
    assert at_most({(10,): 100}, (20,), batched=False) == 400
    assert at_most({(10,): 100}, (5,), batched=False) == 100
    assert at_most({(10,): 100, (20,): 300}, (40,), batched=False) == 300 + 200 / 300 * (1600 - 400)
    assert at_most({(10, 10): 100}, (20, 5), batched=False) == 400
    assert at_most({(2, 10): 100}, (6, 20), batched=True) == 100 * 3 * 4


@given(
    st.tuples(*(st.integers(0, 10**5),) * 3),
    st.lists(st.integers(1, 400), min_size=1, max_size=6, unique=True),
    st.integers(1, 1000),
)
def test_no_sum_of_products_is_ever_underestimated(
    coefficients: tuple[int, int, int], lengths: list[int], other: int
) -> None:
    def nbytes(x: int) -> int:
        return coefficients[0] + coefficients[1] * x + coefficients[2] * x * x

    found = estimate({(x,): nbytes(x) for x in lengths})
    if other in lengths or not min(lengths) <= other <= max(lengths):
        assert found.at((other,)) >= nbytes(other)
    assert at_most({(x,): nbytes(x) for x in lengths}, (other,), batched=False) >= nbytes(other) * (1 - 1e-9)


def test_a_bound_comes_down_until_it_is_shown_to_be_too_low() -> None:
    found = estimate({})
    assert found.bound((10,), 500, proven=False)
    assert found.bound((10,), 400, proven=False)
    assert not found.bound((10,), 450, proven=False)
    assert found.bound((10,), 420, proven=True)
    assert not found.bound((10,), 300, proven=False)
    assert found.at((10,)) == 420


def test_blocks_of_one_kind_share_the_search_for_their_law() -> None:
    laws: Laws = {}
    for _ in range(12):
        one = Estimate(batched=False, laws=laws)
        for x in LENGTHS:
            one.observe((x,), bert(x))
        one.law()
    assert len(laws) == 1
