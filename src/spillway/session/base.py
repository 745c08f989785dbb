"""What every session is to its user."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, Self

import torch

from spillway.engines.controller import UNLIMITED
from spillway.engines.memory import machine_memory
from spillway.errors import SessionError
from spillway.ir import Kind, RunWriter, StepReport, Timeline
from spillway.report.html import write_report
from spillway.report.live import LiveLine
from spillway.session.inputs import leaves, storages
from spillway.units import Bytes, format_bytes

NAMED: Final = (Kind.PARAMETER, Kind.GRADIENT, Kind.BUFFER, Kind.OPTIMIZER_STATE)


def header(allowed: Bytes, method: str, device: torch.device) -> dict[str, Any]:
    """The first line of a run file."""
    return {
        "budget_bytes": None if allowed >= UNLIMITED else allowed,
        "method": method,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {format_bytes(machine_memory())}",
        "threads": torch.get_num_threads(),
        "device": str(device),
    }


class Step(Protocol):
    """A step that is running."""

    logged: dict[str, float]
    """What the user attached to it."""


class Session(ABC):
    """Training under one budget. Made by `manage`; a context manager that gives everything back at its end."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        writer: RunWriter | None,
        live: LiveLine | None,
    ) -> None:
        self.history: list[StepReport] = []
        """One report per finished step."""
        self.timeline: Timeline | None = None
        """The timeline of the step in which most bytes left and came back, if timelines are kept."""
        self._models = models
        self._optimizers = optimizers
        self._writer = writer
        self._live = live
        self._running: Step | None = None
        self._closed = False

    @property
    @abstractmethod
    def allowed(self) -> Bytes:
        """The budget in bytes."""

    @abstractmethod
    def step(self, batch: Any = None) -> AbstractContextManager[Session]:
        """One training step: forward, backward, optimizer. The batch's shapes and dtypes are its signature.

        Raises:
            SessionError: The session is closed, or a step is running.
            BudgetInfeasible: The step cannot run under the budget. Model and optimizer are as plain PyTorch leaves them
                when an op raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Bring every byte back, give everything back to the system. Closing twice is fine."""

    @abstractmethod
    def _header(self) -> dict[str, Any]:
        """What a page says of the whole run."""

    def log(self, **numbers: Any) -> None:
        """Attach numbers to the running step: `memory.log(loss=loss)`. Tensors of one element are fine."""
        if self._running is None:
            raise SessionError("log() belongs inside a step: with memory.step(batch): ... memory.log(loss=loss).")
        for name, value in numbers.items():
            self._running.logged[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained HTML page about the run so far."""
        timelines = [] if self.timeline is None else [self.timeline]
        write_report(path, self._header(), self.history, timelines)

    def __enter__(self) -> Self:
        if self._closed:
            raise SessionError("This session is closed; call spillway.manage() again.")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ for steps

    def _check_may_begin(self) -> None:
        if self._closed:
            raise SessionError("This session is closed; call spillway.manage() again.")
        if self._running is not None:
            raise SessionError("A step is running already; steps do not nest. Leave it before the next begins.")

    def _check_may_close(self) -> None:
        if self._running is not None:
            raise SessionError("The session cannot be closed inside a step; leave the step first.")

    def _tensors(self, batch: Any) -> Iterator[tuple[Kind, torch.Tensor]]:
        """Every tensor that is known by name, and what it is for."""
        parameters, gradients, buffers, states = NAMED  # looking a member up takes as long as the rest
        for module in (module for model in self._models for module in model.modules()):
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameters, parameter
                    if parameter.grad is not None:
                        yield gradients, parameter.grad
            for buffer in module._buffers.values():
                if buffer is not None:
                    yield buffers, buffer
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                if isinstance(state, dict | Mapping):
                    for value in state.values():
                        if isinstance(value, torch.Tensor):
                            yield states, value
        yield from ((Kind.INPUT, leaf) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))

    def _named_bytes(self, batch: Any) -> Bytes:
        """Of the storages of all these tensors."""
        return sum(storage.nbytes() for storage in storages(self._tensors(batch)))

    def _finish(self, report: StepReport) -> None:
        self.history.append(report)
        if self._writer is not None:
            self._writer.append({"step": report.to_json()})
        if self._live is not None:
            self._live.update(report)
