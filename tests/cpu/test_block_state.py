"""State that lies anywhere: an extra forward leaves it alone, and a second run finds it as the first did."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from spillway.engines.blocks import module_state, reach, saved
from spillway.engines.blocks.block import CallReport
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.code import names_of, package
from spillway.engines.blocks.extra_forward import undone
from spillway.engines.blocks.fingerprints import fingerprint
from spillway.engines.blocks.iterators import CannotCopyError
from spillway.engines.blocks.module_state import Snapshot
from spillway.engines.blocks.quiet import quiet
from spillway.engines.blocks.reach import Copies, Reach, reach_of
from spillway.engines.environment import Environment
from spillway.engines.tensors.twins import TENSOR_HOOKS
from spillway.errors import RecomputeError
from spillway.internals.private import storage_address as address
from spillway.methods.actions import Action
from tests.cpu import block_elsewhere as elsewhere
from tests.cpu.block_judge import _same
from tests.cpu.block_parts import WIDTH, Part
from tests.cpu.block_state import KINDS, OWN_PARAMETERS, PARAMETERS, Stateful


def _alone(block: nn.Module, x: Tensor) -> Tensor:
    environment = Environment([], [])
    with undone(environment, (block,), (x,), {}) as (args, kwargs):
        out: Tensor = block(*args, **kwargs).detach()
    return out


@pytest.mark.long(but=37)
@pytest.mark.parametrize("kind", KINDS)
def test_an_extra_forward_leaves_state_alone_wherever_it_lies(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere.forget()
    torch.manual_seed(0)
    block, x = Stateful(kind), torch.randn(4, WIDTH)
    for _ in range(2):
        before = block.facts()
        if kind.startswith("generator"):
            with pytest.raises(
                CannotCopyError, match="the generator _generator, which it moves on, cannot be put back"
            ):
                _alone(block, x)
        else:
            first, second = _alone(block, x), _alone(block, x)
            assert capsys.readouterr() == ("", "")
            assert torch.equal(first, block(x)), kind
            assert torch.equal(first, second), kind
            capsys.readouterr()
            continue
        assert _same(block.facts(), before)


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _trained(
    kind: str, action: Action | None, capsys: pytest.CaptureFixture[str]
) -> tuple[list[Any], list[CallReport]]:
    elsewhere.forget()
    random.seed(0)
    torch.manual_seed(0)
    model, seen, calls = Stack(kind), list[Any](), list[CallReport]()
    names = ["blocks.0", "blocks.1"]
    engine = BlockEngine(model, names, actions=lambda block, call: action) if action is not None else None
    for number in range(5):
        loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        calls += engine.calls if engine is not None else []
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        seen.append([loss.detach(), gradients, [block.facts() for block in model.blocks], list(capsys.readouterr())])
    if engine is not None:
        engine.close()
    return seen, calls


@pytest.mark.long(but=9)
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_finds_state_as_the_first_did(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = _trained(kind, None, capsys)
    if kind in PARAMETERS and kind not in OWN_PARAMETERS:  # of another's nobody writes down where it lies
        with pytest.raises(RecomputeError, match="was not the same as the first"):
            _trained(kind, Action.RECOMPUTE, capsys)
        return
    found, calls = _trained(kind, Action.RECOMPUTE, capsys)
    assert _same(found, expected)
    kept = [call.kept_because for call in calls]
    if kind.startswith("generator"):
        assert set(kept) == {"it changes the generator _generator, which cannot be put back"}
    elif kind in OWN_PARAMETERS:
        assert set(kept) == {"it changes held, which was not copied before"}
    else:
        assert sum(call.recomputes for call in calls) >= len(calls) - 2, kept


class Hooking(Part):
    """Hangs a hook on its weight in every forward, in the place of the last one, or for one time."""

    def __init__(self, once: bool, accumulated: bool) -> None:
        super().__init__()
        self.once, self.accumulated = once, accumulated
        self.handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.handle is not None and not self.once:
            self.handle.remove()
        held = list[Any]()

        def hook(gradient: Tensor) -> Tensor | None:
            if self.once:
                held[0].remove()
            if not self.accumulated:
                return gradient * 3
            assert weight.grad is not None
            weight.grad.mul_(3)
            return None

        register: Any = weight.register_post_accumulate_grad_hook if self.accumulated else weight.register_hook
        held.append(register(hook))
        self.handle = held[0]
        return self.linear(x).tanh()

    @property
    def hooks(self) -> int:
        weight = self.linear.weight
        return len(weight._backward_hooks or ()) + len(weight._post_accumulate_grad_hooks or ())


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_a_hook_that_a_forward_hangs_on_a_parameter_is_hung_once(once: bool, accumulated: bool) -> None:
    def trained(*, runs_again: bool) -> tuple[list[Tensor], list[int], int]:
        torch.manual_seed(0)
        model, again = nn.Sequential(*(Hooking(once, accumulated) for _ in range(2))), 0
        x = torch.randn(4, WIDTH)
        engine = BlockEngine(model, ["0", "1"], actions=lambda block, call: Action.RECOMPUTE) if runs_again else None
        for _ in range(8):
            model(x).square().mean().backward()
            again += sum(call.recomputes for call in engine.calls) if engine is not None else 0
        if engine is not None:
            engine.close()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return gradients, [part.hooks for part in model.modules() if isinstance(part, Hooking)], again

    gradients, hooks, _ = trained(runs_again=False)
    found, found_hooks, again = trained(runs_again=True)
    assert again > 4
    assert _same(found, gradients)
    assert found_hooks == hooks


class Elsewhere(Part):
    """Hangs a hook for the length of a forward on a parameter not its own, and one on what adds up its gradient."""

    def __init__(self, others: list[nn.Parameter], *, node: bool) -> None:
        super().__init__()
        self.others, self.node, self.nodes = others, node, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.node and not self.nodes:
            self.nodes.append(weight.expand_as(weight).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
            self.nodes[0].register_prehook(lambda gradients: (gradients[0] * 3,))
        handle: Any = self.others[0].register_hook(lambda gradient: gradient * 3)
        y = (self.linear(x) * self.others[0]).tanh()
        handle.remove()
        return y


@pytest.mark.parametrize("node", [False, True])
def test_what_a_second_run_hangs_anywhere_is_taken_down(node: bool) -> None:
    def trained(*, runs_again: bool) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        scale = nn.Parameter(torch.ones(WIDTH))
        model, again, seen = nn.Sequential(*(Elsewhere([scale], node=node) for _ in range(2))), 0, list[Any]()
        engine = BlockEngine(model, ["0", "1"], actions=lambda block, call: Action.RECOMPUTE) if runs_again else None
        for _ in range(8):
            model(torch.ones(4, WIDTH)).square().mean().backward()
            again += sum(call.recomputes for call in engine.calls) if engine is not None else 0
            seen.append([len(scale._backward_hooks or ())])
            for parameter in (scale, *model.parameters()):
                seen[-1].append(parameter.grad)
                parameter.grad = None  # what is there between steps alone would be written down by then
        if engine is not None:
            engine.close()
        return seen, again

    found, again = trained(runs_again=True)
    assert again > 4
    assert _same(found, trained(runs_again=False)[0])


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("before", [0, 1])
def test_an_extra_forward_leaves_hooks_on_a_parameter_as_they_were(before: int, accumulated: bool) -> None:
    block, x = Hooking(once=False, accumulated=accumulated), torch.randn(4, WIDTH)
    for _ in range(before):
        block(x)
    handle, hooks = block.handle, block.hooks
    _alone(block, x)
    assert (block.handle, block.hooks) == (handle, hooks)


@pytest.mark.parametrize("name", TENSOR_HOOKS)
def test_hooks_that_the_loop_hangs_on_what_a_block_only_reaches_stay(name: str) -> None:
    class Reaching(Part):
        def __init__(self, others: list[nn.Parameter]) -> None:
            super().__init__()
            self.others = others

        def forward(self, x: Tensor) -> Tensor:
            self.others.append(self.others.pop())  # so that all that it reaches is written down
            return self.linear(x).tanh() * self.others[0]

    def trained(*, runs_again: bool) -> list[Any]:
        torch.manual_seed(0)
        scale = nn.Parameter(torch.ones(WIDTH))
        model, seen = nn.Sequential(Reaching([scale]), Reaching([scale])), list[Any]()
        engine = BlockEngine(model, ["0", "1"], actions=lambda block, call: Action.RECOMPUTE) if runs_again else None
        for _ in range(4):
            loss = model(torch.ones(4, WIDTH)).square().mean()
            if name == "_backward_hooks":
                scale.register_hook(lambda gradient: gradient * 3)
            else:
                scale.register_post_accumulate_grad_hook(lambda one: (one.grad.mul_(3), None)[1])
            loss.backward()
            seen.append((scale.grad.clone() if scale.grad is not None else None, reach.hooks_of(scale, name).keys()))
        if engine is not None:
            engine.close()
        return [(gradient, len(hooks)) for gradient, hooks in seen]

    assert _same(trained(runs_again=True), trained(runs_again=False))


class Large(Part):
    """Writes to an array."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [numpy.zeros(64)]

    def forward(self, x: Tensor) -> Tensor:
        self.held[0][0] += 1
        return self.linear(x) * float(self.held[0][0])


