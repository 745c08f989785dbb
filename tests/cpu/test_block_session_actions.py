"""Sessions that do something else with every block than recompute it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from spillway.errors import BudgetError, BudgetInfeasible, SpillDirectoryError, UsageError
from spillway.methods import Action, Checkpoint
from spillway.methods.actions import LOSSLESS
from spillway.session import block_session
from spillway.session.needs import Call, Rise, recomputing
from spillway.session.watch import StepWatch
from spillway.tiers.disk import DiskTier
from spillway.units import MiB
from tests.cpu.test_block_session import Training, managed, run

ACTIONS = tuple(action for action in LOSSLESS if action is not Action.KEEP)
LOSSY = tuple(action for action in Action if action.lossy)


def trained(action: Action, budget: Any = "1GiB", **options: Any) -> tuple[list[bytes], list[spillway.StepReport]]:
    training = Training()
    options = {"report": spillway.ReportOptions(timeline=True)} | options
    with managed(training, budget, Checkpoint(action), **options) as memory:
        return run(training, memory), memory.history


@pytest.fixture(scope="module")
def most() -> int:
    """Bytes at the peak with everything kept."""
    training = Training()
    with managed(training, None, report=spillway.ReportOptions(timeline=True)) as memory:
        run(training, memory)
    return max(report.peak_bytes for report in memory.history)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("action", ACTIONS)
def test_the_bits_are_the_plain_ones_and_less_is_held(action: Action, most: int) -> None:
    found, reports = trained(action)
    assert found == run(Training(), None)
    assert max(report.peak_bytes for report in reports) < (0.95 if action is Action.OFFLOAD else 0.85) * most
    for report in reports:
        assert (report.bytes_out > 0) == action.moves
        assert (report.bytes_in > 0) == action.moves
        assert report.recomputed_blocks == (4 if action.recomputes else 0)
        assert (report.stall_seconds > 0) <= action.moves


@pytest.mark.long
def test_what_is_offloaded_is_smaller_where_only_inputs_are() -> None:
    (_, inputs), (_, everything) = trained(Action.RECOMPUTE_OFFLOADED), trained(Action.OFFLOAD)
    assert 0 < inputs[-1].bytes_out < everything[-1].bytes_out


def test_inputs_that_others_have_in_memory_when_they_are_wanted_do_not_come_from_the_disk() -> None:
    """They would lie there twice."""

    def peak(action: Action) -> tuple[bytes, int]:
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))] * 4
        layers = [layer for block in blocks for layer in (torch.nn.Tanh(), block)]  # which saves what it makes
        model, x = torch.nn.Sequential(*layers), torch.randn(2048, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = spillway.BlockOptions(names=["1"])
        with spillway.manage(model, optimizer, budget="1GiB", method=Checkpoint(action), blocks=names) as memory:
            for _ in range(3):
                with memory.step(x):
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        report = memory.history[-1]
        assert (report.bytes_out > 0, report.bytes_in) == (action.moves, 0)
        return loss.detach().numpy().tobytes(), report.peak_bytes

    (plain, least), (found, most) = peak(Action.RECOMPUTE), peak(Action.RECOMPUTE_OFFLOADED)
    assert found == plain
    assert most <= least


@pytest.mark.long
def test_copies_ahead_give_way_to_the_budget() -> None:
    _, reports = trained(Action.OFFLOAD)
    budget = int(0.75 * max(report.peak_bytes for report in reports))
    found, reports = trained(Action.OFFLOAD, budget)
    assert found == run(Training(), None)
    assert max(report.peak_bytes for report in reports) <= budget


def test_the_spill_file_goes_where_it_is_told_to_and_leaves_nothing(tmp_path: Path) -> None:
    _, reports = trained(Action.OFFLOAD, spill=spillway.SpillOptions(directory=tmp_path))
    assert reports[-1].bytes_out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("action", [Action.KEEP, "offload", None])
def test_only_actions_that_save_memory_are_taken(action: Any) -> None:
    with pytest.raises(UsageError, match=r"Checkpoint does one of Action\.RECOMPUTE, .*; got "):
        Checkpoint(action)


def test_a_host_budget_is_for_what_is_moved_on_cuda() -> None:
    training = Training()
    with pytest.raises(BudgetError, match="moves nothing"):
        managed(training, "1GiB", "checkpoint", spill=spillway.SpillOptions(host_budget="1GiB"))
    with pytest.raises(BudgetError, match="on the CPU goes to disk"):
        managed(training, "1GiB", Checkpoint(Action.OFFLOAD), spill=spillway.SpillOptions(host_budget="1GiB"))


@pytest.mark.parametrize("action", LOSSY)
def test_a_session_quantizes_only_where_it_is_allowed_to(action: Action) -> None:
    training = Training()
    with pytest.raises(
        UsageError, match=rf"'checkpoint' is to {action.value} \(.*\), in 4 bits .* with blocks=BlockOptions.lossy=True"
    ):
        managed(training, "1GiB", Checkpoint(action))
    assert run(training, None) == run(Training(), None), "nothing was begun"


@pytest.mark.long(but=1)
@pytest.mark.parametrize("action", LOSSY)
def test_lossy_training_holds_less_and_its_losses_are_near_the_plain_ones(action: Action, most: int) -> None:
    plain, (found, reports) = run(Training(), None), trained(action, blocks=spillway.BlockOptions(lossy=True))
    count = len(Training().batches)
    losses, expected = (
        [torch.frombuffer(bytearray(one), dtype=torch.float32) for one in all[:count]] for all in (found, plain)
    )
    assert torch.equal(losses[0], expected[0]), "the first forward is the plain one"
    assert not torch.equal(losses[-1], expected[-1])
    assert all(abs(float(one / other) - 1) < 0.02 for one, other in zip(losses, expected, strict=True))
    assert found[-1] == plain[-1], "the stream of random numbers"
    assert max(report.peak_bytes for report in reports) < 0.85 * most
    for report in reports:
        assert (report.bytes_out > 0) == (report.bytes_in > 0) == action.moves
        assert report.recomputed_blocks == (4 if action.recomputes else 0)


@pytest.mark.long
def test_the_same_seed_trains_to_the_same_bits_twice_in_as_many_bits_as_are_asked_for() -> None:
    def once(bits: int) -> list[bytes]:
        training = Training()
        with managed(
            training, "1GiB", Checkpoint(Action.COMPRESS, bits=bits), blocks=spillway.BlockOptions(lossy=True)
        ) as memory:
            return run(training, memory)

    assert once(4) == once(4)
    assert once(4) != once(8)
    with pytest.raises(UsageError, match="2, 4 or 8 bits; got bits=5"):
        Checkpoint(Action.COMPRESS, bits=5)


def test_lossy_is_a_permission_and_changes_nothing_else() -> None:
    found, _ = trained(Action.RECOMPUTE, blocks=spillway.BlockOptions(lossy=True))
    assert found == run(Training(), None)


class Residual(torch.nn.Module):
    """Of what its blocks save, results of convolutions are a large part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*self._layers(), *self._layers()) for _ in range(4))

    def _layers(self) -> list[torch.nn.Module]:
        return [torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3))


