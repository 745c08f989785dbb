"""Recorded steps with compression and second runs in them: they are steps, and their bytes are the block engine's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spillway.advisor.simulated import SimulatedBench, Steps
from spillway.advisor.ways import WAYS
from spillway.calibration.named_device import device_of
from spillway.costs import step_seconds, timed
from spillway.costs.packed_bytes import packed_bytes, quantized_bytes
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.errors import UsageError
from spillway.ir import Op, Phase, Plan, Recorded, Step, read_step, verify, write_step
from spillway.ir.account import account
from spillway.ir.lives import lives_of
from spillway.memory.budget import UNLIMITED
from spillway.methods import METHODS, AbstractPlanner, Problem, Swap
from spillway.methods.actions import Action, ActionOptions
from spillway.methods.checkpoint import CheckpointPlanner
from spillway.methods.graph_rewrite import PACK, UNPACK, compressed, run_twice
from spillway.recording.steps import record_step
from spillway.workloads import get
from spillway.workloads.recorded import record
from tests.pure.block_steps import block_names

V100 = device_of("v100-pcie")


class Block(nn.Module):
    """What saves a ReLU's result, a dropout's mask, a normalization's statistics and views of one storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.inner = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.one(x).chunk(3, -1)
        y = self.inner(F.relu(a) * torch.tanh(b) + c)
        return self.norm(x + F.dropout(self.two(y), 0.25))


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, width), nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def recorded() -> Step:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(48, 16)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(record_step(step, models=model, optimizers=optimizer, batch=batch), V100)


@pytest.fixture(scope="module")
def plain() -> Step:
    return recorded()


def runs(step: Step) -> None:
    """Nothing is gone in it, and it holds together."""
    peak = step.plain_peak()
    verify(Plan(step=step.digest(), allowed=peak, projected=peak, gaps=()), step, peak)


def packed_in(step: Step) -> tuple[int, int]:
    """Bytes of the storages that are packed, and of what becomes of them."""
    packs = of_name(step, PACK)

    def nbytes(values: Sequence[int]) -> int:
        return sum(step.storages[step.values[value].storage].nbytes for value in values)

    return sum(nbytes(op.reads) for op in packs), sum(nbytes(op.creates) for op in packs)


def of_name(step: Step, name: str) -> list[Op]:
    return [op for op in step.ops if op.name == name]


# ----------------------------------------------------------------------------------------------- compressed


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_bytes_are_those_that_the_block_engine_packs(plain: Step, bits: int) -> None:
    model = Model()
    names = block_names(plain)
    with BlockEngine(
        model,
        names,
        lossy=True,
        actions=lambda block, call: Action.COMPRESS,
        options={Action.COMPRESS: ActionOptions(bits=bits)},
    ) as engine:
        loss = model(torch.randn(48, 16)).square().mean()
        real = sum(report.packed_bytes for report in engine.calls)
        loss.backward()
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    assert packed_in(compressed(plain, bits=bits).step)[1] == real


def test_what_is_compressed_is_a_step_that_keeps_less(plain: Step) -> None:
    done = compressed(plain)
    runs(done.step)
    packs, unpacks = of_name(done.step, PACK), of_name(done.step, UNPACK)
    assert len(packs) == len(done.waiting)
    assert {op.phase for op in packs} == {Phase.FORWARD}
    assert {op.phase for op in unpacks} == {Phase.BACKWARD}
    full, packed = packed_in(done.step)
    assert 0 < packed < 0.135 * full
    assert len(done.step.ops) == len(plain.ops) + len(packs) + len(unpacks)
    kept = [op for op in done.step.ops if op.name not in (PACK, UNPACK)]
    assert [op.name for op in kept] == [op.name for op in plain.ops]


