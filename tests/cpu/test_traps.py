"""Traps that prototypes of the engine fell into, by name: those inside a step (1 to 10)."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spillway
from spillway.memory.ledger import CHAIN_CAP
from spillway.methods import Drop, Move
from spillway.session import Session
from tests.cpu.pressure import ORDERS, PLENTY, Image, InputsLeave, image, is_dropped, put_away

SIDE = 64
"""Square matrices of this side take four pages, so that they may leave."""


@pytest.fixture
def memory() -> Iterator[Session]:
    """A session that lets tests decide what leaves."""
    with spillway.manage(nn.Linear(SIDE, SIDE), budget=PLENTY, method=ORDERS["recompute first"]()) as session:
        yield session


def matrix(seed: int = 0) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def dropped(memory: Session, tensor: Tensor) -> Tensor:
    """The tensor, after its bytes were given up."""
    assert put_away(memory, tensor, Drop)
    assert is_dropped(memory, tensor)
    return tensor


def random_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


# ---------------------------------------------------------------------- 1. random numbers

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "binomial": lambda x: torch.binomial(x.sigmoid() * 10, x.sigmoid()),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of a leaf": lambda x: F.dropout(x.clone().requires_grad_(), 0.5).detach(),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x[None], 0.5, True),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "log_normal": lambda x: torch.empty_like(x).log_normal_(),
    "multinomial": lambda x: torch.multinomial(x.exp(), SIDE),
    "normal": lambda x: torch.normal(x, x.exp()),
    "poisson": lambda x: torch.poisson(x.exp()),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 10),
    "randn": lambda x: torch.randn(SIDE, SIDE),
    "randperm": lambda x: torch.randperm(SIDE * SIDE),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "uniform in place": lambda x: x.clone().uniform_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_again_as_they_were_and_the_stream_stays_where_it_is(
    memory: Session, name: str
) -> None:
    torch.manual_seed(1)
    expected, x = image(DRAWS[name](matrix())), matrix()
    torch.rand(3)
    stream = random_state()
    torch.manual_seed(1)
    with memory.step():
        drawn = DRAWS[name](x)
        torch.rand(3)
        dropped(memory, drawn)
        assert image(drawn) == expected
        assert random_state() == stream
    assert memory.history[-1].recomputed_ops > 0


def test_a_generator_of_the_users_own_has_a_state_of_its_own(memory: Session) -> None:
    def draw(generator: torch.Generator) -> list[Tensor]:
        return [torch.empty(SIDE, SIDE).normal_(generator=generator), torch.rand(SIDE, SIDE, generator=generator)]

    plain, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    expected = [image(tensor) for tensor in draw(plain)]
    stream = random_state()
    with memory.step():
        drawn = [dropped(memory, tensor) for tensor in draw(own)]
        assert [image(tensor) for tensor in drawn] == expected
    assert torch.equal(own.get_state(), plain.get_state())
    assert random_state() == stream


# ---------------------------------------------------------------------- 2. unmarked mutation


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_move_once_per_forward_however_often_it_is_replayed(
    memory: Session, kind: type[nn.Module], momentum: float | None
) -> None:
    def forward(absent: Callable[[Tensor], Tensor]) -> list[Image]:
        norm = kind(8, momentum=momentum, track_running_stats=True)
        inputs = [torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        outputs = [absent(norm(x)) for x in inputs]
        return [image(tensor) for tensor in (*outputs, *norm.buffers())]

    expected = forward(lambda output: output)
    with memory.step():
        assert forward(lambda output: dropped(memory, output)) == expected
    assert memory.history[-1].recomputed_ops >= 3


def test_in_evaluation_running_statistics_are_inputs_whose_writing_brings_dependents_back_first(
    memory: Session,
) -> None:
    norm, x = nn.BatchNorm1d(4096), torch.randn(4, 4096)
    norm(x)
    norm.eval()
    expected = image(norm(x))
    with memory.step():
        output = dropped(memory, norm(x))
        norm.train()
        norm(x)
        assert image(output) == expected


def test_a_recurrent_layer_writes_its_workspace_in_backward() -> None:
    def gradients(memory: Session | None) -> list[Image]:
        torch.manual_seed(0)
        lstm, x = nn.LSTM(32, 32, num_layers=2), torch.randn(20, 4, 32, requires_grad=True)
        with nullcontext() if memory is None else memory.step():
            leaving = InputsLeave(memory, Drop, Move) if memory else nullcontext()
            with leaving:
                loss = lstm(x)[0].square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
        return [image(p.grad) for p in (x, *lstm.parameters()) if p.grad is not None]

    with spillway.manage(nn.Linear(1, 1), budget=PLENTY, method=ORDERS["recompute first"]()) as memory:
        assert gradients(memory) == gradients(None)


# ---------------------------------------------------------------------- 3. the environment is an input


@contextmanager
def setting(change: Callable[[Any], object], inside: Any, outside: Any) -> Iterator[None]:
    change(inside)
    try:
        yield
    finally:
        change(outside)


def deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=on)


def scattered(x: Tensor) -> Tensor:
    places = torch.arange(SIDE * SIDE).remainder(1500)
    return torch.zeros(1500).index_add_(0, places, x.flatten())


Environment: TypeAlias = Callable[[], AbstractContextManager[Any]]

ENVIRONMENTS: dict[str, tuple[Environment, Callable[[Tensor], Tensor]]] = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda x: x @ x),
    "two threads": (lambda: setting(torch.set_num_threads, 2, 1), lambda x: x.repeat(300, 1).sum(0).repeat(30)),
    "default dtype": (
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        lambda x: x[:0].new_ones(1) + torch.ones(SIDE, SIDE),
    ),
    "no gradients": (torch.no_grad, lambda x: nn.LSTM(SIDE, SIDE)(x)[0]),
    "inference": (torch.inference_mode, lambda x: F.linear(x, x).relu_()),
    "deterministic": (lambda: setting(deterministic, True, False), scattered),
    "without oneDNN": (
        lambda: setting(torch._C._set_mkldnn_enabled, False, True),
        lambda x: F.conv2d(x[None, None], x[None, None, :5, :5]),
    ),
}


def settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.mkldnn.enabled,
    )  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_replay_runs_under_the_settings_of_the_original_and_leaves_those_of_the_moment(
    memory: Session, name: str
) -> None:
    environment, make = ENVIRONMENTS[name]
    torch.manual_seed(0)
    with environment():
        expected = image(make(matrix()))
    twice = image(matrix(3) * 2)
    torch.manual_seed(0)
    with memory.step():
        doubled = dropped(memory, matrix(3) * 2)
        with environment():
            made = dropped(memory, make(matrix()))
            before = settings()
            assert image(doubled) == twice
            assert settings() == before
        before = settings()
        assert image(made) == expected
        assert settings() == before


# ---------------------------------------------------------------------- 4. sizes lie

HARD_TO_FORETELL: dict[str, Callable[[Tensor], object]] = {
    "argwhere": lambda x: torch.argwhere(x > 0),
    "batch norm": lambda x: F.batch_norm(x.view(16, 16, 16), None, None, training=True),
    "bincount": lambda x: torch.bincount((x.abs() * 2000).long().flatten()),
    "boolean index": lambda x: x[x > 0],
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(SIDE)),
    "ctc loss": lambda x: F.ctc_loss(
        x.view(16, 8, 32).log_softmax(2), torch.ones(8, 5, dtype=torch.long), torch.full((8,), 16), torch.full((8,), 5)
    ),
    "histogram": lambda x: torch.histogram(x, 5000),
    "index by numbers": lambda x: x[torch.arange(SIDE).repeat(10)],
    "lstm": lambda x: nn.LSTM(SIDE, SIDE)(x.view(8, 8, SIDE))[0].sum().backward(),
    "masked select": lambda x: x.masked_select(torch.ones(5, SIDE, SIDE, dtype=torch.bool)),
    "mse loss": lambda x: F.mse_loss(x, x.sin()),
    "nonzero": lambda x: torch.nonzero(x),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0)),
    "out that shrinks": lambda x: torch.sum(x, 0, out=torch.empty(SIDE, 0)),
    "pack padded sequence": lambda x: nn.utils.rnn.pack_padded_sequence(x.view(16, 16, 16), torch.arange(16, 0, -1)),
    "repeat interleave": lambda x: torch.repeat_interleave(x, torch.arange(SIDE), dim=0),
    "resize": lambda x: x.clone().resize_(SIDE, 5 * SIDE),
    "smooth l1 loss": lambda x: F.smooth_l1_loss(x, x.sin()),
    "sparse": lambda x: torch.sparse.mm(x.relu().to_sparse(), x),
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "where": lambda x: torch.where(x > 0),
}


def allocated_peak(work: Callable[[], object]) -> int:
    """Most bytes that torch's allocator had handed out at once for `work`, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    ordered = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(ordered, default=0)


