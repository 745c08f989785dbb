"""Networks whose paths differ from step to step under `dynn-offload`: a misprediction costs time and never a bit."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spillway
from spillway import workloads
from spillway.methods import DynnOffload
from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.paths import Sample, Site
from spillway.pilots.pilot import AbstractPilot, Foresight
from spillway.pilots.pilot_files import SavedPilot, write_pilot
from spillway.pilots.program import Program
from spillway.pilots.referee import Referee
from spillway.session.foreseen_steps import described
from spillway.workloads.recorded import PathRecorder, record_samples

STEPS = 5
SIZES: dict[str, dict[str, Any]] = {
    "var-bert": {"width": 32, "layers": 4},
    "tree-lstm": {"width": 32},
    "tree-cnn": {"width": 32},
    "var-lstm": {"width": 32},
    "moe": {"width": 32, "layers": 2},
    "unrolled-gan": {"width": 64},
    "evoformer": {"blocks": 1, "longest": 12},
}

Trained = tuple[list[float], dict[str, torch.Tensor], list[spillway.StepReport], dict[str, Any] | None]


def trained(name: str, budget: int | None, method: Any = "dynn-offload", steps: int = STEPS) -> Trained:
    workload = workloads.get(name, seed=0, **SIZES[name])
    if budget is None:
        losses = [float(workload.train_step(batch)) for batch in workload.batches(steps)]
        return losses, workload.model.state_dict(), [], None
    with spillway.manage(workload.model, workload.optimizers, budget=budget, method=method) as memory:
        losses = []
        for batch in workload.batches(steps):
            with memory.step(batch):
                losses.append(float(workload.train_step(batch)))
        return losses, workload.model.state_dict(), list(memory.history), memory.foresight


def pressed(name: str) -> int:
    """A budget of three quarters of what it takes."""
    _, _, reports, _ = trained(name, 1 << 34, steps=3)
    return int(max(report.peak_bytes for report in reports) * 0.75)


def check_identical(name: str, found: Trained, budget: int) -> None:
    losses, state, _, _ = trained(name, None)
    assert found[0] == losses
    assert all(torch.equal(found[1][key], value) for key, value in state.items())
    assert max(report.peak_bytes for report in found[2]) <= budget


class _Wrong(AbstractPilot):
    """Expects of every part the contrary of what it will do."""

    name = "wrong"
    redirects = True

    def __init__(self, program: Program, ran: list[set[Site]]) -> None:
        self.program, self._ran = program, ran
        self.asked: list[int] = []

    def foresee(self, sample: Sample, asked: int = 0) -> Foresight:
        known = self.program.architecture
        runs = [any(known.ops[op].site in self._ran[sample.step] for op in part) for part in known.parts[1:]]
        self.asked.append(asked)
        return Foresight(np.array([not one for one in runs], np.float32))

    def learn(self, sample: Sample) -> None:
        self.program.follow()


def sites_of(name: str) -> list[set[Site]]:
    workload = workloads.get(name, seed=0, **SIZES[name])
    recorder = PathRecorder(workload)
    paths = [recorder.sample(batch).path for batch in workload.batches(STEPS)]
    return [{recorder.architecture.ops[key].site for key in path.keys.tolist()} for path in paths]


@pytest.mark.long
@pytest.mark.parametrize("name", SIZES)
def test_a_pilot_that_is_wrong_on_every_decision_costs_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Referee, "acting", property(lambda self: self.pilots[0]))
    monkeypatch.setattr(DynnOffload, "looks", lambda self, view: view.anything_moved)  # also without a worker free
    workload, budget, made = workloads.get(name, seed=0, **SIZES[name]), pressed(name), list[_Wrong]()
    ran = sites_of(name)

    def wrong(program: Program) -> AbstractPilot:
        made.append(_Wrong(program, ran))
        return made[0]

    found = trained(name, budget, DynnOffload(dynamism=workload.dynamism, pilots=(wrong,)))
    check_identical(name, found, budget)
    assert made[0].asked
    assert sum(report.bytes_out for report in found[2]) > 0
    foresight = found[3]
    assert foresight is not None
    decisions = made[0].program.decisions
    # Of a step that is the first to show a part nobody can be wrong; where parts are known all are.
    assert foresight["mispredictions"] > 0 or decisions == 0
    assert len(foresight["last"]) == foresight["mispredictions"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["var-bert", "tree-cnn"])
def test_pilots_learn_while_they_are_found_in_the_model_itself(name: str) -> None:
    budget = pressed(name)
    found = trained(name, budget)
    check_identical(name, found, budget)
    foresight = found[3]
    assert foresight is not None
    assert [one["pilot"] for one in foresight["standings"]] == [
        "program order", "last of the same size", "frequency", "1-NN", "decisions",
    ]  # fmt: skip
    assert all(one["steps"] == STEPS for one in foresight["standings"])
    assert sum(one["acted"] for one in foresight["standings"]) <= STEPS


def test_what_is_foreseen_comes_in_while_ops_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynnOffload, "looks", lambda self, view: view.anything_moved)  # also without a worker free
    monkeypatch.setitem(SIZES, "var-bert", {"width": 160, "layers": 4})
    budget = pressed("var-bert") * 2 // 3
    found = trained("var-bert", budget)
    check_identical("var-bert", found, budget)
    assert sum(report.bytes_in_beside for report in found[2]) > 0


def test_the_page_of_a_run_names_who_acts_and_what_mispredictions_cost(tmp_path: Path) -> None:
    workload = workloads.get("var-bert", seed=0, **SIZES["var-bert"])
    with spillway.manage(
        workload.model, workload.optimizers, budget=pressed("var-bert"), method="dynn-offload"
    ) as memory:
        for batch in workload.batches(4):
            with memory.step(batch):
                workload.train_step(batch)
        memory.report(tmp_path / "page.html")
        foresight = memory.foresight
    page = (tmp_path / "page.html").read_text()
    assert foresight is not None
    assert f"{foresight['winner']} acts now" in page
    assert "What was foreseen" in page
    assert page.count("mispredicted by") == (foresight["mispredictions"] > 0)


# ---------------------------------------------------------------------- pilots that were trained ahead


def pilot_file(path: Path, name: str, **options: Any) -> Path:
    recorded = record_samples(name, steps=40, seed=0, **{**SIZES[name], **options})
    pilot = DecisionPilot(Program(recorded.architecture), width=32)
    pilot.fit(recorded.samples, epochs=2)
    write_pilot(path, SavedPilot(pilot=pilot, facts={}))
    return path


@pytest.mark.long
def test_a_pilot_that_was_trained_ahead_takes_part_from_the_first_step_on(tmp_path: Path) -> None:
    workload = workloads.get("var-bert", seed=0, **SIZES["var-bert"])
    file, budget = pilot_file(tmp_path / "one.pilot", "var-bert"), pressed("var-bert")
    method = DynnOffload(pilot=file, dynamism=workload.dynamism)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = trained("var-bert", budget, method)
    check_identical("var-bert", found, budget)
    assert method.course is not None
    known = method.course.program
    assert known.architecture.network == "var-bert"  # the one of the file, in which forty steps had shown every part
    assert known.decisions >= SIZES["var-bert"]["layers"]


def damaged(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def foreign(path: Path) -> None:
    pilot_file(path, "var-bert", width=64)


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(damaged, "cut or damaged"), (foreign, "which this model has not"), (Path.unlink, "No such file")],
)
def test_a_pilot_that_cannot_be_used_is_named_and_the_session_goes_on(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    file, budget = pilot_file(tmp_path / "one.pilot", "var-bert"), pressed("var-bert")
    spoil(file)
    with pytest.warns(UserWarning, match=rf"one\.pilot is not used: .*({reason})"):
        found = trained("var-bert", budget, DynnOffload(pilot=file))
    check_identical("var-bert", found, budget)


# ---------------------------------------------------------------------- what goes wrong


def test_what_goes_wrong_while_learning_is_said_once_and_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("of a pilot")

    budget = pressed("var-bert")
    monkeypatch.setattr(Referee, "learn", fail)
    with pytest.warns(UserWarning, match="could not be foreseen or learned .ArithmeticError: of a pilot.") as told:
        found = trained("var-bert", budget)
    check_identical("var-bert", found, budget)
    assert sum("could not be foreseen" in str(one.message) for one in told) == 1


def test_a_forward_that_raises_leaves_the_session_usable() -> None:
    workload = workloads.get("var-bert", seed=0, **SIZES["var-bert"])
    batches = list(workload.batches(3))
    hooks, modules = len(workload.model._forward_hooks), list(workload.model.modules())
    with spillway.manage(
        workload.model, workload.optimizers, budget=pressed("var-bert"), method="dynn-offload"
    ) as memory:
        with pytest.raises(ValueError, match="mine"), memory.step(batches[0]):
            workload.loss(workload.model, batches[0])
            raise ValueError("mine")
        for batch in batches:
            with memory.step(batch):
                workload.train_step(batch)
        assert [report.step for report in memory.history] == [0, 1, 2]
    assert len(workload.model._forward_hooks) == hooks
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert not [one for one in threading.enumerate() if one.name.startswith("spillway-pilots")]
    assert all(not optimizer._optimizer_step_pre_hooks for optimizer in workload.optimizers)
    assert modules == list(workload.model.modules())


def test_a_forward_within_torch_func_is_not_foreseen_and_runs_all_the_same() -> None:
    def gradients(budget: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
        held = {name: one.detach() for name, one in model.named_parameters()}

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            called: torch.Tensor = torch.func.functional_call(model, parameters, (x,))
            return called.square().mean()

        of_samples, found = torch.func.vmap(torch.func.grad(loss), (None, 0)), []
        with spillway.manage(model, None, budget=budget, method="dynn-offload") as memory:
            for x in torch.randn(3, 48, 64):
                with memory.step(x):
                    found += [one.mean(0) for one in of_samples(held, x).values()]
        return found

    for one, other in zip(gradients(3 << 20), gradients(None), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.*could not be foreseen", "ignore:The PyTorch API of nested tensors")
def test_an_evaluation_on_nested_tensors_within_a_step_runs_all_the_same() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = torch.arange(x.shape[1]) >= torch.arange(x.shape[1], 0, -4)[: len(x), None]
            encoded: torch.Tensor = self.layers(self.embed(x), src_key_padding_mask=padded)
            return encoded.nan_to_num()

    def losses(budget: int | None) -> list[float]:
        torch.manual_seed(0)
        model, found = Encoder(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with spillway.manage(model, optimizer, budget=budget, method="dynn-offload") as memory:
            for x in torch.randint(0, 50, (3, 8, 48)):
                with memory.step(x):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    model.eval()
                    with torch.no_grad():
                        found.append(float(model(x).square().mean()))
                    model.train()
        return found

    assert losses(2 << 20) == losses(None)


def test_a_step_without_a_backward_is_a_forward_too() -> None:
    workload = workloads.get("var-bert", seed=0, **SIZES["var-bert"])
    with spillway.manage(
        workload.model, workload.optimizers, budget=pressed("var-bert"), method="dynn-offload"
    ) as memory:
        for batch in workload.batches(3):
            with memory.step(batch), torch.no_grad():
                workload.loss(workload.model, batch)
        foresight = memory.foresight
    assert foresight is not None
    assert all(one["steps"] == 3 for one in foresight["standings"])


@pytest.mark.parametrize(
    ("model", "base", "embedding"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 3)), "transformer", "1"),
        (nn.Sequential(nn.Dropout(), nn.Conv2d(3, 4, 3)), "cnn", "1"),
        (nn.Sequential(nn.LSTM(3, 4)), "lstm", "0"),
        (nn.Linear(3, 3), "transformer", ""),
    ],
)
def test_what_embeds_a_sample_is_found_in_a_model_of_which_nobody_has_said_it(
    model: nn.Module, base: str, embedding: str
) -> None:
    found = described([model])
    assert (found.base.value, found.embedding) == (base, embedding)
    assert found.sizes({"x": torch.zeros(2, 3), "y": torch.zeros(4)}) == (2.0, 10.0, 2.0, 3.0, 0.0)
