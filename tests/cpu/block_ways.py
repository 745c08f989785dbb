"""A model of blocks trained in every way of the block engine, and what is not as plain PyTorch leaves it."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from spillway.engines.blocks.block import CallReport
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.engines.blocks.discovery import discover
from spillway.errors import ModelError
from spillway.methods.actions import LOSSLESS, Action
from spillway.tiers.disk import DiskTier, Slot
from spillway.units import Bytes
from tests.cpu.family import Build, Built
from tests.cpu.test_exactness import Trained, different, train

STEPS: Final = 3
CHANCE: Final = 0.3
"""Of a revocation at one of the moments."""

Choose: TypeAlias = Callable[[random.Random], Action]

NAMED: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "lstm": ["lstm"],
        "gru": ["gru"],
        "tree": ["gates", "leaf"],
        "mixture-of-experts": ["1.experts.0", "1.experts.1", "3"],
        "checkpoint-reentrant": [f"layers.{number}" for number in range(10)],
        "checkpoint": [f"layers.{number}" for number in range(10)],
        "custom-function": [f"layers.{number}" for number in range(8)],
        "gradient-penalty": [str(number) for number in range(4)],
    }
)
"""What is named in families of which no blocks are found."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Which action a call gets, and what happens to it later."""

    choose: Choose
    """Asked at the beginning of every call."""
    revoked: bool = False
    """Whether calls are revoked at random moments of forward and backward."""


def _always(action: Action) -> Choose:
    return lambda draw: action


def _any(draw: random.Random) -> Action:
    return draw.choice(LOSSLESS)


WAYS: Final[Mapping[str, Way]] = MappingProxyType(
    {
        **{action.value: Way(choose=_always(action)) for action in LOSSLESS},
        "mixed": Way(choose=_any),
        "keep, revoked": Way(choose=_always(Action.KEEP), revoked=True),
        "mixed, revoked": Way(choose=_any, revoked=True),
    }
)
"""By their names in the table."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, its blocks, and what plain PyTorch makes of it."""

    name: str
    build: Build
    blocks: Sequence[str]
    found: bool
    """Whether the blocks were found, or named."""
    plain: Trained


@final
@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a model in one way."""

    wrong: str = ""
    """The first thing that is not as plain PyTorch leaves it; empty if all is."""
    counts: Counter[str] = field(default_factory=Counter)
    """Calls, their own bytes, second runs, revocations, and bytes that waited in the spill file."""
    kept: Counter[str] = field(default_factory=Counter)
    """Reasons for which calls were kept that were to run again."""

    def is_idle(self, way: Way) -> bool:
        """Whether a run gave up nothing of what it could have: then that all is identical says nothing."""
        keeps = way.revoked or (way.choose is not _any and way.choose(random.Random()) is Action.KEEP)
        return not keeps and self.counts["own"] > 0 and self.counts["recomputes"] + self.counts["offloaded"] == 0


def subject_of(name: str, build: Build) -> Subject:
    plain = train(build(0), None, STEPS)
    built = build(0)
    try:
        blocks, found = discover(built.model, lambda: _graph(built)), True
    except ModelError:
        blocks, found = list(NAMED[name]), False
    return Subject(name=name, build=build, blocks=blocks, found=found, plain=plain)


@final
class _Reached(BaseException):
    """The first backward of a step."""


def _graph(built: Built) -> list[Tensor]:
    """The loss of a step, whose first backward is left out."""
    held: list[Tensor] = []

    def instead(loss: Tensor, *_: object, **__: object) -> None:
        held.append(loss)
        raise _Reached

    with mock.patch.object(Tensor, "backward", instead), contextlib.suppress(_Reached):
        built.step(built.model, built.optimizers, built.batches[0])
    return held


def outcome_of(subject: Subject, way: Way) -> Outcome:
    outcome, draw, built = Outcome(), random.Random(subject.name), subject.build(0)
    with (
        tempfile.TemporaryDirectory() as spill,
        _counting_bytes_out(outcome),
        BlockEngine(
            built.model, subject.blocks, actions=lambda block, call: way.choose(draw), spill_directory=spill
        ) as engine,
    ):
        watched = built._replace(step=_Counted(built.step, engine, outcome))
        moments = _Moments(engine, built.model, draw, outcome).opened() if way.revoked else contextlib.nullcontext()
        try:
            with moments:
                trained = train(watched, None, STEPS)
        except Exception as error:  # the table is to tell of it, and of all that come after
            outcome.wrong = f"{type(error).__name__}: {error}"
            return outcome
    outcome.wrong = different(subject.plain, trained) or ""
    return outcome


@contextlib.contextmanager
def _counting_bytes_out(outcome: Outcome) -> Iterator[None]:
    """Every slot of a spill file is counted."""
    reserve = DiskTier._reserve

    def counted(tier: DiskTier, nbytes: Bytes) -> Slot:
        outcome.counts["offloaded"] += nbytes
        return reserve(tier, nbytes)

    with mock.patch.object(DiskTier, "_reserve", counted):
        yield


@final
class _Counted:
    """A family's step, after which the calls of blocks are counted."""

    def __init__(self, step: Callable[..., Tensor], engine: BlockEngine, outcome: Outcome) -> None:
        self._step = step
        self._engine = engine
        self._outcome = outcome

    def __call__(self, *args: Any) -> Tensor:
        loss = self._step(*args)
        calls: list[CallReport] = self._engine.calls
        recomputes, own = (sum(getattr(call, name) for call in calls) for name in ("recomputes", "own_bytes"))
        self._outcome.counts += Counter(calls=len(calls), recomputes=recomputes, own=own)
        self._outcome.kept.update(call.kept_because for call in calls if call.kept_because)
        return loss


@final
class _Moments:
    """Every call of a module, in first and second runs, and every gradient of a parameter that is complete."""

    def __init__(self, engine: BlockEngine, model: nn.Module, draw: random.Random, outcome: Outcome) -> None:
        self._engine = engine
        self._model = model
        self._draw = draw
        self._counts = outcome.counts

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Revoke at some of them, drawn."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        handles = [register_module_forward_pre_hook(self._happened)]
        handles += [parameter.register_post_accumulate_grad_hook(self._happened) for parameter in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _happened(self, *_: object) -> None:
        calls = self._engine.calls
        if calls and self._draw.random() < CHANCE:
            call = self._draw.choice(calls)
            backward = torch._C._current_graph_task_id() != -1
            if self._engine.revoke(call.block, call.call):
                self._counts["revoked"] += 1
                self._counts["revoked in the backward"] += backward