@pytest.mark.parametrize("count", [torch.bincount, lambda x: torch.repeat_interleave(x)])
def test_an_op_whose_size_depends_on_content_may_read_what_was_dropped(count: Callable[[Tensor], Tensor]) -> None:
    with (
        spillway.manage(nn.Linear(1, 1), budget="1 MiB", method=ORDERS["recompute first"]()) as memory,
        memory.step(),
        torch.no_grad(),
    ):
        numbers = torch.arange(4096).remainder(7)
        expected = image(count(numbers))
        dropped(memory, numbers)
        assert image(count(numbers)) == expected


@pytest.mark.long(but=7)
@pytest.mark.parametrize("name", HARD_TO_FORETELL)
def test_an_op_whose_size_is_hard_to_foretell_keeps_the_budget_or_is_refused(name: str) -> None:
    work, x, others = HARD_TO_FORETELL[name], matrix(), [matrix(n) for n in range(1, 9)]

    def run(budget: int | None) -> spillway.StepReport:
        with spillway.manage(nn.Linear(1, 1), budget=budget, method=ORDERS["move first"]()) as memory:
            with memory.step((x, *others)):
                work(x)
            return memory.history[-1]

    peak, refused = run(None).peak_bytes, 0
    for budget in range(peak, peak // 5, -peak // 12):
        try:
            assert run(budget).peak_bytes <= budget
        except spillway.BudgetInfeasible:
            refused += 1
    assert refused < (10 if name == "sparse" else 8)  # what becomes sparse may be five times as large


# ---------------------------------------------------------------------- 5. values, not storages


def test_every_version_of_a_storage_that_was_written_in_place_can_be_recomputed(memory: Session) -> None:
    def versions(absent: Callable[[Tensor], object]) -> list[Image]:
        source = matrix()
        x = source + 1
        first = x * 2
        x[3:9].mul_(4)
        second = x.t() * 3
        x.relu_()
        for tensor in (second, x, first):
            absent(tensor)
        return [image(tensor) for tensor in (first, second, x, source)]

    expected = versions(lambda tensor: tensor)
    with memory.step():
        assert versions(lambda tensor: dropped(memory, tensor)) == expected


def test_a_replay_never_writes_the_storage_that_the_user_holds(memory: Session) -> None:
    with memory.step():
        x = matrix() + 1
        view, doubled = x[::2], x * 2
        x.add_(1)
        version, address = x._version, torch._C._storage_address(x)
        expected = image(x), image(doubled)
        dropped(memory, doubled)
        image(doubled)
        dropped(memory, x)
        assert (image(x), image(doubled)) == expected
        assert (x._version, torch._C._storage_address(x)) == (version, address)
        assert image(view) == image(x[::2])


# ---------------------------------------------------------------------- 6. write hazard


def _assigned(w: Tensor) -> None:
    w.data.copy_(matrix(9))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda w: w.add_(1),
    "data.copy_": _assigned,
    "through a view": lambda w: w.t()[3].fill_(7),
    "out": lambda w: torch.mul(matrix(4), 2, out=w),
    "foreach": lambda w: torch._foreach_add_([w, matrix(5)], 1.0),
    "foreach by itself": lambda w: torch._foreach_mul_([w], [w]),
    "indexed": lambda w: w.__setitem__((slice(2, 9), 3), 5.0),
    "swapped": lambda w: w.copy_(w.flip(0)),
    "fused optimizer": lambda w: torch._fused_sgd_(
        [w], [matrix(6)], [], weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_what_hangs_on_a_value_comes_back_before_it_is_written(memory: Session, name: str) -> None:
    def program(absent: Callable[[Tensor], object]) -> list[Image]:
        w = matrix()
        near, far = w * 2, (w.sin() + 1).cos()
        left = w + 5
        through_ancestor = left * 3
        for tensor in (near, far, through_ancestor, left):
            absent(tensor)
        WRITES[name](w)
        return [image(tensor) for tensor in (near, far, through_ancestor, left, w)]

    expected = program(lambda tensor: tensor)
    with memory.step():
        assert program(lambda tensor: dropped(memory, tensor)) == expected


def test_all_that_a_foreach_op_writes_is_doomed_together() -> None:
    """Under a budget for two of the four matrices, nothing may be dropped onto what the op is about to write."""

    def program() -> list[Image]:
        sources = [matrix(n) for n in range(4)]
        sums = [source + 1 for source in sources]
        torch._foreach_mul_(sums, 3.0)
        torch._foreach_add_(sources, sums)
        return [image(tensor) for tensor in (*sums, *sources)]

    expected = program()
    with spillway.manage(nn.Linear(1, 1), budget=10 * 4 * SIDE * SIDE, method=ORDERS["recompute first"]()) as memory:
        with memory.step():
            assert program() == expected
        assert memory.history[-1].peak_bytes <= memory.allowed


# ---------------------------------------------------------------------- 7. death hazard


def test_what_a_drop_needs_outlives_its_last_user_and_dies_with_the_need(memory: Session) -> None:
    with memory.step():
        source, labels = matrix(), torch.arange(SIDE)
        product = source[labels.flip(0)] * 2
        expected = image(product)
        dropped(memory, product)
        watch = weakref.ref(source.untyped_storage())
        del source, labels
        gc.collect()
        assert watch() is not None
        assert image(product) == expected
        assert watch() is None


def test_a_chain_that_grows_as_its_ancestors_die_stays_within_the_cap(memory: Session) -> None:
    with memory.step():
        values = [matrix() + 1]
        for n in range(3 * CHAIN_CAP):
            values.append((values[-1] * (1 + n % 3)).sin())
        expected = [image(value) for value in values]
        granted = [put_away(memory, value, Drop) for value in reversed(values)]
        assert sum(granted) > len(granted) / 2
        for value, before in zip(reversed(values), reversed(expected), strict=True):
            recomputed = memory._engine.controller.counters.recomputed_ops
            assert image(value) == before
            assert memory._engine.controller.counters.recomputed_ops - recomputed <= CHAIN_CAP
        kept, values = values[-1], []
        assert image(kept) == expected[-1]


# ---------------------------------------------------------------------- 8. livelock


@pytest.mark.parametrize("order", ORDERS)
def test_a_deep_narrow_net_is_not_replayed_without_end(order: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(60) for layer in (nn.Linear(SIDE, SIDE), nn.Tanh())))
    batch, peaks = torch.randn(SIDE, SIDE), []
    for share in (1.0, 0.1):
        budget = int(peaks[0] * share) if peaks else None
        with spillway.manage(net, budget=budget, method=ORDERS[order]()) as memory:
            with memory.step(batch):
                net(batch).square().sum().backward()
            peaks.append(memory.history[-1].peak_bytes)
    report = memory.history[-1]
    assert report.peak_bytes <= peaks[0] * 0.1
    assert report.recomputed_ops <= 6 * report.ops


def test_temporaries_of_a_replay_are_spilled_when_they_do_not_fit() -> None:
    def program() -> Image:
        x = matrix()
        parts = [x * n for n in range(1, 9)]
        return image(torch.cat([part.sin() for part in parts]).sum(0))

    expected = program()
    with spillway.manage(nn.Linear(1, 1), budget=20 * 4 * SIDE * SIDE, method=ORDERS["recompute first"]()) as memory:
        with memory.step():
            big = torch.cat([matrix(n) + 1 for n in range(8)])
            before = image(big)
            if not is_dropped(memory, big):
                dropped(memory, big)
            assert program() == expected
            assert image(big) == before
        assert memory.history[-1].peak_bytes <= memory.allowed


# ---------------------------------------------------------------------- 9. forgetting


def test_the_end_of_a_step_forgets_every_recipe_and_nothing_piles_up() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE), nn.Linear(SIDE, SIDE))
    optimizer = torch.optim.Adam(net.parameters())
    known, slots = [], []
    with spillway.manage(net, optimizer, budget="600 KiB", method=ORDERS["recompute first"]()) as memory:
        for _n in range(12):
            with memory.step():
                net(torch.randn(512, SIDE)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            engine = memory._engine
            assert engine.controller.recipes == []
            assert not engine.controller.dropped
            assert all(storage.value.recipe is None for storage in engine.table.values() if storage.value)
            known.append(len(engine.table))
            slots.append(engine.backend.tier.used)
        assert sum(report.drops for report in memory.history) > 0
    assert len(set(known[2:])) == 1
    assert max(slots[6:]) <= max(slots[:6])


# ---------------------------------------------------------------------- 10. aten.set_


@pytest.mark.parametrize("way", [Drop, Move])
def test_a_tensor_that_changes_its_storage_takes_the_right_bytes_along(memory: Session, way: type[Drop | Move]) -> None:
    with memory.step():
        first, second = matrix(1) + 1, matrix(2) + 1
        expected = image(first), image(second)
        alias = torch.empty(0)
        assert put_away(memory, second, way)
        alias.set_(second)
        assert image(alias) == expected[1]
        assert put_away(memory, alias, way)
        first.data = second
        assert image(first) == expected[1]
        alias.set_(first.untyped_storage(), 0, first.shape, first.stride())
        assert image(alias) == expected[1]
    assert image(first) == image(second) == expected[1]
