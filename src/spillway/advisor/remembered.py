"""Trials that are not measured twice: JSON lines in the user's cache, a file for every key.

The first line is `{"key": {...}}`, every further one `{"facts": {...}}` or `{"trial": {...}}`. A line that cannot be
read, as a killed run leaves it, is measured again; a file about something else is begun anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from spillway.advisor.bench import AbstractBench, Trial
from spillway.errors import FileFormatError
from spillway.ir.reading import document, lines_of, opened, read_fields
from spillway.units import Bytes


def cache_file(key: Mapping[str, Any]) -> Path:
    """Where trials of this key are kept. A relative XDG_CACHE_HOME is ignored, as its standard has it."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "spillway" / f"advise-{digest}.jsonl"


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
        bench: Who is asked.
        facts: What that knows of the workload, asked for once; `hardware` is among it.
        path: The file; where it cannot be written nothing is kept.
        key: What the figures depend on.
        fresh: Forget what is known.
    """

    def __init__(
        self,
        bench: AbstractBench,
        facts: Callable[[], Mapping[str, Any]],
        path: Path,
        key: Mapping[str, Any],
        *,
        fresh: bool = False,
    ) -> None:
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
        """Whether the file is about this key."""
        lines = self._lines()
        if next(lines, None) != {"key": json.loads(json.dumps(key))}:
            return False
        for line in lines:
            with contextlib.suppress(ValueError):
                match line:
                    case {"facts": facts}:
                        self._facts = asdict(read_fields(_Facts, facts, "workload"))
                    case {"trial": trial}:
                        one = Trial.from_json(trial)
                        self._trials[one.method, one.size] = one
        return True

    def _lines(self) -> Iterator[Any]:
        try:
            for _, line in lines_of(self._path):
                try:
                    yield document(line)
                except ValueError:
                    yield None
        except (OSError, FileFormatError):
            return

    def _append(self, record: Mapping[str, Any], mode: str = "a") -> None:
        with contextlib.suppress(OSError, FileFormatError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A line of its own, whatever stands at the end of the file.
            begin = b"" if mode == "w" or self._ends_whole() else b"\n"
            with self._path.open(f"{mode}b") as file:
                file.write(begin + json.dumps(record).encode() + b"\n")

    def _ends_whole(self) -> bool:
        if not self._path.exists():
            return True
        with opened(self._path) as file:
            return not file.seek(0, os.SEEK_END) or (file.seek(-1, os.SEEK_END), file.read(1))[1] == b"\n"
