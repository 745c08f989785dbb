"""Memory of this machine, and how much of it this process may use: control groups end one that takes more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from spillway.units import Bytes

ROOT: Final = Path("/")
"""Holds proc and sys."""
_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")
}  # fmt: skip
"""Of control groups, by version: the limit, and what is used."""
_NO_LIMIT: Final[Bytes] = 1 << 60
"""Version 1 of control groups writes a number above this where there is no limit."""


def machine_memory() -> Bytes:
    """RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory(root: Path = ROOT) -> Bytes:
    """RAM of this machine, or what its container may use of it."""
    limit = container_limit(root)
    return machine_memory() if limit is None else min(limit, machine_memory())


def container_limit(root: Path = ROOT) -> Bytes | None:
    """The smallest memory limit of this process's control groups, of either version; None without one."""
    return min((limit for _, limit, _ in _limits(root)), default=None)


def container_free(root: Path = ROOT) -> Bytes | None:
    """The least that is left below any of these limits, file caches that go first not counted as used; None without
    one."""
    left = []
    for folder, limit, usage in _limits(root):
        with contextlib.suppress(OSError, ValueError):
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            caches = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
            left.append(max(limit - int((folder / usage).read_text()) + caches, 0))
    return min(left, default=None)


def _limits(root: Path) -> Iterator[tuple[Path, Bytes, str]]:
    """Folders of control groups with a limit, that, and the name of the file that tells what is used."""
    for group, version in _groups(root):
        base = root / "sys/fs/cgroup" if version == 2 else root / "sys/fs/cgroup/memory"
        name, usage = _FILES[version]
        for one in (group, *group.parents):
            folder = base / one.relative_to("/")
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / name).read_text())
                if limit < _NO_LIMIT:
                    yield folder, limit, usage


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Control groups of this process that may limit memory."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                yield Path(path), 2
            elif "memory" in controllers.split(","):
                yield Path(path), 1
