"""Sessions in processes that train together. Many more programs, methods and budgets: `benchmarks/collectives.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import spillway
from spillway.errors import ModelError
from tests.cpu.process_judge import Group, group, judged, plainly
from tests.cpu.process_programs import Block, Communicating

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo"
)

RUNS = {
    "ddp": ("lru", "delta", "dtr", "checkpoint"),
    "ddp, views": ("dtr",),
    "ddp, fp16 in C++": ("delta",),
    "ddp, PowerSGD": ("lru",),
    "ddp, pressed": ("lru", "delta"),
    "all_reduce, parts": ("dtr",),
    "ring": ("lru",),
    "every kind": ("delta", "dtr"),
    "functional": ("dtr",),
    "between steps": ("lru",),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(2, tmp_path_factory.mktemp("two")) as processes:
        yield processes


@pytest.mark.long(but=5)
@pytest.mark.parametrize("program", RUNS)
def test_two_processes_train_as_they_do_without_a_session(two: Group, program: str) -> None:
    plain = plainly(two, program)
    verdicts = {method: judged(two, program, method, plain, 0.65) for method in RUNS[program]}
    assert {method: verdict.complaints for method, verdict in verdicts.items()} == {method: [] for method in verdicts}
    assert any(verdict.moves + verdict.drops for verdict in verdicts.values())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_a_collective_uses_stays_until_nobody_is_left_to_wait_for_it() -> None:
    with spillway.manage(nn.Linear(64, 64), budget="128KiB", method="lru") as memory:
        engine = memory._engine
        with memory.step():
            given, result = torch.ones(8192), torch.empty(4096)
            work: Any = distributed.reduce_scatter(result, [given[:4096]], async_op=True)
            sum(torch.ones(4096) for _ in range(4))
            assert len(engine.controller.flights) == 1
            assert not any(engine.find(tensor).value.absent for tensor in (given, result))
            work.wait()
            del work
            kept = [torch.ones(4096) for _ in range(5)]
            assert len(engine.controller.flights) == 0
            assert engine.find(given).value.absent
        assert torch.equal(result, given[:4096])
        assert len(kept) == 5


@pytest.mark.usefixtures("alone")
def test_methods_of_process_groups_are_as_they_were_when_the_last_session_has_closed() -> None:
    before = dict(vars(distributed.ProcessGroup)), vars(distributed.Work)["get_future"]
    with spillway.manage(nn.Linear(8, 8), budget="1MiB"):
        assert dict(vars(distributed.ProcessGroup)) != before[0]
    assert (dict(vars(distributed.ProcessGroup)), vars(distributed.Work)["get_future"]) == before


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("method", ["lru", "checkpoint"])
def test_what_nobody_manages_of_sharded_models_is_refused_with_a_sentence(method: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    spread = nn.Linear(8, 8)
    spread.weight = nn.Parameter(distribute_tensor(spread.weight, mesh, [Shard(0)]))
    for model in (spread, FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))):
        with pytest.raises(ModelError, match="shard it with fully_shard alone"):
            spillway.manage(model, budget="1MiB", method=method)
    for watching in ("lru", "delta", "window"):
        with pytest.raises(ModelError, match="methods that watch every op do not manage that"):
            spillway.manage(fully_shard(nn.Linear(8, 8)), budget="1MiB", method=watching)
    later = nn.Sequential(nn.Linear(8, 8))
    with spillway.manage(
        later,
        budget="1MiB",
        method=method,
        blocks=spillway.BlockOptions(names=["0"] if method == "checkpoint" else None),
    ) as memory:
        fully_shard(later)
        with pytest.raises(ModelError, match=r"shard the model before manage\(\)"), memory.step():
            raise AssertionError("the step began")


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_a_refusal_of_a_sharded_model_has_room_for_what_is_gathered_at_another_moment() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 8))
    for block in list(model)[:-1]:
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(64, 64)
    with (
        spillway.manage(model, budget="100KiB") as memory,
        pytest.raises(spillway.BudgetInfeasible) as raised, memory.step(x),
    ):  # fmt: skip
        model(x).square().mean().backward()
    assert raised.value.smallest_budget - raised.value.needed == (64 * 64 + 64) * 4


class Counted(Communicating):
    calls = 0

    def within(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().within(x)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", ["checkpoint", "mimose-published"])
def test_a_block_that_communicates_runs_once(method: str) -> None:
    model = nn.Sequential(Counted(16), Block(16), Counted(16))
    with spillway.manage(
        model, budget="1GiB", method=method, blocks=spillway.BlockOptions(names=["0", "1", "2"])
    ) as memory:
        for _ in range(2):
            x = torch.randn(8, 16)
            with memory.step(x):
                model(x).sum().backward()
    assert [model[0].calls, model[2].calls] == [2, 2]
    assert memory.history[0].recomputed_blocks == 1


@pytest.mark.long
def test_what_is_in_flight_and_not_held_is_told_by_these_programs(tmp_path: Path) -> None:
    """The planted fault: the engine forgets what is in flight."""
    with group(2, tmp_path) as processes:
        plain = plainly(processes, "all_reduce, pressed")
        assert judged(processes, "all_reduce, pressed", "lru", plain, 0.5).complaints == []
        assert judged(processes, "all_reduce, pressed", "lru", plain, 0.5, plant=True).complaints != []


@pytest.mark.long
@pytest.mark.parametrize("method", ["lru", "checkpoint"])
def test_where_one_rank_refuses_all_do_and_a_later_process_group_knows_nothing_of_it(two: Group, method: str) -> None:
    program = "ddp"
    plain = plainly(two, program)
    answers = two.ask(program=program, method=method, budget=[1 << 30, plain.peak // 8])
    assert answers[0] == answers[1]
    assert "refused" in answers[1]
    again = two.ask(program=program, method=method, budget=1 << 30)
    assert [answer["trace"] for answer in again] == [answer["trace"] for answer in plain.answers]


@pytest.mark.long
def test_a_refusal_inside_a_communication_hook_is_a_refusal(two: Group) -> None:
    plain = plainly(two, "ddp, PowerSGD")
    answers = two.ask(program="ddp, PowerSGD", method="lru", budget=int(0.4 * plain.peak))
    assert any("refused" in answer for answer in answers)
    assert not any("callback" in answer.get("error", "") for answer in answers)
