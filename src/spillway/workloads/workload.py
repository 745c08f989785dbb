"""What a workload is: a model, its optimizers, and the same batches every time."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spillway.errors import WorkloadError
from spillway.pilots.paths import Dynamism

Batch: TypeAlias = Mapping[str, Tensor] | tuple[Tensor, ...]
"""What one step consumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something to train. Whoever runs its steps, plainly or under a budget, runs the same ones."""

    name: str
    """What reports call it."""
    model: nn.Module
    """In training mode, initialised from the seed."""
    optimizers: tuple[Optimizer, ...]
    """All of them are stepped at the end of every step, in this order."""
    batches: Callable[[int], Iterator[Batch]]
    """`batches(steps)` gives that many batches. Every call starts again from the first one and gives the same
    batches; none draws from the global random streams, which belong to the steps."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """`loss(model, batch)` is the number that a step makes smaller, a tensor without dimensions."""
    size: int | None = None
    """The input size in the workload's own measure, such as the length of a sequence; None if it has none."""
    dynamism: Dynamism | None = None
    """Of a network whose forward differs from sample to sample."""

    def train_step(self, batch: Batch) -> Tensor:
        """One plain step: forward, backward, optimizers; the gradients are gone afterwards. Returns the loss before it,
        detached."""
        loss = self.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss.detach()

    def update(self) -> None:
        """The end of a step: optimizers, after which the gradients are gone."""
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def moved(workload: Workload, device: str) -> Workload:
    """The workload with its model and batches on a device, as torch names it: `cpu`, `cuda` or `cuda:1`.

    Raises WorkloadError where there is no such device.
    """
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):
            raise WorkloadError(f"Workloads train on cpu, cuda or cuda:1, and not on {device!r}.")
        if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
            raise WorkloadError(f"There is no device {device!r} here: torch sees {torch.cuda.device_count()} of CUDA.")
    except RuntimeError:
        raise WorkloadError(f"There is no device {device!r}: torch has no such name.") from None
    workload.model.to(where)  # parameters stay the same objects, which the optimizers know

    def batches(steps: int) -> Iterator[Batch]:
        for batch in workload.batches(steps):
            if isinstance(batch, Mapping):
                yield {name: tensor.to(where) for name, tensor in batch.items()}
            else:
                yield tuple(tensor.to(where) for tensor in batch)

    return replace(workload, batches=batches)


@contextmanager
def transformers_needed(name: str) -> Iterator[None]:
    """Within, transformers is imported, without its warnings about what it was built against.

    Raises WorkloadError where it is not installed, about the workload of that name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise WorkloadError(
            f"The workload {name} needs transformers, which is not installed: pip install 'torch-spillway[workloads]'."
        ) from error


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's global random streams."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
