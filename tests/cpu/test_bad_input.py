"""What makes no sense is refused with one clear sentence, and nothing is lost or left open."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.errors import BudgetError, ModelError, SessionError, SpillDirectoryError, UnknownMethodError, UsageError
from tests.cpu.another_process import run_python
from tests.cpu.pressure import ORDERS
from tests.cpu.training import WIDTH, adam, batch_of, network


def assert_one_sentence(error: BaseException) -> None:
    text = str(error)
    assert text.endswith(".")
    assert "\n" not in text
    assert 20 < len(text) < 300


@pytest.mark.parametrize(
    "budget", ["12 apples", "", 0, "0 GiB", -1, "-5 GiB", "150%", "0%", 1 << 62, "9999 TiB", 0.5, True, [1]]
)
def test_a_budget_that_makes_no_sense_is_refused(budget: Any) -> None:
    with pytest.raises(BudgetError) as error:
        spillway.manage(network(), budget=budget)
    assert_one_sentence(error.value)


@pytest.mark.parametrize("method", ["lur", "", 5, None, ORDERS])
def test_an_unknown_method_is_refused_with_those_that_there_are(method: Any) -> None:
    with pytest.raises(UnknownMethodError, match="keep-all, largest, lms, lru"):
        spillway.manage(network(), budget=None, method=method)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("a model", None),
        (5, None),
        (None, None),
        ([], None),
        ([nn.Linear(2, 2), "another"], None),
        (nn.Linear(2, 2), "adam"),
        (nn.Linear(2, 2), 3),
        (nn.Linear(2, 2), nn.Linear(2, 2).parameters()),
        (torch.ones(3), None),
    ],
)
def test_what_is_not_a_model_or_an_optimizer_is_refused(model: Any, optimizer: Any) -> None:
    with pytest.raises(ModelError) as error:
        spillway.manage(model, optimizer, budget=None)
    assert_one_sentence(error.value)


def test_a_model_on_two_devices_or_elsewhere_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match="2 devices \\(cpu, meta\\)") as error:
        spillway.manage(model, budget=None)
    assert_one_sentence(error.value)
    with pytest.raises(ModelError, match="meta") as error:
        spillway.manage(model[1], budget=None)
    assert_one_sentence(error.value)


def test_a_model_that_does_not_train_is_warned_about() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.warns(UserWarning, match="No parameter of the model requires a gradient"):
        spillway.manage(model, budget=None).close()


def test_steps_do_not_nest_and_the_outer_one_goes_on() -> None:
    model = network()
    optimizer = adam(model)
    with spillway.manage(model, optimizer, budget="380 KiB") as memory:
        with memory.step():
            loss = model(batch_of(0)).square().mean()
            with pytest.raises(SessionError) as error, memory.step():
                raise AssertionError
            assert_one_sentence(error.value)
            loss.backward()
            optimizer.step()
        assert len(memory.history) == 1


def test_one_step_object_cannot_be_entered_twice() -> None:
    model = network()
    with spillway.manage(model, budget="380 KiB") as memory:
        step = memory.step()
        with step, pytest.raises(SessionError), step:
            raise AssertionError
        assert len(memory.history) == 1


@pytest.mark.parametrize(
    "use",
    [lambda memory: memory.step().__enter__(), lambda memory: memory.__enter__(), lambda memory: memory.log(loss=1)],
)
def test_a_closed_session_says_so(use: Callable[[spillway.Session], Any]) -> None:
    memory = spillway.manage(network(), budget=None)
    memory.close()
    with pytest.raises(SessionError) as error:
        use(memory)
    assert_one_sentence(error.value)


@pytest.mark.parametrize("method", ["auto", "lru"])
def test_a_batch_that_holds_itself_is_as_good_as_another(method: str) -> None:
    model = network()
    batch: dict[str, Any] = {"x": batch_of(0)}
    batch["batches"] = [batch]
    with spillway.manage(model, budget=None, method=method) as memory, memory.step(batch):
        model(batch["x"]).sum().backward()
    assert len(memory.history) == 1


def test_numbers_are_logged_inside_a_step() -> None:
    with spillway.manage(network(), budget=None) as memory, pytest.raises(SessionError) as error:
        memory.log(loss=1.0)
    assert_one_sentence(error.value)


@pytest.mark.parametrize("directory", ["missing", "file", "/proc"])
def test_a_spill_directory_that_cannot_be_used_is_refused(directory: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(SpillDirectoryError) as error:
        spillway.manage(network(), budget="1 MiB", spill=spillway.SpillOptions(directory=tmp_path / directory))
    assert_one_sentence(error.value)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_run_file_that_cannot_be_written_leaves_nothing_open(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd")), torch.Tensor.numpy
    with pytest.raises(UsageError, match="missing"):
        spillway.manage(
            network(), budget="1 MiB", report=spillway.ReportOptions(run_file=tmp_path / "missing" / "run.jsonl")
        )
    assert (sorted(os.listdir("/proc/self/fd")), torch.Tensor.numpy) == before


def test_a_refusal_names_the_op_and_the_numbers() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100 * WIDTH))
    batch = batch_of(0)
    with spillway.manage(model, budget="1 MiB") as memory:
        for _ in range(2):
            with pytest.raises(spillway.BudgetInfeasible) as refusal, memory.step(batch):
                model(batch).sum().backward()
            error = refusal.value
            assert (error.op, error.op_index, error.allowed) == ("aten::addmm", 1, 1 << 20)
            weights, out = 4 * WIDTH * 100 * WIDTH, 4 * 96 * 100 * WIDTH
            assert error.needed >= weights + out
            assert_one_sentence(error)
        assert memory.history == []
    with spillway.manage(model, budget=error.smallest_budget) as memory, memory.step(batch):
        model(batch).sum().backward()


# ---------------------------------------------------------------------- a spill directory that fills up


FILLING = """
    import json, resource, signal
    import torch, spillway
    from spillway.errors import SpillFullError
    from tests.cpu.families import state_of
    from tests.cpu.pressure import ORDERS
    from tests.cpu.test_interruptions import BUDGET, after_each_op, fresh, ops_of_a_step, step_of

    def limit_files(nbytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    def step_with(limit, order):
        model, optimizer = fresh()
        with spillway.manage(model, optimizer, budget=BUDGET, method=ORDERS[order]()) as memory:
            limit_files(limit)
            try:
                with memory.step():
                    step_of(model, optimizer, 1)
                error = None
            except SpillFullError as full:
                error = str(full)
            limit_files(resource.RLIM_INFINITY)
            done = after[hash(tuple(state_of(model, optimizer).items()))]
            with memory.step():
                step_of(model, optimizer, 2)
            peak, whole = memory.history[0].peak_bytes, done == ops_of_a_step()
        return {"limit": limit, "error": error, "whole": whole, "peak": peak}

    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    after = after_each_op()
    limits = (0, 4_096, 40_000, 80_000, 120_000, 160_000, 1 << 30)
    print(json.dumps([step_with(limit, order) for limit in limits for order in ORDERS]))
"""


@pytest.mark.long
def test_a_spill_directory_that_fills_up_slows_a_step_or_ends_it_with_one_sentence_and_nothing_is_lost() -> None:
    done = run_python(FILLING)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = json.loads(done.stdout)
    assert [run["peak"] for run in runs if run["peak"] > 380 << 10] == []
    assert [run["whole"] for run in runs] == [run["error"] is None for run in runs]
    assert {run["whole"] for run in runs if run["limit"] == 0} == {False}
    assert {run["whole"] for run in runs if run["limit"] == 1 << 30} == {True}
    for sentence in filter(None, (run["error"] for run in runs)):
        assert "The spill directory" in sentence
        assert "has no room for" in sentence
        assert sentence.endswith(".")
        assert "\n" not in sentence
