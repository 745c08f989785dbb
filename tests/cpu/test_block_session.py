"""Sessions of the block engine: the same bits, the budget kept, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.blocks.hook import Hook
from spillway.errors import BudgetInfeasible, ModelError, SessionError, UsageError
from spillway.methods import Action, Mimose
from spillway.methods.by_block import (
    AbstractBlockMethod,
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
    recomputing,
)
from spillway.methods.mimose import Options
from spillway.native import arena, library
from spillway.session import BlockSession
from spillway.units import KiB
from spillway.workloads.stdlib_lm import LanguageModel
from tests.cpu.block_cases import Chain, Residual
from tests.shared import in_turn

LENGTHS = (24, 64, 40, 48, 56, 64, 24, 32, 60, 64)


class Training:
    """A small language model with dropout on batches of changing length; every one is made from the same seed."""

    def __init__(self, lengths: Sequence[int] = LENGTHS, *, batches: Sequence[int] = (4,)) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(width=32, layers=4, heads=4, longest=64, dropout=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        drawn = random.Random(0)
        self.batches = [
            torch.randint(0, 255, (drawn.choice(batches), length), generator=torch.Generator().manual_seed(length))
            for length in lengths
        ]

    def step(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens).float().log_softmax(-1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += state.values()
        return [*(tensor.numpy().tobytes() for tensor in tensors), torch.get_rng_state().numpy().tobytes()]


def run(training: Training, memory: spillway.Session | None) -> list[bytes]:
    """Train on all batches; losses and final state."""
    torch.manual_seed(1)
    losses = []
    for tokens in training.batches:
        if memory is None:
            losses.append(training.step(tokens))
            continue
        with memory.step(tokens):
            losses.append(training.step(tokens))
    return [*(loss.numpy().tobytes() for loss in losses), *training.state()]


def managed(training: Training, budget: Any, method: Any = "mimose", **options: Any) -> BlockSession:
    memory = spillway.manage(training.model, training.optimizer, budget=budget, method=method, **options)
    assert isinstance(memory, BlockSession)
    return memory


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """Of the training: with every block recomputed, and with nothing recomputed."""
    found = []
    for method, budget in (("checkpoint", "1GiB"), ("mimose", None)):
        training = Training()
        with managed(training, budget, method, report=spillway.ReportOptions(timeline=True)) as memory:
            run(training, memory)
        assert all(report.peak_measured for report in memory.history)
        found.append(max(report.peak_bytes for report in memory.history))
    return found[0], found[1]


@pytest.fixture(scope="module")
def plainly() -> list[bytes]:
    return run(training=Training(), memory=None)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("share", "method"), in_turn([0.15, 0.5, 0.9], ["mimose", "mimose-published", "checkpoint"]))
def test_the_bits_are_the_plain_ones_and_the_budget_is_kept(
    method: str, share: float, peaks: tuple[int, int], plainly: list[bytes]
) -> None:
    budget = int(peaks[0] + share * (peaks[1] - peaks[0]))
    training = Training()
    with managed(training, budget, method, report=spillway.ReportOptions(timeline=True)) as memory:
        assert run(training, memory) == plainly
    assert max(report.peak_bytes for report in memory.history) <= budget
    assert memory.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def test_once_there_are_plans_the_peak_is_what_they_expected(peaks: tuple[int, int]) -> None:
    training = Training()
    with managed(training, sum(peaks) // 2, report=spillway.ReportOptions(timeline=True)) as memory:
        run(training, memory)
    planned = memory.history[4:]
    assert all(report.projected_bytes for report in planned)
    ratios = [report.peak_bytes / report.projected_bytes for report in planned]
    assert ratios == pytest.approx([1.0] * 6, abs=0.02)  # by which blocks are recomputed, which measured seconds decide
    assert {report.recomputed_blocks for report in planned} > {0}  # some of them had to
    assert {tuple(report.input_size or ()) for report in planned} == {(n,) for n in LENGTHS[4:]}


def test_where_everything_fits_nothing_is_recomputed_and_later_nothing_watched(plainly: list[bytes]) -> None:
    training = Training((24, 48, 40, 32) * 3)
    with managed(training, "1GiB") as memory:
        run(training, memory)
    assert [report.recomputed_blocks for report in memory.history] == [4] * 4 + [0] * 8  # the collecting phase first
    assert [report.managed for report in memory.history] == [True] * 8 + [False] * 4


def test_without_a_budget_account_is_kept_and_nothing_else(plainly: list[bytes]) -> None:
    training = Training()
    with managed(training, None) as memory:
        assert run(training, memory) == plainly
    assert not any(report.recomputed_blocks for report in memory.history)


class TooHopeful(AbstractBlockMethod):
    """Keeps everything, and expects nothing of it."""

    name = "too-hopeful"

    def fresh(self, *, batched: bool) -> Self:
        return self

    @property
    def collecting(self) -> bool:
        return False

    def begin(self, size: InputSize, available: int) -> Decision:
        plan = BlockPlan(
            size=size, actions=recomputing((), 4), otherwise=Action.RECOMPUTE, projected=0, available=available,
            seconds=0.0, smallest=0,
        )  # fmt: skip
        return Decision(Phase.PLANNED, plan, False)

    def end(self, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        pass

    def forecast(self, size: InputSize) -> Forecast | None:
        # What a block saves is right, and the turn; only the plan is wrong.
        saved = 4 * size[0] * (40 * 32 + 1) * 4
        return Forecast(
            saved=[saved] * 4, seconds=[1.0] * 4, turn=25_600 * size[0], rest=0, working=[64 * KiB] * 4,
            gradients=[0] * 4,
        )  # fmt: skip


def test_kept_blocks_are_revoked_when_room_gets_short(peaks: tuple[int, int], plainly: list[bytes]) -> None:
    budget = peaks[0] + (peaks[1] - peaks[0]) // 2
    training = Training()
    with managed(training, budget, TooHopeful(), report=spillway.ReportOptions(timeline=True)) as memory:
        assert run(training, memory) == plainly
    assert max(report.revoked_blocks for report in memory.history) > 0
    assert max(report.peak_bytes for report in memory.history) <= budget


@pytest.mark.long
def test_a_budget_below_what_recomputing_everything_takes_is_refused_with_one_that_works() -> None:
    training = Training((64, 64, 64))
    with managed(training, "1GiB", "checkpoint", report=spillway.ReportOptions(timeline=True)) as memory:
        run(training, memory)
    first, *_, last = (report.peak_bytes for report in memory.history)
    assert first < last  # by the state that the optimizer has then
    for budget in (first - 64 * KiB, first // 3):
        training = Training((64, 64, 64))
        before = training.state()
        with (
            managed(training, budget, report=spillway.ReportOptions(timeline=True)) as memory,
            pytest.raises(BudgetInfeasible) as refused,
        ):
            run(training, memory)
        assert memory.history == []
        assert last <= refused.value.smallest_budget <= 1.1 * last
        assert before[:-1] == training.state()[:-1]  # the optimizer had not begun
        training = Training((64, 64, 64))
        with managed(training, refused.value.smallest_budget, report=spillway.ReportOptions(timeline=True)) as memory:
            run(training, memory)


@pytest.mark.long
@pytest.mark.parametrize("method", ["checkpoint", "mimose"])
def test_what_an_optimizer_needs_for_itself_is_known_before_it_begins(method: str) -> None:
    def trained(budget: int) -> list[int]:
        torch.manual_seed(0)
        model = Chain(*(Residual() for _ in range(3)))
        optimizer, begun = torch.optim.Adam(model.parameters(), foreach=True), []
        optimizer.register_step_post_hook(lambda *_: begun.append(True))
        with spillway.manage(
            model, optimizer, budget=budget, method=method, report=spillway.ReportOptions(timeline=True)
        ) as memory:
            try:
                for _ in range(3):
                    with memory.step(torch.ones(2, 32)):
                        model(torch.ones(2, 32)).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except BudgetInfeasible as refused:
                assert begun == []
                return [refused.smallest_budget]
            return [report.peak_bytes for report in memory.history]

    highest = max(trained(1 << 30))
    for share in (0.5, 0.8):
        (named,) = trained(int(share * highest))
        assert named < highest, "parameters can be updated in parts"
        assert max(trained(named)) <= named
        assert trained(int(named / 1.02)) == [named]


def test_the_model_is_its_own_again_when_the_session_is_closed() -> None:
    training = Training()
    memory = managed(training, "1GiB")
    run(training, memory)
    assert "forward" in vars(training.model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(training.model)))
    assert not any(isinstance(vars(module).get("forward"), Hook) for module in twin.modules())
    memory.close()
    memory.close()
    assert not any("forward" in vars(module) for module in training.model.modules())
    assert not training.optimizer._optimizer_step_pre_hooks
    with pytest.raises(SessionError):
        memory.step(training.batches[0]).__enter__()


def test_several_forwards_in_a_step_are_each_planned(peaks: tuple[int, int]) -> None:
    def accumulate(training: Training) -> list[bytes]:
        torch.manual_seed(1)
        for first, second in zip(training.batches[::2], training.batches[1::2], strict=True):
            with around(training, first):
                for tokens in (first, second):
                    training.model(tokens).float().square().mean().backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        return training.state()

    memory: BlockSession | None = None

    def around(training: Training, tokens: Tensor) -> Any:
        return torch.enable_grad() if memory is None else memory.step(tokens)

    plain = accumulate(Training())
    training = Training()
    memory = managed(training, 2 * peaks[1])
    with memory:
        assert accumulate(training) == plain
    assert {report.blocks for report in memory.history} == {8}


def test_an_evaluation_inside_a_step_and_outside_is_plain() -> None:
    training = Training()
    with managed(training, "1GiB") as memory:
        with torch.no_grad():
            outside = training.model.eval()(training.batches[0])
            with memory.step(training.batches[0]):
                inside = training.model(training.batches[0])
        training.model.train()
        run(training, memory)
    assert torch.equal(outside, inside)
    assert memory.history[0].blocks == 0


def test_an_error_in_a_step_leaves_the_session_ready_for_the_next() -> None:
    training = Training()
    with managed(training, "1GiB") as memory:
        with pytest.raises(ZeroDivisionError), memory.step(training.batches[0]):
            training.model(training.batches[0])
            raise ZeroDivisionError
        assert not torch._C._autograd._profiler_enabled()
        run(training, memory)
    assert len(memory.history) == len(LENGTHS)


def test_finding_the_blocks_leaves_no_trace() -> None:
    class Counts(LanguageModel):
        calls = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(tokens)

    torch.manual_seed(0)
    model = Counts(width=32, layers=2, heads=2, longest=32, dropout=0.5)
    tokens = torch.ones(2, 16, dtype=torch.long)
    torch.manual_seed(1)
    expected = model(tokens)
    after = torch.get_rng_state()
    model.calls = 0
    torch.manual_seed(1)
    with spillway.manage(model, budget="1GiB", method="mimose") as memory, memory.step(tokens):
        found = model(tokens)
        found.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(after, torch.get_rng_state())
    assert model.calls == 1


def test_the_published_collector_runs_every_block_once_more() -> None:
    training = Training((24, 64, 40))
    count = mock.Mock(return_value=None)  # what a hook of its own would count is put back with all the rest
    published = Mimose(Options.as_published(reserve=0))
    with managed(
        training, "1GiB", published, blocks=spillway.BlockOptions(names=[f"blocks.{i}" for i in range(4)])
    ) as memory:
        handle = training.model.blocks[0].norm_mlp.register_forward_hook(count)  # inside: the block itself is hooked
        run(training, memory)
        handle.remove()
    assert count.call_count == 3 * 3  # measured, run, and run again in the backward


@pytest.mark.long
@pytest.mark.parametrize("batches", [(2, 4, 6)])
def test_the_number_of_samples_may_differ_as_well(batches: Sequence[int], peaks: tuple[int, int]) -> None:
    plain = run(Training(LENGTHS * 2, batches=batches), None)
    training = Training(LENGTHS * 2, batches=batches)
    with managed(training, int(1.2 * peaks[1]), report=spillway.ReportOptions(timeline=True)) as memory:
        assert run(training, memory) == plain
    assert all(len(report.input_size or ()) == 2 for report in memory.history[4:])
    assert max(report.peak_bytes for report in memory.history) <= int(1.2 * peaks[1])


def bad() -> Iterator[tuple[Any, str]]:
    one = nn.Linear(4, 4)
    yield lambda: spillway.manage([one, nn.Linear(4, 4)], budget="1GiB", method="mimose"), "takes one model, and got 2"
    yield (
        lambda: spillway.manage(one, budget="1GiB", method="lru", blocks=spillway.BlockOptions(names=["a"])),
        "methods of the block engine",
    )
    yield (
        lambda: spillway.manage(one, budget="1GiB", method="mimose", spill=spillway.SpillOptions(host_budget="1GiB")),
        "moves nothing",
    )
    yield (
        lambda: spillway.manage(one, budget="1GiB", method="mimose", blocks=spillway.BlockOptions(names=["nowhere"])),
        "no module named 'nowhere'",
    )


@pytest.mark.parametrize(("attempt", "sentence"), list(bad()))
def test_what_makes_no_sense_is_refused(attempt: Any, sentence: str) -> None:
    with pytest.raises((UsageError, ModelError), match=sentence):
        attempt()


def test_a_model_without_blocks_is_told_so_at_its_first_step_and_left_as_it_was() -> None:
    model = nn.Linear(4, 4)
    with spillway.manage(model, budget="1GiB", method="mimose") as memory:
        with pytest.raises(ModelError, match="has no blocks"), memory.step(torch.ones(2, 4)):
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
    assert "forward" not in vars(model)


def test_a_step_without_its_batch_is_refused() -> None:
    training = Training()
    with managed(training, "1GiB") as memory, pytest.raises(UsageError, match=r"memory\.step\(batch\)"):
        memory.step().__enter__()


def test_a_model_under_two_sessions_is_refused() -> None:
    training = Training()
    with managed(training, "1GiB"), pytest.raises(ModelError, match="managed by another session"):
        managed(training, "1GiB")


def test_an_evaluation_between_forward_and_backward_changes_nothing(
    peaks: tuple[int, int], plainly: list[bytes]
) -> None:
    training = Training()

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = training.model(tokens).float().log_softmax(-1).square().mean()
        state = torch.get_rng_state()
        with torch.no_grad():
            training.model(tokens)
        torch.set_rng_state(state)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return loss.detach()

    training.step = step  # type: ignore[method-assign]
    with managed(training, sum(peaks) // 2, report=spillway.ReportOptions(timeline=True)) as memory:
        assert run(training, memory) == plainly
    assert {report.blocks for report in memory.history} == {4}
    assert all(report.projected_bytes for report in memory.history[4:])


@pytest.mark.long
def test_two_forwards_before_one_backward_are_recomputed_and_never_the_reason_of_a_refusal() -> None:
    def train(training: Training, memory: BlockSession | None) -> list[bytes]:
        torch.manual_seed(1)
        for tokens in training.batches:
            with torch.enable_grad() if memory is None else memory.step(tokens):
                one, two = training.model(tokens).float(), training.model(tokens).float()
                (one - two).square().mean().backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        return training.state()

    plain, training = train(Training(), None), Training()
    with managed(training, "1GiB") as memory:
        assert train(training, memory) == plain
    assert [report.recomputed_blocks for report in memory.history] == [8] * len(LENGTHS)


def test_an_optimizer_that_steps_twice_in_a_step_is_seen_twice() -> None:
    training = Training()
    with managed(training, "1GiB", report=spillway.ReportOptions(timeline=True)) as memory:
        for tokens in training.batches[:6]:
            with memory.step(tokens):
                training.step(tokens)
                training.step(tokens)
    assert {report.blocks for report in memory.history} == {8}
    assert memory.history[5].projected_bytes


def test_frozen_blocks_are_no_reason_never_to_plan() -> None:
    training = Training()
    for parameter in [*training.model.tokens.parameters(), *training.model.positions.parameters()]:
        parameter.requires_grad_(False)
    for block in training.model.blocks[:2]:
        block.requires_grad_(False)
    with managed(training, "1GiB") as memory:
        run(training, memory)
    assert not any(report.recomputed_blocks for report in memory.history[4:])


def test_a_model_that_writes_to_its_input_is_called_once_with_it() -> None:
    class Writes(LanguageModel):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens.add_(1))

    torch.manual_seed(0)
    model = Writes(width=32, layers=2, heads=2, longest=32, dropout=0.0)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with spillway.manage(model, budget="1GiB", method="mimose") as memory, memory.step(tokens):
        model(tokens).sum().backward()
    assert tokens.unique().tolist() == [1]


@pytest.mark.long
@pytest.mark.parametrize("native", [True, False])
def test_a_profiler_of_the_users_goes_on_and_what_it_hides_is_not_called_measured(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """It hides nothing from the arena."""
    if native and not library.wanted():
        pytest.skip("SPILLWAY_NATIVE=0")
    if not native:
        monkeypatch.setattr(arena, "serves", lambda: False)
    training = Training()
    del training.batches[2:]
    waits = torch.profiler.schedule(wait=100, warmup=1, active=1)
    with managed(training, "1GiB") as memory, torch.profiler.profile(schedule=waits):
        run(training, memory)
    assert {report.peak_measured for report in memory.history} == {native}
    training = Training()
    with managed(training, "1GiB") as memory, memory.step(training.batches[0]), torch.profiler.profile() as profiler:
        training.step(training.batches[0])
    assert memory.history[0].peak_measured == native
    assert profiler.key_averages()


def test_what_fails_to_open_leaves_nothing_behind() -> None:
    training = Training()
    with pytest.raises(ModelError):
        managed(training, "1GiB", blocks=spillway.BlockOptions(names=["nowhere"]))
    assert not training.optimizer._optimizer_step_pre_hooks
    assert "forward" not in vars(training.model)


def test_a_step_that_cannot_begin_can_be_followed_by_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    training = Training()
    with managed(training, "1GiB") as memory:
        with monkeypatch.context() as patch:
            patch.setattr("spillway.session.block_session.trace_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                memory.step(training.batches[0]).__enter__()
        run(training, memory)


def test_a_step_that_never_calls_the_model_says_so() -> None:
    training = Training()
    unseen = pytest.warns(UserWarning, match="without calling it")
    with managed(training, "1GiB") as memory, unseen as found, memory.step(training.batches[0]):
        training.model.tokens.weight.sum().backward()
        training.optimizer.step()
    assert [one.filename for one in found] == [__file__]


def trained_by_transforms(budget: int | None, *, clears_first: bool = False) -> tuple[list[int], int]:
    """The peaks of steps whose only forward is within `torch.func`, where blocks run plainly; and what was named by the
    refusal that ended them, or 0."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(8, 64)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    named = 0
    with spillway.manage(model, optimizer, budget=budget, method="checkpoint") as memory:
        try:
            for _ in range(3):
                with memory.step(x):
                    if clears_first:
                        optimizer.zero_grad()
                    weights = {name: weight.detach() for name, weight in model.named_parameters()}
                    for name, gradient in torch.func.grad(loss)(weights).items():
                        model.get_parameter(name).grad = gradient
                    optimizer.step()
                    if not clears_first:
                        optimizer.zero_grad()
        except BudgetInfeasible as refusal:
            named = refusal.smallest_budget
    return [report.peak_bytes for report in memory.history if report.peak_bytes], named


