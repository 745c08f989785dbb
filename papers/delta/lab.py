"""What every part of DELTA's tables needs: the steps, the two links, the paper's numbers, and how a row is written.

The paper's numbers are read where they stand beside the project; none is kept in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

from benchmarks.record import Row, Tell, frozen
from papers import TABLES, table
from papers.delta.models import BUILDS
from papers.delta.soft_budget import Ran, run_softly
from spillway.calibration.named_device import device_of
from spillway.costs import Device, Scaling, fit_scaling, timed
from spillway.ir import Step
from spillway.methods import AbstractPolicy, Delta
from spillway.units import Bytes, GiB, MiB, Seconds
from spillway.workloads.recorded import record

# ---------------------------------------------------------------------- what the paper says


NAMES: Final = ("baseline", "DTR", "DELTA")
"""As the paper's tables name them."""


@frozen
class Largest:
    """A row of Table III or IV."""

    batch: int
    growth: float
    memory_gib: float


@frozen
class Paper:
    """What the paper says."""

    memory_mib: dict[tuple[str, str], float]
    """Table II by model and method."""
    resnet_gib: dict[tuple[int, str], float]
    """Figure 3 by batch and method; nothing where it ran out of memory or was not told."""
    largest: dict[tuple[str, str], Largest]
    """Tables III and IV by model and method."""
    costs: list[tuple[str, Seconds, Seconds]]
    """Table V: a tensor, what swapping it takes, and what recomputing it takes."""
    claims: dict[str, str]
    """What stands in the text, by number."""

    @classmethod
    def read(cls) -> Self:
        """Read all of it. Raises Skipped where it is not."""
        table2, figure3 = _rows("table2_memory_MB"), _rows("fig3_resnet50_memory_GB")
        return cls(
            memory_mib={
                (model.replace("ResNext", "ResNeXt"), row["method"]): float(number)
                for row in table2
                for model, number in row.items()
                if model != "method"
            },
            resnet_gib={
                (int(row["batch"]), method): float(row[method])
                for row in figure3
                for method in NAMES
                if row[method] not in ("", "OOM")
            },
            largest={
                (model, row["method"]): Largest(
                    batch=int(row["max_batchsize"]), growth=float(row["growth_x"]), memory_gib=float(row["memory_GB"])
                )
                for model, name in (("ResNet-50", "table3_maxbs_resnet50"), ("ResNet-101", "table4_maxbs_resnet101"))
                for row in _rows(name)
            },
            costs=[
                (f"{row['tensor']}({row['id']})", float(row["c_s_us"]) / 1e6, float(row["c_r_us"]) / 1e6)
                for row in _rows("table5_costs_us")
            ],
            claims={row["id"]: f"{row['value']} {row['unit']}".strip() for row in _rows("text_claims")},
        )  # fmt: skip


def _rows(name: str) -> list[dict[str, str]]:
    return table(TABLES / f"delta_{name}.csv")


# ---------------------------------------------------------------------- the steps


LINKS: Final = (device_of("a100"), device_of("a100-physical"))
"""The paper's 22.4 GB/s, and 11.2 GB/s: 35 % of what the link does in both directions together, and in one."""

TOLERANCE: Final = 0.10
"""A number that is further from the paper's than that needs an explanation."""

WORTH: Final = 2.0
"""Nobody would train at more than so many times the plain step's time: such runs do not count as the least memory."""

HERITAGE: Final = "dtr-eqclass"
"""The heuristic of DTR's prototype."""


