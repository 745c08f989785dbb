"""What a refusal names works at the first try, and a tenth less than that is refused; `benchmarks/refusals.py` and
`benchmarks/block_refusals.py` try many more."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spillway
from spillway import BlockOptions
from spillway.engines.tensors.optimizers import NUMBERS, GroupsInParts, OptimizerInParts, sizes_of_parts
from spillway.engines.tensors.tally import Tally
from spillway.errors import BudgetInfeasible
from spillway.methods import Action, Checkpoint
from spillway.session.needs import Needs
from spillway.session.tensor_session import TensorSession
from spillway.units import Bytes
from tests.cpu import block_refusal_cases, refusal_cases
from tests.cpu.another_process import run_python
from tests.cpu.refusal_cases import Case, cases
from tests.cpu.taken_by_ops import CONVOLUTIONS, misses, taken

NETWORKS = ("autoencoder", "bridged", "language", "recurrent", "tree")
CASES = {case.network: case for case in cases(40) if case.network in NETWORKS}
FACTORED = Case(network="classifier", optimizer="Adafactor", form="single", seed=55)
MASKED = Case(network="classifier", optimizer="Rprop", form="foreach", seed=1)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("case", [*CASES.values(), FACTORED, MASKED], ids=str)
def test_a_refusal_of_the_tensor_engine_names_what_works_and_hardly_more(case: Case) -> None:
    def trained(budget: Bytes) -> Bytes | BudgetInfeasible:
        return refusal_cases.trained(case, "lru", budget)

    peak = trained(1 << 30)
    assert isinstance(peak, int)
    for budget in (min(40_000, peak // 2), peak // 6):
        refusal = trained(budget)
        assert isinstance(refusal, BudgetInfeasible)
        assert refusal.exact
        assert isinstance(trained(refusal.smallest_budget), int)
        assert isinstance(trained(int(refusal.smallest_budget / refusal_cases.TOO_MUCH)), BudgetInfeasible)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", block_refusal_cases.METHODS)
def test_a_refusal_of_the_block_engine_names_what_works_and_hardly_more(method: str) -> None:
    refusal = block_refusal_cases.trained(3, method, 100_000)
    assert isinstance(refusal, BudgetInfeasible)
    assert isinstance(block_refusal_cases.trained(3, method, refusal.smallest_budget), int)
    less = int(refusal.smallest_budget / block_refusal_cases.TOO_MUCH)
    assert isinstance(block_refusal_cases.trained(3, method, less), BudgetInfeasible)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", ["checkpoint", "mimose"])
def test_a_refusal_says_what_it_takes_where_gradients_stay_allocated(method: str) -> None:
    def trained(budget: Bytes) -> BudgetInfeasible | None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)))
        return refused(model, torch.randn(32, 64), budget, method, keeps=True)

    refusal = trained(100_000)
    assert isinstance(refusal, BudgetInfeasible)
    [said] = [note for note in refusal.__notes__ if "gradients stay allocated" in note]
    named = int(said.rpartition("it takes ")[2].partition(" bytes")[0])
    assert trained(refusal.smallest_budget) is not None
    assert trained(named) is None
    assert trained(int(named / refusal_cases.TOO_MUCH)) is not None


@pytest.mark.parametrize("method", ["auto", "lru"])
def test_what_a_loss_takes_that_needs_more_than_any_op_of_the_model_is_called_a_bound_from_below(method: str) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    x = torch.randn(128, 32)
    with spillway.manage(model, torch.optim.SGD(model.parameters()), budget=1 << 20, method=method) as memory:
        with pytest.raises(BudgetInfeasible, match="or more") as refused, memory.step(x):
            y = model(x)
            (y[:, None] - y[None]).square().mean().backward()
        assert not refused.value.exact


class _Cells(nn.Module):
    """Of which little leaves, as nearly all that they save is too small to."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(16, 16) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for cell in self.cells:
            x = cell(x, state)
        return x


@pytest.mark.long
@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.SELECTIVE_OFFLOADED, Action.COMPRESS])
def test_a_refusal_names_what_works_whatever_becomes_of_blocks(action: Action) -> None:
    refusal = refused(_Cells(), torch.randn(32, 16), 100_000, Checkpoint(action))
    assert refusal is not None
    assert refused(_Cells(), torch.randn(32, 16), refusal.smallest_budget, Checkpoint(action)) is None


@pytest.mark.long
def test_what_blocks_are_called_with_is_named_where_it_stays_and_not_where_it_waits_elsewhere() -> None:
    def trained(budget: Bytes) -> BudgetInfeasible | None:
        model = nn.Sequential(*(Widening() for _ in range(24)))
        return refused(model, torch.randn(1024, 64), budget, Checkpoint(Action.RECOMPUTE_OFFLOADED))

    refusal = trained(1_200_000)
    assert refusal is not None
    assert refusal.op_index == 0
    assert trained(refusal.smallest_budget) is None
    assert trained(int(refusal.smallest_budget / block_refusal_cases.TOO_MUCH)) is not None


@pytest.mark.long(but=1)
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_what_a_refusal_names_in_half_precision_is_called_a_bound_from_below(short: torch.dtype) -> None:
    """Kernels of products pack their operands, and add up in full precision, as each processor has it."""
    for dtype in (torch.float32, short):
        model = nn.Sequential(*(Widening() for _ in range(4))).to(dtype)
        refusal = refused(model, torch.randn(256, 64, dtype=dtype), 100_000, "checkpoint")
        assert refusal is not None
        assert refusal.exact == (dtype is torch.float32)