def _kept(model: nn.Sequential) -> list[str]:
    engine = BlockEngine(model, ["0"], actions=lambda block, call: Action.RECOMPUTE)
    found = []
    for _ in range(5):
        model(torch.ones(2, WIDTH)).sum().backward()
        found += [call.kept_because for call in engine.calls]
    engine.close()
    return found


def test_what_is_too_large_to_be_written_down_keeps_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MOST_BYTES", 100)
    model = nn.Sequential(Large(), nn.Tanh())
    with pytest.raises(ValueError, match="read-only"):
        _alone(model, torch.ones(2, WIDTH))
    model[0].held[0][0] = 0
    assert model[0].held[0].flags.writeable
    assert all(one.startswith("it writes to a tensor or an array of more than") for one in _kept(model))


def test_more_than_can_be_looked_at_keeps_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MOST_THINGS", 20)
    model = nn.Sequential(Large(), nn.Tanh())
    with pytest.raises(CannotCopyError, match="more than 20 things can be reached from it"):
        _alone(model, torch.ones(2, WIDTH))
    assert set(_kept(model)) == {"more than 20 things can be reached from it"}


class Answering:
    """Answers for every attribute that is not there with an error of its own, as some of pydantic's do."""

    __slots__ = ("empty", "there")

    def __init__(self) -> None:
        self.there = [1]

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError


