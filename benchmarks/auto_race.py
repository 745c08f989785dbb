"""`auto` beside plain training, torch's own ways to train in less memory and Spillway's other methods.

Spillway's methods share a budget, a share of the plain peak. torch's ways have none: beside each of them `auto` runs
under what that one takes at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from benchmarks import columns
from benchmarks.race import CHECKPOINT, PLAIN, STILL, TORCH_BUDGET, Contest, by_model, found_of
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import median_ratio
from benchmarks.turns import account, profiled_peak, take_turns, training, verdict
from benchmarks.workers import Job
from spillway.units import Bytes

AUTO: Final = "auto"
NO_DISK: Final = "auto, no disk"
TORCHS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        CHECKPOINT: {"checkpoints": True},
        "selective checkpoint": {"selective": True},
        "save_on_cpu": {"on_cpu": True},
        TORCH_BUDGET: {"still": True, "activation_budget": 0.5},
    }
)
"""torch's own ways."""
OTHERS: Final = ("mimose", "lru", "delta", "window")
LIMIT: Final = 1.08
"""Times the plain step, at the tight share."""
RECOMPUTING: Final = 1.10
"""Times the plain step where nothing may leave, at a share for that."""
FITS: Final = 1.01
"""Times the plain step, where everything fits."""
BESIDE: Final = 0.80
"""Times the step of `torch.utils.checkpoint` around every block."""
STEPS: Final = 3
"""From which a peak is known."""
BEST: Final = 1.02
"""Times the fastest other method at the same budget."""


@frozen
class Size:
    """How much is measured."""

    contests: Sequence[Contest]
    percent: int
    """The tight budget, in percent of the plain peak."""
    without_disk: int
    """The budget where nothing may leave, in percent of the plain peak."""
    rounds: int
    """Steps that every competitor makes."""
    warm: int
    """The first of them, which do not count: `auto` measures in them."""


def run(size: Size, tell: Tell) -> Result:
    """One model after the other."""
    rows: list[Row] = []
    for contest in size.contests:
        rows += _contest(contest, size, lambda text, model=contest.model: tell(f"{model}: {text}"))  # type: ignore[misc]
    return Result(title="auto at a share of the plain peak", columns=COLUMNS, rows=rows, notes=NOTES)


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", competitor="competitor"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="peak"),
    *columns.seconds(seconds="time", cpu_seconds="CPU"),
    *columns.ratios(ratio="x plain", cpu_ratio="CPU x plain"),
    *columns.nbytes(bytes_out="out/step", bytes_in="in/step"),
    *columns.text(losses="losses"),
)

NOTES: Final = (
    "All competitors of a model train the same batch in processes of their own, a step each in turn, one thread each. "
    "Times are medians; ratios are medians over rounds of the time as a multiple of the plain time of that round.",
    "Checkpoint: `torch.utils.checkpoint` (not reentrant) around every block; selective: the same, with products of "
    "matrices and convolutions kept; `save_on_cpu`: around the step, which on a CPU copies and saves nothing; "
    "activation budget 0.5: torch's `activation_memory_budget` under `torch.compile(backend='aot_eager')`, without "
    "dropout, with which torch's gradients are wrong, and beside a plain run without it where the model has any. None "
    "of these has a budget: `auto as ...` runs under what that one takes at most, where that is less than plain takes.",
    "No disk: `Auto(moves=False)`, where nothing may leave.",
)


