"""Every shorter way to call an op arrives at that op, with the arguments that it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.tensors.bindings import BINDINGS, WITH_KEYWORDS, quickest_call

Sample = tuple[tuple[Any, ...], dict[str, Any]]


class Arrivals(TorchDispatchMode):
    """Notes which overloads arrive, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func.name(), args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def samples(overload: str) -> list[Sample]:
    """Calls of the overload in every form in which the dispatcher may hand it over: tensors of several dtypes, numbers
    in the place of a tensor where torch wraps them, optional arguments left out and given."""
    name = overload.removeprefix("aten::")
    square, other = torch.rand(3, 3) + 0.1, torch.rand(3, 3) + 0.1
    counts, batch = torch.arange(1, 10).reshape(3, 3), torch.rand(2, 3, 3)
    scalar, parameter = torch.tensor(2.0), torch.nn.Parameter(torch.rand(3, 3) + 0.1)
    unary = [(square,), (batch,), (parameter,), (scalar,)]
    if name.endswith(".Tensor"):
        calls = [(square, other), (square, scalar), (square, 2.0), (square, 2), (batch, square)]
        calls += [(parameter, parameter), (square, counts)]
        calls += [] if name.startswith("sub") else [(square, True)]
        calls += [] if "_." in name else [(counts, 2.5), (counts, counts), (square, 2j), (scalar, square)]
        return [(call, {}) for call in calls]
    given: dict[str, list[tuple[Any, ...]]] = {
        "mm": [(square, other), (square, parameter)],
        "bmm": [(batch, batch)],
        "addmm": [(square, other, square), (square[0], other, square), (scalar, other, square)],
        "baddbmm": [(batch, batch, batch), (square, batch, batch)],
        "transpose.int": [(square, 0, 1), (batch, -1, 0)],
        "select.int": [(square, 0, 1), (batch, -1, -2)],
        "unsqueeze": [(square, 0), (square, -1)],
        "squeeze.dim": [(square[None], 0), (square, -1)],
        "permute": [(square, [1, 0]), (batch, [2, 0, 1]), (scalar, [])],
        "t": [(square,), (square[0],), (parameter,)],
        "native_layer_norm": [(square, [3], other[0], scalar.expand(3), 1e-5), (square, [3], None, None, 1e-5)],
        "sum.dim_IntList": [(square, [0]), (batch, [0, 1], True), (square, None), (square, []), (counts, [1])],
        "mean.dim": [(square, [0]), (batch, [0, 1], True), (square, None)],
        "native_dropout": [(square, 0.5, True), (square, 0.5, False), (square, 0.5, None)],
        "_softmax": [(square, 1, False), (batch, -1, False)],
        "_log_softmax": [(square, 1, False), (batch, -1, False)],
        "_softmax_backward_data": [(square, other, 1, torch.float32)],
        "_log_softmax_backward_data": [(square, other, 1, torch.float32)],
        "maximum": [(square, other), (counts, counts)],
        "minimum": [(square, other), (counts, counts)],
        "addcmul": [(square, other, other)],
        "addcdiv": [(square, other, other)],
        "view": [(square, [9]), (square, [-1, 1]), (scalar, []), (batch, [6, 3])],
        "expand": [(square[0], [3, 3]), (scalar, [2, 2]), (square, [2, -1, -1])],
        "lerp_.Scalar": [(square, other, 0.5), (square, other, 1)],
        "addcmul_": [(square, other, other)],
        "addcdiv_": [(square, other, other)],
    }
    calls = [(call, {}) for call in given.get(name, unary)]
    if name in ("addcmul_", "addcdiv_"):
        calls += [((square, other, other), {"value": value}) for value in (0.5, 2)]
    if name == "clone":
        formats = (torch.contiguous_format, torch.preserve_format)
        calls += [((square.t(),), {"memory_format": memory_format}) for memory_format in formats]
    return calls


def arrival(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with torch.no_grad(), Arrivals() as arrivals:
        out = call(*args, **kwargs)
    return arrivals.seen, out


@pytest.mark.parametrize("overload", sorted(BINDINGS))
def test_a_binding_arrives_at_its_overload_with_the_same_arguments(overload: str) -> None:
    name, _, variant = overload.removeprefix("aten::").partition(".")
    func = getattr(getattr(torch.ops.aten, name), variant or "default")
    positional, keyword = quickest_call(func)
    assert positional is BINDINGS[overload]
    for args, kwargs in samples(overload):
        wanted, _ = arrival(func._op, args, kwargs)
        found, _ = arrival(keyword if kwargs else positional, args, kwargs)
        assert [seen[0] for seen in found] == [overload]
        assert plain(found) == plain(wanted)


def plain(seen: list[Any]) -> Any:
    """Arguments that can be compared: tensors are the same objects, and numbers are told from tensors and bools."""
    return [(name, [_plain(a) for a in args], {k: _plain(v) for k, v in kwargs.items()}) for name, args, kwargs in seen]


def _plain(value: Any) -> Any:
    return id(value) if isinstance(value, torch.Tensor) else (type(value), repr(value))


def test_keywords_go_through_the_overload_unless_the_binding_is_known_to_take_them() -> None:
    for overload in sorted(BINDINGS):
        name, _, variant = overload.removeprefix("aten::").partition(".")
        func = getattr(getattr(torch.ops.aten, name), variant or "default")
        assert (quickest_call(func)[1] is func._op) == (overload not in WITH_KEYWORDS)


def test_an_overload_without_an_entry_is_called_as_it_came() -> None:
    func = torch.ops.aten.mul.Scalar
    assert quickest_call(func) == (func._op, func._op)
