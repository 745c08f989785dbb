"""From a workload, or any function that makes a step, to a recorded step."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from spillway.errors import UsageError
from spillway.ir import Kind, Recorded, Step
from spillway.recording.recorder import Recorder, as_fake, fake_tensors, with_medians, without_seconds
from spillway.units import Seconds


class Trainable(Protocol):
    """What can be recorded: a `Workload`, or anything like it."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def model(self) -> torch.nn.Module:
        """The model, in training mode."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Its optimizers."""

    @property
    def size(self) -> int | None:
        """The input size in the workload's own measure, if it has one."""

    @property
    def batches(self) -> Callable[[int], Iterator[Any]]:
        """`batches(steps)` gives that many batches."""

    def train_step(self, batch: Any) -> object:
        """One step: forward, backward, optimizers."""


def record(
    workload: Trainable | Callable[[], Trainable],
    *,
    fake: bool = False,
    warm_up: int = 1,
    timed_steps: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> Recorded:
    """Record one training step of a workload, or of what a function builds, as `spillway.record` says.

    Nothing about the model is changed: hooks are global and gone afterwards. `facts` are what is to be known about the
    recording besides.

    Raises UsageError for a workload without batches, a built one with `fake`, or a step that fake tensors cannot tell.
    """
    if not fake:
        built = workload if not callable(workload) else workload()
        return _record(built, next(iter(built.batches(1)), None), warm_up, timed_steps, measured=True, facts=facts)
    if not callable(workload):
        raise UsageError(
            "A workload to record on fake tensors has to be built among them: pass the function that does."
        )
    with fake_tensors() as mode:
        built = workload()
        batch = as_fake(mode, next(iter(built.batches(1)), None))
        return _record(built, batch, warm_up, 0, measured=False, facts=facts)


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
        return without_seconds(recorded)
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
                found = (one for key, value in state.items() for one in _leaves(value, f"{name}.{key}"))
                yield from ((Kind.OPTIMIZER_STATE, path if name else "", one) for path, one in found)
    yield from ((Kind.INPUT, name, tensor) for name, tensor in _leaves(batch, ""))


def _record(
    workload: Trainable, batch: Any, warm_up: int, timed_steps: int, *, measured: bool, facts: Mapping[str, Any] | None
) -> Recorded:
    if batch is None:
        raise UsageError(f"The workload {workload.name} has no batches.")
    step = record_step(
        lambda: workload.train_step(batch), models=workload.model, optimizers=workload.optimizers, batch=batch,
        warm_up=warm_up, timed_steps=timed_steps, measured=measured,
    )  # fmt: skip
    shapes = {name or "batch": f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in _leaves(batch, "")}
    told = {"fake": not measured, "batch": shapes, "torch": torch.__version__, **(facts or {})}
    if measured:
        told |= {
            "threads": torch.get_num_threads(), "timed_steps": 1 + timed_steps,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        }  # fmt: skip
    return Recorded(step=step, workload=workload.name, size=workload.size, facts=told)


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    for key, value in items:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))
