"""Ops over lists of tensors, whose elements do not fit together, run on a few at a time with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.tensors.lists import Elements
from spillway.engines.tensors.ops import arguments_per_element
from spillway.errors import BudgetInfeasible
from tests.cpu.benchmarks_quick import quick
from tests.cpu.training import frozen

ELEMENTS = 6
WIDTH = 97
"""Odd, so that kernels have a remainder."""
ONE = WIDTH * WIDTH * 4


def _list_ops() -> Iterator[Any]:
    for schema in torch._C._jit_get_all_schemas():
        if arguments_per_element(schema) and not schema.overload_name.endswith("out"):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            yield getattr(packet, schema.overload_name or "default")


def _tensors(seed: int) -> list[Tensor]:
    """Between 0.1 and 0.9, where every function is defined; one element is much smaller than the others."""
    drawn = torch.Generator().manual_seed(seed)
    sizes = [(WIDTH, WIDTH)] * (ELEMENTS - 1) + [(7, 7)]
    return [torch.rand(size, generator=drawn).mul_(0.8).add_(0.1) for size in sizes]


def _arguments(op: Any) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, argument in enumerate(op._schema.arguments):
        if argument.has_default_value() and argument.name not in ("grad_scale", "found_inf"):
            continue
        value = _value(argument.name, str(argument.type), place)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(name: str, kind: str, place: int) -> Any:
    if name == "state_steps":
        return [torch.tensor(float(2 + number)) for number in range(ELEMENTS)]
    if kind == "List[Tensor]":
        return _tensors(place)
    if kind.startswith("List["):
        return [0.25 + number / 8 for number in range(ELEMENTS)]
    if name == "scalars":
        return torch.linspace(0.2, 0.7, ELEMENTS)
    if "Tensor" in kind:  # found_inf holds no infinity
        return torch.tensor(0.0 if name == "found_inf" else 0.5)
    if kind == "bool":
        return name == "amsgrad"
    return 0.5


def _under(budget: int | None, run: Callable[[], Any]) -> tuple[Any, list[spillway.StepReport]]:
    with spillway.manage(nn.Linear(2, 2), budget=budget, method="lru") as memory:
        with memory.step():
            found = run()
        return frozen(found), memory.history


def _lists(op: Any) -> int:
    """Tensors that one element needs."""
    return sum(str(argument.type) == "List[Tensor]" for argument in (*op._schema.arguments, *op._schema.returns))


def _called(op: Any) -> Any:
    args, kwargs = _arguments(op)
    with torch.no_grad():
        out = op(*args, **kwargs)
    return frozen((out, args, kwargs, [tensor._version for tensor in args[0]] if isinstance(args[0], list) else None))


@pytest.mark.long(but=3)
@pytest.mark.parametrize("lists", sorted({_lists(op) for op in _list_ops()}))
def test_an_op_over_lists_needs_no_more_than_its_largest_element(lists: int) -> None:
    ops = [op for op in _list_ops() if _lists(op) == lists]
    expected = [_called(op) for op in ops]
    with spillway.manage(nn.Linear(2, 2), budget=max(lists, 2) * ONE + 12 * 1024, method="lru") as memory:
        for op, plainly in zip(ops, expected, strict=True):
            with memory.step():
                assert _called(op) == plainly, op
    assert all(report.peak_bytes <= report.allowed for report in memory.history)
    left = [report.moves + report.drops for report in memory.history]
    assert [op for op, count in zip(ops, left, strict=True) if not count] == []


CUT = ["_fused_adamw_", "_fused_sgd_", "_foreach_addcmul_", "_foreach_addcmul", "_foreach_sub", "_foreach_lerp"]


@pytest.mark.parametrize("name", CUT)
def test_an_element_of_many_tensors_needs_no_more_than_two(name: str) -> None:
    ops = [op for op in _list_ops() if op._schema.name == f"aten::{name}"]
    expected = [_called(op) for op in ops]
    with spillway.manage(nn.Linear(2, 2), budget=2 * ONE + 12 * 1024, method="lru") as memory:
        for op, plainly in zip(ops, expected, strict=True):
            with memory.step():
                assert _called(op) == plainly, op
    assert all(report.peak_bytes <= report.allowed for report in memory.history)


def test_an_element_without_numbers_has_no_parts() -> None:
    with spillway.manage(nn.Linear(2, 2), budget=ONE, method="lru") as memory, memory.step():
        lists, engine = [[torch.zeros(0) + 1] for _ in range(3)], memory._engine
        info = engine.info_of(torch.ops.aten._foreach_addcmul.Scalar)
        assert Elements(engine.find, info, lists, {}).parts(slice(None)) == []


@pytest.mark.parametrize("scalars", [torch.ones(3), torch.tensor(1.0)])
def test_lists_that_do_not_match_are_complained_of_by_torch_or_refused(scalars: Tensor) -> None:
    lists = [list(torch.ones(4, WIDTH, WIDTH).unbind()) for _ in range(3)]
    with (
        pytest.raises((RuntimeError, spillway.BudgetInfeasible)),
        spillway.manage(nn.Linear(2, 2), budget=8 * ONE, method="lru") as memory, memory.step(),
    ):  # fmt: skip
        made = [[one + 0 for one in each] for each in lists]
        torch._foreach_addcmul(*made, scalars)


def _in_place_over_views() -> list[Tensor]:
    flat = torch.linspace(0, 1, ELEMENTS * WIDTH * WIDTH)
    views = list(flat.view(ELEMENTS, WIDTH, WIDTH).unbind())
    others = [*_tensors(1)[:-1], torch.ones(WIDTH, WIDTH)]
    torch._foreach_add_(views, others, alpha=0.5)
    torch._foreach_mul_(others, views)
    return [flat, *others]


def _elements_that_are_operands_of_others() -> list[Tensor]:
    chain = _tensors(1)[:-1]
    torch._foreach_add_(chain[1:], chain[:-1])  # each element reads what the one before has written
    torch._foreach_mul_(chain, chain[0].sum())
    return chain


def _twice_the_same_element() -> list[Tensor]:
    one, *others = _tensors(1)[:-1]
    torch._foreach_add_([one, one, *others, one], 0.5)
    return [one, *others]


def _results_that_are_used() -> Any:
    first = _tensors(1)
    roots = torch._foreach_sqrt(first)
    torch._foreach_add_(roots, 1e-3)
    quotients = torch._foreach_div(first, roots)
    torch._foreach_copy_(first, quotients)
    return first, roots, torch._foreach_norm(quotients), torch._foreach_max(roots)


def _a_list_of_another_length() -> str:
    first, second = _tensors(1), _tensors(2)[:-1]
    with pytest.raises(RuntimeError) as told:
        torch._foreach_add_(first, second)
    return str(told.value)


def _an_infinity_in_the_third() -> Any:
    gradients = _tensors(1)
    gradients[2][5, 5] = torch.inf
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.5))
    assert found.item() == 1
    parameters, first, second = _tensors(2), _tensors(3), _tensors(4)
    steps = [torch.tensor(3.0) for _ in parameters]
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_(
        parameters, gradients, first, second, [], steps, amsgrad=False, maximize=False, found_inf=found, **numbers
    )
    return gradients, found, parameters, first, second, steps


def _with_a_graph() -> Any:
    leaves = [tensor.requires_grad_() for tensor in _tensors(1)]
    powers = torch._foreach_mul(torch._foreach_exp(leaves), 0.5)
    torch.stack([power.sum() for power in powers]).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    "program",
    [
        _in_place_over_views, _elements_that_are_operands_of_others, _twice_the_same_element, _results_that_are_used,
        _an_infinity_in_the_third, _with_a_graph,
    ],
)  # fmt: skip
def test_lists_with_something_particular_about_them_are_cut_with_the_same_bits(program: Callable[[], Any]) -> None:
    expected = frozen(program())
    budgets = [elements * ONE + 12 * 1024 for elements in (7, 8, 9, 12)]
    moves = 0
    for budget in budgets if program is _in_place_over_views else [4 * ONE + 12 * 1024, *budgets]:
        found, (report,) = _under(budget, program)
        assert found == expected
        assert report.peak_bytes <= report.allowed
        moves += report.moves
    assert moves > 0


def test_where_a_later_element_has_no_room_nothing_is_written() -> None:
    """A turned tensor is not cut into parts."""
    made = [nn.Parameter(torch.randn(side, side)) for side in (64, 300, 300)]
    before = frozen(made)
    memory = spillway.manage(nn.ParameterList(made), budget="560 KiB", method="lru")
    with memory, pytest.raises(BudgetInfeasible), memory.step(), torch.no_grad():
        torch._foreach_add_([made[0], made[1].t()], [made[0] * 1, made[2]])
    assert frozen(made) == before


def test_lists_that_do_not_match_are_left_to_torch_to_complain_of() -> None:
    assert _under(12 * ONE, _a_list_of_another_length)[0] == _a_list_of_another_length()


@pytest.mark.long
def test_forms_of_an_optimizer_are_held_to_the_floor_of_the_single_tensor_form() -> None:
    rows = quick("list_optimizers").rows
    assert [row["form"] for row in rows] == ["single", "foreach", "fused"] * 4
    for row in rows:
        assert row["ratio"] < 1.5
        assert row["verdict"] == "identical"