@pytest.mark.long(but=2)
@pytest.mark.parametrize("case", [CASES["language"], CASES["tree"], MASKED], ids=str)
@pytest.mark.parametrize("budget", [40_000, 250_000])
def test_a_method_that_takes_a_multiple_of_the_budget_at_most_names_what_the_whole_step_takes(
    case: Case, budget: Bytes
) -> None:
    refusal = refusal_cases.trained(case, "uvm", budget)
    assert isinstance(refusal, BudgetInfeasible)
    assert isinstance(refusal_cases.trained(case, "uvm", refusal.smallest_budget), int)
    assert isinstance(refusal_cases.trained(case, "uvm", int(refusal.smallest_budget / 1.25)), BudgetInfeasible)


TOO_LARGE: Any = (
    lambda x: torch.empty(1 << 50),
    lambda x: torch.zeros(1 << 47, dtype=torch.uint8),
    lambda x: x.expand(1 << 40, *x.shape).contiguous(),
    lambda x: x.detach().clone().resize_(1 << 48),
    lambda x: torch.empty(64).untyped_storage().resize_(1 << 50),
    lambda x: torch.empty(0).set_(torch.empty(4).untyped_storage(), 0, (1 << 48,), (1,)),
)
"""What no device has."""


def tried_too_much(method: str | None, budget: Bytes | None) -> tuple[list[Tensor], list[str], list[Bytes]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6)))
    optimizer, x, said = torch.optim.AdamW(model.parameters()), torch.randn(256, 64), list[str]()

    def tries() -> None:
        for too_large in TOO_LARGE:
            with pytest.raises(RuntimeError) as raised:
                too_large(x)
            assert type(raised.value) is RuntimeError
            said.append(str(raised.value).splitlines()[0])
        assert (torch.empty(1 << 50, device="meta") * 2).nbytes == 1 << 52  # which takes nothing

    session = spillway.manage(model, optimizer, budget=budget, method=method) if method is not None else None
    for _ in range(3):
        with nullcontext() if session is None else session.step(x):
            tries()
            loss = model(x).square().mean()
            tries()
            loss.backward()
            tries()
            optimizer.step()
            optimizer.zero_grad()
        tries()
    peaks = [one.peak_bytes for one in session.history] if session is not None else []
    if session is not None:
        session.close()
    return [parameter.detach().clone() for parameter in model.parameters()], said, peaks


@pytest.mark.long(but=4)
@pytest.mark.parametrize("method", ["auto", "lru", "dtr", "delta", "keep-all", "mimose", "checkpoint"])
def test_what_no_device_has_fails_as_it_does_plainly_and_the_step_goes_on(method: str) -> None:
    plain, said, _ = tried_too_much(None, None)
    budget = 1_200_000 if method != "keep-all" else 4_000_000
    managed, said_too, peaks = tried_too_much(method, budget)
    assert said_too == said
    assert all(map(torch.equal, plain, managed))
    assert len(peaks) == 3
    assert max(peaks) <= budget


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", ["auto", "lru", "checkpoint"])
def test_where_batches_vary_in_size_a_refusal_says_that_it_is_about_this_one(method: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    said: list[bool] = []
    with spillway.manage(model, budget="300KiB", method=method) as memory:
        for rows in (32, 32, 8000, 8000):
            x = torch.randn(rows, 64)
            try:
                with memory.step(x):
                    model(x).square().mean().backward()
            except BudgetInfeasible as refusal:
                said.append("larger ones may need more" in "".join(refusal.__notes__))
    assert said == [True, True]
    with spillway.manage(model, budget="300KiB", method=method) as memory:
        with pytest.raises(BudgetInfeasible) as raised, memory.step(x):
            model(x).square().mean().backward()
        assert "larger ones may need more" not in "".join(getattr(raised.value, "__notes__", ()))


@pytest.mark.long(but=2)
@pytest.mark.parametrize("method", ["auto", "checkpoint"])
@pytest.mark.parametrize(
    "seed", range(block_refusal_cases.LARGE, block_refusal_cases.LARGE + len(block_refusal_cases.PLACES))
)
def test_what_blocks_copy_of_arguments_buffers_and_attributes_is_counted(seed: int, method: str) -> None:
    refusal = block_refusal_cases.trained(seed, method, 100_000)
    assert isinstance(refusal, BudgetInfeasible)
    assert refusal.exact
    assert isinstance(block_refusal_cases.trained(seed, method, refusal.smallest_budget), int)
    less = int(refusal.smallest_budget / block_refusal_cases.TOO_MUCH)
    assert isinstance(block_refusal_cases.trained(seed, method, less), BudgetInfeasible)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("method", ["lru", "checkpoint"])
def test_with_hooks_around_a_forward_a_refusal_names_a_bound_from_below(method: str) -> None:
    """Nobody knows what they make. Torch's own make weights, of which the tensor engine's copy of a model has none."""

    def refusal(prepare: Callable[[nn.Module], object]) -> BudgetInfeasible:
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
        model, x = nn.Sequential(*blocks), torch.randn(512, 64)
        for block in blocks:
            prepare(block[0])
        with spillway.manage(model, budget="150KiB", method=method) as memory:
            with pytest.raises(BudgetInfeasible) as raised, memory.step(x):
                model(x).square().mean().backward()
            return raised.value

    assert refusal(lambda linear: None).exact
    if method == "checkpoint":
        assert refusal(nn.utils.spectral_norm).exact
    hooked = refusal(lambda linear: linear.register_forward_hook(lambda module, args, out: out.clamp(-1, 1)))
    assert not hooked.exact
    assert str(hooked).endswith("or more.")


UNUSUAL = (2153, 2199, 2083, 2174, 2202, 2257, 2015, 2124, 2233)
"""One of each kind, with three blocks of 32 x 32: what is told of orthogonal weights takes an op a column."""


@pytest.mark.long(but=1)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("seed", UNUSUAL, ids=[*block_refusal_cases.UNUSUAL])
def test_unusual_weights_optimizers_and_gradients_are_counted(seed: int) -> None:
    refusal = block_refusal_cases.trained(seed, "checkpoint", 100_000)
    assert isinstance(refusal, BudgetInfeasible)
    assert refusal.exact
    assert isinstance(block_refusal_cases.trained(seed, "checkpoint", refusal.smallest_budget), int)
    less = int(refusal.smallest_budget / block_refusal_cases.TOO_MUCH)
    assert isinstance(block_refusal_cases.trained(seed, "checkpoint", less), BudgetInfeasible)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("method", "budget"), [("checkpoint", 4_811_028), ("mimose", 1_000_000), ("mimose", 5_773_234)]
)
def test_a_closure_that_is_called_again_has_room_beside_what_its_optimizer_holds(method: str, budget: int) -> None:
    """And beside the loss of its first call."""
    refusal = block_refusal_cases.trained(2024, method, budget)
    assert isinstance(refusal, BudgetInfeasible)
    assert isinstance(block_refusal_cases.trained(2024, method, refusal.smallest_budget), int)


