"""The arena by itself: random tensors made and freed, what is resident meanwhile, and what a collected block costs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Skipped, Tell, frozen
from spillway.errors import NativeError
from spillway.native import arena
from spillway.native.arena import Arena
from spillway.units import Bytes, KiB, MiB, Seconds

SMALLEST: Final = 4 * KiB
TIMED: Final = 2 * MiB
"""Blocks of this size are timed apart."""
EVERY: Final = 16
"""One block in so many has that size."""
RESIDENT: Final = 1.02
"""Target for the most that is resident, times the most that is live at once."""
COLLECTED: Final[Seconds] = 20e-6
"""Target for a block of `TIMED` that lies in no freed one, but in pages of several."""


@frozen
class Size:
    """How much is measured."""

    turns: int
    """Blocks that are made."""
    held: Sequence[Bytes]
    """At most about so many bytes are held at once, a row each."""
    largest: Bytes


def run(size: Size, tell: Tell) -> Result:
    """A row for every amount that is held."""
    made = _by_malloc()
    try:
        one = Arena()
    except NativeError as reason:
        raise Skipped(str(reason)) from None
    rows: list[Row] = []
    for held in size.held:
        tell(f"{size.turns} blocks, {held / MiB:.0f} MiB held")
        rows.append({"made": made, **_row(size, held)})
    one.release()
    title = f"{size.turns} random blocks of 4 KiB to {size.largest / MiB:.0f} MiB in the arena"
    return Result(title=title, columns=COLUMNS, rows=rows, notes=NOTES)


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        held = f"{row['held'] / MiB:.0f} MiB held"
        yield Check(what=f"{held}: blocks whose content was wrong", measured=row["wrong"])
        resident = row["resident"] / row["live"]
        yield Check(what=f"{held}: most resident, times the most live", measured=resident, at_most=RESIDENT)
        if row["collecting"]:
            what = f"{held}: median microseconds of a collected block of 2 MiB"
            yield Check(what=what, measured=row["collecting"] * 1e6, at_most=COLLECTED * 1e6)
    none = not any(row["collecting"] for row in result.rows)
    yield Check(what="without a block of 2 MiB that was collected, whose time has a target", measured=none)


COLUMNS: Final[Sequence[Column]] = (
    *columns.nbytes(held="held"),
    *columns.text(wrong="wrong"),
    *columns.nbytes(live="most live", resident="most resident", faulted="faulted in", moved="moved"),
    *columns.shares(fitted="in place", collected="collected"),
    *columns.seconds(collecting="2 MiB, collected", fitting="in place", made="by malloc"),
    *columns.text(mappings="mappings"),
)
NOTES: Final = (
    "Sizes are drawn evenly in their logarithm, and blocks die in random order. Live: of tensors, rounded up to pages; "
    "what is below 32 KiB is malloc's and counts in neither. Faulted in: pages that the system was asked for, "
    "more than the most resident only where mappings were healed. By malloc: `torch.empty` of 2 MiB without the arena, "
    "whose pages are still to be faulted in.",
)


def _row(size: Size, most: Bytes) -> Row:
    pick, wrong, total = random.Random(0), 0, 0
    held: list[tuple[torch.Tensor, int]] = []
    took: dict[bool, list[Seconds]] = {True: [], False: []}
    arena.trim()
    arena.reset_peaks()
    before = arena.counts()
    for turn in range(size.turns):
        goal = most * pick.uniform(0.5, 1)
        while held and total > goal:
            place = pick.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            tensor, value = held.pop()
            total -= len(tensor)
            wrong += not _is(tensor, value)
        nbytes = TIMED if turn % EVERY == 0 else int(SMALLEST * (size.largest / SMALLEST) ** pick.random())
        collected, began = arena.counts().collected, time.perf_counter()
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        seconds = time.perf_counter() - began
        if nbytes == TIMED:
            took[arena.counts().collected > collected].append(seconds)
        value = pick.randrange(256)
        _write(tensor, value)
        held.append((tensor, value))
        total += nbytes
    after = arena.counts()
    blocks = after.blocks - before.blocks
    return {
        "held": most, "wrong": wrong + sum(not _is(*one) for one in held), "live": after.peak_live,
        "resident": after.peak_resident, "faulted": after.faulted - before.faulted, "moved": after.moved - before.moved,
        "fitted": (after.fitted - before.fitted) / blocks, "collected": (after.collected - before.collected) / blocks,
        "collecting": statistics.median(took[True]) if took[True] else None,
        "fitting": statistics.median(took[False]) if took[False] else None,
        "mappings": after.mappings,
    }  # fmt: skip


def _by_malloc() -> Seconds:
    storage = []
    for _ in range(99):
        began = time.perf_counter()
        torch.UntypedStorage(TIMED)
        storage.append(time.perf_counter() - began)
    return statistics.median(storage)


def _write(tensor: torch.Tensor, value: int) -> None:
    tensor[::SMALLEST] = value
    tensor[-1] = value


def _is(tensor: torch.Tensor, value: int) -> bool:
    """One byte of every page, and the last one."""
    return bool((tensor[::SMALLEST] == value).all()) and int(tensor[-1]) == value


BENCHMARK: Final = Benchmark(
    name="arena",
    run=run,
    judge=_checks,
    full=Size(turns=100_000, held=(256 * MiB, 1024 * MiB), largest=64 * MiB),
    quick=Size(turns=300, held=(32 * MiB,), largest=4 * MiB),
)
