"""`spillway plan`: what a planner would do with a recorded step under a budget, as a plan that was verified."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from spillway.cli.common import (
    PLANNERS,
    BudgetOfStep,
    Json,
    check_writable,
    naming,
    print_json,
    read_recorded,
    tell_shares,
)
from spillway.ir import Plan, Recompute, Step, verify
from spillway.ir.account import comes_back
from spillway.ir.lives import lives_of
from spillway.ir.plan_files import write_plan
from spillway.ir.recipes import replayed
from spillway.simulation.plan_and_simulate import planner_named, problem_of
from spillway.simulation.simulated_engine import rehearsing
from spillway.units import format_bytes, format_seconds


def plan(
    *,
    step: Annotated[
        str, typer.Argument(help="A recorded step: a file of `spillway record`, a log of DTR, or logs.zip:NAME.")
    ],
    budget: BudgetOfStep,
    method: Annotated[str, typer.Option(help=f"Which planner decides: {', '.join(PLANNERS)}.")],
    device: Annotated[str, typer.Option(help="The device whose seconds the planner counts with.")] = "a100",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Plan a recorded step: what is gone when, and where it comes back from."""
    check_writable(output, read=[step, device])
    planner = planner_named(method)
    problem = problem_of(read_recorded(step), budget=budget, device=device)
    tell_shares(budget, problem.device.name, problem.device.memory)
    found = planner.plan(rehearsing(problem))
    verify(found, problem.step, problem.allowed)
    facts = {"method": method, "device": problem.device.name, **figures(found, problem.step)}
    told = {"remark": found.remark}
    if output is not None:
        with naming(output):
            write_plan(output, found, facts)
    if json:
        print_json({"plan": None if output is None else str(output), "step": found.step, **facts, **told})
        return
    sizes = [format_bytes(facts[f"{name}_bytes"]) for name in ("budget", "projected", "plain_peak")]
    print("{} on {}: {} allowed, {} projected, {} without a plan".format(facts["method"], facts["device"], *sizes))
    again, whole = format_seconds(facts["recomputed_seconds"]), format_seconds(facts["plain_seconds"])
    print(f"{facts['recomputed_ops']} ops again: {again} beside {whole} of the step's own")
    print(f"{format_bytes(facts['bytes_out'])} out, {format_bytes(facts['bytes_in'])} in")
    gaps = ", ".join(f"{count} {home}" for home, count in sorted(facts["gaps"].items())) or "none"
    print(f"gaps: {gaps}" + (f"; {output}" if output else ""))
    if found.remark:
        print(found.remark)


def figures(plan: Plan, step: Step) -> dict[str, Any]:
    """What a plan does, in numbers."""
    lives = lives_of(step)
    back = [gap for gap in plan.gaps if comes_back(gap, lives[gap.value], len(step.ops))]
    again = replayed([(gap.end, gap.value, gap.home) for gap in back if isinstance(gap.home, Recompute)], step)
    moved = [gap for gap in plan.gaps if not isinstance(gap.home, Recompute)]
    nbytes = {gap: step.storages[step.values[gap.value].storage].nbytes for gap in moved}
    return {
        "budget_bytes": plan.allowed, "projected_bytes": plan.projected, "plain_peak_bytes": step.plain_peak(),
        "gaps": dict(Counter(type(gap.home).__name__.lower() for gap in plan.gaps)),
        "bytes_out": sum(nbytes.values()), "bytes_in": sum(nbytes[gap] for gap in back if gap in nbytes),
        "recomputed_ops": len(again), "recomputed_seconds": sum(step.ops[op].seconds or 0.0 for op in again),
        "plain_seconds": sum(op.seconds or 0.0 for op in step.ops),
    }  # fmt: skip
