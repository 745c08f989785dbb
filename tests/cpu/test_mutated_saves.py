"""Steps within `torch.autograd.graph.allow_mutation_on_saved_tensors`: what is saved may leave like anything else."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway.engines.tensors import probe, torch_patches
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes

WIDTH, ROWS, DEPTH, STEPS = 128, 512, 8, 3
METHODS = ("lru", "delta", "dtr")


class Writing(nn.Module):
    """Writes to what it has saved, in whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            squares = h.square()
            h.tanh_()
            x = (squares + h.sigmoid()).tanh()
            h[: ROWS // 2].mul_(2.0)
        return x


class Holding(TorchDispatchMode):
    """Torch's book goes by ids and addresses, and takes a tensor that lies where another one died for that one, now and
    then: without a session gradients are wrong then. So nothing dies."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.held.append(func(*args, **(kwargs or {})))
        return self.held[-1]


def trained(
    method: str | None, budget: Bytes | None, *, outside: bool = False, around: Any = allow_mutation_on_saved_tensors
) -> list[Tensor] | BudgetInfeasible:
    """Parameters after some steps; `outside` the context is open before the session is."""
    torch.manual_seed(0)
    model = Writing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(ROWS, WIDTH)
    with ExitStack() as stack:
        if method is None:
            stack.enter_context(Holding())
        if outside:
            stack.enter_context(around())
        session = (
            stack.enter_context(spillway.manage(model, optimizer, budget=budget, method=method)) if method else None
        )
        for _ in range(STEPS):
            step: AbstractContextManager[Any] = session.step(batch) if session is not None else ExitStack()
            try:
                with step, ExitStack() if outside else around():
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except BudgetInfeasible as refusal:
                return refusal
    return [parameter.detach().clone() for parameter in model.parameters()]


def named_by(method: str, **how: Any) -> BudgetInfeasible:
    refusal = trained(method, 400_000, **how)
    assert isinstance(refusal, BudgetInfeasible)
    return refusal


@pytest.mark.long(but=1)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_budget_that_a_refusal_names_works_at_the_first_try(method: str, outside: bool) -> None:
    plain, refusal = trained(None, None), named_by(method, outside=outside)
    assert refusal.exact
    found = trained(method, refusal.smallest_budget, outside=outside)
    assert isinstance(plain, list)
    assert isinstance(found, list)
    assert all(map(torch.equal, plain, found))


def test_by_addresses_it_would_be_refused_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_patches, "go_by_numbers", lambda known: None)
    assert isinstance(trained("lru", named_by("lru").smallest_budget), BudgetInfeasible)


def test_without_a_book_of_its_own_a_run_without_content_would_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "allowed", nullcontext)
    assert not named_by("lru").exact


def test_what_was_written_to_before_a_session_and_in_it() -> None:
    def gradients(*, manages: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Writing(), torch.randn(ROWS, WIDTH, requires_grad=True)
        with allow_mutation_on_saved_tensors(), ExitStack() as stack:
            early = x * 2.0
            loss = early.square().sum()
            if manages:
                session = stack.enter_context(spillway.manage(model, budget="3MiB", method="lru"))
                stack.enter_context(session.step(x))
            out = model(x).mean()
            early.zero_()
            (out + loss).backward()
        return [torch.as_tensor(one.grad) for one in (x, *model.parameters())]

    def same(one: list[Tensor], other: list[Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    # Torch alone takes two tensors at one address for each other now and then.
    runs = [gradients(manages=False) for _ in range(5)]
    plain = max(runs, key=lambda one: sum(same(one, other) for other in runs))
    assert same(plain, gradients(manages=True))


def test_two_tensors_at_one_place_are_not_taken_for_each_other() -> None:
    def gradients(*, manages: bool) -> Tensor:
        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0), requires_grad=True)
        model = nn.Linear(1024, 1024)
        with ExitStack() as stack:
            if manages:
                session = stack.enter_context(spillway.manage(model, budget="12MiB", method="lru"))
                stack.enter_context(session.step(x))
            with allow_mutation_on_saved_tensors():
                loss = torch.zeros(())
                for row in x:
                    h = row * 2.0
                    loss = loss + h.square().sum()
                    h.zero_()
                loss.backward()
        return torch.as_tensor(x.grad)

    assert torch.equal(gradients(manages=True), 8.0 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)))


def test_a_refusal_is_not_exact_where_hooks_of_the_users_take_addresses() -> None:
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    batch, refusals = torch.randn(ROWS, WIDTH), list[BudgetInfeasible]()

    def address(one: Tensor) -> Tensor:
        return one if one.data_ptr() else one.clone()

    for budget in (600_000, 1_500_000):
        with (
            pytest.raises(BudgetInfeasible) as caught,
            spillway.manage(model, budget=budget, method="lru") as session,
            session.step(batch),
            saved_tensors_hooks(address, lambda one: one),
        ):
            model(batch).square().mean().backward()
        refusals.append(caught.value)
    assert [refusal.exact for refusal in refusals] == [True, False]  # nobody had taken one before the first op
    assert "or more" in str(refusals[1])


def test_torch_is_as_it_was_afterwards() -> None:
    before = (torch.autograd.graph._get_tid, torch.autograd.graph._get_sid)
    assert isinstance(trained("lru", None), list)
    assert (torch.autograd.graph._get_tid, torch.autograd.graph._get_sid) == before


def test_torchs_book_goes_by_addresses_again_when_the_last_is_over() -> None:
    graph: Any = torch.autograd.graph
    before = graph._get_tid, graph._get_sid
    with allow_mutation_on_saved_tensors(), spillway.manage(nn.Linear(2, 2), budget=None, method="lru"):
        pass
    gc.collect()
    assert (graph._get_tid, graph._get_sid) == before
