"""What the operating system offers: processors, memory and its limits, the allocator, huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from spillway.doctor.findings import Finding, Problem
from spillway.engines.memory import ROOT, container_free, container_limit
from spillway.units import Bytes, TiB, format_bytes

_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")
_SETTINGS: Final = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)
_MIDDLE_SIZES: Final = (32, 64, 128)
"""KiB of pages that are large enough to be few, and small enough to leave no holes in a resident set."""


def memory(root: Path = ROOT) -> Finding:
    """Physical memory, what is free of it, and the smallest limit that stands below it. `root` holds proc and sys."""
    sizes = dict(_meminfo(root))
    physical, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    limit = container_limit(root)
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    problems = []
    if limit is not None and limit < physical:
        problems.append(
            Problem(
                what=f"The container ends a process at {format_bytes(limit)}, and a budget in per cent is one of the "
                f"machine's {format_bytes(physical)}.",
                fix=f"Name the budget in bytes, some way below {format_bytes(limit)}.",
            )
        )
    if addresses not in (resource.RLIM_INFINITY, -1) and addresses < 2 * TiB:
        problems.append(
            Problem(
                what=f"A process may use {format_bytes(addresses)} of addresses, and dropped storages need 1 TiB of "
                f"them, though no memory.",
                fix="Lift the limit with `ulimit -v unlimited`.",
                fatal=True,
            )
        )
    inside = "" if limit is None else f", of which the container may use {format_bytes(limit)}"
    return Finding(
        topic="memory",
        sentence=f"{format_bytes(physical)} of RAM{inside}, {format_bytes(available)} available now: a budget in per "
        f"cent is one of {format_bytes(physical)}.",
        facts={
            "physical": physical,
            "available": available,
            "container_limit": limit,
            "container_free": container_free(root),
        },
        problems=problems,
    )


def _meminfo(root: Path) -> Iterator[tuple[str, Bytes]]:
    with contextlib.suppress(OSError):
        for name, kibibytes in re.findall(r"^(\w+): +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE):
            yield name, int(kibibytes) * 1024


def allocator(environment: Mapping[str, str] = os.environ) -> Finding:
    """The C library's allocator, and what the environment says about it."""
    version = _libc_version()
    trims = hasattr(ctypes.CDLL(None), "malloc_trim")
    settings = {name: environment[name] for name in _SETTINGS if environment.get(name)}
    others = [name for name in _ALLOCATORS if name in environment.get("LD_PRELOAD", "")]
    problems = []
    if others:
        problems.append(
            Problem(
                what=f"LD_PRELOAD puts {others[0]} in the allocator's place, which `malloc_trim` does not reach: the "
                f"resident set may stay above the budget.",
                fix=f"Run without it, or let {others[0]} return freed memory by itself.",
            )
        )
    elif not trims:
        problems.append(
            Problem(
                what="This C library has no `malloc_trim`: freed memory stays in the process, and the resident set may "
                "stay above the budget.",
                fix="Use a Python that is linked with glibc.",
            )
        )
    told = "".join(f", {name}={value}" for name, value in settings.items())
    does = "freed memory is returned with `malloc_trim` when the resident set is about to pass the budget"
    return Finding(
        topic="allocator",
        sentence=f"{version or 'An unknown C library'}{told}: {does if trims and not others else 'see below'}.",
        facts={"libc": version, "malloc_trim": trims, "settings": settings},
        problems=problems,
    )


def _libc_version() -> str:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    return ""


def huge_pages(root: Path = ROOT) -> Finding:
    """Transparent huge pages."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    mode = _chosen(folder / "enabled")
    asked = "storages of more than 32 MiB come back in huge pages, which is several times as fast to fill"
    says = {
        "always": f"Always given: {asked}.",
        "madvise": f"Given to who asks, and Spillway does: {asked}.",
        "never": "Never given: large storages come back in small pages, which takes longer.",
        "": "The system does not say: large storages come back in whatever pages it gives.",
    }
    given = {size: _chosen(folder / f"hugepages-{size}kB/enabled").replace("inherit", mode) for size in _MIDDLE_SIZES}
    offered = {size: chosen for size, chosen in given.items() if chosen}
    problems = []
    if offered and "always" not in (mode, *offered.values()):
        size = min(offered, key=lambda size: abs(size - 64))
        problems.append(
            Problem(
                what=f"Memory comes in pages of {os.sysconf('SC_PAGE_SIZE') >> 10} KiB: where a budget presses, what "
                f"was returned to the system is asked back page by page.",
                fix=f"As root, `echo always > /{folder.relative_to(root)}/hugepages-{size}kB/enabled`: steps under "
                f"such a budget took up to a fifth less time with it.",
            )
        )
    return Finding(
        topic="huge pages",
        sentence=says.get(mode, says[""]),
        facts={"mode": mode or None, "middle_sizes": {f"{size} KiB": chosen for size, chosen in offered.items()}},
        problems=problems,
    )


def _chosen(file: Path) -> str:
    """The word in brackets; empty where there is no such file."""
    with contextlib.suppress(OSError):
        found = re.search(r"\[(\w+)\]", file.read_text())
        return found.group(1) if found else ""
    return ""
