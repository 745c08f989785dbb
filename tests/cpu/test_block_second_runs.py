"""What a second run of a block could find otherwise than the first, or leave otherwise than it was."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from spillway.engines.blocks.block import CallReport
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.containers import freeze, thaw
from spillway.engines.blocks.saved import FrozenTensor
from spillway.errors import RecomputeError
from spillway.methods.actions import Action, ActionOptions
from tests.cpu.block_cases import Chain, Functional, Normalised, Outer, Residual, mean_square
from tests.cpu.families import State, difference, state_of
from tests.cpu.families_of_sequences import Mixture

WIDTH = 32
Loss = Callable[[nn.Module, Tensor], Tensor]


class Trained(NamedTuple):
    states: list[State]
    reports: list[CallReport]
    model: nn.Module


def trained(
    model: nn.Module, action: Action | None, loss_of: Loss = mean_square, steps: int = 3, **options: Any
) -> Trained:
    """States after each of some steps of a copy of the model, under an action for all its blocks or plainly."""
    model = copy.deepcopy(model)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = Trained([], [], model)
    names = [f"blocks.{number}" for number in range(len(model.blocks))]
    engine = None
    if action is not None:
        engine = BlockEngine(model, names, actions=lambda block, call: action, lossy=action.lossy, **options)
    for number in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
        found.states.append(state_of(model, optimizer))
        found.reports.extend(engine.calls if engine is not None else [])
    if engine is not None:
        engine.close()
    return found


def assert_recomputed_as_plain(model: nn.Module, loss_of: Loss = mean_square, **options: Any) -> Trained:
    plain = trained(model, None, loss_of)
    for action in (Action.RECOMPUTE, Action.RECOMPUTE_OFFLOADED):
        again = trained(model, action, loss_of, **options)
        assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None] * 3
        assert {(report.recomputes, report.kept_because) for report in again.reports} == {(1, "")}
    return again


def block_of(function: Callable[..., Any]) -> Functional:
    """A block around a function of itself and what it is called with."""

    class Called(Functional):
        def forward(self, *args: Any) -> Any:
            return function(self, *args)

    return Called(function)


class Giving(Chain):
    """Calls its blocks with what a function makes of their input."""

    def __init__(self, make: Callable[[Tensor], tuple[Any, ...]], *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(*self.make(x))
        return x


# -------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("turned", [torch.conj, lambda z: torch._neg_view(z), lambda z: torch._neg_view(z.conj())])
def test_an_argument_that_is_a_conjugated_or_negated_view(turned: Callable[[Tensor], Tensor]) -> None:
    def function(block: Functional, z: Tensor) -> Tensor:
        return torch.tanh(block.one(z.imag)) * torch.sin(z.real)

    def make(x: Tensor) -> tuple[Any, ...]:
        return (turned(torch.complex(x, x.cos())),)

    assert_recomputed_as_plain(Giving(make, block_of(function), block_of(function)))


STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda s, x: torch.rand(x.shape, generator=s)),
    "NumPy": (lambda: numpy.random.default_rng(3), lambda s, x: torch.from_numpy(s.random(x.shape, "float32"))),
    "NumPy, old": (lambda: numpy.random.RandomState(3), lambda s, x: torch.from_numpy(s.rand(*x.shape)).float()),
    "Python": (lambda: random.Random(3), lambda s, x: torch.full((), s.random())),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_random_stream_among_the_arguments(name: str) -> None:
    build, draw = STREAMS[name]

    def function(block: Functional, x: Tensor, given: dict[str, Any]) -> Tensor:
        return torch.tanh(block.one(x) * draw(given["stream"], x))

    class Drawing(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x, given = self.embed(x), {"stream": build()}
            for block in self.blocks:
                x = block(x, given)
            return x + draw(given["stream"], x)  # the second runs have not moved it

    assert_recomputed_as_plain(Drawing(block_of(function), block_of(function)))


@pytest.mark.parametrize("name", STREAMS)
def test_a_registered_stream_that_no_module_holds(name: str) -> None:
    build, draw = STREAMS[name]

    def run(action: Action | None) -> Trained:
        stream = build()
        model = Chain(*(Functional(lambda block, x: torch.tanh(block.one(x) * draw(stream, x))) for _ in range(2)))
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.data.copy_(value)
        return trained(model, action, steps=2, **({"generators": [stream]} if action is not None else {}))

    start = [parameter.detach() for parameter in Chain(*(Functional(mean_square) for _ in range(2))).parameters()]
    plain, again = run(None), run(Action.RECOMPUTE)
    assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None, None]


def test_what_is_no_stream_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="int is no random stream"):
        BlockEngine(Chain(Residual()), ["blocks.0"], generators=[5])  # type: ignore[list-item]


def test_tuples_that_look_into_what_they_are_given() -> None:
    def function(block: Functional, packed: PackedSequence, top: Any) -> Tensor:
        rows, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        return torch.tanh(block.one(rows[:, 0]) * top.values.sum(1, keepdim=True))

    def make(x: Tensor) -> tuple[Any, ...]:
        return pack_padded_sequence(x[:, None], torch.ones(len(x)), batch_first=True), x.topk(3)

    assert_recomputed_as_plain(Giving(make, block_of(function), block_of(function)))


class Marked(tuple):  # type: ignore[type-arg]
    pass


def test_tuples_keep_their_class_and_attributes_when_they_are_frozen_and_thawed() -> None:
    marked = Marked((torch.ones(2), "a"))
    marked.mark = torch.zeros(3)  # type: ignore[attr-defined]
    twin = thaw(freeze(marked, lambda tensor: FrozenTensor(tensor, None)))
    assert (type(twin), twin[1], twin.mark.tolist()) == (Marked, "a", [0.0] * 3)
    assert twin[0] is not marked[0]
    plain = Marked((1, "a"))
    assert freeze(plain, lambda tensor: FrozenTensor(tensor, None)) is plain


def test_a_deque_that_a_block_appends_to() -> None:
    def function(block: Functional, x: Tensor, memory: deque[Tensor]) -> Tensor:
        y = torch.tanh(block.one(x) + sum(memory))
        memory.append(y)
        return y

    class Remembering(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x, memory = self.embed(x), deque[Tensor](maxlen=2)
            for block in self.blocks:
                x = block(x, memory)
            return x * len(memory)

    assert_recomputed_as_plain(Remembering(*(block_of(function) for _ in range(3))))


# ------------------------------------------------------------------------------------------- what modules hold


def test_parameters_that_others_stand_in_for() -> None:
    def with_scaled_parameters(model: nn.Module, x: Tensor) -> Tensor:
        scaled = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, scaled, (x,)).square().mean()

    assert_recomputed_as_plain(Chain(Residual(), Residual()), with_scaled_parameters)


class Conditioned(nn.Module):
    """Reads an attribute that the model around it sets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.condition: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.condition is not None
        return torch.tanh(self.linear(x) * self.condition)


