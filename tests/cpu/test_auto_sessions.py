"""Sessions of `auto`: mixtures, the budget, the bits; and models that have no blocks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import spillway
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import ModelError, SpillFullError
from spillway.methods import Action
from spillway.methods.auto import PROBES, TRIED, Auto
from spillway.native.arena import Arena, counts, reset_peaks
from spillway.session.auto_session import AutoSession
from spillway.session.block_session import BlockSession
from spillway.session.tensor_session import TensorSession
from spillway.tiers.disk import DiskTier
from tests.cpu.block_judge import judge, plainly
from tests.cpu.test_block_session import Training, run
from tests.cpu.unrepeated import UNREPEATED

EACH = spillway.ReportOptions(timeline=True)


def managed(training: Any, budget: Any, method: Any = "auto", **options: Any) -> Any:
    return spillway.manage(training.model, training.optimizer, budget=budget, method=method, **options)


@pytest.fixture(scope="module")
def plain() -> tuple[list[bytes], int, int]:
    """Bits, the bytes with which steps begin, and the peak with everything kept."""
    training = Training()
    with managed(training, None, "mimose", report=EACH) as memory:
        bits = run(training, memory)
    return bits, memory.history[-1].start_bytes, max(one.peak_bytes for one in memory.history)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("share", [0.2, 0.4, 0.7, 1.0])
def test_the_bits_are_the_plain_ones_and_the_budget_is_kept(share: float, plain: tuple[list[bytes], int, int]) -> None:
    bits, start, peak = plain
    budget = int(start + share * (peak - start))
    training = Training()
    with managed(training, budget, report=EACH) as memory:
        assert run(training, memory) == bits
    assert isinstance(memory._now, BlockSession)
    assert max(one.peak_bytes for one in memory.history) <= budget
    assert len(memory.history) == len(training.batches)


def test_the_first_steps_measure_and_later_ones_mix(plain: tuple[list[bytes], int, int], tmp_path: Any) -> None:
    _, start, peak = plain
    method = Auto()
    training = Training((64,) * 8)
    chosen: list[frozenset[Action]] = []
    begin = Auto.begin

    def told(self: Auto, size: Any, available: int) -> Any:
        decision = begin(self, size, available)
        chosen.append(
            frozenset({*decision.plan.actions, *([] if decision.plan.actions else [decision.plan.otherwise])})
        )
        return decision

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Auto, "begin", told)
        with managed(training, int(start + 0.5 * (peak - start)), method, report=EACH) as memory:
            run(training, memory)
    assert chosen[0] == {Action.RECOMPUTE}, "measured; the first one runs under the tensor engine and asks nobody"
    assert [probe in did for probe, did in zip(PROBES, chosen[1:], strict=False)] == [True, True]
    *_, expected, measured = memory.explanation
    assert expected.startswith("The step is expected to take ")
    followed = sum(one.projected_seconds > 0 for one in memory.history)
    assert measured.startswith("Of the seconds that plans expected ")
    assert f"median of {followed} steps" in measured
    assert any("blocks.0" in sentence for sentence in memory.explanation)
    memory.report(tmp_path / "page.html")
    assert "The step is expected to take " in (tmp_path / "page.html").read_text()
    assert memory.history[3].bytes_out > 0, "of inputs, by which copies are timed"
    later = [*zip(memory.history[5:], chosen[4:], strict=True)]
    assert memory.history[5].projected_bytes > 0
    assert all(one.projected_bytes > 0 or PROBES[1] in did for one, did in later), "or try again how fast copies are"
    assert not any(did <= {Action.KEEP} for did in chosen[3:]), "and give something up"


def test_steps_that_measure_keep_what_surely_fits_and_try_things_in_few_blocks(
    plain: tuple[list[bytes], int, int],
) -> None:
    _, start, peak = plain
    budget = int(start + 0.7 * (peak - start))
    expected = run(Training((64,) * 5), None)
    training = Training((64,) * 5)
    tried: list[list[Action]] = []
    begin = Auto.begin

    def told(self: Auto, size: Any, available: int) -> Any:
        decision = begin(self, size, available)
        tried.append([*decision.plan.actions])
        return decision

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Auto, "begin", told)
        with managed(training, budget, report=EACH) as memory:
            assert run(training, memory) == expected
    assert max(one.peak_bytes for one in memory.history) <= budget
    assert [did.count(action) for action, did in zip(PROBES, tried[1:3], strict=True)] == [TRIED, TRIED]
    assert tried[2].count(Action.KEEP) == 2, "of four blocks"


def test_sizes_that_are_new_are_measured_with_something_kept() -> None:
    method = Auto(moves=False)
    training = Training((40, 56, 32, 48, 36, 52))
    with managed(training, None, "mimose", report=EACH) as memory:
        bits = run(training, memory)
    start, peak = memory.history[-1].start_bytes, max(one.peak_bytes for one in memory.history)
    budget = int(start + 0.8 * (peak - start))
    training = Training((40, 56, 32, 48, 36, 52))
    with managed(training, budget, method, report=EACH) as memory:
        assert run(training, memory) == bits
    assert max(one.peak_bytes for one in memory.history) <= budget
    assert all(one.recomputed_blocks < one.blocks for one in memory.history[3:])


def test_where_everything_fits_nothing_is_done_after_the_first_steps() -> None:
    training = Training((64,) * 8)
    with managed(training, "1GiB") as memory:
        run(training, memory)
    assert [one.managed for one in memory.history[-2:]] == [False, False]
    assert not any(one.recomputed_blocks or one.bytes_out for one in memory.history[2:])


def test_what_a_session_counts_is_no_news_to_the_engine_beside_it() -> None:
    """Of every parameter, gradient and state, at both ends of every step."""
    training = Training((64,) * 8)
    told = list[Any]()
    with managed(training, "1GiB") as memory:
        run(training, memory)
        with patch.object(TensorEngine, "reveal", lambda engine, tensor, **_: told.append(tensor)):
            with memory.step(training.batches[0]):
                training.step(training.batches[0])
            assert memory.history[-1].blocks == 0
            next(iter(training.model.parameters())).untyped_storage()
    assert len(told) == 1, "the last, which shows that an engine is there to be told"


@pytest.mark.long(but=2)
@pytest.mark.parametrize(("name", "share"), [("vgg", 0.9), ("by hand", 0.7), ("perceptron", 0.9)])
def test_budgets_between_floor_and_peak_are_never_refused(name: str, share: float) -> None:
    """These were, where a first step without optimizer state told too little, or something unknown was tried."""

    def trained(budget: int | None, method: str) -> tuple[list[bytes], list[spillway.StepReport]]:
        built = UNREPEATED[name](0)
        losses = []
        with spillway.manage(built.model, built.optimizers, budget=budget, method=method, report=EACH) as memory:
            for batch in [*built.batches] * 3:
                with memory.step(batch):
                    losses.append(built.step(built.model, built.optimizers, batch).numpy().tobytes())
        return losses, memory.history

    losses, reports = trained(None, "lru")
    budget = int(share * max(one.peak_bytes for one in reports))
    found, reports = trained(budget, "auto")
    assert found == losses
    assert max(one.peak_bytes for one in reports) <= budget


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("seed", "share"),
    [
        *((seed, share) for seed in (0, 28) for share in (2.0, 0.85, 0.6)), (47, 0.85), (66, 0.6), (96, 0.6),
        (175, 0.6), (86, 0.85), (101, 0.85), (119, 0.85), (130, 0.85), (144, 0.85), (158, 0.85), (168, 0.85),
    ],
)  # fmt: skip
def test_random_programs_train_as_they_do_plainly(seed: int, share: float) -> None:
    """In 28 what every op is watched for had left when a second run was compared with the first; in 0 steps differ in
    which blocks they call; in 47 a step did not want what an earlier one had left elsewhere, and the next one had it in
    memory. From 66 on steps were refused: a step of fewer blocks had shown that recomputing is enough (66, 119, 144,
    168, 175), or taught what the rest takes (144); blocks that had failed were known to save nothing (96, 101); blocks
    began, or went backward, with less room than they had been seen to need, selective ones above all (86, 130, 158)."""
    expected = plainly(seed)
    verdict = judge(seed, "auto", int(share * judge(seed, "lru", 1 << 30, expected).peak), expected)
    assert not verdict.wrong
    assert verdict.refused is None


def grown(forwards: int) -> Training:
    """Several forwards a step, a backward after each; or, where there is none, two before one."""
    training = Training((64,) * 10)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(max(forwards, 1)):
            loss: torch.Tensor = training.model(tokens).float().log_softmax(-1).square().mean()
            if not forwards:
                loss = loss + training.model(tokens.flip(0)).float().square().mean()
            loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    training.step = step  # type: ignore[method-assign]
    return training


@pytest.mark.long(but=1)
@pytest.mark.parametrize("forwards", [0, 2, 4])
def test_several_forwards_a_step_are_planned_or_left_to_the_tensor_engine(forwards: int) -> None:
    training = grown(forwards)
    with managed(training, None, "lru") as memory:
        bits = run(training, memory)
    start, peak = memory.history[-1].start_bytes, max(one.peak_bytes for one in memory.history)
    training = grown(forwards)
    budget = int(start + 0.7 * (peak - start))
    with contextlib.ExitStack() as stack:
        if not forwards:
            stack.enter_context(pytest.warns(UserWarning, match="have told nothing of its blocks"))
        memory = stack.enter_context(managed(training, budget, report=EACH))
        assert run(training, memory) == bits
        assert isinstance(memory._now, BlockSession if forwards else TensorSession)
    assert max(one.peak_bytes for one in memory.history) <= budget
    assert not forwards or any(one.projected_bytes > 0 for one in memory.history[-2:]), "one may try something again"


def test_steps_in_which_all_fits_and_the_update_takes_the_most_are_left_to_blocks() -> None:
    """Nobody listens to blocks there, and nothing that they told had foreseen as much."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh()) for _ in range(8)))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(4, 128)
    with spillway.manage(model, optimizer, budget="5 MiB") as memory:
        for _ in range(10):
            with memory.step(x):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(memory._now, BlockSession)  # type: ignore[attr-defined]
        planned = [report for report in memory.history if report.projected_bytes]
        assert planned
        assert all(report.peak_bytes <= report.projected_bytes <= 1.001 * report.peak_bytes for report in planned)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("fit", [0, 8])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "by a worker"])
