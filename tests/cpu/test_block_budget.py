"""Steps of the block engine that update nothing keep the budget as well, or are refused."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import spillway
from spillway.engines import environment
from spillway.errors import BudgetInfeasible, ModelError
from spillway.native import library
from spillway.session import block_session as blocks
from spillway.session.before import Before
from spillway.session.block_session import BlockSession
from tests.cpu.block_cases import WIDTH, Chain, Residual
from tests.shared import in_turn, notes_of

METHODS = ("checkpoint", "mimose", "mimose-published")
Way = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any]


def model_of(depth: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Chain(*(Residual() for _ in range(depth)))
    return model, torch.optim.Adam(model.parameters())


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    backward(model, optimizer, x)
    optimizer.step()
    optimizer.zero_grad()


def retain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    losses = [model(x).square().mean() for _ in range(3)]
    for loss in losses:
        loss.backward(retain_graph=True)


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def update_and_evaluate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    update(model, optimizer, x)
    with torch.no_grad():
        model(torch.cat([x, x, x, x]))


def allocate(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    backward(model, optimizer, x)
    torch.ones(1 << 20)


WAYS: dict[str, Way] = {
    "a micro-step": backward, "retained graphs": retain, "an evaluation": evaluate,
    "an evaluation after the update": update_and_evaluate, "something of the user's": allocate,
}  # fmt: skip


def trained(ways: Sequence[tuple[Way, int]], method: str, budget: int) -> list[int] | BudgetInfeasible:
    """Peaks of the steps, each on so many rows, or why one was refused; no reported peak is above the budget."""
    model, optimizer = model_of()
    with spillway.manage(
        model, optimizer, budget=budget, method=method, report=spillway.ReportOptions(timeline=True)
    ) as memory:
        try:
            for way, rows in ways:
                x = torch.ones(rows, WIDTH)
                with memory.step(x):
                    way(model, optimizer, x)
        except BudgetInfeasible as refusal:
            return refusal
        finally:
            assert all(report.peak_bytes <= budget for report in memory.history)
        return [report.peak_bytes for report in memory.history]


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("what", "method"), in_turn(WAYS, METHODS))
def test_a_step_that_passes_the_budget_without_an_update_is_refused(what: str, method: str) -> None:
    plan = [(WAYS[what], 128)] * 2
    peaks = trained(plan, method, 1 << 30)
    assert isinstance(peaks, list)
    refusal = trained(plan, method, int(0.5 * peaks[0]))
    assert isinstance(refusal, BudgetInfeasible)
    for _ in range(4):  # a step of several forwards is told forward by forward
        if isinstance(refusal, BudgetInfeasible):
            assert refusal.smallest_budget > refusal.allowed
            refusal = trained(plan, method, refusal.smallest_budget)
    assert isinstance(refusal, list)


def test_without_that_refusal_it_would_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above."""
    monkeypatch.setattr(blocks._Step, "_refusal", lambda step: None)
    with pytest.raises(AssertionError), pytest.warns(UserWarning, match="are allowed"):
        trained([(allocate, 64)], "checkpoint", 2 << 20)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", METHODS)
def test_what_no_measured_step_did_is_measured_from_there_on(method: str) -> None:
    def peak(ways: Sequence[tuple[Way, int]], budget: int) -> list[int] | BudgetInfeasible:
        model, optimizer = model_of()
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            assert isinstance(memory, BlockSession)
            try:
                for way, rows in ways:
                    x = torch.ones(rows, WIDTH)
                    with memory.step(x):
                        way(model, optimizer, x)
            except BudgetInfeasible as refusal:
                return refusal
            return [report.peak_bytes for report in memory.history]

    first = peak([(update, 4096)] * 8, 1 << 30)
    assert isinstance(first, list)
    budget = max(first) + (1 << 20)
    refusal = peak([*[(update, 4096)] * 8, (retain_many, 4096)], budget)
    assert isinstance(refusal, BudgetInfeasible)


