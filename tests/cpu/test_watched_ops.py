from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spillway.engines.tensors.engine import TensorEngine
from tests.cpu.op_samples import database
from tests.cpu.watched_ops import DTYPES, Program, look_at, programs

FULL = os.environ.get("SPILLWAY_FULL_AUDIT") == "1"

OTHERWISE_UNDER_A_MODE = (
    "cumprod", "linalg.cond", "linalg.eigvals", "linalg.eigvalsh", "linalg.matrix_norm", "linalg.matrix_rank",
    "linalg.svdvals", "masked.prod", "matrix_exp", "nn.functional.bilinear", "nn.functional.fold",
    "nn.functional.unfold", "prod", "sparse.mm",
)  # fmt: skip
"""Ops that came out otherwise while a dispatch mode was active, or passed the budget."""


def chosen() -> list[Any]:
    ops = database()
    return list(ops) if FULL else [*(op for op in ops if op.name in OTHERWISE_UNDER_A_MODE), *ops[::12]]


def test_ops_come_out_the_same_watched_and_the_account_is_what_was_allocated() -> None:
    found = look_at(programs(dtypes=DTYPES if FULL else DTYPES[:1], samples=3 if FULL else 1, ops=chosen()))
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
