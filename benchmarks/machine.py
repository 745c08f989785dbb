"""The machine that figures were measured on, in words, and nothing that says whose it is."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import spillway
from spillway.doctor.on_system import huge_pages
from spillway.units import format_bytes


def describe() -> dict[str, Any]:
    """Processor, memory, system, versions, date; the load is told apart, at both ends of a measurement."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "kernel": f"{platform.system()} {platform.release()}",
        "pages": _pages(),
        "spill_file_system": _file_system(Path(tempfile.gettempdir())),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "spillway": spillway.__version__,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def load() -> float:
    """Processes that wanted to run, on average over the last minute; more than there are cores is a busy machine."""
    return round(os.getloadavg()[0], 2)


def sentence(machine: dict[str, Any], loads: list[float]) -> str:
    """The description as one line."""
    pages = f", pages of {machine['pages']}" if "pages" in machine else ""  # older results do not say
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}, {machine['kernel']}{pages}, spill file on "
        f"{machine['spill_file_system']}; Python {machine['python']}, torch {machine['torch']}, {machine['threads']} "
        f"thread; {machine['date']}; load {loads[0]} at the start, {loads[-1]} at the end"
    )


def _cpu_model() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _pages() -> str:
    """The size of pages that a process gets without asking."""
    facts = huge_pages().facts
    sizes = facts["middle_sizes"]
    if facts["mode"] == "always":
        return "2 MiB where they fit"
    return next((size for size in sizes if sizes[size] == "always"), f"{os.sysconf('SC_PAGE_SIZE') >> 10} KiB")


def _file_system(folder: Path) -> str:
    """The type of the file system that holds a folder: in a `tmpfs`, what was moved would still be in memory."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    holding = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]
