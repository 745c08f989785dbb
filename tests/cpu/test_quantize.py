"""Tensors in a few bits: how far off they come back, that they are right on average, and what comes back exactly."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from torch import Tensor

from spillway.engines.blocks.quantize import (
    FLOATS,
    GROUP,
    Mask,
    Quantized,
    pack,
    pack_bits,
    pack_bits_by_ops,
    unpack_bits,
    unpack_bits_by_ops,
)
from spillway.engines.blocks.trace import AllocationTrace

BITS = (2, 4, 8)
LENGTHS = (GROUP, GROUP + 44, 1000, 1 << 12)


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def there_and_back(flat: Tensor, bits: int | None = 4, seed: int = 0) -> Tensor:
    packed = pack(flat, bits, seeded(seed))
    assert packed is not None
    data, packing = packed
    assert data.dtype is torch.uint8
    assert data.numel() < flat.numel() * flat.element_size()
    back = packing.unpack(data)
    assert (back.dtype, back.shape) == (flat.dtype, flat.shape)
    assert torch.equal(bits_of(back), bits_of(packing.unpack(data))), "the same bits every time"
    return back


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def steps(flat: Tensor, bits: int) -> Tensor:
    """Of the group of every element, as wide as they may be: groups with zeros have one code less."""
    groups = [flat[start : start + GROUP].double() for start in range(0, flat.numel(), GROUP)]
    wide = [(group.max() - group.min()) / (2**bits - 2) for group in groups]
    return torch.cat([step.expand(len(group)) for step, group in zip(wide, groups, strict=True)])


# ------------------------------------------------------------------------------------------------------------ how good


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("positive", [False, True])
def test_what_comes_back_is_off_by_less_than_a_step(numel: int, bits: int, dtype: torch.dtype, positive: bool) -> None:
    flat = normal(numel, dtype)
    flat = flat.relu() if positive else flat
    off = (there_and_back(flat, bits).double() - flat.double()).abs()
    rounding = 2 * torch.finfo(dtype).eps * flat.abs().max()
    assert (off <= steps(flat, bits) + rounding).all()
    assert off.max() > 0


@pytest.mark.long(but=1)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("positive", [False, True])
def test_what_comes_back_is_right_on_average(bits: int, positive: bool) -> None:
    draws, flat = 2000, normal(1000)
    flat = flat.relu() if positive else flat
    generator = seeded(3)
    total = torch.zeros(len(flat), dtype=torch.float64)
    for _ in range(draws):
        packed = pack(flat, bits, generator)
        assert packed is not None
        total += packed[1].unpack(packed[0])
    noise = steps(flat, bits) / 2 / math.sqrt(draws)  # an element is off by half a step at most, in quadratic mean
    standardized = (total / draws - flat).abs() / noise
    assert standardized.max() < 5
    assert 0.2 < standardized.square().mean() < 1.2


def test_an_element_becomes_the_code_below_or_above_by_its_distance_from_them() -> None:
    flat = torch.full((GROUP,), 7.25)
    flat[0], flat[1] = 1, 16  # codes are whole numbers
    back = torch.stack([there_and_back(flat, 4, seed)[2:] for seed in range(40)])
    assert back.unique().tolist() == [7, 8]
    share = float((back == 8).double().mean())
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / back.numel())


# ------------------------------------------------------------------------------------------------------- what is exact


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_a_relu_stay_zeros_and_nothing_else_becomes_one(bits: int, dtype: torch.dtype) -> None:
    flat = normal(5000, dtype).relu()
    smallest = torch.finfo(dtype).tiny
    flat[10], flat[20], flat[700] = smallest, 1000, smallest
    flat[1024:1280] = 0
    flat[1280:1536] = flat[1280:1536].clamp(min=0.01)
    back = there_and_back(flat, bits)
    assert torch.equal(back == 0, flat == 0)
    assert (back >= 0).all()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool])
@pytest.mark.parametrize("numel", LENGTHS)
def test_masks_take_a_bit_and_come_back_exactly(dtype: torch.dtype, numel: int) -> None:
    mask = torch.rand(numel, generator=seeded()) < 0.9
    flat = mask if dtype is torch.bool else mask.to(dtype) / 0.9
    packed = pack(flat, None, None)
    assert packed is not None
    assert isinstance(packed[1], Mask)
    assert packed[0].numel() == -(-numel // 8)
    assert torch.equal(bits_of(packed[1].unpack(packed[0])), bits_of(flat))


@pytest.mark.parametrize("values", [(-0.0, 0.0), (math.nan, 1.0), (-math.inf, 0.0), (3.5, 3.5), (-1.0, 1.0)])
def test_any_two_values_are_a_mask(values: tuple[float, float]) -> None:
    flat = torch.tensor(values).repeat(300)
    back = there_and_back(flat, None)
    assert torch.equal(bits_of(back), bits_of(flat))


def test_a_third_value_anywhere_makes_it_no_mask() -> None:
    flat = torch.ones(1 << 19)
    flat[1::2] = 0
    flat[-3] = 0.5
    assert pack(flat, None, None) is None
    packed = pack(flat, 4, seeded())
    assert packed is not None
    assert isinstance(packed[1], Quantized)


def test_bits_are_packed_by_ops_as_numpy_packs_them() -> None:
    for count in (1, 7, 8, 9, 1000):
        mask = torch.rand(count, generator=seeded(count)) < 0.5
        assert torch.equal(pack_bits(mask), pack_bits_by_ops(mask))
        assert torch.equal(unpack_bits(pack_bits(mask), count), mask)
        assert torch.equal(unpack_bits_by_ops(pack_bits(mask), count), mask)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_groups_that_are_not_finite_stay_as_they_are(dtype: torch.dtype, odd: float) -> None:
    flat = normal(20 * GROUP + 5, dtype)
    flat[3 * GROUP + 7] = flat[-1] = odd
    back = there_and_back(flat)
    for start in (3 * GROUP, 20 * GROUP):
        assert torch.equal(bits_of(back[start : start + GROUP]), bits_of(flat[start : start + GROUP]))
    others = torch.ones(len(flat), dtype=torch.bool)
    others[3 * GROUP : 4 * GROUP] = others[20 * GROUP :] = False
    assert torch.isfinite(back[others]).all()
    assert not torch.equal(back[others], flat[others])


def test_a_range_beyond_the_dtype_stays_as_it_is() -> None:
    flat = normal(8 * GROUP)
    flat[0], flat[1] = -3e38, 3e38
    assert torch.equal(there_and_back(flat)[:GROUP], flat[:GROUP])
    half = normal(8 * GROUP, torch.float16)
    half[0], half[1] = -65504, 65504
    assert torch.isfinite(there_and_back(half)).all(), "within float32, in which it is reckoned"


def test_a_tensor_that_is_mostly_not_finite_stays_as_it_is() -> None:
    flat = normal(4 * GROUP)
    flat[:: GROUP // 2] = math.nan
    assert pack(flat, 4, seeded()) is None


def test_constant_groups_come_back_exactly() -> None:
    flat = normal(4 * GROUP)
    flat[GROUP : 2 * GROUP], flat[2 * GROUP : 3 * GROUP] = -0.7, 0.0
    back = there_and_back(flat, 2)
    assert torch.equal(back[GROUP : 3 * GROUP], flat[GROUP : 3 * GROUP])


@pytest.mark.parametrize("numel", [0, 1, GROUP - 1])
def test_less_than_a_group_stays_as_it_is(numel: int) -> None:
    assert pack(normal(numel), 4, seeded()) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.complex64])
def test_integers_and_complex_numbers_stay_as_they_are(dtype: torch.dtype) -> None:
    assert pack(torch.ones(1000, dtype=dtype), 4, seeded()) is None


# --------------------------------------------------------------------------------------------------- sizes and streams


@pytest.mark.parametrize(
    ("bits", "dtype", "ratio"),
    [
        (2, torch.float32, 0.0703125),
        (4, torch.float32, 0.1328125),
        (8, torch.float32, 0.2578125),
        (4, torch.float64, 0.0703125),
        (4, torch.bfloat16, 0.265625),
        (4, torch.float16, 0.265625),
    ],
)
@pytest.mark.parametrize("positive", [False, True])
def test_bytes_are_those_of_codes_and_ranges(bits: int, dtype: torch.dtype, ratio: float, positive: bool) -> None:
    flat = normal(1 << 14, dtype)
    packed = pack(flat.relu() if positive else flat, bits, seeded())
    assert packed is not None
    assert packed[0].untyped_storage().nbytes() == ratio * flat.nbytes


def test_nobody_elses_random_stream_moves_and_the_own_one_can_be_repeated() -> None:
    flat = normal(5000)
    torch_before, numpy_before = torch.get_rng_state(), numpy.random.get_state()
    one, again, other = (there_and_back(flat, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(torch_before, torch.get_rng_state())
    assert all(numpy.array_equal(a, b) for a, b in zip(numpy_before, numpy.random.get_state(), strict=True))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_masks_are_packed_into_and_out_of_memory_that_traces_hear_of() -> None:
    mask = torch.arange(1 << 20) % 3 == 0
    trace = AllocationTrace({})
    trace.mark()
    packed = pack_bits(mask)
    trace.mark()
    again = unpack_bits(packed, mask.numel())
    trace.mark()
    levels = [window.level for window in trace.stop()]
    assert levels[1] == packed.numel() == mask.numel() // 8
    assert levels[2] == levels[1] + again.numel()
    assert torch.equal(again, mask)
