"""The blocks of a recorded step, call by call: what the model repeats, found by the names of modules. For planners.

The rule is that of `engines/blocks/discovery.py`, which has modules and their classes. A recorded step has names alone,
so instead of "of one class" it says *alike*: two names with the same names below them, or two numbered ones of one list
of which one has all the names that the other has, as the first block of a stage has a shortcut beside what all have.
A container is a name that runs nothing itself and has only numbered names below it.

Calls of one module are told apart by repetition: if the ops that belong to it are one sequence k times over, they are
k calls, as of a layer that all depths share, or of micro-batches.

A recipe runs ops, not modules: what a block makes from a tensor that came into being outside of any op, such as an
empty cache, stays, where the engine would run the block's Python again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, final

from spillway.ir.lives import Kept, Life, kept_for_backward, lives_of
from spillway.ir.plan import Gap
from spillway.ir.recipes import as_one, together
from spillway.ir.step import Phase, Step, StorageId, ValueId
from spillway.units import Bytes, Seconds

DESCEND_SHARE: Final = 0.8
"""A module of whose bytes alike siblings inside hold so much is not a block: they are."""

_Call: TypeAlias = tuple[str, int]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """One call of a block in the forward."""

    name: str
    """Of its module."""
    call: int
    """Which call of that module, from 0."""
    ops: tuple[int, ...]
    """The forward ops that run in it, in order."""
    gaps: tuple[Gap, ...]
    """What is gone if it is recomputed: each value from its last use in the forward to the moment at which the backward
    comes back to the block, by one replay. Gaps of any calls of a step together make a plan."""
    nbytes: Bytes
    """Bytes that recomputing it frees."""
    seconds: Seconds
    """Of its forward; ops without seconds count as 0."""
    kept: Mapping[ValueId, Kept]
    """What it leaves to the backward and nothing else of the forward reads: `gaps` are of these, as far as there is a
    way back."""

    @property
    def returns(self) -> int:
        """The op before which it is recomputed."""
        return min(gap.end for gap in self.gaps)


def block_calls(step: Step, lives: Sequence[Life] | None = None) -> tuple[BlockCall, ...]:
    """The calls of blocks, in order of the forward, and what recomputing each frees; not those that free nothing."""
    lives = lives_of(step) if lives is None else lives
    modules = _Modules(step, lives)
    called = _calls(step, modules, list(modules.blocks("")))
    dropped = _dropped(step, lives, called)
    everything = {value for kept in dropped.values() for value in kept}
    found = []
    for key, ops in called.items():
        elsewhere = everything - dropped[key].keys()
        gaps = as_one(together(dropped[key], elsewhere, step=step, lives=lives, inside=frozenset(ops)), step)
        storages = {step.values[gap.value].storage for gap in gaps}
        nbytes = sum(step.storages[storage].nbytes for storage in storages)
        if nbytes:
            seconds = sum(step.ops[op].seconds or 0.0 for op in ops)
            found.append(
                BlockCall(
                    name=key[0], call=key[1], ops=tuple(ops), gaps=tuple(gaps), nbytes=nbytes, seconds=seconds,
                    kept=dropped[key],
                )
            )  # fmt: skip
    return tuple(sorted(found, key=lambda one: one.ops))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Blocks that run forward one after the other, and backward."""

    calls: Sequence[BlockCall]
    begin: int
    """The first op of its forward."""
    end: int
    """One more than the last op of its backward."""

    def start(self, step: Step) -> Bytes:
        """Bytes that are there when its forward begins."""
        begun = (one for one in step.storages if one.present_at_start or one.alive_from < self.begin)
        return sum(one.nbytes for one in begun if one.alive_until > self.begin)


def micro_batches(step: Step, calls: Sequence[BlockCall]) -> Iterator[MicroBatch]:
    """The micro-batches of a step in their order. A call belongs to the next one if it begins when the backward has
    been at a call before it."""
    groups: list[list[BlockCall]] = []
    for call in calls:
        if groups and call.ops[0] < min(one.returns for one in groups[-1]):
            groups[-1].append(call)
        else:
            groups.append([call])
    begin = 0
    for number, group in enumerate(groups):
        back = max(call.returns for call in group)
        until = groups[number + 1][0].ops[0] if number + 1 < len(groups) else len(step.ops)
        after = (op.number for op in step.ops[back:until] if op.phase is not Phase.BACKWARD)
        end = next(after, until)
        yield MicroBatch(calls=group, begin=begin, end=end)
        begin = next((op.number for op in step.ops[end:] if op.phase is Phase.FORWARD), len(step.ops))


