"""What torch has beside plain modules, under both engines: it trains to the plain bits within the budget."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import spillway
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.errors import ModelError
from spillway.integrations.automatic_steps import AutomaticSteps
from spillway.methods.actions import Action
from spillway.native.library import compiler

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


def ragged(block: nn.Module, x: Tensor) -> Tensor:
    """Of lengths that the block makes itself: torch gives every tensor of offsets a size of its own."""
    made = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), OFFSETS.clone())
    return (made * made).values().view_as(x)


def extension(block: nn.Module, x: Tensor) -> Tensor:
    """Kernels in C++, one of which writes to what it is given."""
    ops, held = torch.ops.spillway_extension, x.detach() + 1
    ops.halve_(held)
    mixed: Tensor = ops.product(x, held)
    return mixed


SOURCE = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

static at::Tensor product(const at::Tensor& x, const at::Tensor& y) {
  at::Tensor a = x.contiguous(), b = y.contiguous(), out = at::empty_like(a);
  const float *in = a.const_data_ptr<float>(), *by = b.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) to[i] = in[i] * by[i];
  return out;
}

static void halve_(at::Tensor& x) {
  float* to = x.mutable_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] /= 2;
}

TORCH_LIBRARY(spillway_extension, m) {
  m.def("product(Tensor x, Tensor y) -> Tensor");
  m.def("halve_(Tensor(a!) x) -> ()");
}

TORCH_LIBRARY_IMPL(spillway_extension, CPU, m) {
  m.impl("product", product);
  m.impl("halve_", halve_);
}
"""
"""What an extension is: a library that tells torch of its ops when it is loaded."""


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The ops of the extension, with an autograd formula for one of them, and fake results for that one alone."""
    found = compiler()
    if found is None:
        pytest.skip("an extension takes a C++ compiler, and there is none")
    folder = tmp_path_factory.mktemp("extension")
    (folder / "ops.cpp").write_text(SOURCE)
    base = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O0",
        "-w",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    where = [f"-I{base / 'include'}", f"-L{base / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([found, *flags, str(folder / "ops.cpp"), "-o", str(folder / "ops.so"), *where], check=True)
    torch.ops.load_library(folder / "ops.so")
    product = torch.ops.spillway_extension.product

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product(grad, y), product(grad, x)

    added = torch.library.Library("spillway_extension", "FRAGMENT")
    torch.library.register_fake("spillway_extension::product", lambda x, y: torch.empty_like(x), lib=added)
    torch.library.register_autograd(
        "spillway_extension::product", backward, lib=added,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )  # fmt: skip
    yield
    added._destroy()


FEATURES: dict[str, Mixes] = {
    "torch.func": func, "functional_call": call_with_others, "nested tensors": nested, "own lengths": ragged,
    "C++ ops": extension, "flex_attention": flex,
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


@functools.cache
def plain(feature: str) -> tuple[list[bytes], int]:
    """What comes of it without a session, and the peak."""
    return train(feature, None, None)[0], train(feature, "lru", None)[1]


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("feature", FEATURES)
def test_it_trains_to_the_plain_bits_within_the_budget(
    feature: str, method: str, request: pytest.FixtureRequest
) -> None:
    if feature == "C++ ops":
        request.getfixturevalue("ops")
    bits, peak = plain(feature)
    budget = int((0.8 if method in ("lru", "delta", "auto") else 1.05) * peak)
    found, highest = train(feature, method, budget)
    assert found == bits
    assert highest <= budget


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["mimose", "checkpoint", "auto"])
def test_a_model_that_is_compiled_as_a_whole_is_told_what_to_compile_and_left_to_the_tensor_engine_by_auto(
    method: str,
) -> None:
    model = Model(func)
    model.compile(backend="aot_eager")
    if method != "auto":
        with pytest.raises(ModelError, match=r"compiled as a whole.*compile the blocks instead \(block\.compile\(\)\)"):
            spillway.manage(model, budget="1GiB", method=method).step(torch.ones(2)).__enter__()
        return
    with spillway.manage(model, budget="1GiB", method=method) as memory, memory.step(x := torch.ones(4, LENGTH, WIDTH)):
        model(x).sum().backward()
    assert memory.history[0].ops > 0
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_block_with_nested_tensors_of_the_strided_layout_inside_is_kept_and_that_is_said() -> None:
    """They have no shape. Attention on jagged ones makes them."""

    def attention(block: nn.Module, x: Tensor) -> Tensor:
        made = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), OFFSETS.clone())
        heads = made.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return x + mixed.transpose(1, 2).flatten(-2).values().view_as(x)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(Block(attention))), torch.randn(4, LENGTH, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), x)[0]
    with BlockEngine(model, ["0", "0.0"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], plain)
        because = "it has nested tensors inside whose layout is strided"
        assert [report.kept_because for report in engine.calls] == [because, because]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_is_managed_is_exported_as_it_is(strict: bool) -> None:
    """Between steps, whether or not blocks were found by then."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    x = torch.randn(8, 16)
    with spillway.manage(model, torch.optim.SGD(model.parameters()), budget="1GiB", method="checkpoint") as memory:
        for _ in range(2):
            exported = torch.export.export(model, (x,), strict=strict).module()
            assert torch.equal(exported(x), model(x))
            with memory.step(x):
                model(x).sum().backward()
        assert memory.blocks


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_does_not_compile_a_managed_model_and_says_what_to_do() -> None:
    """Blocks have something in front of them, steps that are watched and integrations have hooks."""
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters())
    told = r"script it before it is managed or when its session has ended; torch\.jit\.trace"
    with spillway.manage(model, optimizer, budget="1GiB", method="checkpoint") as memory:
        with memory.step(x):
            model(x).sum().backward()
        with pytest.raises(ModelError, match=told):
            torch.jit.script(model)
        assert torch.equal(torch.jit.script(copy.deepcopy(model))(x), model(x))
    tight = spillway.manage(model, optimizer, budget="20KiB")
    with tight as memory, memory.step(x), pytest.raises(ModelError, match=told):
        torch.jit.script(model)
    with AutomaticSteps(model, optimizer, budget="1GiB", method="delta"):
        for one in (model, pickle.loads(pickle.dumps(model))):
            with pytest.raises(ModelError, match=told):
                torch.jit.script(one)
    assert torch.equal(torch.jit.script(model)(x), model(x))
