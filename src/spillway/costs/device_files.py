"""A device as a file: one JSON document, readable by people, checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from spillway.costs.device import Device
from spillway.ir.reading import content_of, document, fault_in, read_fields, read_value, shown
from spillway.ir.sealed import replace_file
from spillway.units import Bytes, MiB

FORMAT: Final = "spillway device"
VERSION: Final = 6
MOST: Final[Bytes] = MiB
"""What is read of a file."""


def write_device(path: Path, device: Device, facts: Mapping[str, Any] | None = None) -> None:
    """Write a device, and beside it what else is to be known of it. The file is there as a whole or not at all.

    Raises OSError if the system refuses.
    """
    told = {"format": FORMAT, "version": VERSION, "facts": dict(facts or {}), "device": fields_of(device)}
    replace_file(path, f"{json.dumps(told, indent=1)}\n".encode())


def fields_of(device: Device) -> dict[str, Any]:
    """A device as JSON can hold it."""
    by = device.efficiency
    plain = asdict(replace(device, efficiency=None))
    return plain if by is None else plain | {"efficiency": asdict(replace(by, shares=dict(by.shares)))}


def read_device(path: Path) -> tuple[Device, Mapping[str, Any]]:
    """The device of a file, and the facts beside it. Raises FileFormatError if the file is foreign, newer or damaged,
    and OSError where the system refuses."""
    content = content_of(path, MOST)
    with fault_in(path, 1):
        found = document(content)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"this is no {FORMAT!r} file")
        if found.get("version") != VERSION:
            raise ValueError(f"it is of version {shown(found.get('version'))}, and this Spillway reads {VERSION}")
        facts = read_value(dict[str, Any], found.get("facts", {}), "facts")
        return read_fields(Device, found.get("device"), "device"), facts
