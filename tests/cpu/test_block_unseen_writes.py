"""What is written to results and arguments of blocks past their version counters, held until the backward or not."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

import spillway
from spillway.engines.blocks import homes
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.homes import Home
from spillway.errors import RecomputeError
from spillway.methods.actions import Action
from tests.cpu.block_cases import WIDTH, Chain, mean_square
from tests.cpu.families import difference
from tests.cpu.test_block_second_runs import trained
from tests.shared import in_turn


def _over(x: Tensor) -> Tensor:
    return torch.empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride())


def _data_of_another(x: Tensor) -> Tensor:
    other = torch.empty(0)
    other.data = x.detach()
    return other


def _by_address(x: Tensor) -> Tensor:
    floats = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    return torch.frombuffer(floats, dtype=torch.float32)


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda x: x.data, "data of what is detached": lambda x: x.detach().data,
    "data of data": lambda x: x.data.data, "a view of data": lambda x: x.data[:],
    "numpy": lambda x: x.detach().numpy(), "numpy of data": lambda x: x.data.numpy(),
    "numpy, forced": lambda x: x.numpy(force=True), "an array": lambda x: numpy.asarray(x.detach()),
    "NumPy's dlpack": lambda x: numpy.from_dlpack(x.detach()), "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "a capsule": lambda x: torch.from_dlpack(dlpack.to_dlpack(x.detach())),  # type: ignore[attr-defined]
    "a storage": _over, "another's data": _data_of_another, "an address": _by_address,
    "set_": lambda x: torch.empty(0).set_(x.detach()),
}  # fmt: skip


def write(alias: Any) -> None:
    """Other bytes, with which `tanh` has other gradients."""
    alias[:] = alias * 0.5


def layers() -> tuple[nn.Module, ...]:
    return nn.Linear(WIDTH, WIDTH), nn.Tanh()


class Writing(Chain):
    """Writes unseen to what its blocks return: at once, or when all have run; to all, or to none but the last."""

    def __init__(self, make: Callable[[Tensor], Any], *, late: bool, held: bool) -> None:
        super().__init__(*(nn.Sequential(*layers(), *layers()) for _ in range(4)))
        self.make, self.late, self.held = make, late, held
        self.kept: list[Any] = []

    def __deepcopy__(self, memo: Any) -> Writing:
        twin = Writing(self.make, late=self.late, held=self.held)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        x, aliases = self.embed(x), []
        self.kept.clear()
        for block in self.blocks:
            x = block(x)
            aliases.append(self.make(x))
            if not self.late:
                write(aliases.pop())
            if self.held:
                self.kept.append(x)
            x = x * 2
        for alias in aliases:
            write(alias)
        return x


def assert_as_plain(model: nn.Module, action: Action, **options: Any) -> None:
    plain, again = trained(model, None), trained(model, action, **options)
    assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None] * 3
    assert {(report.recomputes > 0, report.kept_because) for report in again.reports} == {(action.recomputes, "")}


@pytest.mark.long(but=3)
@pytest.mark.parametrize(("name", "late", "held"), in_turn(ALIASES, [False, True], [False, True], times=2))
def test_results_that_are_written_to_unseen(name: str, late: bool, held: bool) -> None:
    model = Writing(ALIASES[name], late=late, held=held)
    for action in (Action.RECOMPUTE, Action.RECOMPUTE_OFFLOADED, Action.SELECTIVE, Action.OFFLOAD):
        assert_as_plain(model, action)


def test_a_function_that_is_applied_in_place() -> None:
    assert_as_plain(Writing(lambda x: x.data.apply_(lambda v: v / 4), late=False, held=False), Action.RECOMPUTE)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["data", "numpy"])
def test_blocks_that_are_given_up_after_their_results_were_written_to(name: str, late: bool) -> None:
    def run(engine: BlockEngine | None, model: nn.Module) -> list[Tensor]:
        loss = mean_square(model, torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1)))
        if engine is not None:
            assert sum(engine.revoke(f"blocks.{number}") >= 0 for number in range(4)) == 4
        loss.backward()
        return [cast(Tensor, parameter.grad) for parameter in model.parameters()]

    torch.manual_seed(0)
    model = Writing(ALIASES[name], late=late, held=False)
    plain = run(None, model)
    model.zero_grad()
    with BlockEngine(model, [f"blocks.{number}" for number in range(4)]) as engine:
        again = run(engine, model)
        assert [report.recomputes for report in engine.calls] == [1] * 4
    assert all(map(torch.equal, plain, again))


@pytest.mark.long(but=3)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", ["data", "numpy", "dlpack"])
@pytest.mark.parametrize("method", ["checkpoint", "auto", "mimose"])
def test_sessions_keep_their_budget_and_what_is_written_unseen(method: str, name: str, held: bool) -> None:
    def losses(budget: str | None) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model, found = Writing(ALIASES[name], late=False, held=held), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = None if budget is None else spillway.manage(model, optimizer, budget=budget, method=method)
        for number in range(6):
            x = torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            if memory is None:
                loss = mean_square(model, x)
                loss.backward()
                optimizer.step()
            else:
                with memory.step(x):
                    loss = mean_square(model, x)
                    loss.backward()
                    optimizer.step()
            found.append(loss.item())
        if memory is not None:
            memory.close()
        return found, memory

    plain, _ = losses(None)
    managed, memory = losses("4.25MiB")
    assert managed == plain
    assert max(report.peak_bytes for report in memory.history) <= 4.25 * (1 << 20)


class _OnItsArgument(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.make = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), make

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).tanh()
        write(self.make(x))
        return self.two(y).tanh() + x


@pytest.mark.long(but=6)
@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("method", ["checkpoint", "auto", "mimose"])
def test_what_a_block_writes_unseen_to_its_argument_is_written_once(method: str, name: str) -> None:
    """By an extra forward of the first step as well, which is put back."""

    def states(*, managed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_OnItsArgument(ALIASES[name]) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = spillway.manage(model, optimizer, budget="1GiB", method=method) if managed else None
        found: list[Tensor] = []
        for number in range(3):
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                mean_square(model, x).backward()
                found += [x, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
                optimizer.step()
                optimizer.zero_grad()
        if memory is not None:
            memory.close()
        return found

    assert all(map(torch.equal, states(managed=True), states(managed=False)))


def test_what_is_only_looked_at_is_not_kept() -> None:
    seen: list[Any] = []

    class Logging(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for number, block in enumerate(self.blocks):
                x = block(x)
                seen.append(StorageWeakRef(x.untyped_storage()))
                assert float(x.data.mean()) == pytest.approx(float(x.detach().numpy().mean()), abs=1e-5)
                if number % 2:
                    assert numpy.asarray(x.detach()).nbytes == x.untyped_storage().nbytes()
                x = x * 2
            return x

    model = Logging(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    with BlockEngine(model, [f"blocks.{n}" for n in range(4)], actions=lambda block, call: Action.RECOMPUTE) as engine:
        loss = mean_square(model, torch.randn(20, WIDTH))
        assert [one.expired() for one in seen] == [True] * 3 + [False]  # until the next seam
        loss.backward()
        assert [report.recomputes for report in engine.calls] == [1] * 4
        assert all(one.expired() for one in seen)


def test_what_was_written_to_is_kept_no_longer_than_its_graph() -> None:
    seen: list[Any] = []

    def make(x: Tensor) -> Tensor:
        seen.append(StorageWeakRef(x.untyped_storage()))
        return x.data

    model = Writing(make, late=False, held=False)
    with BlockEngine(model, [f"blocks.{n}" for n in range(4)], actions=lambda block, call: Action.RECOMPUTE):
        loss = mean_square(model, torch.randn(20, WIDTH))
        assert not any(one.expired() for one in seen)
        loss.backward()
        assert all(one.expired() for one in seen)


class Later(Chain):
    """Writes unseen to what a block was called with, after it has run, from some step on."""

    begins = 0
    steps = 0
    before = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        self.steps += 1
        for block in self.blocks:
            given = x * 1.0
            alias = given.data if self.before else None
            x = block(given)
            if self.steps > self.begins:
                (given.data if alias is None else alias).mul_(0.5)
        return x


@pytest.mark.parametrize("before", [False, True])
def test_arguments_that_are_written_to_unseen(before: bool) -> None:
    model = Later(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    model.before = before
    assert_as_plain(model, Action.RECOMPUTE)
    model.begins = 2
    model.steps, found = 0, []
    with BlockEngine(model, [f"blocks.{n}" for n in range(3)], actions=lambda block, call: Action.RECOMPUTE):
        for _ in range(2):
            mean_square(model, torch.randn(20, WIDTH)).backward()
        for _ in range(4):
            try:
                mean_square(model, torch.randn(20, WIDTH)).backward()
                found.append("")
            except RecomputeError as error:
                assert error.once
                found.append(str(error)[:36])
    assert found == [*(f"Argument 0 of call 0 of blocks.{n} was" for n in (2, 1, 0)), ""]


def test_torch_is_as_it_was_when_the_last_engine_is_closed() -> None:
    before = vars(torch.Tensor).keys() | {torch.Tensor.numpy, torch.Tensor.data, torch.Tensor.set_}
    model = Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    first = BlockEngine(model, ["blocks.0"])
    with spillway.manage(nn.Linear(3, 3), budget=None, method="lru"):
        first.close()
        second = BlockEngine(Chain(nn.Linear(WIDTH, WIDTH)), ["blocks.0"])
    assert vars(torch.Tensor).keys() | {torch.Tensor.numpy, torch.Tensor.data, torch.Tensor.set_} != before
    second.close()
    assert vars(torch.Tensor).keys() | {torch.Tensor.numpy, torch.Tensor.data, torch.Tensor.set_} == before


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "nothing is noted": lambda m: m.setattr(homes.Homes, "noticed", lambda *_, **__: None),
    "nothing is held": lambda m: m.setattr(Home, "_hold", lambda _: None),
    "nobody sees what was written": lambda m: m.setattr(Home, "writes", lambda _: 0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["data", "numpy"])
def test_planted_faults_are_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Writing(ALIASES[name], late=False, held=False)
    assert_as_plain(model, Action.RECOMPUTE)
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        assert_as_plain(model, Action.RECOMPUTE)
    gc.collect()


@pytest.mark.parametrize("name", ["data", "numpy"])
def test_what_a_block_writes_unseen_itself_after_all_was_saved(name: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x)
            write(ALIASES[name](y))
            return cast(Tensor, y * 2)

    assert_as_plain(Chain(Block(), Block()), Action.RECOMPUTE)