def test_who_answers_for_attributes_that_are_not_there_is_not_asked() -> None:
    answering = Answering()
    found = Reach((answering,))
    answering.there.append(2)
    answering.empty = 3
    assert found.changed()
    found.restore()
    assert answering.there == [1]
    with pytest.raises(ZeroDivisionError):
        answering.empty  # noqa: B018


class _Private:
    __slots__ = ("__held",)

    def __init__(self) -> None:
        self.__held = [1]

    def change(self) -> None:
        self.__held = [*self.__held, 2]

    def told(self) -> list[int]:
        return self.__held


def test_slots_of_private_names_are_put_back() -> None:
    private = _Private()
    found = Reach((private,))
    private.change()
    assert found.changed()
    found.restore()
    assert private.told() == [1]


def test_a_walk_stops_at_libraries() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    assert len(Reach(reach_of((model,)))._entries) < 600
    assert package("torch.nn") == "torch"
    assert {"records", "local"} <= names_of(elsewhere.facts.__code__).globals
    assert names_of(elsewhere.count.__code__).written == {"number"}


def test_only_this_thread_is_quiet_and_only_as_long_as_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    before = (sys.stdout, sys.stderr, list(elsewhere.records.filters))
    elsewhere.forget()
    other = threading.Thread(target=lambda: (print("other"), elsewhere.log.info("other")))
    with quiet():
        print("dropped")
        sys.stdout.writelines(["dropped"])
        elsewhere.log.info("dropped")
        held = sys.stdout
        other.start()
        other.join()
        with quiet():
            print("dropped", file=sys.stderr)
        exec("print('heard', file=sys.stderr)", {"sys": sys, "__name__": "warnings"})
    print("later", file=held)
    said = capsys.readouterr()
    assert said.out == "other\nlater\n"
    assert "heard" in said.err
    assert "dropped" not in said.err
    assert elsewhere.records.lines == ["other"]
    assert (sys.stdout, sys.stderr, list(elsewhere.records.filters)) == before
    assert logging.getLogger().isEnabledFor(logging.ERROR)


