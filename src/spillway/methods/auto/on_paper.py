"""`auto` on a recorded step: the planner's choice, as a plan that holds in all of the step.

NOTE [From a choice to a plan]

 1. Each micro-batch is one problem of the planner (`recorded_blocks.py`). Its choice becomes gaps.
 2. A copy out begins right after the last use, and its bytes are waited for when they are wanted, the oldest first. A
    copy in begins just in time, or later where there is no room for it. All of that is decided in the account of the
    whole step, the optimizer's part included, so that no plan is ever over.
 3. What the problem does not see, such as a replay beside what a neighbour holds, is repaired: blocks are given up
    besides, of those that help at the fullest op the ones with the fewest seconds per byte.
 4. By the clock of the whole step the planner's choice stands against each action for every block, and against blocks
    that are recomputed one by one until all fits. The fastest is improved by changes of one block, and of two, a
    counted number of times.

A step without blocks, and a budget under which no choice fits, are left to planners that look at single values. They
are asked as well where recomputing every block does not fit, and the faster plan is taken. A session has such a step
watched op by op, under `lru` until it has come back often, so that its plan is told with a remark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from random import Random
from typing import Final, final

from spillway.errors import BudgetInfeasible, UsageError
from spillway.ir import Gap, Host, Plan, Recompute
from spillway.ir.account import Account, account
from spillway.methods.absent_bytes import waited_late
from spillway.methods.actions import Action
from spillway.methods.auto.choosing import Effort, plan
from spillway.methods.auto.recorded_blocks import MENU, Blocks, Chosen, problems
from spillway.methods.auto.simulate import EARLIER
from spillway.methods.base import SMALLEST, Absence, AbstractPlanner, Problem
from spillway.methods.plan_clock import PlanClock
from spillway.units import Bytes, Seconds

WORK: Final = 400_000
"""Ops that are looked at while a choice is improved: plans that are tried, times ops of the step."""

SAME: Final = 1e-6
"""Share of a step's seconds below which one plan is not faster than another."""


