"""Steps that do not fit block by block run inside the tensor engine, under the same budget."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.engines.blocks.extra_forward import Seen
from spillway.engines.blocks.trace import trace_for
from spillway.errors import BudgetInfeasible
from spillway.native import library
from spillway.session.block_session import BlockSession
from spillway.session.paging import Paging
from spillway.units import MiB

METHODS = ("checkpoint", "mimose", "mimose-published")
LARGE, SMALL = 1024, 64
BUDGET = 20 * MiB
"""Below what one block takes at once for a large batch; above all of a small one."""


class Wide(nn.Module):
    """Makes six tensors of 4 MiB from a large batch."""

    def __init__(self, width: int = 64, inner: int = 1024) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.then: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x)).sin()
        self.then()
        return self.norm(x + self.drop(self.two(torch.relu(hidden) * hidden)))


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Wide() for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def batch(self, rows: int) -> Tensor:
        return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))

    def step(self, x: Tensor) -> float:
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> list[bytes]:
        states = [value for of in self.optimizer.state.values() for value in of.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *states, torch.get_rng_state()]
        return [tensor.detach().numpy().tobytes() for tensor in tensors]


def managed(training: Training, method: str = "checkpoint", budget: int = BUDGET, **options: Any) -> BlockSession:
    blocks = spillway.BlockOptions(**options)
    memory = spillway.manage(training.model, training.optimizer, budget=budget, method=method, blocks=blocks)
    assert isinstance(memory, BlockSession)
    return memory


def trained(rows: Sequence[int], memory: BlockSession | None, training: Training) -> list[Any]:
    torch.manual_seed(1)
    losses = []
    for number in rows:
        x = training.batch(number)
        if memory is None:
            losses.append(training.step(x))
        else:
            with memory.step(x):
                losses.append(training.step(x))
    return [losses, training.state()]


ROWS = (LARGE, SMALL, LARGE, 960, SMALL, 80, LARGE)


@pytest.mark.long
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_block_that_does_not_fit_runs_inside_the_tensor_engine(method: str, named: bool) -> None:
    names = ["0", "1", "2", "3"] if named else None
    with managed(Training(), method, names=names) as memory, pytest.raises(BudgetInfeasible):
        trained(ROWS, memory, Training())
    plain, training = trained(ROWS, None, Training()), Training()
    with managed(training, method, names=names, page=True) as memory:
        assert trained(ROWS, memory, training) == plain
    for rows, report in zip(ROWS, memory.history, strict=True):
        assert report.peak_bytes <= BUDGET
        assert report.peak_measured
        paged = report.ops > 0
        assert paged == (rows > SMALL * 2), f"{rows} rows"
        if paged:
            assert report.moves + report.drops > 0
            assert report.blocks == report.recomputed_blocks == 4


def test_without_the_tensor_engine_such_a_step_passes_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above, found by a count of the allocator's that knows nothing of either engine."""

    def most() -> int:
        training = Training()
        with managed(training, page=True) as memory:
            trained((SMALL,), memory, training)
            counted = trace_for(torch.device("cpu"), {})
            assert counted is not None
            counted.mark()
            trained((LARGE,), memory, training)
            there = sum(tensor.nbytes for _, tensor in memory._tensors(()))
            return there + max(window.peak for window in counted.stop())

    monkeypatch.setattr(Paging, "begin", lambda *_: None)
    assert most() > BUDGET


@pytest.mark.long
@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_that_does_not_fit_at_once_does_not_end_the_step(fused: bool) -> None:
    def of_many() -> Training:
        training = Training()
        training.model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(24)))
        training.optimizer = torch.optim.AdamW(training.model.parameters(), fused=fused, foreach=not fused)
        return training

    def run(training: Training, memory: BlockSession | None) -> list[bytes]:
        for number in range(3):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(number))
            with contextlib.nullcontext() if memory is None else memory.step(x):
                training.step(x)
        return training.state()

    plain, training = run(of_many(), None), of_many()
    budget = 22 * MiB  # of 24 that parameters, gradients and two states take
    names = [str(number) for number in range(24)]
    with managed(training, budget=budget, names=names, page=True) as memory:
        assert run(training, memory) == plain
    assert max(report.peak_bytes for report in memory.history) <= budget
    assert all(report.ops for report in memory.history)


