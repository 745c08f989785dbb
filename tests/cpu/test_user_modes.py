"""Modes of the user's around a step: they hear what plain PyTorch lets them hear and what is run again, and what they
change is changed in a second run as well."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import spillway
from tests.cpu.callbacks import BLOCKS, TENSORS, Training
from tests.cpu.families import difference, state_of

STEPS = 4
BESIDE = ("window", "dynn-offload")
"""Methods of the tensor engine that have a step written down beside it."""


class Heard(TorchFunctionMode):
    """Counts functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Louder(TorchFunctionMode):
    """Makes another function of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if func.__name__ == "tanh" else out


class LouderOps(TorchDispatchMode):
    """Makes another op of one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if func is torch.ops.aten.tanh.default else out


class HeardOps(TorchDispatchMode):
    """Notes ops, and adds to every copy that is none of the model's. Of a result that autograd saves it is shown a
    `detach` where there are no hooks for saved tensors, and else none."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.ops.append(str(func))
        out = func(*args, **(kwargs or {}))
        return out + 1 if func is torch.ops.aten.clone.default else out


def heard(method: str | None) -> list[Counter[str]]:
    """In each step, by a mode around all of it but the loader."""
    training, found = Training(), []
    session = training.manage(method) if method is not None else None
    for _ in range(STEPS):
        mode = Heard()
        training.around = lambda mode=mode: mode  # type: ignore[misc]
        if session is None:
            training.step()
        else:
            with session.step(training.rows):
                training.step()
        found.append(mode.names)
    if session is not None:
        session.close()
    return found


@pytest.mark.long(but=3)
@pytest.mark.parametrize("method", [*TENSORS, *BESIDE, *BLOCKS])
def test_a_function_mode_hears_the_users_own_calls_and_those_of_second_runs(method: str) -> None:
    plainly, found = heard(None), heard(method)
    again = [under - plain for plain, under in zip(plainly, found, strict=True)]
    assert [plain - under for plain, under in zip(plainly, found, strict=True)] == [Counter()] * STEPS
    recomputes = method not in (*TENSORS, *BESIDE, "offload")
    assert again == [forward_of_the_blocks() if recomputes else Counter()] * STEPS


def forward_of_the_blocks() -> Counter[str]:
    training, mode = Training(), Heard()
    with mode:
        for block in (0, 2, 3):
            training.model[block](torch.stack(training.rows))
    mode.names.subtract(["stack"] * 3)
    return +mode.names


def trained(method: str | None, mode: Any, *, around_backward: bool) -> dict[str, Any]:
    training = Training()
    session = training.manage(method) if method is not None else None

    def step() -> None:
        training.optimizer.zero_grad()
        with mode:
            loss = training.loss(training.model(torch.stack(training.rows)))
            if around_backward:
                loss.backward()  # type: ignore[no-untyped-call]
        if not around_backward:
            loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()

    for _ in range(STEPS):
        if session is None:
            step()
        else:
            with session.step(training.rows):
                step()
    state = state_of(training.model, training.optimizer)
    if session is not None:
        last = session.history[-1]
        assert method in (*TENSORS, "offload") or last.recomputed_blocks
        session.close()
    return state


@pytest.mark.long(but=5)
@pytest.mark.parametrize("around_backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("mode", [Louder, LouderOps])
@pytest.mark.parametrize("method", [*TENSORS, *BLOCKS])
def test_what_a_mode_changes_is_changed_in_a_second_run_too(method: str, mode: Any, around_backward: bool) -> None:
    plain, found = (trained(one, mode(), around_backward=around_backward) for one in (None, method))
    assert difference(plain, found) is None


@pytest.mark.parametrize("method", ["lru", "checkpoint", "mimose-published", "selective"])
def test_modes_are_open_again_after_what_a_block_raised(method: str) -> None:
    training, outer, inner = Training(), Heard(), Heard()

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with training.manage(method) as session:
        for step in range(3):
            training.spot.does = fails if step == 1 else (lambda x: x)
            with outer, inner:
                if step == 1:
                    with pytest.raises(KeyError, match="mine"), session.step(training.rows):
                        training.step()
                else:
                    with session.step(training.rows):
                        training.step()
                stack = [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]
                assert stack == [outer, inner]
            assert torch._C._len_torch_function_stack() == 0


def ops_heard(method: str | None) -> list[tuple[list[str], Counter[str]]]:
    """In each step: of the forward in order, and of the backward."""
    training, found = Training(), []
    batch = torch.stack(training.rows)
    session = training.manage(method) if method is not None else nullcontext()
    with session as memory:
        for _ in range(STEPS):
            mode = HeardOps()
            with memory.step(batch) if memory is not None else nullcontext():
                training.optimizer.zero_grad()
                with mode:
                    loss = training.loss(training.model(batch))
                    forward, mode.ops = mode.ops, []
                    loss.backward()  # type: ignore[no-untyped-call]
                training.optimizer.step()
            found.append((forward, Counter(mode.ops)))
    return found


@pytest.mark.long(but=3)
@pytest.mark.parametrize("method", [*TENSORS, *BLOCKS])
def test_a_dispatch_mode_hears_the_ops_of_the_model_and_of_second_runs(method: str) -> None:
    plainly, found = ops_heard(None), ops_heard(method)
    assert [forward for forward, _ in found] == [forward for forward, _ in plainly]
    of_blocks = Counter(plainly[0][0])
    for (_, plain), (_, under) in zip(plainly, found, strict=True):
        assert plain <= under
        assert under - plain <= (Counter() if method in (*TENSORS, "offload") else of_blocks)


@pytest.mark.parametrize("method", ["auto", "checkpoint"])
def test_what_torch_counts_is_not_counted_twice_where_blocks_are_looked_for(method: str) -> None:
    def counted(memory: spillway.Session | None) -> list[int]:
        found = []
        for _ in range(2):
            mode = FlopCounterMode(display=False)
            with memory.step(x) if memory is not None else nullcontext():
                with mode:
                    loss = model(x).square().mean()
                found.append(mode.get_total_flops())
                loss.backward()
        return found

    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))), torch.randn(256, 64)
    plainly = counted(None)
    with spillway.manage(model, budget="32 MiB", method=method) as memory:
        assert counted(memory) == plainly
        assert memory.blocks
