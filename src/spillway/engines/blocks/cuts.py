"""Which calls of modules are worth being blocks where no class of modules repeats: cuts by what a forward has saved.

NOTE [Cuts]. A *unit* is a module, or consecutive children of a `Sequential` (`groups.py`). If every unit is recomputed,
a step holds, at the beginning of its backward, what autograd saved outside of units and what each unit was called with;
and beside that, while one unit goes backward, what that one saved:

    floor = bytes(saved outside, arguments of units) + max over units of bytes(what it saved and that does not hold)

This is what a choice of units is judged by, storage by storage, each once. Few and small tensors cross a good cut, and
no unit holds much more than the others: both lower it. Of a chain of n equal layers it makes units of about the square
root of n layers (Chen et al. 2016, section 3).

 1. For a cap on what one unit saves, from half of the step downwards, modules are looked at from the model inwards: one
    that saves no more is a unit; a `Sequential` is cut into groups that save no more, so that the fewest bytes cross
    the cuts (a dynamic program over its children); of any other the parts are looked at.
 2. No unit begins with what is written to later, as by an activation in place: its argument would have to be copied.
 3. What frees less than `SMALLEST` of all saved bytes is no unit.
 4. Of all caps that come to a floor within `NEAR` of the lowest, the smallest is taken: plans have more to choose from.
 5. Units that lower the floor by less than `WORTH` of what plain PyTorch holds are not worth their recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, final

import torch
from torch import nn

from spillway.engines.blocks.compiled_blocks import is_compiled
from spillway.engines.blocks.groups import children_of, group_name, runs_children
from spillway.units import Bytes

SMALLEST: Final = 0.01
NEAR: Final = 1.1
WORTH: Final = 0.125
_LARGEST: Final = 0.5
"""Of what the step saves, what one unit may hold at most: more would hardly lower its peak."""
_SHRINKS: Final = 0.85
"""From one cap to the next."""
_CAPS: Final = 30
_LONG: Final = 3.0
"""A group has at most so many times the square root of the children that a `Sequential` has, or 32: of a long chain no
cap wants more, and looking costs time."""

Storages: TypeAlias = set[int]


@final
@dataclass(slots=True, eq=False)
class Called:
    """A call of a module in a watched forward. Storages are told apart by numbers; parameters and buffers are none."""

    module: nn.Module
    inside: list[Called] = field(default_factory=list)
    """Calls of modules in it, in order."""
    own: Storages = field(default_factory=set)
    """What autograd saved in it and in no module inside."""
    saved: Storages = field(default_factory=set)
    """What autograd saved in it."""
    taken: Storages = field(default_factory=set)
    """What it was called with."""
    written: bool = False
    """Whether anything of that was written to afterwards."""


class _Run(NamedTuple):
    """One run of a unit."""

    saved: Storages
    taken: Storages


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """A module, or consecutive children of one."""

    module: nn.Module
    children: range | None
    """Their places; None for the module as a whole."""
    runs: Sequence[_Run]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a step holds if every unit is recomputed."""

    units: Sequence[Unit]
    floor: Bytes
    """NOTE [Cuts]."""
    covered: float
    """The share of what autograd saves that recomputing all units frees."""


