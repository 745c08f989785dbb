"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import machine, show
from benchmarks.record import Benchmark, Skipped

NAMES = (
    "host_cost", "block_cost", "half_memory", "race", "mimose_speed", "mimose_planning", "overlap", "heuristics",
    "budget", "mimose_budget", "convergence", "mimose_convergence", "reach", "exactness", "block_exactness",
    "block_programs", "block_refusals", "random_programs", "list_optimizers", "data_dependent", "refusals",
    "collectives", "op_audit",
    "recording", "dtr_reference", "optimal", "delta_tables", "modelled", "growth", "simulated", "compare",
    "mimose_tasks", "mimose_estimator", "mimose_blocks", "mimose_detection", "papaya_paper", "papaya_here",
    "papaya_simulated", "papaya_implications", "compression", "packing", "files", "compare_models",
)  # fmt: skip
"""In the order in which they run: times first, while nothing has warmed the machine."""

ON_A_GPU = ("gpu_costs", "gpu")
"""They need a CUDA device, and run when they are named."""

RESULTS = Path(__file__).parent / "results"


def run(arguments: Sequence[str]) -> int:
    """Run the benchmarks asked for; 1 if a target was missed."""
    asked = _asked(arguments)
    torch.set_num_threads(1)
    # Figures of the quick size mean nothing: they miss nothing, and replace nothing unless a folder was named for them.
    folder = asked.results or (None if asked.quick else RESULTS)
    return max([_run(load(name), folder, quick=asked.quick) for name in asked.name or NAMES], default=0)


def load(name: str) -> Benchmark:
    """The benchmark of that name: every module of one offers `BENCHMARK`."""
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    if not isinstance(benchmark, Benchmark):
        raise TypeError(f"benchmarks.{name}.BENCHMARK is a {type(benchmark).__name__}.")
    return benchmark


def _asked(arguments: Sequence[str]) -> argparse.Namespace:
    names = ", ".join((*NAMES, *ON_A_GPU))
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure what Spillway promises.")
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help=f"one of {names}; all that need no GPU if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="a small size that only shows whether everything runs")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where results go (default: benchmarks/results)")
    asked = parser.parse_args(arguments)
    # Not by `choices`, which an empty list of names would have to be one of.
    unknown = [name for name in asked.name if name not in (*NAMES, *ON_A_GPU)]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; choose from {names}")
    return asked


def _run(benchmark: Benchmark, folder: Path | None, *, quick: bool) -> int:
    described, loads, began = machine.describe(), [machine.load()], time.perf_counter()
    try:
        result = benchmark.run(benchmark.quick if quick else benchmark.full, lambda text: _tell(benchmark.name, text))
    except Skipped as reason:
        _tell(benchmark.name, f"skipped: {reason}")
        return 0
    loads.append(machine.load())
    data = show.document(benchmark.name, result, described, loads, time.perf_counter() - began)
    show.print_document(data)
    if folder is not None:
        show.write(folder, data, result.pictures)
    return 0 if quick or all(check.met for check in result.checks) else 1


def _tell(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)