@pytest.mark.long
def test_a_second_forward_that_does_not_fit_is_watched_from_there_on() -> None:
    def run(training: Training, memory: BlockSession | None) -> list[Any]:
        few, many = training.batch(SMALL), training.batch(LARGE)
        torch.manual_seed(3)
        for _ in range(2):
            with contextlib.nullcontext() if memory is None else memory.step(few):
                (training.model(few).mean() + training.model(many).square().mean()).backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        return training.state()

    training = Training()
    with managed(training, page=True) as memory:
        found = run(training, memory)
    assert run(Training(), None) == found
    assert all(report.ops and report.peak_bytes <= BUDGET for report in memory.history)


def test_what_is_refused_in_the_middle_of_a_step_is_paged_the_next_time() -> None:
    """A backward takes more than anybody could be told of."""

    def much(gradient: Tensor) -> Tensor:
        held = [torch.ones(1 << 20) for _ in range(6)]
        return gradient + 0 * held[-1].sum()

    def run(training: Training, memory: BlockSession | None, turns: int) -> list[Any]:
        x = training.batch(SMALL)
        for _ in range(turns):
            with contextlib.nullcontext() if memory is None else memory.step(x):
                y = training.model(x)
                y.register_hook(much)
                y.square().mean().backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
        return training.state()

    training = Training()
    with managed(training, page=True) as memory:
        with pytest.raises(BudgetInfeasible) as refused:
            run(training, memory, 1)
        assert "The next step of this size is watched op by op" in str(refused.value.__notes__)
        training.optimizer.zero_grad()
        torch.manual_seed(3)
        found = run(training, memory, 2)
    plain = Training()
    torch.manual_seed(3)
    assert run(plain, None, 2) == found
    assert all(report.ops and report.peak_bytes <= BUDGET for report in memory.history)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("page", [True, False])
