"""The arena for CUDA memory beside torch's caching allocator: how much the driver gives, and what a block costs.

The window paper's section 4, figure 3. Needs a CUDA device, so it runs only when named: `make bench-gpu`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.native.device_arena import DeviceArena
from spillway.units import Bytes, KiB, MiB, Seconds

CHUNKS: Final[tuple[Bytes, ...]] = (2 * MiB, 8 * MiB, 20 * MiB, 40 * MiB)
"""20 and 40 MiB are those of the paper's code and of the paper."""
PEERS: Final = {"caching": "", "expandable segments": "expandable_segments:True"}
FRAGMENTED: Final = 1.02
"""Target for what the driver gives, times the most that is in use at once, with the smallest chunks."""


@frozen
class Size:
    """How much is measured."""

    turns: int
    """Blocks that are made."""
    held: Bytes
    """At most about so many bytes are held at once."""
    largest: Bytes


def run(size: Size, tell: Tell) -> Result:
    """A row for every size of chunks and every setting of torch's allocator, in a process each."""
    if not torch.cuda.is_available():
        raise SystemExit("device_arena needs a CUDA device, and torch sees none.")
    rows: list[Row] = []
    for name, setting, chunk in (
        *((f"arena, chunks of {chunk // MiB} MiB", "", chunk) for chunk in CHUNKS),
        *((name, setting, 0) for name, setting in PEERS.items()),
    ):
        tell(name)
        asked = json.dumps([chunk, size.turns, size.held, size.largest])
        command = [sys.executable, "-c", f"from benchmarks.device_arena import *; measure(*{asked})"]
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": setting}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        rows.append({"allocator": name, **json.loads(done.stdout)})
    return Result(
        title=f"{size.turns} blocks of {4 * KiB // KiB} KiB to {size.largest // MiB} MiB, {size.held // MiB} MiB held",
        columns=(
            *columns.text(allocator="allocator"), *columns.nbytes(used="most in use", given="most given by the driver"),
            *columns.ratios(over="given / in use"), *columns.seconds(taking="a block", slowest="the 99th of 100"),
        ),
        rows=rows,
        notes=("In use: what was asked for. The host's time; nothing runs on the device meanwhile.",),
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    """The arena's first size of chunks, which is the one that sessions take."""
    first = result.rows[0]
    yield Check(what=f"{first['allocator']}: given / in use", measured=first["over"], at_most=FRAGMENTED)


def measure(chunk: Bytes, turns: int, most: Bytes, largest: Bytes) -> None:
    """Print one row as JSON: of an arena with such chunks, or of torch's allocator."""
    if chunk:
        arena = DeviceArena(chunk=chunk)
        print(json.dumps(_measured(arena.take, arena.give, lambda: arena.counts().peak_physical, turns, most, largest)))
        return
    blocks: dict[int, torch.Tensor] = {}

    def take(nbytes: Bytes) -> int:
        block = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        blocks[block.data_ptr()] = block
        return block.data_ptr()

    print(json.dumps(_measured(take, blocks.pop, torch.cuda.max_memory_reserved, turns, most, largest)))


def _measured(
    take: Callable[[Bytes], int], give: Callable[[int], Any], given: Callable[[], Bytes], turns: int, most: Bytes,
    largest: Bytes,
) -> Row:  # fmt: skip
    pick, held, used, peak = random.Random(0), list[tuple[int, Bytes]](), 0, 0
    took: list[Seconds] = []
    for _ in range(turns):
        nbytes = int(4 * KiB * (largest / (4 * KiB)) ** pick.random())
        while held and used + nbytes > most:
            address, freed = held.pop(pick.randrange(len(held)))
            give(address)
            used -= freed
        began = time.perf_counter()
        address = take(nbytes)
        took.append(time.perf_counter() - began)
        held.append((address, nbytes))
        used += nbytes
        peak = max(peak, used)
    taken = given()
    return {
        "used": peak, "given": taken, "over": taken / peak, "taking": statistics.median(took),
        "slowest": sorted(took)[int(0.99 * len(took))],
    }  # fmt: skip


BENCHMARK: Final = Benchmark(
    name="device_arena",
    run=run,
    judge=_checks,
    full=Size(turns=20_000, held=8192 * MiB, largest=512 * MiB),
    quick=Size(turns=300, held=512 * MiB, largest=64 * MiB),
)
