"""A device as a file: one JSON document, readable by people, checked when it is read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from spillway.costs.device import Device
from spillway.errors import FileFormatError, UsageError

FORMAT: Final = "spillway device"
VERSION: Final = 3
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {"str": str, "Bytes": int, "bool": bool}


def write_device(path: Path, device: Device, facts: Mapping[str, Any] | None = None) -> None:
    """Write a device, and beside it what else is to be known of it. The file is there as a whole or not at all.

    Raises OSError if the system refuses.
    """
    document = {"format": FORMAT, "version": VERSION, "facts": dict(facts or {}), "device": asdict(device)}
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_device(path: Path) -> tuple[Device, Mapping[str, Any]]:
    """The device of a file, and the facts beside it.

    Raises:
        FileFormatError: The file is foreign, newer or damaged.
        OSError: The system refuses.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:  # of text that is no JSON, and of bytes that are no text
        raise FileFormatError("this is not a device as JSON", path=path, line=1) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileFormatError(f"this is no {FORMAT!r} file", path=path, line=1)
    if document.get("version") != VERSION:
        reason = f"it is of version {document.get('version')!r}, and this Spillway reads version {VERSION}"
        raise FileFormatError(reason, path=path, line=1)
    return _device(path, document.get("device")), _facts(document.get("facts"))


def _device(path: Path, figures: Any) -> Device:
    if not isinstance(figures, dict):
        raise FileFormatError("it holds no device", path=path, line=1)
    for field in fields(Device):
        wanted = _TYPES.get(str(field.type), (int, float))
        given = figures.get(field.name)
        # A boolean is an integer to Python, and no number to anybody else.
        if not isinstance(given, wanted) or (isinstance(given, bool) and wanted is not bool):
            raise FileFormatError(f"{field.name} of its device is missing or no {field.type}", path=path, line=1)
    unknown = sorted(set(figures) - {field.name for field in fields(Device)})
    if unknown:
        raise FileFormatError(f"its device has {unknown[0]!r}, which no device has", path=path, line=1)
    try:
        return Device(**figures)
    except UsageError as error:
        raise FileFormatError(
            f"its device has a rate that is not above 0: {error}".rstrip("."), path=path, line=1
        ) from error


def _facts(facts: Any) -> Mapping[str, Any]:
    return facts if isinstance(facts, dict) else {}
