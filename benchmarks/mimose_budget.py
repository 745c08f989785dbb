"""A thousand steps of changing length under each of three budgets on the block engine: the exact peak of every step.

Mimose's Figure 14, whose picture of peaks against lengths a session draws itself in its report.

Models from transformers' configurations, small, with dropout; lengths as in the data sets of Mimose's paper, drawn
evenly, because the data's own are not public. The last model's size is two lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

import spillway
from benchmarks import columns
from benchmarks.models import built
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.workers import Job, started
from spillway.errors import BudgetInfeasible
from spillway.units import Bytes
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
    """Train every model plainly for its losses and its peaks, then under every budget, each in a process of its own."""
    rows: list[Row] = []
    for number in size.subjects:
        tell(f"{SUBJECTS[number].name}: {size.steps} steps of each run")
        options = {"number": number, "steps": size.steps, "shares": tuple(size.shares)}
        with started(Job(function="benchmarks.mimose_budget:competitor", options=options)) as worker:
            rows += worker.ask()
    return Result(
        title=f"{size.steps} steps of changing length on the block engine, the exact peak of each",
        columns=COLUMNS,
        rows=rows,
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", share="budget at"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="highest peak"),
    *columns.text(steps="steps", over="over budget", refused="refused", sizes="sizes", plans="learned from"),
    *columns.shares(recomputed_share="recomputed"),
    *columns.text(revoked="revoked"),
    *columns.ratios(used="peak/budget", least_foretold="foretold/peak, least", most_foretold="most"),
    *columns.text(differing_losses="losses that differ"),
)
NOTES: Final = (
    "Budget at: 0 is the smallest feasible, 1.01 of the highest peak with every block recomputed over the same steps; "
    "1 is the highest with nothing recomputed. Peaks: of every step, by torch's profiler, which hears of every "
    "allocation, above what was resident when the step began. Refused: steps that ended in BudgetInfeasible. Foretold: "
    "what planned steps were expected to take at most, of those in which nothing was revoked.",
    "Losses are those of plain PyTorch with dropout on, bit for bit, where none differ.",
)


def competitor(*, number: int, steps: int, shares: Sequence[float]) -> Callable[[], list[Row]]:
    """All runs of one model, in its own process."""
    return partial(_measured, SUBJECTS[number], steps, shares)


def _measured(subject: Subject, steps: int, shares: Sequence[float]) -> list[Row]:
    losses, _ = _train(subject, steps, None, None)
    _, floor = _train(subject, steps, "90%", "checkpoint")
    _, most = _train(subject, steps, None, "mimose")
    low, high = int(SPARE * max(r.peak_bytes for r in floor)), max(r.peak_bytes for r in most)
    budgets = {share: int(low + share * (high - low)) for share in shares}
    return [
        _row(subject, share, budget, losses, *_train(subject, steps, budget, "mimose"))
        for share, budget in budgets.items()
    ]


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
    foretold = [r.projected_bytes / r.peak_bytes for r in reports if r.projected_bytes and not r.revoked_blocks]
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
        "least_foretold": min(foretold, default=None),
        "most_foretold": max(foretold, default=None),
        "differing_losses": sum(one != other for one, other in zip(losses, found, strict=True)),
    }


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        cell = f"{row['model']}, budget at {row['share']}"
        yield Check(what=f"{cell}: steps over budget, of {row['steps']}", measured=row["over"])
        yield Check(what=f"{cell}: steps refused", measured=row["refused"])
        yield Check(what=f"{cell}: losses that differ from plain", measured=row["differing_losses"])


BENCHMARK: Final = Benchmark(
    name="mimose_budget",
    run=run,
    judge=_checks,
    full=Size(subjects=range(len(SUBJECTS)), steps=1000),
    quick=Size(subjects=(0,), steps=12, shares=(0.4,)),
)
