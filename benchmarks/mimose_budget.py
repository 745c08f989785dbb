"""A thousand steps of changing length under each of three budgets on the block engine: the exact peak of every step.

Drawn against the length, as in Mimose's Figure 14.

Models from transformers' configurations, small, with dropout; lengths as in the data sets of Mimose's paper, drawn
evenly, because the data's own are not public. The last model's size is two lengths.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor, nn

import spillway
from benchmarks import columns
from benchmarks.drawing import Line, Panel, can_draw, png
from benchmarks.models import built
from benchmarks.record import Benchmark, Check, Column, Result, Row, Skipped, Tell, frozen
from benchmarks.workers import Job, started
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes, MiB
from spillway.workloads import seed_everything

SHARES: Final = (0.0, 0.4, 0.8)
"""Budgets: the smallest that is feasible, and so far from there to where nothing is recomputed."""
SPARE: Final = 1.01
"""The smallest budget, as a multiple of the peak with every block recomputed: plans leave free what the meter may be
wrong by, half a percent."""

Inputs = dict[str, Tensor]


@frozen
class Subject:
    """A model and its inputs."""

    name: str
    lengths: tuple[int, int]
    """The shortest and the longest."""
    build: Callable[[], nn.Module]
    two: bool = False
    """Whether encoder and decoder have lengths of their own."""

    def inputs(self, drawn: random.Random) -> Inputs:
        """A batch of two."""
        tokens = [
            torch.tensor([[drawn.randrange(5, 95) for _ in range(length)] for _ in range(2)])
            for length in (drawn.randint(*self.lengths) for _ in range(1 + self.two))
        ]
        if self.two:
            return {"input_ids": tokens[0], "labels": tokens[1]}
        return {"input_ids": tokens[0]}


_ENCODER: Final = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 640, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
SUBJECTS: Final = (
    Subject(name="BERT, 30 to 332", lengths=(30, 332), build=partial(built, "BertModel", **_ENCODER)),
    Subject(name="RoBERTa, 35 to 141", lengths=(35, 141), build=partial(built, "RobertaModel", **_ENCODER)),
    Subject(
        name="XLNet, 153 to 512", lengths=(153, 512),
        build=partial(built, "XLNetModel", vocab_size=100, d_model=32, n_layer=4, n_head=2, d_inner=64, dropout=0.1),
    ),
    Subject(
        name="T5, two lengths, 30 to 332", lengths=(30, 332), two=True,
        build=partial(
            built, "T5ForConditionalGeneration", vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=3,
            num_heads=2, dropout_rate=0.1, decoder_start_token_id=0,
        ),
    ),
)  # fmt: skip


@frozen
class Size:
    """How much is measured."""

    subjects: Sequence[int]
    """Of `SUBJECTS`, by number."""
    steps: int
    shares: Sequence[float] = SHARES


def run(size: Size, tell: Tell) -> Result:
    """Train every model plainly for its losses and its peaks, then under every budget.

    A model has a process of its own, and as many run beside each other as there are processors: nothing is timed.
    """
    if find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    longest_first = sorted(size.subjects, key=lambda number: -SUBJECTS[number].lengths[1])
    with ThreadPoolExecutor(os.cpu_count()) as beside:
        waiting = {number: beside.submit(_in_a_process, number, size, tell) for number in longest_first}
        measured = [waiting[number].result() for number in size.subjects]
    rows = [row for found, _ in measured for row in found]
    panels = [panel for _, panel in measured]
    return Result(
        title=f"{size.steps} steps of changing length on the block engine, the exact peak of each",
        columns=COLUMNS,
        rows=rows,
        checks=[check for row in rows for check in _checks(row)],
        notes=(*NOTES, *([] if can_draw() else ["Not drawn: matplotlib, the extra `pictures`, is not installed."])),
        pictures={"mimose_budget.png": png(panels)} if can_draw() else {},
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", share="budget at"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="highest peak"),
    *columns.text(steps="steps", over="over budget", refused="refused", sizes="sizes", plans="learned from"),
    *columns.shares(recomputed_share="recomputed"),
    *columns.text(revoked="revoked"),
    *columns.ratios(used="peak/budget"),
    *columns.text(differing_losses="losses that differ"),
)
NOTES: Final = (
    "Budget at: 0 is the smallest feasible, 1.01 of the highest peak with every block recomputed over the same steps; "
    "1 is the highest with nothing recomputed. Peaks: of every step, by torch's profiler, which hears of every "
    "allocation, above what was resident when the step began. Refused: steps that ended in BudgetInfeasible.",
    "Losses are those of plain PyTorch with dropout on, bit for bit, where none differ.",
)


def _in_a_process(number: int, size: Size, tell: Tell) -> tuple[list[Row], Panel]:
    options = {"number": number, "steps": size.steps, "shares": tuple(size.shares)}
    with started(Job(function="benchmarks.mimose_budget:competitor", options=options)) as worker:
        measured: tuple[list[Row], Panel] = worker.ask()
    tell(f"{SUBJECTS[number].name}: {size.steps} steps of each run")
    return measured


def competitor(*, number: int, steps: int, shares: Sequence[float]) -> Callable[[], tuple[list[Row], Panel]]:
    """All runs of one model, in its own process."""
    return partial(_measured, SUBJECTS[number], Size(subjects=(number,), steps=steps, shares=shares))


def _measured(subject: Subject, size: Size) -> tuple[list[Row], Panel]:
    losses, _ = _train(subject, size.steps, None, None)
    _, floor = _train(subject, size.steps, "90%", "checkpoint")
    _, most = _train(subject, size.steps, None, "mimose")
    low, high = int(SPARE * max(r.peak_bytes for r in floor)), max(r.peak_bytes for r in most)
    rows, runs = [], {}
    for share in size.shares:
        budget = int(low + share * (high - low))
        found, reports = _train(subject, size.steps, budget, "mimose")
        rows.append(_row(subject, share, budget, losses, found, reports))
        runs[budget] = reports
    return rows, _drawn(subject, runs, floor, most)


def _drawn(
    subject: Subject,
    runs: Mapping[Bytes, list[spillway.StepReport]],
    floor: list[spillway.StepReport],
    most: list[spillway.StepReport],
) -> Panel:
    """The peak of every step against how long its input was, the budgets as lines across."""
    lines: list[Line] = []
    lengths = [_length(report) for report in most]
    for colour, (budget, reports) in enumerate(runs.items()):
        shown = f"budget {budget / MiB:.1f} MiB"
        lines.append(_points(reports, shown, colour))
        lines.append(Line(label="", x=[min(lengths), max(lengths)], y=[budget / MiB] * 2, colour=colour, style="--"))
    for label, reports in (("none recomputed", most), ("all recomputed", floor)):
        lines.append(_points(reports, label, len(lines) - len(runs)))
    across = "length of both inputs together" if subject.two else "length of the input"
    return Panel(title=subject.name, x=(), across=across, up="peak of a step, MiB", lines=lines)


def _points(reports: Sequence[spillway.StepReport], label: str, colour: int) -> Line:
    y = [report.peak_bytes / MiB for report in reports]
    return Line(label=label, x=[_length(report) for report in reports], y=y, colour=colour, style=".")


def _length(report: spillway.StepReport) -> int:
    return sum(report.input_size or ())


def _train(
    subject: Subject, steps: int, budget: int | str | None, method: str | None
) -> tuple[list[str | None], list[spillway.StepReport]]:
    """The loss of every step, exactly, None where it was refused; and the reports of a session."""
    seed_everything(0)
    model = subject.build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    drawn = random.Random(0)
    batches = [subject.inputs(drawn) for _ in range(steps)]
    if method is None:
        return [_step(model, optimizer, batch, subject) for batch in batches], []
    losses: list[str | None] = []
    with spillway.manage(
        model, optimizer, budget=budget, method=method, report=spillway.ReportOptions(timeline=True)
    ) as memory:
        for batch in batches:
            loss = None
            try:
                with memory.step(batch):
                    loss = _step(model, optimizer, batch, subject)
                losses.append(loss)
            except BudgetInfeasible:
                losses.append(None)
                optimizer.zero_grad()
    return losses, memory.history


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Inputs, subject: Subject) -> str:
    output = model(**batch)
    loss: Tensor = output.loss if subject.two else output[0].square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()).hex()


def _row(
    subject: Subject,
    share: float,
    budget: Bytes,
    losses: list[str | None],
    found: list[str | None],
    reports: list[spillway.StepReport],
) -> Row:
    assert all(report.peak_measured for report in reports)
    refused = found.count(None)
    highest = max((report.peak_bytes for report in reports), default=0)
    blocks = sum(report.blocks for report in reports)
    return {
        "model": subject.name,
        "share": f"{share:.0%}",
        "budget_bytes": budget,
        "peak_bytes": highest,
        "steps": len(found),
        "over": sum(report.peak_bytes > budget for report in reports),
        "refused": refused,
        "sizes": len({tuple(report.input_size or ()) for report in reports}),
        "plans": sum(report.projected_bytes == 0 for report in reports),
        "recomputed_share": sum(report.recomputed_blocks for report in reports) / max(blocks, 1),
        "revoked": sum(report.revoked_blocks for report in reports),
        "used": highest / budget,
        "differing_losses": sum(one != other for one, other in zip(losses, found, strict=True)),
    }


def _checks(row: Row) -> list[Check]:
    cell = f"{row['model']}, budget at {row['share']}"
    return [
        Check(what=f"{cell}: steps over budget, of {row['steps']}", measured=row["over"], at_most=0),
        Check(what=f"{cell}: steps refused", measured=row["refused"], at_most=0),
        Check(what=f"{cell}: losses that differ from plain", measured=row["differing_losses"], at_most=0),
    ]


BENCHMARK: Final = Benchmark(
    name="mimose_budget",
    run=run,
    full=Size(subjects=range(len(SUBJECTS)), steps=1000),
    quick=Size(subjects=(0,), steps=12, shares=(0.4,)),
)
