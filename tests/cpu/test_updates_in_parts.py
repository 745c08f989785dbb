"""Optimizers that update in ops over lists, under methods of the block engine: where the temporaries of all parameters
do not fit, a part of them is updated after the other, with the same bits."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.engines.tensors.optimizers import uses_foreach
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes
from tests.cpu.families import State, difference, state_of
from tests.shared import in_turn

LAYERS, WIDTH = 8, 128
ONE = 4 * WIDTH * WIDTH
"""Bytes of the weights of a layer."""
DECAY = 0.1
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
        groups = [{"params": weights, "weight_decay": DECAY}, {"params": others, "lr": 0.01}]
        self.optimizer = kind(groups, lr=1e-3, foreach=True, **options)
        self.batches = [torch.randn(4, WIDTH) for _ in range(4)]
        self._around, self._closure = around, closure

    def plainly(self) -> State:
        self._around(self.optimizer)
        for batch in self.batches:
            self._train(batch)
        return state_of(self.model, self.optimizer)

    def under(self, budget: Bytes | None, method: str) -> tuple[State, Bytes]:
        with spillway.manage(self.model, self.optimizer, budget=budget, method=method) as memory:
            self._around(self.optimizer)
            for batch in self.batches:
                with memory.step(batch):
                    self._train(batch)
            return state_of(self.model, self.optimizer), max(report.peak_bytes for report in memory.history)

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


def _tight(optimizer: str, method: str) -> Bytes:
    """A budget that has room for a part's temporaries, and not for all."""
    return Training(optimizer).under(None, method)[1] - LAYERS // 2 * ONE


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("optimizer", "method", "closure"),
    [*((optimizer, "checkpoint", False) for optimizer in OPTIMIZERS), *(("AdamW", method, True) for method in METHODS)],
)
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
    monkeypatch.setattr("spillway.session.updates.OptimizerInParts", lambda parts: parts.optimizer)
    budget = _tight("AdamW", "checkpoint")
    with pytest.warns(UserWarning, match="could not be told beforehand"):
        assert Training("AdamW").under(budget, "checkpoint")[1] > budget


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("missing", "most"), [(0, LAYERS), (1, LAYERS // 2), (LAYERS // 2 + 1, LAYERS // 4)])
def test_parts_are_as_large_as_fits(monkeypatch: pytest.MonkeyPatch, missing: int, most: int) -> None:
    budget = Training("AdamW").under(None, "checkpoint")[1] - missing * ONE + ONE // 8
    training = Training("AdamW")
    with spillway.manage(training.model, training.optimizer, budget=budget, method="checkpoint") as memory:
        for batch in training.batches:
            with memory.step(batch):
                training._train(batch)
        with memory.step(training.batches[0]):
            training.model(training.batches[0]).square().mean().backward()
            cut = _cuts(monkeypatch)
            training.optimizer.step()
    assert cut == [most] * (LAYERS // most) * (most < LAYERS)


def _changes_rates(optimizer: torch.optim.Optimizer) -> object:
    def changed(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    return optimizer.register_step_pre_hook(changed), optimizer.register_step_post_hook(changed)


def _schedules(optimizer: torch.optim.Optimizer) -> object:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer.register_step_post_hook(lambda *_: schedule.step())


def _begins_anew(optimizer: torch.optim.Optimizer) -> object:
    """Its state is another dictionary from the third update on."""
    steps = itertools.count()

    def reset(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if next(steps) == 2:
            optimizer.state = defaultdict(dict)

    return optimizer.register_step_pre_hook(reset)


def _adds_a_group(optimizer: torch.optim.Optimizer) -> object:
    """To whom `step` is called with."""
    new = nn.Parameter(torch.ones(WIDTH))

    def adds(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(optimizer.param_groups) == 2:
            args[0].add_param_group({"params": [new]})
        new.grad = torch.ones_like(new)

    return optimizer.register_step_pre_hook(adds)


def _calls_with_its_own(optimizer: torch.optim.Optimizer) -> object:
    return optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, *args[1:]), kwargs))


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("around", "closure"),
    in_turn([_changes_rates, _schedules, _begins_anew, _adds_a_group, _calls_with_its_own], [False, True]),
)
def test_hooks_and_schedules_see_the_users_optimizer(
    monkeypatch: pytest.MonkeyPatch, around: Around, closure: bool
) -> None:
    plain = Training("AdamW", around=around, closure=closure).plainly()
    budget, cut = _tight("AdamW", "checkpoint"), _cuts(monkeypatch)
    state, peak = Training("AdamW", around=around, closure=closure).under(budget, "checkpoint")
    assert difference(plain, state) is None
    assert peak <= budget
    assert cut


def _cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of groups of weights that are less than all."""
    updated: list[int] = []
    through = torch.optim.AdamW._init_group

    def counted(self: Any, group: dict[str, Any], *lists: Any) -> Any:
        if group["weight_decay"] == DECAY and len(group["params"]) < LAYERS:
            updated.append(len(group["params"]))
        return through(self, group, *lists)

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", counted)
    return updated


def _tied(training: Training) -> None:
    training.model[3].weight.data = training.model[0].weight.data  # type: ignore[union-attr]


def _twice(training: Training) -> None:
    training.optimizer.param_groups[0]["params"].append(training.optimizer.param_groups[0]["params"][0])


@pytest.mark.long(but=1)
@pytest.mark.parametrize("shares", [_tied, _twice])
def test_parameters_that_share_memory_are_updated_at_once(
    monkeypatch: pytest.MonkeyPatch, shares: Callable[[Training], None]
) -> None:
    """An op over lists goes through all of them before the next op does."""
    cut, trainings = _cuts(monkeypatch), [Training("AdamW") for _ in range(2)]
    for training in trainings:
        shares(training)
    plain, tight = trainings
    for batch in plain.batches:
        plain._train(batch)
    budget = _tight("AdamW", "checkpoint")
    with spillway.manage(tight.model, tight.optimizer, budget=budget, method="checkpoint") as memory:
        for batch in tight.batches:
            try:
                with memory.step(batch):
                    tight._train(batch)
            except BudgetInfeasible as refusal:
                memory.budget = refusal.smallest_budget
                with memory.step(batch):
                    tight._train(batch)
    assert difference(state_of(plain.model, plain.optimizer), state_of(tight.model, tight.optimizer)) is None
    assert not cut


def test_an_update_that_fails_changes_nothing_where_it_would_not_plainly() -> None:
    trainings = [Training("AdamW") for _ in range(2)]
    for training in trainings:
        budget = None if training is trainings[0] else _tight("AdamW", "checkpoint") + 7 * ONE
        with spillway.manage(training.model, training.optimizer, budget=budget, method="checkpoint") as memory:
            for batch in training.batches[:2]:
                with memory.step(batch):
                    training._train(batch)
            last = training.optimizer.param_groups[0]["params"][-1]
            with pytest.raises(RuntimeError, match="sparse"), memory.step(batch):
                training.model(batch).square().mean().backward()
                last.grad = last.grad.to_sparse()
                training.optimizer.step()
            training.optimizer.zero_grad()
    one, other = (state_of(training.model, training.optimizer) for training in trainings)
    assert difference(one, other) is None


@pytest.mark.parametrize("method", ["checkpoint", "auto"])
def test_a_budget_that_is_lowered_is_kept(method: str) -> None:
    training, low = Training("AdamW"), _tight("AdamW", "checkpoint")
    with spillway.manage(training.model, training.optimizer, budget=2 * low, method=method) as memory:
        for batch in training.batches:
            with memory.step(batch):
                training._train(batch)
        memory.budget = low
        for batch in training.batches:
            with memory.step(batch):
                training._train(batch)
        later = memory.history[len(training.batches) :]
        assert all(report.peak_bytes + report.beyond_bytes <= low for report in later)


def test_what_is_trained_again_is_told_anew() -> None:
    training, budget = Training("AdamW"), _tight("AdamW", "checkpoint")
    first = training.optimizer.param_groups[0]["params"][: LAYERS // 2]
    with spillway.manage(training.model, training.optimizer, budget=1 << 30, method="checkpoint") as memory:
        for trained in (True, False, True):
            for parameter in first:
                parameter.requires_grad_(trained)
            memory.budget = 1 << 30 if trained and not memory.history else budget
            for batch in training.batches:
                with memory.step(batch):
                    training._train(batch)
        assert max(report.peak_bytes for report in memory.history[4:]) <= budget


DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("AdamW", "Adam", "SGD", "Adagrad", "NAdam", "RMSprop", "Adadelta", "Adamax", "RAdam")),
    *((name, {}) for name in ("ASGD", "Rprop", "Adafactor")),
    *((name, {"lr": torch.tensor(0.01)}) for name in ("AdamW", "Adam", "NAdam", "RMSprop")),
    *((name, {"fused": False}) for name in ("AdamW", "Adam", "SGD", "Adagrad")),
    *((name, {"foreach": False}) for name in ("AdamW", "SGD", "Adafactor")),
    *((name, {"foreach": True}) for name in ("AdamW", "SGD", "Adafactor")),
]


@pytest.mark.parametrize(("name", "options"), DEFAULTS)
def test_it_is_known_which_optimizers_update_in_ops_over_lists_on_accelerators(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """As if this device were one."""
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    module = sys.modules[getattr(torch.optim, name).step.__module__]
    [kernel] = [one for one in vars(module) if one.startswith("_multi_tensor_")]
    through, called = getattr(module, kernel), []
    monkeypatch.setattr(module, kernel, lambda *args, **kwargs: (called.append(True), through(*args, **kwargs)))
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = getattr(torch.optim, name)(parameters, **options)
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert uses_foreach(optimizer, optimizer.param_groups[0]) == bool(called)