@final
class _Modules:
    """The modules that forward ops belong to, as a tree of names."""

    def __init__(self, step: Step, lives: Sequence[Life]) -> None:
        self.ops: dict[str, list[int]] = defaultdict(list)
        """Of a module and of all below it, in order; those of the whole forward under the empty name."""
        self._step = step
        self._running: set[str] = set()
        self._below: dict[str, dict[str, None]] = defaultdict(dict)
        kept = {step.values[one.value].storage for one in kept_for_backward(step, lives, step.saved or None)}
        used: dict[str, set[StorageId]] = defaultdict(set)
        for op in step.ops:
            if op.phase is not Phase.FORWARD:
                continue
            self._running.add(op.module)
            storages = {step.values[number].storage for number in (*op.reads, *op.creates)} & kept
            for name in _upwards(op.module):
                self.ops[name].append(op.number)
                used[name] |= storages
                if name:
                    self._below[_parent(name)][name] = None
        self._kept = {name: sum(step.storages[one].nbytes for one in storages) for name, storages in used.items()}
        self._shapes = {name: frozenset(_relative(self._below, name)) for name in self.ops}
        self._alike = Counter(self._shapes[name] for name in self.ops if self._is_inner(name))

    def blocks(self, above: str) -> Iterator[str]:
        """The blocks below a name, in order of their first op.

        Downwards from it, a name with names below it that is no container is a block if another one is alike, or if it
        was called more often than the model; unless alike siblings inside it hold `DESCEND_SHARE` of its bytes: those
        of what its ops read or make and the backward wants.
        """
        for name in self._below[above]:
            if not self._below[name]:
                continue
            if self._is_inner(name) and self._repeats(name) and not self._family_inside(name):
                yield name
            else:
                yield from self.blocks(name)

    def calls(self, name: str) -> int:
        """How often a module was called, as far as its ops tell."""
        return _repetitions([(self._step.ops[op].module, self._step.ops[op].name) for op in self.ops[name]])

    def _is_inner(self, name: str) -> bool:
        below = self._below[name]
        return bool(below) and (name in self._running or not all(map(_number, below)))

    def _repeats(self, name: str) -> bool:
        others = (other for other in self._below[_parent(name)] if other != name and self._is_inner(other))
        return (
            self._alike[self._shapes[name]] > 1
            or any(self._are_alike(name, other) for other in others)
            or self.calls(name) > self.calls("")
        )

    def _are_alike(self, one: str, sibling: str) -> bool:
        mine, theirs = self._shapes[one], self._shapes[sibling]
        return mine == theirs or (_number(one) and _number(sibling) and (mine <= theirs or theirs <= mine))

    def _family_inside(self, name: str) -> bool:
        """Whether alike siblings inside hold most of its bytes."""
        most = 0
        for parent in (name, *(f"{name}.{inner}" for inner in self._shapes[name])):
            inside = [child for child in self._below[parent] if self._is_inner(child)]
            for child in inside:
                family = [other for other in inside if self._are_alike(child, other)]
                if len(family) > 1:
                    most = max(most, sum(self._kept[member] for member in family))
        return most > 0 and most >= DESCEND_SHARE * self._kept[name]


@cache
def _upwards(name: str) -> tuple[str, ...]:
    """A name and all above it, the empty one of the model first."""
    parts = name.split(".") if name else []
    return ("", *(".".join(parts[:length]) for length in range(1, len(parts) + 1)))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _number(name: str) -> bool:
    return name.rpartition(".")[2].isdecimal()


def _relative(below: Mapping[str, Mapping[str, None]], name: str, inside: str = "") -> Iterator[str]:
    """What stands below a name, without it."""
    for child in below.get(name, {}):
        relative = inside + child.rpartition(".")[2]
        yield relative
        yield from _relative(below, child, f"{relative}.")


def _repetitions(sequence: Sequence[Any]) -> int:
    """How often the sequence repeats its shortest beginning of which it is made, by its borders (Knuth, Morris, Pratt
    1977)."""
    borders = [0]
    for item in sequence[1:]:
        border = borders[-1]
        while border and sequence[border] != item:
            border = borders[border - 1]
        borders.append(border + (sequence[border] == item))
    period = len(sequence) - borders[-1]
    return len(sequence) // period if period and len(sequence) % period == 0 else 1


def _calls(step: Step, modules: _Modules, names: Sequence[str]) -> dict[_Call, list[int]]:
    """The forward ops of every call; what runs between two ops of one call is part of it, whosever it is."""
    owners: dict[int, _Call] = {}
    for name in names:
        ops = modules.ops[name]
        length = len(ops) // modules.calls(name)
        owners.update((op, (name, place // length)) for place, op in enumerate(ops))
    calls: dict[_Call, list[int]] = defaultdict(list)
    between: list[int] = []
    before: _Call | None = None
    for op in modules.ops[""]:
        owner = owners.get(op)
        if owner is None:
            between.append(op)
            continue
        calls[owner] += [*between, op] if owner == before else [op]
        between, before = [], owner
    return calls


def _dropped(
    step: Step, lives: Sequence[Life], calls: Mapping[_Call, Sequence[int]]
) -> dict[_Call, dict[ValueId, Kept]]:
    """What each call leaves to the backward, but for what the forward reads after it or beside it."""
    owners = {op: call for call, ops in calls.items() for op in ops}
    readers: dict[StorageId, set[_Call | None]] = defaultdict(set)
    for op in step.ops:
        if op.phase is Phase.FORWARD:
            for number in (*op.reads, *op.creates):
                readers[step.values[number].storage].add(owners.get(op.number))
    found: dict[_Call, dict[ValueId, Kept]] = {call: {} for call in calls}
    for kept in kept_for_backward(step, lives):
        owner = owners.get(lives[kept.value].created)
        if owner is not None and readers[step.values[kept.value].storage] == {owner}:
            found[owner][kept.value] = kept
    return found
