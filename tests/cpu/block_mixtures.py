"""Small models under random mixtures of all lossless actions, whose bytes come, go and are given up at random moments.

A mixture is drawn from a seed: a case, an action for every call, when copies in begin, and what happens at every seam
between blocks, at calls of modules, second runs included, and at gradients that are complete. Once on the engine alone,
and once in a session, under a budget and a plan that mixes.
"""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self, final
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import spillway
from spillway.engines.blocks.block_engine import BlockEngine, HeldCall
from spillway.errors import BudgetInfeasible, RecomputeError
from spillway.methods import Action, Mimose
from spillway.methods.actions import LOSSLESS
from spillway.methods.by_block import (
    AbstractBlockMethod,
    BlockPlan,
    BlockSample,
    Decision,
    Forecast,
    InputSize,
    Phase,
    StepSample,
)
from tests.cpu.block_cases import (
    CASES,
    WIDTH,
    Answering,
    AnsweringModel,
    Averaging,
    Build,
    Caching,
    CachingModel,
    Case,
    Chain,
    Masked,
    MaskedModel,
    Normalised,
    Residual,
    Shared,
    mean_square,
)
from tests.cpu.families import State, difference, state_of
from tests.cpu.test_block_exactness import STEPS, Watched, plainly, trained

CHANCE: Final = 0.4
"""That something happens at a moment."""
UNBOUNDED: Final = 1 << 62
WRITTEN: Final = "caller-writes-to-the-input"
"""The case whose caller writes to what a block got after it has run."""
DEPTH: Final = 6
"""Blocks of the models that train in sessions: copies in of several may be under way."""


def _deep(model: Callable[..., nn.Module], block: Callable[[], nn.Module]) -> Build:
    names = [f"blocks.{number}" for number in range(DEPTH)]
    return lambda: Case(model(*(block() for _ in range(DEPTH))), names, mean_square)


IN_SESSIONS: Final[Mapping[str, Build]] = MappingProxyType(
    {
        "transformer": lambda: Case(
            nn.Sequential(*(Layer() for _ in range(DEPTH))), [str(number) for number in range(DEPTH)], mean_square
        ),
        "dropout": _deep(Chain, Residual),
        "batch norm": _deep(Chain, Normalised),
        "averages and counters": _deep(Chain, Averaging),
        "shared inputs": _deep(MaskedModel, Masked),
        "a cache": _deep(CachingModel, Caching),
        "tuples": _deep(AnsweringModel, lambda: Answering("tuple")),
        "one block, called again and again": lambda: Case(Shared(Normalised()), ["block"], mean_square),
    }
)
"""What trains under a budget."""
ROWS: Final = (1024, 1536, 2048, 1280)
"""Of the batches of sessions: activations of 128 KiB and more, so that room can get short."""
WEIGHTY: Final = (Action.KEEP, Action.SELECTIVE, Action.OFFLOAD)
"""Actions under which room gets short."""
MARGIN: Final = 1.02
"""Times the peak with every block recomputed, the least budget."""
COLLECTED: Final = 5
MIXED: Final = 6
"""Steps that measure, and steps that follow drawn plans."""


