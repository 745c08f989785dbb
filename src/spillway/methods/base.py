"""What a published method has to answer, and what it may ask.

A *planner* decides before the step, a *policy* decides while it runs. A policy proposes; the controller grants or
refuses and sends the answer back into the generator, so that a policy can try the next best thing at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from spillway.costs.device import Device
from spillway.errors import BudgetInfeasible
from spillway.ir import Gap, Plan, Step
from spillway.ir.account import account
from spillway.ir.lives import Life
from spillway.ir.step import ValueId
from spillway.units import Bytes, KiB, Seconds

SMALLEST: Final[Bytes] = 4 * KiB
"""Storages below this stay in plans that move: the engines do not move them either."""


class Candidate(Protocol):
    """A storage as a policy sees it: present, and free to leave."""

    @property
    def number(self) -> int:
        """The storage's number; stable within a session."""

    @property
    def nbytes(self) -> Bytes:
        """Bytes that its leaving frees."""

    @property
    def touched(self) -> int:
        """The op that used it last; `view.clock - touched` is its staleness in ops."""

    @property
    def kind(self) -> str | None:
        """What it is for, one of `ir.Kind`; None if nobody said so. Between steps it is known of what has a name."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Let the bytes go and recompute them when they are read (home `Recompute`)."""

    storage: Candidate
    ops: frozenset[int] | None = None
    """What to replay, by numbers of ops within the step, as a plan has it: what these ops create is recomputed even if
    it is there. None for the way back to the nearest values that live."""
    back: int | None = None
    """With `ops`, the op of the step before which it comes back. What is dropped with the same two comes back by one
    replay; None for a replay of its own."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the bytes to the slower tier (home `Host`)."""

    storage: Candidate


@dataclass(frozen=True, slots=True)
class Copy:
    """Begin to copy the bytes to the slower tier while ops run. They stay; moving them afterwards costs nothing."""

    storage: Candidate


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to bring a moved storage back while ops run."""

    storage: Candidate


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring an absent storage back now, whatever its home."""

    storage: Candidate


Proposal = Drop | Move | Copy | Fetch | Restore


class Recall(Enum):
    """How a moved storage comes back when an op wants it."""

    RELOAD = "reload"
    """Its copy in the slower tier is read."""
    RECOMPUTE = "recompute"
    """The ops that made it run again, if that is still possible; the copy is kept."""


class Evicted(NamedTuple):
    """A value whose bytes are nowhere and which can be recomputed: it was dropped, or is dead. Known by two numbers."""

    storage: int
    op: int
    """The number of the op that made it."""


class MemoryView(Protocol):
    """What a policy may know when it decides. Reading it never changes anything."""

    @property
    def allowed(self) -> Bytes:
        """The budget."""

    @property
    def resident(self) -> Bytes:
        """Bytes in device memory now."""

    @property
    def clock(self) -> int:
        """The number of the op that is about to run."""

    @property
    def op_index(self) -> int:
        """Its number within the step, from 0."""

    def candidates(self) -> Iterator[Candidate]:
        """Storages that may leave now, least recently used first."""

    def available(self, storage: Candidate) -> bool:
        """Whether it is one of the candidates at this moment; `storage` may be known from an earlier look."""

    def away(self, storage: Candidate) -> bool:
        """Whether it lives and its bytes are not there, or only on their way."""

    def chain(self, storage: Candidate) -> int | None:
        """Ops to run to recompute `storage`, everything absent that it needs included; None if that is not legal.

        It may be present, and would be dropped, or moved, and would be recomputed instead of read.
        """

    def own_seconds(self, storage: Candidate) -> Seconds:
        """Time of the op that made it, alone; infinite if it is known that it cannot be recomputed. Quickly told."""

    def recompute_seconds(self, storage: Candidate) -> Seconds:
        """Time of its chain, as measured when its ops ran, and to copy in what they need; infinite if not legal."""

    def recompute_seconds_at_worst(self, storage: Candidate) -> Seconds:
        """That time if all that the chain reads and that is present now has left by then.

        Each comes back in the cheaper way: by its own op, or by a copy in.
        """

    def transfer_seconds(self, storage: Candidate) -> Seconds:
        """Time to copy `storage` out and in again, by the bandwidth measured so far; in only, if a copy is there."""

    @property
    def exposed(self) -> float:
        """Share of the time of copies, in the last steps, for which ops waited; 1 before anything was copied."""

    @property
    def overlaps(self) -> bool:
        """Whether copies beside the ops can take less than their time from them: a processor or a link is free."""

    def copied(self, storage: Candidate) -> bool:
        """Whether a copy of it in the slower tier is there or under way."""

    @property
    def anything_moved(self) -> bool:
        """Whether `moved` has any."""

    def moved(self) -> Iterator[Candidate]:
        """Storages in the slower tier that are not on their way back, the one that left first in front."""

    def due(self) -> Iterator[Candidate]:
        """Those of them that the last such step wanted back from here on, in that order."""

    @property
    def arriving(self) -> int:
        """Storages on their way back; they count as resident."""

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs a backward."""

    @property
    def turned(self) -> bool:
        """Whether one has begun, and no other forward since: what moved is wanted back from here on."""

    def stale_seconds(self, storage: Candidate) -> Seconds:
        """What the ops of this step took since one last began to read it, or had made it; recomputed ones left out."""

    def as_evicted(self, storage: Candidate) -> Evicted | None:
        """What the next four call it once it is evicted; None if it cannot be recomputed."""

    def evicted(self) -> Mapping[Evicted, Seconds]:
        """All that is evicted now, in the order in which it was made, with the seconds of the op that made it."""

    def evicted_neighbours(self, of: Candidate | Evicted) -> Mapping[Evicted, Seconds]:
        """The evicted among what was read to make it and what was made by reading it."""

    def evicted_ancestors(self, storage: Candidate) -> Mapping[Evicted, Seconds]:
        """The evicted that would have to be recomputed to recompute it."""

    def evicted_descendants(self, storage: Candidate) -> Mapping[Evicted, Seconds]:
        """The evicted that are reached from it, each made by reading the one before."""


class Absence(NamedTuple):
    """A value that is gone during the half-open interval of ops."""

    value: ValueId
    start: int
    end: int


class Moments(NamedTuple):
    """Ops of a step, by their numbers."""

    before: frozenset[int]
    after: frozenset[int]
    creates: tuple[Bytes, ...] = ()
    """What each is expected to create; after one that creates more or less the policy is asked too."""


NEVER: Final = Moments(frozenset(), frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a planner is given."""

    step: Step
    allowed: Bytes
    device: Device
    """How fast copies are. The ops of `step` have seconds."""
    rehearse: Callable[[AbstractPolicy], Sequence[Absence]] | None = field(default=None, compare=False)
    """What is gone when under a policy that decides while the step runs; None where nobody can simulate it."""

    def plan_with(self, gaps: Sequence[Gap], lives: Sequence[Life]) -> Plan:
        """The plan that these gaps are. Raises BudgetInfeasible if the step needs more than is allowed under it."""
        counted = account(self.step, gaps, lives)
        if counted.peak > self.allowed:
            raise BudgetInfeasible(
                needed=counted.peak, allowed=self.allowed, op=self.step.ops[counted.fullest].name,
                op_index=counted.fullest % len(self.step.ops), smallest_budget=counted.peak, exact=True,
            )  # fmt: skip
        return Plan(step=self.step.digest(), allowed=self.allowed, projected=counted.peak, gaps=tuple(gaps))


