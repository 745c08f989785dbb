"""Measures on this machine: asks a process that forks one for every trial (`measuring`), and remembers what it said.

Trials that are not measured twice are JSON lines in the user's cache, a file for every key. The first line is
`{"key": {...}}`, every further one `{"facts": {...}}` or `{"trial": {...}}`. A line that cannot be read, as a killed
run leaves it, is measured again; a file about something else is begun anew.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self, final

from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.ways import way_of
from spillway.errors import FileFormatError, SpillwayError, TrialError
from spillway.internals.user_cache import user_cache
from spillway.ir.reading import document, lines_of, opened, read_fields
from spillway.processes import ONE_THREAD, Talk, how_it_ended, talking
from spillway.units import Bytes

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
    """

    def __init__(
        self, workload: str, *, options: Mapping[str, object], seed: int, output: Callable[[str], None],
        device: str | None = None, steps: int = STEPS,
    ) -> None:  # fmt: skip
        self.name = workload
        self._request: dict[str, Any] = {
            "workload": workload, "options": dict(options), "seed": seed, "steps": steps,
            "spill_directory": None, "device": device,
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
        path = Path(os.path.expanduser(self.name.rpartition(":")[0]))
        content = sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        return {"machine": machine(), **self._request, "file": content}

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
    gpus = []
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        lines = path.read_text("utf-8", errors="replace").splitlines()
        gpus += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return {
        "name": sha256(platform.node().encode()).hexdigest()[:16], "processor": platform.machine(),
        "processors": os.cpu_count(), "torch": importlib.metadata.version("torch"),
        "gpus": sorted(gpus), "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }  # fmt: skip


def cache_file(key: Mapping[str, Any]) -> Path:
    """Where trials of this key are kept."""
    digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache() / f"advise-{digest}.jsonl"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What is known of a workload on the CPU; on a device what is free changes, and is asked anew."""

    hardware: str
    gradient_bytes: Bytes
    device_bytes: None


@final
class RememberedBench(AbstractBench):
    """Asks another bench what is not known yet. A trial that ran out of memory is not kept: there may be more later.

    Arguments:
        facts: What that knows of the workload, asked for once; `hardware` is among it.
        path: The file; where it cannot be written nothing is kept.
        key: What the figures depend on.
        fresh: Forget what is known.
    """

    def __init__(
        self, bench: AbstractBench, facts: Callable[[], Mapping[str, Any]], path: Path, key: Mapping[str, Any], *,
        fresh: bool = False,
    ) -> None:  # fmt: skip
        self.name = bench.name
        self.remembered = 0
        """Trials that were not measured because they were known."""
        self._bench, self._ask, self._path = bench, facts, path
        self._facts: Mapping[str, Any] = {}
        self._trials: dict[tuple[str, int], Trial] = {}
        ours = not fresh and self._read(key)
        if not ours:
            self._facts, self._trials = {}, {}
            self._append({"key": dict(key)}, mode="w")

    @property
    def hardware(self) -> str:  # type: ignore[override]
        """What was measured on."""
        return str(self.facts["hardware"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the workload before anything is measured."""
        if not self._facts:
            self._facts = dict(self._ask())
            self._append({"facts": self._facts})
        return self._facts

    def measure(self, method: str, size: int) -> Trial:
        known = self._trials.get((method, size))
        if known is not None:
            self.remembered += 1
            return known
        return self.measure_again(method, size)

    def measure_again(self, method: str, size: int) -> Trial:
        trial = self._bench.measure(method, size)
        if not trial.ran_out:
            self._trials[method, size] = trial
            self._append({"trial": trial.to_json()})
        return trial

    def _read(self, key: Mapping[str, Any]) -> bool:
        """Whether the file is about this key, which its first line has."""
        ours = False
        with contextlib.suppress(OSError, FileFormatError):
            for _, line in lines_of(self._path):
                with contextlib.suppress(ValueError):
                    match document(line):
                        case {"facts": facts} if ours:
                            self._facts = asdict(read_fields(_Facts, facts, "workload"))
                        case {"trial": trial} if ours:
                            one = Trial.from_json(trial)
                            self._trials[one.method, one.size] = one
                        case {"key": told}:
                            ours = told == json.loads(json.dumps(key))
                if not ours:
                    break
        return ours

    def _append(self, record: Mapping[str, Any], mode: str = "a") -> None:
        with contextlib.suppress(OSError, FileFormatError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A line of its own, whatever stands at the end of the file.
            begin = b""
            if mode == "a" and self._path.exists():
                with opened(self._path) as file:
                    if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                        begin = b"\n"
            with self._path.open(f"{mode}b") as file:
                file.write(begin + json.dumps(record).encode() + b"\n")