class Counts(nn.Module):
    """Its forward writes to its batch of whole numbers, and a part of it that stands in no list of modules is shared by
    every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(100, 256), nn.Linear(256, 256)
        line = self.line
        self.shared = lambda x: line(x)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.shared(self.table(ids.sub_(1)))
        return made


def test_a_refusal_leaves_the_batch_and_the_gradients_alone() -> None:
    model, ids = Counts(), torch.full((4096,), 50)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        spillway.manage(model, optimizer, budget="3MiB", method="lru") as memory,
        pytest.raises(spillway.BudgetInfeasible), memory.step(ids),
    ):  # fmt: skip
        model(ids).square().mean().backward()
    assert ids.unique().tolist() == [49]
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3


def test_a_refusal_writes_to_nothing_that_stands_in_a_closure() -> None:
    model, norm = Counts(), nn.BatchNorm1d(256)
    model.shared = lambda x: norm(model.line(x))  # type: ignore[assignment]
    with (
        spillway.manage(model, budget="3MiB", method="lru") as memory,
        pytest.raises(spillway.BudgetInfeasible), memory.step(ids := torch.full((4096,), 50)),
    ):  # fmt: skip
        model(ids)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 0


def test_copies_of_a_model_that_are_made_in_a_step_do_not_tell_how_they_are_called() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    with spillway.manage(model, budget="64MiB", method="lru") as memory:
        assert isinstance(memory, TensorSession)
        with memory.step(x):
            step: Any = memory._running
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                copied(x[:1])
            assert step._calls.found == []
            model(x[:1])
            assert [one.model() for one in step._calls.found] == [model]
        assert not model._forward_pre_hooks


def test_an_optimizer_of_the_users_own_is_stepped_by_the_user_alone() -> None:
    class Own(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Own.steps += 1
            return super().step(closure)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    optimizer = Own(model.parameters(), 0.1, momentum=0.9)
    with spillway.manage(
        model, optimizer, budget="64MiB", method="checkpoint", blocks=spillway.BlockOptions(names=list("0123"))
    ) as memory:
        for _ in range(3):
            with memory.step(batch := torch.ones(8, 32)):
                model(batch).square().mean().backward()
                optimizer.step()
    assert Own.steps == 3


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [
        *(((8, 4096, *rest), torch.contiguous_format) for rest in ((), (4,), (4, 4))),
        ((64, 4096), torch.contiguous_format),
        ((2, 4096, 4, 4), torch.channels_last),
    ],
)
def test_what_batch_normalisation_takes_for_itself_is_told(shape: tuple[int, ...], memory_format: Any) -> None:
    x = torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()
    norm = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1])
    made = [norm(x)]
    gradient = torch.ones_like(made[0])

    def backward() -> Any:
        return torch.autograd.grad(made, [x, norm.weight, norm.bias], gradient, retain_graph=True)

    for run in (lambda: norm(x), backward):
        with Tally([x, *norm.parameters(), *norm.buffers(), gradient, *made]) as tally:
            run()
        # Numbers of a few bytes, such as how many batches there have been, are rounded up by the allocator.
        assert abs(taken(run) - tally.peak) < 1024


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("steps", "batch", "width", "hidden"),
    [(128, 1, 48, 48), (17, 3, 20, 36), (9, 8, 16, 256), (60, 7, 100, 48), (1, 1, 16, 16)],
)
def test_what_an_lstm_takes_for_itself_is_told(
    steps: int, batch: int, width: int, hidden: int, bidirectional: bool
) -> None:
    x = torch.randn(steps, batch, width, requires_grad=True)
    lstm = nn.LSTM(width, hidden, num_layers=2, bidirectional=bidirectional)
    made = [lstm(x)[0]]
    gradient = torch.ones_like(made[0])

    def backward() -> Any:
        return torch.autograd.grad(made, [x, *lstm.parameters()], gradient, retain_graph=True)

    for run in (lambda: lstm(x), backward):
        with Tally([x, *lstm.parameters(), gradient, *made]) as tally:
            run()
        assert abs(taken(run) - tally.peak) < 1024


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "dtype"),
    [
        (16, 16, 8, torch.float32), (200, 130, 20, torch.float32), (800, 600, 64, torch.float32),
        (200, 600, 8, torch.float64), (200, 600, 8, torch.bfloat16), (201, 603, 9, torch.bfloat16),
        (70, 65, 7, torch.bfloat16), (66, 64, 8, torch.float16),
    ],
)  # fmt: skip
def test_what_attention_takes_for_itself_is_told(
    queries: int, keys: int, width: int, dtype: torch.dtype, masked: bool, in_order: bool
) -> None:
    def made(length: int) -> Tensor:
        if in_order:
            return torch.randn(2, length, 4, width, dtype=dtype).transpose(1, 2).requires_grad_()
        return torch.randn(2, 4, length, width, dtype=dtype, requires_grad=True)

    q, k, v = operands = made(queries), made(keys), made(keys)
    mask = torch.randn(queries, keys, dtype=dtype) if masked else None
    result = [nn.functional.scaled_dot_product_attention(q, k, v, mask)]
    gradient = made(queries).detach()

    def backward() -> Any:
        return torch.autograd.grad(result, operands, gradient, retain_graph=True)

    runs = [lambda: nn.functional.scaled_dot_product_attention(q, k, v, mask), backward]
    for run in runs if dtype.itemsize >= 4 else runs[:1]:
        with Tally([*operands, gradient, *result, *([] if mask is None else [mask])]) as tally:
            run()
        assert abs(taken(run) - tally.peak) < 1024


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_what_a_convolution_takes_for_itself_is_told(name: str) -> None:
    assert misses(name) == []


_cpu: Any = torch.cpu
_SHORT = _cpu._is_avx512_supported() and not _cpu._is_amx_tile_supported()


@pytest.mark.skipif(not _SHORT, reason="told of processors with AVX-512 and without tiles")
@pytest.mark.parametrize("name", ["3x3", "strided", "1x1", "odd channels", "dilated", "3d", "transposed"])
def test_what_gradients_of_short_convolutions_take_is_told(name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    convolution, x = make().bfloat16(), torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    made = convolution(x)
    gradient, wanted = torch.ones_like(made), [x, *convolution.parameters()]

    def run() -> Any:
        return torch.autograd.grad(made, wanted, gradient, retain_graph=True)

    with Tally([*wanted, gradient, made]) as tally:
        run()
    assert taken(run) == pytest.approx(tally.peak, rel=0.01)


@pytest.mark.long
def test_what_convolutions_take_is_told_of_processors_without_avx512_too() -> None:
    code = "from tests.cpu import taken_by_ops; taken_by_ops.main()"
    ran = run_python(code, ONEDNN_MAX_CPU_ISA="AVX2")
    assert (ran.returncode, ran.stdout.split("\n")) == (0, [""]), ran.stderr


def in_parts(optimizer: torch.optim.Optimizer, part_bytes: Bytes | None) -> Callable[[], Any]:
    return partial(type(optimizer).step, OptimizerInParts(GroupsInParts(optimizer, part_bytes)))


FORMS = [("AdamW", {"fused": True}), ("Adagrad", {"fused": True})] + [
    (name, {"foreach": foreach})
    for name in ("AdamW", "RMSprop", "Adadelta", "NAdam", "Adagrad", "Adamax", "Rprop", "SGD", "ASGD")
    for foreach in (False, True)
]


@pytest.mark.long(but=11)
@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("shapes", [((64, 128), (128, 64), (32, 256)), ((64, 128),) * 3, ((64, 64), (8,), (96, 64))])
def test_what_an_update_takes_is_told(name: str, form: dict[str, Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    """Also what the update of one parameter leaves to that of the next, whose names it still has."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **form)
    for _ in range(2):
        for one in parameters:
            one.grad = torch.ones_like(one)
        needs = Needs()
        told, [*_, smallest] = needs.of(optimizer), [None, *sizes_of_parts(optimizer)]
        assert (needs.part_bytes(optimizer, 0), needs.part_bytes(optimizer, 1 << 40)) == (smallest, None)
        assert 0 <= told.state + told.working - taken(in_parts(optimizer, smallest)) <= NUMBERS


