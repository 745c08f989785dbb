"""Every case under every action: losses, gradients, buffers and random streams as plain PyTorch leaves them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from spillway.engines.blocks.block import CallReport
from spillway.engines.blocks.block_engine import BlockEngine
from spillway.methods.actions import LOSSLESS, Action
from tests.cpu.block_cases import CASES, Case
from tests.cpu.families import State, difference, state_of

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")


def trained(name: str, around: Callable[[Case], Any]) -> tuple[list[State], list[Tensor]]:
    """The state after each step, and the losses; `around` opens an engine, or none, for the steps."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    case = CASES[name]()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.05, momentum=0.9)
    states, losses = [], []
    batches = torch.Generator().manual_seed(1)
    with around(case) as watched:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = case.loss(case.model, torch.randn(40, 32, generator=batches))
            watched.before_backward()
            case.backward(loss)
            watched.after_backward()
            optimizer.step()
            states.append(state_of(case.model, optimizer) | _generator_states(case))
            losses.append(loss.detach())
    return states, losses


def _generator_states(case: Case) -> State:
    streams = [getattr(module, "stream", None) for module in case.model.modules()]
    states = [repr(stream.get_state().tolist()) for stream in streams if isinstance(stream, torch.Generator)]
    states += [
        repr(one.bit_generator.state if isinstance(one, numpy.random.Generator) else one.getstate())
        for one in case.generators
    ]
    counts = [module.count for module in case.model.modules() if hasattr(module, "count")]
    return {f"stream {number}": state for number, state in enumerate(states)} | {"counts": repr(counts)}


class Watched:
    """What is done with an engine around a backward, and what is seen of it."""

    def __init__(self, engine: BlockEngine | None = None, *, revoked: bool = False) -> None:
        self.engine, self.revoked = engine, revoked
        self.reports: list[CallReport] = []

    def before_backward(self) -> None:
        if self.engine is not None and self.revoked:
            for report in self.engine.calls:
                self.engine.revoke(report.block, report.call)

    def after_backward(self) -> None:
        self.reports += self.engine.calls if self.engine is not None else []


@contextmanager
def plainly(_: Case) -> Iterator[Watched]:
    yield Watched()


def under(
    action: Callable[[str, int], Action],
    spill: Path,
    reports: list[CallReport],
    *,
    revoked: bool = False,
) -> Callable[[Case], Any]:
    @contextmanager
    def around(case: Case) -> Iterator[Watched]:
        with BlockEngine(
            case.model,
            case.blocks,
            actions=action,
            generators=case.generators,
            spill_directory=spill,
        ) as engine:
            watched = Watched(engine, revoked=revoked)
            yield watched
            reports.extend(watched.reports)

    return around


def mixed(block: str, call: int) -> Action:
    return LOSSLESS[(len(block) + ord(block[-1]) + call) % len(LOSSLESS)]


WAYS: dict[str, tuple[Callable[[str, int], Action], bool]] = {
    **{action.value: (lambda block, call, action=action: action, False) for action in LOSSLESS},
    "mixed": (mixed, False),
    "kept, then revoked": (lambda block, call: Action.KEEP, True),
    "offloaded, then revoked": (lambda block, call: Action.OFFLOAD, True),
    "outer blocks recomputed, inner ones kept": (
        lambda block, call: Action.RECOMPUTE if block.count(".") < 2 else Action.KEEP,
        False,
    ),
    "inner blocks recomputed, outer ones kept": (
        lambda block, call: Action.KEEP if block.count(".") < 2 else Action.RECOMPUTE,
        False,
    ),
}
_plain: dict[str, tuple[list[State], list[Tensor]]] = {}


@pytest.mark.long(but=9)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_steps_end_as_plain_ones_do(name: str, way: str, tmp_path: Path) -> None:
    if name not in _plain:
        _plain[name] = trained(name, plainly)
    states, losses = _plain[name]
    action, revoked = WAYS[way]
    reports: list[CallReport] = []
    got_states, got_losses = trained(name, under(action, tmp_path, reports, revoked=revoked))
    for step in range(STEPS):
        assert torch.equal(losses[step], got_losses[step]), f"loss of step {step}"
        assert difference(states[step], got_states[step]) is None, f"after step {step}"
    assert what_did_not_happen(reports, revoked=revoked) == []


def what_did_not_happen(reports: list[CallReport], *, revoked: bool) -> list[str]:
    """Calls that were to run again and did not, or the other way round."""
    assert reports
    again = {report for report in reports if report.recomputes}
    # What a block inside holds comes back with the second run of the block around it, or with its own, or is dead.
    wanted = {report for report in reports if report.action.recomputes or revoked}
    missed = {report for report in wanted - again if report.block.count(".") < 2 and not report.kept_because}
    return [f"{report.block} {report.call}: {report.recomputes}" for report in missed | (again - wanted)]