def test_blocks_pack_when_they_have_ended_and_unpack_before_the_first_op_that_reads(plain: Step) -> None:
    step = compressed(plain).step
    for op in of_name(step, PACK):
        inside = [one.number for one in step.ops if one.module.startswith(op.module) and one.phase is Phase.FORWARD]
        assert max(number for number in inside if step.ops[number].name != PACK) < op.number
    for op in of_name(step, UNPACK):
        (made,) = op.creates
        first = next(one for one in step.ops if made in one.reads)
        assert all(one.name == UNPACK for one in step.ops[op.number : first.number])


def test_in_full_it_is_gone_when_the_next_block_has_packed(plain: Step) -> None:
    step = compressed(plain).step
    backward = min(op.number for op in step.ops if op.phase is Phase.BACKWARD)
    for op in of_name(step, PACK):
        storage = step.storages[step.values[op.reads[0]].storage]
        outside = any(one.phase is Phase.BACKWARD and op.reads[0] in one.reads for one in step.ops)
        assert outside or op.number < storage.alive_until <= backward


def test_what_is_saved_outside_of_blocks_stays_in_full(plain: Step) -> None:
    step = compressed(plain).step
    outside = [saving.value for saving in plain.savings if saving.module in ("first", "last")]
    assert outside
    assert set(outside) <= set(step.saved)


def test_without_blocks_the_whole_forward_is_one() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    batch = torch.randn(32, 32)
    step = record_step(lambda: model(batch).square().mean().backward(), models=model, batch=batch)
    assert block_names(step) == []
    done = compressed(step)
    runs(done.step)
    assert packed_in(done.step)[0] > 0
    last = max(op.number for op in done.step.ops if op.phase is Phase.FORWARD and op.name != PACK)
    assert all(op.number > last for op in of_name(done.step, PACK))
    assert run_twice(step).step.ops == step.ops


def test_other_sizes_and_dtypes_are_left_alone() -> None:
    assert packed_bytes(1024, "float32", 4, two_values=False) == quantized_bytes(256, 4) == 8 + 128
    assert packed_bytes(1020, "float32", 4, two_values=False) is None
    assert packed_bytes(1024, "int64", 4, two_values=True) is None
    assert packed_bytes(4096, "float32", None, two_values=False) is None
    assert packed_bytes(4096, "float32", None, two_values=True) == 128
    assert packed_bytes(257, "bool", 4, two_values=False) == 33
    assert packed_bytes(514, "float16", 8, two_values=False) is None  # two groups of 256 take 528


# ----------------------------------------------------------------------------------------------- second runs


def test_second_runs_are_what_the_planner_of_checkpoints_replays(plain: Step) -> None:
    done = run_twice(plain)
    runs(done.step)
    plan = CheckpointPlanner().plan(Problem(step=plain, allowed=UNLIMITED, device=V100))
    homes = {gap.home for gap in plan.gaps}
    replayed = [op for home in homes for op in getattr(home, "ops", ())]
    names = sorted(op.name for op in done.step.ops)
    assert set(names) == {op.name for op in plain.ops}
    assert packed_in(done.step) == (0, 0)
    # The last block's result is saved by the head, and comes back nowhere.
    assert len(names) - len(plain.ops) == pytest.approx(len(replayed), abs=3)
    held = account(plain, plan.gaps, lives_of(plain)).peak
    assert done.step.plain_peak() == pytest.approx(held, rel=0.05)


def test_inputs_of_blocks_are_packed_and_read_by_the_second_runs_alone(plain: Step) -> None:
    done = run_twice(plain, bits=4)
    runs(done.step)
    assert len(of_name(done.step, PACK)) == len(of_name(done.step, UNPACK)) == 3
    assert packed_in(done.step) == (3 * 48 * 64 * 4, 3 * quantized_bytes(48 * 64, 4))
    assert packed_in(done.step)[1] < packed_in(compressed(plain).step)[1]


