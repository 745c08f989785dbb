"""What the spill directory offers: its file system, its room, its speed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

from spillway.doctor import Finding, Problem
from spillway.errors import SpillError
from spillway.tiers.speed import SAMPLE, disk_speed, has_direct_io, tier_speed
from spillway.units import Bytes, GiB, format_bytes

IN_MEMORY: Final = ("tmpfs", "ramfs")
ON_A_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "fuse.sshfs")
LITTLE: Final[Bytes] = GiB
"""Less free room than this is a problem."""

_ANOTHER: Final = "Name another directory, on a disk, with SpillOptions(directory=...) or --spill-directory."


def spill_directory(directory: Path) -> Finding:
    """The directory, without its speed."""
    topic = "spill directory"
    try:
        free = shutil.disk_usage(directory).free
        direct = has_direct_io(directory)
    except (OSError, SpillError) as error:
        reason = str(error) if isinstance(error, SpillError) else f"{directory}: {error.strerror or error}."
        return Finding(
            topic=topic, sentence=f"{directory} cannot be used.", facts={"directory": str(directory), "usable": False},
            problems=[Problem(what=reason, fix=_ANOTHER, fatal=True)],
        )  # fmt: skip
    system, problems = file_system(directory), []
    if system in IN_MEMORY:
        what = f"{directory} is a {system}, which is RAM itself: what moves there frees nothing."
        problems.append(Problem(what=what, fix=_ANOTHER))
    if system in ON_A_NETWORK:
        problems.append(Problem(what=f"{directory} is on a network ({system}): copies will be slow.", fix=_ANOTHER))
    if free < LITTLE:
        what = f"{directory} has {format_bytes(free)} left; what is away at once has to fit."
        problems.append(Problem(what=what, fix=f"Free some space there. {_ANOTHER}"))
    past = 'with direct I/O (spill_io="direct" keeps it out of the page cache)' if direct else "it has no direct I/O"
    return Finding(
        topic=topic, problems=problems,
        sentence=f"{directory} on {system or 'an unknown file system'}, {format_bytes(free)} free, {past}: storages "
        f"that are moved wait there in a file without a name.",
        facts={"directory": str(directory), "usable": True, "file_system": system, "free": free, "direct_io": direct},
    )  # fmt: skip


def speed(directory: Path) -> Finding:
    """How fast copies are there, measured with files that are gone afterwards."""
    topic = "disk speed"
    try:
        if shutil.disk_usage(directory).free < 2 * SAMPLE:
            raise SpillError(f"There is no room for the {format_bytes(SAMPLE)} that a measurement writes.")
        tier, disk = tier_speed(directory), disk_speed(directory)
    except (OSError, SpillError) as error:
        reason = str(error) if isinstance(error, SpillError) else f"{error.strerror or error}."
        problem = Problem(what=reason, fix="See the spill directory, above.")
        return Finding(topic=topic, sentence="Not measured.", facts={"measured": False}, problems=[problem])
    return Finding(
        topic=topic,
        sentence=f"Copies go out at {rate(tier.out)} and in at {rate(tier.back)}, checksums included; the disk without "
        f"its cache writes {rate(disk.out)} and reads {rate(disk.back)}: methods that weigh moving against recomputing "
        f"go by the copies of the run.",
        facts={
            "measured": True, "copy_out": round(tier.out), "copy_in": round(tier.back),
            "disk_write": round(disk.out), "disk_read": round(disk.back),
        },
    )  # fmt: skip


def rate(bytes_per_second: float) -> str:
    """For people."""
    return f"{format_bytes(round(bytes_per_second))}/s"


def file_system(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds the directory; empty where the system does not say."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    place, found, depth = Path(os.path.realpath(directory)), "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= depth:  # a later mount hides an earlier one
            found, depth = after.split()[0], len(point.parts)
    return found
