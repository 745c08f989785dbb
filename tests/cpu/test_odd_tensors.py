"""Tensors that are more, or less, than bytes of their own; and ops that nobody may run twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

import spillway
from spillway.engines.tensors.calls import inner_tensors
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.methods import KeepAll
from tests.cpu.pressure import ORDERS

Body = Callable[[nn.Module], list[Tensor]]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])


def plain(body: Body) -> list[Tensor]:
    model = network()
    torch.manual_seed(1)
    return body(model)


def managed(body: Body, order: str, share: float) -> tuple[list[Tensor], spillway.StepReport]:
    """The body as one step, under a share of what it takes when nothing has to leave."""
    model = network()
    with spillway.manage(model, budget=None, method="keep-all") as memory:
        torch.manual_seed(1)
        with memory.step():
            body(model)
        peak = memory.history[0].peak_bytes
    model = network()
    with spillway.manage(model, budget=int(share * peak), method=ORDERS[order]()) as memory:
        torch.manual_seed(1)
        with memory.step():
            found = body(model)
    assert memory.history[0].peak_bytes <= memory.allowed
    return found, memory.history[0]


def trained(model: nn.Module, first: Tensor) -> list[Tensor]:
    loss = model(first).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def sparse(model: nn.Module) -> list[Tensor]:
    """The values of a sparse matrix are nobody's tensor but its own."""
    places = torch.arange(256).repeat(2, 1)
    values = (torch.randn(256) * 2).exp()
    matrix = torch.sparse_coo_tensor(places, values, (256, 256), check_invariants=False)
    del values
    first = trained(model, torch.randn(256, 64))
    return [*first, torch.sparse.mm(matrix, torch.randn(256, 64))]


def wrapped(model: nn.Module) -> list[Tensor]:
    """A wrapper subclass: a storage with a size and no memory."""
    one, other = torch.randn(256, 64).exp(), torch.randn(256, 64).exp()
    both = TwoTensor(one, other)
    first = trained(model, torch.randn(256, 64))
    both = both * 2 + 1
    return [*first, both.a, both.b]


def conjugated(model: nn.Module) -> list[Tensor]:
    """A conjugate view from before, of a storage that is met without it first: its bit is not in its geometry."""
    found = COMPLEX.abs()
    product = (CONJUGATED.T.conj() @ CONJUGATED) * 2
    made = product.conj() @ product
    first = trained(model, torch.randn(256, 64))
    return [found, *first, made * product]


