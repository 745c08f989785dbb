"""DELTA's Tables III and IV: the largest batch that the device's memory has room for, fragmentation included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from benchmarks.record import Row
from papers.delta.lab import HERITAGE, Lab, figure, gib, published
from papers.delta.soft_budget import Ran, run_softly
from spillway.costs import Device
from spillway.engines.controller import UNLIMITED
from spillway.engines.simulated import simulate
from spillway.methods import METHODS, AbstractPolicy, Delta, KeepAll

TABLES: Final = {"III": "ResNet-50", "IV": "ResNet-101"}
NEAR: Final = 4
"""The largest batch is found to so many pictures."""
KEPT: Final = 0.98
"""The budget that is kept, as a share of the device's memory: the rest is for what rounding to chunks takes."""
MOST: Final = 3.4
"""No batch is tried that is so many times larger than the plain step's largest."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The largest batch of one method with one link."""

    batch: int
    ran: Ran | None
    """The run with it; None for the plain step."""
    gib: float
    """Most bytes that were resident at once."""

    def note(self, device: Device) -> str:
        """What it took."""
        if self.ran is None:
            return ""
        simulation = self.ran.simulation
        return (
            f"budget {self.ran.budget / device.memory:.0%} of memory, {gib(simulation.reserved_bytes):.1f} GiB "
            f"reserved, {simulation.overhead:.2f} x plain"
        )


Tried = Callable[[int], Ran | None]
"""A run with a batch of that size that ended well, or None."""


def tables_3_and_4(lab: Lab) -> tuple[list[Row], dict[tuple[str, str], list[Found]]]:
    """Both tables; the rows, and what was found with a budget of all memory, by model and method."""
    rows: list[Row] = []
    every: dict[tuple[str, str], list[Found]] = {}
    for table, model in TABLES.items():
        plain = _plain(lab, model)
        rows.append(_of_the_memory_told(lab, table, model))
        found = {"baseline": [plain]}
        best: dict[str, list[Found]] = {}
        for method in ("DTR", "DELTA"):
            lab.tell(f"Table {table}: {method}")
            found[method] = _largest(lab, model, method, plain.batch, (1.0,))
            best[method] = _largest(lab, model, method, plain.batch, lab.size.device_shares)
        for method, ours in found.items():
            every[model, method] = ours
            rows += _rows(lab, table, model, method, ours, plain)
        for method, ours in best.items():
            note = "; ".join(one.note(lab.size.devices[0]) for one in ours)
            what = f"{model}: largest batch, {method}, best budget"
            rows.append(figure(table, what, None, [one.batch for one in ours], "pictures", note=note))
        rows.append(_with_the_budget_kept(lab, table, model))
    return rows, every


def _with_the_budget_kept(lab: Lab, table: str, model: str) -> Row:
    """What the paper's largest batch costs where no step passes its budget: `delta` under Spillway's controller."""
    batch = lab.paper.largest[model, "DELTA"].batch
    runs = [
        simulate(
            lab.step(model, batch), allowed=int(device.memory * KEPT), method=Delta(), device=device,
            allocator="chunks", limit=device.memory,
        )
        for device in lab.size.devices
    ]  # fmt: skip
    shown = [run.overhead if run.status == "ok" else run.status for run in runs]
    note = f"{gib(max(run.reserved_bytes for run in runs)):.1f} GiB in chunks"
    return figure(table, f"{model}: batch {batch} by Spillway's delta, budget kept", None, shown, "x plain", note=note)


def _of_the_memory_told(lab: Lab, table: str, model: str) -> Row:
    """The batch at which a plain step takes what the paper's took."""
    told = lab.paper.largest[model, "baseline"]
    batch = _bisect(lambda batch: gib(lab.growth(model).step_at(batch).plain_peak()) <= told.memory_gib)
    what = f"{model}: batch of a plain step in the paper's {told.memory_gib} GiB, baseline"
    return figure(table, what, told.batch, (batch,), "pictures")


def _rows(lab: Lab, table: str, model: str, method: str, ours: Sequence[Found], plain: Found) -> list[Row]:
    told = lab.paper.largest[model, method]
    note = "; ".join(filter(None, (one.note(lab.size.devices[0]) for one in ours)))
    growth = [one.batch / plain.batch for one in ours]
    return [
        figure(table, f"{model}: largest batch, {method}", told.batch, [one.batch for one in ours], "pictures",
               why=_WHY[method][0], note=note),
        figure(table, f"{model}: growth, {method}", told.growth, growth, "x", why=_WHY[method][0]),
        figure(table, f"{model}: memory at it, {method}", told.memory_gib, [one.gib for one in ours], "GiB",
               why=_WHY[method][1]),
    ]  # fmt: skip


_WHY: Final = {"baseline": ("e", "e"), "DTR": ("e", "f"), "DELTA": ("e", "f")}
"""Explanations in papers/delta/README.md: of the batch, and of the memory."""


def _plain(lab: Lab, model: str) -> Found:
    """The largest batch of a step from which nothing leaves."""
    device = lab.size.devices[0]

    def fits(batch: int) -> bool:
        simulation = simulate(
            lab.step(model, batch), allowed=UNLIMITED, method=KeepAll(), device=device, allocator="caching",
            limit=device.memory, steps=2,
        )  # fmt: skip
        return simulation.status == "ok"

    batch = _bisect(fits)
    return Found(batch=batch, ran=None, gib=gib(lab.step(model, batch).plain_peak()))


def _bisect(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, if all smaller ones do."""
    low, high = 1, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _largest(lab: Lab, model: str, method: str, plain: int, shares: Sequence[float]) -> list[Found]:
    """With each link; DTR copies nothing, so its links are one."""
    devices = lab.size.devices if method == "DELTA" else lab.size.devices[:1]
    return [_largest_on(lab, model, method, plain, shares, device) for device in devices]


def _largest_on(lab: Lab, model: str, method: str, plain: int, shares: Sequence[float], device: Device) -> Found:
    def policy() -> AbstractPolicy:
        return published() if method == "DELTA" else METHODS[HERITAGE]()

    def tried(batch: int) -> Ran | None:
        step = lab.step(model, batch)
        for share in shares:
            budget = int(device.memory * share)
            ran = run_softly(step, policy(), budget, device, allocator="caching", limited=True)
            if ran.ok:
                return ran
        return None

    batch, ran = _search(tried, _ladder(int(plain * MOST), lab.size.ladder))
    return Found(batch=batch, ran=ran, gib=gib(ran.simulation.peak_bytes) if ran else 0.0)


def _ladder(top: int, ratio: float) -> Iterator[int]:
    batch = float(top)
    while batch >= 1:
        yield int(batch)
        batch /= ratio


def _search(tried: Tried, ladder: Iterator[int]) -> tuple[int, Ran | None]:
    """The first batch on the way down that runs, and from there towards the one before.

    What fails is no bound for what is larger: fragmentation differs from batch to batch. So a batch between two that
    fail may run and be missed.
    """
    above = 0
    for batch in ladder:
        ran = tried(batch)
        if ran is None:
            above = batch
            continue
        while above - batch > NEAR:
            middle = (batch + above) // 2
            further = tried(middle)
            if further is None:
                above = middle
            else:
                batch, ran = middle, further
        return batch, ran
    return 0, None