@pytest.mark.long(but=1)
@pytest.mark.parametrize("share", [0.35, 0.5, 0.65, 0.8])
def test_blocks_hold_results_only_as_far_as_every_other_can_be_recomputed_beside_them(share: float) -> None:
    def steps(budget: int | None, method: str | Checkpoint) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model, losses = Residual(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            for x in torch.randn(4, 12, 3, 24, 24):
                with memory.step(x):
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    losses.append(loss.item())
        return losses, max(report.peak_bytes for report in memory.history)

    plain, most = steps(None, "keep-all")
    budget = int(share * most)
    try:
        losses, peak = steps(budget, Checkpoint(Action.SELECTIVE))
    except BudgetInfeasible as refusal:
        assert refusal.exact
        budget = refusal.smallest_budget
        losses, peak = steps(budget, Checkpoint(Action.SELECTIVE))
    assert losses == plain
    assert peak <= budget


def test_what_recomputing_takes_is_told_once_where_there_is_room_for_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Call] = []

    def telling(call: Call, *rest: Any, **options: Any) -> Rise | None:
        told.append(call)
        return recomputing(call, *rest, **options)

    monkeypatch.setattr(block_session, "recomputing", telling)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with spillway.manage(model, optimizer, budget="1GiB", method=Checkpoint(Action.SELECTIVE)) as memory:
        for side in (16, 18, 12, 20, 20, 24):
            with memory.step(x := torch.ones(4, 3, side, side)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    assert len(told) == 1


class Uneven(torch.nn.Module):
    """A small block, then one that saves much more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Wide(1), Wide(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Wide(torch.nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for _ in range(self.times):
            y = torch.tanh(y)
        return y


def uneven_peaks(budget: Any, monkeypatch: pytest.MonkeyPatch, *, late: bool) -> list[int]:
    """Of steps whose copies are made at once, or, from the second step on, not before compute waits for one."""
    torch.manual_seed(0)
    model, x, here = Uneven(), torch.randn(4096, 64), threading.current_thread()
    fill, start_write, wait = DiskTier._fill, DiskTier.start_write, threading.Condition.wait
    gate = threading.Event()
    gate.set()

    def filling(*args: Any) -> None:
        gate.wait()
        fill(*args)

    def starting(*args: Any) -> Any:
        slot = start_write(*args)
        if not late and slot.writing is not None:
            slot.writing.result()
        return slot

    def opening(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is here:
            gate.set()
        return wait(condition, timeout)

    monkeypatch.setattr(DiskTier, "_fill", filling)
    monkeypatch.setattr(DiskTier, "start_write", starting)
    monkeypatch.setattr(threading.Condition, "wait", opening)
    with spillway.manage(
        model,
        budget=budget,
        method=Checkpoint(Action.OFFLOAD),
        blocks=spillway.BlockOptions(names=["blocks.0", "blocks.1"]),
    ) as memory:
        for number in range(3):
            if late and number:
                gate.clear()
            with memory.step(x):
                model(x).square().mean().backward()
            gate.set()
            model.zero_grad()
    assert all(report.peak_measured for report in memory.history)
    return [report.peak_bytes for report in memory.history]


def test_a_slower_disk_in_later_steps_is_seen_and_makes_no_step_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        freely = uneven_peaks("1GiB", patch, late=True)
    with monkeypatch.context() as patch:
        at_once = uneven_peaks("1GiB", patch, late=False)
    assert max(freely) >= max(at_once)
    budget = max(at_once) + 2 * MiB
    assert max(uneven_peaks(budget, monkeypatch, late=True)) <= budget


def test_how_it_is_spilled_is_said_and_where_before_any_step(tmp_path: Path) -> None:
    training = Training()
    with pytest.raises(UsageError, match="takes 'buffered' or 'direct'"):
        managed(training, "1GiB", Checkpoint(Action.OFFLOAD), spill=spillway.SpillOptions(io="nonsense"))
    with pytest.raises(SpillDirectoryError):
        managed(training, "1GiB", Checkpoint(Action.OFFLOAD), spill=spillway.SpillOptions(directory=tmp_path / "none"))


@pytest.mark.long
def test_the_run_file_tells_the_action(tmp_path: Path) -> None:
    trained(Action.SELECTIVE, report=spillway.ReportOptions(run_file=tmp_path / "run.jsonl"))
    assert '"action":"selective"' in (tmp_path / "run.jsonl").read_text("utf-8").splitlines()[0].replace(": ", ":")


@pytest.mark.long
@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.COMPRESS_OFFLOADED])
def test_copies_that_compute_waits_for_never_run_beside_it(action: Action, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained_so(*, waits: bool) -> tuple[list[bytes], list[int], list[int]]:
        """The result, bytes that were leaving whenever a block began or was reached, and reads begun ahead."""
        leaving: list[int] = []
        ahead: list[int] = []
        start_read = DiskTier.start_read

        def counted(tier: DiskTier, slot: Any, address: int) -> Any:
            ahead.append(address)
            return start_read(tier, slot, address)

        monkeypatch.setattr(DiskTier, "start_read", counted)
        training = Training()
        with managed(
            training, "1GiB", Checkpoint(action, waits=waits), blocks=spillway.BlockOptions(lossy=action.lossy)
        ) as memory:
            make_room = StepWatch._make_room

            def looked(watch: StepWatch, *args: Any, **kwargs: Any) -> None:
                leaving.append(watch._engine.leaving_bytes)
                make_room(watch, *args, **kwargs)

            monkeypatch.setattr(StepWatch, "_make_room", looked)
            found = run(training, memory)
            monkeypatch.undo()
        return found, leaving, ahead

    found, leaving, ahead = trained_so(waits=True)
    assert leaving, "the seams were passed"
    assert sum(leaving) == len(ahead) == 0
    beside, _, ahead = trained_so(waits=False)
    assert ahead, "else they do"
    assert found == beside


def test_compute_waits_only_where_something_moves() -> None:
    with pytest.raises(UsageError, match=r"Action\.RECOMPUTE moves nothing"):
        Checkpoint(waits=True)
    assert Checkpoint(Action.OFFLOAD, waits=True).in_header() == {"action": "offload", "waits": True}
    assert Checkpoint(Action.OFFLOAD, waits=True).fresh(batched=True).action_options[Action.OFFLOAD].waits
