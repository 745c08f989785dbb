"""Fig. 13 of Mimose's paper, simulated on a V100: the seconds of an epoch of its four tasks under several budgets.

Liao et al., arXiv:2209.02478, section 6.2. The README beside this says what is assumed and why the gaps are not the
paper's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchmarks import columns
from benchmarks.drawing import Line, Panel, drawn
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from papers.mimose.tasks_lab import HERITAGE, Epoch, Lab, Paper
from papers.networks import differing
from spillway.calibration.named_device import device_of
from spillway.errors import PlanRejected
from spillway.ir import verify
from spillway.methods import DTR as DTRPolicy
from spillway.methods.by_block import InputSize
from spillway.methods.mimose import Options
from spillway.methods.mimose.choices import HALF_GB
from spillway.units import Bytes

DEVICE: Final = device_of("v100-pcie")
GB: Final = 10**9

ITERATIONS: Final = 10
"""Sheltered steps in the paper's evaluation."""

SHELTERED: Final = 0.005
"""At most what the sheltered steps add to an epoch."""

PUBLISHED, DEFAULT, STATIC, DTR, DTR_AS_RUN, CHECKPOINT = (
    "mimose-published", "mimose", "static", "dtr", "dtr as run", "checkpoint"
)  # fmt: skip
WAYS: Final = (PUBLISHED, DEFAULT, STATIC, DTR, DTR_AS_RUN, CHECKPOINT)
"""The ways to run an epoch."""


@frozen
class Size:
    """How much is run."""

    tasks: Sequence[str]
    """By the paper's names."""
    options: Mapping[str, Any]
    """Of the models; the paper's if empty."""
    batch: int | None
    """None for the paper's."""
    lengths: int
    """Of each task's grid."""
    recorded: Mapping[str, Sequence[int]]
    """By data set: lengths whose steps are recorded."""
    checked: Mapping[str, int]
    """By data set: a length that is derived and recorded."""
    budgets: int
    """Evenly spaced from what the longest batch takes with every block recomputed towards what it takes plainly."""
    lost: Bytes | None = None
    """Of DTR's budget as it was run; None for what the paper says."""
    reserve: Bytes = HALF_GB
    """Of Mimose as published."""
    unaided: Sequence[str] = ("QA-XLNet",)
    """Tasks that the paper's DTR did not run: there is no "as run" of it."""

    def published(self, static: InputSize | None = None) -> Options:
        """The paper's choices."""
        return Options.as_published(iterations=ITERATIONS, reserve=self.reserve, static_size=static)


def run(size: Size, tell: Tell) -> Result:
    """Every task under every budget."""
    paper = Paper.read()
    rows: list[Row] = []
    wrong = rejected = unlike = 0
    notes = []
    for name in size.tasks:
        told = paper.tasks[name]
        lab = Lab(
            name=name, told=told, device=DEVICE, options=size.options, batch=size.batch, lengths=size.lengths,
            recorded=size.recorded[told.dataset], iterations=ITERATIONS, tell=tell,
        )  # fmt: skip
        checked = size.checked[told.dataset]
        wrong += differing(lab.scaling.step_at(checked), lab.recording(checked))
        rows += _rows(lab, size, paper)
        rejected += _rejected(lab)
        unlike += sum(at.unlike_account for at in lab.all)
        notes += _of_task(lab, size, paper)
    return Result(
        title="Mimose's Fig. 13, simulated on a V100: an epoch's seconds, as multiples of the plain epoch's",
        columns=COLUMNS,
        rows=rows,
        facts={"not_as_recorded": wrong, "rejected": rejected, "not_as_planned": unlike},
        notes=(*_against_paper(_gaps(rows), paper), *notes, *NOTES),
        pictures=drawn(
            "mimose_tasks.png", [_panel(name, [row for row in rows if row["task"] == name]) for name in size.tasks]
        ),
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(task="task"),
    *columns.shown(lambda nbytes: f"{nbytes / GB:.2f}", budget_bytes="budget, GB"),
    *columns.ratios(**{way: way for way in WAYS}),
    *columns.shares(
        to_static="published to static", to_dtr="published to DTR", to_dtr_as_run="published to DTR as run",
        over_published="published over budget", over_static="static over budget", given_up="default gives up in",
    ),
)  # fmt: skip

NOTES: Final = (
    "Models, lengths, epochs and budgets: as papers/mimose/README.md assumes. published, static: the paper's planner "
    "with its reserve of 0.5 GB; static is its plan for the longest batch. Over budget is by the account.",
    f"dtr: {HERITAGE} on the simulated engine, with the whole budget, in no time to choose and in memory without "
    "fragments. dtr as run: fragments and planning take what the paper says of its runs; nothing where it then does "
    "not run at some length, and for QA-XLNet, which theirs could not.",
    "to static, to DTR: 1 less the quotient of seconds. gives up in: steps whose plan is corrected while they run.",
)


