"""`manage()` and what it gives: reports, run files, bypassed steps, several sessions and models."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import SessionError
from spillway.ir import read_run
from spillway.native.arena import Arena
from tests.cpu.another_process import run_python
from tests.cpu.families import difference, state_of
from tests.cpu.pressure import ENDS, ORDERS
from tests.cpu.training import WIDTH, adam, batch_of, network, train


class CountsOps(TorchDispatchMode):
    """Counts ops as the engine does: views read no bytes and have no number."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += not OpInfo(func).view
        return func(*args, **(kwargs or {}))


def step_of(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# ---------------------------------------------------------------------- reports


@pytest.mark.parametrize("order", ENDS)
def test_a_report_tells_what_happened(order: str) -> None:
    model = network()
    optimizer = adam(model)
    with spillway.manage(model, optimizer, budget="300 KiB", method=ORDERS[order]()) as memory:
        for number in range(4):
            with memory.step(batch_of(number)), CountsOps() as counted:
                loss = step_of(model, optimizer, batch_of(number))
                memory.log(loss=loss, number=number)
            report = memory.history[-1]
            assert (report.step, report.signature, report.managed) == (number, "float32[96, 64]", True)
            assert report.ops == counted.ops
            assert report.logged == {"loss": loss.item(), "number": float(number)}
            assert report.start_bytes <= report.peak_bytes <= report.allowed == memory.allowed == 300 << 10
            assert memory.scalars() == report.logged | {
                "spillway_peak_bytes": report.peak_bytes, "spillway_budget_bytes": 300 << 10,
                "spillway_stall_seconds": report.stall_seconds,
                "spillway_recompute_seconds": report.recomputed_seconds,
            }  # fmt: skip
            assert report.end_bytes <= report.peak_bytes <= report.peak_rss_bytes
            assert report.working_bytes <= report.allowed
            assert report.seconds > report.stall_seconds > 0
            assert report.seconds > report.recomputed_seconds
            assert report.moves > 0
            assert 0 < report.bytes_out <= report.moves * report.allowed
            assert (report.escaped, report.unmanaged) == (0, 0)
            if number == 0:
                continue  # without the optimizer's state, little has to leave
            assert report.bytes_in > 0
            dropping = order == "recompute first"
            assert (report.drops > 0, report.dropped_bytes > 0, report.recomputed_ops > 0) == (dropping,) * 3
            assert (report.recomputed_seconds > 0) == dropping
    assert [report.step for report in memory.history] == [0, 1, 2, 3]


def test_the_account_is_the_bytes_of_what_is_alive() -> None:
    model = network()
    optimizer = adam(model)
    with spillway.manage(model, optimizer, budget=None, method="keep-all") as memory:
        for number in range(2):
            batch = batch_of(number)
            with memory.step(batch):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
            state = [value for entries in optimizer.state.values() for value in entries.values()]
            gradients = [parameter.grad for parameter in model.parameters()]
            alive = [*model.parameters(), *model.buffers(), *gradients, *state, batch, loss]
            assert memory.history[-1].end_bytes == sum(tensor.untyped_storage().nbytes() for tensor in alive)
            del loss, gradients, alive
        assert memory.history[1].start_bytes == memory.history[0].end_bytes - 4


def test_a_step_that_is_not_finished_is_not_in_the_history() -> None:
    model = network()
    with spillway.manage(model, budget=None) as memory:
        with pytest.raises(ZeroDivisionError), memory.step():
            memory.log(loss=1 / 0)
        assert memory.history == []


def test_a_name_that_no_run_file_would_be_read_with_is_refused(tmp_path: Path) -> None:
    with (
        spillway.manage(
            network(), budget=None, report=spillway.ReportOptions(run_file=tmp_path / "run.jsonl")
        ) as memory,
        memory.step(),
    ):
        with pytest.raises(SessionError, match=r"log\('a\\tb'=...\): give it a name"):
            memory.log(**{"a\tb": 1.0})
        memory.log(loss=1.0)
    assert [step.logged for step in read_run(tmp_path / "run.jsonl").steps] == [{"loss": 1.0}]


@pytest.mark.parametrize("timeline", [False, True])
def test_a_run_file_holds_what_the_history_holds(tmp_path: Path, timeline: bool) -> None:
    model, path = network(), tmp_path / "run.jsonl"
    optimizer = adam(model)
    with spillway.manage(
        model, optimizer, budget="380 KiB", method="lru",
        report=spillway.ReportOptions(run_file=path, timeline=timeline),
    ) as memory:  # fmt: skip
        for number in range(3):
            with memory.step(batch_of(number)):
                memory.log(loss=train(model, optimizer, number))
        memory.report(tmp_path / "run.html")
    run = read_run(path)
    assert run.steps == memory.history
    assert run.header["budget_bytes"] == 380 << 10
    assert run.header["method"] == "lru"
    assert "<html" in (tmp_path / "run.html").read_text("utf-8")
    assert len(run.timelines) == timeline
    for drawn in run.timelines:
        report = memory.history[drawn.step]
        assert drawn.peak() == report.peak_bytes
        assert drawn.ops == report.ops
        assert drawn.allowed == report.allowed


@pytest.mark.long
def test_the_run_file_of_a_run_that_died_can_be_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = """
        import os, spillway, torch
        model = torch.nn.Linear(4, 4)
        memory = spillway.manage(model, budget=None, report=spillway.ReportOptions(run_file=os.environ["RUN_FILE"]))
        for _ in range(2):
            with memory.step():
                model(torch.ones(4)).sum().backward()
        os._exit(1)
    """
    assert run_python(code, RUN_FILE=str(path)).returncode == 1
    assert [step.step for step in read_run(path).steps] == [0, 1]


# ---------------------------------------------------------------------- sizes known to fit


def test_a_size_known_to_fit_is_watched_without_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorEngine, "needs_no_watch", False)  # see test_unwatched_steps.py

    def trained(memory: spillway.Session | None, model: nn.Module, optimizer: Optimizer) -> Any:
        torch.manual_seed(3)
        for number in range(6):
            batch = batch_of(number, 96 if number != 4 else 48)
            if memory is None:
                step_of(model, optimizer, batch)
                continue
            with memory.step(batch), CountsOps() as counted:
                memory.log(loss=step_of(model, optimizer, batch))
            assert counted.ops > 0
        return state_of(model, optimizer)

    plain = network()
    expected = trained(None, plain, adam(plain))
    model = network()
    optimizer = adam(model)
    with spillway.manage(model, optimizer, budget="2 MiB", method="lru") as memory:
        assert difference(expected, trained(memory, model, optimizer)) is None
        # The first step makes the optimizer's state, the second is the first of its kind, 48 rows were not seen before.
        assert [report.managed for report in memory.history] == [True, True, False, False, True, False]
        managed, known = memory.history[1:3]
        for name in ("peak_bytes", "end_bytes", "signature", "ops", "moves", "drops"):
            assert getattr(known, name) == getattr(managed, name)
        assert set(known.logged) == {"loss"}


