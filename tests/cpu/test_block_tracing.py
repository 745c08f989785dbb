"""Blocks within what traces or transforms a forward, or a backward: they run as the user's own modules, with the
results of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

import spillway
from spillway.errors import BudgetInfeasible
from tests.shared import in_turn

WIDTH, ROWS = 64, 256
TRIES: Final = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(torch.tanh(self.first(self.norm(x)))))  # type: ignore[no-any-return]


Ran: TypeAlias = tuple[Tensor | None, list[Any]]
"""A loss to go back from, and what else is to be the same."""


def linearized(model: nn.Module, x: Tensor) -> Ran:
    out, pushed = torch.func.linearize(model, x)
    return out.square().mean() + model(x).mean(), [pushed(torch.ones_like(x))]


def linearized_alone(model: nn.Module, x: Tensor) -> Ran:
    out, pushed = torch.func.linearize(model, x)
    return out.square().mean(), [pushed(torch.ones_like(x))]


def traced(mode: str, *, grad: bool, before: bool = False) -> Callable[[nn.Module, Tensor], Ran]:
    def run(model: nn.Module, x: Tensor) -> Ran:
        parameters = list(model.parameters())

        def function(z: Tensor) -> Any:
            out = model(z)
            return torch.autograd.grad(out.square().mean(), parameters) if grad else out

        out = model(x).square().mean() if before else None
        graph = make_fx(function, **TRACING[mode])(x)
        return out if out is not None else model(x).square().mean(), [graph.code]

    return run


TRACING: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "real": {},
        "symbolic": {"tracing_mode": "symbolic", "_allow_non_fake_inputs": True},
        "pre_dispatch": {"pre_dispatch": True},
    }
)


def without_content(model: nn.Module, x: Tensor) -> Ran:
    loss = model(x).square().mean()
    with FakeTensorMode(allow_non_fake_inputs=True):  # type: ignore[no-untyped-call]
        fake = model(torch.empty(x.shape))
    return loss, [tuple(fake.shape), type(fake).__name__]


def functionalized(model: nn.Module, x: Tensor) -> Ran:
    return torch.func.functionalize(lambda z: model(z))(x).square().mean(), []


def with_tangents(model: nn.Module, x: Tensor) -> Ran:
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.full_like(x, 0.5))))
        return out.square().mean() + tangent.square().mean(), []


def batched(model: nn.Module, x: Tensor) -> Ran:
    out, parameters = model(x), list(model.parameters())
    vectors = torch.stack([torch.ones_like(out), out.detach()])
    return out.square().mean(), list(
        torch.autograd.grad(out, parameters, vectors, is_grads_batched=True, retain_graph=True)
    )


def mapped_backward(model: nn.Module, x: Tensor) -> Ran:
    out, parameters = model(x), list(model.parameters())
    vectors = torch.stack([torch.ones_like(out), out.detach()])
    back = torch.func.vmap(lambda vector: torch.autograd.grad(out, parameters, vector, retain_graph=True))
    return out.square().mean(), list(back(vectors))


def differentiated_backward(model: nn.Module, x: Tensor) -> Ran:
    out, parameters = model(x), list(model.parameters())

    def back(vector: Tensor) -> Tensor:
        gradients = torch.autograd.grad(out, parameters, vector, retain_graph=True, create_graph=True)
        return torch.stack([one.square().sum() for one in gradients]).sum()

    return out.square().mean(), [torch.func.grad(back)(torch.ones_like(out))]


def refuses_hooks(model: nn.Module, x: Tensor) -> Ran:
    loss = model(x).square().mean()
    with disable_saved_tensors_hooks("No hooks."):
        loss.backward()
    return None, []


WAYS: Final[Mapping[str, Callable[[nn.Module, Tensor], Ran]]] = MappingProxyType(
    {
        "linearize": linearized,
        "linearize alone": linearized_alone,
        "make_fx": traced("real", grad=False),
        "make_fx after the forward": traced("real", grad=True, before=True),
        "make_fx, symbolic": traced("symbolic", grad=False),
        "make_fx, before autograd": traced("pre_dispatch", grad=False),
        "fake tensors": without_content,
        "functionalize": functionalized,
        "dual numbers": with_tangents,
        "batched gradients": batched,
        "vmap of a backward": mapped_backward,
        "grad of a backward": differentiated_backward,
        "no hooks": refuses_hooks,
    }
)
NEVER_PLAIN: Final = {"linearize alone", "functionalize", "dual numbers"}
"""Of them those in which every forward is traced or has tangents."""


def trained(way: str, method: str | None, budget: int | None) -> tuple[list[Any], int]:
    """What is to be the same, and the highest peak. A method of the block engine has found all blocks, where one of
    the forwards is a plain one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    found: list[Any] = []
    session = spillway.manage(model, budget=budget, method=method) if method is not None else nullcontext()
    with session as memory:
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH)
            with memory.step(x) if memory is not None else nullcontext():
                loss, told = WAYS[way](model, x)
                if loss is not None:
                    loss.backward()  # type: ignore[no-untyped-call]
            found += [
                *told,
                *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
            ]
            model.zero_grad()
        if method in ("checkpoint", "mimose") and way not in NEVER_PLAIN:
            assert memory.blocks == ("0", "1", "2", "3")
    return found, max((report.peak_bytes for report in memory.history), default=0) if memory is not None else 0


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch, for tangents
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch, in `linearize`
@pytest.mark.parametrize(
    ("way", "tight", "method"), in_turn(WAYS, [False, True], ["auto", "checkpoint", "mimose"], times=2)
)
def test_blocks_run_plainly_where_they_are_traced_and_their_second_runs_outside_of_transforms(
    way: str, method: str, tight: bool
) -> None:
    plain, _ = trained(way, None, None)
    budget = trained(way, "keep-all", None)[1] * 6 // 10 if tight else None
    for _ in range(TRIES):
        try:
            found, peak = trained(way, method, budget)
            break
        except BudgetInfeasible as refusal:
            budget = refusal.smallest_budget
    else:
        pytest.fail(f"refused {TRIES} times, at last {budget} bytes were named")
    assert [*map(same, plain, found)] == [True] * len(plain) == [True] * len(found)
    assert budget is None or peak <= budget


