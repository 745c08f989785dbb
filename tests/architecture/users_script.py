"""A script of a user who checks types strictly: everything that is public, used once. mypy reads it; nobody runs it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, assert_type

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from transformers import Trainer

import spillway
from spillway import BlockOptions, ReportOptions, Session, SpillOptions, StepReport, errors
from spillway.integrations.accelerate import prepare
from spillway.integrations.automatic_steps import AutomaticSteps
from spillway.integrations.lightning import SpillwayCallback as LightningCallback
from spillway.integrations.transformers import SpillwayCallback
from spillway.ir import Plan, Recorded, Step
from spillway.methods import (
    LRU,
    METHODS,
    AbstractPolicy,
    Action,
    Checkpoint,
    Delta,
    Drop,
    MemoryView,
    Mimose,
    Move,
    Planned,
    Proposal,
)
from spillway.workloads import Workload


class LargestFirst(AbstractPolicy):
    """A method of one's own."""

    name = "largest-first"

    def relieve(self, view: MemoryView, needed: int) -> Generator[Proposal, bool, None]:
        for storage in sorted(view.candidates(), key=lambda storage: -storage.nbytes):
            if not (yield Drop(storage)):
                yield Move(storage)


def options() -> tuple[SpillOptions, BlockOptions, ReportOptions]:
    spill = SpillOptions(directory=Path("/tmp"), io="direct", host_budget="50%", return_freed=False)
    blocks = BlockOptions(
        names=["layers.0", "layers.1"], size=lambda batch: int(batch.shape[1]), generators=[torch.Generator()],
        page=True, lossy=True,
    )  # fmt: skip
    return spill, blocks, ReportOptions(run_file="run.jsonl", timeline=True, live=True)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - batch).square().mean()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> list[StepReport]:
    spill, blocks, report = options()
    with spillway.manage(model, optimizer, budget="6GiB", spill=spill, blocks=blocks, report=report) as memory:
        assert_type(memory, Session)
        for batch in batches:
            with memory.step(batch) as running:
                assert_type(running, Session)
                loss = loss_of(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                memory.log(loss=loss, norm=1.0)
            assert_type(memory.scalars(), dict[str, float])
        assert_type(memory.budget, int | None)
        memory.budget = "4GiB"
        memory.budget = None
        memory.report("run.html")
        memory.report(Path("run.html"))
    assert_type(memory.explanation, tuple[str, ...])
    assert_type(memory.foresight, dict[str, Any] | None)
    assert_type(memory.allowed, int)
    return memory.history


def by_hand(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], batches: list[Tensor]) -> StepReport:
    memory = spillway.manage(models, optimizers, budget=6 << 30, method="lru")
    memory.begin(batches[0])
    for batch in batches[1:]:
        memory.micro_batch(batch)
        loss_of(models[0], batch).backward()  # type: ignore[no-untyped-call]
    memory.end()
    memory.close()
    report = memory.history[-1]
    assert_type(report.peak_bytes, int)
    assert_type(report.seconds, float)
    assert_type(report.logged, dict[str, float])
    assert_type(report.to_json(), dict[str, Any])
    assert_type(report.hidden_share, float)
    return StepReport.from_json(report.to_json())


def methods(model: nn.Module, recorded: Recorded) -> Iterable[Session]:
    planned = Planned(spillway.plan(recorded.step, budget=0.6, method="sqrt-n"), recorded.step)
    for policy in (LRU(), Delta(), LargestFirst()):
        yield spillway.manage(model, budget=None, method=policy)
    for by_block in (Mimose(), Checkpoint(Action.OFFLOAD)):
        yield spillway.manage(model, budget=None, method=by_block)
    for name in METHODS:
        yield spillway.manage(model, budget=None, method=name)
    yield spillway.manage(model, budget=None, method=planned)


def on_paper(workload: Workload) -> float:
    recorded = spillway.record("resnet50", fake=True, batch=64)
    assert_type(recorded, Recorded)
    assert_type(spillway.record(lambda: workload).step, Step)
    assert_type(spillway.plan("step.jsonl", budget="0.5x", method="checkmate", device="v100"), Plan)
    simulated = spillway.simulate(recorded.step, budget="80%", method="delta", device="a100")
    assert_type(simulated.peak_bytes, int)
    return simulated.seconds


def refused(memory: Session) -> str | None:
    try:
        with memory.step():
            pass
    except spillway.BudgetInfeasible as refusal:
        assert_type(refusal.smallest_budget, int)
        assert_type(refusal.exact, bool)
        return refusal.page
    except errors.UsageError as wrong:
        assert_type(wrong.rank, int | None)
        raise ValueError(str(wrong)) from wrong
    except spillway.SpillwayError as error:
        return error.page
    return spillway.__version__


def trainers(model: nn.Module, optimizer: torch.optim.Optimizer, rows: list[dict[str, list[int]]]) -> None:
    callback = SpillwayCallback("8GiB", method="mimose", report=ReportOptions(live=True))
    Trainer(model=model, train_dataset=rows, callbacks=[callback]).train()
    assert_type(callback.memory, Session | None)
    LightningTrainer(callbacks=[LightningCallback("8GiB", blocks=BlockOptions(page=True))])
    model, optimizer = prepare(Accelerator(), model, optimizer, budget="8GiB")
    with AutomaticSteps(model, optimizer, budget="8GiB") as found:
        assert_type(found.session, Session)