def test_a_size_that_no_longer_fits_comes_back_under_management() -> None:
    model = network()
    optimizer = adam(model)
    kept: list[Tensor] = []
    with spillway.manage(model, optimizer, budget="900 KiB", method="lru") as memory:
        for number in range(8):
            batch = batch_of(number, 96 if number != 4 else 128)
            with memory.step(batch):
                step_of(model, optimizer, batch)
                if number == 4:
                    kept = [torch.ones(64, 1024) for _ in range(2)]
        assert [report.managed for report in memory.history[2:]] == [False, False, True, True, True, True]
        assert [report.peak_bytes for report in memory.history if report.peak_bytes > memory.allowed] == []
        assert all(bool((tensor == 1).all()) for tensor in kept)
        assert sum(report.moves for report in memory.history[5:]) > 0


def test_a_step_that_also_updates_is_not_taken_for_one_that_only_accumulates() -> None:
    def accumulate(memory: spillway.Session, model: nn.Module, optimizer: Optimizer) -> None:
        for number in range(12):
            with memory.step(batch_of(number, 16)):
                model(batch_of(number, 16)).square().mean().backward()
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    with spillway.manage(model, optimizer, budget=None, report=spillway.ReportOptions(timeline=True)) as tracking:
        accumulate(tracking, model, optimizer)
    peaks = [report.peak_bytes for report in tracking.history]
    only_accumulating, updating = max(peaks[8:11]), peaks[11]
    assert only_accumulating < updating
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    budget = (only_accumulating + updating) // 2
    with spillway.manage(model, optimizer, budget=budget, method="keep-all") as memory:
        accumulate(memory, model, optimizer)
        for report in memory.history[3::4]:
            assert report.managed
            assert report.peak_bytes <= budget