def _rows(lab: Lab, size: Size, paper: Paper) -> list[Row]:
    low, high = lab.stars
    rows = []
    for place in range(size.budgets):
        budget = low + (high - low) * place // size.budgets
        lab.tell(f"{lab.name}: {budget / GB:.2f} GB")
        rows.append(_row(lab, size, budget, paper))
    return rows


def epochs(lab: Lab, size: Size, budget: Bytes, weights: Sequence[float], paper: Paper) -> dict[str, Epoch]:
    """An epoch by every way."""
    lost = round(paper.claims["M5"] * GB) if size.lost is None else size.lost
    as_run = Epoch(None)
    if lab.name not in size.unaided:
        as_run = lab.dtr(budget, weights, lost=lost, planning=paper.claims["M12"] / 100)
    return {
        PUBLISHED: lab.mimose(size.published(), budget, weights),
        DEFAULT: lab.mimose(Options(iterations=ITERATIONS), budget, weights),
        STATIC: lab.mimose(size.published(static=(lab.grid[-1],)), budget, weights),
        DTR: lab.dtr(budget, weights),
        DTR_AS_RUN: as_run,
        CHECKPOINT: lab.checkpoint(budget, weights),
    }


def _row(lab: Lab, size: Size, budget: Bytes, paper: Paper) -> Row:
    found = epochs(lab, size, budget, lab.weights, paper)
    even = epochs(lab, size, budget, lab.uniform, paper)
    seconds = {way: epoch.seconds for way, epoch in found.items()}
    plain = lab.plain(lab.weights)
    return {
        "task": lab.name,
        "budget_bytes": budget,
        **{way: None if taken is None else taken / plain for way, taken in seconds.items()},
        **{f"{way}, peak": epoch.peak for way, epoch in found.items()},
        "to_static": _gap(found[PUBLISHED], found[STATIC]),
        "to_dtr": _gap(found[PUBLISHED], found[DTR]),
        "to_dtr_as_run": _gap(found[PUBLISHED], found[DTR_AS_RUN]),
        "default_to_static": _gap(found[DEFAULT], found[STATIC]),
        "default_to_dtr": _gap(found[DEFAULT], found[DTR]),
        "default_to_dtr_as_run": _gap(found[DEFAULT], found[DTR_AS_RUN]),
        "to_static_evenly": _gap(even[PUBLISHED], even[STATIC]),
        "over_published": found[PUBLISHED].over,
        "over_static": found[STATIC].over,
        "over_default": found[DEFAULT].over,
        "given_up": found[DEFAULT].given_up,
        "plain_seconds": plain,
        "plain_bytes": lab.stars[1],
    }


def _gap(mine: Epoch, other: Epoch) -> float | None:
    return None if mine.seconds is None or other.seconds is None else 1 - mine.seconds / other.seconds


def _gaps(rows: Sequence[Row]) -> dict[str, list[float]]:
    names = (
        "to_static", "to_dtr", "to_dtr_as_run", "default_to_static", "default_to_dtr", "default_to_dtr_as_run",
        "to_static_evenly",
    )  # fmt: skip
    return {name: [row[name] for row in rows if row[name] is not None] for name in names}


def _checks(result: Result) -> Iterator[Check]:
    rows, facts = result.rows, result.facts
    counted = {
        "numbers of a derived step that are not as recorded": facts["not_as_recorded"],
        "plans that the verifier rejected": facts["rejected"],
        "block-level plans that did not run as planned": facts["not_as_planned"],
        "share of the default's steps that pass the budget": max(row["over_default"] for row in rows),
        "tasks and budgets at which the default is slower than the static plan by more than it shelters": _slower(
            rows, DEFAULT, STATIC
        ),
        "the same for the published Mimose": _slower(rows, PUBLISHED, STATIC),
        "tasks and budgets at which the default is slower than the published Mimose": _slower(rows, DEFAULT, PUBLISHED),
    }
    for what, count in counted.items():
        yield Check(what=what, measured=count)


def _slower(rows: Sequence[Row], one: str, other: str) -> int:
    return sum(row[one] > row[other] * (1 + SHELTERED) for row in rows)


def _rejected(lab: Lab) -> int:
    """Of the plans for the longest batch, from every other block to every block, those that could not run."""
    longest, rejected = lab.at(lab.grid[-1]), 0
    for chosen in (longest.everything, frozenset(list(longest.everything)[::2])):
        plan = longest.plan(chosen)
        try:
            verify(plan, longest.step, plan.allowed)
        except PlanRejected:
            rejected += 1
    return rejected