@pytest.mark.parametrize(("name", "form"), [*FORMS, ("SGD", {"fused": True, "momentum": 0.9})])
def test_what_an_update_takes_is_told_without_taking_it(name: str, form: dict[str, Any]) -> None:
    """Of kernels that fake tensors do not know torch runs the real one, on zeros."""
    parameters = [nn.Parameter(torch.randn(256, 256)) for _ in range(4)]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **form)
    assert taken(lambda: Needs().of(optimizer)) < parameters[0].nbytes


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_of_parameters_whose_state_is_there_an_update_adds_none(name: str, form: dict[str, Any]) -> None:
    """One of them was without a gradient until now."""
    parameters = [nn.Parameter(torch.randn(64, 128)) for _ in range(3)]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, **form)
    for updated in (parameters[:2], parameters):
        for one in updated:
            one.grad = torch.ones_like(one)
        told = Needs().of(optimizer)
        took = taken(in_parts(optimizer, 0))
    assert 0 <= told.state + told.working - took <= NUMBERS


def _matrices() -> dict[str, tuple[Callable[..., Any], Tensor]]:
    torch.manual_seed(0)
    square = torch.randn(128, 128)
    upright = square @ square.T / 128 + torch.eye(128)
    return {
        "matrix_exp": (torch.matrix_exp, square),
        "matrix_exp of several": (torch.matrix_exp, torch.randn(3, 64, 64)),
        "householder_product": (lambda a: torch.linalg.householder_product(a, a[0]), square),
        "inv": (torch.linalg.inv, upright),
        "qr": (torch.linalg.qr, square),
        "svd": (torch.linalg.svd, square),
        "eigh": (torch.linalg.eigh, upright),
        "group_norm": (lambda a: nn.functional.group_norm(a, 8), torch.randn(64, 512)),
    }