@frozen
class Size:
    """How much is run."""

    options: Mapping[str, Mapping[str, Any]]
    """Of the models, by the paper's names."""
    sizes: tuple[int, ...]
    """Batches from which all other batches of the ResNets are derived."""
    checked: int
    """A batch that is derived and recorded."""
    batches: Mapping[str, int]
    """Of Table II and Figure 7, by model."""
    curve: tuple[int, ...]
    """Batches of Figure 3."""
    shares: tuple[float, ...]
    """Budgets as shares of the plain peak, for the least memory and for Figure 7."""
    device_shares: tuple[float, ...]
    """Budgets as shares of the device's memory, for the largest batch."""
    ladder: float
    """Each batch that is tried is so many times smaller than the one before."""
    devices: tuple[Device, Device] = LINKS
    """With the paper's link, and with the physical one."""


@final
@dataclass(slots=True)
class Lab:
    """Steps, recorded and derived as they are asked for."""

    size: Size
    paper: Paper
    tell: Tell
    _recorded: dict[tuple[str, int, str], Step] = field(default_factory=dict)
    _scalings: dict[str, Scaling] = field(default_factory=dict)
    _timed: dict[tuple[str, int, str], Step] = field(default_factory=dict)
    _under: dict[tuple[str, int, str], list[tuple[Ran, Ran]]] = field(default_factory=dict)

    def recorded(self, model: str, batch: int, **options: Any) -> Step:
        """The step as recorded on fake tensors."""
        key = model, batch, repr(options)
        if key not in self._recorded:
            self.tell(f"{model}: recording a batch of {batch}")
            given = {**self.size.options.get(model, {}), **options}
            self._recorded[key] = record(lambda: BUILDS[model](model, batch, **given), fake=True).step
        return self._recorded[key]

    def scaling(self, model: str) -> Scaling:
        """How the step of that model grows with the batch."""
        if model not in self._scalings:
            self._scalings[model] = fit_scaling({batch: self.recorded(model, batch) for batch in self.size.sizes})
        return self._scalings[model]

    def step(self, model: str, batch: int, **options: Any) -> Step:
        """The step with seconds: of a ResNet derived, of others recorded. Links differ in copies alone."""
        key = model, batch, repr(options)
        if key not in self._timed:
            if len(self._timed) > 64:
                self._timed.clear()
            derived = model in ("ResNet-50", "ResNet-101") and not options
            step = self.scaling(model).step_at(batch) if derived else self.recorded(model, batch, **options)
            self._timed[key] = timed(step, self.size.devices[0])
        return self._timed[key]

    def soft(self, model: str, batch: int, policy: Callable[[], AbstractPolicy], share: float) -> tuple[Ran, Ran]:
        """Under a soft budget that is that share of the plain peak, with each link."""
        step = self.step(model, batch)
        budget = int(step.plain_peak() * share)
        paper, physical = (run_softly(step, policy(), budget, device) for device in self.size.devices)
        return paper, physical

    def under(self, model: str, batch: int, policy: Callable[[], AbstractPolicy]) -> list[tuple[Ran, Ran]]:
        """A policy under every soft budget, with each link."""
        key = model, batch, policy().name
        if key not in self._under:
            self._under[key] = [self.soft(model, batch, policy, share) for share in self.size.shares]
        return self._under[key]

    def least(self, model: str, batch: int) -> tuple[Ran, Ran]:
        """DELTA under the budget, of those that are worth it, at which it needs the least memory; for each link."""
        pairs = self.under(model, batch, published)
        paper, physical = (_least([pair[link] for pair in pairs]) for link in range(2))
        return paper, physical


def _least(runs: Sequence[Ran]) -> Ran:
    worth = [ran for ran in runs if ran.ok and ran.simulation.overhead <= WORTH]
    return min(worth or [ran for ran in runs if ran.ok], key=lambda ran: ran.simulation.peak_bytes)


def published(filter: str = "base") -> Delta:
    """DELTA as published with that filter."""
    policy = Delta.as_published()
    policy.filter = filter
    return policy


# ---------------------------------------------------------------------- rows


def mib(nbytes: Bytes) -> float:
    """As `torch.cuda.max_memory_allocated` is usually divided."""
    return nbytes / MiB


def gib(nbytes: Bytes) -> float:
    """The same in larger units."""
    return nbytes / GiB


