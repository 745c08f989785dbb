"""An architecture in program order: which part comes when, what a path has resolved, which parameters come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias, final

import numpy as np

from spillway.pilots.architecture import Architecture
from spillway.pilots.paths import Floats, ResolvedPath
from spillway.units import Bytes

Group: TypeAlias = int
"""Parameters that are used together, numbered from 0."""
Uses: TypeAlias = tuple[Sequence[int], Sequence[Group]]
"""Ranks of ops, never falling, and the group that each begins to use."""

RUNS: Final = np.float32(1)
SKIPPED: Final = np.float32(-1)
OPEN: Final = np.float32(0)
"""What is known of a decision: its part ran, the path has passed it, or neither."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """The groups that a path uses, one after the other."""

    groups: tuple[Group, ...]
    """In the order of their use; a group that is used again right away stands once."""
    ops: tuple[int, ...]
    """The op of the path that uses each first."""


@final
class Program:
    """What an architecture has learned, in the order of the program. It follows the architecture as that grows.

    Runs are ops of one part that follow each other; parameters that the same runs use are one group, which comes in as
    a whole.
    """

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.version = -1
        """Changes when parts, ranks or groups do."""
        self._seen = 0
        self._bits: dict[int, Floats] = {}
        self._visits: dict[int, Visits] = {}
        self.follow()

    def follow(self) -> None:
        """Take in what the architecture has learned since."""
        seen = len(self.architecture.paths)
        if self._seen == seen and self.version >= 0:
            return
        self._seen, order = seen, self.architecture.in_order()
        if self.version < 0 or (len(order), self.architecture.decisions) != (len(self.order), self.decisions):
            self._arrange(order)

    def _arrange(self, order: list[int]) -> None:
        self.version += 1
        architecture = self.architecture
        self.order = order
        self.rank = np.full(max(len(architecture.ops), 1), -1, np.int32)
        """[ops] Where each op stands in that order; -1 of those that only forwards had which nobody has learned."""
        self.rank[order] = np.arange(len(order))
        self.part = np.zeros(max(len(architecture.ops), 1), np.int32)
        """[ops] The part of each op; 0 of those."""
        self.part[: len(architecture.part_of)] = np.maximum(architecture.part_of, 0)
        self.decisions = architecture.decisions
        """How many bits resolve a path."""
        self.first_rank = np.full(self.decisions + 1, len(order), np.int32)
        """[parts] The rank of each part's first op."""
        np.minimum.at(self.first_rank, self.part[order], self.rank[order])
        self._group()
        self._bits.clear()
        self._visits.clear()

    def _group(self) -> None:
        ops, runs = self.architecture.ops, list[list[int]]()
        used: dict[int, list[int]] = {}
        self.runs: list[tuple[int, list[tuple[int, Group]]]] = []
        """The part of every run in program order, and the groups that it uses, each behind the rank of the op that
        uses it first there."""
        users = [key for key in self.order if ops[key].parameters]
        for _, following in groupby(users, key=lambda key: int(self.part[key])):
            runs.append(list(following))
            for parameter in dict.fromkeys(one for key in runs[-1] for one in ops[key].parameters):
                used.setdefault(parameter, []).append(len(runs) - 1)
        numbers: dict[tuple[int, ...], Group] = {}
        self.group_of = {parameter: numbers.setdefault(tuple(users), len(numbers)) for parameter, users in used.items()}
        self.nbytes: list[Bytes] = [0] * len(numbers)
        for parameter, group in self.group_of.items():
            self.nbytes[group] += self.architecture.parameters[parameter].nbytes
        self.groups_of_op = {
            key: tuple(dict.fromkeys(self.group_of[one] for one in ops[key].parameters)) for key in users
        }
        """The groups that an op uses, of ops that use any."""
        for run in runs:
            first: dict[Group, int] = {}
            for key in run:
                for group in self.groups_of_op[key]:
                    first.setdefault(group, int(self.rank[key]))
            self.runs.append((int(self.part[run[0]]), [(rank, group) for group, rank in first.items()]))

    # ------------------------------------------------------------------ of a path

    def bits(self, path: ResolvedPath) -> Floats:
        """[decisions] 1 for each part that runs in it, else 0."""
        found = self._bits.get(path.number)
        if found is None:
            whole = np.zeros(self.decisions + 1, np.float32)
            whole[self.part[path.keys]] = 1
            found = self._bits[path.number] = whole[1:]
        return found

    def known_after(self, path: ResolvedPath, ops: int) -> Floats:
        """[decisions] What the first ops of a path have resolved: `RUNS`, `SKIPPED` or `OPEN`."""
        keys = path.keys[:ops]
        reached = int(self.rank[keys].max(initial=-1))
        whole = np.where(self.first_rank < reached, SKIPPED, OPEN)
        whole[self.part[keys]] = RUNS
        return whole[1:]

    def visits(self, path: ResolvedPath) -> Visits:
        found = self._visits.get(path.number)
        if found is None:
            groups, ops = list[Group](), list[int]()
            for number, key in enumerate(path.keys.tolist()):
                for group in self.groups_of_op.get(key, ()):
                    if not groups or groups[-1] != group:
                        groups.append(group)
                        ops.append(number)
            found = self._visits[path.number] = Visits(tuple(groups), tuple(ops))
        return found

    def uses_of(self, path: ResolvedPath) -> Uses:
        """The groups that a known path uses, behind the highest rank that it has reached by then."""
        visits = self.visits(path)
        return np.maximum.accumulate(self.rank[path.keys[list(visits.ops)]]).tolist(), visits.groups

    def uses_where(self, runs: Floats) -> Uses:
        """The same in program order for what always runs and the parts whose [decisions] is above one half."""
        taken = [True, *(runs > 0.5).tolist()]
        taken += [False] * (len(self.first_rank) - len(taken))
        ranks, found = list[int](), list[Group]()
        for part, groups in self.runs:
            if taken[part]:
                for rank, group in groups:
                    if not found or found[-1] != group:
                        ranks.append(rank)
                        found.append(group)
        return ranks, found