@pytest.mark.parametrize("name", _matrices())
def test_what_linear_algebra_takes_for_itself_is_told(name: str) -> None:
    function, given = _matrices()[name]
    given.requires_grad_()
    made = function(given)
    ends = [one for one in (made if isinstance(made, tuple) else [made]) if one.requires_grad]

    def backward() -> Any:
        return torch.autograd.grad(ends[0], given, torch.ones_like(ends[0]), retain_graph=True)

    for run in (lambda: function(given), backward):
        run()
        with Tally([given, *ends]) as tally:
            run()
        assert abs(taken(run) - tally.peak) <= given.nbytes // 5


def _operands() -> dict[str, tuple[Callable[..., Any], Sequence[Tensor]]]:
    torch.manual_seed(0)
    single, whole = torch.randn(64, 128), torch.randint(1, 5, (64, 128))
    pairs, several, short = torch.randn(64, 128, dtype=torch.cfloat), torch.randn(4, 64, 64, dtype=torch.cfloat), 0.5
    return {
        "conjugate times": (lambda a: a.conj() @ a.mT, [pairs]),
        "conjugate turned times": (lambda a: a.mH @ a, [pairs]),
        "conjugates of a batch": (lambda a: a.mH @ a, [several]),
        "every other column": (lambda a: a[:, ::2] @ a[:, ::2].mT, [single]),
        "every other column of a batch": (lambda a: a[:, :, ::2] @ a[:, :, ::2].mT, [several]),
        "a column": (lambda a: a.mH.conj() @ a[:, :1], [pairs]),
        "linear": (lambda a, b: nn.functional.linear(a, b), [pairs, pairs[:32].clone()]),
        "bias": (lambda a, b: torch.addmm(b[:, 0], a, b.mT), [pairs, pairs[:32].clone()]),
        "convolution": (lambda a, b: nn.functional.conv1d(a, b), [several, several[:, :, :3].clone()]),
        "doubles": (lambda a, b: a * b, [single, single.double()]),
        "doubles, written": (lambda a, b: (a * 2).add_(b * 2), [single, single.double()]),
        "half as long": (lambda a, b: a + b, [single, single.bfloat16()]),
        "a mask": (lambda a, b: a * (b > 2), [single, whole]),
        "compared": (lambda a, b: (a > b).sum(), [single, whole]),
        "compared with a number": (lambda a: a == short, [whole]),
        "divided": (lambda a: a / 3, [whole]),
        "chosen": (lambda a, b: torch.where(a > 0, a, b), [single, single.double()]),
        "absolute": (torch.abs, [pairs]),
        "summed": (lambda a: a.sum(0, dtype=torch.float32), [single.bfloat16()]),
        "half as long, its mean": (lambda a: a.mean(0), [single.bfloat16()]),
        "its mean half as long": (lambda a: a.mean(dtype=torch.bfloat16), [single]),
        "a mask, and products": (lambda a, b: torch.addcmul(a > 2, b, b), [whole, single]),
    }


@pytest.mark.parametrize("name", _operands())
def test_what_operands_are_copied_to_is_told(name: str) -> None:
    """To the type that is computed in, or to where the kernel of a product reads them."""
    function, given = _operands()[name]
    given = [one.requires_grad_(one.is_floating_point() or one.is_complex()) for one in given]
    made = function(*given)

    def backward() -> Any:
        wanted = [one for one in given if one.requires_grad]
        return torch.autograd.grad(made, wanted, torch.ones_like(made), retain_graph=True)

    for run in (lambda: function(*given), *([backward] if made.requires_grad else [])):
        run()
        with Tally([*given, made], adds=True) as tally:
            run()
        assert abs(taken(run) - tally.peak) <= 1024


def test_of_a_matrix_exponential_it_is_told_what_is_enough_and_what_cannot_be_less() -> None:
    """Its content says how long the series is."""
    for scale in (1e-9, 1e-5, 1e-3, 1e-2, 1.0):
        matrix = torch.randn(128, 128) * scale
        with Tally([matrix]) as most:
            torch.matrix_exp(matrix)
        with Tally([matrix], least=True) as least:
            torch.matrix_exp(matrix)
        assert least.peak <= taken(lambda given=matrix: torch.matrix_exp(given)) <= most.peak + 4096  # type: ignore[misc]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(("iterations", "size"), [(1, 3), (2, 1), (4, 3), (5, 20)])
