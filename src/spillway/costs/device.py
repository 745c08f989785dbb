"""Devices: how fast they compute, how fast their memory and their links are, and where each number is from.

A spec sheet's numbers are what nobody reaches. `costs.roofline` says what share of them an op gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

from spillway.costs.efficiency import Efficiency
from spillway.errors import UsageError
from spillway.units import Bytes, GiB, Seconds

LOWEST: Final = 1e-3
HIGHEST: Final = 1e24
"""Of a rate, a second."""
LONGEST: Final[Seconds] = 1e6
"""Of a time."""


_RATES: Final = (
    "flops_per_second", "bytes_per_second", "out_per_second", "in_per_second", "disk_out_per_second",
    "disk_in_per_second",
)  # fmt: skip
_TIMES: Final = (
    "op_seconds", "copy_seconds", "watch_seconds", "handling_seconds", "question_seconds", "beside_seconds",
    "cold_root", "host_seconds",
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What costs are made of. Raises UsageError when built if a rate or a time is none."""

    name: str
    """The name on the command line."""
    flops_per_second: float
    """In fp32, as eager PyTorch runs it: without TF32 unless the source says so."""
    bytes_per_second: float
    """Of device memory."""
    memory: Bytes
    out_per_second: float
    """Bytes per second of a copy out, alone on its link."""
    in_per_second: float
    """Bytes per second of a copy in, alone on its link."""
    source: str
    """Where the numbers are from."""
    disk_out_per_second: float = 2e9
    """Bytes per second to the disk tier; unless measured, a fast NVMe disk, assumed."""
    disk_in_per_second: float = 3e9
    """Bytes per second from the disk tier; unless measured, assumed too."""
    op_seconds: Seconds = 5e-6
    """The least that an op takes: its launch."""
    copy_seconds: Seconds = 10e-6
    """What a copy takes beside its bytes."""
    duplex: bool = True
    """Whether copies out and in run at full speed beside each other."""
    overlaps: bool = True
    """Whether copies have a processor or a link of their own, and so run beside ops."""
    watch_seconds: Seconds = 0.0
    """What compute waits for each op while Spillway watches it; 0 where Python runs ahead of the device."""
    handling_seconds: Seconds = 0.0
    """What compute waits besides its copy whenever a storage leaves or comes back; 0 likewise."""
    question_seconds: Seconds = 0.0
    """What compute waits for every question that a method asks about a storage; 0 likewise."""
    beside_seconds: Seconds = 0.0
    """What compute waits besides for every copy that begins while ops run: who copies needs Python too; 0 likewise."""
    cold_root: float = 0.0
    """By what share these four take longer, over the square root of the op's own seconds: long ops leave Python's
    caches cold."""
    half_flops_per_second: float | None = None
    """Of products and convolutions of 16-bit numbers; None if they are no faster than those of 32."""
    multiprocessors: int = 0
    """That work at a time; 0 where ops are not cut into blocks for them."""
    host_seconds: Seconds = 0.0
    """What the host takes to launch an op, autograd and Python included, while the device works on earlier ones."""
    efficiency: Efficiency | None = None
    """What ops get of these rates; None for what published measurements say of GPUs, `costs.PUBLISHED`."""

    def __post_init__(self) -> None:
        # No rate is so low or so high that the time of a copy is no number any more.
        wrong = [f"{name}={getattr(self, name)}" for name in _RATES if not LOWEST <= getattr(self, name) <= HIGHEST]
        if self.half_flops_per_second is not None and not LOWEST <= self.half_flops_per_second <= HIGHEST:
            wrong.append(f"half_flops_per_second={self.half_flops_per_second}")
        wrong += [f"{name}={getattr(self, name)}" for name in _TIMES if not 0 <= getattr(self, name) <= LONGEST]
        if wrong:
            raise UsageError(
                f"Device {self.name!r} needs rates from {LOWEST} to {HIGHEST} a second, those of its link among them, "
                f"and times from 0 to {LONGEST:.0f} seconds; got {', '.join(wrong)}."
            )

    def out_seconds(self, nbytes: Bytes) -> Seconds:
        """Seconds to copy `nbytes` out to host memory."""
        return self.copy_seconds + nbytes / self.out_per_second

    def in_seconds(self, nbytes: Bytes) -> Seconds:
        """Seconds to copy `nbytes` in from host memory."""
        return self.copy_seconds + nbytes / self.in_per_second


_A100 = "rates and memory: the vendor's data sheet (A100 80 GB SXM; 1935 GB/s on PCIe), fp32 without TF32's 156 TFLOP/s"
HERE: Final = "here"
"""The name of the machine that this runs on; its numbers are measured, see `calibration.measured`."""