class Conditioning(Chain):
    cleared = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            block.condition = x.mean(0, keepdim=True).cos()
        for block in self.blocks:
            x = block(x)
        for block in self.blocks if self.cleared else ():
            block.condition = None
        return x


@pytest.mark.parametrize("cleared", [False, True])
def test_an_attribute_that_is_set_before_every_call(cleared: bool) -> None:
    model = Conditioning(Conditioned(), Conditioned())
    model.cleared = cleared
    assert_recomputed_as_plain(model, lambda model, x: mean_square(model, x) + mean_square(model, 2 * x))


def test_an_attribute_that_somebody_begins_to_change_later() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        for block in model.blocks:
            block.factor += 1.0
        return loss

    def function(block: Any, x: Tensor) -> Tensor:
        return torch.tanh(block.one(x) * block.factor)

    model = Chain(Functional(function), Functional(function))
    for block in model.blocks:
        block.factor = 1.0  # type: ignore[assignment]
    assert_recomputed_as_plain(model, loss_of)


class Listing(nn.Module):
    """Changes containers that it holds without assigning them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []
        self.last: deque[float] = deque(maxlen=2)
        self.named = {"sum": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen.append(len(self.seen))
        self.last.append(float(y.detach().sum()))
        self.named["sum"] += self.last[-1]
        return torch.tanh(y * len(self.seen) + self.named["sum"] / 10)


def _by_data(tensor: Tensor) -> None:
    tensor.data.mul_(2)


def _by_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[:3] = 1


@pytest.mark.parametrize("write", [_by_data, _by_numpy])
def test_what_is_written_past_the_version_counter_to_an_argument_that_is_still_held(
    write: Callable[[Tensor], None],
) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        held = [x]
        handle = cast(Any, model.blocks)[1].register_forward_hook(lambda module, args, output: held.append(output))
        loss: Any = mean_square(model, x)
        handle.remove()
        for one in held:
            write(one)
        loss.held = held
        return loss  # type: ignore[no-any-return]

    assert_recomputed_as_plain(Chain(Residual(), Residual(), Residual()), loss_of)


def test_what_was_taken_away_from_a_block_before_it_runs_again_stays_as_it_is() -> None:
    def computes(block: Any, x: Tensor) -> Tensor:
        block.log.append(len(block.log))
        block.seen["n"].add_(1)
        return torch.tanh(block.one(x * len(block.log)) * block.seen["n"])

    taken: list[Any] = []

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        for block in cast(Any, model.blocks):
            block.log, block.seen = [], {"n": torch.zeros(())}
        loss = mean_square(model, x)
        for block in cast(Any, model.blocks):
            taken.append((block.log, block.seen["n"]))
            block.log, block.seen = [], {"n": torch.zeros(())}
        return loss

    assert_recomputed_as_plain(Chain(*[block_of(computes) for _ in range(3)]), loss_of)
    assert [(log, float(seen)) for log, seen in taken] == [([0], 1.0)] * len(taken)


def test_a_tensor_in_a_container_that_a_block_writes_to_and_computes_with() -> None:
    def computes(block: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.averages["size"].lerp_(x.abs().mean(), 0.1)
        return torch.tanh(block.one(x / block.averages["size"]))

    def made() -> nn.Module:
        block: Any = block_of(computes)
        block.averages = {"size": torch.ones(())}
        return cast(nn.Module, block)

    assert_recomputed_as_plain(Chain(made(), made(), made()))


def test_what_python_code_attaches_to_an_argument() -> None:
    def computes(block: Functional, x: Any) -> Tensor:
        result: Any = block.one(x * getattr(x, "gains", [1.0])[0]).tanh()
        result.gains = [result.exp(), 2]
        return result  # type: ignore[no-any-return]

    assert_recomputed_as_plain(Chain(*[block_of(computes) for _ in range(3)]))


def test_containers_that_a_block_holds_and_changes() -> None:
    model = Chain(Listing(), Listing())
    plain = trained(model, None).model
    again = assert_recomputed_as_plain(model).model
    for one, other in zip(plain.blocks, again.blocks, strict=True):
        assert (one.seen, one.last, one.named) == (other.seen, other.last, other.named)
        assert one.seen == [0, 1, 2]


class Writing(nn.Module):
    """Writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return torch.tanh(y + self.mean)


