"""Training loops of others around the block engine: what they put in front of models and optimizers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.errors import ModelError
from tests.cpu.block_cases import Chain, Residual
from tests.cpu.block_judge import METHODS


def accelerated(method: str | None, precision: str, *, prepared_first: bool) -> list[Any]:
    """Losses and parameters after an epoch of Accelerate's loop, with accumulation and clipping."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Chain(Residual(), Residual(), Residual())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[Any] = []
    with contextlib.ExitStack() as stack:

        def managed() -> Any:
            return stack.enter_context(spillway.manage(model, optimizer, budget="1GiB", method=method))

        memory = managed() if method is not None and not prepared_first else None
        data = torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=8)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        if method is not None and memory is None:
            memory = managed()
        for batch in data:
            with memory.step(batch) if memory else contextlib.nullcontext(), accelerator.accumulate(model):
                loss = model(batch).float().square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.long(but=1)
@pytest.mark.parametrize("prepared_first", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loop_of_accelerate(precision: str, prepared_first: bool) -> None:
    plain = accelerated(None, precision, prepared_first=prepared_first)
    for method in ("checkpoint", "mimose-published"):
        found = accelerated(method, precision, prepared_first=prepared_first)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_forward_that_is_wrapped_after_manage_is_wrapped_once(method: str) -> None:
    def trained(managed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Chain(Residual(), Residual()), torch.randn(8, 32)
        memory = spillway.manage(model, budget="1GiB", method=method) if managed else None
        inner = model.forward
        model.forward = lambda *args: inner(*args) * 2  # type: ignore[method-assign]
        for _ in range(3):
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                model(x).square().mean().backward()
        if memory is not None:
            memory.close()
            with torch.no_grad():
                model(x)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, trained(False), trained(True)))


def test_a_model_that_begins_to_checkpoint_itself_is_refused_in_the_first_step() -> None:
    model = nn.Sequential(Residual(), Residual())
    with spillway.manage(model, budget="1GiB", method="checkpoint") as memory:
        model.gradient_checkpointing = True  # type: ignore[assignment]
        with pytest.raises(ModelError, match="checkpoints its layers itself"), memory.step(torch.ones(2, 32)):
            model(torch.ones(2, 32))
