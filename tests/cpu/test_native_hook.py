"""The hook in C++ and the handlers in Python do the same; what the hook does not take goes on to them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, layer_norm

import spillway
from spillway.engines.environment import ATTENTION, EINSUM, GENERAL, OpEnvironment
from spillway.engines.tensors import native_hook
from spillway.engines.tensors.calls import Call, NativeCall
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import BudgetInfeasible, NativeError
from spillway.internals.private import storage_address
from spillway.memory.budget import UNLIMITED
from spillway.memory.records import Recipe, Storage
from spillway.methods import LRU, AbstractPolicy, KeepAll
from spillway.native import library
from tests.cpu.program_judge import ALIKE, POLICIES
from tests.cpu.program_runs import managed, taken_natively
from tests.cpu.programs import random_program
from tests.cpu.test_settings import CHANGES

pytestmark = pytest.mark.skipif(not library.wanted(library.HOOK), reason="SPILLWAY_NATIVE says so")

MiB = 1 << 20


def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_hook, "native_module", lambda: None)
    monkeypatch.setattr("spillway.engines.tensors.mode.native_module", lambda: None)


# ------------------------------------------------------------------ the same books


def attention(x: Tensor, weight: Tensor, parameters: list[Tensor]) -> Tensor:
    queries, keys, values = (x @ weight[:, part * 16 : part * 16 + 16] for part in range(3))
    shares = torch.softmax(queries @ keys.transpose(-1, -2) * 0.25, dim=-1)
    return layer_norm(gelu((shares @ values) @ parameters[0]), (16,))


def pictures(x: Tensor, weight: Tensor, parameters: list[Tensor]) -> Tensor:
    image = x.reshape(4, 4, 8, 8)
    found = torch.relu_(torch.conv2d(image, weight.reshape(-1)[: 8 * 4 * 9].reshape(8, 4, 3, 3), padding=1))
    pooled = torch.max_pool2d(found, 2)
    return (torch.nn.functional.batch_norm(pooled, None, None, training=True) * parameters[0].mean()).flatten(1)


def sums_and_writes(x: Tensor, weight: Tensor, parameters: list[Tensor]) -> Tensor:
    total = torch.zeros_like(x)
    for scale in (0.5, 2.0, -1.0):
        total.add_(x.mul(scale).tanh_(), alpha=0.5)
        total.copy_(total.exp().clamp(max=3.0))
    total[0].zero_()
    return torch.where(total > 1, total, -total).sum(-1, dtype=torch.float64) + weight.double().mean()


def types(x: Tensor, weight: Tensor, parameters: list[Tensor]) -> Tensor:
    half = x.to(torch.bfloat16) @ weight[:, :16].to(torch.bfloat16)
    turned = torch.complex(x, x).conj() * (1 + 2j)
    return half.float().sum() + turned.abs().sum() + (x > 0).sum() + x.argmax().float()


def statistics(x: Tensor, weight: Tensor, parameters: list[Tensor]) -> Tensor:
    mean, deviation = torch.zeros(16), torch.ones(16)
    norm = torch.nn.functional.batch_norm
    for _ in range(2):
        made = norm(x.reshape(4, 16, 4, 4), mean, deviation, training=True)
    read = norm(made, mean, deviation, training=False) * mean.mean().item()
    torch.equal(mean, deviation)
    return torch.dropout(read, 0.5, train=True).sum() + weight.mean() + mean.sum()


PROGRAMS: list[Callable[[Tensor, Tensor, list[Tensor]], Tensor]] = [
    attention, pictures, sums_and_writes, types, statistics,
]  # fmt: skip


def books(engine: TensorEngine) -> list[Any]:
    """Everything that the engine has written down, without what depends on addresses and the clock."""

    def value(value: Any) -> Any:
        recipe = value.recipe and value.recipe.number
        known = value.dependents and len(value.dependents)
        return (
            value.storage.number,
            value.nbytes,
            value.absent,
            value.recorded,
            recipe,
            value.wanted,
            value.chain,
            known,
        )

    def storage(storage: Storage) -> Any:
        known = (storage.number, storage.nbytes, storage.touched - engine._first_op, storage.locks, storage.held)
        flags = (storage.written, storage.escaped, storage.exposed, storage.kind)
        return *known, *flags, value(storage.value), storage.handle.record is storage

    def recipe(recipe: Recipe) -> Any:
        written = [(place, value(new)) for place, new in recipe.writes]
        called = Call.unpacked(recipe.payload)
        outputs = called.outputs[: len(recipe.creates)]
        return (
            recipe.number - engine._first_op, recipe.name, [*map(value, recipe.reads)], [*map(value, recipe.creates)],
            written, recipe.exactness, recipe.nbytes, recipe.inside, outputs if recipe.creates else (),
        )  # fmt: skip

    budget, controller = engine.budget, engine.controller
    return [
        [storage(one) for one in engine.table.values()],
        [recipe(one) for one in controller.recipes],
        (budget.resident, budget.peak, budget.created, controller.clock, len(controller.young)),
        engine.unmanaged,
    ]


def after(program: Callable[..., Tensor], policy: AbstractPolicy, allowed: int) -> tuple[list[Any], list[Tensor], int]:
    """The books at the end of the forward and of the backward, the results, and how many ops the hook took."""
    torch.manual_seed(0)
    x, weight = torch.rand(4, 16, 16), torch.rand(16, 48, requires_grad=True)
    parameters = [torch.rand(16, 16, requires_grad=True)]
    engine = TensorEngine(policy, allowed)
    found = []
    try:
        for _ in range(2):
            engine.begin_step([("x", x), ("weight", weight), ("parameter", parameters[0])])
            loss = program(x, weight, parameters).sum()
            found += books(engine)
            loss.backward()
            found += books(engine)
            with torch.no_grad():
                for one in (weight, *parameters):
                    one.add_(one.grad if one.grad is not None else one, alpha=-1e-3)
                    one.grad = None
            found += books(engine)
            del loss
            engine.end_step()
    finally:
        engine.close()
    return found, [weight.detach(), *(one.detach() for one in parameters)], taken_natively(engine)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("policy", "allowed"), [(LRU, 1 << 30), (KeepAll, 1 << 30), (KeepAll, UNLIMITED)])
def test_the_books_are_those_of_the_handlers_in_python(
    program: Callable[..., Tensor], policy: type[AbstractPolicy], allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    hooked, results, taken = after(program, policy(), allowed)
    without_hook(monkeypatch)
    expected, others, none = after(program, policy(), allowed)
    assert hooked == expected
    assert all(map(torch.equal, results, others))
    assert taken > 6 > none == 0


@pytest.mark.long(but=2)
@pytest.mark.parametrize("seed", range(16))
def test_random_programs_end_in_the_same_state_by_the_same_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, name = random_program(9_700_000 + seed), ALIKE[seed % len(ALIKE)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peak = managed(program, KeepAll(), UNLIMITED, None).peak
        allowed = int(peak * (0.6 + 0.025 * seed))
        hooked = managed(program, POLICIES[name](), allowed, None)
        without_hook(monkeypatch)
        usual = managed(program, POLICIES[name](), allowed, None)
    assert hooked.natively >= usual.natively == 0
    assert (hooked.refusal is None) == (usual.refusal is None)
    assert (hooked.state, hooked.closed, hooked.peak, hooked.figures) == (
        usual.state, usual.closed, usual.peak, usual.figures,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["window", "lms", "sqrt-n"])
def test_steps_that_follow_a_plan_run_natively_and_move_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[list[Any], list[Tensor], float]:
        torch.manual_seed(0)
        gc.collect()
        model = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        batch, found = torch.rand(8, 32, 64), list[Any]()
        with spillway.manage(model, optimizer, budget="1.34MiB", method=name) as memory:
            for _ in range(5):
                before = taken_natively(memory._engine)
                with memory.step(batch):
                    model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                report, share = memory.history[-1], (taken_natively(memory._engine) - before) / memory._engine.ops
                found.append((report.peak_bytes, report.moves, report.drops, report.bytes_out, report.bytes_in))
            assert memory._plans._now.planned.diverged is None
        return found, [parameter.detach().clone() for parameter in model.parameters()], share

    natively, results, share = trained()
    without_hook(monkeypatch)
    usually, others, none = trained()
    assert natively == usually
    assert natively[-1][1] + natively[-1][2] > 0, natively
    assert all(map(torch.equal, results, others))
    assert share > 0.8 > none == 0


# ------------------------------------------------------------------ what is unusual


def engine_for(policy: AbstractPolicy, allowed: int = 1 << 30, *tensors: Tensor) -> TensorEngine:
    engine = TensorEngine(policy, allowed)
    engine.begin_step([("given", tensor) for tensor in tensors])
    return engine


def test_most_ops_of_a_training_step_run_natively() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with spillway.manage(model, optimizer, budget="1GiB", method="lru") as memory:
        for _ in range(3):
            before = taken_natively(memory._engine)
            with memory.step():
                model(torch.rand(2, 4, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert taken_natively(memory._engine) - before > 0.8 * memory._engine.ops


def test_batch_norm_is_run_again_without_its_statistics() -> None:
    x, mean, deviation = torch.rand(64, 16), torch.zeros(16), torch.ones(16)
    engine = engine_for(LRU(), 1 << 30, x, mean, deviation)
    for _ in range(2):
        made = torch.nn.functional.batch_norm(x, mean, deviation, training=True)
    recipe = engine.controller.recipes[-1]
    assert isinstance(Call.unpacked(recipe.payload), NativeCall)
    before = mean.clone(), deviation.clone()
    again = engine.machine.run(recipe, [value.storage for value in recipe.reads])
    assert bytes(again[0].tolist()) == bytes(made.untyped_storage().tolist())
    assert all(map(torch.equal, before, (mean, deviation)))
    assert len(recipe.creates) == len(again) == 3
    assert engine.current(engine.table[storage_address(mean)]).recipe is None
    engine.end_step()
    engine.close()


def test_an_op_that_torch_refuses_is_torchs_own_error_and_leaves_the_books_as_they_were() -> None:
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    engine = engine_for(LRU(), 1 << 30, x, y)
    x.add(y)
    resident, storages = engine.budget.resident, len(engine.table)
    with pytest.raises(RuntimeError, match="must match the size"):
        x.add(torch.rand(3))
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(dim=7)
    gc.collect()
    assert (engine.budget.resident, len(engine.table)) == (resident, storages)
    old = engine.current(engine.table[storage_address(x)])
    kept = x.exp()
    with pytest.raises(RuntimeError, match=r"must match the size"):
        x.add_(torch.rand(7))
    assert engine.current(engine.table[storage_address(x)]) is not old  # whatever it wrote until then
    assert kept.shape == (4, 4)
    engine.end_step()
    engine.close()


def test_what_does_not_fit_makes_room_as_before() -> None:
    engine = engine_for(LRU(), 3 * MiB)
    kept = [torch.full((MiB // 4,), float(number)) for number in range(2)]
    made = [one.mul(2.0) for one in kept for _ in range(3)]
    assert engine.budget.peak <= 3 * MiB
    assert engine.controller.counters.drops + engine.controller.counters.moves > 0
    assert [one[0].item() for one in made] == [0.0] * 3 + [2.0] * 3
    engine.end_step()
    engine.close()


@pytest.mark.long
def test_a_replay_computes_under_the_settings_of_the_first_time() -> None:
    x = torch.full((64, 64), 1e-38)
    engine = engine_for(LRU(), 1 << 30, x)
    tiny = x.mul(1e-3)
    assert tiny.max() > 0
    recipe = engine.current(engine.table[storage_address(tiny)]).recipe
    assert recipe is not None
    torch.set_flush_denormal(True)
    try:
        x.mul(1e-3)  # whose recipe says so
        (real,) = engine.machine.run(recipe, [value.storage for value in recipe.reads])
        other = engine.controller.recipes[-1]
    finally:
        torch.set_flush_denormal(False)
    assert bytes(real.tolist()) == bytes(tiny.untyped_storage().tolist())
    (flushed,) = engine.machine.run(other, [value.storage for value in other.reads])
    assert not any(flushed.tolist())
    engine.end_step()
    engine.close()


def test_every_setting_of_an_op_is_heard_when_it_changes() -> None:
    filled = torch._C._set_deterministic_fill_uninitialized_memory  # type: ignore[attr-defined]
    others = {
        "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
        "uninitialized memory": (filled, False, True),
    }
    before = [(flag, flag[0]()) for settings in (GENERAL, ATTENTION, EINSUM) for flag in settings.flags]
    x = torch.rand(4, 4)
    engine = engine_for(LRU(), 1 << 30, x)
    heard = set()
    torch.mm(x, x)  # when it is first met, an op is Python's
    try:
        for put, first, then in (CHANGES | others).values():
            seen = []
            for value in (first, then):
                put(value)
                torch.mm(x, x)
                expected = OpEnvironment.now(GENERAL).values
                assert engine.controller.recipes[-1].payload.environment.values == expected
                seen.append(expected)
            heard |= {place for place, pair in enumerate(zip(*seen, strict=True)) if pair[0] != pair[1]}
    finally:
        for (_, put), value in before:
            put(value)
    half_sums = 7  # which not every processor has
    assert heard | {half_sums} == set(range(len(GENERAL.flags)))
    assert taken_natively(engine) >= 2 * len(CHANGES)
    engine.end_step()
    engine.close()


def test_ops_of_two_threads_take_turns() -> None:
    engine = engine_for(LRU())
    results: list[float] = []

    def computes() -> None:
        with torch.enable_grad():
            results.append(torch.ones(1000).mul(3).sum().item())

    mine = torch.ones(1000).mul(3).sum().item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        futures = [torch.jit.fork(lambda: torch.ones(1000).mul(3).sum()) for _ in range(4)]
        assert [torch.jit.wait(future).item() for future in futures] == [mine] * 4
    other = threading.Thread(target=computes)
    other.start()
    other.join()
    assert results == [mine]
    engine.end_step()
    engine.close()


def test_who_knows_an_engine_does_not_keep_it() -> None:
    engine = engine_for(LRU())
    torch.rand(4).mul(2)
    engine.end_step()
    engine.close()
    seen = weakref.ref(engine)
    del engine
    gc.collect()
    assert seen() is None


def test_an_engine_that_is_dropped_in_a_step_leaves_no_recipes_behind() -> None:
    x, norm = torch.rand(64, 64), nn.BatchNorm1d(64)
    for _ in range(3):
        engine = engine_for(LRU(), 1 << 30, x, *norm.parameters())
        for _ in range(2):
            made = norm(x).mul(2).add_(x).exp()
        recipe = engine.current(engine.table[storage_address(made)]).recipe
        assert recipe is not None
        name = recipe.name
        engine._dispatch.pop()  # nobody ends its step
        seen = weakref.ref(engine)
        del engine, recipe
        gc.collect()
        assert seen() is None
        del made
        gc.collect()
        assert sys.getrefcount(name) == 2  # no recipe has it


def test_a_hook_that_cannot_be_built_is_named_once_and_sessions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot() -> Any:
        raise NativeError("Python.h is not there.")

    monkeypatch.setattr(native_hook, "load_hook", cannot)
    monkeypatch.setattr(native_hook, "_told", set())
    with pytest.warns(UserWarning, match=r"without its native hook.*Python\.h is not there"):
        engine = engine_for(LRU())
    assert torch.ones(3).mul(2).sum().item() == 6
    assert taken_natively(engine) == 0
    engine.end_step()
    engine.close()
    engine_for(LRU()).close()  # a second warning would be an error


def test_cross_entropy_of_other_shapes_asks_for_other_bounds() -> None:
    engine = engine_for(LRU())
    for rows in (3, 5, 3, 7):
        scores = torch.rand(rows, 11, requires_grad=True)
        cross_entropy(scores, torch.arange(rows)).backward()  # type: ignore[no-untyped-call]
        assert scores.grad is not None
        assert scores.grad.shape == (rows, 11)
    engine.end_step()
    engine.close()


def test_a_bound_for_a_number_is_none_for_a_complex_one() -> None:
    x = torch.ones(MiB // 4)
    engine = engine_for(LRU(), 5 * MiB // 2, x)
    for _ in range(3):
        x.mul(2.0)
    with pytest.raises(BudgetInfeasible, match=r"3\.00 MiB"):
        x.mul(1j)  # 2 MiB beside one
    assert engine.budget.peak == 2 * MiB
    engine.end_step()
    engine.close()


def test_what_no_number_of_64_bits_counts_fails_as_by_the_handlers_in_python() -> None:
    engine = engine_for(LRU())
    for _ in range(2):
        torch.empty(3)
    with pytest.raises(RuntimeError, match="allocate memory"):  # torch's own error
        torch.empty(1 << 61, dtype=torch.uint8)
    engine.end_step()
    engine.close()


def test_a_child_that_was_forked_in_the_middle_of_an_op_runs_steps_of_its_own() -> None:
    engine = engine_for(LRU())
    torch.ones(3).mul(2)
    held, done = threading.Event(), threading.Event()

    def in_an_op() -> None:
        with engine._dispatch._watcher.turn:
            held.set()
            done.wait()

    other = threading.Thread(target=in_an_op)
    other.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        engine.end_step()
        engine.begin_step([])
        before = taken_natively(engine)
        for _ in range(3):
            torch.ones(3).mul(2)
        os._exit(taken_natively(engine) - before)
    _, status = os.waitpid(child, 0)
    done.set()
    other.join()
    assert (os.WIFEXITED(status), os.WEXITSTATUS(status)) == (True, 6)
    engine.end_step()
    engine.close()


ENDS_IN_AN_OP = """
import gc, torch
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.methods import LRU