def test_a_call_that_cannot_run_again_holds_no_copies_of_its_arguments() -> None:
    model, x = nn.Sequential(Writing(), nn.Linear(WIDTH, 1)), torch.randn(4, WIDTH, requires_grad=True)
    with BlockEngine(model, ["0"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        for held in (False, True, True):
            loss = model(x.clone()).sum()
            call = engine._calls["0", 0]()
            assert call is not None
            assert [one.alias is not None for one in call.arguments()] == [held]
            loss.backward()
        assert engine.calls[0].recomputes == 1


def test_a_tensor_that_a_block_holds_and_writes_to_is_copied_from_the_second_call_on() -> None:
    model = Chain(Writing(), Writing())
    plain, again = trained(model, None), trained(model, Action.RECOMPUTE)
    assert [difference(a, b) for a, b in zip(plain.states, again.states, strict=True)] == [None] * 3
    reason = "it changes mean, which was not copied before"
    assert [report.kept_because for report in again.reports] == [reason] * 2 + [""] * 4
    assert [report.recomputes for report in again.reports] == [0] * 2 + [1] * 4
    for one, other in zip(plain.model.blocks, again.model.blocks, strict=True):
        assert torch.equal(one.mean, other.mean)


def test_running_statistics_that_are_infinite() -> None:
    model = Chain(Normalised(), Normalised(momentum=None))
    for block in model.blocks:
        block.norm.running_mean.fill_(float("inf"))
    assert_recomputed_as_plain(model)


def test_tokens_that_choose_their_experts() -> None:
    assert_recomputed_as_plain(Chain(Mixture(WIDTH, 5), Mixture(WIDTH, 5)))


# ------------------------------------------------------------------------------------------- around a block and a model


def test_hooks_on_the_model_and_saved_tensors_in_host_memory() -> None:
    model = Chain(Residual(), Residual())
    model.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
    model.register_forward_hook(lambda _, args, output: torch.tanh(output))
    model.register_full_backward_hook(lambda _, before, after: None)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mean_square(model, x.requires_grad_())

    assert_recomputed_as_plain(model, loss_of)


CHECKPOINTED = "torch.utils.checkpoint, which somebody put there, runs it again itself"


@pytest.mark.parametrize("action", Action)
def test_a_block_within_torchs_checkpoint_is_left_to_it(action: Action) -> None:
    class Checkpointing(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointing(Residual(), Residual())
    plain, managed = trained(model, None), trained(model, action)
    assert [difference(a, b) for a, b in zip(plain.states, managed.states, strict=True)] == [None] * 3
    assert [report.kept_because for report in managed.reports] == [CHECKPOINTED] * 6


def test_a_block_within_a_checkpoint_within_a_block() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Residual(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.last(checkpoint(self.inner, x, use_reentrant=False)))

    model = Chain(Holding(), Holding())
    plain = trained(model, None, steps=1)
    names = [f"blocks.{number}{inner}" for number in range(2) for inner in ("", ".inner")]
    twin = copy.deepcopy(model)
    with BlockEngine(twin, names, actions=lambda block, call: Action.RECOMPUTE) as engine:
        torch.manual_seed(0)
        mean_square(twin, torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(0))).backward()
        assert [report.recomputes for report in engine.calls if report.block.count(".") == 1] == [1, 1]
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        image: Any = plain.states[0][f"model 0: gradient of {name}"]
        assert parameter.grad.numpy().tobytes() == image.data


# ---------------------------------------------------------------------------------------------- revoking and closing


@pytest.mark.parametrize("names", [["blocks.0", "blocks.1"], ["blocks.0", "blocks.0.first", "blocks.1.second"]])
def test_what_a_second_run_is_bringing_back_is_not_given_up(names: list[str]) -> None:
    model = Chain(Outer(), Outer())
    x = torch.randn(20, WIDTH)
    torch.manual_seed(0)
    plain = torch.autograd.grad(mean_square(model, x), list(model.parameters()))
    with BlockEngine(model, names, actions=lambda block, call: Action.RECOMPUTE) as engine:
        freed = mock.Mock()

        def revoke_all(*_: object) -> None:
            if torch._C._current_graph_task_id() != -1:
                [freed(engine.revoke(report.block, report.call)) for report in engine.calls]

        for module in model.modules():
            module.register_forward_hook(revoke_all)
        torch.manual_seed(0)
        loss = mean_square(model, x)
        found = torch.autograd.grad(loss, list(model.parameters()))
        assert freed.called
        assert all(map(torch.equal, plain, found))


def test_a_late_write_is_told_of_also_when_somebody_has_tried_to_revoke_what_is_gone() -> None:
    class Exposing(Chain):
        def forward(self, x: Tensor) -> Tensor:
            hidden.append(self.embed(x) * 1)
            return self.blocks[0](hidden[-1])

    hidden: list[Tensor] = []
    model = Exposing(Functional(lambda block, x: torch.tanh(block.one(x * 2))))
    with BlockEngine(model, ["blocks.0"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        mean_square(model, torch.ones(4, WIDTH)).backward()
        loss = mean_square(model, torch.ones(4, WIDTH))
        hidden[-1].detach().add_(1)
        assert engine.revoke("blocks.0") == 0
        assert engine.calls[0].kept_because == ""
        with pytest.raises(RecomputeError, match=r"Argument 0 of call 0 of blocks\.0 was written to"):
            loss.backward()


@pytest.mark.parametrize("inner", [Action.KEEP, Action.RECOMPUTE])
def test_blocks_in_blocks_run_again_after_close(inner: Action) -> None:
    model = Chain(Outer(), Outer())
    x = torch.randn(20, WIDTH)
    torch.manual_seed(0)
    plain = torch.autograd.grad(mean_square(model, x), list(model.parameters()))
    names = [f"blocks.{number}{name}" for number in range(2) for name in ("", ".first", ".second")]
    engine = BlockEngine(model, names, actions=lambda block, call: inner if block.count(".") == 2 else Action.RECOMPUTE)
    torch.manual_seed(0)
    loss = mean_square(model, x)
    engine.close()
    patched = model.blocks[0].first.forward = F.relu  # by somebody, after the engine has gone
    assert all(map(torch.equal, plain, torch.autograd.grad(loss, list(model.parameters()))))
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["blocks.0.first"]
    assert model.blocks[0].first.forward is patched


def test_a_first_run_that_fails_leaves_no_frame_behind() -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        if x.sum() == 0:
            raise ValueError("nothing there")
        return torch.tanh(block.one(x))

    model = Chain(Functional(function))
    with BlockEngine(model, ["blocks.0"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        with pytest.raises(ValueError, match="nothing there"):
            model.blocks[0](torch.zeros(4, WIDTH))
        assert engine._runtime.call is None
        assert engine.revoke("blocks.0") == 0
        mean_square(model, torch.ones(4, WIDTH)).backward()
        assert [report.recomputes for report in engine.calls] == [1]


def test_a_block_that_decides_by_values_is_told_to_compress_what_it_saves() -> None:
    def function(block: Functional, x: Tensor) -> Tensor:
        large = block.one(x).flatten()
        return x + large[large > 0.3].exp().sum()

    model = Chain(Functional(function))
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
    with (
        BlockEngine(
            model,
            ["blocks.0"],
            actions=lambda block, call: Action.RECOMPUTE_COMPRESSED,
            lossy=True,
            options={Action.RECOMPUTE_COMPRESSED: ActionOptions(bits=2)},
        ),
        pytest.raises(RecomputeError, match=r"arguments that had been quantized.* \(Action\.COMPRESS\), or keep"),
    ):
        mean_square(model, x).backward()


@pytest.mark.parametrize("make", [lambda: (one for one in range(3)), lambda: [{"n": n} for n in range(5000)]])
def test_what_cannot_be_copied_and_is_attached_to_an_argument_keeps_no_block(make: Callable[[], Any]) -> None:
    def attach(module: nn.Module, args: Any) -> None:
        args[0].source = make()

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        handle = cast(Any, model.blocks)[1].register_forward_pre_hook(attach)
        loss = mean_square(model, x)
        handle.remove()
        return loss

    assert_recomputed_as_plain(Chain(Residual(), Residual()), loss_of)


class Measured(Residual):
    """Writes the norms of its gradients to a buffer when the backward comes to it, as calibrations do."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.register_buffer("norms", torch.zeros(numbers))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * (1 + self.norms.mean())
        out.register_hook(self.measure)
        return out

    def measure(self, gradient: Tensor) -> None:
        self.norms.add_(gradient.norm())


def test_a_small_buffer_that_a_backward_writes_to_before_the_block_runs_again_is_no_obstacle() -> None:
    assert_recomputed_as_plain(Chain(Measured(8), Measured(8)))


def test_a_larger_one_is_told_once_and_copied_from_then_on_in_all_blocks() -> None:
    def steps(model: nn.Module) -> State:
        torch.manual_seed(0)
        for number in range(3):
            model.zero_grad()
            x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(number))
            mean_square(model, x).backward()
        return state_of(model, [])

    plain = Chain(Measured(4096), Measured(4096))
    model = copy.deepcopy(plain)
    with BlockEngine(model, ["blocks.0", "blocks.1"], actions=lambda block, call: Action.RECOMPUTE):
        with pytest.raises(RecomputeError, match=r"norms of blocks\.1 .* from the next step on it is copied first"):
            steps(model)
        model.load_state_dict(plain.state_dict())
        found = steps(model)
    assert difference(steps(plain), found) is None
