"""Bytes and seconds: what they are called in annotations, and how they are written for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class Within:
    """Of an annotated number: what a file may say it is, both ends included."""

    least: float
    most: float


Bytes: TypeAlias = Annotated[int, Within(0, 2**63 - 1)]
"""A number of bytes."""
Seconds: TypeAlias = Annotated[float, Within(0, 1e15)]
"""A duration in seconds."""

KiB: Bytes = 1024
MiB: Bytes = 1024 * KiB
GiB: Bytes = 1024 * MiB
TiB: Bytes = 1024 * GiB


def format_bytes(nbytes: Bytes) -> str:
    """Write bytes for people, with two decimals: `"1.50 GiB"`; below 1 KiB exactly: `"512 B"`."""
    for unit, size in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        # Rounded first, so that a byte less than 1 GiB is "1.00 GiB" and never "1024.00 MiB".
        if round(abs(nbytes) * 1024 / size, 2) >= 1024:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: Seconds) -> str:
    """Write a duration for people: `"45.6 us"`, `"12.3 ms"`, `"1.50 s"`, `"2 min 03 s"`, `"1 h 02 min"`."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 59.995:
        whole, minutes = round(seconds), round(round(seconds) / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min" if whole >= 3600 else f"{whole // 60} min {whole % 60:02d} s"
    if seconds >= 0.99995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.99995e-3 else f"{seconds * 1e6:.1f} us"