class Layer(nn.Module):
    """A layer of a transformer, on rows that stand for sequences of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(-1, 16, WIDTH)).reshape(-1, WIDTH)


@final
@dataclass(slots=True)
class Verdict:
    """What became of a mixture."""

    name: str
    wrong: str = ""
    """The first thing that is not as plain PyTorch leaves it, or why the budget was not kept; empty if all is well."""
    refused: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    """What has happened, so that it shows if nothing did."""


@final
class Seams:
    """Told at every seam, and does something at random to a call at random."""

    def __init__(self, engine: BlockEngine, draw: random.Random, counts: Counter[str]) -> None:
        self._engine, self._draw, self._counts = engine, draw, counts
        self._calls: list[HeldCall] = []
        self._comes_in: list[int] = []
        self._busy = False

    def forward_begins(self) -> None:
        self._engine.read_ahead = self._draw.choice([None, 0, 1 << 14])
        self._engine.write_behind = self._draw.choice([None, 0, UNBOUNDED])
        self._comes_in = [self._draw.randrange(number, number + 4) for number in range(64)]

    def evaluation_begins(self, args: Any, kwargs: Any) -> None: ...

    def forward_is_over(self) -> None:
        """Calls of earlier forwards may still go backward."""
        self._calls = self._calls[-64:]

    def block_begins(self, number: int) -> Callable[[], None]:
        self.happens()
        return functools.partial(self._reached, number)

    def block_ended(self, number: int) -> None:
        self._calls.append(self._engine.call(number))
        self.happens()

    def _reached(self, number: int) -> None:
        """What is due begins, room or not, and some of it but in part."""
        for call, at in zip(reversed(self._calls), reversed(self._comes_in[: len(self._calls)]), strict=False):
            if at >= number:
                self._count("came in ahead", call.start_in(self._draw.choice([None, 1 << 13])))
        self.happens()

    def happens(self, *_: object) -> None:
        """At some moments, drawn, and never in the middle of another."""
        while not self._busy and self._calls and self._draw.random() < CHANCE:
            self._busy = True
            try:
                self._do(self._draw.choice(self._calls))
            finally:
                self._busy = False

    def _do(self, call: HeldCall) -> None:
        what = self._draw.randrange(5)
        if what == 0:
            self._count("revoked", call.revoke())
        elif what == 1:
            self._count("forgotten", call.forget_arrivals())
        elif what == 2:
            self._count("input sent late", call.send_input())
        elif what == 3:
            self._count("came in ahead", call.start_in(self._draw.choice([None, 1 << 13])))
        else:
            self._engine.wait_out(self._draw.choice([1 << 12, 1 << 20]))

    def _count(self, what: str, nbytes: int) -> None:
        self._counts[what] += bool(nbytes)

    @contextlib.contextmanager
    def opened(self, case: Case) -> Iterator[None]:
        """Told of modules and gradients as well."""
        parameters = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
        handles = [register_module_forward_pre_hook(self.happens)]
        handles += [parameter.register_post_accumulate_grad_hook(self.happens) for parameter in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@functools.cache
def _plain(name: str) -> tuple[list[State], list[Tensor]]:
    return trained(name, plainly)


def on_the_engine(seed: int) -> Verdict:
    """Train the case of a seed plainly and under its mixture, and compare after every step."""
    draw = random.Random(f"mixture {seed}")
    name = list(CASES)[seed % len(CASES)]
    verdict = Verdict(name)

    @contextlib.contextmanager
    def around(case: Case) -> Iterator[Watched]:
        with tempfile.TemporaryDirectory() as spill:
            engine = BlockEngine(
                case.model, case.blocks, actions=lambda block, call: draw.choice(LOSSLESS), spill_directory=spill,
                generators=case.generators,
            )  # fmt: skip
            seams = Seams(engine, draw, verdict.counts)
            with engine, seams.opened(case):
                engine.observer = seams
                watched = Watched(engine)
                yield watched
                verdict.counts["recomputed"] += sum(report.recomputes for report in watched.reports)
                verdict.counts["moved"] += sum(report.moved_bytes > 0 for report in watched.reports)

    states, losses = _plain(name)
    try:
        found, got = trained(name, around)
    except RecomputeError as error:
        # Revoked between its end and the caller's write, which nobody can foresee: said, and copied the next time.
        verdict.refused = str(error)
        verdict.wrong = "" if name == WRITTEN and "is copied first" in verdict.refused else verdict.refused
        return verdict
    except Exception as error:  # a table is to tell of it, and of all that come after
        verdict.wrong = f"{type(error).__name__}: {error}"
        return verdict
    for step in range(STEPS):
        unlike = None if torch.equal(losses[step], got[step]) else "the loss differs"
        unlike = unlike or difference(states[step], found[step])
        if unlike:
            verdict.wrong = verdict.wrong or f"step {step}: {unlike}"
    return verdict


@final
class Drawn(AbstractBlockMethod):
    """Mimose while it collects; then every step has a plan that is drawn: what becomes of each call, and when what it
    moved comes in. What such a step will take it does not know."""

    name = "drawn"
    action = Action.OFFLOAD

    def __init__(self, seed: str, counts: Counter[str], batched: bool = False) -> None:
        self.seed, self.counts, self.batched = seed, counts, batched
        self._draw = random.Random(seed)
        self._mimose = Mimose().fresh(batched=batched)

    def fresh(self, *, batched: bool) -> Self:
        return type(self)(self.seed, self.counts, batched)

    @property
    def collecting(self) -> bool:
        return self._mimose.collecting

    def begin(self, size: InputSize, available: int) -> Decision:
        known = self._mimose.forecast(size)
        if self.collecting or known is None:
            return self._mimose.begin(size, available)
        blocks, draw = len(known.saved), self._draw
        favourite = draw.choice([None, *LOSSLESS, *WEIGHTY])
        actions = [
            favourite if favourite and draw.random() < 0.7 else draw.choice(LOSSLESS) for _ in range(blocks)
        ]  # fmt: skip
        if set(actions) == {Action.KEEP}:
            actions[0] = Action.RECOMPUTE  # whatever keeps everything is not watched
        depth = draw.randrange(1, blocks + 1)
        comes_in = [
            min(number + draw.randrange(depth + 1), blocks - 1) if action.moves else number
            for number, action in enumerate(actions)
        ]
        self.counts["planned"] += 1
        plan = BlockPlan(
            size=size, actions=actions, otherwise=Action.RECOMPUTE, projected=available, available=available,
            seconds=0.0, smallest=0, comes_in=comes_in,
        )  # fmt: skip
        return Decision(Phase.PLANNED, plan, False)

    def end(self, step: StepSample, blocks: Sequence[BlockSample] = ()) -> None:
        if self.collecting:
            self._mimose.end(step, blocks)

    def forecast(self, size: InputSize) -> Forecast | None:
        return self._mimose.forecast(size)


@final
class Course:
    """Steps of a case on batches of several sizes."""

    def __init__(self, name: str) -> None:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        self.case = IN_SESSIONS[name]()
        self.optimizer = torch.optim.SGD(self.case.model.parameters(), lr=0.05, momentum=0.9)

    def run(self, memory: spillway.Session | None) -> list[tuple[bytes, State]]:
        """The loss and the state after every step."""
        batches, found = torch.Generator().manual_seed(1), []
        for number in range(COLLECTED + MIXED):
            x = torch.randn(ROWS[number % len(ROWS)], WIDTH, generator=batches)
            with memory.step(x) if memory is not None else contextlib.nullcontext():
                loss = self.case.loss(self.case.model, x)
                self.case.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            found.append((loss.detach().numpy().tobytes(), state_of(self.case.model, self.optimizer)))
        return found

    def managed(self, budget: int, method: Any) -> spillway.Session:
        return spillway.manage(
            self.case.model, self.optimizer, budget=budget, method=method,
            report=spillway.ReportOptions(timeline=True),
            blocks=spillway.BlockOptions(names=self.case.blocks, generators=self.case.generators),
        )  # fmt: skip


@functools.cache
def _course(name: str) -> tuple[list[tuple[bytes, State]], int, int]:
    """The plain one, and the peaks with every block recomputed and with every block kept."""
    peaks = []
    for method, budget in (("checkpoint", 1 << 30), ("mimose", 1 << 30)):
        course = Course(name)
        with course.managed(budget, method) as memory:
            course.run(memory)
        peaks.append(max(report.peak_bytes for report in memory.history))
    return Course(name).run(None), peaks[0], peaks[1]


@contextlib.contextmanager
def _counting(counts: Counter[str]) -> Iterator[None]:
    """What gives way, and what comes in ahead."""
    names = {"forget_arrivals": "forgotten", "send_input": "input sent late", "start_in": "came in ahead"}
    with contextlib.ExitStack() as stack:
        for name, told in names.items():
            real = getattr(HeldCall, name)

            def counted(call: HeldCall, *args: Any, real: Any = real, told: str = told) -> int:
                nbytes: int = real(call, *args)
                counts[told] += bool(nbytes)
                return nbytes

            stack.enter_context(mock.patch.object(HeldCall, name, counted))
        yield


def in_a_session(seed: int) -> Verdict:
    """Train the case of a seed plainly, and under drawn plans and a drawn budget that recomputing every block keeps."""
    draw = random.Random(f"session {seed}")
    name = list(IN_SESSIONS)[seed % len(IN_SESSIONS)]
    verdict = Verdict(name)
    expected, least, most = _course(name)
    budget = int(MARGIN * least + draw.choice([0.0, 0.2, 0.5, 0.9]) * max(most - least, 0))
    course = Course(name)
    memory = course.managed(budget, Drawn(f"plans {seed}", verdict.counts))
    try:
        with memory, _counting(verdict.counts):
            found = course.run(memory)
    except BudgetInfeasible as refusal:
        verdict.refused = str(refusal)
        return verdict
    except Exception as error:  # as above
        verdict.wrong = f"{type(error).__name__}: {error}"
        return verdict
    for number, ((loss, state), (other, after), report) in enumerate(zip(expected, found, memory.history, strict=True)):
        unlike = "the loss differs" if loss != other else difference(state, after)
        if report.peak_bytes > budget:
            unlike = unlike or f"the peak of {report.peak_bytes} is over the budget of {budget}"
        if unlike and not verdict.wrong:
            verdict.wrong = f"step {number}: {unlike}"
        verdict.counts += Counter(
            measured=report.peak_measured, revoked=report.revoked_blocks, moved=report.bytes_out > 0,
            recomputed=report.recomputed_blocks,
        )  # fmt: skip
    return verdict
