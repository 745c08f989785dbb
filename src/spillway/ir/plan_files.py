"""Plan files: a plan as versioned JSON lines, one line per gap, which a person can read.

    {"format":"spillway-plan","version":1,"step":"3f0c...","allowed":4096,"projected":3840,"gaps":2,"facts":{...}}
    {"value":5,"gone":[3,9],"home":"recompute","ops":[1,2],"held":[0],"temporaries":64}
    {"value":7,"gone":[4,12],"home":"host"}

Lines are sealed (`sealed.py`), and the first one says how many follow. `step` is the digest of the step that the plan
is for; a plan is good for no other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

from spillway.errors import FileFormatError
from spillway.ir.plan import Disk, Gap, Home, Host, Packed, Plan, Recompute
from spillway.ir.sealed import encoded, fault_in, read_header, seal, unsealed
from spillway.ir.step import Step
from spillway.ir.verify import verify

FORMAT: Final = "spillway-plan"
"""What the first line of every plan file names."""
VERSION: Final = 1
"""The version that this code writes, and the newest that it reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """What a plan file holds."""

    plan: Plan
    """The plan."""
    facts: dict[str, Any]
    """Where it is from: the method, the device, what the planner said of it."""


def write_plan(path: str | PathLike[str], plan: Plan, facts: Mapping[str, Any]) -> None:
    """Write a plan file. A file that stands there is replaced as a whole.

    Raises TypeError for facts that JSON cannot hold, and OSError where the system does.
    """
    header = {"format": FORMAT, "version": VERSION, "step": plan.step, "allowed": plan.allowed,
              "projected": plan.projected, "gaps": len(plan.gaps), "facts": dict(facts)}  # fmt: skip
    lines, checksum = [], 0
    for record in (header, *map(_gap_record, plan.gaps)):
        line, checksum = seal(encoded(record), checksum)
        lines.append(line)
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(b"".join(lines))
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def read_plan(path: str | PathLike[str], step: Step | None = None) -> PlanFile:
    """Read a plan file. With `step` the plan has to be for that step, and `verify` has to accept it.

    Raises FileFormatError with the path and the line at fault for a foreign, newer, cut or damaged file, and for the
    plan of another step; PlanRejected for a plan that could not run; OSError where the system does.
    """
    path = Path(path)
    with path.open("rb") as file:
        lines = file.read().splitlines(keepends=True)
    with fault_in(path, 1):
        header, checksum = read_header(lines[0] if lines else b"", name=FORMAT, version=VERSION, what="a plan")
    gaps = []
    for number, line in enumerate(lines[1:], start=2):
        with fault_in(path, number):
            record, checksum = unsealed(line, checksum)
            gaps.append(_gap(record))
    with fault_in(path, 1):
        found = _plan_file(header, tuple(gaps))
    if step is not None:
        if found.plan.step != step.digest():
            reason = f"the plan is for step {found.plan.step:.12}, and this is step {step.digest():.12}"
            raise FileFormatError(reason, path=path, line=1)
        verify(found.plan, step, found.plan.allowed)
    return found


def _plan_file(header: dict[str, Any], gaps: tuple[Gap, ...]) -> PlanFile:
    match header:
        case {"step": str(step), "allowed": int(allowed), "projected": int(projected), "gaps": int(count)}:
            if count != len(gaps):
                raise ValueError(f"{len(gaps)} gaps follow of the {count} that the first line announces")
            facts = header.get("facts")
            plan = Plan(step=step, allowed=allowed, projected=projected, gaps=gaps)
            return PlanFile(plan=plan, facts=dict(facts) if isinstance(facts, dict) else {})
    raise ValueError("the first line does not say which step the plan is for, what it needs and how many gaps follow")


def _gap_record(gap: Gap) -> dict[str, Any]:
    return {"value": gap.value, "gone": [gap.start, gap.end], **_home_record(gap.home)}


def _home_record(home: Home) -> dict[str, Any]:
    if isinstance(home, Recompute):
        held = {"held": list(home.held)} if home.held else {}
        return {"home": "recompute", "ops": list(home.ops), **held, "temporaries": home.temporaries}
    if isinstance(home, Packed):
        return {"home": "packed", "bytes": home.nbytes, "lossy": home.lossy}
    return {"home": "host" if isinstance(home, Host) else "disk"}


def _gap(record: dict[str, Any]) -> Gap:
    match record:
        case {"value": int(value), "gone": [int(start), int(end)], "home": str(name)}:
            return Gap(value=value, start=start, end=end, home=_home(name, record))
    raise ValueError("the line is no gap: it does not say which value is gone when, and where it waits")


def _home(name: str, record: dict[str, Any]) -> Home:
    match name, record:
        case "host", _:
            return Host()
        case "disk", _:
            return Disk()
        case "packed", {"bytes": int(nbytes), "lossy": bool(lossy)}:
            return Packed(nbytes=nbytes, lossy=lossy)
        case "recompute", {"ops": list(ops), "temporaries": int(temporaries)}:
            return Recompute(ops=_numbers(ops), held=_numbers(record.get("held", [])), temporaries=temporaries)
    raise ValueError(f"the line is no gap: {name!r} is no home, or it lacks what belongs to it")


def _numbers(found: list[Any]) -> tuple[int, ...]:
    if not all(type(number) is int for number in found):
        raise ValueError("the line is no gap: an op or a value is not a number")
    return tuple(found)