def _contest(contest: Contest, size: Size, tell: Tell) -> list[Row]:
    def job(method: str | None = None, budget: Bytes | None = None, *, still: bool = False, **flags: Any) -> Job:
        return training(contest.model, contest.options, method=method, budget=budget, still=still, **flags)

    tell("peaks")
    peaks = {PLAIN: account(job("keep-all"), STEPS)}
    jobs = {PLAIN: job()}
    if contest.dropout:
        jobs[STILL] = job(still=True)
    for name, flags in TORCHS.items():
        jobs[name] = job(**flags)
        told = name != TORCH_BUDGET
        peaks[name] = account(job("keep-all", **flags), STEPS) if told else profiled_peak(jobs[name], STEPS)
        if peaks[name] < peaks[PLAIN]:
            jobs[_as(name)] = job(AUTO, peaks[name], still=name == TORCH_BUDGET)
    tight = peaks[PLAIN] * size.percent // 100
    jobs |= {name: job(name, tight) for name in (AUTO, *OTHERS)}
    jobs[NO_DISK] = job(NO_DISK, peaks[PLAIN] * size.without_disk // 100)
    jobs[f"{AUTO}, fits"] = job(AUTO, 2 * peaks[PLAIN])
    answers = take_turns(jobs, size.rounds, tell)
    return [
        {
            "model": contest.model, "competitor": name, "budget_bytes": one.options["budget"],
            "peak_bytes": peaks.get(name),
            **found_of(name, answers, size.warm, peaks.get(name), still=name.endswith(TORCH_BUDGET)),
        }
        for name, one in jobs.items()
    ]  # fmt: skip


def _as(name: str) -> str:
    return f"{AUTO} as {name}"


def _of_model(rows: Mapping[str, Row], model: str) -> list[Check]:
    answered = {name: row for name, row in rows.items() if "ratio" in row}
    checks = [
        Check(what=f"{model}, competitors whose losses differ", measured=_differing(rows)),
        Check(what=f"{model}, auto refused", measured=sum(name not in answered for name in (AUTO, f"{AUTO}, fits"))),
    ]
    if f"{AUTO}, fits" in answered:
        fits = answered[f"{AUTO}, fits"]["ratio"]
        checks.append(Check(what=f"{model}, auto, fits, times the plain step", measured=fits, at_most=FITS))
    if AUTO not in answered:
        return checks
    auto = answered[AUTO]
    over = max(max(one["peak_bytes"] - one["budget_bytes"], 0) for one in answered.values() if one["budget_bytes"])
    checks.append(Check(what=f"{model}, bytes over a budget", measured=over))
    checks.append(Check(what=f"{model}, auto, times the plain step", measured=auto["ratio"], at_most=LIMIT))
    if NO_DISK in answered:
        alone = answered[NO_DISK]["ratio"]
        checks.append(Check(what=f"{model}, auto, no disk, times the plain step", measured=alone, at_most=RECOMPUTING))
    best = min(OTHERS, key=lambda name: answered.get(name, {}).get("ratio", 1e9))
    pairs = [(AUTO, best, BEST), *((_as(name), name, BESIDE if name == CHECKPOINT else BEST) for name in TORCHS)]
    for name, other, limit in pairs:
        if name in answered and other in answered:
            beside = median_ratio(answered[name]["walls"], answered[other]["walls"])
            checks.append(Check(what=f"{model}, {name}, times {other}", measured=beside, at_most=limit))
    return checks


def _differing(rows: Mapping[str, Row]) -> int:
    exact = [row for name, row in rows.items() if name != TORCH_BUDGET]  # that one compiles
    return sum(row["losses"] == verdict(identical=False) for row in exact)


BENCHMARK: Final = Benchmark(
    name="auto_race",
    run=run,
    judge=partial(by_model, _of_model),
    full=Size(
        contests=[
            Contest(model="stdlib-lm", dropout=True), Contest(model="resnet"), Contest(model="lstm"),
            Contest(model="unet"), Contest(model="bert-small", dropout=True), Contest(model="gpt-small", dropout=True),
            Contest(model="vit-small"),
        ],
        percent=40, without_disk=55, rounds=13, warm=6,
    ),
    quick=Size(
        contests=[Contest(model="stdlib-lm", options={"width": 64, "layers": 2, "longest": 96}, dropout=True)],
        percent=60, without_disk=70, rounds=8, warm=6,
    ),
)  # fmt: skip
