"""One task of Mimose's Fig. 13 at every length of a grid: its steps, what each way to run them takes, and an epoch.

An epoch is not run step by step: each length of the grid stands for those around it, with the weight that a stated
distribution of lengths gives them. The sheltered steps of Mimose are drawn from the same distribution.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import Any, Final, Self, final

from benchmarks.record import Tell, frozen
from papers import TABLES, table
from papers.mimose.tasks_models import build
from papers.networks import dropout_of_cuda
from spillway.costs import Device, Scaling, fit_scaling, step_seconds, timed
from spillway.ir import Plan, Step
from spillway.ir.account import account
from spillway.ir.block_calls import BlockCall, block_calls
from spillway.ir.lives import Life, lives_of
from spillway.methods import DTR
from spillway.methods.by_block import Phase
from spillway.methods.mimose import Mimose, Options
from spillway.methods.mimose.planner import Measured, gaps_of, measured, revoked
from spillway.simulation.simulated_engine import Simulation, simulate
from spillway.units import Bytes, Seconds
from spillway.workloads.recorded import record

# ---------------------------------------------------------------------- what the paper says


_RANGES: Final = {"SWAG": "M7", "SQuAD": "M8", "GLUE-QQP": "M9"}
"""The claims that give the lengths of a data set's batches."""


@frozen
class Told:
    """A row of Table 1, and the lengths of Fig. 3."""

    dataset: str
    batch: int
    shortest: int
    """Of the batches of an epoch, in tokens."""
    longest: int


@frozen
class Paper:
    """What the paper says."""

    tasks: dict[str, Told]
    """By the names of Table 2, in the order of Table 1."""
    claims: dict[str, float]
    """What stands in the text and is one number, by its own numbering."""

    @classmethod
    def read(cls) -> Self:
        """Read all of it. Raises Skipped where it is not."""
        claims = {row["id"]: row["value"] for row in table(TABLES / "mimose_text_claims.csv")}
        tasks = {}
        for row in table(TABLES / "mimose_table1_tasks.csv"):
            shortest, longest = map(int, claims[_RANGES[row["dataset"]]].split("-"))
            tasks[row["task"].partition("(")[2].rstrip(")")] = Told(
                dataset=row["dataset"], batch=int(row["batch_size"]), shortest=shortest, longest=longest
            )
        return cls(
            tasks=tasks,
            claims={name: float(value) for name, value in claims.items() if value.replace(".", "", 1).isdecimal()},
        )


# ---------------------------------------------------------------------- a task


EXAMPLES: Final[Mapping[str, int]] = {"SWAG": 73_546, "SQuAD": 87_599, "GLUE-QQP": 363_846}
"""Of the data sets' training parts, as their authors count them."""

HERITAGE: Final = "dtr-eqclass"
"""The heuristic of DTR's prototype, which the paper extended."""


@final
@dataclass(frozen=True, slots=True)
class Ran:
    """A step of one length, simulated."""

    seconds: Seconds
    peak: Bytes