def test_where_the_spill_directory_is_full_the_step_goes_on_without(
    late: bool, fit: int, plain: tuple[list[bytes], int, int]
) -> None:
    _, start, peak = plain
    budget = int(start + 0.5 * (peak - start))
    expected = run(Training((64,) * 12), None)
    training, losses = Training((64,) * 12), []
    with (
        managed(training, budget, report=EACH) as memory,
        pytest.MonkeyPatch.context() as patched,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        torch.manual_seed(1)
        for tokens in training.batches:
            with memory.step(tokens):
                losses.append(training.step(tokens))
            if len(memory.history) == 2:  # what is tried next puts inputs away
                left = iter(range(fit))
                for name in ("_fill",) if late else ("start_write", "write"):
                    patched.setattr(DiskTier, name, _full_after(left, getattr(DiskTier, name)))
    assert [*(loss.numpy().tobytes() for loss in losses), *training.state()] == expected
    said = sum(str(one.message).startswith("There is no room where bytes of blocks") for one in told)
    assert said == 1 or (fit and not said), "plans that are made by measured seconds may put away no more than fits"
    assert max(one.peak_bytes for one in memory.history) <= budget
    assert not said or not memory.history[-1].bytes_out
    assert memory.history[-1].projected_bytes


def _full_after(left: Iterator[int], write: Callable[..., Any]) -> Callable[..., Any]:
    def full(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise SpillFullError("There is no room in the spill directory.")
        return write(*args, **kwargs)

    return full


def test_sizes_of_zero_are_sizes() -> None:
    method = Auto()
    assert method._bucket((0, 3)) != method._bucket((1, 3))


class Flat:
    """A network whose parts hold nothing that could be a block."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Bilinear(64, 64, 512)
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)
        self.batches = [torch.randn(128, 64) for _ in range(4)]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x, x).relu().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    state = Training.state


@pytest.mark.parametrize("told", [True, False], ids=["batch", "no batch"])
def test_a_model_without_blocks_is_left_to_the_tensor_engine(told: bool, tmp_path: Any) -> None:
    training = Flat()
    with managed(training, None, "lru") as memory:
        bits = run(training, memory)  # type: ignore[arg-type]
    needed = max(one.peak_bytes for one in memory.history)
    training, losses = Flat(), []
    files = tmp_path / "run.jsonl"
    report = spillway.ReportOptions(run_file=files)
    torch.manual_seed(1)
    with managed(training, int(0.9 * needed), report=report) as memory:
        assert isinstance(memory._now, BlockSession)
        for x in training.batches:
            with memory.step(x if told else None):
                losses.append(training.step(x))
        assert isinstance(memory._now, TensorSession)
        assert len(memory.history) == len(training.batches)
    assert [*(loss.numpy().tobytes() for loss in losses), *training.state()] == bits  # type: ignore[arg-type]
    assert max(one.peak_bytes for one in memory.history) <= int(0.9 * needed)
    assert len(files.read_text().splitlines()) == 1 + len(training.batches), "both sessions write into one file"


@pytest.mark.parametrize("told", [True, False], ids=["batch", "no batch"])
@pytest.mark.filterwarnings("ignore:3 steps in a row")
def test_what_is_away_stays_away_when_a_model_is_left_to_the_tensor_engine(told: bool) -> None:
    training = Flat()
    weights = sum(one.nbytes for one in training.model.parameters())
    budget = 7 * weights // 2  # and state takes three times the weights, besides gradients and temporaries
    optimizer = training.optimizer = torch.optim.Adam(training.model.parameters(), amsgrad=True)
    with contextlib.ExitStack() as stack:
        stack.callback(Arena().release)
        others = counts().live
        memory = stack.enter_context(managed(training, budget))
        for x in [*training.batches, *training.batches]:
            reset_peaks()
            with memory.step(x if told else None):
                training.step(x)
            assert counts().peak_live - others <= budget
        assert isinstance(memory._now, TensorSession)
    assert sum(one.nbytes for state in optimizer.state.values() for one in state.values()) > 3 * weights


class Once(nn.Module):
    """Parts that would be blocks, in a forward that cannot run a second time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.layers = how, itertools.count(), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.numbers = (number for number in self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if self.how == "a generator":
                next(self.numbers)
            elif self.how == "modes" and torch._C._len_torch_dispatch_stack():
                raise RuntimeError("This runs under no mode.")
        return x


@pytest.mark.parametrize("how", ["no blocks", "a generator", "modes"])
def test_what_a_model_gives_back_in_which_no_blocks_were_found_is_held_by_nobody(how: str) -> None:
    """It was there beside the account for as long as nobody collected garbage."""
    model = nn.Bilinear(64, 64, 512) if how == "no blocks" else Once(how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gc.collect()
    gc.disable()
    try:
        with spillway.manage(model, optimizer, budget="64MiB") as memory:
            batch = torch.randn(128, 64)
            with memory.step(batch):
                output = model(batch, batch) if how == "no blocks" else model(batch)
                output.square().mean().backward()
                optimizer.step()
            held = [weakref.ref(output), weakref.ref(batch)]
            del output, batch
            assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


def test_several_models_and_one_that_is_compiled_are_left_to_it_from_the_beginning(tmp_path: Any) -> None:
    several = [nn.Linear(4, 4), nn.Linear(4, 4)]
    file = spillway.ReportOptions(run_file=tmp_path / "run.jsonl")
    with spillway.manage(several, budget="1GiB", method="auto", report=file) as memory:
        assert isinstance(memory, spillway.Session)
        assert isinstance(memory._now, TensorSession)  # type: ignore[attr-defined]
        with memory.step(torch.ones(2, 4)):
            several[1](several[0](torch.ones(2, 4))).sum().backward()
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2
    compiled = nn.Sequential(nn.Linear(4, 4))
    compiled.compile(backend="eager")
    with spillway.manage(compiled, budget="1GiB", method="auto") as memory:
        assert isinstance(memory._now, TensorSession)  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_model_that_another_session_manages_is_left_to_the_tensor_engine() -> None:
    plain, training = Training(), Training()
    with managed(training, "1GiB", "mimose") as first, managed(training, "1GiB") as memory:
        assert isinstance(memory._now, TensorSession)  # type: ignore[attr-defined]
        for session in (first, memory):
            assert run(training, session) == run(plain, None)


def test_blocks_that_are_named_are_the_blocks_and_mistakes_are_told() -> None:
    training = Training()
    with pytest.raises(ModelError, match="no module named 'nowhere'"):
        managed(training, "1GiB", blocks=spillway.BlockOptions(names=["nowhere"]))
    with managed(training, "1GiB", blocks=spillway.BlockOptions(names=["blocks.1"])) as memory:
        assert not isinstance(memory, AutoSession)
        assert memory.blocks == ("blocks.1",)


def test_a_forward_that_fails_before_blocks_are_found_is_the_users_error() -> None:
    training = Training()
    with managed(training, "1GiB") as memory:
        with pytest.raises(IndexError), memory.step(training.batches[0]):
            training.step(torch.full((4, 24), 1 << 20))
        with memory.step(training.batches[0]):
            training.step(training.batches[0])
        assert isinstance(memory._now, BlockSession)
        assert memory.blocks


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_run_compiled_from_the_first_step_on_where_they_fit() -> None:
    def trained(method: str | None) -> list[bytes]:
        training = Training((64,) * 6)
        for block in training.model.blocks:
            block.compile(backend="aot_eager")
        if method is None:
            return run(training, None)
        with managed(training, "1GiB", method) as memory:
            bits = run(training, memory)
        assert not any(one.ops for one in memory.history), "no step was watched"
        return bits

    assert trained("auto") == trained(None)
    torch.compiler.reset()
