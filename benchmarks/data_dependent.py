"""Is the budget kept where a step's need depends on what is in the batch, so that no step foretells the next?

Eleven networks, each with inputs of one signature: usually little is to be done, one step in seven needs up to several
times as much. The budget is what the usual step needs. Every peak that is reported is compared with one that somebody
else has measured.
"""

from __future__ import annotations

import bisect
import statistics
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell
from benchmarks.training import METHODS
from spillway.units import Bytes
from tests.cpu.families import difference, state_of
from tests.cpu.varying_models import VARYING, batch_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    networks: Sequence[str]
    methods: Sequence[str]
    steps: int
    width: int
    looked: int
    """In one of so many steps the witness looks where the bytes of every storage are, at every op."""


_DATA_PTR: Final = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
"""As it is without a session."""


@final
class Witness(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._now: Bytes = 0
        self._looks = False
        self.start: Bytes = 0
        self.peak: Bytes = 0
        """With all storages in memory."""
        self.seen: Bytes = 0
        """Of what is in memory; of a step in which the witness looks."""

    def begin(self, tensors: Iterator[Tensor], *, looks: bool) -> None:
        """A step begins, in which these are there."""
        self._meet(tensors)
        self.start = self.peak = self._now
        self.seen, self._looks = 0, looks

    def _meet(self, tensors: Any) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._now += storage.nbytes()
                self._alive[storage._cdata] = weakref.ref(storage, self._forgetting(storage._cdata, storage.nbytes()))
        self.peak = max(self.peak, self._now)

    def _forgetting(self, key: int, nbytes: Bytes) -> Any:
        def forget(_: Any) -> None:
            self._now -= nbytes
            del self._alive[key]

        return forget

    def _look(self) -> Bytes:
        """Bytes in memory that is nobody's but this process's: no file's, and readable."""
        starts, ends = _own_memory()
        total = 0
        for reference in list(self._alive.values()):
            storage = reference()
            if storage is not None and storage.nbytes():
                address = _DATA_PTR(storage)
                place = bisect.bisect_right(starts, address) - 1
                total += storage.nbytes() if place >= 0 and address < ends[place] else 0
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meet(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        self._meet(tree_leaves(out))
        if self._looks:
            self.seen = max(self.seen, self._look())
        return out


def _own_memory() -> tuple[list[int], list[int]]:
    starts, ends = [], []
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, _, _, inode, *_ = line.split()
            if inode == "0" and rights.startswith("rw"):
                start, end = (int(text, 16) for text in span.split("-"))
                starts.append(start)
                ends.append(end)
    return starts, ends


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A training in a session."""

    reports: Sequence[spillway.StepReport]
    peaks: Sequence[Bytes]
    """What the witness counted, by step."""
    growths: Sequence[Bytes]
    """The same, above what it counted when the step began."""
    seen: Sequence[Bytes]
    """What it saw where it looked, else 0."""
    state: Any


@final
class Training:
    """One network with Adam, from the same seed every time."""

    def __init__(self, network: str, width: int) -> None:
        torch.manual_seed(0)
        self.width = width
        self.model: nn.Module = VARYING[network](width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Forward, backward, update."""
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plainly(self, steps: int) -> Any:
        """What the training ends in."""
        for number in range(steps):
            self.step(batch_of(number, self.width))
        return state_of(self.model, self.optimizer)

    def under(self, budget: Bytes | None, method: str, steps: int, looked: int) -> Watched:
        """The same in a session, beside a witness."""
        witness, peaks, growths, seen = Witness(), [], [], []
        with spillway.manage(self.model, self.optimizer, budget=budget, method=METHODS[method]()) as memory:
            for number in range(steps):
                batch = batch_of(number, self.width)
                witness.begin(self._named(batch), looks=number % looked == looked - 1)
                with memory.step(batch), witness:
                    self.step(batch)
                peaks.append(witness.peak)
                growths.append(witness.peak - witness.start)
                seen.append(witness.seen)
                del batch
        state = state_of(self.model, self.optimizer)
        return Watched(reports=memory.history, peaks=peaks, growths=growths, seen=seen, state=state)

    def _named(self, batch: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from batch
        for state in self.optimizer.state.values():
            yield from state.values()


def run(size: Size, tell: Tell) -> Result:
    """Train every network plainly, then under what its usual step needs."""
    rows: list[Row] = []
    for network in size.networks:
        plain = Training(network, size.width).plainly(size.steps)
        free = [report.peak_bytes for report in Training(network, size.width).under(None, "lru", 100, 1000).reports]
        for method in size.methods:
            tell(f"{network}, {method}")
            rows.append(_row(network, method, size, plain, free))
    return Result(
        title=f"{size.steps} steps of each network",
        columns=(
            *columns.text(network="network", method="method"),
            *columns.nbytes(usual_bytes="usual peak", most_bytes="highest, of 100", budget_bytes="budget"),
            *columns.nbytes(peak_bytes="highest under it"),
            *columns.ratios(times="needed, x budget"),
            *columns.text(steps="steps", over="over budget", known="known to fit", pressed="something left"),
            *columns.text(counted="peaks counted", unlike="unlike", looked="looked at", more="saw more"),
            *columns.text(verdict="beside plain"),
        ),
        rows=rows,
        checks=[
            Check(what="steps over budget", measured=sum(row["over"] for row in rows), at_most=0),
            Check(what="reported peaks unlike the witness's", measured=sum(row["unlike"] for row in rows), at_most=0),
            Check(what="steps with more in memory", measured=sum(row["more"] for row in rows), at_most=0),
            Check(what="trainings that differ", measured=sum(row["verdict"] != "identical" for row in rows), at_most=0),
        ],
        notes=NOTES,
    )


NOTES: Final = (
    "The budget is a tenth above the median peak of 100 steps without one. Known to fit: the step began without "
    "recipes, because one of the same signature had kept everything, and ended without. Something left: the step was "
    "one that needs more, whether it began with recipes or not.",
    "Peaks counted: steps from which nothing left and to which nothing came back. Their reported peak has to be, to "
    "the byte above the step's start, that of a dispatch mode above the session, which keeps an account of its own. "
    "Looked at: steps in which that mode reads at every op, for every storage alive, the address of its bytes, and "
    "from the system whose memory that is. That is never more than was reported.",
)


def _row(network: str, method: str, size: Size, plain: Any, free: Sequence[Bytes]) -> Row:
    usual = int(statistics.median(free))
    budget = usual * 11 // 10
    while True:
        try:
            found = Training(network, size.width).under(budget, method, size.steps, size.looked)
            break
        except spillway.BudgetInfeasible as refusal:
            budget = max(refusal.smallest_budget, budget + 1)
    steps = list(zip(found.reports, found.growths, found.seen, strict=True))
    kept = [(report, growth) for report, growth, _ in steps if not (report.moves or report.drops or report.bytes_in)]
    known = [report for report in found.reports if not report.managed]
    return {
        "network": network,
        "method": method,
        "usual_bytes": usual,
        "most_bytes": max(free),
        "budget_bytes": budget,
        "peak_bytes": max(report.peak_bytes for report in found.reports),
        "times": max(found.peaks) / budget,
        "steps": len(found.reports),
        "over": sum(max(report.peak_bytes, seen) > budget for report, _, seen in steps),
        "known": len(known),
        "pressed": len(steps) - len(kept),
        "counted": len(kept),
        "unlike": sum(report.peak_bytes - report.start_bytes != growth for report, growth in kept),
        "looked": sum(seen > 0 for seen in found.seen),
        "more": sum(seen > report.peak_bytes for report, _, seen in steps),
        "verdict": difference(plain, found.state) or "identical",
    }


BENCHMARK: Final = Benchmark(
    name="data_dependent",
    run=run,
    full=Size(networks=tuple(VARYING), methods=("lru",), steps=1000, width=64, looked=50),
    quick=Size(networks=("Tree",), methods=("lru",), steps=30, width=32, looked=10),
)
