"""What torch.compile made, in steps whose ops are watched."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.nn.attention.flex_attention import flex_attention

import spillway
from spillway.errors import SessionError
from tests.cpu.another_process import run_python
from tests.cpu.pressure import Image, image

SIDE = 64
compiling = torch._dynamo.eval_frame
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    before = compiling._callback_from_stance
    yield
    assert compiling._callback_from_stance is before
    torch.compiler.reset()


class Counting:
    """A backend that counts compilations, and calls of what it compiled."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, examples: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.one(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 256 * SIDE).view(256, SIDE)


def trained(net: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Image]:
    net.zero_grad()
    loss = call(batch()).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return [image(loss.detach()), *(image(p.grad) for p in net.parameters() if p.grad is not None)]


def whole(net: nn.Module, backend: Counting) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, backend=backend)  # type: ignore[no-any-return]


def whole_in_one_graph(net: nn.Module, backend: Counting) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, backend=backend, fullgraph=True)  # type: ignore[no-any-return]


def a_part(net: nn.Module, backend: Counting) -> Callable[[Tensor], Tensor]:
    net[1].compile(backend=backend)  # type: ignore[index, operator, union-attr]
    return net


@pytest.mark.long(but=2)
@pytest.mark.parametrize("way", [whole, whole_in_one_graph, a_part])
@pytest.mark.parametrize("compiled_before", [True, False])
def test_what_is_compiled_runs_op_by_op_in_a_watched_step_and_compiled_again_after_it(
    way: Callable[[nn.Module, Counting], Callable[[Tensor], Tensor]], compiled_before: bool
) -> None:
    net, backend = model(), Counting()
    expected = trained(net, net)
    call = way(net, backend)
    if compiled_before:
        trained(net, call)
    for _ in range(2):
        graphs, calls = backend.graphs, backend.calls
        with spillway.manage(net, budget="500KiB") as memory:
            for _ in range(2):
                with memory.step(batch()):
                    assert trained(net, call) == expected
                assert memory.history[-1].moves or memory.history[-1].drops
            assert (backend.graphs, backend.calls) == (graphs, calls)
            trained(net, call)
            assert (backend.graphs, backend.calls) == (1, calls + 1), "between steps it is compiled, once"
        trained(net, call)
        assert (backend.graphs, backend.calls) == (1, calls + 2), "and stays so"


def test_a_compiled_update_and_a_compiled_step_run_op_by_op() -> None:
    net, backend = model(), Counting()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    update = torch.compile(optimizer.step, backend=backend)

    @torch.compile(backend=backend)
    def step() -> None:
        net(batch()).square().mean().backward()
        update()

    with spillway.manage(net, optimizer, budget="500KiB") as memory, memory.step(batch()):
        step()
    assert backend.graphs == 0
    step()
    assert backend.graphs > 0


def test_it_is_said_once_and_at_the_end_of_the_step() -> None:
    net = model()
    call = torch.compile(net, backend=Counting())
    with spillway.manage(net, budget="500KiB") as memory:
        for told in (1, 0):
            with warnings.catch_warnings(record=True) as found, memory.step(batch()):
                warnings.simplefilter("always")
                call(batch())
            assert [str(one.message).partition(",")[0] for one in found] == [
                "What torch.compile made ran op by op"
            ] * told
            assert all(one.filename == __file__ for one in found)


def test_eager_steps_and_eager_stances_are_not_spoken_of() -> None:
    net = model()
    call = torch.compile(net, backend=Counting())
    with spillway.manage(net, budget=None) as memory, warnings.catch_warnings():
        warnings.simplefilter("error")
        with memory.step(batch()):
            net(batch())
            with torch.compiler.set_stance("force_eager"):
                call(batch())


def test_other_threads_run_compiled_beside_a_step() -> None:
    net, other, backend = model(), model(), Counting()
    call = torch.compile(other, backend=backend)
    call(batch())
    with spillway.manage(net, budget="500KiB") as memory, memory.step(batch()):
        thread = threading.Thread(target=call, args=(batch(),))
        thread.start()
        thread.join()
        assert (backend.graphs, backend.calls) == (1, 2)
        call(batch())
        assert backend.calls == 2


def test_a_step_that_raises_gives_compilation_back() -> None:
    net, backend = model(), Counting()
    call = torch.compile(net, backend=backend)
    with spillway.manage(net, budget="500KiB") as memory:
        with pytest.raises(KeyError), memory.step(batch()):
            call(batch())
            raise KeyError
        with (
            pytest.raises(spillway.BudgetInfeasible),
            spillway.manage(net, budget="70KiB") as small,
            small.step(batch()),
        ):
            call(batch())
        call(batch())
    assert (backend.graphs, backend.calls) == (1, 1)


def test_a_step_within_a_compiled_function_is_refused_before_anything_changes() -> None:
    net = model()
    with spillway.manage(net, budget="500KiB") as memory:

        @torch.compile(backend=Counting())
        def training() -> None:
            with memory.step(batch()):
                trained(net, net)

        with pytest.raises(SessionError, match=r"within a function that torch\.compile is running"):
            training()
        with memory.step(batch()):
            trained(net, net)
    assert len(memory.history) == 1


