"""Seconds for ops and copies: measured here, or modelled for a device that is not here. Bytes at sizes not recorded."""

from __future__ import annotations

from spillway.costs.calibration import Calibration, Residual, calibrate, residuals
from spillway.costs.device import DEVICES, HERE, Device, device_named
from spillway.costs.device_files import read_device, write_device
from spillway.costs.growth import Growth, alike, fit_growth
from spillway.costs.laws import Law
from spillway.costs.roofline import SHARES, OpKind, Share, Shares, kind_of, step_seconds, timed

__all__ = [
    "DEVICES",
    "HERE",
    "SHARES",
    "Calibration",
    "Device",
    "Growth",
    "Law",
    "OpKind",
    "Residual",
    "Share",
    "Shares",
    "alike",
    "calibrate",
    "device_named",
    "fit_growth",
    "kind_of",
    "read_device",
    "residuals",
    "step_seconds",
    "timed",
    "write_device",
]