@final
class Cuts:
    """Finds units in a forward.

    Args:
        model: Is no unit itself.
        forward: The outermost calls of its modules: its own, or where its forward was called those of its parts.
        outside: What autograd saved outside of all of these.
        nbytes: Of every storage that is named.
    """

    def __init__(
        self, model: nn.Module, forward: Sequence[Called], *, outside: Storages, nbytes: Mapping[int, Bytes]
    ) -> None:
        self._model = model
        self._nbytes = nbytes
        everything = outside.union(*(call.saved for call in forward))
        self._outside, self._forward = outside, forward
        if all(call.module is not model for call in forward):
            own, self._outside = outside, set()
            self._forward = [Called(model, inside=list(forward), own=own, saved=everything)]
        self._calls: dict[nn.Module, list[Called]] = {}
        for call in _all(self._forward):
            self._calls.setdefault(call.module, []).append(call)
        self.everything = self._bytes(everything)
        """Bytes that autograd saved."""
        self._sizes: dict[nn.Module, Bytes] = {}
        self._grouped: dict[nn.Module, _Chain | None] = {}

    # ---------------------------------------------------------------------------------------------------- judging

    def judge(self, units: Sequence[Unit]) -> Judged:
        """What is left if all of them are recomputed, and one at a time is there."""
        outside = self._outside_of(units)
        held = outside.union(*(run.taken for unit in units for run in unit.runs))
        most = max((self._bytes(run.saved - held) for unit in units for run in unit.runs), default=0)
        inside = set[int]().union(*(run.saved for unit in units for run in unit.runs))
        covered = self._bytes(inside - held) / max(self.everything, 1)
        return Judged(units=units, floor=self._bytes(held) + most, covered=covered)

    def whole(self, modules: Iterable[nn.Module]) -> list[Unit]:
        """Modules as units, those that were called."""
        called = (module for module in modules if module in self._calls)
        return [Unit(module=one, children=None, runs=self._runs_of(self._calls[one])) for one in called]

    def best(self) -> Judged | None:
        """The units of the lowest floor; None where none are worth it."""
        found: list[Judged] = []
        cap = _LARGEST * self.everything
        for _ in range(_CAPS):
            units = self._worthwhile(self._outermost(self._units_within(self._model, cap, set())))
            found.append(self.judge(units))
            cap *= _SHRINKS
        lowest = min(one.floor for one in found)
        if lowest > (1 - WORTH) * self.everything:
            return None
        return [one for one in found if one.floor <= NEAR * lowest][-1]

    def _bytes(self, storages: Storages) -> Bytes:
        return sum(map(self._nbytes.__getitem__, storages))

    def _freed(self, units: Sequence[Unit]) -> Bytes:
        """What recomputing units frees, less what is held for that alone."""
        saved, taken = (set[int]().union(*(run[which] for unit in units for run in unit.runs)) for which in (0, 1))
        return self._bytes(saved - taken - self._outside_of(units)) - self._bytes(taken - saved)

    def _outside_of(self, units: Sequence[Unit]) -> Storages:
        whole = {unit.module for unit in units if unit.children is None}
        parts = {(unit.module, place) for unit in units for place in unit.children or ()}
        found = set(self._outside)

        def visit(calls: Sequence[Called], above: nn.Module | None) -> None:
            for place, call in enumerate(calls):
                if call.module not in whole and (above, place) not in parts:
                    found.update(call.own)
                    visit(call.inside, call.module)

        visit(self._forward, None)
        return found

    # ---------------------------------------------------------------------------------------------------- choosing

    def _units_within(self, module: nn.Module, cap: float, seen: set[nn.Module]) -> list[Unit]:
        """The units inside a module, in the order in which they were called."""
        if is_compiled(module) or module in seen:
            return []
        seen.add(module)
        chain = self._chain(module)
        if chain is not None:
            return self._cut(chain, cap, seen)
        inside = dict.fromkeys(part.module for call in self._calls[module] for part in call.inside)
        found: list[Unit] = []
        for part in inside:
            if self._may_be_unit(part) and self._size(part) <= cap:
                found += [] if part in seen else self.whole([part])
                seen.add(part)
            else:
                found += self._units_within(part, cap, seen)
        return found

    def _may_be_unit(self, module: nn.Module) -> bool:
        scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
        return module is not self._model and not scripted and not any(call.written for call in self._calls[module])

    def _size(self, module: nn.Module) -> Bytes:
        if module not in self._sizes:
            runs = self._runs_of(self._calls[module])
            self._sizes[module] = max(self._bytes(run.saved - run.taken) for run in runs)
        return self._sizes[module]

    @staticmethod
    def _runs_of(calls: Sequence[Called]) -> list[_Run]:
        return [_Run(call.saved, call.taken) for call in calls]

    def _outermost(self, units: Sequence[Unit]) -> list[Unit]:
        """Those that are part of no other."""
        parts: Counter[nn.Module] = Counter()
        for unit in units:
            parts.update(set(unit.module.modules()) if unit.children is None else _below(unit))
        return [unit for unit in units if parts[unit.module] == int(unit.children is None)]

    def _worthwhile(self, units: Sequence[Unit]) -> list[Unit]:
        """Those without which more would be held: each frees what it saved, and holds what it was called with."""
        outside = self._outside_of(units)
        holders = Counter(storage for unit in units for storage in set().union(*(run.taken for run in unit.runs)))
        found = []
        for unit in units:
            saved: Storages = set().union(*(run.saved for run in unit.runs))
            taken: Storages = set().union(*(run.taken for run in unit.runs))
            frees = self._bytes({one for one in saved if one not in outside and one not in holders})
            costs = self._bytes({one for one in taken - saved - outside if holders[one] == 1})
            if frees - costs >= SMALLEST * self.everything:
                found.append(unit)
        return found

    # ---------------------------------------------------------------------------------------------- in a Sequential

    def _chain(self, module: nn.Module) -> _Chain | None:
        if module not in self._grouped:
            calls, children = self._calls[module], children_of(module)
            plain = runs_children(module, behind_hook=module is self._model)
            each = plain and all([one.module for one in call.inside] == children for call in calls)
            most = _LARGEST * self.everything
            self._grouped[module] = _Chain(module, calls, self._bytes, most) if each else None
        return self._grouped[module]

    def _cut(self, chain: _Chain, cap: float, seen: set[nn.Module]) -> list[Unit]:
        """Groups of at most this size, by which the fewest bytes are held, and units inside children that are none."""
        inside: dict[int, list[Unit]] = {}
        best: list[tuple[Bytes, int]] = [(0, 0)]
        for end in range(1, chain.length + 1):
            last = end - 1
            module = chain.children[last]
            sizes = chain.sizes(end)
            alone = chain.saved[last]
            if not (sizes and sizes[0] <= cap and chain.may_begin[last]) and module not in seen:
                inside[last] = self._units_within(module, cap, seen)
                alone -= self._freed(inside[last])
            fewest, begin = best[last][0] + alone, -1
            for first, size in zip(range(last, -1, -1), sizes, strict=False):
                if size > cap:
                    break
                held = best[first][0] + chain.taken[first]
                if held < fewest and chain.may_begin[first]:
                    fewest, begin = held, first
            best.append((fewest, begin))
        return list(self._walk(chain, best, inside))[::-1]

    def _walk(
        self, chain: _Chain, best: Sequence[tuple[Bytes, int]], inside: Mapping[int, list[Unit]]
    ) -> Iterator[Unit]:
        end = chain.length
        while end:
            first = best[end][1]
            if first < 0:
                yield from reversed(inside.get(end - 1, []))
                end -= 1
            else:
                yield chain.unit(range(first, end), alone=self._calls)
                end = first


