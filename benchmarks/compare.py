"""How long `spillway compare` takes: 8 methods under 5 budgets on a BERT-base step with its optimizer."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.ir import write_step
from spillway.units import Seconds, format_bytes, format_seconds
from spillway.workloads.recorded import record

METHODS: Final = ("keep-all", "lru", "delta", "dtr", "dtr-eqclass", "sqrt-n", "checkmate", "swap-prefetch")
LIMIT: Final[Seconds] = 180.0
"""For all of them, page, picture and lower bounds included."""


@frozen
class Size:
    """How much is compared."""

    workload: str
    batch: int
    length: int
    methods: Sequence[str]
    budgets: int
    """Evenly spaced from 0.3 of the plain peak to all of it."""
    device: str
    plan_seconds: Seconds
    """What Checkmate may take for a plan."""


def run(size: Size, tell: Tell) -> Result:
    """Record the step on fake tensors, compare from the command line, and count the rows."""
    tell(f"recording {size.workload}")
    recorded = record(size.workload, fake=True, batch=size.batch, length=size.length)
    with TemporaryDirectory(prefix="spillway-") as folder:
        write_step(Path(folder) / "step.jsonl.gz", recorded)
        tell(f"{len(size.methods)} methods under {size.budgets} budgets")
        began, used = time.perf_counter(), _cpu_seconds()
        rows = _compared(Path(folder), size)
        seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - used
    budgets = {str(budget): format_bytes(budget) for budget in sorted({row["budget_bytes"] for row in rows})}
    wanted = len(size.methods) * size.budgets
    statuses = Counter(row["status"] for row in rows)
    ops, peak = len(recorded.step.ops), format_bytes(recorded.step.plain_peak())
    ended = ", ".join(f"{statuses[status]} {status}" for status in ("ok", "oom", "thrash"))
    return Result(
        title=f"{len(size.methods)} methods under {size.budgets} budgets on one step, from the command line",
        columns=[*columns.text(method="method"), *columns.text(**budgets)],
        rows=[_row(method, rows) for method in size.methods],
        checks=[
            Check(what="seconds of `spillway compare`", measured=round(seconds, 1), at_most=LIMIT),
            Check(what="rows that could not be worked out", measured=wanted - len(rows), at_most=0),
        ],
        notes=(
            f"{size.workload} at batch {size.batch} and length {size.length}, recorded on fake tensors with its "
            f"optimizer: {ops} ops, plain peak {peak}. Simulated on {size.device}; in the table, seconds as a multiple "
            f"of the plain step's. {len(rows)} rows: {ended}.",
            f"The time is that of the whole command: reading the step, {format_seconds(size.plan_seconds)} at most "
            f"for each plan of Checkmate's, lower bounds, page and picture; {format_seconds(cpu_seconds)} of processor "
            f"time in as many processes as there are processors.",
        ),
    )  # fmt: skip


def _compared(folder: Path, size: Size) -> list[dict[str, Any]]:
    arguments = [
        "compare", "step.jsonl.gz", "--budgets", f"0.3..1.0:{size.budgets}", "--methods", ",".join(size.methods),
        "--device", size.device, "--plan-seconds", str(size.plan_seconds), "-o", "page.html", "--png", "picture.png",
        "--json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "spillway", *arguments], cwd=folder, stdout=subprocess.PIPE, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(done.stdout or b"[]")
    return rows


def _cpu_seconds() -> Seconds:
    """Of all children that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _row(method: str, rows: Sequence[dict[str, Any]]) -> Row:
    own = [row for row in rows if row["method"] == method]
    cells = {str(row["budget_bytes"]): f"{row['overhead']:.3f}" for row in own if row["status"] == "ok"}
    return {"method": method, **{str(row["budget_bytes"]): row["status"] for row in own}, **cells}


BENCHMARK: Final = Benchmark(
    name="compare",
    run=run,
    full=Size(
        workload="bert-base", batch=16, length=512, methods=METHODS, budgets=5, device="a100", plan_seconds=30.0
    ),
    quick=Size(
        workload="bert-base", batch=2, length=32, methods=("keep-all", "lru"), budgets=2, device="a100",
        plan_seconds=1.0,
    ),
)  # fmt: skip
