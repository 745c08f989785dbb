"""Optimizers that update in ops over lists, under methods of the block engine: where the temporaries of all parameters
do not fit, a part of them is updated after the other, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.engines.tensors.optimizers import Parts
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes
from tests.cpu.families import State, difference, state_of

LAYERS, WIDTH = 8, 128
ONE = 4 * WIDTH * WIDTH
"""Bytes of the weights of a layer."""
METHODS = ["checkpoint", "mimose", "mimose-published"]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {}),
}
Around = Callable[[torch.optim.Optimizer], object]


class Training:
    """Of layers of one size and some that are smaller, in two groups with options of their own."""

    def __init__(self, optimizer: str, *, around: Around = lambda optimizer: None, closure: bool = False) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        kind, options = OPTIMIZERS[optimizer]
        weights = [one for one in self.model.parameters() if one.dim() > 1]
        others = [one for one in self.model.parameters() if one.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.01}]
        self.optimizer = kind(groups, lr=1e-3, foreach=True, **options)
        self.batches = [torch.randn(4, WIDTH) for _ in range(4)]
        self._around, self._closure = around, closure

    def plainly(self) -> State:
        self._around(self.optimizer)
        for batch in self.batches:
            self._train(batch)
        return self._ended()

    def under(self, budget: Bytes | None, method: str) -> tuple[State, Bytes]:
        with spillway.manage(self.model, self.optimizer, budget=budget, method=method) as memory:
            self._around(self.optimizer)
            for batch in self.batches:
                with memory.step(batch):
                    self._train(batch)
            return self._ended(), max(report.peak_bytes for report in memory.history)

    def _train(self, batch: torch.Tensor) -> None:
        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            value: torch.Tensor = self.model(batch).square().mean()
            value.backward()
            return value

        if self._closure:
            self.optimizer.step(loss)
        else:
            loss()
            self.optimizer.step()

    def _ended(self) -> State:
        assert type(self.optimizer.param_groups) is list
        assert [len(group["params"]) for group in self.optimizer.param_groups] == [LAYERS, 3 * LAYERS]
        return state_of(self.model, self.optimizer)


def _tight(optimizer: str, method: str) -> Bytes:
    """A budget that has room for a part's temporaries, and not for all."""
    return Training(optimizer).under(None, method)[1] - LAYERS // 2 * ONE


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_does_not_fit_at_once_is_updated_in_parts(optimizer: str, method: str, closure: bool) -> None:
    budget = _tight(optimizer, method)
    state, peak = Training(optimizer, closure=closure).under(budget, method)
    assert difference(Training(optimizer, closure=closure).plainly(), state) is None
    assert peak <= budget


def test_it_is_refused_if_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = _tight("AdamW", "checkpoint")
    monkeypatch.setattr("spillway.session.needs.sizes_of_parts", lambda optimizer: [])
    with pytest.raises(BudgetInfeasible):
        Training("AdamW").under(budget, "checkpoint")


def test_the_budget_is_passed_if_nothing_is_cut_that_was_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parts, "updater", property(lambda self: self._optimizer))
    budget = _tight("AdamW", "checkpoint")
    with pytest.warns(UserWarning, match="could not be told beforehand"):
        assert Training("AdamW").under(budget, "checkpoint")[1] > budget


@pytest.mark.parametrize(("missing", "most"), [(0, LAYERS), (1, LAYERS // 2), (LAYERS // 2 + 1, LAYERS // 4)])
def test_parts_are_as_large_as_fits(monkeypatch: pytest.MonkeyPatch, missing: int, most: int) -> None:
    updated: list[int] = []
    through = torch.optim.AdamW._init_group

    def counted(self: torch.optim.AdamW, group: dict[str, Any], *lists: Any) -> Any:
        updated.append(len(group["params"]))
        return through(self, group, *lists)

    budget = Training("AdamW").under(None, "checkpoint")[1] - missing * ONE + ONE // 8
    training = Training("AdamW")
    with spillway.manage(training.model, training.optimizer, budget=budget, method="checkpoint") as memory:
        for batch in training.batches:
            with memory.step(batch):
                training._train(batch)
        with memory.step(training.batches[0]):
            training.model(training.batches[0]).square().mean().backward()
            monkeypatch.setattr(torch.optim.AdamW, "_init_group", counted)
            training.optimizer.step()
    assert updated == [most] * (LAYERS // most) + [3 * LAYERS]


def _changes_rates(optimizer: torch.optim.Optimizer) -> object:
    def changed(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return optimizer.register_step_pre_hook(changed), optimizer.register_step_post_hook(changed)


def _schedules(optimizer: torch.optim.Optimizer) -> object:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer.register_step_post_hook(lambda *_: schedule.step())


@pytest.mark.parametrize("around", [_changes_rates, _schedules])
def test_hooks_and_schedules_see_the_users_groups(around: Around) -> None:
    state, _ = Training("AdamW", around=around).under(_tight("AdamW", "checkpoint"), "checkpoint")
    assert difference(Training("AdamW", around=around).plainly(), state) is None


def test_an_update_that_fails_leaves_the_users_groups() -> None:
    training = Training("AdamW")
    with spillway.manage(
        training.model, training.optimizer, budget=_tight("AdamW", "checkpoint"), method="checkpoint"
    ) as memory:
        with memory.step(training.batches[0]):
            training._train(training.batches[0])
        training.optimizer.state[training.optimizer.param_groups[0]["params"][-1]]["exp_avg"] = None
        with pytest.raises((TypeError, AttributeError, RuntimeError)), memory.step(training.batches[1]):
            training._train(training.batches[1])
        training._ended()