def test_what_a_step_makes_before_its_forward_counts_although_nobody_knows_its_storages(page: bool) -> None:
    def run(training: Training, memory: BlockSession | None) -> list[bytes]:
        x = training.batch(LARGE)
        with contextlib.nullcontext() if memory is None else memory.step(x):
            beside = [torch.ones(MiB // 4) for _ in range(2)]
            training.step(x * beside[0][:64])
        return training.state()

    if not page:
        training = Training()
        with managed(training, names=["0", "1", "2", "3"]) as memory, pytest.raises(BudgetInfeasible):
            run(training, memory)
        return
    alone, training = Training(), Training()
    torch.manual_seed(1)
    plain = run(alone, None)
    torch.manual_seed(1)
    with managed(training, names=["0", "1", "2", "3"], page=page) as memory:
        seen: list[int] = []
        # Before the first op that is watched: by then nothing but names and this is in the account.
        training.model[0].register_forward_pre_hook(
            lambda *_: seen.append(memory._budget.resident) if memory._running._paged else None  # type: ignore[union-attr]
        )
        assert run(training, memory) == plain
    assert seen[0] - memory.history[0].start_bytes >= 2 * MiB, "what lies beside is in the account"
    assert memory.history[0].peak_bytes <= BUDGET


@pytest.mark.long
def test_what_is_away_comes_back_before_a_step_that_nobody_watches() -> None:
    training = Training()
    with managed(training, page=True) as memory:
        trained((LARGE,), memory, training)
        assert memory._paging is not None
        away = memory._paging.engine.controller.away
        x = training.batch(SMALL)
        with memory.step(x):
            assert memory._paging.engine.controller.away == 0 < away
            training.step(x)
        assert memory.history[-1].ops == 0


@pytest.mark.long
@pytest.mark.parametrize("how", ["an exception", "a signal", "closing"])
@pytest.mark.parametrize("turn", [1, 2])
def test_whatever_ends_a_paged_step_the_same_thread_trains_on(turn: int, how: str) -> None:
    """In the first step it is paged from its forward on, in the second from its begin."""

    def late(*_: object) -> None:
        raise TimeoutError

    def fails() -> None:
        if how == "closing":
            memory.close()
        elif how == "a signal":
            signal.raise_signal(signal.SIGALRM)
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    training = Training()
    memory = managed(training, names=["0", "1", "2", "3"], page=True)
    try:
        trained((LARGE,) * (turn - 1), memory, training)
        training.model[2].then = fails
        with pytest.raises(TimeoutError):
            trained((LARGE,), memory, training)
        training.model[2].then = lambda: None
        training.optimizer.zero_grad()
        if how == "closing":
            memory = managed(training, names=["0", "1", "2", "3"], page=True)
        trained((LARGE, SMALL), memory, training)
        assert [report.ops > 0 for report in memory.history[-2:]] == [True, False]
    finally:
        memory.close()
        signal.signal(signal.SIGALRM, before)
    trained((LARGE,), None, training)


def test_a_paged_step_keeps_no_copies_of_large_buffers_and_says_which_it_could_not_put_back() -> None:
    training = Training()
    training.model.register_buffer("bank", torch.zeros(256, 256))
    x, refused = training.batch(LARGE), []
    with managed(training, names=[str(number) for number in range(4)], page=True) as memory:
        for number in range(4):
            held: list[Tensor] = []
            try:
                with memory.step(x):
                    training.model.bank.add_(1)
                    if number == 3:
                        training.model[1].then = lambda held=held: held.append(torch.ones(BUDGET // 4, 4)) or None
                    training.step(x)
            except BudgetInfeasible as refusal:
                refused.append((number, str(getattr(refusal, "__notes__", ""))))
            del held
        assert memory._before is not None
        assert max(copy.nbytes for copy in memory._before.copies) <= 64 * 1024
    assert refused[-1][0] == 3
    assert "'bank'" in refused[-1][1]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(32, 1))


def weights_and_peak(
    method: str, budget: int | None, sizes: Sequence[int], *, dtype: torch.dtype | None = None,
    before: Callable[[nn.Sequential, int], object] = lambda model, number: None,
) -> tuple[list[bytes], int]:  # fmt: skip
    """The weights, and the highest peak of a step."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
        for number, rows in enumerate(sizes):
            before(model, number)
            x = torch.randn(rows, 32, dtype=model[-1].weight.dtype)
            with memory.step(x):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss = model(x).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    weights = [one.detach().view(torch.uint8).numpy().tobytes() for one in model.parameters()]
    return weights, max(step.peak_bytes for step in memory.history)


@pytest.mark.skipif(not library.wanted(), reason="SPILLWAY_NATIVE=0")
def test_what_kernels_took_in_a_file_is_not_taken_for_room() -> None:
    """Linear layers in bfloat16 take for themselves what the account of a watched step has nothing of."""
    sizes = (256, 320, 384, 256, 320)
    plain, peak = weights_and_peak("lru", None, sizes, dtype=torch.bfloat16)
    for share in (0.7, 0.74):
        weights, most = weights_and_peak("auto", int(share * peak), sizes, dtype=torch.bfloat16)
        assert weights == plain
        assert most <= share * peak


def test_what_was_measured_of_a_model_says_nothing_of_it_in_another_dtype() -> None:
    def doubled(model: nn.Sequential, number: int) -> None:
        if number == 3:
            model.double()

    plain, _ = weights_and_peak("lru", None, (512,) * 5, before=doubled)
    _, peak = weights_and_peak("lru", None, (512,) * 3)
    weights, most = weights_and_peak("auto", peak, (512,) * 5, before=doubled)
    assert weights == plain
    assert most <= peak


@pytest.mark.parametrize("lends", [True, False])
def test_a_forward_within_a_transform_that_does_not_fit_is_lent_memory_or_refused_and_paged_the_next_time(
    lends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can leave within it; it ended in torch's own error."""
    if lends and not library.wanted():
        pytest.skip("SPILLWAY_NATIVE=0")
    if not lends:
        monkeypatch.setattr(Paging, "guards", lambda *_: False)
    model = layers()

    def forwards(x: Tensor) -> list[Tensor]:
        weights = {name: one.detach() for name, one in model.named_parameters()}
        of = torch.func.grad(lambda them, y: torch.func.functional_call(model, them, (y,)).sum())
        return list(torch.func.vmap(of, (None, 0))(weights, x[:4]).values())

    x = torch.randn(512, 32)
    with spillway.manage(model, budget=None, method="lru") as memory, memory.step(x):
        loss, plain = model(x).sum(), forwards(x)
        loss.backward()
    with spillway.manage(model, budget=memory.history[0].peak_bytes * 9 // 10) as memory:
        for number in range(5):
            model.zero_grad()
            refused = pytest.raises(BudgetInfeasible, match="is watched op by op")
            with refused if number == 3 and not lends else nullcontext(), memory.step(x):
                loss, found = model(x).sum(), forwards(x) if number > 2 else plain
                loss.backward()
            assert all(map(torch.equal, plain, found))


class Remembering(nn.Module):
    """Reads a buffer and writes to it after layers whose results all stay, as memory banks and codebooks do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Tanh()) for _ in range(4))
        self.register_buffer("bank", torch.ones(width, width))
        self.bank: Tensor

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
            made += [x, x.cos(), x.sin()]
        result = x + self.bank
        with torch.no_grad():
            self.bank.mul_(0.9).add_(x, alpha=0.1)
        return result + sum(made)


def bytes_after_two_steps(model: nn.Module, width: int, budget: int, method: str = "auto") -> list[bytes]:
    """What is left of a model that is trained under a budget, or plainly with 0."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    opened = spillway.manage(model, optimizer, budget=budget, method=method) if budget else nullcontext()
    with opened as memory:
        for _ in range(2):
            x = torch.randn(width, width)
            with memory.step(x) if memory is not None else nullcontext():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]


def test_a_forward_that_finds_blocks_in_a_paged_step_leaves_buffers_as_they_were() -> None:
    width = 128
    expected = bytes_after_two_steps(Remembering(width), width, 0)
    for halves in range(11, 24, 2):  # where a tensor comes back to depends on what there is room for
        assert bytes_after_two_steps(Remembering(width), width, halves * width * width * 2) == expected


class Recalling(nn.Module):
    """A custom op returns a tensor that lives from step to step, and the forward writes to it."""

    def __init__(self, width: int, recall: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.recall = recall

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.recall(x)
        with torch.no_grad():
            self.recall(x).mul_(0.9).add_(x, alpha=0.1)
        return x


@pytest.mark.parametrize("method", ["auto", "mimose-published"])
def test_an_extra_forward_leaves_what_a_custom_op_returned_as_it_was(method: str) -> None:
    width = 128
    banks = [torch.zeros(width, width)]
    operations = torch.library.Library("spillway_recalled", "DEF")
    operations.define("bank(Tensor x) -> Tensor")
    operations.impl("bank", lambda x: banks[0], "CompositeExplicitAutograd")
    operations.impl("bank", torch.library.fallthrough_kernel, "Autograd")

    def trained(budget: int) -> list[bytes]:
        banks[0] = torch.zeros(width, width)
        model = Recalling(width, torch.ops.spillway_recalled.bank)
        left = bytes_after_two_steps(model, width, budget, method)
        return [banks[0].numpy().tobytes(), *left]

    assert trained(1 << 30 if method == "mimose-published" else 22 * width * width * 2) == trained(0)


def test_what_a_custom_op_made_is_told_from_what_it_looked_up() -> None:
    x, table, cached = torch.zeros(64), torch.zeros(64), list[Tensor]()
    operations = torch.library.Library("spillway_returned", "DEF")
    returned: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
        "made": (lambda x: x + 1, True), "a view of what was made": (lambda x: (x + 1)[2:], True),
        "looked up": (lambda x: table, False), "a view of that": (lambda x: table[2:], False),
        "kept": (lambda x: cached.append(x + 1) or cached[-1], False),
    }  # fmt: skip
    for number, (make, new) in enumerate(returned.values()):
        operations.define(f"one{number}(Tensor x) -> Tensor")
        operations.impl(f"one{number}", make, "CompositeExplicitAutograd")
        operations.define(f"some{number}(Tensor x) -> Tensor[]")
        operations.impl(f"some{number}", lambda x, make=make: [make(x)], "CompositeExplicitAutograd")
        for name in ("one", "some"):
            with Seen() as seen:
                out = getattr(torch.ops.spillway_returned, f"{name}{number}")(x)
                (out[0] if name == "some" else out).add_(1)
                assert (not seen._copies) == new
                assert seen.left(None) == (x.nbytes if new else 0)
                del out
                assert seen.left(None) == 0


def test_copies_of_the_same_bytes_are_put_back_the_last_one_first() -> None:
    numbers = numpy.zeros(64, dtype=numpy.float32)
    one, other = torch.from_numpy(numbers), torch.from_numpy(numbers)
    with Seen() as seen:
        one.add_(1)
        other.add_(1)
    seen.undo()
    assert not numbers.any()