def _of_task(lab: Lab, size: Size, paper: Paper) -> list[str]:
    low, high = lab.stars
    plain = lab.plain(lab.weights)
    at_8_gb = lab.mimose(size.published(), 8 * GB, lab.weights)
    shares = ", ".join(f"{length}: {weight:.3f}" for length, weight in zip(lab.grid, lab.weights, strict=True))
    found = [
        f"{lab.name}: {lab.steps:,} steps an epoch, {plain * 1e3:.0f} ms each, plainly; the longest batch takes "
        f"{low / GB:.2f} GB with every block recomputed and {high / GB:.2f} GB plainly. Under 8 GB published Mimose is "
        f"{(at_8_gb.seconds or 0.0) / plain - 1:.1%} slower than plain (paper, of its tasks: {paper.claims['M3']} %). "
        f"Weights of lengths: {shares}."
    ]
    if lab.name == "MC-Roberta":
        found.append(_of_fragments(lab, paper))
    return found


def _of_fragments(lab: Lab, paper: Paper) -> str:
    budget = 7 * GB
    longest = lab.at(lab.grid[-1])
    plans = (longest.plan(range(count)) for count in range(len(longest.everything) + 1))
    plan = next(plan for plan in plans if plan.projected <= budget)
    blocks, tensors = longest.fragments(plan, budget), longest.fragments(DTRPolicy(HERITAGE), budget)
    return (
        f"Under 7 GB the longest batch of {lab.name} leaves {blocks / GB:.2f} GB in fragments where blocks are "
        f"recomputed and {tensors / GB:.2f} GB under DTR, by our model of PyTorch's caching allocator in one step; the "
        f"paper has {paper.claims['M6']} and {paper.claims['M5']} GB. Its lower bound is {paper.claims['M4']} GB."
    )


def _against_paper(gaps: Mapping[str, Sequence[float]], paper: Paper) -> list[str]:
    def mean(name: str) -> str:
        return f"{fmean(gaps[name]):.1%} on average over {len(gaps[name])} tasks and budgets" if gaps[name] else "none"

    claims = paper.claims
    return [
        f"Published Mimose against the static plan: {mean('to_static')}, at most {max(gaps['to_static']):.1%}; the "
        f"paper has {claims['M1']} %. With all lengths as frequent: {mean('to_static_evenly')}. The default: "
        f"{mean('default_to_static')}.",
        f"Published Mimose against DTR: {mean('to_dtr')}; as run, with {claims['M5']} GB in fragments and "
        f"{claims['M12']} % of the time for planning: {mean('to_dtr_as_run')}; the paper has {claims['M2']} %. The "
        f"default: {mean('default_to_dtr')}; as run: {mean('default_to_dtr_as_run')}.",
    ]


# ---------------------------------------------------------------------- the picture


DRAWN: Final[Mapping[str, tuple[int, str, str]]] = {
    PUBLISHED: (0, "o-", "Mimose as published"),
    DEFAULT: (0, "o--", "Mimose"),
    STATIC: (1, "s-", "static, for the longest batch"),
    DTR: (2, "^--", "DTR, ideal memory"),
    DTR_AS_RUN: (2, "^-", "DTR as run"),
}
"""Of each way: colour, marker and line, name."""


def _panel(task: str, rows: Sequence[Row]) -> Panel:
    """A task, as in the paper."""
    lines = []
    for way, (colour, style, label) in DRAWN.items():
        there = [row for row in rows if row[way] is not None]
        budgets, multiples = [row["budget_bytes"] / GB for row in there], [row[way] for row in there]
        lines.append(Line(label=label, x=budgets, y=multiples, colour=colour, style=style))
    stars = [rows[0]["checkpoint, peak"] / GB, rows[0]["plain_bytes"] / GB], [rows[0]["checkpoint"], 1.0]
    lines.append(Line(label="every block recomputed; none", x=stars[0], y=stars[1], colour=3, style="*"))
    return Panel(
        title=task, x=(), across="budget, GB", up="seconds of an epoch, plain = 1", lines=lines, from_zero=False
    )  # fmt: skip


BENCHMARK: Final = Benchmark(
    name="mimose_tasks",
    run=run,
    judge=_checks,
    full=Size(
        tasks=("MC-Roberta", "QA-XLNet", "QA-Bert", "TC-Bert"),
        options={},
        batch=None,
        lengths=8,
        recorded={"SWAG": (40, 77, 141), "SQuAD": (160, 277, 509), "GLUE-QQP": (32, 119, 331)},
        checked={"SWAG": 113, "SQuAD": 287, "GLUE-QQP": 209},
        budgets=6,
    ),
    quick=Size(
        tasks=("TC-Bert",),
        options={"layers": 2, "width": 64},
        batch=16,
        lengths=3,
        recorded={"GLUE-QQP": (32, 150, 331)},
        checked={"GLUE-QQP": 77},
        budgets=2,
        lost=0,
        reserve=0,
    ),
)
