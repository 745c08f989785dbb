"""What quantizes, compiled: the same bits as op by op."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import spillway
from spillway.engines.blocks import arithmetic
from spillway.engines.blocks.arithmetic import EAGER, Arithmetic, compiled, join
from spillway.engines.blocks.quantize import GROUP, pack
from spillway.errors import UsageError
from spillway.methods import Action, Checkpoint
from tests.cpu.test_block_session import Training

STRAIGHT = Arithmetic(arithmetic.encode_straight, arithmetic.decode_straight)


def groups(dtype: torch.dtype) -> Tensor:
    """Of every kind: any numbers, zeros among positive ones, zeros alone, one value, beyond what a step can tell."""
    seeded = torch.Generator().manual_seed(0)
    some = torch.randn((9, GROUP), generator=seeded, dtype=dtype)
    some[1].relu_()
    some[2] = 0
    some[3] = 1.5
    some[4, 7] = float("inf")
    some[5, 9] = float("nan")
    some[6] *= torch.finfo(dtype).max
    some[7].relu_().neg_()
    some[8].abs_().mul_(1e-30)
    return some


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_without_branches_the_bits_are_the_same(bits: int, dtype: torch.dtype) -> None:
    values = groups(dtype)
    rounding = torch.rand(values.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    there = EAGER.encode(values.clone(), 2**bits - 1, rounding.clone())
    straight = STRAIGHT.encode(values.clone(), 2**bits - 1, rounding.clone())
    assert all(same(one, other) for one, other in zip(there, straight, strict=True))
    assert there[2].sum() >= 3, "some groups have no codes"
    ranges, codes, _ = there
    packed = torch.empty((len(values), GROUP * bits // 8), dtype=torch.uint8)
    join(codes, bits, packed)
    assert torch.equal(EAGER.decode(ranges, packed, bits), STRAIGHT.decode(ranges, packed, bits))


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced as for a compiler, and run by torch: what takes a compiler has a test below."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.mark.long
@pytest.mark.usefixtures("without_a_compiler")
def test_a_session_that_compiles_trains_as_one_that_does_not() -> None:
    losses = []
    for made in (Checkpoint(Action.COMPRESS), Checkpoint(Action.COMPRESS, compiled=True)):
        training = Training((24, 40))
        torch.manual_seed(1)
        with spillway.manage(
            training.model, training.optimizer, budget="1GiB", method=made, blocks=spillway.BlockOptions(lossy=True)
        ) as memory:
            for tokens in training.batches:
                with memory.step(tokens):
                    losses.append(training.step(tokens).item())
    assert losses[:2] == losses[2:]


@pytest.mark.long
@pytest.mark.usefixtures("without_a_compiler")
def test_tensors_of_any_length_are_packed_to_the_same_bytes() -> None:
    assert_packed_as_op_by_op(compiled(torch.device("cpu")), (GROUP, 3 * GROUP + 17, 1100 * GROUP))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of what torch compiles with
def test_a_real_compiler_packs_to_the_same_bytes() -> None:
    compiled.cache_clear()
    try:
        made = compiled(torch.device("cpu"))
    except UsageError as reason:
        pytest.skip(str(reason))
    assert_packed_as_op_by_op(made, (3 * GROUP + 17, 400 * GROUP))


def assert_packed_as_op_by_op(made: Arithmetic, numels: Sequence[int]) -> None:
    for numel in numels:
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).relu_()
        found: list[Any] = [pack(flat, 4, torch.Generator().manual_seed(0), one) for one in (None, made)]
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1].unpack(found[0][0]), found[1][1].unpack(found[1][0]))


def test_where_nothing_can_be_compiled_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **_: Any) -> Any:
        def fails(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler was found\nat all")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    compiled.cache_clear()
    with pytest.raises(
        UsageError, match=r"does not work here \(no C\+\+ compiler was found\); leave out compiled=True"
    ):
        compiled(torch.device("cpu"))


def test_what_quantizes_nothing_has_nothing_to_compile() -> None:
    with pytest.raises(UsageError, match=r"Action\.RECOMPUTE quantizes nothing"):
        Checkpoint(compiled=True)
