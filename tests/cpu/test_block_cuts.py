"""Where no class of modules repeats: blocks by what a forward has saved, and groups of a `Sequential` as blocks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.engines.blocks.hook import Hook
from spillway.engines.blocks.trace import trace_for
from spillway.errors import ModelError, NoBlocksError
from spillway.methods import Action
from tests.cpu.block_ways import WAYS, outcome_of, subject_of
from tests.cpu.families import FAMILIES, state_of
from tests.cpu.family import Built
from tests.cpu.test_exactness import different, train
from tests.cpu.unrepeated import UNREPEATED, UNet, Vgg, random_network

FOUND = {
    "vgg": ["features.0-1", "features.3-4", "features.5-8", "features.9-14", "features.15-21"],
    "densenet": [
        f"features.dense{block}.layer{layer}" for block, layers in enumerate((2, 3, 2)) for layer in range(layers)
    ],
    "unet": ["left0.0-4", "left1", "bottom", "right1", "right0.0-4"],
    "by hand": ["stem", "body", "pyramid", "mixing", "tail"],
    "perceptron": ["0-6", "7-12", "13-18", "19-24"],
}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", UNREPEATED)
def test_blocks_are_found_and_a_step_ends_as_a_plain_one_does(name: str) -> None:
    subject = subject_of(name, UNREPEATED[name])
    assert (subject.found, subject.blocks) == (True, FOUND[name])
    for way in ("recompute", "mixed, revoked"):
        outcome = outcome_of(subject, WAYS[way])
        assert (outcome.wrong, outcome.is_idle(WAYS[way]), outcome.kept) == ("", False, {})


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", ["checkpoint", "mimose"])
@pytest.mark.parametrize("name", ["vgg", "perceptron"])
def test_sessions_find_them_also_in_a_sequential_that_is_the_model(name: str, method: str) -> None:
    plain, built = train(UNREPEATED[name](0), None, 3), UNREPEATED[name](0)
    with spillway.manage(built.model, built.optimizers, budget="1GiB", method=method) as memory:
        trained = train(built, memory, 3)
    assert memory.blocks == tuple(FOUND[name])
    assert memory.history[0].recomputed_blocks == len(memory.blocks)
    assert different(plain, trained) is None
    assert not any("forward" in vars(module) for module in built.model.modules())


@pytest.mark.parametrize(
    ("build", "batch", "share"), [(lambda: Vgg(16), (8, 3, 64, 64), 0.73), (lambda: UNet(16), (4, 3, 64, 64), 0.63)]
)
def test_the_peak_is_lower_if_they_are_recomputed(
    build: Callable[[], nn.Module], batch: tuple[int, ...], share: float
) -> None:
    peaks = []
    for action in (Action.KEEP, Action.RECOMPUTE):
        model, x = build(), torch.randn(batch)
        names = discover(model, lambda model=model, x=x: model(x))
        with BlockEngine(model, names, actions=lambda block, call, action=action: action) as engine:
            for _ in range(2):  # the first learns what blocks write to
                model.zero_grad()
                trace = trace_for(torch.device("cpu"), {})
                assert trace is not None
                trace.mark()
                model(x).square().mean().backward()
                peaks.append(max(window.peak for window in trace.stop()))
            assert {call.recomputes for call in engine.calls} == {int(action.recomputes)}
    assert peaks[3] < share * peaks[1]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("seed", [2, 6, 15, 18, 19, 33])
def test_random_networks_train_as_they_do_plainly(seed: int) -> None:
    subject = subject_of(str(seed), lambda _: random_network(seed))
    assert subject.found
    for way in ("recompute", "mixed, revoked"):
        outcome = outcome_of(subject, WAYS[way])
        assert (outcome.wrong, outcome.is_idle(WAYS[way])) == ("", False)


# ---------------------------------------------------------------------------------------------------- what is found


def test_no_group_begins_with_what_writes_to_its_argument_nor_with_what_is_written_to_later() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))]
    model = nn.Sequential(*layers)
    for name in discover(model, lambda: model(torch.randn(2, 4, 16, 16))):
        assert not isinstance(layers[int(name.partition("-")[0])], nn.ReLU)


def test_a_model_of_which_no_part_is_worth_it_has_no_blocks() -> None:
    lonely = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(NoBlocksError, match=r"no choice of others would lower by 12\.5%"):
        discover(lonely, lambda: lonely(torch.ones(4, 8)))
    lstm = FAMILIES["lstm"](0)
    with pytest.raises(NoBlocksError, match="has no blocks"):
        discover(lstm.model, lambda: lstm.model(lstm.batches[0][0]))


class Mostly(nn.Module):
    """A pair of one class that repeats, and saves little, before a flat `Sequential` that saves most."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) for _ in range(2))
        self.large = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        few = x[:1]
        for layer in self.small:
            few = layer(few)
        return self.large(x + few)


@pytest.mark.parametrize("after", [False, True])
def test_a_sequential_whose_forward_somebody_has_wrapped_is_cut_in_no_groups_but_those_inside_are(after: bool) -> None:
    def wrapped(model: nn.Module) -> None:
        inner = model.forward
        model.forward = lambda *args: inner(*args)  # type: ignore[method-assign]  # as Accelerate does

    layers = [nn.Sequential(nn.Flatten(), *perceptron().model), nn.Tanh()]
    model, x = nn.Sequential(*layers), torch.ones(64, 32)
    if not after:
        wrapped(model)
    with spillway.manage(model, budget="1GiB", method="checkpoint") as memory:
        if after:
            wrapped(model)
        with memory.step(x):
            model(x).sum().backward()
        assert set(memory.blocks) < {"0.0-7", "0.1-7", "0.8-13", "0.14-19", "0.20-25"}
        assert memory.history[-1].recomputed_blocks == 4
    model = perceptron().model
    wrapped(model)
    with pytest.raises(NoBlocksError):
        discover(model, lambda: model(x))


