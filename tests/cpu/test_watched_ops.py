from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spillway.engines.tensors.sizes import Sizes
from spillway.engines.tensors.tensor_engine import TensorEngine
from tests.cpu.benchmarks_quick import quick
from tests.cpu.op_samples import database
from tests.cpu.watched_ops import DTYPES, Program, look_at, many, measured, programs
from tests.shared import FULL_AUDIT

OTHERWISE_UNDER_A_MODE = (
    "cumprod", "linalg.cond", "linalg.eigvals", "linalg.eigvalsh", "linalg.matrix_norm", "linalg.matrix_rank",
    "linalg.svdvals", "masked.prod", "matrix_exp", "nn.functional.bilinear", "nn.functional.fold",
    "nn.functional.unfold", "prod", "sparse.mm",
)  # fmt: skip
"""Ops that came out otherwise while a dispatch mode was active, or passed the budget."""

SPARSE = ("to_sparse", "sparse.sampled_addmm", "nn.functional.gaussian_nll_loss")
"""Ops whose account was not what was allocated."""


def chosen() -> list[Any]:
    ops = database()
    some = (*OTHERWISE_UNDER_A_MODE, *SPARSE)
    return list(ops) if FULL_AUDIT else [*(op for op in ops if op.name in some), *ops[::12]]


def test_ops_come_out_the_same_watched_and_the_account_is_what_was_allocated() -> None:
    found = look_at(programs(dtypes=DTYPES if FULL_AUDIT else DTYPES[:1], samples=3 if FULL_AUDIT else 1, ops=chosen()))
    assert found.found == {}
    assert found.counts["identical watched"] >= 150
    assert found.counts["things left"] >= 75


def program_of(function: Any) -> Program:
    sample = SimpleNamespace(input=torch.ones(64), args=(), kwargs={})
    return Program("liar", SimpleNamespace(name="liar", op=function), sample, 0, False)


def test_an_op_that_comes_out_otherwise_is_found() -> None:
    calls = itertools.count()
    found = look_at([program_of(lambda x: x + next(calls))])
    assert list(found.found) == ["other results watched", "other results under a budget"]


def test_a_storage_that_is_not_in_the_account_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    register_new = TensorEngine.register_new

    def forgetful(engine: TensorEngine, tensor: torch.Tensor) -> Any:
        return None if tensor.numel() == 7 else register_new(engine, tensor)

    monkeypatch.setattr(TensorEngine, "register_new", forgetful)
    found = look_at([program_of(lambda x: x.topk(7))])
    assert list(found.found) == ["another account"]


def test_what_a_sparse_tensor_consists_of_that_is_not_in_the_account_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorEngine, "take_in_parts", lambda *given: None)
    found = look_at([program_of(lambda x: x.to_sparse())])
    assert list(found.found) == ["another account"]


def test_an_op_that_creates_more_than_is_expected_of_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "expected", lambda *given: (None, 8))
    found = look_at([program_of(lambda x: x.cumsum(0).cumprod(0))])
    assert "more created than expected" in found.found


def test_tensors_that_share_a_storage_where_they_did_not_are_found() -> None:
    calls = itertools.count()
    found = look_at([program_of(lambda x: (x, x.view(-1) if next(calls) else x.clone()))])
    assert list(found.found) == ["other results watched"]


def test_garbage_of_one_measurement_is_not_collected_in_the_next() -> None:
    with measured() as first:
        cycle: list[Any] = [torch.ones(1 << 16)]
        cycle.append(cycle)
        del cycle
    with measured() as second:
        kept = [[None] for _ in range(100_000)]  # more than any threshold
    assert (len(kept), sum(first), sum(second)) == (100_000, 1 << 18, 0)


def test_an_op_that_ends_its_process_is_a_row_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    rows = [pair["rows"] for pair in many([0, 1], 1, others=False)]
    assert [row["found"] for (row,) in rows] == [{"crashed": ["abs[float32]: 1"]}, {"crashed": ["abs[bfloat16]: 1"]}]


@pytest.mark.long
def test_the_op_audit_counts_what_became_of_every_program() -> None:
    result = quick("op_audit")
    assert {row["dtype"] for row in result.rows} >= {"float32", "complex64", "int64"}
    assert all(row["identical"] + row["unwritten"] >= row["programs"] > 0 for row in result.rows)
    assert [check.measured for check in result.checks] == [0]
