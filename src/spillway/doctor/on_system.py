"""What the operating system offers: processors, memory and its limits, the allocator, huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from spillway.doctor import Finding, Problem
from spillway.internals.machine_memory import ROOT, container_free, container_limit
from spillway.units import Bytes, TiB, format_bytes

_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")
_SETTINGS: Final = (
    "GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
)  # fmt: skip
_MIDDLE_SIZES: Final = (32, 64, 128)
"""KiB of pages that are large enough to be few, and small enough to leave no holes in a resident set."""


def memory(root: Path = ROOT) -> Finding:
    """Physical memory, what is free of it, and the smallest limit that stands below it. `root` holds proc and sys."""
    sizes: dict[str, Bytes] = {}
    with contextlib.suppress(OSError):
        for name, kibibytes in re.findall(r"^(\w+): +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE):
            sizes[name] = int(kibibytes) * 1024
    physical, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    limit, addresses, problems = container_limit(root), resource.getrlimit(resource.RLIMIT_AS)[0], list[Problem]()
    if addresses not in (resource.RLIM_INFINITY, -1) and addresses < 2 * TiB:
        what = (
            f"A process may use {format_bytes(addresses)} of addresses, and dropped storages need 1 TiB of them, "
            f"though no memory."
        )
        problems.append(Problem(what=what, fix="Lift the limit with `ulimit -v unlimited`.", fatal=True))
    inside = "" if limit is None else f", of which the container may use {format_bytes(limit)}"
    return Finding(
        topic="memory", problems=problems,
        sentence=f"{format_bytes(physical)} of RAM{inside}, {format_bytes(available)} available now: a budget in per "
        f"cent is one of {format_bytes(physical if limit is None else min(limit, physical))}.",
        facts={
            "physical": physical, "available": available, "container_limit": limit,
            "container_free": container_free(root),
        },
    )  # fmt: skip


def allocator(environment: Mapping[str, str] = os.environ) -> Finding:
    """The C library's allocator, and what the environment says about it."""
    version, problems = "", []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    trims = hasattr(ctypes.CDLL(None), "malloc_trim")
    settings = {name: environment[name] for name in _SETTINGS if environment.get(name)}
    others = [name for name in _ALLOCATORS if name in environment.get("LD_PRELOAD", "")]
    if others:
        what = (
            f"LD_PRELOAD puts {others[0]} in the allocator's place, which `malloc_trim` does not reach: the resident "
            f"set may stay above the budget."
        )
        fix = f"Run without it, or let {others[0]} return freed memory by itself."
        problems.append(Problem(what=what, fix=fix))
    elif not trims:
        what = (
            "This C library has no `malloc_trim`: freed memory stays in the process, and the resident set may stay "
            "above the budget."
        )
        problems.append(Problem(what=what, fix="Use a Python that is linked with glibc."))
    told = "".join(f", {name}={value}" for name, value in settings.items())
    does = "freed memory is returned with `malloc_trim` when the resident set is about to pass the budget"
    return Finding(
        topic="allocator", problems=problems,
        sentence=f"{version or 'An unknown C library'}{told}: {does if trims and not others else 'see below'}.",
        facts={"libc": version, "malloc_trim": trims, "settings": settings},
    )  # fmt: skip


def huge_pages(root: Path = ROOT) -> Finding:
    """Transparent huge pages."""
    folder, problems = root / "sys/kernel/mm/transparent_hugepage", []
    mode = _chosen(folder / "enabled")
    asked = "storages of more than 32 MiB come back in huge pages, which is several times as fast to fill"
    says = {
        "always": f"Always given: {asked}.",
        "madvise": f"Given to who asks, and Spillway does: {asked}.",
        "never": "Never given: large storages come back in small pages, which takes longer.",
    }
    given = {size: _chosen(folder / f"hugepages-{size}kB/enabled").replace("inherit", mode) for size in _MIDDLE_SIZES}
    offered = {size: chosen for size, chosen in given.items() if chosen}
    if offered and "always" not in (mode, *offered.values()):
        size = min(offered, key=lambda size: abs(size - 64))
        what = (
            f"Memory comes in pages of {os.sysconf('SC_PAGE_SIZE') >> 10} KiB: where a budget presses, what was "
            f"returned to the system is asked back page by page."
        )
        fix = (
            f"As root, `echo always > /{folder.relative_to(root)}/hugepages-{size}kB/enabled`: steps under such a "
            f"budget took up to a fifth less time with it."
        )
        problems.append(Problem(what=what, fix=fix))
    unknown = "The system does not say: large storages come back in whatever pages it gives."
    return Finding(
        topic="huge pages", sentence=says.get(mode, unknown), problems=problems,
        facts={"mode": mode or None, "middle_sizes": {f"{size} KiB": chosen for size, chosen in offered.items()}},
    )  # fmt: skip


def _chosen(file: Path) -> str:
    """The word in brackets; empty where there is no such file."""
    with contextlib.suppress(OSError):
        found = re.search(r"\[(\w+)\]", file.read_text())
        return found.group(1) if found else ""
    return ""