def test_what_an_update_with_lbfgs_takes_is_told(iterations: int, size: int, search: str | None) -> None:
    """In every step until it remembers all that it may; more, where a search ends early or takes the evaluations."""
    parameters = [nn.Parameter(torch.randn(128, 64)) for _ in range(3)]
    steep = [torch.linspace(1, 100, one.numel()).view_as(one) for one in parameters]
    flat = sum(one.nbytes for one in parameters)
    for one in parameters:
        one.grad = torch.empty_like(one)
    optimizer = torch.optim.LBFGS(
        parameters, lr=1e-3, max_iter=iterations, history_size=size, line_search_fn=search, tolerance_change=0.0
    )

    def closure() -> float:
        with torch.no_grad():
            for one, factor in zip(parameters, steep, strict=True):
                torch.mul(one, factor, out=one.grad)
            return sum(float(torch.dot(one.grad.view(-1), one.view(-1))) for one in parameters if one.grad is not None)

    for _ in range(4):
        told = Needs().of(optimizer)
        now = taken(lambda: optimizer.step(closure))
        assert (
            0
            <= told.state + told.working - now
            <= (9 + 2 * iterations if search else 1) * flat + (2 * size + 1) * NUMBERS
        )


@pytest.mark.parametrize(
    "given",
    [
        lambda x, y: x.set_(y),
        lambda x, y: x.set_(y.detach(), 1, (4, 4), (4, 1)),
        lambda x, y: x.set_(y.untyped_storage(), 0, (512, 512)),
    ],
    ids=["a tensor", "a window", "a storage"],
)
def test_another_storage_for_a_tensor_needs_that_one_in_memory_and_no_more(given: Callable[..., Any]) -> None:
    """Not the one that it had until then, and nothing new; they are 1 MiB each."""
    model = nn.Linear(4, 4)
    with spillway.manage(model, budget="1.5MiB", method="lru") as memory:
        with memory.step():
            x, y = torch.full((512, 512), 1.0), torch.full((512, 512), 2.0)
            before = x[0]  # its storage lives on
            z = torch.full((512, 512), 3.0)
            given(x, y)
            assert x.flatten()[0] == 2.0
            assert before[0] == 1.0
            assert z[0, 0] == 3.0
        assert memory.history[-1].bytes_out


@pytest.mark.parametrize(("rows", "varies"), [((64, 64, 64), False), ((64, 32, 64), True)], ids=["numbers", "sizes"])
def test_a_refusal_says_that_it_is_of_one_size_where_batches_vary_in_size(rows: tuple[int, ...], varies: bool) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    with spillway.manage(model, budget=None, method="lru") as memory:
        for number, count in enumerate(rows):
            with memory.step((x := torch.randn(count, 256), number)):
                model(x).sum().backward()
        memory.budget = "100KiB"
        with pytest.raises(BudgetInfeasible) as refused, memory.step((x, len(rows))):
            model(x).sum().backward()
    assert any("batches vary in size" in note for note in getattr(refused.value, "__notes__", [])) == varies


class Attending(nn.Module):
    """On nested tensors: blocks that cannot run again, of a model that does not run without content."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (line(x).unflatten(-1, [4, -1]).transpose(1, 2) for line in self.lines[:3])
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = x + self.lines[3](attended.transpose(1, 2).flatten(-2))
        return out


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("method", ["checkpoint", "mimose"])
def test_what_blocks_take_that_have_not_run_is_reckoned_where_nothing_of_a_forward_can_be_told(method: str) -> None:
    """It was what had been taken until then, once for each block."""

    def trained(budget: Bytes) -> Bytes | BudgetInfeasible:
        torch.manual_seed(0)
        model = nn.Sequential(*(Attending() for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters())
        with spillway.manage(model, optimizer, budget=budget, method=method) as memory:
            try:
                for _ in range(3):
                    rows = [torch.randn(length, 64) for length in (64, 100, 30, 120)]
                    x: Any = torch.nested.nested_tensor(rows, layout=torch.jagged)
                    with memory.step(x):
                        model(x).values().square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except BudgetInfeasible as refusal:
                return refusal
            parts = sum(one.nbytes for one in (*model.parameters(), x.values(), x.offsets()))
            assert memory.history[0].start_bytes >= parts, "a nested batch counts with what it consists of"
            return max(report.peak_bytes for report in memory.history)

    peak = trained(1 << 30)
    assert isinstance(peak, int)
    tried = [refusal for refusal in [trained(peak // 3)] if isinstance(refusal, BudgetInfeasible)]
    while isinstance(again := trained(tried[-1].smallest_budget), BudgetInfeasible):
        tried.append(again)
    assert not tried[0].exact
    assert len(tried) <= 2
    assert tried[-1].smallest_budget <= peak * block_refusal_cases.TOO_MUCH


def refused(
    model: nn.Module, x: Tensor, budget: Bytes, method: str | Checkpoint, *, keeps: bool = False
) -> BudgetInfeasible | None:
    """What three steps are refused with, which keep gradients allocated or let go of them."""
    optimizer, lossy = torch.optim.SGD(model.parameters(), 0.01), BlockOptions(lossy=isinstance(method, Checkpoint))
    with spillway.manage(model, optimizer, budget=budget, method=method, blocks=lossy) as memory:
        try:
            for _ in range(3):
                with memory.step(x):
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=not keeps)
        except BudgetInfeasible as refusal:
            return refusal
    return None


class Fluctuating(nn.Module):
    """Puts another buffer in the place of a small one, which was there before the session and dies unheard."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("least", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        self.least = torch.full((4,), float(out.detach().amin()))
        return out


