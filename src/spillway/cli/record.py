"""`spillway record`: one step of a workload, to a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from spillway.cli.common import Json, Seed, Workload, check_writable, naming, print_json, record_workload
from spillway.ir import Recorded, write_step
from spillway.units import format_bytes, format_seconds


def record(
    *,
    workload: Workload,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the step; compressed if it ends in .gz.")
    ],
    fake: Annotated[bool, typer.Option("--fake", help="On tensors without content: any size, in no memory.")] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples in a batch.", show_default="its own")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="its own")] = None,
    timed_steps: Annotated[int, typer.Option(min=0, help="Further steps that measure how long ops take.")] = 0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Record one training step, with its optimizer: what every op reads and makes, and how long everything lives."""
    check_writable(output, read=[workload])
    given: dict[str, Any] = {} if batch is None else {"batch": batch}
    given |= {} if length is None else {"length": length}
    began = time.perf_counter()
    recorded = record_workload(workload, fake=fake, timed_steps=timed_steps, seed=seed, **given)
    with naming(output):
        write_step(output, recorded)
    figures = _figures(recorded, output)
    if json:
        print_json(figures)
    else:
        _print(figures, time.perf_counter() - began)


def _figures(recorded: Recorded, output: Path) -> dict[str, Any]:
    step = recorded.step
    seconds = [op.seconds for op in step.ops]
    return {
        "workload": recorded.workload, "size": recorded.size, "fake": recorded.facts["fake"], "ops": len(step.ops),
        "storages": len(step.storages), "plain_peak_bytes": step.plain_peak(),
        "saved_bytes": sum(step.storages[number].nbytes for number in {step.values[v].storage for v in step.saved}),
        "flops": sum(op.flops for op in step.ops), "traffic_bytes": sum(op.traffic for op in step.ops),
        "op_seconds": None if None in seconds else sum(one for one in seconds if one is not None),
        "output": str(output), "output_bytes": output.stat().st_size,
    }  # fmt: skip


def _print(figures: dict[str, Any], seconds: float) -> None:
    print(f"{figures['workload']}: {figures['ops']} ops, {figures['storages']} storages")
    print(f"  plain peak      {format_bytes(figures['plain_peak_bytes'])}")
    print(f"  saved           {format_bytes(figures['saved_bytes'])} by autograd")
    print(f"  operations      {figures['flops'] / 1e9:.1f} GFLOP")
    print(f"  traffic         {format_bytes(figures['traffic_bytes'])}")
    if figures["op_seconds"] is not None:
        print(f"  ops take        {format_seconds(figures['op_seconds'])}")
    print(f"{figures['output']}: {format_bytes(figures['output_bytes'])}, in {format_seconds(seconds)}")