x, y, asked = torch.ones(64, 64), torch.ones(64, 64), []
engine = TensorEngine(LRU(), 1 << 30)
engine.begin_step([("x", x), ("y", y)])
info = engine.info_of(torch.ops.aten.mul.Tensor)
bound = info.bound

def ends(args):
    asked.append(args)
    if len(asked) == 2:  # the first one is asked by the handler in Python, which is made then
        engine.close()
        for records in (engine.table, engine.controller.young, engine.controller.recipes):
            records.clear()
        gc.collect()
    return bound(args)

info.bound = ends
assert [x.mul(y).sum().item() for _ in range(3)] == [4096.0] * 3
assert len(asked) == 2
"""


@pytest.mark.long
def test_a_session_that_ends_in_the_middle_of_an_op_leaves_nothing_half_freed() -> None:
    environment = dict(os.environ, PYTHONMALLOC="debug")
    ran = subprocess.run([sys.executable, "-c", ENDS_IN_AN_OP], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


STORAGE_IN_GARBAGE = """
import gc, torch
from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.methods import LRU

gc.disable()
x = torch.ones(64, 64)
engine = TensorEngine(LRU(), 1 << 30)
engine.begin_step([("x", x)])
for _ in range(3):  # the first one is made by the handler in Python
    circle = [x.mul(2).untyped_storage()]
    circle.append(circle)
    del circle
