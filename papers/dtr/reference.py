"""DTR's own simulator, run for run: its published logs under its budgets, and the same under Spillway's controller.

The reference runs are those of the simulator that belongs to Kirisame et al., arXiv:2006.09616 (figures 2 and 5): per
model and heuristic one run for each share of the plain peak, down to the first that fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Skipped, Tell, frozen
from papers import SHARED, table
from papers.dtr.program import Program, program_of
from papers.dtr.runtime import Outcome, run_dtr
from spillway.calibration.named_device import device_of
from spillway.ir import Step
from spillway.ir.dtr_log import read_dtr_log, step_of_log
from spillway.methods import METHODS
from spillway.methods.dtr import HEURISTICS as POLICIES
from spillway.simulation.simulated_engine import Simulation, simulate

DATA: Final = SHARED / "data" / "dtr"
"""`../shared/data/dtr`, seen from the root of the project."""

LOGS: Final[Mapping[str, str]] = {
    "U-Net (6)": "unet",
    "ResNet-32 (56)": "resnet32",
    "InceptionV4 (64)": "inceptionv4",
    "Transformer (10)": "transformer",
    "DenseNet-121 (84)": "tv_densenet121",
}
"""The log of each model."""

NAMES: Final[Mapping[str, str]] = {
    "DTR": "dtr", "DTREqClass": "dtr-eqclass", "DTRLocal": "dtr-local", "LRU": "lru", "LargestStorage": "largest",
    "MSPS": "msps",
}  # fmt: skip
"""Their heuristics by our names."""

RATIOS: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of the plain peak for the policies; every row of the reference is run."""

DEVICE: Final = "v100-pcie"
"""What the controller's copies cost, where it has to make any."""

FAST: Final = ("DenseNet-121 (84)", "dtr-eqclass", 0.5)
"""The run whose time has a target: one second."""


@frozen
class Size:
    """How much is run."""

    models: Sequence[str]
    """By the names of the reference."""
    ratios: Sequence[float]
    """For our controller."""
    data: Path = DATA
    """Where the reference runs and the logs are."""


class Reference(NamedTuple):
    """A row of the reference runs."""

    model: str
    heuristic: str
    ratio: float
    allowed: int
    status: str
    overhead: float
    recomputed_nanoseconds: int
    peak: int
    looks: int


class Ran(NamedTuple):
    """A reference row and what ours did."""

    reference: Reference
    outcome: Outcome
    seconds: float

    @property
    def identical(self) -> bool:
        """To the nanosecond, to the byte, and to the number of storages looked at."""
        ours = self.outcome
        found = ours.status, ours.overhead, ours.recomputed_nanoseconds, ours.peak, ours.looks
        return found == self.reference[4:]


def run(size: Size, tell: Tell) -> Result:
    """Every reference run of these models that has a log; then the policies of the same names."""
    references = list(_references(size.data))
    rows: list[Row] = []
    ran: list[Ran] = []
    for model in size.models:
        instructions = read_dtr_log(f"{size.data / 'logs.zip'}:{LOGS[model]}")
        program, step = program_of(instructions), step_of_log(instructions)
        theirs = [reference for reference in references if reference.model == model]
        for heuristic, wanted in groupby(theirs, lambda reference: reference.heuristic):
            tell(f"{model}, {heuristic}")
            runs = [_ran(program, reference) for reference in wanted]
            ran += runs
            rows.append(_row(runs) | _under_the_controller(step, runs, size.ratios))
    without = [reference for reference in references if reference.model not in LOGS]
    return Result(
        title="DTR's published runs by DTR's own rules, and the same heuristics under Spillway's controller",
        columns=_columns(size.ratios),
        rows=rows,
        facts={"fast": [one.seconds for one in ran if one.reference[:3] == FAST]},
        notes=(f"Of {len(references)} reference runs {len(without)} have no log.", *NOTES),
    )


