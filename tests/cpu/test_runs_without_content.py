"""What only tells what a step will need, on tensors without content, is heard of by nothing of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.environment import Environment
from spillway.engines.tensors.probe import smallest_budget
from spillway.engines.tensors.tally import Tally
from spillway.engines.tensors.twins import without_content
from spillway.errors import BudgetInfeasible
from spillway.recording.recorder import fake_tensors
from spillway.session import needs
from spillway.session.needs import Call
from spillway.session.tensor_session import TensorSession
from spillway.units import Bytes
from spillway.workloads.stdlib_lm import LanguageModel

Heard = list[str]


class Blocks(nn.Module):
    """Two blocks; what its forward makes, and what it finds in a closure, are the only ones of their kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.line = line = nn.Linear(32, 32)
        self.shared = lambda x: line(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        made: Tensor = nn.Softsign()(self.shared(x))
        return made


class _Functions(TorchFunctionMode):
    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.heard = heard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(f"{func}")
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):  # type: ignore[misc]  # torch's class has no annotations
    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self.heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(f"{func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def _profiled(heard: Heard) -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    heard += [event.name for event in profiler.events() or () if event.name.startswith("aten::")]


@contextmanager
def _hooked(model: Blocks, heard: Heard) -> Iterator[None]:
    def hook(*_: Any) -> None:
        heard.append("hook")

    handles: list[Any] = [
        torch_module.register_module_forward_pre_hook(hook),
        torch_module.register_module_forward_hook(hook),
        torch_module.register_module_full_backward_hook(hook),
        torch_module.register_module_parameter_registration_hook(hook),
        model.line.register_forward_hook(hook),
        model.line.register_full_backward_pre_hook(hook),
        model.line.weight.register_hook(hook),
        model.line.weight.register_post_accumulate_grad_hook(hook),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _packed(heard: Heard) -> Iterator[None]:
    def packed(tensor: Tensor) -> Tensor:
        heard.append("saved")
        return tensor

    with saved_tensors_hooks(packed, packed), saved_tensors_hooks(packed, packed):
        yield


OPENED: Final[dict[str, Callable[[Blocks, Heard], AbstractContextManager[Any]]]] = {
    "saved tensors": lambda model, heard: _packed(heard),
    "functions": lambda model, heard: _Functions(heard),
    "ops": lambda model, heard: _Ops(heard),
    "profiler": lambda model, heard: _profiled(heard),
    "anomalies": lambda model, heard: torch.autograd.set_detect_anomaly(True),
    "hooks": _hooked,
}


def _call(model: Blocks, x: Tensor) -> Call:
    with BlockEngine(model, ["layers.0", "layers.1"]) as engine:
        return Call(engine, ((x,), {}), {})


def _needs(call: Call) -> tuple[needs.Rise | None, Bytes | None]:
    environment = Environment([], [])
    return needs.recomputing(call, environment), needs.least(call, environment)


@pytest.mark.long(but=3)
@pytest.mark.parametrize("opened", OPENED)
def test_nothing_that_the_user_opened_hears_of_them(opened: str) -> None:
    model, heard = Blocks(), Heard()
    plain = _needs(call := _call(model, torch.zeros(64, 32)))
    with OPENED[opened](model, heard):
        found = _needs(call)
    assert None not in plain
    assert found == plain
    assert heard == []


@pytest.mark.parametrize("opened", OPENED)
def test_what_the_user_opened_goes_on_hearing_afterwards(opened: str) -> None:
    def heard_by_it(*, needs_told: bool) -> Heard:
        model, x, heard = Blocks(), torch.zeros(64, 32, requires_grad=True), Heard()
        call = _call(model, x)
        with OPENED[opened](model, heard):
            if needs_told:
                _needs(call)
            model(x).sum().backward()
        return heard

    heard = heard_by_it(needs_told=True)
    assert heard == heard_by_it(needs_told=False)
    assert heard or opened == "anomalies"


@pytest.mark.parametrize("opened", OPENED)
def test_a_refusal_of_the_tensor_engine_is_told_as_unheard(opened: str) -> None:
    model, heard, batch = Blocks(), Heard(), torch.zeros(512, 32)
    optimizer = torch.optim.Adam(model.parameters())
    refusal = BudgetInfeasible(needed=1, allowed=0, op="aten::mm", op_index=0, smallest_budget=1, exact=False)
    with spillway.manage(model, optimizer, budget="1MiB", method="lru") as memory:
        assert isinstance(memory, TensorSession)
        plain = smallest_budget(refusal, memory._engine, [model], [optimizer], batch)
        with OPENED[opened](model, heard):
            told = smallest_budget(refusal, memory._engine, [model], [optimizer], batch)
    assert heard == []
    assert plain.exact
    assert told.exact is (opened not in ("functions", "ops", "hooks"))  # nobody knows beforehand what these take
    assert told.smallest_budget == plain.smallest_budget


@pytest.mark.long
def test_what_ops_are_remembered_to_make_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = LanguageModel(width=32, layers=2, heads=2, longest=32, dropout=0.1)
    with BlockEngine(model, ["blocks.0", "blocks.1"]) as engine:
        call = Call(engine, ((torch.zeros(4, 32, dtype=torch.long),), {}), {})
    found = _needs(call)
    again = _needs(call)
    monkeypatch.setattr("spillway.engines.tensors.tally.remembered", lambda func, args, kwargs: func(*args, **kwargs))
    assert None not in found
    assert found == again == _needs(call)


def test_gradients_are_not_given_up_on_trial_where_there_is_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = Blocks(), 0
    call = _call(model, torch.zeros(64, 32))._replace(gradients={"line.weight": model.line.weight.nbytes})
    peaks = needs._peaks

    def counted(*args: Any, **kwargs: Any) -> list[Tally]:
        nonlocal ran
        ran += 1
        return peaks(*args, **kwargs)

    monkeypatch.setattr(needs, "_peaks", counted)
    least = needs.least(call, Environment([], []))
    assert ran == 2
    assert least is not None
    roomy = needs.least(call, Environment([], []), least + model.line.weight.nbytes + (1 << 20))
    assert ran == 3
    assert roomy is not None
    assert roomy >= least
    assert needs.least(call, Environment([], []), least - 1) == least
    assert ran == 5


ADDRESSES: Final[dict[str, Callable[[Tensor], Any]]] = {
    "of a tensor": lambda x: x.data_ptr(),
    "of a storage": lambda x: x.untyped_storage().data_ptr(),
    "in a capsule": lambda x: torch.from_dlpack(x.data),
    "in an array": lambda x: numpy.from_dlpack(x.data),
}


@pytest.mark.parametrize("asked", ADDRESSES)
def test_addresses_of_what_has_no_content_are_not_handed_out(asked: str) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    twin = without_content(nn.Linear(32, 32), fake)
    with fake_tensors() as recording:
        recorded = recording.from_tensor(torch.zeros(32))
    with fake:
        made = twin(torch.ones(1, 32)).detach()
    for one in (twin.weight.detach(), made, recorded):
        with pytest.raises((RuntimeError, BufferError)):
            ADDRESSES[asked](one)


@pytest.mark.parametrize("method", ["lru", "auto"])
def test_a_refusal_where_bytes_are_written_through_a_capsule_ends_in_what_is_needed_at_least(method: str) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                torch.from_dlpack(x.detach()).mul_(0.5)
                x = x * 2
            return x

    model = Writing()
    with spillway.manage(model, torch.optim.SGD(model.parameters()), budget="1MiB", method=method) as memory:
        x = torch.randn(2048, 64)
        with pytest.raises(BudgetInfeasible, match="or more"), memory.step(x):
            model(x).square().mean().backward()
