"""What torch has beside plain modules, under both engines: it trains to the plain bits within the budget."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import spillway
from spillway.errors import ModelError, RecomputeError

METHODS = ("lru", "delta", "mimose", "checkpoint", "auto")
WIDTH, LENGTH = 32, 64
Mixes = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """A residual block around something that torch has."""

    def __init__(self, mixes: Mixes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = x + self.down(torch.relu(self.up(self.mixes(self, x))))
        return grown


class Model(nn.Module):
    def __init__(self, mixes: Mixes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mixes) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def flex(block: nn.Module, x: Tensor) -> Tensor:
    """Without gradients of its own: on the CPU it has no backward."""
    heads = x.detach().unflatten(-1, (2, -1)).transpose(1, 2)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
    mixed: Any = flex_attention(heads, heads, heads, score_mod=lambda s, b, h, q, k: s - (q - k) / 8, block_mask=mask)
    result: Tensor = mixed.transpose(1, 2).flatten(2)
    return x + result


def func(block: nn.Module, x: Tensor) -> Tensor:
    """The gradient of an energy, sample by sample."""
    weight: Tensor = block.up.weight  # type: ignore[union-attr,assignment]
    return torch.func.vmap(torch.func.grad(lambda one: (one @ weight.T).sin().sum()))(x) + x


def call_with_others(block: nn.Module, x: Tensor) -> Tensor:
    """With half of its weights."""
    halved = {name: 0.5 * one for name, one in block.up.named_parameters()}  # type: ignore[union-attr]
    mixed: Tensor = torch.func.functional_call(block.up, halved, (x,))  # type: ignore[arg-type]
    return x + mixed[..., :WIDTH]


OFFSETS = torch.tensor([0, LENGTH // 2, 4 * LENGTH])


def nested(block: nn.Module, x: Tensor) -> Tensor:
    """Sequences of two lengths."""
    ragged = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), OFFSETS)
    return (ragged * ragged).values().view_as(x)


def custom(block: nn.Module, x: Tensor) -> Tensor:
    mixed: Tensor = torch.ops.spillway_tests.halved(x)
    return mixed


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An op whose kernel is native code that gets addresses, as in an extension."""
    folder: Path = tmp_path_factory.mktemp("native")
    (folder / "op.c").write_text("void halve(const float* in, float* out, long n) { while (n--) *out++ = *in++ / 2; }")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(folder / "op.so"), str(folder / "op.c")]
    subprocess.run(command, check=True)
    native = ctypes.CDLL(str(folder / "op.so"))

    def halve(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        native.halve(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_long(x.numel()))
        return out

    defined = torch.library.Library("spillway_tests", "FRAGMENT")
    defined.define("halved(Tensor x) -> Tensor")
    defined.impl("halved", halve, "CPU")
    torch.library.register_fake("spillway_tests::halved", torch.empty_like, lib=defined)
    torch.library.register_autograd(
        "spillway_tests::halved", lambda ctx, grad: torch.ops.spillway_tests.halved(grad), lib=defined
    )
    yield
    defined._destroy()


FEATURES: dict[str, Mixes] = {
    "torch.func": func, "functional_call": call_with_others, "nested tensors": nested,
    "custom ops": custom, "flex_attention": flex,
}  # fmt: skip


def train(feature: str, method: str | None, budget: int | None) -> tuple[list[bytes], int]:
    """Losses and weights; the highest peak."""
    torch.manual_seed(0)
    model = Model(FEATURES[feature])
    optimizer = torch.optim.AdamW(model.parameters())
    told: list[bytes] = []

    def step(x: Tensor) -> None:
        loss = (model(x) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.detach().numpy().tobytes())

    batches = torch.randn(6, 4, LENGTH, WIDTH)
    if method is None:
        for x in batches:
            step(x)
        return [*told, *(one.detach().numpy().tobytes() for one in model.parameters())], 0
    with spillway.manage(
        model, optimizer, budget=budget, method=method, report=spillway.ReportOptions(timeline=True)
    ) as memory:
        for x in batches:
            with memory.step(x):
                step(x)
    bits = [*told, *(one.detach().numpy().tobytes() for one in model.parameters())]
    return bits, max(one.peak_bytes for one in memory.history)


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[list[bytes], int]]:
    return {name: (train(name, None, None)[0], train(name, "lru", None)[1]) for name in FEATURES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("feature", FEATURES)
def test_it_trains_to_the_plain_bits_within_the_budget(
    feature: str, method: str, plain: dict[str, tuple[list[bytes], int]]
) -> None:
    if feature == "flex_attention" and method not in ("lru", "delta"):
        pytest.xfail("uncompiled, it compiles itself while it runs, which dynamo refuses within a block")
    bits, peak = plain[feature]
    budget = int((0.8 if method in ("lru", "delta", "auto") else 1.05) * peak)
    found, highest = train(feature, method, budget)
    assert found == bits
    assert highest <= budget


@pytest.mark.filterwarnings("ignore")
def test_a_block_that_makes_its_own_ragged_lengths_is_not_recomputed_and_that_is_said() -> None:
    """Torch gives every tensor of offsets a size of its own, so that a second run is of other sizes."""

    def ragged(block: nn.Module, x: Tensor) -> Tensor:
        made = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), OFFSETS.clone())
        return (made * made).values().view_as(x)

    model = Model(ragged)
    with (
        pytest.raises(
            RecomputeError, match=r"was not the same as the first: saved tensor \d+ is float32 of shape \(2, j"
        ),
        spillway.manage(model, budget="1GiB", method="checkpoint") as memory,
        memory.step(x := torch.ones(4, LENGTH, WIDTH)),
    ):
        model(x).sum().backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["mimose", "checkpoint", "auto"])
def test_a_model_that_is_compiled_as_a_whole_is_told_what_to_compile_and_left_to_the_tensor_engine_by_auto(
    method: str,
) -> None:
    model = Model(custom)
    model.compile(backend="aot_eager")
    if method != "auto":
        with pytest.raises(ModelError, match=r"compiled as a whole.*compile the blocks instead \(block\.compile\(\)\)"):
            spillway.manage(model, budget="1GiB", method=method).step(torch.ones(2)).__enter__()
        return
    with spillway.manage(model, budget="1GiB", method=method) as memory, memory.step(x := torch.ones(4, LENGTH, WIDTH)):
        model(x).sum().backward()
    assert memory.history[0].ops > 0
    torch.compiler.reset()