def _references(data: Path) -> Iterable[Reference]:
    if not (data / "logs.zip").is_file():
        raise Skipped(f"there is no {data / 'logs.zip'}")
    for row in table(data / "reference_runs.csv"):
        yield Reference(
            row["model"], NAMES[row["heuristic"]], float(row["ratio"]), int(row["budget_bytes"]), row["status"],
            float(row["overhead"]), int(row["remat_ns"]), int(row["max_memory_bytes"]), int(row["heuristic_evals"]),
        )  # fmt: skip


def _ran(program: Program, reference: Reference) -> Ran:
    began = time.process_time()
    outcome = run_dtr(program, reference.heuristic, reference.allowed)
    return Ran(reference, outcome, time.process_time() - began)


def _row(runs: Sequence[Ran]) -> dict[str, Any]:
    return {
        "model": runs[0].reference.model,
        "heuristic": runs[0].reference.heuristic,
        "runs": len(runs),
        "identical": sum(one.identical for one in runs),
        "seconds": sum(one.seconds for one in runs),
    }


def _under_the_controller(step: Step, runs: Sequence[Ran], ratios: Sequence[float]) -> dict[str, Any]:
    """Beside what DTR's own rules give, what the policy of that name does under our controller."""
    heuristic, theirs = runs[0].reference.heuristic, {one.reference.ratio: one.outcome for one in runs}
    found: dict[str, Any] = {}
    for ratio in ratios:
        own = theirs.get(ratio)
        ours: Simulation | None = None
        if heuristic in POLICIES:
            allowed = int(step.plain_peak() * ratio)
            ours = simulate(
                step, allowed=allowed, method=METHODS[heuristic].on_paper(), device=device_of(DEVICE), steps=1
            )
            found |= {
                f"status_{ratio}": ours.status, f"overhead_{ratio}": ours.overhead, f"moves_{ratio}": ours.moves,
                f"peak_bytes_{ratio}": ours.peak_bytes,
            }  # fmt: skip
        found[f"at_{ratio}"] = f"{_told(own)}/{_told(ours)}"
    return found


def _told(outcome: Outcome | Simulation | None) -> str:
    if outcome is None:
        return "-"
    moved = "*" if isinstance(outcome, Simulation) and outcome.moves else ""
    return (f"{outcome.overhead:.2f}" if outcome.status == "ok" else outcome.status) + moved


def _checks(result: Result) -> Iterator[Check]:
    ran = sum(row["runs"] for row in result.rows)
    other = ran - sum(row["identical"] for row in result.rows)
    yield Check(what=f"of {ran} runs those that are not the reference's to the last digit", measured=other)
    for seconds in result.facts["fast"]:
        yield Check(what="DenseNet-121 at 0.5 with classes, seconds of CPU", measured=seconds, at_most=1.0)


def _columns(ratios: Sequence[float]) -> tuple[Column, ...]:
    return (
        *columns.text(model="model", heuristic="heuristic", runs="runs", identical="identical"),
        *columns.seconds(seconds="CPU"),
        *columns.text(**{f"at_{ratio}": f"{ratio}" for ratio in ratios}),
    )


NOTES: Final = (
    "Identical: reference runs that ended in the same way and agree in overhead, recomputed nanoseconds, peak bytes "
    "and storages looked at. CPU: of all its runs.",
    "0.9 to 0.2, shares of the plain peak: overhead by DTR's own rules/of the policy under Spillway's controller; "
    f"- where there is none, a star where the controller moved something as well (on a {DEVICE}).",
    "Under the controller a drop holds alive what it is recomputed from, chains are capped, and what may not be "
    "dropped is moved, so that it ends well where DTR may not. `lru` is another method there, and is left out.",
)

BENCHMARK: Final = Benchmark(
    name="dtr_reference",
    run=run,
    judge=_checks,
    full=Size(models=tuple(LOGS), ratios=RATIOS),
    quick=Size(models=("U-Net (6)",), ratios=(0.5,)),
)