def test_a_step_that_is_known_to_fit_runs_op_by_op_too() -> None:
    net, backend = model(), Counting()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    call = torch.compile(net, backend=backend)
    with spillway.manage(net, optimizer, budget="64MiB") as memory:
        while not memory.history or memory.history[-1].managed:
            with memory.step(batch()):
                trained(net, call)
                optimizer.step()
    assert backend.calls == 0


def test_a_backward_whose_forward_ran_compiled_before_the_step() -> None:
    net = model()
    call = torch.compile(net, backend="aot_eager")
    expected = trained(net, call)
    with spillway.manage(net, budget="500KiB") as memory:
        for _ in range(2):
            net.zero_grad()
            loss = call(batch()).square().mean()
            with memory.step(batch()):
                others = [torch.ones(256, SIDE) * n for n in range(6)]
                loss.backward()
                del others
            assert [image(loss.detach()), *(image(p.grad) for p in net.parameters() if p.grad is not None)] == expected


@pytest.mark.parametrize("way", [torch.jit.script, lambda net: torch.jit.trace(net, batch())])
def test_scripted_and_traced_modules_are_watched(way: Callable[[nn.Module], Any]) -> None:
    net = model()
    call = way(net)
    expected = [trained(net, call) for _ in range(4)][-1]  # it runs another way when it has seen what comes
    with spillway.manage(net, budget="500KiB") as memory:
        for _ in range(2):
            with memory.step(batch()):
                assert trained(net, call) == expected
            assert memory.history[-1].moves or memory.history[-1].drops


X = torch.linspace(-1, 1, 256 * SIDE).view(256, SIDE)
HIGHER: dict[str, Callable[[nn.Module], Tensor]] = {
    "cond": lambda net: torch.cond(X.sum() > 9, lambda x: net(x).sin(), lambda x: net(x).cos(), (X,)),
    "while_loop": lambda net: net(
        while_loop(lambda n, x: n < 2, lambda n, x: (n + 1, x.tanh()), (torch.tensor(0), X))[1]  # type: ignore[no-untyped-call]
    ),
    "flex_attention": lambda net: net(flex_attention(*[X.view(1, 4, SIDE, SIDE)] * 3)),  # type: ignore[arg-type]
    "flex_attention with a closure": lambda net: net(
        flex_attention(
            *[X.view(1, 4, SIDE, SIDE)] * 3,  # type: ignore[arg-type]
            score_mod=lambda score, *_: score * net[0].one.bias[0],  # type: ignore[arg-type, index, union-attr, return-value]
        )
    ),
}


@pytest.mark.long(but=1)
@pytest.mark.parametrize("name", HIGHER)
def test_higher_order_operators_are_watched_with_what_their_functions_close_over(name: str) -> None:
    net = model()

    def trained_so() -> list[Image]:
        return trained(net, lambda _: HIGHER[name](net))

    expected = trained_so()
    with spillway.manage(net, budget="600KiB") as memory:
        for _ in range(2):
            with memory.step(batch()):
                assert trained_so() == expected
            assert memory.history[-1].moves or memory.history[-1].drops
            assert memory.history[-1].peak_bytes <= memory.allowed


def test_repeated_slices_have_room_made_for_them_where_autograd_is_left_out() -> None:
    net = nn.Linear(SIDE, SIDE)
    for repeats in (1, torch.ones(128, dtype=torch.int64)):
        with spillway.manage(net, budget="120KiB") as memory, torch.inference_mode():
            with memory.step():
                kept = [torch.repeat_interleave(X[:128] * n, repeats, 0) for n in range(4)]  # type: ignore[call-overload]
            assert memory.history[-1].peak_bytes <= memory.allowed
            del kept


def test_compiled_autograd_runs_op_by_op(tmp_path: Path) -> None:
    net = model()
    expected = trained(net, net)
    with spillway.manage(net, budget="500KiB") as memory:
        for _ in range(2):
            with memory.step(batch()), torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                assert trained(net, net) == expected


@pytest.mark.long
def test_a_compiler_that_is_first_imported_within_a_step_is_treated_alike() -> None:
    done = run_python(
        """
        import sys, warnings
        import torch, spillway

        runs, finders = [], list(sys.meta_path)
        def backend(graph, examples):
            return lambda *args: runs.append(graph) or graph(*args)

        warnings.simplefilter("ignore")
        with spillway.manage(torch.nn.Linear(8, 8), budget=None, method="lru") as memory:
            with memory.step():
                assert "torch._dynamo" not in sys.modules
            assert sys.meta_path == finders
            with memory.step():
                call = torch.compile(torch.nn.Linear(8, 8), backend=backend)
                call(torch.ones(2, 8))
                assert "torch._dynamo" in sys.modules
                print(len(runs))
            call(torch.ones(2, 8))
            print(len(runs))
            with memory.step():
                call(torch.ones(2, 8))
            print(len(runs), sys.meta_path == finders)
        """
    )
    assert done.stdout.split() == ["0", "1", "1", "True"], done.stdout + done.stderr