def retain_many(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    sum(model(x).square().mean() for _ in range(8)).backward()


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", METHODS)
def test_a_refused_micro_step_is_refused_before_its_first_op(method: str) -> None:
    model, optimizer = model_of()
    before = torch.get_rng_state()
    with spillway.manage(
        model, optimizer, budget=64 * 1024, method=method, blocks=spillway.BlockOptions(names=["blocks.0", "blocks.1"])
    ) as memory:
        ran: list[Any] = []
        model.blocks[0].register_forward_hook(lambda *_: ran.append(1))
        with pytest.raises(BudgetInfeasible), memory.step(torch.ones(256, WIDTH)):
            backward(model, optimizer, torch.ones(256, WIDTH))
    assert ran == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", METHODS)
def test_a_larger_later_batch_is_refused_again_and_what_is_named_holds_for_it(method: str) -> None:
    small = trained([(update, 64)] * 2, method, 1 << 30)
    assert isinstance(small, list)
    plan = [(update, 64), (update, 64), (update, 512), (update, 512)]
    refusal = trained(plan, method, max(small))
    assert isinstance(refusal, BudgetInfeasible)
    assert refusal.smallest_budget > max(small)
    assert isinstance(trained(plan, method, refusal.smallest_budget), list)


@pytest.mark.parametrize("method", METHODS)
def test_an_error_of_the_users_in_a_step_above_the_budget_is_theirs_and_the_next_step_is_kept(method: str) -> None:
    model, optimizer = model_of()
    with spillway.manage(
        model, optimizer, budget="512KiB", method=method, report=spillway.ReportOptions(timeline=True)
    ) as memory:
        with pytest.raises(ZeroDivisionError), memory.step(torch.ones(8, WIDTH)):
            backward(model, optimizer, torch.ones(8, WIDTH))
            torch.ones(1 << 20)
            raise ZeroDivisionError
        with memory.step(torch.ones(8, WIDTH)):
            update(model, optimizer, torch.ones(8, WIDTH))
    assert [report.peak_bytes <= report.allowed for report in memory.history] == [True]


class Turning(Residual):
    """As many turns as the data say: a step of a size that always fitted needs many times as much."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x[0, 0])):
            x = super().forward(x)
        return x


def turned(turns: Sequence[int], method: str, budget: int) -> tuple[list[spillway.StepReport], bool, bool]:
    """Reports, whether a step was refused, and whether that left parameters and the optimizer's state alone."""
    torch.manual_seed(0)
    model = Chain(Turning(), Turning())
    optimizer = torch.optim.Adam(model.parameters())
    names = ["blocks.0", "blocks.1"]
    with spillway.manage(
        model, optimizer, budget=budget, method=method, blocks=spillway.BlockOptions(names=names)
    ) as memory:
        for number in turns:
            x = torch.zeros(512, WIDTH)
            x[0, 0] = number
            before = [one.clone() for one in (*model.parameters(), *tensors_of(optimizer))]
            try:
                with memory.step(x):
                    update(model, optimizer, x)
            except BudgetInfeasible:
                after = [*model.parameters(), *tensors_of(optimizer)]
                return list(memory.history), True, all(map(torch.equal, before, after))
        return list(memory.history), False, True


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", METHODS)
def test_a_size_that_always_fitted_is_measured_all_the_same_and_refused_before_its_update(method: str) -> None:
    usual, _, _ = turned([1] * 20, method, 1 << 30)
    assert all(report.peak_measured for report in usual)
    budget = 2 * max(report.peak_bytes for report in usual)
    reports, refused, untouched = turned([*[1] * 20, 30], method, budget)
    assert (len(reports), refused, untouched) == (20, True, True)
    assert all(report.peak_bytes <= budget and report.peak_measured for report in reports)


def test_without_a_trace_of_sizes_that_fitted_that_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above."""
    ways = [1] * 20
    budget = 2 * max(report.peak_bytes for report in turned(ways, "checkpoint", 1 << 30)[0])
    trace, steps = blocks.trace_for, iter(range(1 << 30))
    monkeypatch.setattr(blocks, "trace_for", lambda *given: trace(*given) if next(steps) < 5 else None)
    reports, refused, _ = turned([*ways, 30], "checkpoint", budget)
    assert not (refused and all(report.peak_measured for report in reports))


class Hoarding(nn.Module):
    """Has buffers and draws from every stream, and keeps memory of its own when it is told to, and where."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = Residual(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mask", torch.zeros(64, 512))
        self.held: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.detach().sum()  # another tensor every time
        x = self.drop(self.norm(self.inner(x))) * random.random() * numpy.random.rand()
        if self.where == "forward":
            self.held.append(torch.ones(1 << 20))
        elif self.where == "backward":
            x.register_hook(lambda _: self.held.append(torch.ones(1 << 20)))
        return x


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that a refused step leaves alone."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(optimizer), torch.get_rng_state()]
    numbers = [random.getstate(), numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2:]]
    return [tensor.detach().clone().numpy().tobytes() for tensor in tensors] + numbers