def test_a_version_goes_back_to_what_it_was_where_another_tensor_lies_in_the_same_bytes() -> None:
    one = torch.zeros(3)
    other = one.data
    held = [one, other]
    then = Reach((held,), copies=Copies())
    del held[1]
    other.add_(1)
    now = Reach((held,), copies=Copies(), beside=then)
    then.restore()
    assert (other._version, other.tolist()) == (0, [0.0] * 3)
    now.restore()
    assert (other._version, other.tolist()) == (1, [1.0] * 3)


class Scaled(nn.Module):
    """By a buffer that grows where a batch has something positive, as observers for quantization do."""

    scale: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear, self._in_place = nn.Linear(WIDTH, WIDTH), in_place
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        grown = self.scale * (2.0 if x[0, 0] > 0 else 1.0)
        out = torch.sin(self.linear(x) * self.scale.clone())
        if self._in_place:
            self.scale.copy_(grown)
        else:
            self.scale = grown
        return out


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "another one"])
def test_a_buffer_that_the_first_call_happened_to_leave_as_it_was_is_put_back(in_place: bool) -> None:
    def trained(action: Action | None) -> tuple[list[Tensor], set[tuple[int, str]]]:
        torch.manual_seed(0)
        model, calls = nn.Sequential(Scaled(in_place=in_place), nn.Linear(WIDTH, 1)), set[tuple[int, str]]()
        engine = BlockEngine(model, ["0"], actions=lambda block, call: action) if action is not None else None
        found = []
        for sign in (-1, -1, 1, -1, 1):
            model.zero_grad()
            model(torch.full((4, WIDTH), 0.5 * sign)).sum().backward()
            calls |= {(call.recomputes, call.kept_because) for call in (engine.calls if engine is not None else ())}
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        if engine is not None:
            engine.close()
        return found, calls

    (expected, _), (found, calls) = trained(None), trained(Action.RECOMPUTE)
    assert all(map(torch.equal, expected, found))
    assert calls == {(1, "")}


class Late(nn.Module):
    """Makes a buffer in a forward, once an input is positive, by numbers that it draws before its dropout does."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        if named:
            self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "late", None) is None and x[0, 0] > 0:
            self.register_buffer("late", torch.rand(WIDTH))
        made = getattr(self, "late", None)
        dropped: Tensor = self.dropout(self.linear(x))
        return dropped if made is None else dropped + made


class Lent(nn.Module):
    """Has a buffer that somebody deletes between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.register_buffer("lent", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.linear(x))
        return dropped + self.lent if "lent" in self._buffers else dropped


