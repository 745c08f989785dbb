"""Thousands of steps of changing length under `auto`: budgets, plans, time to plan, and what a process grows by."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, Final
from unittest.mock import patch

import torch

import spillway
from benchmarks import columns
from benchmarks.models import built, encoder
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.training import warm_up
from benchmarks.turns import verdict
from benchmarks.workers import Job, all_started
from spillway.internals.process_memory import PeakMemory
from spillway.methods import auto
from spillway.workloads import seed_everything

PLAIN: Final = "plain"
BUCKETS: Final = "auto"
ANEW: Final = "auto, a plan for every length"
SHORTEST: Final = 100
"""Tokens. 200 lengths from here on are in 56 buckets of 2 %; fewer tokens have one of their own each."""
PLANS: Final = 60
PLANNING: Final = 0.001
"""Of the time, what planning takes at most."""
POINT: Final = 0.01
"""Of the step time, what sharing plans may cost."""
GROWTH: Final = 2**20
"""Bytes that a process may grow by after it has settled: what malloc does."""


@frozen
class Size:
    """How much is measured."""

    steps: int
    lengths: int
    """How many there are, from `SHORTEST` on, evenly drawn."""
    settled: int
    """Steps after which a process does not grow any more."""
    share: float
    """Of the plain peak of the longest, the budget."""
    model: Mapping[str, Any]
    batch: int


def run(size: Size, tell: Tell) -> Result:
    """The same steps plainly, with plans that lengths share, and with one for each, a tenth of them in turn."""
    tell("the plain peak")
    kinds = {PLAIN: None, BUCKETS: auto.BUCKET, ANEW: 1e-9}
    budget = int(_plain_peak(size) * size.share)
    jobs = {
        name: Job(
            function="benchmarks.auto_lengths:competitor", options={"size": size, "budget": budget, "bucket": bucket}
        )
        for name, bucket in kinds.items()
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    with all_started(jobs) as workers:
        for number in range(10):
            tell(f"tenth {number + 1} of {size.steps} steps")
            for name, worker in workers.items():
                found[name].append(worker.ask())
    rows = [_row(name, budget, tenths, found[PLAIN], size.settled) for name, tenths in found.items()]
    shared, anew = (sum(sum(one["seconds"]) for one in found[name][1:]) for name in (BUCKETS, ANEW))
    return Result(
        title=f"{size.steps} steps of {size.lengths} lengths under auto", columns=COLUMNS, rows=rows,
        facts={"beside_anew": shared / anew - 1}, notes=NOTES,
    )  # fmt: skip


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(competitor="competitor", steps="steps", over="over budget", plans="plans", later="later"),
    *columns.nbytes(budget_bytes="budget", peak_bytes="highest peak", growth="growth"),
    *columns.seconds(seconds="time"),
    *columns.ratios(ratio="x plain"),
    *columns.shares(planning="planning"),
    *columns.text(losses="losses"),
)
NOTES: Final = (
    "Plans: how many were made in all steps, later in their second half. Growth: of the resident set's peak after the "
    "settled steps; plain training's is that of its allocator. Ratios are of sums over the steps after the first "
    "tenth, which learns.",
)


def _drawn(size: Size) -> list[int]:
    """The length of every step."""
    drawn = random.Random(0)
    return [SHORTEST + drawn.randrange(size.lengths) for _ in range(size.steps)]


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, length: int, batch: int, step: Any = None) -> str:
    tokens = torch.full((batch, length), length % 90 + 5)
    with step(tokens):
        loss = model(input_ids=tokens)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach()).hex()


def _trained(size: Size) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    seed_everything(0)
    model = built("BertModel", vocab_size=100, max_position_embeddings=300, **size.model).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _plain_peak(size: Size) -> int:
    model, optimizer = _trained(size)
    with spillway.manage(model, optimizer, budget=None, method="keep-all") as memory:
        for _ in range(2):
            _step(model, optimizer, max(_drawn(size)), size.batch, memory.step)
    return max(report.peak_bytes for report in memory.history)


def competitor(*, size: Size, budget: int, bucket: float | None) -> Callable[[], dict[str, Any]]:
    """A tenth of the steps at every call, plainly where there is no width of a bucket."""
    warm_up()
    memory = PeakMemory()
    model, optimizer = _trained(size)
    session, made = None, list[None]()
    if bucket is not None:
        patch.object(auto, "BUCKET", bucket).start()  # of this process
        planned = auto.Auto._planned
        patch.object(auto.Auto, "_planned", lambda *given: made.append(None) or planned(*given)).start()
        session = spillway.manage(model, optimizer, budget=budget)
    lengths = iter(_drawn(size))
    return lambda: _tenth(model, optimizer, session, lengths, size, memory) | {"plans": len(made)}


def _tenth(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, session: spillway.Session | None,
    lengths: Iterator[int], size: Size, memory: PeakMemory,
) -> dict[str, Any]:  # fmt: skip
    losses, seconds, grown = [], [], []
    step = session.step if session is not None else lambda batch: nullcontext()
    for length in islice(lengths, size.steps // 10):
        began = time.perf_counter()
        losses.append(_step(model, optimizer, length, size.batch, step))
        seconds.append(time.perf_counter() - began)
        grown.append(memory.above_start())
    reports = [] if session is None else session.history[-len(losses) :]
    return {
        "losses": losses, "seconds": seconds, "grown": grown,
        "reports": [
            {
                "peak": report.peak_bytes, "planning": report.planning_seconds, "seconds": report.seconds,
            }
            for report in reports
        ],
    }  # fmt: skip


def _row(
    name: str, budget: int, tenths: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], settled: int
) -> Row:
    reports = [report for tenth in tenths for report in tenth["reports"]]
    grown = [one for tenth in tenths for one in tenth["grown"]]
    losses, plain_losses = ([one for tenth in run for one in tenth["losses"]] for run in (tenths, plain))
    later = [sum(sum(tenth["seconds"]) for tenth in run[1:]) for run in (tenths, plain)]
    return {
        "competitor": name, "steps": len(losses), "losses": verdict(identical=losses == plain_losses),
        "growth": grown[-1] - grown[min(settled, len(grown)) - 1], "seconds": later[0] / max(len(losses) * 0.9, 1),
        "ratio": later[0] / later[1],
    } | (
        {
            "budget_bytes": budget, "peak_bytes": max(report["peak"] for report in reports),
            "over": sum(report["peak"] > budget for report in reports),
            "plans": tenths[-1]["plans"], "later": tenths[-1]["plans"] - tenths[len(tenths) // 2 - 1]["plans"],
            "planning": sum(report["planning"] for report in reports) / sum(report["seconds"] for report in reports),
        }
        if reports
        else {}
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        if row["competitor"] == PLAIN:
            continue
        yield Check(what=f"{row['competitor']}: steps over the budget", measured=row["over"])
        yield Check(what=f"{row['competitor']}: losses that differ", measured=row["losses"] != verdict(identical=True))
        if row["competitor"] == BUCKETS:
            yield Check(what="plans", measured=row["plans"], at_most=PLANS)
            yield Check(what="share of the time that planning takes", measured=row["planning"], at_most=PLANNING)
            plain = next(one["growth"] for one in result.rows if one["competitor"] == PLAIN)
            yield Check(what="bytes grown, above plain", measured=row["growth"] - plain, at_most=GROWTH)
    yield Check(
        what="step time above that of a plan for every length", measured=result.facts["beside_anew"], at_most=POINT
    )


_BERT: Final = {**encoder(4, 128), "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
BENCHMARK: Final = Benchmark(
    name="auto_lengths",
    run=run,
    judge=_checks,
    full=Size(steps=2000, lengths=200, settled=200, share=0.5, model=_BERT, batch=4),
    quick=Size(steps=20, lengths=2, settled=10, share=0.7, model={**_BERT, **encoder(3, 64)}, batch=2),
)
