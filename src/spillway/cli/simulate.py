"""`spillway simulate`: what a method would do to a recorded step on a device that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from spillway.budgets import budget_of_peak
from spillway.calibration.named_device import device_of
from spillway.cli.common import BudgetOfStep, Json, Method, check_writable, print_json, read_recorded, tell_shares
from spillway.errors import SpillwayError, UsageError
from spillway.ir import RunWriter
from spillway.simulation.allocators import ALLOCATORS
from spillway.simulation.paper_machine import TIERS
from spillway.simulation.plan_and_simulate import report_of
from spillway.simulation.plan_and_simulate import simulate as simulate_recorded
from spillway.simulation.simulated_engine import Simulation
from spillway.units import format_bytes, format_seconds

FIGURES: Final = (
    "status", "why", "overhead", "seconds", "plain_seconds", "peak_bytes", "reserved_bytes", "bytes_out", "bytes_in",
    "recomputed_ops", "recomputed_seconds", "stall_seconds", "hidden_seconds", "drops", "moves", "refusals", "remark",
)  # fmt: skip
"""What JSON has of a simulated step, beside its budget."""


def simulate(
    *,
    step: Annotated[str, typer.Argument(help="A recorded step, an operator log of DTR, or logs.zip:NAME.")],
    budget: BudgetOfStep,
    method: Method = "delta",
    device: Annotated[
        str, typer.Option(help="Whose speed: a preset, here for this machine, or a device's .json file.")
    ] = "a100",
    allocator: Annotated[str, typer.Option(help=f"What device memory comes from: {', '.join(ALLOCATORS)}.")] = "exact",
    limit: Annotated[str | None, typer.Option(help="Device memory.", show_default="no end of it")] = None,
    tier: Annotated[str, typer.Option(help="Where moved bytes wait: host or disk.")] = "host",
    measured: Annotated[bool, typer.Option("--measured", help="Take the seconds that were recorded.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Repetitions; the last is reported.")] = 2,
    run_file: Annotated[
        Path | None, typer.Option("--run-file", "-o", help="Write a run file, for spillway report.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a recorded step on paper: seconds, peak, copies and recomputing of a method under a budget."""
    check_writable(run_file, read=[step, device])
    if tier not in TIERS:
        raise UsageError(f"There is no tier {tier!r}; choose one of {', '.join(TIERS)}.")
    recorded = read_recorded(step)
    on = device_of(device)
    budget_of_peak(budget, recorded.step.plain_peak(), on.memory)  # what makes no sense is refused, and not explained
    tell_shares(budget, on.name, on.memory)
    ran = simulate_recorded(
        recorded, budget, method, on, allocator=allocator, limit=limit, tier=tier, measured=measured,
        steps=steps,
    )  # fmt: skip
    if run_file is not None:
        told = {"method": method, "device": device, "allocator": allocator, "tier": tier, "step": step}
        _write(run_file, ran, {"workload": recorded.workload, "simulated": told})
    if json:
        shown = {"budget_bytes": ran.timeline.allowed} | {name: getattr(ran, name) for name in FIGURES}
        print_json({"simulated": True, "method": method, "device": device, **shown})
    else:
        _print(ran, f"{recorded.workload} under {method} on {device}, simulated")
        if run_file is not None:
            print(f"run file: {run_file}")


def _write(path: Path, ran: Simulation, header: dict[str, Any]) -> None:
    try:
        with RunWriter(path, {"budget": ran.timeline.allowed, "status": ran.status, **header}) as writer:
            writer.append({"step": report_of(ran).to_json()})
            writer.append({"timeline": ran.timeline.to_json()})
    except OSError as error:
        raise SpillwayError(f"{path} cannot be written: {error.strerror}." if error.strerror else str(error)) from error
    except ValueError as error:
        raise SpillwayError(str(error)) from error


def _print(ran: Simulation, title: str) -> None:
    print(f"{title}: {ran.status}{f'. {ran.why}' if ran.why else ''}")
    print(f"  takes       {format_seconds(ran.seconds)}, {ran.overhead:.3f} times the plain step")
    print(f"  peak        {format_bytes(ran.peak_bytes)} of {format_bytes(ran.timeline.allowed)} allowed")
    print(f"  reserved    {format_bytes(ran.reserved_bytes)}")
    print(f"  copies      {format_bytes(ran.bytes_out)} out, {format_bytes(ran.bytes_in)} in; ", end="")
    print(f"ops waited {format_seconds(ran.stall_seconds)}")
    print(f"  recomputed  {ran.recomputed_ops} ops in {format_seconds(ran.recomputed_seconds)}")
    if ran.remark:
        print(f"  {ran.remark}")
