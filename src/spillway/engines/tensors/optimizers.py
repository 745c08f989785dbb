"""What updates of optimizers take, from three of them on tensors without content; and updates of one part of the
parameters after the other, which take less at once."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch

from spillway.engines.tensors.fakes import FakeMode
from spillway.engines.tensors.tally import Tally
from spillway.engines.tensors.twins import bare_step
from spillway.internals.interrupts import by_signal
from spillway.internals.private import default_to_foreach, grad_mode, is_distributed, is_hollow, local_of
from spillway.memory.budget import UNLIMITED
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
_SEARCHED: Final = 6
"""Times that a line search of LBFGS has all numbers at most: parameters as they were, gradients of what it tried."""


class Update(NamedTuple):
    """Of the next step of an optimizer, beside parameters and gradients."""

    state: Bytes = 0
    """That it adds."""
    working: Bytes = 0
    """Temporaries, at most at once."""
    small: Bytes = 0
    """Of all state that is too small to leave, added or not."""
    large: Bytes = 0
    """What one op needs at once of what may leave, beside temporaries that are too small for that."""
    later: Bytes = 0
    """State that updates after it add."""
    held: Bytes = 0
    """What it has for itself when it calls its closure again, state that it adds included; 0 if it does not."""

    @property
    def meanwhile(self) -> Bytes:
        """What there is of it, at most, beside a forward that comes within it or after it: with it also the loss of the
        one before."""
        return max(self.state, self.held) + self.later + NUMBERS * (self.held > 0)

    def step(self, peak: Bytes, level: Bytes) -> tuple[Bytes, Bytes]:
        """What a step takes at most with it that got to a peak before, and is at a level now; and the smallest budget
        for such steps, as the next one begins with the state that this one adds, and so does a closure that is called
        again."""
        update = level + self.state + self.working
        return max(peak + self.held, update), max(peak + self.meanwhile, update + self.later)

    def beside(self, other: Update, *, times: int = 1, fresh: int = 1) -> Update:
        """Together with so many of another, of which so many have no state yet."""
        return Update(
            self.state + fresh * other.state, max(self.working, other.working), self.small + times * other.small,
            max(self.large, other.large), self.later + other.later,
            max(self.held + fresh * other.state, self.state + other.held) if self.held or other.held else 0,
        )  # fmt: skip


def update_of(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]] | None = None) -> Update | None:
    """With its own groups, or these instead. None where it does not run on such tensors, or is not torch's: a step of
    somebody's own may change what only the user's may, a counter or a random stream."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    if grows(optimizer):
        return _of_lbfgs(optimizer)
    total = Update()
    try:
        for group in optimizer.param_groups if groups is None else groups:
            total = _of_group(optimizer, group, total)
    except Exception as error:  # with other arguments, or ops without shapes
        if by_signal(error):
            raise
        return None
    return total


