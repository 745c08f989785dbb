"""The published collector: every block runs twice, and what the first run left is what it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.blocks import block_engine
from spillway.engines.blocks.extra_forward import Seen
from spillway.methods.by_block import BlockSample, StepSample
from spillway.methods.mimose import Mimose, Options

WIDTH = 32


class Layer(nn.Module):
    """Saves more than its linear layers' results, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Hidden(torch.autograd.Function):
    """Keeps bytes for its backward that autograd is not told of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.doubled = x * 2
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] + 0 * ctx.doubled


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Hidden.apply(self.linear(x)) * 1.5  # type: ignore[no-untyped-call]
        return result


def network(kind: type[nn.Module] = Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3)), nn.Linear(WIDTH, WIDTH))


def collected(
    names: list[str], monkeypatch: pytest.MonkeyPatch, *, kind: type[nn.Module] = Layer, counted: bool = False
) -> list[dict[int, int]]:
    """What two steps of 8 and 12 samples tell of the bytes of blocks, by their number; by the usual counter or by two
    forwards."""
    told: list[dict[int, int]] = []
    end = Mimose.end

    def ended(self: Mimose, step: StepSample, blocks: list[BlockSample]) -> None:
        told.append({one.block: one.nbytes for one in blocks})
        end(self, step, blocks)

    model = network(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    method = Mimose() if counted else Mimose.as_published(Options.as_published(reserve=0))
    blocks = spillway.BlockOptions(names=names)
    with (
        monkeypatch.context() as patch,
        spillway.manage(model, optimizer, budget="64MiB", method=method, blocks=blocks) as memory,
    ):
        patch.setattr(Mimose, "end", ended)
        for count in (8, 12):
            x = torch.randn(count, WIDTH)
            with memory.step(x):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return told[-2:]  # a method that takes sizes of several numbers begins anew, and is told of both again


def test_two_forwards_tell_of_a_block_what_the_engine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = collected(["0", "1", "2"], monkeypatch)
    assert found == collected(["0", "1", "2"], monkeypatch, counted=True)
    assert min(found[0].values()) > 8 * WIDTH * 4


def test_the_bytes_are_those_of_the_first_forward_and_not_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seen, "left", lambda self, result: 7)
    assert collected(["0", "1", "2"], monkeypatch) == [dict.fromkeys(range(3), 7)] * 2


def test_the_first_forward_shows_bytes_that_autograd_does_not_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    more, less = (collected(["0", "1", "2"], monkeypatch, kind=Keeps, counted=counted)[0] for counted in (False, True))
    assert {block: more[block] - less[block] for block in more} == dict.fromkeys(range(3), 8 * WIDTH * 4)


def test_of_a_block_around_another_one_nothing_is_taken_since_the_inner_one_was_checkpointed_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["0", "1", "2", "1.inner"]  # called in this order: 0, 1, 1.inner, 2
    found, usual = collected(names, monkeypatch), collected(names, monkeypatch, counted=True)
    assert [step[1] for step in found] == [0, 0]
    assert [step[1] > 0 for step in usual] == [True, True]
    assert [{block: step[block] for block in (0, 2, 3)} for step in found] == [
        {block: step[block] for block in (0, 2, 3)} for step in usual
    ]
    monkeypatch.setattr(block_engine, "valid_calls", lambda record: [True] * len(record))
    unfiltered = collected(names, monkeypatch)
    assert all(step[1] > 0 for step in unfiltered), "without the filter"


@pytest.mark.parametrize("names", [["0", "1", "2"], ["0", "1", "1.inner", "2.inner"]])
def test_a_training_whose_blocks_run_twice_has_the_bits_of_plain_pytorch(names: list[str]) -> None:
    ended: list[Any] = []
    for managed in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        method = Mimose.as_published(Options.as_published(iterations=3, reserve=0))
        session = (
            spillway.manage(model, optimizer, budget="64MiB", method=method, blocks=spillway.BlockOptions(names=names))
            if managed
            else None
        )
        torch.manual_seed(1)
        losses: list[Tensor] = []
        for count in (8, 12, 16, 8):
            x = torch.randn(count, WIDTH)
            if session is not None:
                session.begin(x)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if session is not None:
                session.end()
        if session is not None:
            session.close()
        ended.append((losses, model.state_dict(), torch.get_rng_state()))
    (losses, parameters, stream), (found, trained, left) = ended
    assert all(map(torch.equal, losses, found))
    assert all(torch.equal(parameters[name], trained[name]) for name in parameters)
    assert torch.equal(stream, left)