def test_small_buffers_that_a_step_replaces_are_added_to_what_it_took() -> None:
    def trained(budget: Bytes) -> BudgetInfeasible | None:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(Fluctuating() for _ in range(4))), torch.randn(512, 64)
        return refused(model, x, budget, "checkpoint")

    refusal = trained(2_700_000)
    assert refusal is not None
    assert refusal.smallest_budget >= refusal.needed + 4 * 16
    assert trained(refusal.smallest_budget) is None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(nn.functional.gelu(self.line(x)))


class Frugal(nn.Module):
    """Checkpoints itself, each time with a state of the random stream that is larger than what it spares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.long(but=1)
@pytest.mark.parametrize("method", ["checkpoint", "mimose"])
def test_states_of_the_random_stream_that_a_model_holds_by_itself_are_counted(method: str) -> None:
    def trained(budget: Bytes) -> BudgetInfeasible | None:
        torch.manual_seed(0)
        model, x = Frugal(), torch.randn(64, 32)
        return refused(model, x, budget, method)

    plainly = torch.get_rng_state
    refusal = trained(150_000)
    assert refusal is not None
    assert trained(refusal.smallest_budget) is None
    assert torch.get_rng_state is plainly


class Residual(nn.Module):
    """As ResNets have it: convolutions without a bias, and buffers that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        out: Tensor = torch.relu(x + self.norms[1](self.second(inner)))
        return out


def residual(budget: Bytes, width: torch.dtype) -> BudgetInfeasible | Bytes:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 32, 1), *(Residual() for _ in range(4))), torch.randn(8, 3, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    with spillway.manage(model, optimizer, budget=budget, method="checkpoint") as memory:
        try:
            for _ in range(3):
                with memory.step(x):
                    with torch.autocast("cpu", width, enabled=width.itemsize < 4):
                        loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except BudgetInfeasible as refusal:
            return refusal
        return max(report.peak_bytes for report in memory.history)


def test_of_a_network_of_convolutions_without_biases_it_is_told_what_steps_need() -> None:
    """It was reckoned by the first blocks, which are the largest: six times as much in a ResNet."""
    refusal = residual(200_000, torch.float32)
    assert isinstance(refusal, BudgetInfeasible)
    assert refusal.exact
    peak = residual(refusal.smallest_budget, torch.float32)
    assert isinstance(peak, int)
    assert refusal.smallest_budget <= block_refusal_cases.TOO_MUCH * peak


def test_where_kernels_of_short_numbers_are_not_known_a_refusal_is_a_bound_from_below() -> None:
    refusal = residual(200_000, torch.bfloat16)
    assert isinstance(refusal, BudgetInfeasible)
    assert not refusal.exact


@pytest.mark.long
def test_the_first_step_takes_more_samples_and_a_later_one_has_state_beside_it() -> None:
    """Both are never there at once: their sum was named."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[32, 64], depths=[1, 1], num_labels=5)

    def trained(budget: Bytes) -> BudgetInfeasible | Bytes:
        torch.manual_seed(0)
        model, x, labels = transformers.ResNetForImageClassification(config), torch.randn(4, 3, 32, 32), torch.arange(4)
        optimizer = torch.optim.AdamW(model.parameters())
        with spillway.manage(model, optimizer, budget=budget, method="checkpoint") as memory:
            try:
                for _ in range(3):
                    with memory.step(x):
                        model(x, labels=labels).loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except BudgetInfeasible as refusal:
                return refusal
            return max(report.peak_bytes for report in memory.history)

    refusal = trained(100_000)
    assert isinstance(refusal, BudgetInfeasible)
    peak = trained(refusal.smallest_budget)
    assert isinstance(peak, int)
    assert refusal.smallest_budget <= 1.03 * peak


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


@pytest.mark.long
def test_a_loss_that_takes_more_than_the_usual_ones_is_named_as_it_was_seen_beside_the_state() -> None:
    """Of what it took nothing is explained by what is only added to be on the safe side."""

    def trained(budget: Bytes) -> BudgetInfeasible | int:
        torch.manual_seed(0)
        model = nn.Sequential(*(Widening() for _ in range(6)), nn.Linear(64, 400))
        x, labels = torch.randn(512, 64), torch.randint(0, 400, (512,))
        optimizer = torch.optim.AdamW(model.parameters())
        with spillway.manage(model, optimizer, budget=budget, method="checkpoint") as memory:
            try:
                for _ in range(3):
                    with memory.step(x):
                        nn.functional.cross_entropy(model(x), labels).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except BudgetInfeasible as refusal:
                return refusal
            return max(report.peak_bytes for report in memory.history)

    for budget in (2_000_000, 3_000_000):
        refusal = trained(budget)
        assert isinstance(refusal, BudgetInfeasible)
        assert refusal.exact
        assert isinstance(trained(refusal.smallest_budget), int)


@pytest.mark.long
def test_where_hooks_update_within_the_backward_a_refusal_is_a_bound_from_below() -> None:
    """What the backward takes after the update that is refused nobody knows."""

    def trained(budget: Bytes) -> BudgetInfeasible | int:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(Widening() for _ in range(8))), torch.randn(256, 64)
        optimizers = {one: torch.optim.AdamW([one]) for one in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(update)
        with spillway.manage(model, [*optimizers.values()], budget=budget, method="mimose") as memory:
            try:
                for _ in range(3):
                    with memory.step(x):
                        model(x).square().mean().backward()
            except BudgetInfeasible as refusal:
                return refusal
            return max(report.peak_bytes for report in memory.history)

    peak = trained(1 << 30)
    assert isinstance(peak, int)
    refusal = trained(peak * 3 // 4)
    assert isinstance(refusal, BudgetInfeasible)
    assert refusal.op_index > 0
    assert not refusal.exact


class Adapted(nn.Module):
    """Frozen, with small weights beside that are trained: two gradients of the same values are added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*widths).requires_grad_(False) for widths in ((64, 256), (256, 64)))
        narrow = ((64, 4), (4, 256), (256, 4), (4, 64))
        self.adapters = nn.ModuleList(nn.Linear(*widths, bias=False) for widths in narrow)

    def forward(self, x: Tensor) -> Tensor:
        narrow, wide, again, out = self.adapters
        hidden = torch.tanh(self.up(x) + wide(narrow(x)))
        result: Tensor = x + self.down(hidden) + out(again(hidden))
        return result


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*widths, dtype=torch.cfloat) for widths in ((64, 256), (256, 64)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def with_adam(model: nn.Module, x: Tensor, budget: Bytes, action: Action) -> BudgetInfeasible | Bytes:
    """What three steps of what is trained take at most, or are refused with."""
    optimizer = torch.optim.AdamW(one for one in model.parameters() if one.requires_grad)
    with spillway.manage(model, optimizer, budget=budget, method=Checkpoint(action)) as memory:
        try:
            for _ in range(3):
                with memory.step(x):
                    model(x).abs().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except BudgetInfeasible as refusal:
            return refusal
        return max(report.peak_bytes for report in memory.history)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Adapted, Complex])
