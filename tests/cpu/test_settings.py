"""Settings of torch's that a step changes between forward and backward: what is run again runs under the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

import spillway
from spillway import BlockOptions
from spillway.engines.environment import ABOVE_OPS, ATTENTION, EINSUM, GENERAL

opt_einsum: Any = torch.backends.opt_einsum
mkldnn: Any = torch.backends.mkldnn


def deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on)


def precision_of_everything(said: str) -> None:
    with torch.backends.__allow_nonbracketed_mutation():  # torch's own tests, if they were imported, forbid it
        cast(Any, torch.backends).fp32_precision = said


CHANGES: Mapping[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "oneDNN": (torch._C._set_mkldnn_enabled, True, False),
    "NNPACK": (torch._C._set_nnpack_enabled, True, False),
    "oneDNN, deterministic": (torch._C._set_mkldnn_deterministic, False, True),
    "precision of products": (torch.set_float32_matmul_precision, "medium", "highest"),
    "precision of products, the newer way": (
        lambda said: setattr(mkldnn.matmul, "fp32_precision", said),
        "bf16",
        "ieee",
    ),
    "precision of everything": (precision_of_everything, "bf16", "none"),
    "denormals": (torch.set_flush_denormal, True, False),
    "threads": (torch.set_num_threads, 2, 1),
    "deterministic": (deterministic, True, False),
    "flash attention": (torch._C._set_sdp_use_flash, True, False),
    "kernels of attention": (torch._C._set_sdp_priority_order, [1, 2, 0, 3, 4], [0, 2, 1, 3, 4]),
    "einsum": (lambda on: setattr(opt_einsum, "enabled", on), True, False),
}
"""What changes a setting, its value in the forward, and then."""
IN_BLOCKS: Mapping[str, tuple[Callable[[Any], Any], Any, Any]] = {
    **CHANGES,
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "uninitialized memory": (
        lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
        False,
        True,
    ),
    "anomalies": (torch.set_anomaly_enabled, True, False),
    "sparse tensors": (cast(Any, torch._C)._set_check_sparse_tensor_invariants, True, False),
    "distributions": (cast(Any, torch.distributions.Distribution).set_default_validate_args, False, True),
    "converted modules": (torch.__future__.set_overwrite_module_params_on_conversion, True, False),
}
ALL: Any = ABOVE_OPS + GENERAL + EINSUM + ATTENTION


class Block(nn.Module):
    """Convolution, attention, `einsum`, and numbers that are denormal on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.rows = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.rows(relu(self.picture(x)))
        attended = scaled_dot_product_attention(hidden, hidden, hidden)
        products = torch.einsum("bcij,bcjk,bckl->bcil", hidden, hidden * 0.01, hidden)
        tiny = hidden * 1e-38 * 1e-2
        flat = hidden.reshape(-1, 256)
        wide = (flat @ (flat.T @ flat)).reshape(x.shape) * 1e-4
        return torch.tanh(x + wide + attended + products * 1e-3 + tiny * 1e38 * 10)


def trained(method: str | None, budget: int | None, change: tuple[Callable[[Any], Any], Any, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block() for _ in range(4)]), torch.randn(8, 8, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    put, first, then = change
    blocks = BlockOptions(names=["0", "1", "2", "3"]) if method == "checkpoint" else BlockOptions()
    session = spillway.manage(model, optimizer, budget=budget, method=method, blocks=blocks) if method else None
    try:
        for _ in range(2):
            with nullcontext() if session is None else session.step(x):
                put(first)
                loss = model(x).square().mean()
                put(then)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        put(then)
    if session is not None:
        last = session.history[-1]
        assert last.recomputed_ops + last.recomputed_blocks > 0 or method == "lru"
        session.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_run_again_runs_under_the_settings_of_the_first_time(name: str) -> None:
    before = [(flag, flag[0]()) for settings in (GENERAL, EINSUM, ATTENTION) for flag in settings.flags]
    try:
        plain = trained(None, None, CHANGES[name])
        for method, budget in (("dtr", 1000 << 10), ("lru", 1000 << 10), ("checkpoint", 1 << 30)):
            assert all(map(torch.equal, plain, trained(method, budget, CHANGES[name]))), method
    finally:
        for (_, put), value in before:
            put(value)


class Sets(Block):
    """Changes a setting itself, and leaves it so."""

    def __init__(self, put: Callable[[Any], Any], value: Any) -> None:
        super().__init__()
        self.put, self.value = put, value

    def forward(self, x: Tensor) -> Tensor:
        self.put(self.value)
        return super().forward(x)


def trained_by_blocks(
    method: str | None, budget: int | None, change: tuple[Callable[[Any], Any], Any, Any]
) -> tuple[list[Tensor], list[Any]]:
    torch.manual_seed(0)
    put, first, then = change
    put(then)
    model = nn.Sequential(Block(), Sets(put, first), Block(), Sets(put, then), Block())
    optimizer, x, seen = torch.optim.SGD(model.parameters(), 1e-2), torch.randn(8, 8, 16, 16), [ALL.now()]
    blocks = BlockOptions(names=[str(place) for place in range(5)])
    session = spillway.manage(model, optimizer, budget=budget, method=method, blocks=blocks) if method else None
    for _ in range(2):
        with nullcontext() if session is None else session.step(x):
            loss = model(x).square().mean()
            seen.append(ALL.now())
            loss.backward()
            seen.append(ALL.now())
            optimizer.step()
            optimizer.zero_grad()
    if session is not None:
        assert session.history[-1].recomputed_blocks > 0 or method == "auto"
        session.close()
    return [parameter.detach().clone() for parameter in model.parameters()], [*seen, ALL.now()]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_what_a_block_sets_is_put_back_after_its_second_run(name: str) -> None:
    before = [(flag, flag[0]()) for flag in ALL.flags]
    try:
        plain, settings = trained_by_blocks(None, None, IN_BLOCKS[name])
        for method, budget in (("checkpoint", 1 << 30), ("auto", 1400 << 10)):
            parameters, seen = trained_by_blocks(method, budget, IN_BLOCKS[name])
            assert seen == settings, method
            assert all(map(torch.equal, plain, parameters)), method
    finally:
        for (_, put), value in before:
            put(value)


def test_every_setting_can_be_told_and_put_back() -> None:
    for settings in (GENERAL, EINSUM, ATTENTION, ABOVE_OPS):
        present = settings.now()
        assert present == tuple(get() for get, _ in settings.flags)
        for (_, put), value in zip(settings.flags, present, strict=True):
            put(value)
        assert settings.now() == present
    torch.set_flush_denormal(True)
    try:
        assert GENERAL.now() == tuple(get() for get, _ in GENERAL.flags)
    finally:
        torch.set_flush_denormal(False)