class Raising(Block):
    """Raises when it has run more often than it may. Runs are counted in a file: second runs put back what is counted
    in Python."""

    ran: ClassVar[Path]
    most: ClassVar[int]

    def forward(self, x: Tensor) -> Tensor:
        with self.ran.open("a") as file:
            file.write(".")
        if self.ran.stat().st_size > self.most:
            raise KeyError("of the user's")
        return super().forward(x)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("way", ["batched gradients", "vmap of a backward", "grad of a backward"])
def test_what_a_second_run_raises_within_a_transform_is_the_users_and_training_goes_on(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raising, "ran", tmp_path / "ran", raising=False)
    monkeypatch.setattr(Raising, "most", 1 << 20, raising=False)
    budget = trained(way, "keep-all", None)[1] * 8 // 10

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        loss, _ = WAYS[way](model, x)
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return gradients

    torch.manual_seed(0)
    model = nn.Sequential(*(Raising() for _ in range(4)))
    x = torch.randn(ROWS, WIDTH)
    state = torch.get_rng_state()
    plain = step(model, x)
    with spillway.manage(model, budget=budget, method="checkpoint") as memory:
        for most in (1 << 20, 1 << 20, 5):
            Raising.ran.write_text("")
            monkeypatch.setattr(Raising, "most", most)
            with pytest.raises(KeyError, match="of the user's") if most == 5 else nullcontext(), memory.step(x):
                step(model, x)
        monkeypatch.setattr(Raising, "most", 1 << 20)
        model.zero_grad()
        torch.set_rng_state(state)
        with memory.step(x):
            found = step(model, x)
    assert [*map(torch.equal, plain, found)] == [True] * len(plain)