@final
class At:
    """A task at one length."""

    def __init__(self, step: Step, length: int, device: Device) -> None:
        self.step = timed(step, device)
        self.size = (length,)
        self.plain = Ran(step_seconds(self.step), self.step.plain_peak())
        self.lives: list[Life] = lives_of(self.step)
        self.calls: tuple[BlockCall, ...] = block_calls(self.step, self.lives)
        self.everything = frozenset(range(len(self.calls)))
        self.unlike_account = 0
        """Simulated peaks that are not what the account says."""
        self._device = device
        self._ran: dict[frozenset[int], Ran] = {frozenset(): self.plain}
        self._dtr: dict[Bytes, Simulation | None] = {}

    @cached_property
    def found(self) -> Measured:
        """What Mimose's collector finds."""
        (found,) = measured(self.step, self.size, lives=self.lives, calls=self.calls)
        return found

    def plan(self, recomputed: Collection[int]) -> Plan:
        """The plan that recomputes these blocks, in as much room as it takes."""
        gaps = gaps_of(self.calls, recomputed)
        peak = account(self.step, gaps, self.lives).peak
        return Plan(step=self.step.digest(), allowed=peak, projected=peak, gaps=gaps)

    def run(self, recomputed: frozenset[int]) -> Ran:
        """With these blocks recomputed."""
        if recomputed not in self._ran:
            plan = self.plan(recomputed)
            done = simulate(self.step, allowed=plan.projected, method=plan, device=self._device, steps=1)
            self.unlike_account += done.status != "ok" or done.peak_bytes > plan.projected or bool(done.bytes_out)
            self._ran[recomputed] = Ran(done.seconds, plan.projected)
        return self._ran[recomputed]

    def fragments(self, method: Plan | DTR, allowed: Bytes) -> Bytes:
        """What PyTorch's caching allocator, as modelled, takes from the device beside what is in use at once."""
        done = simulate(
            self.step, allowed=allowed, method=method, device=self._device, steps=1, allocator="caching"
        )  # fmt: skip
        return done.reserved_bytes - done.peak_bytes

    def revoked(self, recomputed: frozenset[int], allowed: Bytes) -> frozenset[int]:
        """These, and those that the engine gives up besides."""
        return revoked(self.step, self.lives, self.calls, recomputed, allowed)

    def dtr(self, allowed: Bytes) -> Simulation | None:
        """Under DTR; None where it runs out of memory, recomputes without end, or lives on copies that it never makes
        (the controller's last resort)."""
        if allowed not in self._dtr:
            done = simulate(self.step, allowed=allowed, method=DTR(HERITAGE), device=self._device, steps=1)
            self._dtr[allowed] = done if done.status == "ok" and not done.bytes_out else None
        return self._dtr[allowed]


