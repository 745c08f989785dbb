"""The block engine on a real CUDA device: the same bits, less memory, nothing left behind."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.quantize import pack, pack_bits
from spillway.errors import SpillFullError
from spillway.methods.actions import LOSSLESS, Action
from tests.gpu.models import DEVICE, Residual

pytestmark = pytest.mark.gpu

STEPS = 3


class Attending(nn.Module):
    """A layer with fused attention, with and without dropout in it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down, self.dropout = nn.Linear(256, 1024), nn.Linear(1024, 256), dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(self.norm(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = x + F.dropout(self.out(found.transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


class Case(NamedTuple):
    model: nn.Module
    blocks: list[str]
    shape: tuple[int, ...]


def case(name: str) -> Case:
    torch.manual_seed(5)
    blocks: list[nn.Module]
    if name == "pictures":
        blocks = [Residual(32) for _ in range(6)]
        head: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
        model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *head)
        return Case(model.to(DEVICE), [str(number) for number in range(1, 7)], (64, 3, 64, 64))
    blocks = [Attending(0.1 if name == "attention with dropout" else 0.0) for _ in range(6)]
    model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 10))
    return Case(model.to(DEVICE), [str(number) for number in range(1, 7)], (16, 512, 64))


class Trained(NamedTuple):
    found: list[Tensor]
    peak: int
    engine: BlockEngine | None


def train(
    name: str, action: Action | None, *, autocast: bool = False, under_way: int | None = None, **rest: Any
) -> Trained:
    model, blocks, shape = case(name)
    engine = None
    if action is not None:
        engine = BlockEngine(model, blocks, actions=lambda block, call: action, **rest)
        engine.read_ahead = engine.write_behind = under_way
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.cuda.manual_seed(7)
    batches = torch.Generator(DEVICE).manual_seed(9)
    found: list[Tensor] = []
    peak = 0
    for step in range(STEPS):
        batch = torch.randn(shape, device=DEVICE, generator=batches)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(batch).float().square().mean()
        loss.backward()
        peak = max(peak, torch.cuda.max_memory_allocated()) if step else 0
        optimizer.step()
        found.append(loss.detach().cpu())
    found += [tensor.detach().cpu() for tensor in (*model.parameters(), *model.buffers())]
    found.append(torch.cuda.get_rng_state(DEVICE))
    if engine is not None:
        engine.close()
    return Trained(found, peak, engine)


@functools.cache
def plain(name: str, *, autocast: bool = False) -> Trained:
    return train(name, None, autocast=autocast)


def equal(one: Trained, other: Trained) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.found, other.found, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("action", LOSSLESS)
@pytest.mark.parametrize("name", ["pictures", "attention", "attention with dropout"])
def test_steps_end_as_plain_ones_do(name: str, action: Action, autocast: bool) -> None:
    expected = plain(name, autocast=autocast)
    assert equal(expected, train(name, None, autocast=autocast)), "plain training itself is not the same twice"
    assert equal(expected, train(name, action, autocast=autocast))


@pytest.mark.parametrize("action", [action for action in LOSSLESS if action is not Action.KEEP])
def test_less_device_memory_is_handed_out_than_without_the_engine(action: Action) -> None:
    assert train("attention", action).peak < 0.8 * plain("attention").peak


def test_fused_attention_and_products_run_once() -> None:
    engine = train("attention", Action.SELECTIVE).engine
    assert engine is not None
    assert all(report.skipped_ops >= 4 for report in engine.calls)


@pytest.mark.parametrize("nbytes", [0, 1 << 40])
def test_bytes_are_right_however_many_are_under_way(nbytes: int) -> None:
    found = train("pictures", Action.OFFLOAD, under_way=nbytes)
    assert equal(plain("pictures"), found)


def test_another_stream_finds_the_bytes() -> None:
    model, blocks, shape = case("pictures")
    batch = torch.randn(shape, device=DEVICE)
    model(batch).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model, blocks, shape = case("pictures")
    with BlockEngine(model, blocks, actions=lambda block, call: Action.OFFLOAD):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = model(batch).square().mean()
        torch.cuda.current_stream().wait_stream(stream)
        loss.backward()
        torch.cuda.synchronize()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_nothing_stays_pinned_or_allocated() -> None:
    train("pictures", Action.OFFLOAD)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        trained = train("pictures", Action.OFFLOAD, host_budget="2GiB")
        assert trained.engine is not None
        assert trained.engine._runtime.store is None
        del trained
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_a_full_host_budget_is_said() -> None:
    with pytest.raises(SpillFullError, match="host_budget="):
        train("pictures", Action.OFFLOAD, host_budget="16MiB")


@pytest.mark.parametrize("action", [action for action in Action if action.lossy])
def test_lossy_actions_hold_less_and_change_the_gradients_alone(action: Action) -> None:
    expected, got = plain("attention"), train("attention", action, lossy=True)
    assert torch.equal(expected.found[0], got.found[0]), "the first loss"
    assert not equal(expected, got)
    assert got.peak < expected.peak


@pytest.mark.parametrize("positive", [False, True])
def test_values_are_quantized_on_the_device_as_they_are_on_the_cpu(positive: bool) -> None:
    flat = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).cuda()
    flat = flat.relu() if positive else flat
    packed, mask = pack(flat, 4, torch.Generator("cuda").manual_seed(0)), pack(flat > 0, None, None)
    assert packed is not None
    assert mask is not None
    back = packed[1].unpack(packed[0])
    assert torch.equal(back == 0, flat == 0)
    assert float((back - flat).abs().max()) < float(flat.max() - flat.min()) / 14
    assert torch.equal(mask[1].unpack(mask[0]), flat > 0)
    assert mask[0].cpu().tolist() == pack_bits((flat > 0).cpu()).tolist()
