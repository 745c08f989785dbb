"""What an op computes and moves, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spillway.engines.tensors.ops import OpInfo
from spillway.recording.formulas import FLOPS, TRAFFIC, flops_of, register, traffic_of

aten = torch.ops.aten
F4 = 4
"""Bytes of a number of 32 bits."""


def cost(func: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Operations and bytes of a call."""
    out, info = func(*args, **kwargs), OpInfo(func)
    return flops_of(info, args, kwargs, out), traffic_of(info, args, kwargs, out)


def f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


ROWS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "flops", "traffic"),
    [
        ((aten.mm.default, f(2, 3), f(3, 5)), 2 * 2 * 3 * 5, F4 * (6 + 15 + 10)),
        ((aten.addmm.default, f(5), f(2, 3), f(3, 5)), 2 * 2 * 3 * 5, F4 * (5 + 6 + 15 + 10)),
        ((aten.add.Tensor, f(4, 3), f(4, 3)), 0, F4 * 36),
        ((aten.add.Tensor, f(4, 3), f(3).expand(4, 3)), 0, F4 * (12 + 3 + 12)),
        ((aten.add_.Tensor, f(4), f(4)), 0, F4 * (4 + 4 + 4)),
        ((aten.t.default, f(4, 3)), 0, 0),
        ((aten.empty_like.default, f(4, 3)), 0, 0),
        ((aten.zeros_like.default, f(4, 3)), 0, F4 * 12),
        ((aten.zero_.default, f(4, 3)), 0, F4 * 12),
        ((aten.copy_.default, f(4), torch.zeros(4, dtype=torch.float64)), 0, 4 * 8 + 4 * 4),
        ((aten.embedding.default, f(100, 8), ROWS), 0, 16 + 2 * F4 * 16),
        ((aten.index_select.default, f(100, 8), 0, ROWS), 0, 16 + 2 * F4 * 16),
        ((aten.index.Tensor, f(100, 8), [ROWS]), 0, 16 + 2 * F4 * 16),
        ((aten.nll_loss_forward.default, f(2, 9), ROWS, None, 1, -100), 0, 16 + F4 * 2 + F4 * 2),
        ((aten.cat.default, [f(2), f(3)]), 0, F4 * 10),
        ((aten._foreach_add_.Scalar, [f(2), f(3)], 1.0), 0, 2 * F4 * 5),
        ((aten._local_scalar_dense.default, torch.zeros(())), 0, 4),
    ],
)
def test_an_op_costs_what_it_looks_at(call: tuple[Any, ...], flops: int, traffic: int) -> None:
    assert cost(*call) == (flops, traffic)


def test_running_statistics_count_both_ways_in_training_alone() -> None:
    def moved(training: bool) -> int:
        statistics = f(3), torch.ones(3)
        return cost(aten.native_batch_norm.default, f(4, 3), f(3), f(3), *statistics, training, 0.1, 1e-5)[1]

    assert moved(True) == F4 * (12 + 3 + 3 + 2 * (3 + 3) + 12 + 3 + 3)
    assert moved(False) == F4 * (12 + 3 + 3 + (3 + 3) + 12)


def test_attention_that_torch_does_not_count_counts_as_its_two_products() -> None:
    q = f(1, 2, 6, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert cost(forward, q, q, q)[0] == 2 * (2 * 2 * 6 * 6 * 8)
    out, lse = forward(q, q, q)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert cost(backward, out, q, q, q, out, lse, 0.0, False)[0] == 5 * (2 * 2 * 6 * 6 * 8)


def test_a_second_formula_for_an_op_is_refused() -> None:
    for registry, name in ((TRAFFIC, "embedding"), (FLOPS, "_scaled_dot_product_flash_attention_for_cpu")):
        with pytest.raises(ValueError, match=f"aten::{name} has a formula already"):
            register(registry, name)(lambda args, kwargs, out: 0)


def test_every_formula_is_for_an_op_that_torch_has() -> None:
    assert [name for name in {*TRAFFIC, *FLOPS} if not hasattr(aten, name.removeprefix("aten::"))] == []
