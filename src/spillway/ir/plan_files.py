"""Plan files: a plan as versioned JSON lines, one line per gap, for a person or a program to read.

    {"format":"spillway-plan","version":1,"step":"3f0c...","allowed":4096,"projected":3840,"gaps":2,"facts":{...}}
    {"value":5,"gone":[3,9],"home":"recompute","ops":[1,2],"held":[0],"temporaries":64}
    {"value":7,"gone":[4,12],"home":"host"}

Lines are sealed (`sealed.py`), and the first one says how many follow. `step` is the digest of the step that the plan
is for; a plan is good for no other. Spillway reads none back: `plan()` makes the plan again.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

from spillway.ir.plan import Home, Plan, Recompute
from spillway.ir.sealed import replace_file, sealed

FORMAT: Final = "spillway-plan"
"""What the first line of every plan file names."""
VERSION: Final = 1
"""The version that this code writes."""


def write_plan(path: str | PathLike[str], plan: Plan, facts: Mapping[str, Any]) -> None:
    """Write a plan file. A file that stands there is replaced as a whole.

    Raises TypeError for facts that JSON cannot hold, and OSError where the system does.
    """
    header = {"format": FORMAT, "version": VERSION, "step": plan.step, "allowed": plan.allowed,
              "projected": plan.projected, "gaps": len(plan.gaps), "facts": dict(facts)}  # fmt: skip
    gaps = ({"value": gap.value, "gone": [gap.start, gap.end], **_home_record(gap.home)} for gap in plan.gaps)
    replace_file(Path(path), sealed([header, *gaps]))


def _home_record(home: Home) -> dict[str, Any]:
    if isinstance(home, Recompute):
        held = {"held": list(home.held)} if home.held else {}
        return {"home": "recompute", "ops": list(home.ops), **held, "temporaries": home.temporaries}
    return {"home": "host"}