@final
class _Chain:
    """The children of a `Sequential` that ran one after the other, in each of its calls."""

    def __init__(
        self, module: nn.Module, calls: Sequence[Called], nbytes: Callable[[Storages], Bytes], most: float
    ) -> None:
        self.module = module
        self.children = children_of(module)
        self.length = len(self.children)
        self._calls = calls
        self._bytes = nbytes
        self._most = most
        each = list(zip(*(call.inside for call in calls), strict=True))
        self.saved = [max(self._bytes(call.saved) for call in one) for one in each]
        """Bytes that each child saved."""
        self.taken = [max(self._bytes(call.taken) for call in one) for one in each]
        """Bytes that each was called with."""
        self.may_begin = [not any(call.written for call in one) for one in each]
        """Whether a group may begin with it (NOTE [Cuts], 2)."""
        self._sizes: dict[int, list[Bytes]] = {}
        self._scripted = {
            place
            for place, child in enumerate(self.children)
            if any(isinstance(part, torch.jit.ScriptModule) for part in child.modules())
        }

    def sizes(self, end: int) -> list[Bytes]:
        """Bytes that the children before a place saved, without what they were called with: of one child, of two and so
        on, as long as it is no more than a unit may have."""
        if end not in self._sizes:
            rows = [list(self._growing(call, end)) for call in self._calls]
            self._sizes[end] = [max(row) for row in zip(*rows, strict=False)]
        return self._sizes[end]

    def _growing(self, call: Called, end: int) -> Iterator[Bytes]:
        saved: Storages = set()
        total = 0
        longest = max(32, int(_LONG * self.length**0.5))
        for first in range(end - 1, max(end - longest, 0) - 1, -1):
            total += self._bytes(call.inside[first].saved - saved)
            saved |= call.inside[first].saved
            size = total - self._bytes(saved & call.inside[first].taken)
            if size > self._most or first in self._scripted:
                return
            yield size

    def runs(self, places: range) -> list[_Run]:
        return [
            _Run(set().union(*(call.inside[place].saved for place in places)), call.inside[places[0]].taken)
            for call in self._calls
        ]

    def unit(self, places: range, *, alone: Mapping[nn.Module, Sequence[Called]]) -> Unit:
        """A group; a child by itself where nobody else calls it."""
        child = self.children[places[0]]
        if len(places) == 1 and len(alone[child]) == len(self._calls):
            return Unit(module=child, children=None, runs=self.runs(places))
        return Unit(module=self.module, children=places, runs=self.runs(places))


def names_of(model: nn.Module, units: Sequence[Unit]) -> list[str]:
    """What the units are called, in the order of `named_modules`."""
    names = {module: name for name, module in model.named_modules()}
    places = {name: place for place, name in enumerate(names.values())}

    def place(unit: Unit) -> int:
        first = unit.module if unit.children is None else children_of(unit.module)[unit.children[0]]
        return places[names[first]]

    return [
        names[unit.module]
        if unit.children is None
        else group_name(names[unit.module], unit.module, unit.children[0], unit.children[-1])
        for unit in sorted(units, key=place)
    ]


def _all(calls: Sequence[Called]) -> Iterator[Called]:
    for call in calls:
        yield call
        yield from _all(call.inside)


def _below(unit: Unit) -> set[nn.Module]:
    children = children_of(unit.module)
    return {part for place in unit.children or () for part in children[place].modules()}