Begin: TypeAlias = Literal["in time", "at op"]
"""When the copies of a plan begin. "in time": so early that they should be done by the op where a gap begins or ends.
"at op": out right after the last use before the gap, and in where the gap ends; what reads it waits for it."""


class AbstractPlanner(ABC):
    """Decides before the step. Pure: same problem, same plan."""

    name: str
    """The name by which users choose it."""

    copies_beside: bool = True
    """Whether copies of its plans run beside ops. Where they do not, `Planned(plan, step, ahead=0)` follows them."""

    begin: Begin = "in time"
    """When copies of its plans begin; `Planned(plan, step, begin=...)` follows them so."""

    uses_recipes: bool = True
    """Whether its plans ever recompute anything; without recipes an op costs less to track."""

    def as_run(self, step: Step, device: Device) -> tuple[Step, Bytes]:
        """The step as this method runs it on paper, where that is another than the recorded one because ops run on the
        host; and the bytes that these copy to the device, whose time is in their seconds. Plans are then of that step.
        """
        return step, 0

    @abstractmethod
    def plan(self, problem: Problem) -> Plan:
        """A plan that `ir.verify` accepts, or `BudgetInfeasible` with the smallest budget that would work."""


class AbstractPolicy(ABC):
    """Decides while the step runs. Proposes; the controller grants or refuses."""

    name: str
    """The name by which users choose it."""

    uses_recipes: bool = True
    """Whether it ever proposes a `Drop`; without recipes an op costs less to track."""

    foresees: bool = False
    """Whether `foresee` is of any use; asking costs time."""

    looks_after: int = 1
    """Ops from one question whether it foresees anything to the next, because each takes time."""

    recalls: bool = False
    """Whether `bring_back` ever says anything but reload; asking costs time."""

    most: float = math.inf
    """`relieve` refuses a step in which more than so many times the budget lives at once."""

    follows: bool = False
    """Whether it is asked around ops, as what follows a plan has to be: those of its `moments`."""

    def looks(self, view: MemoryView) -> bool:
        """Whether `foresee` would look at anything now. Asked before it, and often: be quick."""
        return True

    def foresee(self, view: MemoryView) -> Generator[Proposal, bool, None]:
        """Yield copies that may begin now, in or out, although no room is short; each yield receives whether it did.

        Asked whenever a large storage was created and whenever one came back, but not more often than every
        `looks_after` ops.
        """
        yield from ()

    def bring_back(self, view: MemoryView, storage: Candidate) -> Recall:
        """How a moved storage that an op wants comes back. The controller reloads whatever it may not recompute."""
        return Recall.RELOAD

    def begin_step(self, view: MemoryView, present: Sequence[Candidate]) -> Generator[Proposal, bool, None]:
        """Yield what is to come and go before the step. `present` are all storages that there are.

        This and the next three are asked of a policy that `follows`, `moments` after it.
        """
        yield from ()

    def moments(self) -> Moments | None:
        """The ops of the step that has begun before which and after which it may propose anything, or expects
        something; None if all are."""
        return None

    def before_op(self, view: MemoryView, op: int) -> Generator[Proposal, bool, None]:
        """Yield what is to come and go before op number `op` of the step; once more after the last op."""
        yield from ()

    def after_op(self, view: MemoryView, op: int, created: Sequence[Candidate]) -> Generator[Proposal, bool, None]:
        """Yield what is to go as op number `op` of the step ends, before anything that dies with it does. It has
        created these storages, in this order; what was first seen at this op is among them."""
        yield from ()

    def link(self, device: Device) -> Device:
        """The device as copies of this method find it: paging on demand pays for faults. For simulated devices."""
        return device

    @abstractmethod
    def relieve(self, view: MemoryView, needed: Bytes) -> Generator[Proposal, bool, None]:
        """Yield proposals until `needed` bytes are free; each yield receives whether the proposal was granted.

        The controller stops asking as soon as there is room. When the proposals end too early it moves what it can by
        itself, and refuses the step only when nothing is left that may leave.
        """
