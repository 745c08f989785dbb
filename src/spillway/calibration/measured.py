"""This machine as a device: what its processor, memory, disk and link do, measured once and remembered.

The seconds that this takes are spent once for each machine, torch, Spillway, number of threads and spill directory.
Stands beside the engines and not below them, because the disk is measured through the tier that sessions use, and what
watching ops costs by the engine that watches them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import torch

from spillway.calibration.watching import COLD_ROOT, measure_watching
from spillway.costs.device import HERE, Device
from spillway.costs.device_files import read_device, write_device
from spillway.errors import FileFormatError
from spillway.internals.machine_memory import machine_memory
from spillway.internals.user_cache import user_cache
from spillway.tiers.disk import DiskTier
from spillway.tiers.speed import Speed, disk_speed, tier_speed
from spillway.units import Bytes, MiB, Seconds
from spillway.version import __version__

PATIENCE: Final[Seconds] = 1.0
"""How long a rate is measured; the best of many tries counts, which a busy machine disturbs least."""
_SIDE: Final = 1024
"""Of the matrices that are multiplied: large enough for the full rate, small enough for many tries."""
_LARGE: Final[Bytes] = 128 * MiB
"""Of a tensor that no cache holds."""
_SMALL: Final = 4096
"""Bytes of a copy that is all overhead: one page."""
_TRIES: Final = 3
_TIMES: Final = 200
"""Of what takes microseconds, measured together."""


def this_machine(*, refresh: bool = False, directory: Path | None = None) -> Device:
    """The machine that this runs on: its first CUDA device if it has one, else its CPU.

    On the CPU the link is the spill directory as a session sees it, through the page cache and with checksums, and the
    disk tier what the disk behind it sustains. On CUDA the link is that of copies to and from pinned memory.

    Args:
        refresh: Measure again even if there are figures.
        directory: Where bytes are spilled; the system's temporary directory by default.

    Raises:
        SpillError: Nothing can be written to `directory`, or it has no room for the 256 MiB that are written there.
    """
    directory = directory or Path(tempfile.gettempdir())
    key = _key(directory)
    path = _cache(key)
    with contextlib.suppress(OSError, FileFormatError):
        known, facts = read_device(path)
        if not refresh and facts.get("key") == dict(key):
            return known
    device = measure(directory)
    with contextlib.suppress(OSError):  # a machine without a home measures every time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_device(path, device, {"key": key, "measured": time.strftime("%Y-%m-%d %H:%M:%S")})
    return device


def measure(directory: Path) -> Device:
    """Measure now, some seconds long; see `this_machine`."""
    return _cuda(directory) if torch.cuda.is_available() else _cpu(directory)


def _cache(key: Mapping[str, Any]) -> Path:
    """A file for every key, so that two processes that measure at a time do not lose each other's figures."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache() / f"machine-{digest}.json"


def _key(directory: Path) -> Mapping[str, Any]:
    """What the figures depend on. Of the machine's name a digest: files travel further than their writers think."""
    name = hashlib.sha256(platform.node().encode()).hexdigest()[:16]
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return {
        "machine": name, "processor": _processor(), "processors": os.cpu_count(), "gpu": gpu,
        "torch": str(torch.__version__), "threads": torch.get_num_threads(), "directory": str(directory.resolve()),
        "spillway": __version__,  # whose own Python is measured too
        "figures": [field.name for field in fields(Device)],
    }  # fmt: skip


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _cpu(directory: Path) -> Device:
    speeds, disk = [tier_speed(directory) for _ in range(_TRIES)], disk_speed(directory)
    # Each way at its best: what else the disk is doing at the moment is not the tier's.
    link = Speed(out=max(speed.out for speed in speeds), back=max(speed.back for speed in speeds))
    watching = measure_watching(directory, link)
    threads = torch.get_num_threads()
    return Device(
        name=HERE, flops_per_second=_matmul_rate("cpu"), bytes_per_second=_memory_rate("cpu"),
        memory=machine_memory(),
        out_per_second=link.out, in_per_second=link.back,
        disk_out_per_second=disk.out, disk_in_per_second=disk.back,
        op_seconds=_launch("cpu"), copy_seconds=max(_page_copy(directory), watching.copy),
        watch_seconds=watching.op, handling_seconds=watching.storage, question_seconds=watching.question,
        beside_seconds=watching.beside, cold_root=COLD_ROOT,
        duplex=False,  # both ways are the same memory, and the same disk
        overlaps=len(os.sched_getaffinity(0)) > threads,  # as the tensor engine has it for buffered copies
        source=f"measured: {_processor()}, torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}; link: the "
        f"spill file in {directory} through the page cache",
    )  # fmt: skip


def _cuda(directory: Path) -> Device:
    disk = disk_speed(directory)
    out, back = link_rates()
    return Device(
        name=HERE, flops_per_second=_matmul_rate("cuda"), bytes_per_second=_memory_rate("cuda"),
        memory=int(torch.cuda.mem_get_info(0)[1]), out_per_second=out, in_per_second=back,
        disk_out_per_second=disk.out, disk_in_per_second=disk.back, op_seconds=_launch("cuda"),
        source=f"measured: {torch.cuda.get_device_name(0)}, torch {torch.__version__}; link: pinned copies; the least "
        "seconds of a copy are assumed",
    )  # fmt: skip


def _matmul_rate(device: str) -> float:
    """Operations per second of a product of matrices in fp32, under the present settings (TF32, threads)."""
    side = _SIDE if device == "cpu" else 8 * _SIDE
    one, other = torch.randn(2, side, side, device=device)
    into = torch.empty(side, side, device=device)
    return 2 * side**3 / fastest(lambda: torch.mm(one, other, out=into))


def _memory_rate(device: str) -> float:
    """Bytes per second read and written by a sum of two tensors, which reads two thirds of them."""
    one, other, into = torch.ones(3, _LARGE // 4, device=device)
    return 3 * _LARGE / fastest(lambda: torch.add(one, other, out=into))


def _launch(device: str) -> Seconds:
    """Seconds that an op takes which has nothing to do: one of many that follow each other."""
    one = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(_TIMES):
            one.add(one)

    return fastest(many) / _TIMES


def link_rates(device: int = 0, nbytes: Bytes = _LARGE, patience: Seconds = PATIENCE) -> tuple[float, float]:
    """Bytes per second of pinned copies out of a CUDA device and into it. Raises RuntimeError where CUDA refuses."""
    with torch.cuda.device(device):
        there = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        out = fastest(lambda: here.copy_(there, non_blocking=True), patience)
        return nbytes / out, nbytes / fastest(lambda: there.copy_(here, non_blocking=True), patience)


def _page_copy(directory: Path) -> Seconds:
    """Seconds to move a single page through the tier: what a copy takes beside its bytes, out and in on average."""
    page = ctypes.create_string_buffer(2 * _SMALL)
    address = -(-ctypes.addressof(page) // _SMALL) * _SMALL
    tier = DiskTier(directory)

    def moved() -> None:
        slot = tier.write(address, _SMALL)
        tier.read(slot, address)
        tier.free(slot)

    try:
        return fastest(moved) / 2
    finally:
        tier.close()


def fastest(action: Callable[[], object], patience: Seconds = PATIENCE) -> Seconds:
    """Seconds of the fastest of the tries that there is patience for, three at least; the first only warms up."""
    _until_done(action)
    taken: list[Seconds] = []
    ends = time.perf_counter() + patience
    while len(taken) < 3 or time.perf_counter() < ends:
        taken.append(_until_done(action))
    return min(taken)


def _until_done(action: Callable[[], object]) -> Seconds:
    began = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
