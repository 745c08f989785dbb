"""The CUDA machine on the late device: families of models far below what they ask for, against the plain run."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from spillway.methods import LRU, Drop
from tests.cpu.families import FAMILIES
from tests.cpu.late_device import LateStreams, late_session
from tests.cpu.pressure import ORDERS, PLENTY, put_away
from tests.cpu.test_exactness import A_FEW, Trained, assert_the_same, plain, plain_peak, train
from tests.shared import some_of

GUESTS = ("custom-function", "checkpoint-reentrant")
"""Families with custom autograd functions."""


def late(name: str, budget: int, order: str, ways: tuple[Any, ...] = (), **options: Any) -> tuple[Trained, LateStreams]:
    built = FAMILIES[name](0)
    streams = LateStreams(**options.pop("streams", {}))
    with late_session(
        built.model, built.optimizers, budget=budget, method=ORDERS[order](), streams=streams, **options
    ) as memory:
        run = train(built, memory, ways=ways)
        assert memory._engine.backend.device.type == "cpu"
    return run, streams


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("name", "order", "exchanges"), some_of(product((*A_FEW, *GUESTS), ORDERS, [True, False]), 0.4)
)
def test_a_family_trains_to_the_same_bits_with_late_copies_and_late_ops(name: str, order: str, exchanges: bool) -> None:
    budget = plain_peak(name) * 60 // 100
    run, streams = late(name, budget, order, exchanges=exchanges, streams={"behind": 1 << 30})
    if run.refused is not None:
        assert run.refused.allowed == budget
        budget = run.refused.smallest_budget
        run, streams = late(name, budget, order, exchanges=exchanges, streams={"behind": 1 << 30})
    assert_the_same(plain(name), run)
    assert [report.peak_bytes for report in run.reports if report.peak_bytes > budget] == []
    assert sum(report.drops + report.moves for report in run.reports) > 0
    assert streams.pinned == 0


def test_convolutions_are_recomputed_only_where_settings_let_them_give_the_same_bits_twice() -> None:
    picture = torch.randn(2, 4, 32, 32, requires_grad=True)
    forward, transposed = nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 3, padding=1)
    with late_session(forward, budget=PLENTY, method=LRU()) as memory, memory.step():

        def may_be_dropped() -> tuple[bool, bool, bool]:
            out, up = forward(picture), transposed(picture)
            (gradient,) = torch.autograd.grad(out, picture, torch.ones_like(out))
            found = [put_away(memory, tensor, Drop) for tensor in (out, up, gradient)]
            assert all(bool(tensor.isfinite().all()) for tensor in (out, up, gradient))
            return found[0], found[1], found[2]

        assert may_be_dropped() == (True, False, False)
        for name, value in (("deterministic", True), ("benchmark", True)):
            with pytest.MonkeyPatch.context() as changed:
                changed.setattr(torch.backends.cudnn, name, value)
                assert may_be_dropped() == ((True,) * 3 if name == "deterministic" else (False,) * 3)
        torch.use_deterministic_algorithms(True)
        try:
            assert may_be_dropped() == (True, True, True)
        finally:
            torch.use_deterministic_algorithms(False)