def figure(
    table: str, what: str, paper: Any, ours: Sequence[Any], unit: str = "", *, note: str = "", budget: str = "",
    **beside: Any,
) -> Row:  # fmt: skip
    """A row: what the paper has, and ours with the paper's link and with the physical one.

    Arguments:
        table: Of the paper.
        what: The figure's name.
        paper: The published number, or a text; None where there is none.
        ours: With the paper's link first, with the physical one last; one of them if the link changes nothing.
        unit: Of all of these.
        note: What a reader has to know of this row.
        budget: `SOFT` or `KEPT`, where there is one.
        **beside: More figures of the same runs, in the row's unit: what `RULES` look at.
    """
    row = {
        "table": table, "what": what, "unit": unit, "paper": paper, "ours": ours[0], "physical": ours[-1],
        "budget": budget, "note": note, "beside": beside,
    }  # fmt: skip
    why = ", ".join(reasons(row)) or (UNEXPLAINED if unexplained([row]) else "")
    return {**row, "deviation": deviation(row), "why": why}


SOFT: Final = "soft"
"""A budget that the policy knows and nobody enforces, as in the paper's runs: `soft_budget.py`."""
KEPT: Final = "kept"
"""A budget that Spillway's controller keeps, as in sessions."""
UNEXPLAINED: Final = "UNEXPLAINED"


def deviation(row: Row) -> float | None:
    """Ours with the paper's link over the paper's, less 1; None unless both are numbers."""
    numbers = isinstance(row["paper"], int | float) and isinstance(row["ours"], int | float)
    return row["ours"] / row["paper"] - 1 if numbers and row["paper"] else None


def reasons(row: Row) -> list[str]:
    """The letters of the rules that hold for a row which is further from the paper than tolerated."""
    off = deviation(row)
    return [] if off is None or abs(off) <= TOLERANCE else [letter for letter, holds in RULES.items() if holds(row)]


def unexplained(rows: Iterable[Row]) -> list[Row]:
    """Rows that are further from the paper than tolerated and that no rule explains, by their own numbers."""
    return [row for row in rows if abs(deviation(row) or 0.0) > TOLERANCE and not reasons(row)]


def _between(row: Row, *ends: Any) -> bool:
    """Whether the paper's number lies between ours and that one, both included."""
    return all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends) and (
        min(row["ours"], *ends) <= row["paper"] <= max(row["ours"], *ends)
    )


def _near(row: Row, found: Iterable[float]) -> bool:
    """Whether one of these is the paper's number, within the tolerance."""
    return any(abs(one / row["paper"] - 1) <= TOLERANCE for one in found)


def _with(key: str, holds: Callable[[Row, Any], bool]) -> Callable[[Row], bool]:
    return lambda row: row["beside"].get(key) is not None and holds(row, row["beside"][key])


RULES: Final[Mapping[str, Callable[[Row], bool]]] = {
    "a": lambda row: _between(row, row["physical"]),
    "b": _with("composed", _between),
    "c": _with("other_budgets", _near),
    "d": _with("in_the_papers_place", lambda row, found: _near(row, (found,))),
    "e": _with("least_possible", lambda row, least: row["paper"] < least),
    "f": _with("plain", _between),
}
"""What explains a row, by the letter of its paragraph in the README: each looks at numbers of the row alone.

a: the paper's number lies between ours with one reading of the link and with the other. b: it lies between those with
the activation as one op and as several. c: under another of the budgets that were tried, the same method takes what the
paper says. d: with the paper's plain batch, or its memory, in place of ours the figure is the paper's. e: the paper's
number is less than the device could do at its data sheet's rate. f: it lies between a plain step and ours.
"""


def overheads(runs: Iterable[Ran]) -> str:
    """What the runs cost beside a plain step."""
    return "x plain: " + ", ".join(f"{ran.simulation.overhead:.2f}" for ran in runs)
