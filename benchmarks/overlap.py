"""What copying beside the ops wins where much is copied and little computed, and what the machine leaves to win."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.timing import median_ratio
from benchmarks.turns import Answers, account, answered, figures, training, verdict
from benchmarks.workers import Job
from spillway.tiers.spill_file import SpillIO
from spillway.units import Bytes, Seconds, format_bytes

PLAIN: Final = "plain"
WITHOUT: Final = "delta that moves only, no overlap"
WITH: Final = "delta that moves only"

MOST_TIME: Final = 0.8
"""Of the step without overlap: the paper's section 5.4 has "almost 20 %" less."""

LEAST_COPYING: Final = 0.3
"""Share of copies in the step without overlap for which that is asked."""


@frozen
class Size:
    """How much is measured."""

    models: Sequence[tuple[str, Mapping[str, Any], SpillIO]]
    """Names in `benchmarks.models` with their options, and whether copies go through the page cache or past it."""
    percent: int
    """The budget, in percent of the plain peak."""
    rounds: int
    warm: int
    """The first of the rounds, which do not count."""
    bus_bytes: Bytes
    """Copied by each thread where the bus is measured."""


def run(size: Size, tell: Tell) -> Result:
    """Every model without overlap and with it, then two threads that copy against one."""
    rows = [row for name, options, io in size.models for row in _rows(name, options, io, size, tell)]
    pairs = [(rows[place + 1], rows[place + 2]) for place in range(0, len(rows), 3)]
    checks = [
        Check(
            what=f"{beside['model']}, {beside['spill_io']}, step with overlap / without",
            measured=beside["ratio"],
            at_most=MOST_TIME,
        )
        for alone, beside in pairs
        if alone["copy_share"] >= LEAST_COPYING
    ]
    most = max(alone["copy_share"] for alone, _ in pairs)
    checks.append(Check(what="percentage points short of 30 % copying", measured=max(0, 30 - 100 * most), at_most=0))
    tell("two threads that copy, against one")
    alone, together = (statistics.median(_copies(n, size.bus_bytes) for _ in range(7)) for n in (1, 2))
    return Result(
        title=f"copies beside the ops, budget {size.percent} % of the plain peak",
        columns=COLUMNS,
        rows=rows,
        checks=checks,
        notes=(
            *NOTES,
            f"The bound of this machine: one thread copies {format_bytes(int(size.bus_bytes / alone))}/s from memory "
            f"to memory; of two threads at once each takes {together / alone:.2f} times as long.",
        ),
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(model="model", spill_io="copies", competitor="competitor"),
    *columns.nbytes(budget_bytes="budget", bytes_out="out/step", bytes_in="in/step"),
    *columns.seconds(seconds="time", stall_seconds="stalls"),
    *columns.shares(copy_share="stalls/time", early_share="begun early", hidden_share="hidden"),
    *columns.ratios(plain_ratio="x plain", ratio="x no overlap"),
    *columns.text(losses="losses"),
)

NOTES: Final = (
    "Copies: through the page cache (buffered), or past it to the disk (direct). Everything that leaves is moved (all "
    "is `evict_pinned`), in both. Without overlap ops wait for every copy, so that stalls / time is the share of "
    "transfers in that step. Begun early: of the bytes copied, those whose copy began before an op wanted them or "
    "their room. Hidden: of the stalls without overlap, the part that is gone, byte for byte. Times are medians; "
    "ratios are medians over rounds, a step of each in turn.",
)


def _rows(model: str, options: Mapping[str, Any], io: SpillIO, size: Size, tell: Tell) -> list[Row]:
    def job(method: str | None = None, budget: Bytes | None = None) -> Job:
        return training(model, options, method=method, budget=budget, return_freed=False, spill_io=io)

    budget = account(job("keep-all"), 2) * size.percent // 100
    jobs = {PLAIN: job(), WITHOUT: job(WITHOUT, budget), WITH: job(WITH, budget)}
    steps = answered(jobs, size.rounds, lambda text: tell(f"{model}: {text}"))
    return [{"model": model, "spill_io": io, "competitor": name, **_row(name, budget, steps, size)} for name in jobs]


def _row(name: str, budget: Bytes, steps: Mapping[str, Answers], size: Size) -> Row:
    told = figures(steps[name], steps[PLAIN], size.warm)
    row = {"seconds": told["seconds"], "plain_ratio": told["ratio"], "losses": verdict(told["identical"])}
    if name == PLAIN:
        return row
    found, without = (_copied(steps[other][size.warm :]) for other in (name, WITHOUT))
    per_byte, per_byte_without = (one["stall_seconds"] / max(one["copied"], 1) for one in (found, without))
    walls = ([answer["wall"] for answer in steps[other][size.warm :]] for other in (name, WITHOUT))
    return {
        **row,
        "budget_bytes": budget,
        **found,
        "hidden_share": 1 - per_byte / per_byte_without if per_byte_without else 0.0,
        "ratio": median_ratio(*walls),
    }


def _copied(answers: Answers) -> dict[str, Any]:
    """Averages over steps of what was copied, and of what was waited for."""
    reports, counts = [answer["report"] for answer in answers], [answer["counts"] for answer in answers]
    out, back = (sum(report[key] for report in reports) for key in ("bytes_out", "bytes_in"))
    early = sum(count["early_out"] + count["early_in"] for count in counts)
    stalls, seconds = (sum(report[key] for report in reports) for key in ("stall_seconds", "seconds"))
    return {
        "bytes_out": out // len(reports),
        "bytes_in": back // len(reports),
        "copied": (out + back) // len(reports),
        "stall_seconds": stalls / len(reports),
        "copy_share": stalls / seconds,
        "early_share": early / max(out + back, 1),
    }


def _copies(threads: int, nbytes: Bytes) -> Seconds:
    buffers = [(ctypes.create_string_buffer(nbytes), ctypes.create_string_buffer(nbytes)) for _ in range(threads)]
    for pair in buffers:
        ctypes.memmove(*pair, nbytes)  # the pages are there before the clock runs; ctypes lets go of the interpreter
    workers = [threading.Thread(target=ctypes.memmove, args=(*pair, nbytes)) for pair in buffers]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


BENCHMARK: Final = Benchmark(
    name="overlap",
    run=run,
    full=Size(
        models=[("stripes", {}, "buffered"), *((name, {}, "direct") for name in ("stripes", "resnet", "unet"))],
        percent=35, rounds=17, warm=3, bus_bytes=256 << 20,
    ),
    quick=Size(
        models=[("stripes", {"layers": 6, "batch": 2}, "buffered")], percent=50, rounds=3, warm=1, bus_bytes=1 << 20
    ),
)  # fmt: skip
