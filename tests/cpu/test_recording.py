"""A recorded step is the step that runs anyway: same bits, same bytes as the engine counts, and nothing left behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import spillway
from spillway.errors import UsageError
from spillway.ir import Kind, Op, Phase, Plan, Step, verify
from spillway.recording.steps import record_step
from spillway.units import MiB
from spillway.workloads import Workload, get
from spillway.workloads.recorded import record
from spillway.workloads.workload import Batch, seed_everything

SMALL: dict[str, Callable[[], Workload]] = {
    "deep-narrow": partial(get, "deep-narrow", width=16, layers=12),
    "resnet": partial(get, "resnet", width=4, blocks=(1, 1, 1, 1), batch=2),
    "stdlib-lm": partial(get, "stdlib-lm", width=32, layers=2, heads=2, batch=2, longest=32, grouped=1),
}


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def state_of(workload: Workload) -> list[torch.Tensor]:
    states = [
        value for optimizer in workload.optimizers for state in optimizer.state.values() for value in state.values()
    ]
    tensors = [*workload.model.parameters(), *workload.model.buffers(), torch.get_rng_state()]
    return [value.clone() for value in [*tensors, *states] if isinstance(value, torch.Tensor)]


def ops_named(step: Step, name: str) -> list[Op]:
    return [op for op in step.ops if op.name == name]


@pytest.mark.parametrize("name", SMALL)
def test_the_peak_and_the_ops_are_those_that_the_engine_counts_when_it_keeps_all(name: str) -> None:
    recorded = record(SMALL[name]())
    workload = SMALL[name]()
    batch = next(iter(workload.batches(1)))
    with spillway.manage(workload.model, workload.optimizers, budget=None, method="keep-all") as memory:
        for _ in range(2):
            with memory.step(batch):
                workload.train_step(batch)
    report = memory.history[1]
    assert abs(recorded.step.plain_peak() - report.peak_bytes) <= max(MiB // 64, report.peak_bytes // 1000)
    assert len(recorded.step.ops) == report.ops


@pytest.mark.long(but=2)
@pytest.mark.parametrize("name", SMALL)
def test_fake_tensors_tell_the_very_same_step(name: str) -> None:
    """Real ones in a dispatch mode, where torch takes the same formulas as for fake ones: a mask of attention is added
    into a new tensor."""
    with Passing():
        real = record(SMALL[name]())
    fake = record(SMALL[name], fake=True)
    assert fake.step.digest() == real.step.digest()
    assert fake.step.saved == real.step.saved
    assert [op.flops for op in fake.step.ops] == [op.flops for op in real.step.ops]
    assert [op.traffic for op in fake.step.ops] == [op.traffic for op in real.step.ops]
    assert [op.module for op in fake.step.ops] == [op.module for op in real.step.ops]
    assert {op.seconds for op in fake.step.ops} == {None}
    assert all(op.seconds is not None and op.seconds > 0 for op in real.step.ops)


@pytest.mark.parametrize("name", SMALL)
def test_recorded_steps_train_bit_for_bit_as_plain_ones(name: str) -> None:
    plain, watched = SMALL[name](), SMALL[name]()
    batch = next(iter(plain.batches(1)))
    seed_everything(5)
    for _ in range(4):
        plain.train_step(batch)
    expected = state_of(plain)
    seed_everything(5)
    record(watched, timed_steps=2)
    assert all(map(torch.equal, expected, state_of(watched)))
    assert len(expected) == len(state_of(watched))


def test_nothing_is_left_behind() -> None:
    workload = SMALL["stdlib-lm"]()
    hooks = [
        key for module in workload.model.modules() for key, value in vars(module).items() if "hook" in key and value
    ]
    before = [dict(nn.modules.module._global_forward_hooks), dict(nn.modules.module._global_forward_pre_hooks)]
    record(workload)
    assert not hooks
    assert not [k for m in workload.model.modules() for k, value in vars(m).items() if "hook" in k and value]
    assert before == [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    of_optimizers = sys.modules["torch.optim.optimizer"]
    assert not of_optimizers._global_optimizer_pre_hooks
    assert not of_optimizers._global_optimizer_post_hooks
    assert torch._C._len_torch_dispatch_stack() == 0
    assert gc.isenabled()


def test_a_step_that_fails_leaves_nothing_behind_either() -> None:
    calls = []

    def step() -> None:
        calls.append(None)
        torch.ones(2).relu()
        if len(calls) == 2:
            raise KeyError("as the user raised it")

    with pytest.raises(KeyError, match="as the user raised it"):
        record_step(step)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not nn.modules.module._global_forward_hooks
    assert gc.isenabled()


def test_what_is_said_of_garbage_within_a_step_holds_afterwards() -> None:
    threshold = gc.get_threshold()
    try:
        record_step(gc.disable)
        assert not gc.isenabled()
        assert gc.get_threshold() == threshold
    finally:
        gc.enable()


def small_step() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(3, 4)

    def step() -> None:
        model(batch).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, batch, step


def recorded_small_step() -> Step:
    model, optimizer, batch, step = small_step()
    return record_step(step, models=model, optimizers=optimizer, batch={"x": batch})


def test_storages_have_the_names_and_the_kinds_that_the_model_gives_them() -> None:
    storages = recorded_small_step().storages
    named = {storage.name: storage.kind for storage in storages if storage.name}
    parameters = [f"{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")]
    assert named == {
        "x": Kind.INPUT,
        **dict.fromkeys(parameters, Kind.PARAMETER),
        **{f"{name}.grad": Kind.GRADIENT for name in parameters},
        **{f"{name}.{key}": Kind.OPTIMIZER_STATE for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")},
    }
    at_start = {storage.name for storage in storages if storage.present_at_start}
    assert at_start == {name for name in named if not name.endswith(".grad")}
    assert all(storage.present_at_end for storage in storages if storage.present_at_start)
    assert not any(storage.present_at_end for storage in storages if storage.kind is Kind.GRADIENT)


def test_ops_belong_to_a_phase_and_to_a_module_in_the_backward_too() -> None:
    step = recorded_small_step()
    modules = {(op.phase, op.name, op.module) for op in step.ops}
    assert (Phase.FORWARD, "aten.addmm.default", "0") in modules
    assert (Phase.FORWARD, "aten.relu.default", "1") in modules
    assert (Phase.FORWARD, "aten.addmm.default", "2") in modules
    assert (Phase.BACKWARD, "aten.mm.default", "2") in modules
    assert (Phase.BACKWARD, "aten.threshold_backward.default", "1") in modules
    assert (Phase.BACKWARD, "aten.mm.default", "0") in modules
    assert {op.module for op in step.ops if op.phase is Phase.OPTIMIZER} == {""}
    phases = [op.phase for op in step.ops]
    assert [phase for phase, _ in groupby(phases)] == list(Phase)
    clipping = [op.phase for op in step.ops if op.name.startswith("aten.linalg_vector_norm")]
    assert clipping == [Phase.OPTIMIZER] * 5


def test_what_autograd_saves_is_known_by_value_and_is_an_activation() -> None:
    step = recorded_small_step()
    saved = [step.storages[step.values[value].storage] for value in step.saved]
    assert [storage.name or storage.kind.value for storage in saved] == ["x", "activation", "2.weight", "activation"]
    assert {s.nbytes for s in step.storages if s.kind is Kind.ACTIVATION} == {3 * 8 * 4, 3 * 2 * 4, 4}
    relu = ops_named(step, "aten.relu.default")[0]
    assert saved[1].id == step.values[relu.creates[0]].storage


def test_an_in_place_op_makes_the_next_version_and_a_view_is_no_op() -> None:
    def step() -> None:
        x = torch.zeros(4)
        x.view(2, 2)[0].add_(1).mul_(2)

    recorded = record_step(step)
    assert "\n".join(str(recorded).splitlines()[2:]).replace("\n", ";").count("->") == 3
    names = [(op.name, op.reads, op.creates) for op in recorded.ops]
    assert names == [
        ("aten.zeros.default", (), (0,)),
        ("aten.add_.Tensor", (0,), (1,)),
        ("aten.mul_.Tensor", (1,), (2,)),
    ]
    assert [value.version for value in recorded.values] == [0, 1, 2]


def test_running_statistics_are_written_and_not_read_in_training() -> None:
    model = nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    training = record_step(lambda: model(x), models=model, batch=x)
    op = next(op for op in training.ops if "batch_norm" in op.name)
    names = {training.storages[training.values[value].storage].name for value in op.reads}
    written = {training.storages[training.values[value].storage].name for value in op.creates}
    assert names == {"", "weight", "bias"}
    assert {"running_mean", "running_var"} <= written
    model.eval()
    evaluated = record_step(lambda: model(x), models=model, batch=x)
    op = next(op for op in evaluated.ops if "batch_norm" in op.name)
    read = {evaluated.storages[evaluated.values[value].storage].name for value in op.reads}
    assert {"running_mean", "running_var"} <= read


def test_what_comes_from_outside_within_the_step_is_created_by_an_op_that_cannot_be_replayed() -> None:
    kept = torch.ones(8)  # seen in the step before, so it is there when the step begins

    def step() -> torch.Tensor:
        return torch.from_numpy(numpy.ones(16, dtype=numpy.float32)).sum() * kept

    recorded = record_step(step)
    outside = ops_named(recorded, "spillway.outside")
    assert [(op.replayable, recorded.storages[recorded.values[op.creates[0]].storage].nbytes) for op in outside] == [
        (False, 64)
    ]
    assert [storage.nbytes for storage in recorded.storages if storage.present_at_start] == [32]


def test_random_ops_are_seeded_and_ops_that_are_never_replayed_are_marked() -> None:
    def step() -> None:
        nn.functional.dropout(torch.ones(8), 0.5)
        torch.empty(2).resize_(64)

    recorded = record_step(step)
    assert {op.name: op.seeded for op in recorded.ops if "bernoulli" in op.name or "dropout" in op.name} != {}
    assert all(op.seeded for op in recorded.ops if "bernoulli" in op.name)
    resize = ops_named(recorded, "aten.resize_.default")[0]
    assert not resize.replayable
    assert [recorded.storages[recorded.values[v].storage].nbytes for v in resize.creates] == [8, 256]


def test_a_storage_dies_at_the_op_after_which_it_died() -> None:
    def step() -> None:
        x = torch.ones(256)
        y = x + 1
        del x
        z = y + 1
        del y
        z.add_(1)

    recorded = record_step(step)
    assert [(s.alive_from, s.alive_until) for s in recorded.storages] == [(0, 2), (1, 3), (2, 4)]
    assert recorded.plain_peak() == 2048


def test_checkpointed_ops_run_again_in_the_backward_and_keep_their_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4, requires_grad=True)
    recorded = record_step(lambda: checkpoint(model, x, use_reentrant=False).sum().backward(), models=model)
    again = [op.module for op in ops_named(recorded, "aten.tanh.default") if op.phase is Phase.BACKWARD]
    assert again == ["1"]


def test_ops_that_were_timed_again_have_the_median_of_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    clock = [0.0]

    def now() -> float:
        clock[0] += [0, 0, 0, 5, 0, 1, 0, 3][next(ticks) % 8]
        return clock[0]

    monkeypatch.setattr("spillway.recording.recorder.time.perf_counter", now)
    recorded = record_step(lambda: torch.ones(2), timed_steps=2)
    assert [op.seconds for op in recorded.ops] == [3]


def test_fake_tensors_refuse_a_step_that_needs_content_and_a_workload_that_is_there() -> None:
    def peeking(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0]).sum()  # type: ignore[index]
        return loss if loss.item() else loss * 2

    def build() -> Workload:
        model = nn.Linear(2, 2)
        return Workload(
            name="peeks", model=model, optimizers=(), batches=lambda steps: iter([(torch.ones(1, 2),)]), loss=peeking
        )

    with pytest.raises(UsageError, match="needs to know what a tensor holds"):
        record(build, fake=True)
    with pytest.raises(UsageError, match="has to be built among them"):
        record(build(), fake=True)
    empty = Workload(name="empty", model=nn.Linear(1, 1), optimizers=(), batches=lambda steps: iter(()), loss=peeking)
    with pytest.raises(UsageError, match="The workload empty has no batches"):
        record(empty)


def test_the_public_record_takes_a_name_its_options_or_a_workload() -> None:
    options: dict[str, Any] = {"width": 8, "layers": 3}
    by_name = spillway.record("deep-narrow", fake=True, seed=3, **options)
    assert (by_name.workload, by_name.facts["seed"], by_name.facts["options"]) == ("deep-narrow", 3, options)
    built = spillway.record(get("deep-narrow", seed=3, **options))
    assert built.step.digest() == by_name.step.digest()
    with pytest.raises(TypeError, match="only for a workload by name"):
        spillway.record(get("deep-narrow", **options), width=8)
    with pytest.raises(UsageError, match="There is no workload 'fly'"):
        spillway.record("fly")
    with pytest.raises(UsageError, match="recorded, or what builds one, and not 5"):
        spillway.record(lambda: 5)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="are 0 or more; got warm_up=1 and timed_steps=-1"):
        spillway.record("deep-narrow", timed_steps=-1)


def test_the_recorded_step_verifies_with_an_empty_plan_within_its_peak() -> None:
    step = record(SMALL["resnet"], fake=True).step
    peak = step.plain_peak()
    verify(Plan(step=step.digest(), allowed=peak, projected=peak, gaps=()), step, peak)


def test_two_recordings_are_the_same() -> None:
    one, two = (record(SMALL["stdlib-lm"], fake=True) for _ in range(2))
    assert one == two


def test_ops_on_lists_count_the_versions_of_what_they_write_as_plain_ones_do() -> None:
    def versions(recorded: bool) -> list[int]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

        def step() -> None:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if recorded:
            record_step(step, models=model, optimizers=optimizer)
        else:
            step()
            step()
        return [parameter._version for parameter in model.parameters()]

    assert versions(recorded=True) == versions(recorded=False)


def test_a_step_of_a_session_is_not_recorded() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with spillway.manage(model, optimizer, budget=None, method="keep-all") as memory:

        def step() -> None:
            with memory.step(None):
                model(torch.ones(2, 3))

        with memory.step(None), pytest.raises(UsageError, match="outside of it"):
            record_step(lambda: model(torch.ones(2, 3)))
        with pytest.raises(UsageError, match="ran within"):
            record_step(step)