@final
@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch under one way to run it and one budget."""

    seconds: Seconds | None
    """Of a step, on average; None if steps of some length cannot run."""
    peak: Bytes | None = None
    """The most bytes of any step."""
    over: float = 0.0
    """The share of steps that pass the budget."""
    given_up: float = 0.0
    """The share of steps in which blocks are given up that the plan keeps."""


@final
@dataclass(kw_only=True)
class Lab:
    """A task at all lengths of its grid."""

    name: str
    told: Told
    device: Device
    options: Mapping[str, Any]
    """Of the model; the paper's if empty."""
    lengths: int
    """Of the grid."""
    recorded: Sequence[int]
    """Lengths whose steps are recorded, all others derived."""
    iterations: int
    """Sheltered steps."""
    tell: Tell
    batch: int | None = None
    """None for the paper's."""
    _at: dict[int, At] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return EXAMPLES[self.told.dataset] // self.told.batch

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Lengths from the shortest to the longest, each by the same factor longer."""
        shortest, longest = self.told.shortest, self.told.longest
        factor = (longest / shortest) ** (1 / (self.lengths - 1))
        return tuple(sorted({round(shortest * factor**place) for place in range(self.lengths)}))

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Of the lengths of the grid: log-normal between the shortest and the longest.

        The ends of the range are where one step of an epoch is expected beyond.
        """
        beyond = NormalDist().inv_cdf(1 - 1 / self.steps)
        low, high = math.log(self.told.shortest), math.log(self.told.longest)
        lengths = NormalDist((low + high) / 2, (high - low) / 2 / beyond)
        return self._shares(lambda length: lengths.cdf(math.log(length)))

    @cached_property
    def uniform(self) -> tuple[float, ...]:
        """The same if all lengths were as frequent."""
        return self._shares(float)

    def _shares(self, below: Any) -> tuple[float, ...]:
        middles = [(one + other) / 2 for one, other in pairwise(self.grid)]
        edges = [below(length) for length in (self.told.shortest, *middles, self.told.longest)]
        return tuple((upper - lower) / (edges[-1] - edges[0]) for lower, upper in pairwise(edges))

    @cached_property
    def sheltered(self) -> list[int]:
        """The lengths of the first steps."""
        return Random(0).choices(self.grid, self.weights, k=self.iterations)

    # ------------------------------------------------------------------ steps

    def recording(self, length: int) -> Step:
        """The step as it is recorded on fake tensors."""
        self.tell(f"{self.name}: recording length {length}")
        batch = self.batch or self.told.batch
        with dropout_of_cuda():
            return record(lambda: build(self.name, length, batch=batch, **self.options), fake=True).step

    @cached_property
    def scaling(self) -> Scaling:
        """How the step grows with the length."""
        return fit_scaling({length: self.recording(length) for length in self.recorded})

    def at(self, length: int) -> At:
        """The task at a length."""
        if length not in self._at:
            self._at[length] = At(self.scaling.step_at(length), length, self.device)
        return self._at[length]

    @property
    def all(self) -> list[At]:
        """At all lengths of the grid."""
        return [self.at(length) for length in self.grid]

    @property
    def stars(self) -> tuple[Bytes, Bytes]:
        """What the longest batch takes with every block recomputed, and with none."""
        longest = self.at(self.grid[-1])
        return longest.run(longest.everything).peak, longest.plain.peak

    # ------------------------------------------------------------------ epochs

    def plain(self, weights: Sequence[float]) -> Seconds:
        """A step without a budget, on average."""
        return sum(weight * at.plain.seconds for weight, at in zip(weights, self.all, strict=True))

    def checkpoint(self, budget: Bytes, weights: Sequence[float]) -> Epoch:
        """Every block recomputed at every length."""
        return self._epoch(budget, weights, [at.run(at.everything) for at in self.all])

    def mimose(self, options: Options, budget: Bytes, weights: Sequence[float]) -> Epoch:
        """Mimose with these options, its sheltered steps included. `Options.static_size` has none of these: its plan is
        made before the training."""
        mimose = Mimose(options)
        sheltered = [self._shelter(mimose, self.at(length)) for length in self.sheltered]
        first = [seconds for seconds in sheltered if seconds is not None and options.static_size is None]
        runs, given_up = [], 0.0
        for weight, at in zip(weights, self.all, strict=True):
            chosen = planned = mimose.plan(at.size, budget - at.found.start).given_up
            if options.checks_peak:
                chosen = at.revoked(planned, budget)
                given_up += weight * (chosen != planned)
            runs.append(at.run(chosen))
        epoch = self._epoch(budget, weights, runs)
        seconds = (sum(first) + (self.steps - len(first)) * (epoch.seconds or 0.0)) / self.steps
        return Epoch(seconds, epoch.peak, epoch.over, given_up)

    @staticmethod
    def _shelter(mimose: Mimose, at: At) -> Seconds | None:
        """One step of the sheltered phase: what it takes; None if the phase is over. With two forwards each block runs
        once more."""
        if mimose.phase is not Phase.COLLECTING:
            return None
        collects = mimose.begin(at.size, 0).collects
        mimose.end(at.found.step, at.found.blocks if collects else ())
        again = sum(call.seconds for call in at.calls) if collects and mimose.options.forwards == 2 else 0.0
        return at.run(at.everything).seconds + again

    def dtr(self, budget: Bytes, weights: Sequence[float], *, lost: Bytes = 0, planning: float = 0.0) -> Epoch:
        """DTR, of whose budget so many bytes are lost to fragmentation, and of whose time that share to planning."""
        runs = []
        for at in self.all:
            if at.plain.peak <= budget - lost:
                runs.append(at.plain)
                continue
            done = at.dtr(budget - lost) if budget > lost else None
            if done is None:
                return Epoch(None)
            runs.append(Ran(done.seconds / (1 - planning), done.peak_bytes + lost))
        return self._epoch(budget, weights, runs)

    @staticmethod
    def _epoch(budget: Bytes, weights: Sequence[float], runs: Sequence[Ran]) -> Epoch:
        pairs = list(zip(weights, runs, strict=True))
        return Epoch(
            seconds=sum(weight * ran.seconds for weight, ran in pairs),
            peak=max(ran.peak for ran in runs),
            over=sum(weight for weight, ran in pairs if ran.peak > budget),
        )