@pytest.mark.parametrize(
    "made", [lambda: Late(named=True), lambda: Late(named=False), Lent], ids=["named", "not named", "deleted"]
)
def test_buffers_that_come_and_go_are_found_as_they_were(made: Callable[[], nn.Module]) -> None:
    def trained(action: Action | None) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(made())
        engine = BlockEngine(model, ["0"], actions=lambda block, call: action) if action is not None else None
        found = []
        for sign in (-1, -1, 1, -1, 1):
            model.zero_grad()
            loss = model(torch.full((4, WIDTH), 0.5 * sign)).square().sum()
            if sign > 0:
                model[0]._buffers.pop("lent", None)
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            assert engine is None or engine.calls[0].recomputes == 1
        if engine is not None:
            engine.close()
        return found, [*model[0]._buffers]

    (expected, names), (found, mine) = trained(None), trained(Action.RECOMPUTE)
    assert all(map(torch.equal, expected, found))
    assert mine == names


class Growing(nn.Module):
    """Writes to its buffers where it trains, in place or by assignment, and reads them always."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.sin(self.linear(x) * self.count)
        if self.training:
            self.count = self.count * 1.0
            self.count.mul_(1.5)
        return out


def _in_both_modes(model: nn.Module, x: Tensor) -> Tensor:
    first = model.eval()(x).square().sum()
    return first + model.train()(x).sin().sum() + model(x).sum()


def _tracking_for_a_part(model: nn.Module, x: Tensor) -> Tensor:
    norms = [one for one in model.modules() if isinstance(one, nn.BatchNorm1d)]
    for one in norms:
        one.track_running_stats = False
    first = model(x).square().sum()
    for one in norms:
        one.track_running_stats = True
    return first + model(x).sin().sum()


@pytest.mark.parametrize("loss_of", [_in_both_modes, _tracking_for_a_part])
def test_a_call_that_wrote_nothing_runs_again_after_one_that_writes_to_its_buffers(
    loss_of: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    def trained(action: Action | None) -> list[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), Growing())
        model = nn.Sequential(block, nn.Linear(WIDTH, 1))
        engine = BlockEngine(model, ["0"], actions=lambda block, call: action) if action is not None else None
        found = []
        for _ in range(3):
            model.zero_grad()
            loss = loss_of(model, torch.randn(8, WIDTH))
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            found += [one.clone() for one in model.buffers()]
            calls = engine.calls if engine is not None else ()
            assert [(call.recomputes, call.kept_because) for call in calls] == [(1, "")] * len(calls)
        if engine is not None:
            engine.close()
        return found

    assert all(map(torch.equal, trained(None), trained(Action.RECOMPUTE)))


def test_calls_are_not_compared_with_all_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent block is called a thousand times before its first backward."""
    compared, original = list[Snapshot](), Snapshot.hand_over

    def counted(later: Snapshot, earlier: Snapshot) -> None:
        compared.append(earlier)
        original(later, earlier)

    monkeypatch.setattr(Snapshot, "hand_over", counted)
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), Growing()))
    with BlockEngine(model, ["0"], actions=lambda block, call: Action.RECOMPUTE):
        model(torch.randn(8, WIDTH)).sum().backward()  # until then small buffers are copied
        x = model.eval()(torch.randn(8, WIDTH))
        for _ in range(10):
            x = model.train()(x)
        x.sum().backward()
    assert len(compared) == 10


