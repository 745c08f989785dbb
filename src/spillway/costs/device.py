"""Devices: how fast they compute, how fast their memory and their links are, and where each number is from.

A spec sheet's numbers are what nobody reaches. `costs.roofline` says what share of them an op gets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from spillway.errors import UsageError
from spillway.units import Bytes, GiB, Seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What costs are made of. Raises UsageError when built if a rate is not above 0."""

    name: str
    """The name on the command line."""
    flops_per_second: float
    """In fp32, as eager PyTorch runs it: without TF32 unless the source says so."""
    bytes_per_second: float
    """Of device memory."""
    memory: Bytes
    """How much of it there is."""
    out_per_second: float
    """Bytes per second of a copy out, alone on its link."""
    in_per_second: float
    """Bytes per second of a copy in, alone on its link."""
    source: str
    """Where the numbers are from."""
    disk_out_per_second: float = 2e9
    """Bytes per second to the disk tier."""
    disk_in_per_second: float = 3e9
    """Bytes per second from the disk tier."""
    op_seconds: Seconds = 5e-6
    """The least that an op takes: its launch."""
    copy_seconds: Seconds = 10e-6
    """What a copy takes beside its bytes."""
    duplex: bool = True
    """Whether copies out and in run at full speed beside each other."""

    def __post_init__(self) -> None:
        rates = (
            self.flops_per_second, self.bytes_per_second, self.out_per_second, self.in_per_second,
            self.disk_out_per_second, self.disk_in_per_second,
        )  # fmt: skip
        if not all(0 < rate < math.inf for rate in rates) or self.op_seconds < 0 or self.copy_seconds < 0:
            raise UsageError(f"Device {self.name!r} needs rates above 0 and times of 0 or more; got {self!r}.")

    def out_seconds(self, nbytes: Bytes) -> Seconds:
        """Seconds to copy `nbytes` out to host memory."""
        return self.copy_seconds + nbytes / self.out_per_second

    def in_seconds(self, nbytes: Bytes) -> Seconds:
        """Seconds to copy `nbytes` in from host memory."""
        return self.copy_seconds + nbytes / self.in_per_second


_SPEC = "the vendor's specification; link: what is usual for it"

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                name="p100-nvlink", flops_per_second=10.6e12, bytes_per_second=732e9, memory=16 * GiB,
                out_per_second=34e9, in_per_second=34e9, source=_SPEC,
            ),
            Device(
                name="v100-pcie", flops_per_second=14e12, bytes_per_second=900e9, memory=32 * GiB,
                out_per_second=12e9, in_per_second=12e9, source=_SPEC,
            ),
            Device(
                name="v100-nvlink", flops_per_second=15.7e12, bytes_per_second=900e9, memory=16 * GiB,
                out_per_second=50e9, in_per_second=50e9, source=_SPEC,
            ),
            Device(
                name="a100", flops_per_second=19.5e12, bytes_per_second=2039e9, memory=80 * GiB,
                out_per_second=22.4e9, in_per_second=22.4e9,
                source="the vendor's specification; link: 35 % of 64 GB/s, as DELTA (arXiv:2203.15980) has it",
            ),
            Device(
                name="rtx6000", flops_per_second=16.3e12, bytes_per_second=672e9, memory=23 * GiB,
                out_per_second=12e9, in_per_second=12e9, source=_SPEC,
            ),
            Device(
                name="h200", flops_per_second=67e12, bytes_per_second=4800e9, memory=139 * GiB,
                out_per_second=50e9, in_per_second=50e9, source=_SPEC,
            ),
        )
    }
)  # fmt: skip
"""The devices that papers used, and one of today."""


def device_named(name: str) -> Device:
    """One of `DEVICES`. Raises UsageError for any other name."""
    if name in DEVICES:
        return DEVICES[name]
    raise UsageError(f"There is no device {name!r}; choose one of {', '.join(DEVICES)}.")