def test_ops_that_are_kept_do_not_run_again(plain: Step) -> None:
    def is_product(op: Op) -> bool:
        return op.name.startswith("aten.addmm")

    everything, selected = run_twice(plain), run_twice(plain, keeps=is_product)
    runs(selected.step)
    again = [sum(map(is_product, one.step.ops)) - sum(map(is_product, plain.ops)) for one in (everything, selected)]
    assert again[0] > 0
    assert again[1] == 0
    assert len(selected.waiting) > len(everything.waiting)


@pytest.mark.parametrize("rewrite", [compressed, run_twice, partial(run_twice, bits=4)])
def test_any_planner_can_work_on_the_result(plain: Step, rewrite: Callable[[Step], Any]) -> None:
    done = rewrite(plain)
    step = timed(replace(done.step, saved=done.waiting), V100)
    for planner in (Swap(), Swap(prefetched=True), METHODS["sqrt-n"].on_paper()):
        assert isinstance(planner, AbstractPlanner)
        plan = planner.plan(Problem(step=step, allowed=step.plain_peak(), device=V100))
        verify(plan, step, step.plain_peak())


def test_how_autograd_saved_has_to_be_known(plain: Step) -> None:
    for rewrite in (compressed, run_twice):
        with pytest.raises(UsageError, match="record it again"):
            rewrite(replace(plain, savings=()))
    with pytest.raises(UsageError, match="2, 4 or 8 bits"):
        compressed(plain, bits=3)


# ----------------------------------------------------------------------------------------------- the bench


def workload(size: int) -> Step:
    return record(partial(get, "deep-narrow", width=32, layers=4, batch=size), fake=True).step


def test_every_method_of_advise_is_simulated() -> None:
    bench = SimulatedBench("deep-narrow", Steps(workload, sizes=(8, 12, 20)), V100)
    trials = {name: bench.measure(name, 512) for name in WAYS}
    plain = trials["plain"]
    assert plain.seconds is not None
    for name, trial in trials.items():
        assert trial.peak is not None
        assert trial.seconds is not None
        assert sum(trial.by_kind.values()) == trial.peak
        assert trial.seconds >= plain.seconds
        assert name == "plain" or WAYS[name].action is not None
    assert {name for name in WAYS if WAYS[name].lossy} == {"compress", "compress-swap", "checkpoint-compress"}
    peaks = {name: trial.peak or 0 for name, trial in trials.items()}
    assert peaks["swap"] < peaks["plain"]
    assert peaks["compress-swap"] <= peaks["compress"] < peaks["plain"]


def test_a_derived_step_is_simulated_as_a_recorded_one() -> None:
    derived = SimulatedBench("deep-narrow", Steps(workload, sizes=(8, 12, 20)), V100)
    own = SimulatedBench("deep-narrow", Steps(workload, sizes=(32, 48, 64)), V100)
    for name in ("plain", "compress", "checkpoint-compress"):
        assert derived.measure(name, 64) == own.measure(name, 64)


def test_micro_batches_update_once() -> None:
    bench = SimulatedBench("deep-narrow", Steps(workload, sizes=(8, 12, 20)), V100)
    one, four = (bench.measure(name, 64) for name in ("plain-accumulated@64", "plain-accumulated@16"))
    plain, small = bench.measure("plain", 64), bench.measure("plain", 16)
    assert (one.peak, one.by_kind) == (plain.peak, plain.by_kind)
    assert one.seconds == pytest.approx(plain.seconds)
    assert (four.peak or 0) >= (small.peak or 0)
    assert (four.seconds or 0.0) < 4 * (small.seconds or 0.0)


def test_no_method_by_name_loses_bits_without_being_asked() -> None:
    assert not {name for name in METHODS if "compress" in name}
    assert step_seconds(run_twice(recorded()).step) > 0


def test_a_file_tells_how_autograd_saved(plain: Step, tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl"
    write_step(path, Recorded(step=plain, workload="blocks", facts={}))
    again = read_step(path).step
    assert again.savings == plain.savings
    assert compressed(again).step == compressed(plain).step