gc.collect()
assert len(engine.table) == 1
engine.end_step()
engine.close()
"""


@pytest.mark.long
def test_the_storage_of_a_result_may_be_garbage_in_a_circle() -> None:
    ran = subprocess.run([sys.executable, "-c", STORAGE_IN_GARBAGE], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


# ------------------------------------------------------------------ what is known by name


def tied() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two names for one parameter, a view of a buffer beside it, a module that occurs twice, and one that is shared."""
    inner = nn.Linear(8, 8)
    model = nn.Sequential(nn.Embedding(8, 8), inner, nn.BatchNorm1d(8), inner, nn.Linear(8, 8))
    model[4].weight = model[0].weight
    model.register_buffer("view", model[2].running_mean[2:])
    model.register_buffer("none", None)
    model.register_buffer("empty", torch.empty(0))
    return model, torch.optim.AdamW(model.parameters())


def sparse() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def remembering() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Directions stand in lists of the optimizer's state."""
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    return model, torch.optim.LBFGS(model.parameters(), max_iter=3)


def scripted() -> tuple[nn.Module, torch.optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Embedding(8, 8), torch.jit.script(nn.Linear(8, 8)))
    return model, torch.optim.Adam(model.parameters())


@pytest.mark.parametrize(
    ("build", "natively"), [(tied, True), (sparse, False), (remembering, False), (scripted, False)]
)
@pytest.mark.parametrize("method", ["lru", "auto"])
def test_what_is_known_by_name_is_told_as_in_python(
    method: str,
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    natively: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = build()
    batch = torch.arange(8), {"mask": torch.ones(8, 8)[::2], "numbers": 3}
    own = torch.zeros(8).numpy()
    model.register_buffer("of NumPy", torch.from_numpy(own))

    def loss() -> Tensor:
        optimizer.zero_grad()
        out = model(batch[0]).square().mean()
        out.backward()
        return out

    with spillway.manage(model, optimizer, budget="1 GiB", method=method) as memory:
        session: Any = getattr(memory, "_now", memory)
        for _ in range(2):
            with memory.step(batch):
                optimizer.step(loss)
            assert (session._told_natively(batch) is not None) == natively
            told = session._bytes_by_address(batch)
            with monkeypatch.context() as context:
                context.setattr(session, "_native", None)
                assert session._bytes_by_address(batch) == told
            assert sum(told.values()) > 8 * 8 * 4


def test_what_is_usual_is_not_walked_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = tied()
    with spillway.manage(model, optimizer, budget="1 GiB", method="auto") as memory:
        for step in range(4):
            with memory.step(torch.arange(8)):
                model(torch.arange(8)).square().mean().backward()
                optimizer.step()
            if step == 2:
                walked = "spillway.session.abstract_session.Session._of_models"
                monkeypatch.setattr(walked, lambda _: pytest.fail("every tensor was asked for in Python"))