class Initialized(nn.Module):
    """Scales by the batch at its first call, unseen by version counters, and then at every so many."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.scale, self.calls, self._every = nn.Parameter(torch.ones(WIDTH)), 0, every

    def forward(self, x: Tensor) -> Tensor:
        if self.calls % self._every == 0:
            self.scale.data.mul_(1 / (x.detach().std(0) + 0.1))
        self.calls += 1
        return torch.sin(x * self.scale)


@pytest.mark.parametrize(
    ("every", "expected_runs"), [(100, [0] + [1] * 11), (1, [0] * 12), (5, [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0])]
)
def test_a_block_that_its_first_batch_initializes_is_recomputed_from_then_on(
    every: int, expected_runs: list[int]
) -> None:
    def trained(action: Action | None) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), Initialized(every), nn.Dropout(0.3))
        model = nn.Sequential(block, nn.Linear(WIDTH, 1))
        engine = BlockEngine(model, ["0"], actions=lambda block, call: action) if action is not None else None
        found, recomputed = list[Tensor](), list[int]()
        for _ in range(12):
            model.zero_grad()
            loss = model(torch.randn(8, WIDTH)).square().sum()
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            recomputed += [call.recomputes for call in engine.calls] if engine is not None else []
        if engine is not None:
            engine.close()
        return found, recomputed

    (expected, _), (found, recomputed) = trained(None), trained(Action.RECOMPUTE)
    assert all(map(torch.equal, expected, found))
    assert recomputed == expected_runs


def test_parameters_of_a_block_that_is_kept_for_good_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[Tensor]()
    monkeypatch.setattr(
        module_state, "fingerprint", lambda one, seen: (looked_at.append(one), fingerprint(one, seen))[1]
    )
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), Initialized(1)))
    counts = list[int]()
    with BlockEngine(model, ["0"], actions=lambda block, call: Action.RECOMPUTE):
        for _ in range(5):
            looked_at.clear()
            model(torch.randn(8, WIDTH)).sum().backward()
            counts.append(len(looked_at))
    assert [count > 0 for count in counts] == [True, True, True, False, False]


def test_what_a_call_that_cannot_run_again_is_called_with_is_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, original = list[int](), saved._same_layout

    def counted(tensor: Tensor, copies: dict[int, torch.UntypedStorage]) -> Tensor:
        copied.append(tensor.untyped_storage().nbytes())
        return original(tensor, copies)

    monkeypatch.setattr(saved, "_same_layout", counted)
    model = nn.Sequential(Counting(), nn.Linear(WIDTH, 1))
    counts = []
    with BlockEngine(model, ["0"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        for step in range(6):
            copied.clear()
            model[0].counts = step < 3  # type: ignore[assignment]
            model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
            counts.append((len(copied), engine.calls[0].recomputes))
    assert counts == [(1, 0), (1, 0), (0, 0), (0, 0), (1, 1), (0, 1)]  # of the first that could, nothing was copied


class Counting(nn.Module):
    """Draws from a generator, which cannot be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held, self.counts = nn.Linear(WIDTH, WIDTH), {"a": [(one for one in range(100))]}, True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            next(self.held["a"][0])
        return torch.tanh(self.linear(x))


def test_a_tensor_without_bytes_that_lies_deep_is_no_reason_to_raise() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.held: dict[str, list[Any]] = {"meta": [torch.empty(3, device="meta")], "count": [0]}

        def forward(self, x: Tensor) -> Tensor:
            self.held["count"][0] += 1
            return torch.tanh(self.linear(x))

    model = nn.Sequential(Deep())
    with BlockEngine(model, ["0"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        for step in range(4):
            model(torch.randn(4, WIDTH)).sum().backward()
            assert engine.calls[0].recomputes == 1
            assert model[0].held["count"] == [step + 1]  # type: ignore[index]


def test_calls_share_copies_of_bytes_as_long_as_these_are_the_same() -> None:
    """So that what a hook of the user's collects is not copied for every block anew."""
    held, copies = [torch.zeros(3)], Copies()
    first, second = (Reach((held,), copies=copies) for _ in range(2))
    held[0].numpy()[0] = 1  # no version tells of it
    third = Reach((held,), copies=copies)
    copied = [address(one._bytes[0][1]) for one in (first, second, third)]
    assert copied[0] == copied[1] != copied[2]
    first.restore()
    assert held[0].tolist() == [0.0] * 3
    third.restore()
    assert held[0].tolist() == [1.0, 0.0, 0.0]