@final
class AutoPlanner(AbstractPlanner):
    """The fastest mixture of keeping, recomputing, selecting and offloading blocks that is found. The first of those
    `instead` that can plans a step that has no blocks, or under a budget for which no choice of blocks is small
    enough."""

    name = "auto"
    begin = "at op"

    def __init__(self, instead: Sequence[AbstractPlanner] = ()) -> None:
        self.instead = tuple(instead)

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if neither a choice of blocks nor anybody else fits."""
        if problem.step.plain_peak() <= problem.allowed:
            return problem.plan_with((), ())
        tried = Choices(problem)
        found = tried.fastest() if tried.blocks.calls else None
        if found is None:
            why = "No choice of blocks fits" if tried.blocks.calls else "No modules repeat, so there are no blocks"
            return self._instead(problem, tried.least(), why)
        made = problem.plan_with(tried.gaps(found), tried.blocks.lives)
        counts = ", ".join(f"{action.value}: {count}" for action, count in Counter(found).most_common())
        made = replace(made, remark=f"Of {len(found)} blocks, {counts}.")
        if tried.fits(tried.blocks.everywhere(Action.RECOMPUTE)):
            return made
        # What recomputing every block does not fit in is where an engine has to look inside blocks.
        try:
            other = self._instead(problem, tried.least(), "A block does not fit by itself")
        except BudgetInfeasible:
            return made
        return other if tried.seconds_of(other.gaps) < tried.seconds(found) else made

    def _instead(self, problem: Problem, least: Account, why: str) -> Plan:
        """By the first that can of those that look at single values."""
        refused: BudgetInfeasible | None = None
        for planner in self.instead:
            try:
                made = planner.plan(problem)
                told = f"planned value by value, by {planner.name}, as a session does where lru proves slower"
                return replace(made, remark=f"{why}: {told}.")
            except UsageError:  # what it stands on is not installed
                continue
            except BudgetInfeasible as error:
                refused = refused or error
        if refused is not None and refused.smallest_budget <= least.peak:
            raise refused
        raise BudgetInfeasible(
            needed=least.peak, allowed=problem.allowed, op=problem.step.ops[least.fullest].name,
            op_index=least.fullest % len(problem.step.ops), smallest_budget=least.peak, exact=False,
        )  # fmt: skip


@final
class Choices:
    """Choices for one problem, and what they take."""

    def __init__(self, problem: Problem, smallest: Bytes = SMALLEST) -> None:
        self._problem, self.blocks = problem, Blocks(problem.step, smallest)
        self._clock = PlanClock(problem.step, self.blocks.lives, problem.device)
        self._sizes = [storage.nbytes for storage in problem.step.storages]
        self._known: dict[Chosen, Seconds] = {}

    def fastest(self) -> Chosen | None:
        """The fastest choice that fits; None if none does."""
        found = [self.repaired(choice, actions) for choice, actions in self._candidates()]
        fitting = [choice for choice in found if choice is not None]
        return self._improved(min(fitting, key=self.seconds)) if fitting else None

    def _candidates(self) -> Iterator[tuple[Chosen, Collection[Action]]]:
        """Choices, and what may become of blocks where that does not fit."""
        yield self._planned(), MENU
        for action in MENU:
            yield self.blocks.everywhere(action), MENU
        yield self.blocks.everywhere(Action.KEEP), (Action.RECOMPUTE,)

    def _planned(self) -> Chosen:
        """The planner's choices for the micro-batches."""
        chosen: dict[int, Action] = {}
        for asked, calls in problems(self.blocks, self._problem.allowed, self._problem.device):
            choice = plan(asked, effort=Effort.IDLE).choice
            for call, block, option in zip(calls, asked.blocks, choice, strict=True):
                if call is not None:
                    chosen[call] = block.options[option].action
        return tuple(chosen[call] for call in range(len(self.blocks.calls)))

    # ------------------------------------------------------------------ what fits

    def repaired(self, choice: Chosen, actions: Collection[Action]) -> Chosen | None:
        """The choice, with blocks given up until it fits; None if that cannot be."""
        tried: set[tuple[int, Action]] = set()
        while True:
            counted = self.counted(choice)
            over = counted.peak - self._problem.allowed
            if over <= 0:
                return choice
            given_up = self._given_up(choice, counted.fullest, over, actions, tried)
            if not given_up:
                return None
            # What helps at one op may be missed at another: nothing is tried twice.
            tried |= set(given_up.items())
            choice = tuple(given_up.get(call, action) for call, action in enumerate(choice))

    def _given_up(
        self, choice: Chosen, op: int, over: Bytes, actions: Collection[Action], tried: Collection[tuple[int, Action]]
    ) -> dict[int, Action]:
        """What else becomes of which calls, for so many bytes more to be gone at the op; all that can be if they do not
        suffice."""
        helpful = []
        for call, ways in enumerate(self.blocks.ways):
            there = self._gone(call, choice[call], op)
            for action in ways:
                more = self._gone(call, action, op) - there
                if more > 0 and action in actions and (call, action) not in tried:
                    price = max(self._price(call, action) - self._price(call, choice[call]), 0.0)
                    helpful.append((price / more, call, MENU.index(action), more))
        found: dict[int, Action] = {}
        for _, call, place, more in sorted(helpful):
            if over > 0 and call not in found:
                found[call] = MENU[place]
                over -= more
        return found

    def _gone(self, call: int, action: Action, op: int) -> Bytes:
        way = self.blocks.ways[call][action]
        moved = (kept.value for kept in way.moved if kept.last < op < kept.needed)
        return self.blocks.nbytes([*(gap.value for gap in way.again if gap.start <= op < gap.end), *moved])

    def _price(self, call: int, action: Action) -> Seconds:
        """What an action takes if no copy is hidden."""
        way, device = self.blocks.ways[call][action], self._problem.device
        return way.seconds + way.away / device.out_per_second + way.away / device.in_per_second

    def least(self) -> Account:
        """Of the step, under the action for every block with which it needs least."""
        return min((self.counted(self.blocks.everywhere(action)) for action in MENU), key=lambda counted: counted.peak)

    def counted(self, choice: Chosen) -> Account:
        """Of the step, with no bytes on their way."""
        return account(self._problem.step, self.blocks.gaps(choice), self.blocks.lives)

    def fits(self, choice: Chosen) -> bool:
        return self.counted(choice).peak <= self._problem.allowed

    # ------------------------------------------------------------------ when copies run

    def gaps(self, choice: Chosen) -> list[Gap]:
        """Gaps that hold in the whole step, shortened by the time in which their copies run."""
        step, allowed = self._problem.step, self._problem.allowed
        gaps = self.blocks.gaps(choice)
        again = [gap for gap in gaps if isinstance(gap.home, Recompute)]
        moved = [Absence(gap.value, gap.start, gap.end) for gap in gaps if isinstance(gap.home, Host)]
        if not moved:
            return again
        levels = account(step, gaps, self.blocks.lives).levels
        begins = {(one.value, one.end): one.start for one in moved}
        late = waited_late(step, sorted(moved, key=lambda one: (one.start, one.value)), levels, allowed, self._sizes)
        for one in late:
            nbytes = self._nbytes(one)
            for op in range(begins[one.value, one.end], one.start):
                levels[op] += nbytes
        return [
            *again,
            *(
                Gap(value=one.value, start=one.start, end=one.end, home=Host())
                for one in self._early(late, again, levels)
            ),
        ]

    def _early(self, late: Sequence[Absence], again: Sequence[Gap], levels: list[Bytes]) -> Iterator[Absence]:
        """The same intervals with copies in that begin in time, as far as there is room. What would have to come back
        as it goes stays, where there is room for it."""
        replays = {(gap.end, gap.home.ops) for gap in again if isinstance(gap.home, Recompute)}
        added = [0.0] * len(self._clock.begins)
        for end, ops in replays:
            added[end] += sum(self._problem.step.ops[op].seconds or 0.0 for op in ops)
        clock = [begin + more for begin, more in zip(self._clock.begins, accumulate(added), strict=True)]
        due = clock[-1]
        for one in sorted(late, key=lambda one: (-one.end, one.value)):
            nbytes, op = self._nbytes(one), one.end
            wanted = min(due, clock[op]) - EARLIER * self._problem.device.in_seconds(nbytes)
            while op > one.start and clock[op] > wanted and levels[op - 1] + nbytes <= self._problem.allowed:
                op -= 1
                levels[op] += nbytes
            if op > one.start:
                due = clock[op]
                yield one._replace(end=op)

    def _nbytes(self, one: Absence) -> Bytes:
        return self._sizes[self._problem.step.values[one.value].storage]

    # ------------------------------------------------------------------ what is faster

    def seconds(self, choice: Chosen) -> Seconds:
        return self.seconds_of(self.gaps(choice))

    def seconds_of(self, gaps: Iterable[Gap]) -> Seconds:
        """Of the step under these gaps, whose copies begin at their ops."""
        return self._clock.seconds(gaps)

    def _improved(self, best: Chosen) -> Chosen:
        """By changes of one block and of two, the same for the same problem."""
        drawn, seconds = Random(0), self.seconds(best)
        least = self._clock.begins[-1] * (1 + SAME)
        for _ in range(WORK // max(len(self._problem.step.ops), 1)):
            if seconds <= least:
                break
            tried = self._changed(best, drawn)
            if tried in self._known:
                continue
            self._known[tried] = took = self.seconds(tried) if self.fits(tried) else inf
            if took < seconds * (1 - SAME):
                best, seconds = tried, took
        return best

    def _changed(self, choice: Chosen, drawn: Random) -> Chosen:
        """Another action for one block, for two, or two blocks' actions exchanged."""
        changed, calls = list(choice), range(len(choice))
        first, second = drawn.choice(calls), drawn.choice(calls)
        kind = drawn.randrange(3)
        if kind == 2 and choice[second] in self.blocks.ways[first] and choice[first] in self.blocks.ways[second]:
            changed[first], changed[second] = choice[second], choice[first]
            return tuple(changed)
        for call in (first, second)[: 1 + kind % 2]:
            changed[call] = drawn.choice(list(self.blocks.ways[call]))
        return tuple(changed)