@pytest.mark.filterwarnings("ignore:.*without calling it")
@pytest.mark.parametrize("clears_first", [False, True])
def test_an_update_after_a_forward_within_transforms_is_refused_before_it_passes_the_budget(clears_first: bool) -> None:
    train = partial(trained_by_transforms, clears_first=clears_first)
    peak = max(train(None)[0])
    for budget in (peak - 1, peak * 9 // 10):
        passed, enough = train(budget)
        assert max(passed, default=0) <= budget < enough <= peak * 1.01
        assert train(enough)[1] == 0


@pytest.mark.filterwarnings("ignore:.*without calling it")
def test_gradients_that_a_step_gives_up_at_its_beginning_are_held_by_nobody() -> None:
    after, first = (trained_by_transforms(None, clears_first=clears)[0] for clears in (False, True))
    assert first[1:] == pytest.approx(after[1:], abs=2 * KiB), "of small ones nobody hears that they are gone"


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", ["auto", "checkpoint", "mimose"])
def test_sparse_gradients_are_there_when_the_next_forward_of_a_step_begins(method: str) -> None:
    """As where they accumulate; it ended in an error of torch's, as they have no bytes of their own."""

    def trained(budget: int | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        model = nn.Sequential(nn.Embedding(500, 64, sparse=True), *blocks)
        optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1:].parameters(), 0.1)]
        with spillway.manage(model, optimizers, budget=budget, method=method) as memory:
            for _ in range(3):
                with memory.step(batch := torch.randint(500, (512,))):
                    for part in batch.chunk(2):
                        model(part).square().mean().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        return list(model.parameters()), max(report.peak_bytes for report in memory.history)

    plain, peak = trained(None)
    found, most = trained(budget := peak * 9 // 10)
    assert all(map(torch.equal, plain, found))
    assert most <= budget
