"""From any function that makes a step to a recorded step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.ir import Kind, Step
from spillway.recording.recorder import Recorder, with_medians
from spillway.units import Seconds


def record_step(
    step: Callable[[], object],
    *,
    models: torch.nn.Module | Sequence[torch.nn.Module] = (),
    optimizers: Optimizer | Sequence[Optimizer] = (),
    batch: Any = None,
    warm_up: int = 1,
    timed_steps: int = 0,
    measured: bool = True,
) -> Step:
    """Record what calling `step` does; it is called `warm_up + 1 + timed_steps` times, and call `warm_up` is recorded.

    Arguments:
        models: Whose parameters, buffers and modules are known by name.
        batch: The tensors that are the step's input, in any nest of lists, tuples and mappings.
        measured: Whether the seconds mean anything; on fake tensors they do not.
    """
    models = [models] if isinstance(models, torch.nn.Module) else list(models)
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    on_cuda = any(parameter.is_cuda for model in models for parameter in model.parameters())
    recorder = Recorder(models, lambda: named_tensors(models, optimizers, batch), _when_done if on_cuda else None)
    for _ in range(warm_up):
        with recorder.watching():
            step()
    with recorder.writing():
        result = step()
    recorded = recorder.finish()
    del result  # it was alive when the step ended
    if not measured:
        return replace(recorded, ops=tuple(replace(op, seconds=None) for op in recorded.ops))
    again = []
    for _ in range(timed_steps):
        with recorder.timing() as clock:
            step()
        again.append(clock)
    return with_medians(recorded, again)


def _when_done() -> Seconds:
    """The time when CUDA has done what was launched: an op's seconds are the device's, not those of its launch."""
    torch.cuda.synchronize()
    return time.perf_counter()


def named_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer], batch: Any
) -> Iterator[tuple[Kind, str, torch.Tensor]]:
    """Every tensor that is known by name: parameters, their gradients `<name>.grad`, buffers, state `<name>.<key>`."""
    names: dict[int, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), name)
            yield Kind.PARAMETER, name, parameter
            if parameter.grad is not None:
                yield Kind.GRADIENT, f"{name}.grad", parameter.grad
        yield from ((Kind.BUFFER, name, buffer) for name, buffer in model.named_buffers())
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            name = names.get(id(owner), "")
            if isinstance(state, Mapping):
                found = (one for key, value in state.items() for one in leaves(value, f"{name}.{key}"))
                yield from ((Kind.OPTIMIZER_STATE, path if name else "", one) for path, one in found)
    yield from ((Kind.INPUT, name, tensor) for name, tensor in leaves(batch, ""))


def leaves(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nest of lists, tuples and mappings, by their ways there."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else str(key))