def refused_at(where: str, method: str, known: int, *, closure: bool = False) -> tuple[list[Any], list[Any]]:
    """Before and after a step that is refused there, behind so many that fitted, all with a closure or without."""
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    model = Chain(*(Hoarding() for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    names = [f"blocks.{number}" for number in range(4)]
    with spillway.manage(
        model, optimizer, budget="3MiB", method=method, blocks=spillway.BlockOptions(names=names)
    ) as memory:
        x = torch.randn(64, WIDTH)
        for number in range(known + 1):
            before = everything(model, optimizer)
            if number == known:
                model.blocks[1].where = where
                with pytest.raises(BudgetInfeasible) as refused, memory.step(x):
                    held: list[torch.Tensor] = []

                    def run(held: list[torch.Tensor] = held) -> None:
                        backward(model, optimizer, x)
                        held += [torch.ones(1 << 20)] if where == "optimizer" else []

                    if closure:
                        optimizer.step(run)
                    else:
                        run()
                        optimizer.step()
                assert not [note for note in notes_of(refused.value) if "gradients stay" not in note]
            else:
                with memory.step(x):
                    if closure:
                        optimizer.step(closure=lambda: backward(model, optimizer, x))
                        optimizer.zero_grad()
                    else:
                        update(model, optimizer, x)
        return before, everything(model, optimizer)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("where", "method", "known", "closure"),
    in_turn(["forward", "backward", "optimizer"], METHODS, [0, 3], [False, True], times=2),
)
def test_a_refused_step_leaves_all_but_gradients_as_it_was_when_it_began(
    known: int, where: str, method: str, closure: bool
) -> None:
    before, after = refused_at(where, method, known, closure=closure)
    assert before == after


def test_a_refusal_that_the_users_code_wraps_puts_all_back_too() -> None:
    model, optimizer = model_of()
    model.register_buffer("count", torch.zeros(3))
    with spillway.manage(model, optimizer, budget="4MiB", method="checkpoint") as memory:
        x = torch.randn(8, WIDTH)
        for number in range(3):
            before = everything(model, optimizer)
            with pytest.raises(RuntimeError, match="mine") if number == 2 else contextlib.nullcontext(), memory.step(x):
                model.count += torch.rand(3)
                backward(model, optimizer, x)
                held = [torch.ones(1 << 20)] if number == 2 else []
                try:
                    optimizer.step()
                except BudgetInfeasible as refused:
                    raise RuntimeError("mine") from refused
                optimizer.zero_grad()
        del held
        assert everything(model, optimizer) == before


@pytest.mark.parametrize("heard", [False, True])
def test_where_parameters_were_changed_nothing_is_put_back_and_that_is_said(heard: bool) -> None:
    model, _ = model_of()
    model.register_buffer("count", torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with spillway.manage(model, optimizer if heard else None, budget="4MiB", method="checkpoint") as memory:
        x = torch.randn(8, WIDTH)
        for number in range(2):
            with pytest.raises(BudgetInfeasible) if number else contextlib.nullcontext() as refused, memory.step(x):
                model.count += 1
                model(x).square().mean().backward()
                if heard:
                    optimizer.step()
                with torch.no_grad():
                    for parameter in model.parameters() if not heard else ():
                        parameter -= 0.1
                held = [torch.ones(1 << 20)] if number else []
        del held
        assert "Parameters had been changed" in str(refused.value.__notes__)
        assert model.count.tolist() == [2, 2, 2]


def inferred(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(*shape)


SMALL, LARGE = (4, 8), (64, 512)
ODD_BUFFERS: dict[str, Callable[[tuple[int, int]], torch.Tensor]] = {
    "quantized": lambda shape: torch.quantize_per_tensor(torch.ones(shape), 0.1, 3, torch.qint8),
    "quantized by channels": lambda shape: torch.quantize_per_channel(
        torch.ones(shape), torch.ones(shape[0]), torch.zeros(shape[0]), 0, torch.qint8
    ),
    "inference": lambda shape: inferred(*shape),
    "nested": lambda shape: torch.nested.nested_tensor([torch.ones(shape), torch.ones(2)[:, None]]),
    "sparse": lambda shape: torch.ones(shape).to_sparse(),
    "compressed sparse": lambda shape: torch.ones(shape).to_sparse_csr(),
    "conjugate": lambda shape: torch.ones(shape, dtype=torch.complex64).conj(),
    "half complex": lambda shape: torch.ones(shape).to(torch.complex32),
    "expanded": lambda shape: torch.ones(shape[1]).expand(shape),
    "bits": lambda shape: torch.ones(shape, dtype=torch.uint8).view(torch.bits8),
}


@pytest.mark.long(but=3)
@pytest.mark.filterwarnings("ignore")  # torch's prototypes
@pytest.mark.parametrize(("kind", "shape", "inside"), in_turn(ODD_BUFFERS, [SMALL, LARGE], [False, True]))
def test_buffers_of_every_kind_are_trained_with_and_left_alone(kind: str, shape: Any, inside: bool) -> None:
    model, optimizer = model_of()
    (model.blocks[0] if inside else model).register_buffer("odd", ODD_BUFFERS[kind](shape))
    named = spillway.BlockOptions(names=["blocks.0", "blocks.1"])
    with spillway.manage(model, optimizer, budget="6MiB", method="checkpoint", blocks=named) as memory:
        x = torch.randn(8, WIDTH)
        for number in range(4):
            stream = torch.get_rng_state()
            ends = pytest.raises(BudgetInfeasible) if number == 3 else contextlib.nullcontext()
            with ends as refused, memory.step(x):
                torch.rand(3)
                held = [torch.ones(2 << 20)] if number == 3 else []
                update(model, optimizer, x)
        del held
        assert not [note for note in notes_of(refused.value) if "gradients stay" not in note]
        assert torch.equal(stream, torch.get_rng_state())


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "made": lambda model: model.register_buffer("late", torch.ones(3)),
    "given": lambda model: setattr(model, "nothing", torch.ones(3)),
    "taken": lambda model: setattr(model, "small", None),
    "written by data": lambda model: model.small.data.add_(1),
    "given other data": lambda model: setattr(model.small, "data", torch.ones(7, dtype=torch.bfloat16)),
    "given other data, a large one": lambda model: setattr(model.large, "data", torch.ones(7)),
    "resized": lambda model: model.small.resize_(40),
    "zero with another sign": lambda model: model.small.neg_(),
    "an expanded one": lambda model: model.expanded[0].add_(1),
    "a view of another": lambda model: model.view.add_(1),
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize("kind", CHANGES)
def test_whatever_a_refused_step_did_to_a_buffer_is_undone(kind: str) -> None:
    model, optimizer = model_of()
    for name, buffer in (("small", torch.zeros(9)), ("nothing", None), ("expanded", torch.zeros(5).expand(3, 5))):
        model.register_buffer(name, buffer)
    model.register_buffer("view", model.small[2:4])
    model.register_buffer("large", torch.zeros(150, 150))

    def buffers() -> dict[str, Any]:
        return {
            name: None if one is None else (one.dtype, one.shape, one.stride(), str(one.tolist()))
            for name, one in model._buffers.items()
        }

    with spillway.manage(model, optimizer, budget="4MiB", method="checkpoint") as memory:
        x = torch.randn(8, WIDTH)
        for number in range(3):
            before = buffers()
            ends = pytest.raises(BudgetInfeasible) if number == 2 else contextlib.nullcontext()
            with ends as refused, memory.step(x):
                if number == 2:
                    CHANGES[kind](model)
                held = [torch.ones(1 << 20)] if number == 2 else []
                update(model, optimizer, x)
        del held
        assert not [note for note in notes_of(refused.value) if "gradients stay" not in note]
        assert buffers() == before


def test_a_large_buffer_that_is_written_where_no_version_tells_is_named() -> None:
    model, optimizer = model_of()
    model.register_buffer("bank", torch.zeros(128, 1024))
    with spillway.manage(model, optimizer, budget="4MiB", method="checkpoint") as memory:
        x = torch.randn(8, WIDTH)
        with memory.step(x):
            update(model, optimizer, x)
        with pytest.raises(BudgetInfeasible) as refused, memory.step(x):
            model.bank.data[3, 3] = 1
            backward(model, optimizer, x)
            held = torch.ones(1 << 20)
            optimizer.step()
        del held
        assert "'bank'" in str(refused.value.__notes__)


def test_without_what_is_put_back_that_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above."""
    monkeypatch.setattr(Before, "put_back", lambda _, updated: "")
    before, after = refused_at("backward", "checkpoint", 3)
    assert before != after


def test_a_large_buffer_that_never_changed_and_then_does_is_named_where_it_cannot_be_put_back() -> None:
    model, optimizer = model_of()
    mask = torch.zeros(128, 1024)
    model.register_buffer("mask", mask)
    with spillway.manage(model, optimizer, budget="4MiB", method="checkpoint") as memory:
        x = torch.randn(8, WIDTH)
        with memory.step(x):
            update(model, optimizer, x)
        for note in ("mask", None):  # from then on it is copied
            with pytest.raises(BudgetInfeasible) as refused, memory.step(x):
                mask.add_(1)
                backward(model, optimizer, x)
                held = torch.ones(1 << 20)
                optimizer.step()
            del held
            assert ("mask" in str(getattr(refused.value, "__notes__", ""))) == (note is not None)
        assert mask.eq(1).all()


def test_a_block_is_managed_by_one_session_at_a_time() -> None:
    model, _ = model_of()
    other = nn.Sequential(*model.blocks)
    named = [spillway.BlockOptions(names=[f"{prefix}{number}" for number in range(2)]) for prefix in ("blocks.", "")]
    session = spillway.manage(model, budget=None, method="checkpoint", blocks=named[0])
    with pytest.raises(ModelError, match="The block 0 is managed by another session"):
        spillway.manage(other, budget=None, method="checkpoint", blocks=named[1])
    session.close()
    spillway.manage(other, budget=None, method="checkpoint", blocks=named[1]).close()
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_lazy_buffers_without_a_size_are_refused_too() -> None:
    with pytest.raises(ModelError, match="lazy"):
        spillway.manage(nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False)), budget="4MiB")


class Foreign(torch.optim.Optimizer):
    """Of which nothing is known: three states, and temporaries of all parameters at once."""

    def __init__(self, parameters: Any, *, temporaries: int = 2) -> None:
        super().__init__(parameters, {})
        self.temporaries = temporaries

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            for one in trained:
                for name in () if self.state[one] else "abc":
                    self.state[one][name] = torch.zeros_like(one)
            held = [[one.grad.sign() for one in trained] for _ in range(self.temporaries)]
            for one, direction in zip(trained, held[0], strict=True):
                self.state[one]["a"].add_(direction)
                one.sub_(self.state[one]["a"], alpha=1e-3)


def updated_by_foreign(method: str | None, budgets: Sequence[int], **options: Any) -> tuple[list[bytes], list[Any]]:
    """What was trained, a step under each budget, and the reports of steps that were not refused, or the refusal."""
    torch.manual_seed(0)
    model = Chain(*(Residual() for _ in range(3)))
    optimizer = Foreign(model.parameters())
    x = torch.randn(8, WIDTH)
    if method is None:
        for _ in budgets:
            update(model, optimizer, x)
        return [one.detach().numpy().tobytes() for one in model.parameters()], []
    said: list[Any] = []
    with spillway.manage(
        model, optimizer, budget=budgets[0], method=method, blocks=spillway.BlockOptions(**options)
    ) as memory:
        for budget in budgets:
            memory.budget = budget
            try:
                with memory.step(x):
                    update(model, optimizer, x)
                said.append(memory.history[-1])
            except BudgetInfeasible as refused:
                said.append(refused)
    return [one.detach().numpy().tobytes() for one in model.parameters()], said


FOREIGN = [("auto", {}), ("mimose", {"page": True}), ("mimose", {}), ("checkpoint", {})]


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("method", "options"), FOREIGN)
def test_an_optimizer_that_tells_nothing_beforehand_is_watched_or_refused_and_never_over(
    method: str, options: dict[str, Any]
) -> None:
    needed = max(report.peak_bytes for report in updated_by_foreign(method, [1 << 30] * 2, **options)[1])
    budgets = [int(0.9 * needed)] * 3
    weights, said = updated_by_foreign(method, budgets, **options)
    if method == "auto" or options:
        assert weights == updated_by_foreign(None, budgets)[0]
        assert all(report.peak_bytes <= budgets[0] for report in said)
    else:
        assert all(isinstance(refused, BudgetInfeasible) for refused in said)
        assert "What Foreign needs cannot be told before" in str(notes_of(said[0]))
        enough = [said[0].smallest_budget] * 3
        assert all(report.peak_bytes <= enough[0] for report in updated_by_foreign(method, enough, **options)[1])


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("method", "options"), FOREIGN)
def test_what_such_an_update_took_is_reckoned_with_from_then_on(method: str, options: dict[str, Any]) -> None:
    """A budget just above that is enough; one just below is not. Where nobody lends memory, and steps may be paged, the
    ops of updates are watched always."""
    ample = [1 << 30] * 3
    taken = updated_by_foreign(method, ample, **options)[1][-1].peak_bytes
    budgets = [*ample, int(1.02 * taken), int(1.02 * taken), int(0.97 * taken)]
    said = updated_by_foreign(method, budgets, **options)[1]
    assert all(report.peak_bytes <= budget for report, budget in zip(said[:5], budgets, strict=False))
    assert [report.ops > 0 for report in said[3:5]] == [
        bool(options) or (method == "auto" and not library.wanted())
    ] * 2
    if method == "auto" or options:
        assert said[5].ops
        assert said[5].peak_bytes <= budgets[5]
    else:
        assert said[5].needed == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize("late", [1, 4])
def test_an_update_that_takes_more_than_all_before_it_is_kept_under_the_budget(late: int) -> None:
    """Twelve times the parameters at once, in one of five steps: the other steps follow their plans."""

    def trained(budget: int | None) -> tuple[list[bytes], Any]:
        model, _ = model_of(4)
        optimizer = Foreign(model.parameters())
        memory = None if budget is None else spillway.manage(model, optimizer, budget=budget)
        for step in range(5):
            optimizer.temporaries = 12 if step == late else 2
            with contextlib.nullcontext() if memory is None else memory.step(x):
                update(model, optimizer, x)
        if memory is not None:
            memory.close()
        return [one.detach().numpy().tobytes() for one in model.parameters()], memory

    x = torch.randn(8, WIDTH)
    plain, _ = trained(None)
    peaks = [report.peak_bytes for report in trained(1 << 30)[1].history]
    budget = int(max(peaks[:late] + peaks[late + 1 :]) * 1.1)
    assert budget < 0.9 * peaks[late]
    weights, memory = trained(budget)
    assert weights == plain
    assert max(report.peak_bytes for report in memory.history) <= budget
    if late == 4:  # there are plans by then, and the update is lent what it has no room for
        assert memory.history[3].projected_bytes
        assert not library.wanted() or memory.history[late].beyond_bytes


def test_state_that_grows_with_every_step_is_reckoned_with() -> None:
    """LBFGS keeps two more tensors of all parameters after each of its first hundred steps."""
    model, _ = model_of(4)
    model.eval()  # without dropout
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-4, max_iter=1)
    x = torch.randn(8, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        return loss

    parameters = sum(one.nbytes for one in model.parameters())
    budget = 14 * parameters
    with spillway.manage(model, optimizer, budget=budget, method="checkpoint") as memory:
        with pytest.raises(BudgetInfeasible, match="the smallest budget"):
            for _ in range(20):
                with memory.step(x):
                    optimizer.step(closure)
        assert len(memory.history) > 2
        assert max(report.peak_bytes for report in memory.history) <= budget


@pytest.mark.long(but=5)
@pytest.mark.parametrize("budget", [700_000, 1_000_000, 1 << 30])
@pytest.mark.parametrize("method", ["auto", "checkpoint", "mimose", "keep-all", "lru"])
def test_nothing_of_a_step_is_held_until_python_looks_for_cycles(method: str, budget: int) -> None:
    """Batches of steps that were over were there for as long as nobody collected garbage, beside the account."""
    model, optimizer = model_of(4)
    gone: list[bool] = []
    gc.collect()
    gc.disable()
    try:
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            for _ in range(6):
                batch = torch.randn(64, WIDTH)
                held = weakref.ref(batch)
                with contextlib.suppress(BudgetInfeasible), memory.step(batch):
                    update(model, optimizer, batch)
                del batch
                gone.append(held() is None)
    finally:
        gc.enable()
    assert gone == [True] * 6


@pytest.mark.long(but=3)
@pytest.mark.parametrize("method", ["checkpoint", "mimose", "keep-all", "lru"])
def test_nor_is_anything_of_a_step_that_was_refused(method: str) -> None:
    """Its graph was there, beside the account, while the step was tried again under the budget that was told."""
    model, optimizer = model_of(4)
    outputs: list[weakref.ref[Any]] = []

    def step(memory: spillway.Session, x: torch.Tensor) -> None:
        with memory.step(x):
            output = model(x)
            outputs.append(weakref.ref(output))
            torch.ones(1 << 22)
            output.square().mean().backward()
            optimizer.step()

    gc.collect()
    gc.disable()
    try:
        with spillway.manage(model, optimizer, budget="8MiB", method=method) as memory:
            with pytest.raises(BudgetInfeasible):
                step(memory, torch.randn(64, WIDTH))
            assert [output() for output in outputs] == [None]
    finally:
        gc.enable()


COLLECTED: contextvars.ContextVar[dict[str, list[torch.Tensor]]] = contextvars.ContextVar("collected")
COUNTED: contextvars.ContextVar[tuple[list[int]]] = contextvars.ContextVar("counted")
OTHERS = [contextvars.ContextVar[Any](name, default=None) for name in ("circle", "grows", "deep")]


class Collecting(Residual):
    """Leaves what it computes where the caller looks for it, as modules of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        COLLECTED.get()["outputs"].append(out)
        COUNTED.get()[0].append(1)
        return out


@pytest.mark.parametrize("method", ["auto", "checkpoint", "mimose"])
def test_what_a_context_variable_collects_is_collected_once_and_holds_no_graph(method: str) -> None:
    torch.manual_seed(0)
    model, x = Chain(*(Collecting() for _ in range(4))), torch.randn(64, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    outputs: list[weakref.ref[Any]] = []

    def step() -> int:
        collected: dict[str, list[torch.Tensor]] = {"outputs": []}
        token, counted = COLLECTED.set(collected), COUNTED.set(([],))
        output = model(x)
        assert len(COUNTED.get()[0]) == 4
        COLLECTED.reset(token)
        outputs.append(weakref.ref(output))
        (output.square().mean() + sum(one.mean() for one in collected["outputs"])).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(COUNTED.get()[0]) == 4
        COUNTED.reset(counted)
        return len(collected["outputs"])

    with spillway.manage(model, optimizer, budget=600_000, method=method) as memory:
        for _ in range(4):
            with memory.step(x):
                assert step() == 4
        assert sum(report.recomputed_blocks for report in memory.history) > 0
        gc.collect()
        assert all(output() is None for output in outputs)


class Grows:
    """A key at whose hash its dictionary grows, as it may at any time where another thread writes there."""

    def __init__(self) -> None:
        self.held: dict[Any, int] = {}
        self.held[self] = 0

    def __hash__(self) -> int:
        self.held[len(self.held)] = 0
        return 1


class Gated(Residual):
    """Takes a part of what it computes with from there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = COLLECTED.get()["gates"]
        out: torch.Tensor = super().forward(x) * torch.sigmoid(gates[0])
        return out * gates[-1]


@pytest.mark.parametrize("method", ["auto", "checkpoint", "mimose"])
def test_a_second_run_takes_from_a_context_variable_what_the_first_took(method: str) -> None:
    """A tensor whose gradient is wanted; beside it what leads back to itself, what grows, and what is nested deep."""
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"deeper": deep}
    circle: list[Any] = []
    circle.append(circle)

    def trained(memory: spillway.Session | None, model: torch.nn.Module, gate: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(64, WIDTH)
        for _ in range(4):
            model.zero_grad()
            gate.grad = None
            with contextlib.nullcontext() if memory is None else memory.step(x):
                tokens = [one.set(value) for one, value in zip(OTHERS, (circle, Grows().held, deep), strict=True)]
                token = COLLECTED.set({"gates": [(gate * 2).expand_as(x)]})
                model(x).square().mean().backward()
                COLLECTED.reset(token)
                for one, before in zip(OTHERS, tokens, strict=True):
                    one.reset(before)
        return [one.grad.clone() for one in (gate, *model.parameters()) if one.grad is not None]

    torch.manual_seed(0)
    model, gate = Chain(*(Gated() for _ in range(4))), torch.nn.Parameter(torch.ones(WIDTH))
    plain = trained(None, model, gate)
    with spillway.manage(model, torch.optim.SGD(model.parameters()), budget=600_000, method=method) as memory:
        grads = trained(memory, model, gate)
    assert sum(report.recomputed_blocks for report in memory.history) > 0
    assert all(torch.equal(one, other) for one, other in zip(grads, plain, strict=True))


def test_what_is_nested_deep_in_a_context_variable_is_not_followed_to_pythons_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the garbage collector may run, and finalizers of others end in a `RecursionError`."""
    deepest, own = [0], environment._own

    def counted(value: Any, room: list[int], owns: dict[int, Any], depth: int = 0) -> Any:
        deepest[0] = max(deepest[0], depth)
        return own(value, room, owns, depth)

    monkeypatch.setattr(environment, "_own", counted)
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"deeper": deep}
    token = COLLECTED.set(deep)
    variables = environment._apart(contextvars.copy_context())
    COLLECTED.reset(token)
    assert 0 < deepest[0] <= environment._DEEPEST + 1
    assert variables[COLLECTED] is deep, "it is shared"


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", ["auto", "checkpoint", "mimose", "keep-all", "lru", "window"])
def test_a_session_that_is_closed_hears_of_no_deaths(method: str) -> None:
    """Several weak references with callbacks to one storage, as of sessions one after the other, end the process where
    Python collects them just as the storage dies."""
    model, optimizer = model_of(4)
    x = torch.randn(64, WIDTH)
    watched = [x, *model.parameters()]
    gc.collect()
    gc.disable()
    try:
        for budget in (2_000_000, 600_000, 300_000):
            with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
                with contextlib.suppress(BudgetInfeasible), memory.step(x):
                    update(model, optimizer, x)
                with contextlib.suppress(BudgetInfeasible), memory.step(x):
                    update(model, optimizer, x)
        found = [one.__callback__ for tensor in watched for one in weakref.getweakrefs(tensor.untyped_storage())]
        ours = [one for one in found if "torch" not in getattr(one, "__module__", "torch")]
        assert not ours  # fake tensors of torch's own stay until they are collected
    finally:
        gc.enable()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", METHODS)
def test_what_an_update_takes_is_told_anew_when_its_settings_change(method: str) -> None:
    """As a schedule of the weight decay does it, with which a foreach optimizer has a copy of all gradients."""
    torch.manual_seed(0)
    model, x = Chain(*(Residual() for _ in range(6))), torch.randn(2, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=True)
    with spillway.manage(model, optimizer, budget=1 << 30, method=method) as memory:
        for _ in range(3):
            with memory.step(x):
                update(model, optimizer, x)
        memory.budget = budget = int(1.05 * memory.history[-1].peak_bytes)
        with memory.step(x):
            update(model, optimizer, x)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        with memory.step(x):
            update(model, optimizer, x)  # in parts
        assert memory.history[-1].peak_bytes <= budget
        memory.budget = 1 << 30
        with memory.step(x):
            update(model, optimizer, x)
        assert memory.history[-1].peak_bytes > 1.1 * budget
