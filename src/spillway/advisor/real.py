"""Measures on this machine: asks a process that forks one for every trial (`measuring`)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self, final

from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.ways import way_of
from spillway.errors import SpillwayError, TrialError
from spillway.runs.processes import Talk, as_raised, how_it_ended, talking

STEPS: Final = 5
"""Timed in a trial."""
AROUND: Final = 2
"""Steps of a trial that are not timed: the one that warms up, and the one whose peak is measured."""
_QUIET: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""The profiler warns of every storage that was there before it."""


@final
class RealBench(AbstractBench):
    """A workload on this machine, one thread on the CPU. A context manager; the process starts when it is needed.

    A trial is one step that warms up, `STEPS` timed ones whose median counts, and one on each of their shapes for the
    peak. What it takes is named in `measuring`.

    Arguments:
        workload: A name of `spillway.workloads`, or `file.py:function`.
        options: Given to its function beside `seed` and `batch`.
        seed: Of everything that is drawn.
        device: Where the model and its batches are moved, as torch names it; None to leave them where they are.
        output: Called, from another thread, with every line that is printed.
        steps: Timed in a trial.
        spill_directory: Where what moves waits; the system's temporary directory by default.
    """

    def __init__(
        self,
        workload: str,
        *,
        options: Mapping[str, object],
        seed: int,
        output: Callable[[str], None],
        device: str | None = None,
        steps: int = STEPS,
        spill_directory: str | None = None,
    ) -> None:
        self.name = workload
        self._request: dict[str, Any] = {
            "workload": workload, "options": dict(options), "seed": seed, "steps": steps,
            "spill_directory": spill_directory, "device": device,
        }  # fmt: skip
        self._output = output
        self._process = ExitStack()
        self._talk: Talk | None = None
        self._facts: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._talk = None
        self._process.close()

    @property
    def facts(self) -> Mapping[str, Any]:
        """`hardware`; `gradient_bytes` of all parameters; `device_bytes` that are free, None on the CPU.

        Raises SpillwayError for a workload that cannot be built.
        """
        if not self._facts:
            self._started()
        return self._facts

    @property
    def hardware(self) -> str:  # type: ignore[override]
        """What the workload's model lies on."""
        return str(self.facts["hardware"])

    def key(self) -> dict[str, Any]:
        """What figures depend on beside Spillway's version, known without starting anything.

        Of a user's file its text counts, and not what it imports. Of the machine's name a digest is kept.
        """
        return {"machine": machine(), **self._request, "file": _content(self.name)}

    def measure(self, method: str, size: int) -> Trial:
        way_of(method)
        talk = self._started()
        try:
            talk.ask({"method": method, "size": size})
        except BrokenPipeError:
            raise self._gone(talk) from None
        match self._next(talk):
            case {"trial": dict(trial)}:
                return Trial.from_json(trial)
            case {"ran_out": True} | {"ended": -9}:  # the system kills what takes the last memory
                return Trial(method=method, size=size, peak=None, seconds=None)
            case {"failed": str(sentence)}:
                raise TrialError(sentence)
            case {"error": dict(error)}:
                raise as_raised(error)
            case {"ended": int(code)}:
                how = how_it_ended(f"The process that measured {method} at batch {size} ended", code)
                raise TrialError(str(how))
        raise SpillwayError(f"The process that measured {method} at batch {size} said nothing that is known.")

    def _started(self) -> Talk:
        if self._talk is None:
            request = self._request
            self._process.close()  # one that could not build the workload
            talk = self._process.enter_context(
                talking("spillway.advisor.measuring", request, self._output, listens=True, environment=_QUIET)
            )
            match self._next(talk):
                case {"facts": dict(facts)}:
                    self._facts = facts
                case {"failed": str(sentence)}:
                    raise SpillwayError(sentence)
                case {"error": dict(error)}:
                    raise as_raised(error)
                case {"ran_out": True} | {"ended": -9}:
                    raise SpillwayError(f"There is not enough memory to build the workload {self.name}.")
                case other:
                    raise how_it_ended(f"Building the workload {self.name} ended", other.get("ended", 1))
            self._talk = talk
        return self._talk

    def _next(self, talk: Talk) -> dict[str, Any]:
        message = next(talk.messages, None)
        if message is None:
            raise self._gone(talk)
        return message

    def _gone(self, talk: Talk) -> SpillwayError:
        """What to raise when the process that forks has ended; the next trial starts another one."""
        code = talk.process.wait()
        self._talk = None
        self._process.close()
        return how_it_ended(f"The process that measures {self.name} ended", code)


def machine() -> dict[str, Any]:
    """This machine and its torch, without loading that."""
    return {
        "name": sha256(platform.node().encode()).hexdigest()[:16], "processor": platform.machine(),
        "processors": os.cpu_count(), "torch": importlib.metadata.version("torch"),
        "gpus": sorted(_gpus()), "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }  # fmt: skip


def _gpus() -> list[str]:
    found = []
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        lines = path.read_text("utf-8", errors="replace").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return found


def _content(workload: str) -> str:
    path = Path(workload.rpartition(":")[0]).expanduser()
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
