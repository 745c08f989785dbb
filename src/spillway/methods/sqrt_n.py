"""Checkpoints after every square root of n layers; what lies between them is recomputed in the backward.

Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Section 4.1 and
Algorithm 1: the forward is cut into segments; what a segment computes is dropped after it, but for the values at which
it was cut, and the segment runs again when the backward reaches it. Section 4.3: with n candidates one in sqrt(n) is a
checkpoint. Section 4.2, Algorithm 3: cut greedily whenever a segment has passed a number of bytes, and look for the
best such number around the square root of (bytes of checkpoints x bytes of the largest segment).

Differs from the paper in:

- Candidates. The paper's user lists them. Here they are the values through which everything that the forward computes
  later has to go: between two ops of the forward nothing but this one activation is read further on. What is read
  across more than half of the forward, such as an attention mask, does not count. A graph with fewer than three of
  those, such as a U-Net's, is cut between any two ops.
- Values that a later segment reads in its forward are kept, wherever it was cut.
- The last segment is kept: it would be recomputed right after it was dropped.
- What autograd would not keep stays dead. A value that needs it is recomputed from further back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt, sqrt
from typing import Final, Self, final

from spillway.ir import Gap, Plan, Step
from spillway.ir.account import account
from spillway.ir.lives import Kept, Life, forwards_of, kept_for_backward, lives_of
from spillway.ir.recipes import together
from spillway.ir.step import StorageId, ValueId
from spillway.ir.timeline import Kind
from spillway.methods.base import AbstractPlanner, Problem
from spillway.units import Bytes

FEWEST: Final = 3
"""Candidates below which every op that makes an activation is one."""

TRIED: Final = 9
"""Segment budgets that the search of Algorithm 3 tries."""


@final
class SqrtN(AbstractPlanner):
    """Every k-th candidate is a checkpoint, k = int(sqrt(candidates)); budgets only decide whether that will do."""

    name = "sqrt-n"

    def __init__(self) -> None:
        self._choices = self._by_count

    @classmethod
    def greedy(cls) -> Self:
        """Algorithm 3 of the paper: the segment bytes, of those that are tried, with the smallest peak."""
        made = cls()
        made._choices = made._by_bytes
        return made

    def plan(self, problem: Problem) -> Plan:
        """The plan with these checkpoints. Raises BudgetInfeasible if it needs more than is allowed."""
        step, lives = problem.step, lives_of(problem.step)
        forwards = [_Forward.of(step, lives, ops) for ops in forwards_of(step)]
        tried = (
            [gap for forward, at in zip(forwards, cuts, strict=True) for gap in forward.gaps(at)]
            for cuts in self._choices(forwards)
        )
        return problem.plan_with(min(tried, key=lambda gaps: account(step, gaps, lives).peak), lives)

    def _by_count(self, forwards: Sequence[_Forward]) -> list[list[list[int]]]:
        """One choice of cuts."""
        cuts = []
        for forward in forwards:
            k = max(isqrt(len(forward.candidates)), 1)
            cuts.append(forward.candidates[k - 1 :: k])
        return [cuts]

    def _by_bytes(self, forwards: Sequence[_Forward]) -> list[list[list[int]]]:
        """One list of cuts for each segment budget that is tried."""
        # The paper's one search step: x bytes of checkpoints and y of the largest segment for some budget say that
        # the best one is near sqrt(x y). It is looked for from a half to the double.
        whole = sum(sum(forward.made.values()) for forward in forwards)
        first = [forward.cuts_after(max(whole // 16, 1)) for forward in forwards]
        kept = sum(forward.made.get(cut, 0) for forward, at in zip(forwards, first, strict=True) for cut in at)
        largest = max((forward.largest(at) for forward, at in zip(forwards, first, strict=True)), default=1)
        middle = max(sqrt(max(kept, 1) * max(largest, 1)), 1)
        tried = [max(int(middle * 2 ** (k / (TRIED // 2) - 1)), 1) for k in range(TRIED)]
        return [[forward.cuts_after(nbytes) for forward in forwards] for nbytes in tried]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """One forward: its candidates, and what the backward wants of it."""

    step: Step
    lives: Sequence[Life]
    ops: Sequence[int]
    candidates: list[int]
    """The ops after which it may be cut, in order."""
    kept: list[Kept]
    """What it leaves to the backward."""
    made: dict[int, Bytes]
    """Bytes of activations that every op makes and the backward wants."""
    read_last: dict[StorageId, int]
    """The last op of this forward that reads a storage."""

    @classmethod
    def of(cls, step: Step, lives: Sequence[Life], ops: Sequence[int]) -> Self:
        inside = set(ops)
        kept = [one for one in kept_for_backward(step, list(lives)) if lives[one.value].created in inside]
        wanted = {step.values[one.value].storage for one in kept}
        made: dict[int, Bytes] = {}
        for one in kept:
            op = lives[one.value].created
            made[op] = made.get(op, 0) + step.storages[step.values[one.value].storage].nbytes
        read_last = {step.values[read].storage: op for op in ops for read in step.ops[op].reads}
        candidates = _narrow(step, ops, read_last, wanted)
        if len(candidates) < FEWEST:
            candidates = sorted(made)
        return cls(
            step=step, lives=lives, ops=ops, candidates=candidates, kept=kept, made=made, read_last=read_last
        )  # fmt: skip

    def cuts_after(self, nbytes: Bytes) -> list[int]:
        """Algorithm 3: a cut at the first candidate after each `nbytes` of activations."""
        cuts, running, allowed = [], 0, set(self.candidates)
        for op in self.ops:
            running += self.made.get(op, 0)
            if running > nbytes and op in allowed:
                cuts.append(op)
                running = 0
        return cuts

    def largest(self, cuts: list[int]) -> Bytes:
        """Activations of the largest segment, in bytes."""
        return max((sum(self.made.get(op, 0) for op in segment) for segment in self._segments(cuts)), default=0)

    def _segments(self, cuts: list[int]) -> list[list[int]]:
        ends = set(cuts)
        segments: list[list[int]] = [[]]
        for op in self.ops:
            segments[-1].append(op)
            if op in ends:
                segments.append([])
        return segments

    def gaps(self, cuts: list[int]) -> list[Gap]:
        """What is gone between forward and backward with these cuts, segment by segment."""
        dropped = [self._droppable(segment) for segment in self._segments(cuts)[:-1]]
        everything = {value for segment in dropped for value in segment}
        return [
            gap
            for segment in dropped
            for gap in together(segment, everything - segment.keys(), step=self.step, lives=self.lives)
        ]

    def _droppable(self, segment: list[int]) -> dict[ValueId, Kept]:
        """What the segment leaves to the backward, but for what a later segment reads."""
        inside, end = set(segment), max(segment, default=0)
        return {
            kept.value: kept
            for kept in self.kept
            if self.lives[kept.value].created in inside
            and self.read_last.get(self.step.values[kept.value].storage, -1) <= end
        }


def _narrow(step: Step, ops: Sequence[int], read_last: dict[StorageId, int], wanted: set[StorageId]) -> list[int]:
    """The ops after which the rest of the forward reads one activation alone, and one that the backward wants."""
    place = {op: index for index, op in enumerate(ops)}
    width, sums = [0] * (len(ops) + 1), [0] * (len(ops) + 1)
    for storage in step.storages:
        last = place.get(read_last.get(storage.id, -1), -1)
        first = place.get(storage.alive_from, last)
        activation = storage.kind in (Kind.ACTIVATION, Kind.TEMPORARY) and not storage.present_at_start
        if activation and first < last <= first + len(ops) // 2:
            for sum_of, amount in ((width, 1), (sums, storage.id)):
                sum_of[first] += amount
                sum_of[last] -= amount
    found: dict[StorageId, int] = {}
    for index, (count, storage_id) in enumerate(zip(accumulate(width), accumulate(sums), strict=True)):
        if count == 1 and storage_id in wanted:
            found.setdefault(storage_id, ops[index])
    return sorted(found.values())
