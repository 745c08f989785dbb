"""Seconds for ops and copies: measured here, or modelled for a device that is not here. Bytes at sizes not recorded."""

from __future__ import annotations

from spillway.costs.device import DEVICES, HERE, Device
from spillway.costs.device_files import read_device, write_device
from spillway.costs.efficiency import Efficiency, OpKind, Share, Shares
from spillway.costs.roofline import PUBLISHED, kind_of, step_seconds, timed
from spillway.costs.scaling import Law, Scaling, fit_scaling

__all__ = [
    "DEVICES",
    "HERE",
    "PUBLISHED",
    "Device",
    "Efficiency",
    "Law",
    "OpKind",
    "Scaling",
    "Share",
    "Shares",
    "fit_scaling",
    "kind_of",
    "read_device",
    "step_seconds",
    "timed",
    "write_device",
]