COMPLEX = torch.randn(64, 64, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
CONJUGATED = COMPLEX.conj()


def quantised(model: nn.Module) -> list[Tensor]:
    """A quantizer is not in the geometry either."""
    whole = torch.fake_quantize_per_tensor_affine(torch.randn(256, 64), 0.1, 0, 0, 255)
    packed = torch.quantize_per_tensor(whole, 0.1, 3, torch.quint8)
    back = packed.dequantize()
    return [*trained(model, torch.randn(256, 64)), back]


def resized(model: nn.Module) -> list[Tensor]:
    """Storages without bytes, and with bytes again, as FSDP has them; by a method of theirs, which is no op."""
    whole, later = torch.randn(256, 64), torch.empty(0)
    later.set_(torch.UntypedStorage(0), 0, (256, 64))
    half = whole.sin()
    first = trained(model, torch.randn(256, 64))
    whole.untyped_storage().resize_(0)
    later.untyped_storage().resize_(half.nbytes)
    later.copy_(half)
    second = trained(model, half)
    whole.untyped_storage().resize_(half.nbytes)
    whole.copy_(later * 2)
    return [*first, *second, whole, later]


def inferred(model: nn.Module) -> list[Tensor]:
    """Without autograd nobody takes attention apart: which of its kernels it takes is a setting of that moment."""
    q = torch.randn(1, 2, 128, 32)
    with torch.inference_mode(), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        found = nn.functional.scaled_dot_product_attention(q, q, q)
    first = trained(model, torch.randn(256, 64))
    return [found.clone(), *first]


def batched(model: nn.Module) -> list[Tensor]:
    """Random numbers are drawn again while gradients are batched, within which `vmap` refuses to draw any."""
    x = torch.randn(256, 64, requires_grad=True)
    y = nn.functional.dropout(x, 0.3).sin()
    first = trained(model, torch.randn(256, 64))
    (gradients,) = torch.autograd.grad(y, x, torch.ones(2, 256, 64), is_grads_batched=True)
    return [gradients.sum(0), *first]


@pytest.mark.long(but=15)
@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:TypedStorage")
@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("body", [sparse, wrapped, conjugated, quantised, resized, inferred, batched])
def test_a_step_on_odd_tensors_is_the_same_under_a_budget(body: Body, order: str, share: float) -> None:
    expected = plain(body)
    found, report = managed(body, order, share)
    assert report.moves + report.drops > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("layout", "made", "view"),
    [
        ("sparse_coo", 0.0, Tensor.values),
        ("sparse_coo", 0.0, Tensor.indices),
        ("sparse_coo", 0.0, Tensor.detach),
        ("sparse_coo", 1.0, Tensor.t),
        ("sparse_coo", 1.2, lambda matrix: matrix.unsqueeze(0)),
        ("sparse_csr", 0.0, Tensor.values),
        ("sparse_csr", 0.0, Tensor.col_indices),
        ("sparse_csc", 0.0, Tensor.ccol_indices),
        ("sparse_csc", 0.0, Tensor.t),
    ],
)
def test_a_view_of_a_sparse_tensor_takes_what_it_makes(layout: str, made: float, view: Callable[[Tensor], Any]) -> None:
    matrix = torch.randn(256, 64).relu().to_sparse(layout=getattr(torch, layout)).detach()
    parts = sum(part.untyped_storage().nbytes() for part in inner_tensors(matrix))
    engine = TensorEngine(KeepAll(), int((1 + made) * parts) + 1024)
    try:
        engine.begin_step([("input", matrix)])
        view(matrix)
        engine.end_step()
        assert engine.controller.budget.peak >= int((1 + made) * parts)
    finally:
        engine.close()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_an_evaluation_inside_a_step_is_as_without() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 5, 32), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        with spillway.manage(encoder, budget="1GiB") as memory, memory.step():
            assert torch.equal(encoder(x, src_key_padding_mask=padding), expected)


class Veiled(Tensor):
    """A wrapper that does not say what it wraps."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Veiled:
        make: Any = Tensor
        made: Veiled = make._make_wrapper_subclass(cls, inside.shape, strides=inside.stride(), dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(one.inside if isinstance(one, Veiled) else one for one in args), **(kwargs or {}))
        return Veiled(out) if func is torch.ops.aten.detach.default else out


def _veiled(model: nn.Sequential) -> list[Tensor]:
    return [model[0].weight * 1]  # type: ignore[operator]


def _of_nothing(model: nn.Sequential) -> list[Tensor]:
    nothing = torch._efficientzerotensor(256, 128)
    return [torch.ops.aten.mul.Scalar(nothing, 2.0) for _ in range(12)]


@pytest.mark.parametrize("body", [_veiled, _of_nothing])
def test_what_has_a_size_and_no_memory_neither_counts_nor_leaves(body: Callable[[nn.Sequential], list[Tensor]]) -> None:
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
    if body is _veiled:
        model[0].weight = nn.Parameter(Veiled(torch.randn(128, 128)), requires_grad=False)
    with spillway.manage(model, budget=1_000_000, method="lru") as memory:
        with memory.step():
            kept = body(model)
            model(torch.randn(256, 128)).square().mean().backward()
        report = memory.history[0]
    assert report.moves > 0
    assert report.peak_bytes <= 1_000_000
    assert all(bool(torch.isfinite(one).all()) for one in kept)


def test_a_custom_op_is_never_run_again() -> None:
    calls = []

    @torch.library.custom_op("spillway_tests::noisy", mutates_args=())
    def noisy(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return x + torch.randn_like(x)

    noisy.register_fake(torch.empty_like)

    def body(model: nn.Module) -> list[Tensor]:
        noise = [noisy(torch.ones(256, 64)) for _ in range(4)]
        return [*trained(model, torch.randn(256, 64)), *noise, torch.get_rng_state()]

    expected = plain(body)
    calls.clear()
    found, report = managed(body, "recompute first", 0.6)
    assert len(calls) == 8  # four to learn the peak, four under the budget
    assert report.drops > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Curious(nn.Parameter):
    """A parameter whose subclass hears of torch's functions."""

    heard: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.heard.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight)


