"""What one test leaves behind is reported at that test, and cleaned, so that the next does not fail for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Final, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.tensors.torch_compile import begin_eagerly
from spillway.engines.tensors.torch_patches import take_away
from spillway.internals.dispatch_key import Watcher, unwatched
from tests.cpu.interrupted import BATCH, Training
from tests.cpu.leftovers import clean_up, nothing_left, world

KEPT: Final[list[Any]] = []


def an_open_session() -> None:
    KEPT.append(Training().manage("lru"))


def an_open_step() -> None:
    KEPT.append(Training().manage("lru"))
    KEPT[-1].begin(BATCH)


def a_handler() -> None:
    signal.signal(signal.SIGALRM, lambda number, frame: None)


def a_profiler() -> None:
    KEPT.append(torch.profiler.profile().__enter__())


def saved_tensors() -> None:
    torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()


def a_watched_thread() -> None:
    KEPT.append(Watcher({}, lambda op: lambda mode, func, types, args, kwargs: func(*args, **kwargs)))
    KEPT[-1].begin()


def a_hidden_thread() -> None:
    KEPT.append(unwatched())
    KEPT[-1].__enter__()


def a_stance() -> None:
    torch.compiler.set_stance("force_eager")  # type: ignore[no-untyped-call]


LEAKS: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "session": (an_open_session, "open engines"),
    "step": (an_open_step, "turns"),
    "mode": (lambda: TorchDispatchMode().__enter__(), "dispatch modes"),
    "watched": (a_watched_thread, "dispatch keys"),
    "hidden": (a_hidden_thread, "dispatch keys"),
    "spared": (lambda: begin_eagerly(lambda: None), "what dynamo was told"),
    "stance": (a_stance, "what dynamo was told"),
    "function mode": (lambda: TorchFunctionMode().__enter__(), "function modes"),
    "handler": (a_handler, "signal handlers"),
    "gradients": (lambda: torch.set_grad_enabled(False), "flags of torch"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "flags of torch"),
    "threads": (lambda: torch.set_num_threads(2), "flags of torch"),
    "attention": (lambda: torch.backends.cuda.enable_flash_sdp(False), "flags of torch"),
    "variable": (lambda: os.environ.update(SPILLWAY_LEFT="1"), "environment variables"),
    "hook": (lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None), "hooks on all modules"),
    "profiler": (a_profiler, "a profiler"),
    "saved tensors": (saved_tensors, "hooks for saved tensors"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_reported_and_cleaned(name: str) -> None:
    leak, told = LEAKS[name]
    before = world()
    leak()
    left = clean_up(before)
    assert any(sentence.startswith(told) for sentence in left), left
    KEPT.clear()
    assert clean_up(before) == []


def test_who_left_something_fails_and_the_next_one_does_not() -> None:
    left = r"^the test left behind open engines: 1 instead of 0; turns: 1 instead of 0; "
    with pytest.raises(pytest.fail.Exception, match=left):  # noqa: SIM117
        with nothing_left():
            an_open_step()
    KEPT.clear()
    with nothing_left(), Training().manage("lru") as memory, memory.step(BATCH):
        pass


def test_what_is_taken_away_may_be_gone_when_its_turn_comes() -> None:
    """As where another session is collected meanwhile, whose end takes it away too."""

    class Original:
        def first(self) -> int:
            return 1

    class Patched(Original):
        pass

    class Wrapper:
        @property
        def __wrapped__(self) -> Any:
            if "first" in vars(Patched):
                del Patched.first
            return Original.first

    cast(Any, Patched).first = Wrapper()
    take_away(Patched, ("first",))
    assert "first" not in vars(Patched)
