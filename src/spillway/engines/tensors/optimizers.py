"""What updates of optimizers take, from three of them on tensors without content."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spillway.engines.tensors.tally import Tally
from spillway.engines.tensors.twins import bare_step
from spillway.internals.interrupts import by_signal
from spillway.internals.private import grad_mode, local_of
from spillway.memory.ledger import SMALLEST_MOVABLE
from spillway.units import Bytes

NUMBERS: Final[Bytes] = 64
"""Kernels make tensors of the numbers that they are given, which nobody sees."""
STATES: Final = 4
"""Tensors of state a parameter that an optimizer of which nothing is known may add, as Prodigy and Adan do."""
TEMPORARIES: Final = 3
"""Temporaries as large as all parameters that it may have at once."""
SINGLE: Final[Bytes] = 4
"""Bytes of an element of these, at least."""


class Update(NamedTuple):
    """Of the next step of an optimizer, beside parameters and gradients."""

    state: Bytes = 0
    """That it adds."""
    working: Bytes = 0
    """Temporaries, at most at once."""
    small: Bytes = 0
    """Of all state that is too small to leave, added or not."""
    small_working: Bytes = 0
    """Temporaries that are too small to leave, at most at once."""
    large: Bytes = 0
    """What one op needs at once of what may leave."""

    def beside(self, other: Update, *, times: int = 1, fresh: int = 1) -> Update:
        """Together with so many of another, of which so many have no state yet."""
        return Update(
            self.state + fresh * other.state, max(self.working, other.working), self.small + times * other.small,
            max(self.small_working, other.small_working), max(self.large, other.large),
        )  # fmt: skip


def update_of(optimizer: torch.optim.Optimizer) -> Update | None:
    """None where it does not run on such tensors, or is not torch's: a step of somebody's own may change what only the
    user's may, a counter or a random stream."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    total = Update()
    try:
        for group in optimizer.param_groups:
            total = _of_group(optimizer, group, total)
    except Exception as error:  # with other arguments, or ops without shapes
        if by_signal(error):
            raise
        return None
    return total


def assumed(optimizer: torch.optim.Optimizer) -> Update:
    """Of an optimizer that tells nothing beforehand (`update_of` is None): a bound that published ones keep, `STATES`
    for each parameter that has no state yet and `TEMPORARIES` for each of them."""
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    sizes = [local_of(one).numel() * max(one.element_size(), SINGLE) for one in parameters]
    new = [nbytes for one, nbytes in zip(parameters, sizes, strict=True) if not optimizer.state.get(one)]
    small = sum(SINGLE + STATES * nbytes * (nbytes < SMALLEST_MOVABLE) for nbytes in sizes)
    working = TEMPORARIES * sum(sizes) + NUMBERS
    return Update(STATES * sum(new), working, small, large=STATES * max(sizes, default=0))


def _of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], total: Update) -> Update:
    trained = [one for one in group["params"] if one.requires_grad]
    if group.get("foreach") or group.get("fused"):
        new = any(not optimizer.state.get(one) for one in trained)
        return total.beside(_measured(optimizer, group, trained, new=new), fresh=int(new))
    alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for one in trained:
        alike[local_of(one).shape, one.dtype].append(one)
    alone: dict[Any, Bytes] = {}
    left: dict[Any, Bytes] = {}
    for kind, several in alike.items():
        fresh = sum(not optimizer.state.get(one) for one in several)
        measured = _measured(optimizer, group, several[:1], new=fresh > 0)
        total = total.beside(measured, times=len(several), fresh=fresh)
        alone[kind] = measured.working
        if len(trained) > 1:  # what it leaves to the next one: its names are given to others one by one
            left[kind] = _measured(optimizer, group, several[:1] * 2, new=fresh > 0).working - measured.working
    kinds = [(local_of(one).shape, one.dtype) for one in trained]
    for before, kind in pairwise(kinds):
        total = total._replace(working=max(total.working, left[before] + alone[kind]))
    return total


def _measured(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor], *, new: bool
) -> Update:
    """The first makes state, which is there already unless they are new. Some do more after many steps."""
    twin: Any = copy.copy(optimizer)
    with FakeTensorMode(allow_non_fake_inputs=True), grad_mode(enabled=True):
        fakes = [torch.nn.Parameter(torch.empty(local_of(one).shape, dtype=one.dtype)) for one in parameters]
        gradients = [torch.empty(fake.shape, dtype=fake.dtype) for fake in fakes]
        for fake, gradient in zip(fakes, gradients, strict=True):
            fake.grad = gradient
        twin.param_groups, twin.state = [{**group, "params": fakes}], defaultdict(dict)
        tally = Tally([*fakes, *gradients])
        given = tally.small
        with tally:
            tally.number = 1.0
            bare_step(twin)
            state, small, tally.peak, tally.small_peak = tally.alive, tally.small, 0, 0
            tally.large *= new
            bare_step(twin)
            for kept in twin.state.values():
                kept["step"] = kept.get("step", 0) + 1000
            bare_step(twin)
    working, small_working = max(tally.peak - state, 0) + NUMBERS, max(tally.small_peak - small, 0)
    return Update(state, working, small - given, small_working, tally.large)
