"""Seconds for ops and copies: measured here, or modelled for a device that is not here."""

from __future__ import annotations

from spillway.costs.device import DEVICES, Device, device_named

__all__ = ["DEVICES", "Device", "device_named"]