def test_a_subclass_hears_of_no_function_that_it_would_not_have_heard_of() -> None:
    def heard(in_session: bool) -> list[str]:
        model = nn.Sequential(Product(), nn.BatchNorm1d(8))
        for layer in model:
            layer.weight = Curious(torch.ones_like(layer.weight))
        x = torch.ones(4, 8, requires_grad=True)  # so that ops of the backward read the weights, out of Python's sight
        with spillway.manage(model, budget="1GiB", method="lru") as memory:
            Curious.heard = []
            with memory.step() if in_session else torch.enable_grad():
                model(x).sum().backward()
            return [*Curious.heard]

    assert heard(in_session=True) == heard(in_session=False)


class Rows(Dataset[Tensor]):
    """Rows that a worker computes: it was forked in the middle of a step."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        rows = torch.arange(64.0).repeat(600, 1) * (index + 1)
        return (rows @ rows.T).sum(dim=1)[:64] * 1e-6  # the product alone is more than the step is allowed


def accumulated(model: nn.Module) -> list[Tensor]:
    for batch in DataLoader(Rows(), batch_size=8, num_workers=1, multiprocessing_context="fork"):
        trained(model, batch.repeat(32, 1))
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("order", ["move first", "copy beside"])
def test_workers_forked_in_a_step_leave_the_spill_file_alone(order: str) -> None:
    expected = accumulated(network())
    model = network()
    with spillway.manage(model, budget="900KiB", method=ORDERS[order]()) as memory, memory.step():
        found = accumulated(model)
    assert memory.history[0].moves > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_flop_counter_around_a_step_does_not_count_what_is_run_again() -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as expected:
        trained(network(), x)
    model = network()
    memory = spillway.manage(model, budget=600_000, method=ORDERS["recompute first"]())
    with memory, FlopCounterMode(display=False) as found, memory.step():
        trained(model, x)
    assert memory.history[0].recomputed_ops
    assert found.get_total_flops() == expected.get_total_flops()


class Sparse(nn.Module):
    """Its product saves a sparse tensor in a layout, made of a parameter or of what has a gradient."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout
        mask = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.9
        self.indices = mask.to_sparse().coalesce().indices()
        self.values, self.linear = nn.Parameter(torch.rand(self.indices.shape[1])), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        sparse = torch.sparse_coo_tensor(self.indices, self.values, (64, 64), check_invariants=False)
        if self.layout is not torch.sparse_coo:
            sparse = sparse.to_dense().to_sparse(layout=self.layout)
        return x + torch.relu(torch.sparse.mm(sparse, self.linear(x)))


@pytest.mark.filterwarnings("ignore:Sparse CS")  # by torch: in beta state
@pytest.mark.parametrize("method", ["checkpoint", "mimose", "auto"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_blocks_that_save_sparse_tensors_run_again(layout: torch.layout, method: str) -> None:
    def trained(budget: int | None, method: str) -> tuple[list[Tensor], list[spillway.StepReport]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Sparse(layout) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            for _ in range(3):
                x = torch.randn(64, 32)
                with memory.step(x):
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return [one.detach() for one in model.parameters()], [*memory.history]

    plain, reports = trained(None, "keep-all")
    found, reports = trained(max(report.peak_bytes for report in reports), method)
    assert all(map(torch.equal, plain, found))
    if method == "checkpoint":  # bytes of compressed layouts cannot be given up
        assert max(report.recomputed_blocks for report in reports) == (4 if layout is torch.sparse_coo else 0)


@pytest.mark.parametrize("method", ["lru", "auto"])
def test_a_sparse_tensor_over_parts_that_are_there_makes_nothing(method: str) -> None:
    def peak(budget: int | None, method: str) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(1000, 64, mode="mean", sparse=True), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            for _ in range(3):
                x = torch.randint(1000, (256, 12))
                with memory.step(x):
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return max(report.peak_bytes for report in memory.history)

    most = peak(None, "keep-all")
    assert peak(most + most // 50, method) <= most + most // 50