_SHEET = "rates and memory: the vendor's data sheet"
_PCIE_3 = "12 GB/s of the 15.75 that PCIe 3.0 x16 has, what pinned copies usually reach"

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                name="p100-nvlink", flops_per_second=10.6e12, bytes_per_second=732e9, memory=16 * GiB,
                out_per_second=34e9, in_per_second=34e9,
                half_flops_per_second=21.2e12, multiprocessors=56,
                source=f"{_SHEET} (P100 SXM2). Link: two NVLink 1.0 links of 20 GB/s a direction to a POWER8 host, as "
                "Large Model Support (Le et al. 2019) had them; 85 % of their 40 GB/s, assumed",
            ),
            Device(
                name="v100-pcie", flops_per_second=14e12, bytes_per_second=900e9, memory=32 * GiB,
                out_per_second=12e9, in_per_second=12e9,
                half_flops_per_second=112e12, multiprocessors=80,
                source=f"{_SHEET} (V100 PCIe 32 GB; its 14 TFLOP/s are 15.7 on SXM2). Link: {_PCIE_3}. PAPAYA's V100 "
                "has 16 GB and, by its own swap figures, 5.9 GB/s out and in together, copies in turn with compute",
            ),
            Device(
                name="v100", flops_per_second=15.7e12, bytes_per_second=900e9, memory=16 * 10**9,
                out_per_second=12e9, in_per_second=12e9, half_flops_per_second=125e12, multiprocessors=80,
                host_seconds=38e-6,
                source=f"{_SHEET} (V100 SXM2 16 GB), in a p3.2xlarge, whose host took 38 us an op of PAPAYA's "
                "models. Link: "
                f"{_PCIE_3}",
            ),
            Device(
                name="t4", flops_per_second=8.1e12, bytes_per_second=320e9, memory=16 * 10**9,
                out_per_second=12e9, in_per_second=12e9, half_flops_per_second=65e12, multiprocessors=40,
                host_seconds=38e-6,
                source=f"{_SHEET} (T4). Link: {_PCIE_3}",
            ),
            Device(
                name="k80", flops_per_second=2.8e12, bytes_per_second=240e9, memory=12 * 10**9,
                out_per_second=12e9, in_per_second=12e9, multiprocessors=13,
                host_seconds=38e-6,
                source=f"{_SHEET} (K80, one of its two GPUs, without boost; its halves are computed as float32). Link: "
                f"{_PCIE_3}",
            ),
            Device(
                name="v100-nvlink", flops_per_second=15.7e12, bytes_per_second=900e9, memory=16 * GiB,
                out_per_second=50e9, in_per_second=50e9,
                half_flops_per_second=125e12, multiprocessors=80,
                source=f"{_SHEET} (V100 SXM2 16 GB). Link: the out-of-core window paper (section 5) has two NVLinks of "
                "50 GB/s each, read as 25 GB/s a direction each; other readings give 37 to 75",
            ),
            Device(
                name="a100", flops_per_second=19.5e12, bytes_per_second=2039e9, memory=80 * GiB,
                out_per_second=22.4e9, in_per_second=22.4e9, half_flops_per_second=312e12, multiprocessors=108,
                source=f"{_A100}. Link: 35 % of 64 GB/s, as DELTA has it "
                "(arXiv:2203.15980); 64 is what PCIe 4.0 x16 does in both directions together, see a100-physical",
            ),
            Device(
                name="a100-physical", flops_per_second=19.5e12, bytes_per_second=2039e9, memory=80 * GiB,
                out_per_second=11.2e9, in_per_second=11.2e9, half_flops_per_second=312e12, multiprocessors=108,
                source=f"{_A100}. Link: DELTA's 35 % of the 32 GB/s that "
                "PCIe 4.0 x16 does in one direction",
            ),
            Device(
                name="rtx6000", flops_per_second=16.3e12, bytes_per_second=672e9, memory=23 * GiB,
                out_per_second=12e9, in_per_second=12e9,
                half_flops_per_second=130.5e12, multiprocessors=72,
                source=f"rates: the vendor's data sheet (Quadro RTX 6000). Memory: 23 GB, as DyNN-Offload (section VI) "
                f"has it; the sheet says 24. Link: {_PCIE_3}",
            ),
            Device(
                name="h200", flops_per_second=67e12, bytes_per_second=4800e9, memory=139 * GiB,
                out_per_second=50e9, in_per_second=50e9,
                half_flops_per_second=989e12, multiprocessors=132,
                source=f"{_SHEET} (H200 SXM; of its 141 GB a process sees 139 GiB). Link: 50 GB/s of the 63 that PCIe "
                "5.0 x16 has in one direction, assumed",
            ),
        )
    }
)  # fmt: skip
"""The devices that papers used, and one of today. Where a number is disputed, the source says so, or there are two."""
