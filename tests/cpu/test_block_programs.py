"""Random block programs under the methods of the block engine, and what an extra run of a forward must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.blocks.extra_forward import undone
from spillway.engines.blocks.reach import Copies, Reach
from spillway.engines.environment import Environment
from tests.cpu.block_judge import METHODS, judge, plainly
from tests.cpu.block_parts import Box, Scripted, Slotted
from tests.cpu.block_programs import program_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

FAILED: dict[int, str] = {
    1: "mimose-published", 4: "checkpoint", 7: "mimose-published", 101: "checkpoint", 109: "mimose", 125: "checkpoint",
    1004: "mimose-published", 2005: "checkpoint",
}  # fmt: skip
"""Programs that once went wrong under a method: state that lies deep, counters, an average in place, streams,
TorchScript whose first run does not count."""


@pytest.mark.long(but=1)
@pytest.mark.parametrize("seed", FAILED)
def test_programs_that_went_wrong_train_as_they_do_plainly(seed: int) -> None:
    verdict = judge(seed, FAILED[seed], 1 << 30, plainly(seed))
    assert verdict.wrong == ""
    assert verdict.refused is None


@pytest.mark.long(but=1)
@pytest.mark.parametrize("seed", [200, 201, 202])
def test_random_programs_train_as_they_do_plainly(seed: int) -> None:
    verdict = judge(seed, METHODS[seed % 3], 1 << 30, plainly(seed))
    assert verdict.wrong == ""


class Changing(nn.Module):
    """Changes one thing when it runs."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.plain, self.held = torch.zeros(8), Box({"deep": [torch.zeros(8), 0], "slots": Slotted(0)})
        self.stream = [torch.Generator().manual_seed(0)]
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.norm(self.linear(x))


def _put(place: list[Any], value: Any) -> None:
    place[-1] = value


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a buffer in place": lambda block, x: block.mean.add_(1),
    "a buffer through data": lambda block, x: block.mean.data.add_(1),
    "a parameter through data": lambda block, x: block.linear.weight.data.mul_(0.5),
    "a tensor that is no buffer": lambda block, x: block.plain.add_(1),
    "a tensor deep inside": lambda block, x: block.held.value["deep"][0].add_(1),
    "a number deep inside": lambda block, x: _put(block.held.value["deep"], 7),
    "a slot": lambda block, x: setattr(block.held.value["slots"], "value", 7),
    "a random stream in a list": lambda block, x: torch.rand((), generator=block.stream[0]),
    "the input": lambda block, x: x.add_(1),
    "a flag": lambda block, x: block.norm.eval(),
    "a gradient": lambda block, x: block.linear(torch.ones(2, 8)).sum().backward(),
    "what hangs in a graph": lambda block, x: setattr(block, "plain", block.linear(x)),
    "a hook": lambda block, x: block.linear.register_forward_hook(lambda *_: None),
    "a new attribute": lambda block, x: setattr(block, "late", 1),
    "a class": lambda block, x: setattr(type(block), "calls", 1),
}


def _everything(block: Any, x: Tensor) -> list[Any]:
    tensors = [block.linear.weight, block.mean, block.plain, block.held.value["deep"][0], x, block.norm.running_mean]
    return [
        *(tensor.detach().clone() for tensor in tensors), *(tensor._version for tensor in tensors),
        block.linear.weight.grad, block.stream[0].get_state(), block.held.value["deep"][1],
        block.held.value["slots"].value, block.norm.training, len(block.linear._forward_hooks), sorted(vars(block)),
        hasattr(type(block), "calls"), block.plain.requires_grad,
    ]  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_an_extra_forward_leaves_everything_as_it_was(what: str) -> None:
    block, x = Changing(CHANGES[what]), torch.ones(4, 8)
    before = _everything(block, x)
    with undone(Environment([], []), (block,), (x,), {}) as (args, kwargs):
        block(*args, **kwargs)
        during = _everything(block, x)
    assert repr(during) != repr(before)
    assert repr(_everything(block, x)) == repr(before)


def test_what_can_be_reached_is_told_to_have_changed() -> None:
    block = Changing(lambda block, x: None)
    reach = Reach((block,), apart=tuple(block.modules()), lasting=True, copies=Copies())
    assert not reach.changed()
    block.held.value["deep"][0].data.add_(1)
    assert reach.changed()
    reach.restore()
    assert not reach.changed()


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        slope = torch.func.grad(lambda t: self.linear(t).square().sum())(x.detach())
        pushed = torch.func.jvp(lambda t: torch.sin(self.linear(t)), (x,), (torch.ones_like(x),))[1]
        each = torch.func.vmap(lambda row: torch.sin(self.linear(row)))(x)
        if torch._C._functorch.peek_interpreter_stack() is None:  # torch has it outside of transforms only
            y = y + torch.autograd.functional.vjp(lambda t: self.linear(t).square().sum(), x.detach())[1]
        return y + slope + pushed + each


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", METHODS)
def test_transforms_of_functions_inside_a_block_and_around_the_model(method: str) -> None:
    def trained(managed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Functions() for _ in range(3)))
        losses = []
        memory = spillway.manage(model, budget="1GiB", method=method) if managed else None
        for _ in range(2):
            x = torch.randn(4, 8)
            step = memory.step(x) if memory is not None else pytest.MonkeyPatch.context()
            with step:
                loss = model(x).square().mean() + torch.func.jvp(model, (x,), (x,))[1].sum()
                loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        if memory is not None:
            memory.close()
        return losses

    assert all(map(torch.equal, trained(False), trained(True)))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", METHODS)
def test_scripted_modules_inside_blocks(method: str) -> None:
    seed = 3
    assert Scripted.__name__ in program_of(seed).parts
    verdict = judge(seed, method, 1 << 30, plainly(seed))
    assert (verdict.wrong, verdict.refused) == ("", None)


@pytest.mark.parametrize("method", METHODS)
def test_nested_tensors_of_changing_lengths(method: str) -> None:
    def trained(managed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0).linear1 for _ in range(2)))
        blocks = nn.Sequential(*(nn.Sequential(one, nn.Tanh()) for one in model))
        memory = (
            spillway.manage(blocks, budget="1GiB", method=method, blocks=spillway.BlockOptions(names=["0", "1"]))
            if managed
            else None
        )
        for number in range(4):
            x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (2, 3 + number)], layout=torch.jagged)
            with memory.step(x) if memory is not None else pytest.MonkeyPatch.context():
                blocks(x).values().square().mean().backward()
        if memory is not None:
            memory.close()
        return [parameter.grad for parameter in blocks.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))