def test_what_a_step_without_recipes_left_behind_takes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "for_session", lambda: None)  # to the byte: what ops take for themselves comes on top
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    bytes_of_weights = 8 * 4 * WIDTH * WIDTH

    def step(memory: spillway.Session, extra: int) -> bool:
        batch = torch.ones(512, WIDTH)
        with memory.step(batch):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            memory.kept = [torch.ones(extra)] if extra else []  # type: ignore[attr-defined]
        return memory.history[-1].managed

    with spillway.manage(model, optimizer, budget=None, report=spillway.ReportOptions(timeline=True)) as tracking:
        for _ in range(3):
            step(tracking, 0)
        peak = tracking.history[-1].peak_bytes
    assert peak > bytes_of_weights * 3
    model.zero_grad()
    with spillway.manage(model, optimizer, budget=peak + 1000, method="keep-all") as memory:
        assert [step(memory, 0) for _ in range(4)] == [True, False, False, False]
        with memory.step(torch.ones(3)):
            memory.kept = [torch.ones(bytes_of_weights // 8)]  # type: ignore[attr-defined]
        assert step(memory, 0)
        assert memory.history[-1].moves > 0


# ---------------------------------------------------------------------- several of everything


def test_two_sessions_one_after_the_other_and_two_models_in_one() -> None:
    def play(sessions: bool) -> Any:
        torch.manual_seed(0)
        models = [network(), network()]
        optimizers = [adam(model) for model in models]
        torch.manual_seed(1)
        for turn in range(2):
            if not sessions:
                for number in range(2):
                    for model, optimizer in zip(models, optimizers, strict=True):
                        train(model, optimizer, number + turn)
                continue
            with spillway.manage(models, optimizers, budget="700 KiB") as memory:
                for number in range(2):
                    with memory.step():
                        for model, optimizer in zip(models, optimizers, strict=True):
                            train(model, optimizer, number + turn)
                assert sum(report.moves + report.drops for report in memory.history) > 0
                assert max(report.peak_bytes for report in memory.history) <= memory.allowed
        return state_of(models, optimizers)

    assert difference(play(sessions=False), play(sessions=True)) is None


def test_two_open_sessions_take_turns_on_one_model() -> None:
    def play(budgets: tuple[str, ...]) -> Any:
        model = network()
        optimizer = adam(model)
        torch.manual_seed(1)
        sessions = [spillway.manage(model, optimizer, budget=budget, method="lru") for budget in budgets]
        for number in range(6):
            if sessions:
                with sessions[number % len(sessions)].step():
                    train(model, optimizer, number)
            else:
                train(model, optimizer, number)
        for session in sessions:
            session.close()
        return state_of(model, optimizer)

    assert difference(play(()), play(("380 KiB", "400 KiB"))) is None


def test_closing_leaves_torch_and_the_process_as_they_were() -> None:
    def world() -> tuple[Any, ...]:
        names = {name: value for name, value in vars(torch.Tensor).items() if callable(value)}
        return names, torch.to_dlpack, sorted(os.listdir("/proc/self/fd")), threading.active_count()

    before = world()
    model = network()
    memory = spillway.manage(model, budget="380 KiB")
    second = spillway.manage(model, budget="380 KiB")
    with memory.step():
        model(batch_of(0)).sum().backward()
    assert torch.Tensor.numpy is not before[0].get("numpy")
    memory.close()
    memory.close()
    second.close()
    assert world() == before


@pytest.mark.parametrize("method", ["lru", "window"])
def test_tensors_may_die_while_a_session_is_closed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another thread, or a collection of garbage, drops them."""
    held = [torch.rand(16) for _ in range(8)]

    class Last:
        def __del__(self) -> None:
            held.clear()

    model = network()
    memory = spillway.manage(model, budget="380 KiB", method=method)
    with memory.step():
        held.append(torch.rand(16))
        (model(batch_of(0)).sum() + sum(one.sum() for one in held)).backward()
    engine = memory._engine
    assert len(engine.table) > len(held)
    leave = engine._leave_the_file

    def leaves() -> None:
        leave()
        next(iter(engine.table.values())).handle = Last()

    monkeypatch.setattr(engine, "_leave_the_file", leaves)
    memory.close()
    assert not held
    assert engine.backend.tier.closed
