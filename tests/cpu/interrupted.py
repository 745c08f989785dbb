"""Sessions that are interrupted at a line of their own code: while a step is entered or left, or while they close."""

from __future__ import annotations

import dis
import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD

import spillway
from spillway.session import needs
from tests.cpu.callbacks import BLOCKS, TENSORS

ROWS, WIDTH = 64, 64
PHASES: Final = ("entering", "leaving", "closing")
PAGED: Final = "paged"
"""A method of the block engine whose steps run inside the tensor engine."""
_LOAD_CONST: Final = dis.opmap["LOAD_CONST"]
_NOP: Final = dis.opmap["NOP"]


def raises() -> None:
    """At that very line, as no signal can where signals wait: what is half-way there is done again."""
    raise KeyboardInterrupt


def presses() -> None:
    """A real Ctrl-C: what waits until the books are closed."""
    signal.raise_signal(signal.SIGINT)


ACTS: Final[dict[str, Callable[[], None]]] = {"an exception": raises, "Ctrl-C": presses}


class Lines:
    """Counts lines of our own code while it is told to, and acts at the one with a number."""

    def __init__(self, number: int, act: Callable[[], None], modules: tuple[str, ...] = ("spillway.",)) -> None:
        self.number = number
        self.act = act
        self.modules = modules
        self.count = 0
        self.where: list[tuple[str, int]] = []

    @contextmanager
    def counted(self, wanted: bool = True) -> Iterator[None]:
        before = sys.gettrace()
        if wanted:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not str(frame.f_globals.get("__name__", "")).startswith(self.modules):
            return None
        if event == "line" and not self._is_passed(frame):
            self.count += 1
            where = frame.f_code.co_filename, frame.f_lineno
            self.where.append(where)
            if self.count == self.number:
                self.act()
        return self._trace

    def _is_passed(self, frame: FrameType) -> bool:
        """Python calls it a line when a `with` block is about to be left, and where `try:` stands, which the `with`
        before it does not cover. Nothing is raised there by a signal."""
        code = frame.f_code.co_code[frame.f_lasti]
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        return code == _NOP or (code == _LOAD_CONST and line.startswith("with "))

    @property
    def reached(self) -> bool:
        return self.count >= self.number


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(self.first(x).tanh())
        return out


BATCH: Final = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Training:
    """A model and its optimizer, and how often they were trained."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block())
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        self.steps = 0

    def train(self) -> None:
        self.model(BATCH).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def manage(self, method: str) -> spillway.Session:
        if method in TENSORS:
            return spillway.manage(self.model, self.optimizer, budget="230 KiB", method=method)
        blocks, paged = spillway.BlockOptions(names=["0", "1"], page=method == PAGED), method == PAGED
        return spillway.manage(
            self.model, self.optimizer, budget="230 KiB" if paged else "32 MiB",
            method="checkpoint" if paged else BLOCKS[method], blocks=blocks,
        )  # fmt: skip

    def state(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@contextmanager
def needs_known(method: str) -> Iterator[None]:
    """What the first step of a session needs is told as it was told for the first such session: it takes most of a
    step of so small a model to work out."""
    work_out = needs._peaks

    def known(call: needs.Call, environment: Any, goes_on: Any, **options: Any) -> Any:
        shapes = (parameter.shape for parameter in call.engine.model.parameters())
        key = method, goes_on, *options.items(), *call.gradients.items(), *shapes
        if key not in _NEEDS:
            _NEEDS[key] = work_out(call, environment, goes_on, **options)
        return _NEEDS[key]

    needs._peaks = known
    try:
        yield
    finally:
        needs._peaks = work_out


_NEEDS: Final[dict[Any, Any]] = {}


class Interrupted:
    """One session that is interrupted in one phase, and what comes after."""

    def __init__(self, method: str, lines: Lines) -> None:
        self.method = method
        self.lines = lines
        self.training = Training()
        self.session = self.training.manage(method)

    def play(self, phase: str) -> None:
        """A step by a `with` statement and the end of the session, interrupted in one phase of them."""
        try:
            self._step(phase)
            with self.lines.counted(phase == "closing"):
                self.session.close()
        except KeyboardInterrupt:
            pass

    def _step(self, phase: str) -> None:
        step = self.session.step(BATCH)
        with self.lines.counted(phase == "entering"):
            step.__enter__()
        try:
            with needs_known(self.method):
                self.training.train()
        finally:
            with self.lines.counted(phase == "leaving"):
                step.__exit__(*sys.exc_info())

    def go_on(self) -> None:
        """Train on in the same session, close it, and train in another. The step that comes next works out itself what
        it needs."""
        if open_still := not self.session._closed:
            with self.session.step(BATCH):
                self.training.train()
        self.session.close()
        with self.training.manage(self.method) as another:
            with another.step(BATCH), needs_known(self.method) if open_still else nullcontext():
                self.training.train()
            assert len(another.history) == 1
            assert another.history[0].peak_bytes <= another.allowed
