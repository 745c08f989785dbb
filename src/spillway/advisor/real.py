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
from spillway.processes import ONE_THREAD, Talk, how_it_ended, talking

STEPS: Final = 5
"""Timed in a trial."""
AROUND: Final = 2
"""Steps of a trial that are not timed: the one that warms up, and the one whose peak is measured."""
_ENVIRONMENT: Final = {**ONE_THREAD, "TORCH_CPP_LOG_LEVEL": "ERROR"}
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
        self._started().ask((method, size))
        match self._heard():
            case Trial() as trial:
                return trial
            case SpillwayError() as error:
                raise error
            case -9:  # the system kills what takes the last memory
                return Trial(method=method, size=size, peak=None, seconds=None)
            case int(code):
                how = how_it_ended(f"The process that measured {method} at batch {size} ended", code)
                raise TrialError(str(how))
        raise SpillwayError(f"The process that measured {method} at batch {size} said nothing that is known.")

    def _started(self) -> Talk:
        if not self._talk:
            self._process.close()  # one that could not build the workload
            self._talk = self._process.enter_context(
                talking("spillway.advisor.measuring:main", self._request, self._output, environment=_ENVIRONMENT)
            )
            match self._heard():
                case dict(facts):
                    self._facts = facts
                    return self._talk
                case SpillwayError() as error:
                    told = error
                case -9:
                    told = SpillwayError(f"There is not enough memory to build the workload {self.name}.")
                case code:
                    told = how_it_ended(f"Building the workload {self.name} ended", code)
            self._talk = None
            raise told
        return self._talk

    def _heard(self) -> Any:
        """What the process tells; where it has ended the next trial starts another one."""
        assert self._talk is not None
        try:
            return self._talk.hear()
        except EOFError:
            code, self._talk = self._talk.process.wait(), None
            self._process.close()
            raise how_it_ended(f"The process that measures {self.name} ended", code) from None


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
