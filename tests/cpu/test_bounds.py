"""Cheap bounds are close where they are meant to be, and never too low; the op audit tries every op of torch's own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import spillway
from spillway.engines.tensors.bounds import bound_of
from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.mode import Completion, Seen
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import Sizes
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.methods import LRU

aten = torch.ops.aten
CLOSE = 1024
"""Bytes by which a bound may be too high."""


def some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


IMAGES = some(4, 6, 33, 20)
ROWS = some(32, 7, 64)
POOLED = torch.max_pool2d(IMAGES, 2)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "relu": (aten.relu.default, (ROWS,)),
    "relu of half precision": (aten.relu.default, (ROWS.bfloat16(),)),
    "gelu_backward": (aten.gelu_backward.default, (ROWS, ROWS)),
    "threshold_backward": (aten.threshold_backward.default, (ROWS, ROWS, 0)),
    "softmax": (aten._softmax.default, (ROWS, -1, False)),
    "softmax backward": (aten._softmax_backward_data.default, (ROWS, ROWS, -1, torch.float32)),
    "dropout": (aten.native_dropout.default, (ROWS, 0.5, True)),
    "add": (aten.add.Tensor, (ROWS, ROWS)),
    "a number": (aten.mul.Tensor, (ROWS, 2.0)),
    "broadcast": (aten.add.Tensor, (some(32, 1, 64), some(7, 1))),
    "compared": (aten.gt.Scalar, (ROWS, 0)),
    "filled": (aten.masked_fill.Scalar, (ROWS, some(7, 64) > 0, 1.0)),
    "sum of all": (aten.sum.default, (ROWS,)),
    "layer norm": (aten.native_layer_norm.default, (ROWS, [64], None, None, 1e-5)),
    "batch norm": (aten.native_batch_norm.default, (IMAGES, None, None, None, None, True, 0.1, 1e-5)),
    "group norm": (aten.native_group_norm.default, (IMAGES, None, None, 4, 6, 660, 3, 1e-5)),
    "product": (aten.mm.default, (some(100, 30), some(30, 200))),
    "convolution": (aten.convolution.default, (IMAGES, some(8, 3, 5, 3), None, [2, 1], [1], [1, 2], False, [0], 2)),
    "transposed": (aten.convolution.default, (IMAGES, some(6, 4, 3, 3), None, [2], [1], [1], True, [1, 0], 2)),
    "signal": (aten.convolution.default, (some(4, 6, 100), some(8, 6, 5), some(8), [1], [0], [1], False, [0], 1)),
    "pooled backward": (
        aten.max_pool2d_with_indices_backward.default,
        (POOLED, IMAGES, [2, 2], [2, 2], [0, 0], [1, 1], False, aten.max_pool2d_with_indices(IMAGES, [2, 2])[1]),
    ),
    "upsampled": (aten.upsample_nearest2d.default, (IMAGES, [66, 40])),
    "embedding": (aten.embedding.default, (some(100, 64), torch.arange(90).view(9, 10))),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        (some(9, 10, 64), torch.arange(90).view(9, 10), 100, -1, False),
    ),
    "slice backward": (aten.slice_backward.default, (some(4, 7), [32, 7], 0, 0, 4, 1)),
}
ODD: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "whole numbers": (aten.exp.default, (torch.arange(1000, dtype=torch.int8),)),
    "two dtypes": (aten.add.Tensor, (ROWS, ROWS.double())),
    "pooled": (aten.max_pool2d_with_indices.default, (IMAGES, [3, 2], [2], [1, 0], [1], True)),
    "mixed": (aten.silu_backward.default, (ROWS.bfloat16(), ROWS)),
    "a gradient that is broadcast": (aten.threshold_backward.default, (ROWS[:1], ROWS, 0)),
    "a gradient of booleans": (aten.native_dropout_backward.default, (ROWS > 0, ROWS > 0, 2.0)),
    "a gradient that is broadcast over a mask": (aten.native_dropout_backward.default, (ROWS[:1], ROWS > 0, 2.0)),
    "channels that the shape does not tell": (
        aten.native_group_norm_backward.default,
        (some(2, 1, 2400), some(2, 1, 2400), some(2, 3), some(2, 3), some(600), 2, 600, 4, 3, [True, True, True]),
    ),
    "sum of rows": (aten.sum.dim_IntList, (some(3, 100, 30), [0])),
    "sum in another dtype": (aten.mean.dim, (IMAGES.bfloat16(), [-1, -2], True)),
    "an empty dimension": (aten.sum.dim_IntList, (some(0, 1000), [0])),
    "new": (aten.zeros.default, ([30, 40],)),
    "no dimension": (aten.sum.dim_IntList, (ROWS, [])),
}


def created(func: Any, args: tuple[Any, ...]) -> int:
    given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
    storages = [tensor.untyped_storage() for tensor in tensors_of(func(*args))]
    return sum(storage.nbytes() for storage in storages if storage._cdata not in given)


def bound(func: Any, args: tuple[Any, ...]) -> int:
    found = OpInfo(func).bound
    assert found is not None
    nbytes = found(args)
    assert nbytes is not None
    return nbytes


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_bound_is_close(call: tuple[Any, tuple[Any, ...]]) -> None:
    made = created(*call)
    assert made <= bound(*call) <= made + CLOSE


@pytest.mark.parametrize("call", ODD.values(), ids=ODD)
def test_a_bound_is_high_enough_for_what_is_unusual(call: tuple[Any, tuple[Any, ...]]) -> None:
    assert created(*call) <= bound(*call)


def test_a_call_of_an_unusual_kind_has_no_bound_and_raises_nothing() -> None:
    convolution, _ = bound_of("aten::convolution", creates=True)
    pair, _ = bound_of("aten::add", creates=True)
    upsampled, _ = bound_of("aten::upsample_nearest2d", creates=True)
    assert convolution is not None
    assert pair is not None
    assert upsampled is not None
    assert convolution((IMAGES, some(8, 6, 3, 3))) is None
    assert convolution((IMAGES, some(8, 6), None, [1], [0], [1], False, [0], 1)) is None
    assert pair((ROWS, None)) is None
    assert upsampled((IMAGES, None, [2.0, 2.0])) is None
    assert pair((1, 2)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([some(2, 3), some(4, 3)])
    assert pair((nested, nested)) is None


def test_calls_of_an_unusual_kind_run_in_a_session() -> None:
    engine = TensorEngine(LRU(), 1 << 26)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([some(3, 8), some(5, 8)], layout=torch.jagged)
        wanted = [(nested + torch.ones(8)).values(), torch.add(1, 2), torch.nn.LayerNorm(8)(nested).values()]
        engine.begin_step([])
        try:
            found = [(nested + torch.ones(8)).values(), torch.add(1, 2), torch.nn.LayerNorm(8)(nested).values()]
        finally:
            engine.end_step()
            engine.close()
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_a_step_with_room_goes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    long: list[str] = []
    run = TensorEngine.run_short_of_room

    def counted(self: TensorEngine, seen: Seen, complete: Completion) -> Any:
        long.append(seen.info.name)
        return run(self, seen, complete)

    monkeypatch.setattr(TensorEngine, "run_short_of_room", counted)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(6, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()
    )
    engine = TensorEngine(LRU(), 1 << 26)
    engine.begin_step([("known", tensor) for tensor in (IMAGES, *model.parameters(), *model.buffers())])
    try:
        model(IMAGES).sum().backward()
    finally:
        engine.end_step()
        engine.close()
    assert long == []


def _made_wider() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    rows = [some(3, 64), some(40, 64)]
    return {
        "dequantize": (aten.dequantize.self, (torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8),)),
        "padded": (aten.to_padded_tensor.default, (torch.nested.nested_tensor(rows), 0.0)),
        "padded jagged": (
            aten.to_padded_tensor.default,
            (torch.nested.nested_tensor(rows, layout=torch.jagged), 0.0),
        ),
        "tangent": (aten._new_zeros_with_same_feature_meta.default, (some(1, 64).expand(9, 64), ROWS[0, :1, :].t())),
        "tangents": (aten._new_zeros_with_same_feature_meta.default, (some(64, 1), ROWS[:, :, 0].t()[0, :, None])),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["dequantize", "padded", "padded jagged", "tangent", "tangents"])
def test_what_an_op_makes_of_narrow_short_or_partial_tensors_is_not_underestimated(name: str) -> None:
    func, args = _made_wider()[name]
    expected = Sizes().expected(OpInfo(func), args, {})[1]
    assert expected >= func(*args).untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("func", "args"), [(aten.rand.default, ([64, 64],)), (aten.div.Tensor, (torch.ones(64, 64, dtype=torch.int64), 3))]
)
def test_what_a_call_creates_is_known_for_each_default_dtype(func: Any, args: tuple[Any, ...]) -> None:
    sizes, info = Sizes(), OpInfo(func)
    for dtype in (torch.float32, torch.float64, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            assert sizes.expected(info, args, {})[1] == func(*args).nbytes == 64 * 64 * dtype.itemsize
        finally:
            torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "call",
    [
        (aten.mul.out, (ROWS.bfloat16(), ROWS.bfloat16()), {"out": torch.empty(0)}),
        (aten.exp.out, (ROWS.bfloat16(),), {"out": torch.empty(0, dtype=torch.float64)}),
        (aten.mm.out, (some(64, 8).half(), some(8, 64).half()), {"out": torch.empty(0, dtype=torch.float16)}),
        (aten._empty_affine_quantized.default, ([64, 32],), {"dtype": torch.qint32, "scale": 0.1, "zero_point": 0}),
        (aten._empty_affine_quantized.default, ([64, 32],), {"dtype": torch.qint8, "scale": 0.1, "zero_point": 0}),
    ],
    ids=["mul", "exp", "mm", "qint32", "qint8"],
)  # fmt: skip
def test_what_has_to_grow_and_what_has_no_operand_is_told_whole(call: tuple[Any, tuple[Any, ...], Any]) -> None:
    func, args, kwargs = call
    info = OpInfo(func)
    told = Sizes().expected(info, args, kwargs)[1]
    bound = info.bound(args) if info.bound is not None else told
    made = func(*args, **kwargs).untyped_storage().nbytes()
    assert made <= min(told, bound) <= made + CLOSE


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.native_dropout.default, (ROWS, 0.5, False)),
        (aten.native_dropout.default, (ROWS, 0.0, True)),
        (aten.select_scatter.default, (some(1, 64).expand(512, 64), some(64), 0, 0)),
        (aten.slice_scatter.default, (some(1, 64).expand(512, 64), some(9, 64), 0, 0, 9)),
        (aten.diagonal_scatter.default, (some(1, 64).expand(64, 64), some(64))),
        (aten.as_strided_scatter.default, (some(1, 64).expand(512, 64), some(64), [64], [1], 0)),
    ],
    ids=["dropout that is off", "dropout of nothing", "select", "slice", "diagonal", "strided"],
)
def test_what_a_kernel_copies_is_told_where_its_meta_function_or_a_storage_does_not(
    func: Any, args: tuple[Any, ...]
) -> None:
    assert Sizes().expected(OpInfo(func), args, {})[1] >= created(func, args)


def test_what_an_op_makes_on_the_meta_device_is_not_believed_of_real_tensors() -> None:
    model, budget = torch.nn.Linear(128, 128), 4 << 20
    with spillway.manage(model, torch.optim.SGD(model.parameters()), budget=budget, method="lru") as memory:
        for _ in range(2):
            x = torch.randn(1024, 128)
            with memory.step(x):
                torch.empty(x.shape, device="meta").clone()
                copies = [x.clone() for _ in range(12)]
                model(copies[-1]).square().mean().backward()
            assert memory.history[-1].peak_bytes <= budget