def test_what_repeats_gives_way_where_it_covers_little() -> None:
    model = Mostly()
    assert "large.0-2" in discover(model, lambda: model(torch.randn(64, 16, 16)))
    assert discover(model, lambda: model(torch.randn(1, 16, 16))) == ["small.0", "small.1"]


# ----------------------------------------------------------------------------------------------------- groups as such


def perceptron() -> Built:
    return UNREPEATED["perceptron"](0)


@pytest.fixture
def engine() -> Iterator[BlockEngine]:
    built = perceptron()
    with BlockEngine(built.model, ["0-6", "7-12"], actions=lambda block, call: Action.RECOMPUTE) as engine:
        yield engine


def test_nothing_is_added_to_the_model_and_all_of_it_goes(engine: BlockEngine) -> None:
    model, plain = engine.model, perceptron().model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [*dict(model.named_modules())] == [*dict(plain.named_modules())]
    assert repr(model) == repr(plain)
    x = torch.ones(4, 32)
    expected, kept = plain(x), model(x)
    assert torch.equal(kept, expected)
    assert torch.equal(model[:5](x), plain[:5](x))
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())
    kept.sum().backward()  # type: ignore[no-untyped-call]
    expected.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_copies_of_a_managed_model_are_plain(engine: BlockEngine) -> None:
    file = io.BytesIO()
    torch.save(engine.model, file)
    file.seek(0)
    x = torch.ones(4, 32)
    for twin in (
        copy.deepcopy(engine.model),
        pickle.loads(pickle.dumps(engine.model)),
        torch.load(file, weights_only=False),
    ):
        assert not any(isinstance(vars(module).get("forward"), Hook) for module in twin.modules())
        assert torch.equal(twin(x), engine.model(x))
        with BlockEngine(twin, ["0-6"]) as other:
            twin(x)
            assert [call.block for call in other.calls] == ["0-6"]
    assert len(engine.calls) == 2


def test_hooks_of_its_children_run_and_so_do_those_of_what_holds_them(engine: BlockEngine) -> None:
    seen: list[str] = []
    engine.model[4].register_forward_hook(lambda *_: seen.append("child"))
    engine.model.register_forward_hook(lambda *_: seen.append("model"))
    engine.model[8].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    x = torch.ones(4, 32)
    out = engine.model(x)
    assert seen == ["child", "model"]
    out.sum().backward()
    assert seen == ["child", "model"], "what a hook tells in a second run is put back"
    assert [call.recomputes for call in engine.calls] == [1, 1]
    engine.close()
    assert torch.equal(engine.model(x), out)


def test_children_that_were_exchanged_run_plainly(engine: BlockEngine) -> None:
    x = torch.ones(4, 32)
    engine.model[2] = nn.Identity()
    out = engine.model(x)
    assert engine.calls == []
    engine.close()
    assert torch.equal(engine.model(x), out)


def test_recomputing_a_group_frees_what_it_says() -> None:
    built = UNREPEATED["vgg"](0)
    with BlockEngine(built.model, FOUND["vgg"]) as engine:
        trace = trace_for(torch.device("cpu"), {})
        assert trace is not None
        trace.mark()
        held = built.model(built.batches[0][0])
        trace.mark()
        freed = []
        for call in engine.calls:
            freed.append(engine.revoke(call.block))
            trace.mark()
        levels = [window.level for window in trace.stop()]
        own = [call.own_bytes for call in engine.calls]
    assert held.requires_grad
    assert freed == own
    assert all(own)
    gone = [before - after for before, after in pairwise(levels[1:])]
    assert gone == own


def test_a_group_that_a_user_has_begin_with_an_activation_in_place_is_exact(tmp_path: Path) -> None:
    def trained(names: list[str]) -> object:
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(True),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.ELU(inplace=True),
        ]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = BlockEngine(model, names, actions=lambda block, call: Action.RECOMPUTE) if names else None
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 12, 12)).square().mean().backward()
            optimizer.step()
            assert engine is None or [call.recomputes for call in engine.calls] == [1] * len(names)
        if engine is not None:
            engine.close()
        return state_of(model, optimizer)

    assert trained([]) == trained(["0-1", "2-4", "5-7"])


def test_names_of_groups_are_those_of_the_first_and_the_last_child() -> None:
    model = nn.ModuleDict({"net": nn.Sequential()})
    for name in ("conv-1", "norm", "relu"):
        model["net"].add_module(name, nn.Identity())
    with BlockEngine(model, ["net.conv-1-norm", "net.relu"]) as engine:
        assert [len(engine._modules[name]._modules) for name in engine.blocks] == [2, 0]
    with pytest.raises(ModelError, match=r"The blocks net\.conv-1-norm and net\.norm-relu have a module in common"):
        BlockEngine(model, ["net.conv-1-norm", "net.norm-relu"])
    for wrong in ("net.norm-conv-1", "net.norm-head", "net-relu"):
        with pytest.raises(ModelError, match="has no module named"):
            BlockEngine(model, [wrong])


def test_a_sequential_that_does_more_has_no_groups() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.ModuleDict({"net": Doubled(*(nn.Linear(8, 8) for _ in range(12)))})
    with pytest.raises(ModelError, match=r"the forward of net is not that of torch\.nn\.Sequential"):
        BlockEngine(model, ["net.0-3"])
    with pytest.raises(NoBlocksError):
        discover(model, lambda: model["net"](torch.ones(4, 8)))
