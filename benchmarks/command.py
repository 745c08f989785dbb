"""The command line of the benchmarks, and of the papers'."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks import machine, show
from benchmarks.record import Benchmark, Collection, Skipped

# In the order in which they run: times first, while nothing has warmed the machine.
NAMES: Final = (
    "host_cost", "block_cost", "compiled", "arena", "half_memory", "race", "auto_race", "auto_predictions",
    "auto_lengths", "out_of_core", "foreseen", "mimose_speed", "budget", "mimose_budget", "reach", "exactness",
    "block_exactness", "block_mixtures", "block_programs", "block_refusals", "random_programs", "list_optimizers",
    "data_dependent", "refusals", "collectives", "op_audit", "modelled", "simulated", "optimum", "auto_planner",
    "auto_paper", "compression", "files", "compare_models", "gpu", "device_arena",
)  # fmt: skip
BENCHMARKS: Final = Collection(
    package="benchmarks", purpose="Measure what Spillway promises.", on_a_gpu=("gpu", "device_arena"),
    modules={name: f"benchmarks.{name}" for name in NAMES},
)  # fmt: skip


def run(arguments: Sequence[str], offered: Collection) -> int:
    """Run the benchmarks asked for; 1 if a target was missed."""
    asked = _asked(arguments, offered)
    torch.set_num_threads(1)
    missed = 0
    for name in asked.name or [name for name in offered.modules if name not in offered.on_a_gpu]:
        # Figures of the quick size mean nothing: they miss nothing, and replace nothing unless a folder was named.
        folder = asked.results or (None if asked.quick else offered.results(name))
        missed |= _run(load(name, offered), folder, offered, quick=asked.quick)
    return missed


def load(name: str, offered: Collection) -> Benchmark:
    """The benchmark of that name."""
    benchmark = importlib.import_module(offered.modules[name]).BENCHMARK
    if not isinstance(benchmark, Benchmark):
        raise TypeError(f"{offered.modules[name]}.BENCHMARK is a {type(benchmark).__name__}.")
    return benchmark


def _asked(arguments: Sequence[str], offered: Collection) -> argparse.Namespace:
    names = ", ".join(offered.modules)
    parser = argparse.ArgumentParser(f"python -m {offered.package}", description=offered.purpose)
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help=f"one of {names}; all that need no GPU if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="a small size that only shows whether everything runs")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where results go (default: beside the module)")
    asked = parser.parse_args(arguments)
    # Not by `choices`, which an empty list of names would have to be one of.
    unknown = [name for name in asked.name if name not in offered.modules]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; choose from {names}")
    return asked


def _run(benchmark: Benchmark, folder: Path | None, offered: Collection, *, quick: bool) -> int:
    described, loads, began = machine.describe(), [machine.load()], time.perf_counter()
    try:
        size = benchmark.quick if quick else benchmark.full
        result = benchmark.measured(size, lambda text: _tell(benchmark.name, text))
    except Skipped as reason:
        _tell(benchmark.name, f"skipped: {reason}")
        return 0
    loads.append(machine.load())
    data = show.document(benchmark.name, result, described, loads, time.perf_counter() - began)
    show.print_document(data)
    if folder is not None:
        show.write(folder, data, result.pictures, offered.package)
    return 0 if quick or all(check.met for check in result.checks) else 1


def _tell(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)
