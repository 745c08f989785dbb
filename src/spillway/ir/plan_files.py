"""Plan files: a plan as versioned JSON lines, one line per gap, which a person can read.

    {"format":"spillway-plan","version":1,"step":"3f0c...","allowed":4096,"projected":3840,"gaps":2,"facts":{...}}
    {"value":5,"gone":[3,9],"home":"recompute","ops":[1,2],"held":[0],"temporaries":64}
    {"value":7,"gone":[4,12],"home":"host"}

Lines are sealed (`sealed.py`), and the first one says how many follow. `step` is the digest of the step that the plan
is for; a plan is good for no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

from spillway.errors import FileFormatError
from spillway.ir.plan import Gap, Home, Host, Plan, Recompute
from spillway.ir.reading import fault_in, lines_of, read_fields, read_value
from spillway.ir.sealed import records_of, replace_file, sealed, stated
from spillway.ir.step import Step
from spillway.ir.verify import verify
from spillway.units import Bytes

FORMAT: Final = "spillway-plan"
"""What the first line of every plan file names."""
VERSION: Final = 1
"""The version that this code writes, and the newest that it reads."""


_HOMES: Final[Mapping[str, type[Home]]] = MappingProxyType({"host": Host, "recompute": Recompute})
"""By what a file calls them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """What a plan file holds."""

    plan: Plan
    facts: dict[str, Any]
    """Where it is from: the method, the device, what the planner said of it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What the first line says besides format and version."""

    step: str
    allowed: Bytes
    projected: Bytes
    gaps: int
    facts: dict[str, Any] = field(default_factory=dict)


def write_plan(path: str | PathLike[str], plan: Plan, facts: Mapping[str, Any]) -> None:
    """Write a plan file. A file that stands there is replaced as a whole.

    Raises TypeError for facts that JSON cannot hold, and OSError where the system does.
    """
    header = {"format": FORMAT, "version": VERSION, "step": plan.step, "allowed": plan.allowed,
              "projected": plan.projected, "gaps": len(plan.gaps), "facts": dict(facts)}  # fmt: skip
    gaps = ({"value": gap.value, "gone": [gap.start, gap.end], **_home_record(gap.home)} for gap in plan.gaps)
    replace_file(Path(path), sealed([header, *gaps]))


def read_plan(path: str | PathLike[str], step: Step | None = None) -> PlanFile:
    """Read a plan file. With `step` the plan has to be for that step, and `verify` has to accept it.

    Raises FileFormatError with the path and the line at fault for a foreign, newer, cut or damaged file, and for the
    plan of another step; PlanRejected for a plan that could not run; OSError where the system does.
    """
    path = Path(path)
    records = records_of(path, lines_of(path), name=FORMAT, version=VERSION, what="a plan")
    _, header = next(records)
    gaps = []
    for number, record in records:
        with fault_in(path, number):
            gaps.append(_gap(record))
    with fault_in(path, 1):
        first = read_fields(_Header, stated(header), "plan")
        if first.gaps != len(gaps):
            raise ValueError(f"{len(gaps)} gaps follow of the {first.gaps} that the first line announces")
        plan = Plan(step=first.step, allowed=first.allowed, projected=first.projected, gaps=tuple(gaps))
    if step is not None:
        if plan.step != step.digest():
            reason = f"the plan is for step {plan.step:.12}, and this is step {step.digest():.12}"
            raise FileFormatError(reason, path=path, line=1)
        verify(plan, step, plan.allowed)
    return PlanFile(plan=plan, facts=first.facts)


def _home_record(home: Home) -> dict[str, Any]:
    if isinstance(home, Recompute):
        held = {"held": list(home.held)} if home.held else {}
        return {"home": "recompute", "ops": list(home.ops), **held, "temporaries": home.temporaries}
    return {"home": "host"}


def _gap(record: dict[str, Any]) -> Gap:
    match record:
        case {"value": value, "gone": [start, end], "home": str(name), **rest} if name in _HOMES:
            home = read_fields(_HOMES[name], rest, "gap")
            whole = [read_value(int, number, "a number of the gap") for number in (value, start, end)]
            return Gap(value=whole[0], start=whole[1], end=whole[2], home=home)
        case {"value": _, "gone": [_, _], "home": home}:
            raise ValueError(f"a value waits as one of {', '.join(_HOMES)}, and not as {home!r:.40}")
    raise ValueError("the line is no gap: it does not say which value is gone when, and where it waits")
