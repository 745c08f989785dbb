"""Places where checkpointing and offloading tools are known to go wrong, and this engine must not."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spillway
from spillway.methods import Drop, Move
from tests.cpu.families import State, difference, state_of
from tests.cpu.pressure import ORDERS, PLENTY, InputsLeave, Way, image, put_away

SIDE = 64

WAYS: dict[str, tuple[Way, ...]] = {"dropped": (Drop, Move), "moved": (Move,)}

Loss = Callable[[nn.Module, Tensor], Tensor]


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trained(model: nn.Module, ways: tuple[Way, ...], loss_of: Loss = square, steps: int = 3) -> list[State]:
    """States after each of some steps; with `ways`, managed, and the inputs of every op leave before it."""
    model = copy.deepcopy(model)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    states = []
    with spillway.manage(model, optimizer, budget=PLENTY, method=ORDERS["recompute first"]()) as memory:
        for number in range(steps):
            batch = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(number))
            step: AbstractContextManager[object] = memory.step(batch) if ways else nullcontext()
            with step, InputsLeave(memory, *ways) if ways else nullcontext():
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            states.append(state_of(model, optimizer))
        assert sum(report.moves + report.drops for report in memory.history) > 0 or not ways
    return states


def assert_the_same(expected: list[State], found: list[State]) -> None:
    assert [difference(one, other) for one, other in zip(expected, found, strict=True)] == [None] * len(expected)


# ---------------------------------------------------------------------- branches taken by other random streams


class Branching(nn.Module):
    """Both branches save tensors of the same shapes; which is taken is Python's or NumPy's choice."""

    def __init__(self, choose: Callable[[], float]) -> None:
        super().__init__()
        self.choose = choose
        self.one, self.other = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.norm = nn.BatchNorm1d(SIDE)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.norm(torch.tanh(self.one(x) if self.choose() < 0.5 else self.other(x)))
        return x


@pytest.mark.long(but=3)
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("choose", [random.random, numpy.random.random], ids=["Python", "NumPy"])
def test_a_branch_taken_by_chance_is_differentiated_as_it_was_taken(
    choose: Callable[[], float], ways: tuple[Way, ...]
) -> None:
    model = Branching(choose)
    assert_the_same(trained(model, (), steps=6), trained(model, ways, steps=6))


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_batch_norm_counts_one_batch_per_forward(ways: tuple[Way, ...]) -> None:
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE), nn.ReLU(inplace=True))
    for number, state in enumerate(trained(model, ways), start=1):
        counted = state["model 0: buffer 1.num_batches_tracked"]
        assert not isinstance(counted, str | bytes)
        assert counted.data == number.to_bytes(8, "little")


# ------------------------------------------------------------------- what is saved, and what happens to it afterwards


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "noisy",
    [
        lambda: nn.RReLU(),
        lambda: nn.RReLU(inplace=True),
        lambda: nn.Dropout(0.5),
        lambda: nn.AlphaDropout(0.3),
        lambda: nn.FractionalMaxPool2d(2, output_ratio=0.6),
    ],
    ids=["rrelu", "rrelu in place", "dropout", "alpha dropout", "fractional pooling"],
)
def test_noise_that_is_filled_in_after_it_was_saved_is_right_in_backward(
    noisy: Callable[[], nn.Module], ways: tuple[Way, ...]
) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        hidden, noise = model
        return noise(hidden(batch)[None]).square().mean()

    model = nn.ModuleList([nn.Linear(SIDE, SIDE), noisy()])
    assert_the_same(trained(model, (), loss_of), trained(model, ways, loss_of))


@pytest.mark.parametrize("way", [Drop, Move])
@pytest.mark.parametrize("absent_first", [False, True])
def test_a_saved_tensor_that_was_written_is_still_refused_by_autograd(way: Way, absent_first: bool) -> None:
    with (
        spillway.manage(nn.Linear(1, 1), budget=PLENTY, method=ORDERS["recompute first"]()) as memory,
        memory.step(),
    ):
        x = torch.ones(SIDE, SIDE, requires_grad=True) * 1
        saved = x.exp()
        loss = saved.sum()
        if absent_first:
            assert put_away(memory, saved, way)
        with torch.no_grad():
            saved.add_(1)
        put_away(memory, saved, Move)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_parameters_and_duplicates_are_not_stored_twice() -> None:
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)))
    batch = torch.randn(SIDE, SIDE)
    with spillway.manage(model, budget=None, method="lru") as memory:
        with memory.step(batch):
            kept = model(batch)
            views = [kept.t(), kept[2:], kept.detach(), kept.view(-1)]
            with_views = memory._engine.controller.budget.resident
        assert len(views) == 4
    matrices = 4 + 1 + 4  # weights, the batch, outputs
    assert with_views == matrices * 4 * SIDE * SIDE


# ---------------------------------------------------------------------- views, recycled addresses, leaks


def test_recycled_addresses_are_never_taken_for_the_storages_that_had_them_before() -> None:
    order = random.Random(0)

    def program() -> list[float]:
        kept: list[Tensor] = []
        sums = []
        for number in range(600):
            fresh = torch.full((SIDE, SIDE), float(number)) * 1.5
            view = fresh[order.randrange(SIDE) :]
            kept.append(view if order.random() < 0.5 else fresh.t())
            if len(kept) > 6:
                sums.append(float(kept.pop(order.randrange(len(kept))).sum()))
            del fresh, view
        return sums

    expected = program()
    for method in ORDERS.values():
        order.seed(0)
        with spillway.manage(nn.Linear(1, 1), budget="90 KiB", method=method()) as memory:
            with memory.step():
                assert program() == expected
            report = memory.history[-1]
            assert report.peak_bytes <= memory.allowed
            assert report.moves + report.drops > 100


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_outlives_its_steps(order: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Dropout(0.1), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    storages, slots, residents = set(), set(), set()
    gc.collect()
    others = live_storages()  # of earlier tests, held by fixtures
    with spillway.manage(model, optimizer, budget="450 KiB", method=ORDERS[order]()) as memory:
        for number in range(12):
            with memory.step():
                model(torch.randn(4 * SIDE, SIDE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if number % 4 == 3:
                gc.collect()
                storages.add(live_storages() - others)
                slots.add(memory._engine.backend.tier.used)
                residents.add(memory.history[-1].end_bytes + slots_in_use(memory))
        assert sum(report.moves + report.drops for report in memory.history) > 0
    assert len(residents) == 1
    assert max(slots) <= 450 << 10
    assert max(storages) <= 18  # 12 parameters, and some that move; one a step that stayed would make it 24


def live_storages() -> int:
    return sum(type(thing) is torch.UntypedStorage for thing in gc.get_objects())


def slots_in_use(memory: spillway.Session) -> int:
    """Bytes of storages that wait in the slower tier."""
    present = [storage for storage in memory._engine.table.values() if storage.value is not None]
    return sum(storage.nbytes for storage in present if storage.value is not None and storage.value.absent)


# ---------------------------------------------------------------------- routing that depends on the data


class Routed(nn.Module):
    """Rows go to experts by their content; how many each gets is known only when it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(SIDE, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Dropout(0.2), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = chances.argmax(-1) == number
            if chosen.any():
                out[chosen] = (expert(x[chosen]) * chances[chosen, number, None]).to(out.dtype)
        return out


@pytest.mark.long(but=2)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_rows_are_routed_once_and_their_gradients_go_where_they_went(ways: tuple[Way, ...], autocast: bool) -> None:
    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(batch)
        return F.mse_loss(out.float(), batch)

    model = nn.Sequential(Routed(), nn.LayerNorm(SIDE), Routed())
    assert_the_same(trained(model, (), loss_of), trained(model, ways, loss_of))


# ---------------------------------------------------------------------- traces left behind


def test_a_session_adds_nothing_to_the_model_or_its_state_dict() -> None:
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE))
    optimizer = torch.optim.Adam(model.parameters())
    keys = list(model.state_dict())
    before = [(type(module), sorted(vars(module)), module.forward) for module in model.modules()]
    kinds = [(type(parameter), sorted(vars(parameter))) for parameter in model.parameters()]
    with spillway.manage(model, optimizer, budget="200 KiB") as memory:
        for _ in range(2):
            with memory.step():
                model(torch.randn(SIDE, SIDE)).square().mean().backward()
                optimizer.step()
            assert list(model.state_dict()) == keys
            assert [(type(module), sorted(vars(module)), module.forward) for module in model.modules()] == before
            assert [(type(parameter), sorted(vars(parameter))) for parameter in model.parameters()] == kinds
    assert model[0]._forward_hooks == {}
    assert image(model[0].weight) == image(copy.deepcopy(model)[0].weight)
