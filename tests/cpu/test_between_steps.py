"""Between steps, after them and in the middle of one, everything that a user can reach has its value."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import spillway
from spillway.methods import Drop, Move
from tests.cpu.pressure import ORDERS, PLENTY, image, is_moved, put_away
from tests.cpu.training import (
    WIDTH,
    Trainer,
    adam,
    assert_stays_right,
    assert_trains_as_plainly,
    batch_of,
    network,
    train,
)
from tests.shared import in_turn

Act: TypeAlias = Callable[[nn.Sequential, Optimizer], Any]


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = [value for entries in optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients, *state]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def evaluated(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        out = model(batch_of(99))
    model.train()
    return out


def copied_and_trained(model: nn.Module) -> list[Tensor]:
    twin = copy.deepcopy(model)
    optimizer = adam(twin)
    stream = torch.get_rng_state()
    train(twin, optimizer, 50)
    torch.set_rng_state(stream)
    return list(twin.state_dict().values())


READS: dict[str, Act] = {
    "state_dict": lambda model, optimizer: [dict(model.state_dict()), optimizer.state_dict()["state"]],
    "save": lambda model, optimizer: [dict(saved(model.state_dict())), saved(optimizer.state_dict())["state"]],
    "save of the whole model": lambda model, optimizer: dict(saved(model).state_dict()),
    "pickle": lambda model, optimizer: dict(pickle.loads(pickle.dumps(model)).state_dict()),
    "numpy": lambda model, optimizer: [p.detach().numpy().tobytes() for p in model.parameters()],
    "numpy of gradients": lambda model, optimizer: [p.grad.numpy().tobytes() for p in model.parameters()],
    "print": lambda model, optimizer: [str(model), str(optimizer), *map(str, everything(model, optimizer))],
    "tolist": lambda model, optimizer: [tensor.tolist() for tensor in everything(model, optimizer)],
    "deepcopy": lambda model, optimizer: dict(copy.deepcopy(model).state_dict()),
    "deepcopy that trains": lambda model, optimizer: copied_and_trained(model),
    "evaluation": lambda model, optimizer: evaluated(model),
    "one vector": lambda model, optimizer: nn.utils.parameters_to_vector(model.parameters()),
    "norms": lambda model, optimizer: [tensor.double().norm() for tensor in everything(model, optimizer)],
    "equal": lambda model, optimizer: [torch.equal(t, t.clone()) for t in everything(model, optimizer)],
    "another dtype": lambda model, optimizer: dict(copy.deepcopy(model).to(torch.bfloat16).state_dict()),
    "views": lambda model, optimizer: [tensor.flatten()[::3] for tensor in everything(model, optimizer)],
}


@pytest.mark.long(but=7)
@pytest.mark.parametrize("name", READS)
def test_reading_between_steps(name: str) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen = []
        for number in range(3):
            with trainer.step():
                train(model, optimizer, number)
            trainer.put_away(*everything(model, optimizer))
            assert trainer.memory is None or number or is_moved(trainer.memory, model[0].weight)
            seen.append(READS[name](model, optimizer))
        if trainer.memory is not None:
            trainer.memory.close()
        seen.append(READS[name](model, optimizer))
        return seen

    assert_stays_right(program, share=90 if "numpy" in name else 55)


def test_an_evaluation_loop_inside_a_step_of_its_own() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen = []
        for number in range(2):
            with trainer.step(batch_of(number)):
                train(model, optimizer, number)
            with trainer.step(batch_of(99)):
                seen.append(evaluated(model))
        return seen

    assert_trains_as_plainly(program)


# ---------------------------------------------------------------------- writing


def loaded(model: nn.Sequential, *, assign: bool) -> None:
    torch.manual_seed(1)
    values = {name: torch.randn(entry.shape).to(entry.dtype) for name, entry in model.state_dict().items()}
    model.load_state_dict(values, assign=assign)


def reinitialised(model: nn.Sequential) -> None:
    torch.manual_seed(2)
    nn.init.orthogonal_(model[0].weight)
    model[6].reset_parameters()


def replaced(model: nn.Sequential) -> None:
    model[4].weight.data = model[0].weight.data.clone().neg_()
    model[6].weight.data = model[6].weight.data.t()


def added(model: nn.Sequential, optimizer: Optimizer) -> None:
    torch.manual_seed(4)
    head = nn.Linear(WIDTH, WIDTH)
    model.append(head)
    optimizer.add_param_group({"params": list(head.parameters())})


def resized(model: nn.Sequential) -> None:
    weight = model[4].weight.data
    weight.resize_(WIDTH * 2, WIDTH)[WIDTH:] = 1
    model[4].weight.data = weight[:WIDTH].clone()


@torch.no_grad()
def nudged(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


WRITES: dict[str, Act] = {
    "load_state_dict": lambda model, optimizer: loaded(model, assign=False),
    "load_state_dict by assignment": lambda model, optimizer: loaded(model, assign=True) or adam(model),
    "in place": lambda model, optimizer: nudged(model),
    "in place on data": lambda model, optimizer: [p.data.add_(0.01) for p in model.parameters()] and None,
    "one element": lambda model, optimizer: model[4].weight.data.__setitem__((3, 5), 9.0),
    "initialisers": lambda model, optimizer: reinitialised(model),
    "other data": lambda model, optimizer: replaced(model),
    "numpy": lambda model, optimizer: model[4].weight.detach().numpy().fill(0.5),
    "numpy of a view": lambda model, optimizer: model[4].weight.detach()[3:9].numpy().fill(0.5),
    "gradients": lambda model, optimizer: [p.grad.zero_() for p in model.parameters()] and None,
    "no gradients": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
    "frozen": lambda model, optimizer: model[4].requires_grad_(False) and None,
    "optimizer state": lambda model, optimizer: optimizer.load_state_dict(saved(optimizer.state_dict())),
    "optimizer state in place": lambda model, optimizer: (
        [e["exp_avg"].zero_() for e in optimizer.state.values()] and None
    ),
    "no optimizer state": lambda model, optimizer: optimizer.state.clear(),
    "a new layer": added,
    "vector_to_parameters": lambda model, optimizer: nn.utils.vector_to_parameters(
        torch.linspace(-0.1, 0.1, sum(p.numel() for p in model.parameters())), model.parameters()
    ),
    "buffers": lambda model, optimizer: model[1].reset_running_stats(),
    "another size": lambda model, optimizer: resized(model),
    "a tie": lambda model, optimizer: setattr(model[4], "weight", model[0].weight),
}


@pytest.mark.long(but=4)
@pytest.mark.parametrize(("name", "before"), in_turn(WRITES, ["absent", "back with a copy", "as the step left it"]))
def test_writing_between_steps(name: str, before: str) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen = []
        for number in range(4):
            with trainer.step():
                seen.append(train(model, optimizer, number))
                if before == "back with a copy":
                    trainer.put_away(*everything(model, optimizer))
                    seen.extend(tensor.double().sum() for tensor in everything(model, optimizer))
            if before == "absent":
                trainer.put_away(*everything(model, optimizer))
            if number % 2 == 0:
                WRITES[name](model, optimizer)
                for parameter in model.parameters():
                    trainer.put_away(parameter)
                seen.extend(image(tensor) for tensor in everything(model, optimizer))
        return seen

    assert_stays_right(program)


def test_a_teacher_that_follows_the_model_between_steps() -> None:
    """Nothing inside the steps writes the teacher, so its copies in the slower tier grow old unseen."""

    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        teacher = copy.deepcopy(model).requires_grad_(False).eval()
        for number in range(5):
            with trainer.step():
                target = teacher(batch_of(number))
                trainer.put_away(*teacher.parameters())
                train(model, optimizer, number)
                seen = (target - teacher(batch_of(number))).abs().max()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.3)
        return [seen, *teacher.state_dict().values()]

    assert_trains_as_plainly(program)


# ---------------------------------------------------------------------- what the user keeps


@pytest.mark.long(but=1)
@pytest.mark.parametrize("way", [Drop, Move])
def test_hidden_states_kept_in_a_list_have_their_values_after_the_step(way: type[Drop | Move]) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        kept: list[Tensor] = []
        seen: list[Any] = []
        for number in range(3):
            with trainer.step():
                optimizer.zero_grad()
                x = batch_of(number)
                for layer in model[:-2]:
                    x = layer(x)
                    kept.append(x)
                model[-2:](x).square().mean().backward()
                optimizer.step()
                if trainer.memory is not None:
                    for tensor in kept:
                        put_away(trainer.memory, tensor, way)
            seen.append([kept[0].detach().numpy().tobytes(), str(kept[3]), kept[6].tolist()])
            seen.append([tensor.detach() for tensor in kept[-8:]])
        return [*seen, *kept]

    assert_trains_as_plainly(program)


@pytest.mark.filterwarnings("ignore:Adam.step.* ran outside of the session's steps:UserWarning")
@pytest.mark.parametrize("inside", [True, False])
def test_a_graph_that_is_kept_goes_backward_after_its_step(inside: bool) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        losses = []
        for number in range(2):
            with trainer.step():
                losses.append(model(batch_of(number)).square().mean())
        if inside:
            with trainer.step():
                sum(losses).backward()
                optimizer.step()
        else:
            sum(losses).backward()
            optimizer.step()
        with trainer.step():
            seen = train(model, optimizer, 7)
        return [seen, *losses]

    assert_trains_as_plainly(program)


def test_a_recurrent_state_and_its_graph_go_from_step_to_step() -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        state = torch.zeros(96, WIDTH)
        seen = []
        for number in range(6):
            with trainer.step(batch_of(number)):
                state = torch.tanh(model[:5](batch_of(number)) + state)
                if number % 2:
                    optimizer.zero_grad()
                    model[5:](state).square().mean().backward()
                    optimizer.step()
                    state = state.detach()
            seen.append(state.detach().clone())
        return seen

    assert_trains_as_plainly(program)


# ---------------------------------------------------------------------- the end


def test_arrays_of_what_is_absent_can_be_had_between_steps_whatever_the_budget() -> None:
    model = network()
    optimizer = adam(model)
    with spillway.manage(model, optimizer, budget="330 KiB", method="lru") as memory:
        with memory.step():
            train(model, optimizer, 0)
            kept = [batch_of(number) * 2 for number in range(20)]
        expected = [image(batch_of(number) * 2)[3] for number in range(20)]
        assert sum(is_moved(memory, tensor) for tensor in kept) > 5
        assert [tensor.numpy().tobytes() for tensor in kept] == expected
        with pytest.raises(spillway.BudgetInfeasible), memory.step():
            train(model, optimizer, 1)


def test_closing_brings_everything_back_into_memory_of_torchs_own() -> None:
    model = network()
    optimizer = adam(model)
    memory = spillway.manage(model, optimizer, budget=PLENTY, method="lru")
    with memory.step():
        train(model, optimizer, 0)
    plain = [image(tensor) for tensor in everything(model, optimizer)]
    large = [tensor for tensor in everything(model, optimizer) if tensor.nbytes >= 4096]
    for tensor in large:
        assert put_away(memory, tensor, Move)
    assert not any(tensor.untyped_storage().resizable() for tensor in large)
    memory.close()
    assert all(tensor.untyped_storage().resizable() for tensor in large)
    assert [image(tensor) for tensor in everything(model, optimizer)] == plain
    assert memory._engine.backend.tier.closed


def test_a_model_outlives_a_session_that_nobody_closed() -> None:
    model = network()
    optimizer = adam(model)
    memory: spillway.Session | None = spillway.manage(model, optimizer, budget=PLENTY, method="lru")
    assert memory is not None
    with memory.step():
        train(model, optimizer, 0)
    plain = [image(tensor) for tensor in everything(model, optimizer)]
    for tensor in everything(model, optimizer):
        put_away(memory, tensor, Move)
    memory = None
    gc.collect()
    assert [image(tensor) for tensor in everything(model, optimizer)] == plain
    with spillway.manage(model, optimizer, budget=PLENTY) as second, second.step():
        train(model, optimizer, 1)


# ---------------------------------------------------------------------- in the middle of a forward


def stolen(tensor: Tensor) -> None:
    tensor.detach().numpy()[0, 0] = 3.0


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "print": str,
    "numpy": lambda hidden: hidden.detach().numpy().tobytes(),
    "numpy that is kept": lambda hidden: hidden.detach().numpy(),
    "numpy that is written": stolen,
    "save": lambda hidden: saved(hidden.detach()),
    "tolist": lambda hidden: hidden.tolist(),
    "deepcopy": lambda hidden: copy.deepcopy(hidden.detach()),
    "pickle": lambda hidden: pickle.loads(pickle.dumps(hidden.detach())),
    "kept": lambda hidden: hidden,
    "norm": lambda hidden: hidden.norm().item(),
    "nan check": lambda hidden: bool(torch.isnan(hidden).any()),
}


@pytest.mark.long(but=2)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_reads_hidden_states_and_weights_in_the_middle_of_a_forward(name: str) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        hidden: list[Tensor] = []

        def hook(module: nn.Module, inputs: Any, out: Tensor) -> None:
            hidden.append(out)
            for tensor in hidden[-3:]:
                seen.append(HOOKS[name](tensor))
            for parameter in module.parameters():
                seen.append(HOOKS["numpy"](parameter))

        handles = [module.register_forward_hook(hook) for module in model]
        for number in range(2):
            with trainer.step():
                train(model, optimizer, number)
            hidden.clear()
        for handle in handles:
            handle.remove()
        return [entry.tobytes() if hasattr(entry, "tobytes") else entry for entry in seen]

    assert_trains_as_plainly(program, share=90)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("order", ORDERS)
def test_a_checkpoint_written_in_the_middle_of_a_step(order: str) -> None:
    def program(model: nn.Module, optimizer: Optimizer, trainer: Trainer) -> list[Any]:
        seen = []
        for number in range(2):
            with trainer.step():
                optimizer.zero_grad()
                model(batch_of(number)).square().mean().backward()
                seen.append(dict(saved(model.state_dict())))
                optimizer.step()
                seen.append(saved(optimizer.state_dict())["state"])
                seen.append(dict(saved(copy.deepcopy(model)).state_dict()))
        return seen

    assert_trains_as_plainly(program)
