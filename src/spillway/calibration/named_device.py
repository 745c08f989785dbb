"""From what a user calls a device to the device; torch is loaded only to measure this machine."""

from __future__ import annotations

import os
from pathlib import Path

from spillway.costs.device import DEVICES, HERE, Device
from spillway.costs.device_files import read_device
from spillway.errors import SpillwayError, UsageError


def device_of(name: str | Device) -> Device:
    """A device from `"here"`, from one of `DEVICES` in any case, or from a file that `write_device` wrote. Raises
    UsageError if there is no such device or file, and SpillwayError if the file cannot be read, this machine cannot be
    measured, or torch is not installed to do so."""
    if isinstance(name, Device):
        return name
    if name.lower() == HERE:
        try:
            from spillway.calibration.measured import this_machine
        except ImportError as error:
            raise SpillwayError(f"Measuring this machine takes torch, which cannot be imported: {error}.") from error
        return this_machine()
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if not name.lower().endswith(".json"):
        choices = ", ".join((HERE, *DEVICES))
        raise UsageError(f"There is no device {name!r}; choose one of {choices}, or a device's .json file.")
    path = Path(os.path.expanduser(name))  # as it is, where nobody has that name
    if not path.is_file():
        raise UsageError(f"There is no file {path} to read a device from.")
    try:
        return read_device(path)[0]
    except OSError as error:
        raise SpillwayError(f"{path}: {error.strerror or error}.") from error