class GroupsInParts(list[dict[str, Any]]):
    """Groups of an optimizer that is one of torch's. Iterating cuts those that it updates in ops over lists into groups
    of neighbours with `part_bytes` together, or one that is larger: the same sums, tensor by tensor, but the
    temporaries of one part are gone when the next one begins."""

    def __init__(self, optimizer: torch.optim.Optimizer, part_bytes: Bytes | None = None) -> None:
        super().__init__(optimizer.param_groups)
        self.optimizer = optimizer
        self.part_bytes = part_bytes
        """None: nothing is cut."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """As groups are by now: hooks that come before an update may change them."""
        for group in self.optimizer.param_groups:
            if self.part_bytes is None or not _can_be_cut(self.optimizer, group):
                yield group
                continue
            part: list[torch.Tensor] = []
            nbytes = 0
            for one in group["params"]:
                if part and nbytes + _nbytes(one) > self.part_bytes:
                    yield {**group, "params": part}
                    part, nbytes = [], 0
                part.append(one)
                nbytes += _nbytes(one)
            yield {**group, "params": part}


class OptimizerInParts:
    """Stands for an optimizer in its `step`: has these groups, and is that optimizer in everything else."""

    def __init__(self, groups: GroupsInParts) -> None:
        vars(self)["param_groups"] = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.param_groups.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.param_groups.optimizer, name, value)


def sizes_of_parts(optimizer: torch.optim.Optimizer) -> list[Bytes]:
    """`part_bytes`, from half of what it updates in ops over lists to the largest of it alone, by halves; nothing where
    there is nothing to be cut."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return []
    groups = [group["params"] for group in optimizer.param_groups if _can_be_cut(optimizer, group)]
    lists = [[*map(_nbytes, parameters)] for parameters in groups if parameters]
    largest, nbytes = max(map(max, lists), default=0), max(map(sum, lists), default=0)
    sizes = []
    while nbytes // 2 > largest:
        sizes.append(nbytes := nbytes // 2)
    return [*sizes, largest] if nbytes > largest else []


def working_in_parts(optimizer: torch.optim.Optimizer, part_bytes: Bytes) -> Bytes:
    """Temporaries of its next update in such parts, at most at once: those of the largest part of each kind. UNLIMITED
    where that cannot be told."""
    largest: dict[Any, tuple[Bytes, dict[str, Any]]] = {}
    for group in GroupsInParts(optimizer, part_bytes):
        updated = [local_of(one) for one in group["params"] if _is_updated(one)]
        kinds = frozenset((one.dtype, one.dim()) for one in updated)
        options = tuple(id(option) for name, option in group.items() if name != "params")
        nbytes = sum(map(_nbytes, group["params"]))
        if nbytes >= largest.get((kinds, options), (0,))[0]:
            largest[kinds, options] = nbytes, group
    update = update_of(optimizer, [group for _, group in largest.values()])
    return UNLIMITED if update is None else update.working


def uses_foreach(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether ops over lists update it that make lists of temporaries: with `foreach=True`, and on accelerators unless
    it is told otherwise."""
    chosen, rate = group.get("foreach", False), group.get("lr")
    if chosen is None:
        if group.get("fused") is not None or isinstance(optimizer, torch.optim.Adafactor):
            return False
        if isinstance(optimizer, torch.optim.Adam) and isinstance(rate, torch.Tensor) and not group["capturable"]:
            return False
        chosen = default_to_foreach(group["params"], differentiable=group.get("differentiable", False))
    return bool(chosen)


def _can_be_cut(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether parts of it are the same sums, and fail as a whole. An op over lists goes through all parameters before
    the next op does, which tells where some share memory; sparse gradients most optimizers refuse before anything
    changes; and where an update communicates, as Adafactor's of sharded parameters, all ranks do so in one order."""
    if not uses_foreach(optimizer, group):
        return False
    updated = [local_of(one) for one in group["params"] if _is_updated(one)]
    if any(is_hollow(one) or (one.grad is not None and not _lies_alike(one, one.grad)) for one in updated):
        return False
    if isinstance(optimizer, torch.optim.Adafactor) and any(map(is_distributed, group["params"])):
        return False
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in updated)
    return all(one[1] <= other[0] for one, other in pairwise(spans))


def _lies_alike(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """On accelerators one pair that does not has the whole list go through other kernels."""
    dense = gradient.layout is torch.strided
    return dense and (parameter.device.type == "cpu" or parameter.stride() == gradient.stride())


def _is_updated(parameter: torch.Tensor) -> bool:
    """Whether there is a gradient to update it by, or will be: also one that is frozen by then."""
    return parameter.requires_grad or parameter.grad is not None


def _nbytes(parameter: torch.Tensor) -> Bytes:
    return local_of(parameter).numel() * parameter.element_size() if _is_updated(parameter) else 0


def grows(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps more after every update: what the next one takes is told anew."""
    return type(optimizer) is torch.optim.LBFGS


def assumed(optimizer: torch.optim.Optimizer) -> Update:
    """Of an optimizer that tells nothing beforehand (`update_of` is None): a bound that published ones keep, `STATES`
    for each parameter that has no state yet and `TEMPORARIES` for each of them."""
    parameters = [one for group in optimizer.param_groups for one in group["params"] if _is_updated(one)]
    sizes = [local_of(one).numel() * max(one.element_size(), SINGLE) for one in parameters]
    new = [nbytes for one, nbytes in zip(parameters, sizes, strict=True) if not optimizer.state.get(one)]
    small = sum(SINGLE + STATES * nbytes * (nbytes < SMALLEST_MOVABLE) for nbytes in sizes)
    working = TEMPORARIES * sum(sizes) + NUMBERS
    return Update(STATES * sum(new), working, small, large=STATES * max(sizes, default=0))


def _of_lbfgs(optimizer: torch.optim.Optimizer) -> Update:
    """It has all numbers in a row: as state twice for each direction that it remembers, and twice for the latest. How
    many iterations a step takes, and where a line search stops, depends on losses: here at most."""
    group = optimizer.param_groups[0]
    flat = sum(local_of(one).numel() * one.element_size() for one in group["params"])
    state = optimizer.state.get(group["params"][0], {})
    begun, searches = "d" in state, group["line_search_fn"] is not None
    missing = max(group["history_size"] - len(state.get("old_dirs", ())), 0)
    iterations = max(min(group["max_iter"], group["max_eval"] - 1), 1)
    again = group["max_iter"] > 1 or searches
    pairs = min(missing, iterations - (not begun))
    remembered = 2 * flat + 2 * NUMBERS
    new = pairs * remembered + (not begun) * 2 * flat
    # The gradient, its negative and, beside the latest direction, that of the step before.
    hands = (1 + (iterations > 1 or begun) + begun) * flat
    own = _SEARCHED + 1 if searches else 2 if iterations > 1 else int(again or not begun)
    kept = group["history_size"] * (remembered if flat < SMALLEST_MOVABLE else 2 * NUMBERS)
    return Update(
        state=new, working=max(hands + own * flat, 3 * flat) + NUMBERS, small=kept, large=4 * flat,
        later=(missing - pairs) * remembered + again * (3 * flat - hands),
        held=again * (new + hands + searches * _SEARCHED * flat),
    )  # fmt: skip


def _of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], total: Update) -> Update:
    trained = [one for one in group["params"] if _is_updated(one)]
    if uses_foreach(optimizer, group):
        group = {**group, "foreach": True}  # wherever it is measured
    if group.get("foreach") or group.get("fused"):
        new = [one for one in trained if not optimizer.state.get(one)]
        measured = _measured(optimizer, group, trained, new=bool(new))
        if 0 < len(new) < len(trained):  # others have theirs
            measured = measured._replace(state=_measured(optimizer, group, new, new=True).state)
        return total.beside(measured, fresh=int(bool(new)))
    alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for one in trained:
        alike[local_of(one).shape, one.dtype].append(one)
    fresh = {kind: sum(not optimizer.state.get(one) for one in those) for kind, those in alike.items()}
    for kind, those in alike.items():
        measured = _measured(optimizer, group, those[:1], new=fresh[kind] > 0)
        total = total.beside(measured, times=len(those), fresh=fresh[kind])
    kinds = [(local_of(one).shape, one.dtype) for one in trained]
    places = {pair: place for place, pair in reversed([*enumerate(pairwise(kinds))])}
    if places:  # names of one are given to the next, one by one
        path = [trained[at] for at in sorted({at for place in places.values() for at in (place, place + 1)})]
        several = _measured(optimizer, group, path, new=any(fresh.values()))
        total = total._replace(working=max(total.working, several.working), large=max(total.large, several.large))
    return total


def _measured(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor], *, new: bool
) -> Update:
    """The first makes state, which is there already unless they are new. Some do more after many steps."""
    twin: Any = copy.copy(optimizer)
    with FakeMode(), grad_mode(enabled=True):
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
            state, small, tally.peak = tally.alive, tally.small, 0
            tally.largest *= new
            bare_step(twin)
            for kept in twin.state.values():
                kept["step"] = kept.get("step", 0) + 1000
            bare_step(twin)
    return Update(state, max(tally.peak - state, 0) + NUMBERS, small - given, max(tally.largest - small, 0))