@pytest.mark.parametrize("action", [Action.RECOMPUTE, Action.SELECTIVE])
def test_what_recomputing_needs_is_enough_for_other_actions_and_so_is_more(action: Action, kind: Any) -> None:
    """They held as much on top while a block ran or went backward as had not been seen yet."""

    def trained(action: Action, budget: Bytes) -> BudgetInfeasible | Bytes:
        torch.manual_seed(0)
        model = nn.Sequential(*(kind() for _ in range(4)))
        return with_adam(model, torch.randn(1024, 64, dtype=next(model.parameters()).dtype), budget, action)

    enough = trained(Action.RECOMPUTE, 1 << 30)
    assert isinstance(enough, int)
    refusal = trained(action, int(0.33 * enough))
    assert isinstance(refusal, BudgetInfeasible)
    assert refusal.smallest_budget <= block_refusal_cases.TOO_MUCH * enough
    assert isinstance(trained(action, refusal.smallest_budget), int)
    assert all(isinstance(trained(action, int(more * enough)), int) for more in (1.03, 1.08))


class Biased(nn.Module):
    """The first computes what all add, and leaves it where they find it."""

    def __init__(self, left: dict[str, Tensor], *, first: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.bias = nn.Linear(64, 64) if first else None
        self.left = lambda: left  # no copy of the model has one of its own

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            self.left()["bias"] = torch.tanh(self.bias(x))
        out: Tensor = x + self.down(torch.tanh(self.up(x + self.left()["bias"])))
        return out


class Peeking(nn.Sequential):
    """Looks at a number, so that nothing is told of it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * float(x.abs().amax() > 0))


def _under(action: Action, budget: Bytes, kind: type[nn.Sequential]) -> BudgetInfeasible | Bytes:
    torch.manual_seed(0)
    left: dict[str, Tensor] = {}
    model, x = kind(*(Biased(left, first=not number) for number in range(5))), torch.randn(1024, 64)
    return with_adam(model, x, budget, action)


@pytest.mark.long
def test_what_the_step_before_left_outside_of_the_model_is_no_obstacle_to_telling() -> None:
    enough = _under(Action.RECOMPUTE, 1 << 30, nn.Sequential)
    assert isinstance(enough, int)
    refusal = _under(Action.SELECTIVE, int(0.6 * enough), nn.Sequential)
    assert isinstance(refusal, BudgetInfeasible)
    assert refusal.exact
    assert refusal.smallest_budget <= block_refusal_cases.TOO_MUCH * enough
    assert isinstance(_under(Action.SELECTIVE, refusal.smallest_budget, nn.Sequential), int)
    assert isinstance(_under(Action.SELECTIVE, int(1.05 * enough), nn.Sequential), int)


def test_where_nothing_can_be_told_and_blocks_hold_more_in_more_room_a_refusal_is_a_bound_from_below() -> None:
    enough = _under(Action.RECOMPUTE, 1 << 30, Peeking)
    assert isinstance(enough, int)
    for share in (0.6, 1.1):
        refusal = _under(Action.SELECTIVE, int(share * enough), Peeking)
        assert isinstance(refusal, BudgetInfeasible)
        assert not refusal.exact


def test_copies_of_small_buffers_that_every_step_has_are_counted() -> None:
    """Each is too small to leave."""

    def trained(budget: Bytes) -> BudgetInfeasible | None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(40)))
        optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(32, 32)
        with spillway.manage(model, optimizer, budget=budget) as memory:
            try:
                for _ in range(3):
                    with memory.step(x):
                        model(x).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
            except BudgetInfeasible as refusal:
                return refusal
        return None

    refusal = trained(1)
    assert refusal is not None
    assert refusal.exact
    assert trained(refusal.smallest_budget) is None
