"""What fingerprints tell apart, and that a second run with other values is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from spillway.engines.blocks import fingerprints
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.fingerprints import COLUMNS, ROWS, fingerprint, print_bytes
from spillway.errors import RecomputeError
from spillway.methods.actions import Action
from tests.cpu.block_cases import Chain, Functional, Residual
from tests.cpu.test_block_engine import batch, engine_of, gradients, same
from tests.cpu.test_block_exactness import WAYS, difference, plainly, trained, under

SIZES = [(1,), (3, 5), (40, 32), (129, 128), (3, ROWS, COLUMNS)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def content(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(fingerprint(one, {}), fingerprint(other, {}))


def one_ulp(tensor: Tensor, place: int) -> Tensor:
    whole = tensor.clone()
    words = whole.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    words[place] += 1
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_what_has_other_values_has_another_fingerprint(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = content(shape, dtype)
    assert not differ(tensor, tensor.clone())
    assert differ(tensor, -tensor)
    assert differ(tensor, one_ulp(tensor, 0))
    assert differ(tensor, one_ulp(tensor, tensor.numel() // 2))
    assert differ(tensor, one_ulp(tensor, tensor.numel() - 1))
    if len(shape) == 2:
        assert differ(tensor, tensor.roll(1, 0))
        assert differ(tensor, tensor.roll(1, 1))
        assert differ(tensor, tensor[[1, 0, *range(2, shape[0])]])


@pytest.mark.parametrize("count", [7, 1000, 1 << 20])
def test_a_bit_of_a_mask_that_moved_has_another_fingerprint(count: int) -> None:
    mask = torch.rand(count, generator=torch.Generator().manual_seed(3)) > 0.1
    place = int(torch.nonzero(mask)[-1])
    moved = mask.clone()
    moved[place] = False
    moved[int(torch.nonzero(~mask)[0])] = True
    assert moved.sum() == mask.sum()
    assert differ(mask, moved)


@pytest.mark.parametrize(
    "view",
    [
        lambda whole: whole[3:],
        lambda whole: whole[1:, 1:],
        lambda whole: whole.t(),
        lambda whole: whole[:, :1].expand(40, 32),
        lambda whole: whole.to(torch.bfloat16)[1:],
        lambda whole: (whole > 0)[1:, 3:],
    ],
)
def test_a_view_has_the_fingerprint_of_its_own_elements(view: Callable[[Tensor], Tensor]) -> None:
    whole = content((40, 32), torch.float32)
    other = whole.clone()
    other[0, 0] += 1  # part of the expanded and the transposed view alone
    same_elements = torch.equal(view(whole), view(other))
    assert differ(view(whole), view(other)) is not same_elements
    assert not differ(view(whole), view(whole.clone()))


class Moving:
    """Differs in values alone, from one run to the next, by what a second run does not put back."""

    def __init__(self) -> None:
        self.runs = Mock()

    def __call__(self, block: Functional, x: Tensor) -> Tensor:
        self.runs()
        y = torch.sin(block.one(x))
        return block.two(torch.cos(y * (1 + self.runs.call_count * 2**-20)))


class MovingFirst(Moving):
    """Only the first elements of what it saves differ."""

    def __call__(self, block: Functional, x: Tensor) -> Tensor:
        self.runs()
        moved = torch.zeros(40, 32)
        moved[0, 0] = self.runs.call_count * 2**-20
        return block.two(torch.cos(torch.sin(block.one(x)) + moved))


@pytest.mark.parametrize("action", [Action.RECOMPUTE, Action.RECOMPUTE_OFFLOADED, Action.SELECTIVE])
def test_block_and_tensor_are_named(action: Action) -> None:
    model, engine = engine_of(Moving(), action)
    with pytest.raises(
        RecomputeError,
        match=r"second run of call 0 of blocks\.0 was not the same as the first: saved tensor 3, float32 of shape "
        r"\(40, 32\), holds other values",
    ):  # it is one of the last
        model(batch()).sum().backward()
    engine.close()
    model, engine = engine_of(MovingFirst(), action)
    model(batch()).sum().backward()  # who does not ask is not told of everything


def test_what_is_revoked_is_compared_too() -> None:
    model, engine = engine_of(Moving(), Action.KEEP)
    loss = model(batch()).sum()
    engine.revoke("blocks.0")
    with pytest.raises(RecomputeError, match="holds other values"):
        loss.backward()


def test_a_block_inside_a_recomputed_one_is_compared() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Functional(Moving())

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

    model = Chain(Outer())
    actions = {("blocks.0", 0): Action.RECOMPUTE}
    with (
        BlockEngine(model, ["blocks.0", "blocks.0.inner"], actions=actions),
        pytest.raises(RecomputeError, match=r"call 0 of blocks\.0\.inner .* holds other values"),
    ):
        model(batch()).sum().backward()


@pytest.mark.parametrize(
    "name", ["dropout", "batch-norm", "rrelu", "writes-to-its-input", "views", "autocast", "nested-all"]
)
def test_what_runs_again_as_it_ran_is_let_pass(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = fingerprints._some
    monkeypatch.setattr(fingerprints, "_some", lambda tensor: (compared.append(1), real(tensor))[1])
    states, losses = trained(name, plainly)
    action, revoked = WAYS["recompute"]
    found, others = trained(name, under(action, tmp_path, [], revoked=revoked))
    assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
    assert all(difference(a, b) is None for a, b in zip(states, found, strict=True))
    assert compared


def test_gradients_are_the_same() -> None:
    model = Chain(Residual())
    with BlockEngine(model, ["blocks.0"], actions=lambda block, call: Action.RECOMPUTE):
        torch.manual_seed(3)
        found = gradients(model, model(batch()).sum())
    torch.manual_seed(3)
    assert same(found, gradients(model, model(batch()).sum()))


def test_what_an_op_leaves_unwritten_is_no_other_value() -> None:
    """Part of what `ctc_loss` saves has no content where targets differ in length."""

    class Aligned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.rows(x).reshape(10, 4, 32).log_softmax(-1)
            lengths, targets = torch.tensor([10, 10, 10, 10]), torch.ones(4, 5, dtype=torch.long)
            loss = torch.nn.functional.ctc_loss(scores, targets, lengths, torch.tensor([5, 2, 1, 3]))
            return x * loss

    for _ in range(6):
        model = Chain(Aligned())
        with BlockEngine(model, ["blocks.0"], actions=lambda block, call: Action.RECOMPUTE):
            model(torch.randn(40, 32)).sum().backward()
            torch.randn(4, 11, 99)  # other bytes where the next one lies


@pytest.mark.parametrize("nbytes", [0, 4, 8, 1012, 2032, 4064, 100_000, 8 * COLUMNS * ROWS, 24 * COLUMNS * ROWS + 777])
def test_what_a_fingerprint_takes_is_known_beforehand(nbytes: int) -> None:
    assert print_bytes(nbytes) == fingerprint(torch.empty(nbytes, dtype=torch.uint8), {}).nbytes
