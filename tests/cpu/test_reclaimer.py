"""When freed memory goes back to the system: before the limit is passed, and not oftener than need be."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from math import inf
from typing import Any, cast

import pytest
import torch

from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.internals.process_memory import Reclaimer
from spillway.methods import LRU
from spillway.units import GiB, KiB, MiB

LIMIT = 100 * MiB


class Resident:
    """A resident set of which a part is freed memory."""

    def __init__(self, used: int, freed: int) -> None:
        self.used, self.freed = used, freed
        self.reads = self.trims = 0

    def read(self) -> int:
        self.reads += 1
        return self.used + self.freed

    def trim(self) -> None:
        self.trims += 1
        self.freed = 0


def reclaimer(resident: Resident, *, kept: bool = False) -> Reclaimer:
    made = Reclaimer(cast(Any, resident), kept=kept)
    made.limit = LIMIT
    made.settle()
    resident.reads = 0
    return made


def test_freed_memory_goes_back_before_what_comes_would_pass_the_limit() -> None:
    resident = Resident(used=60 * MiB, freed=30 * MiB)
    reclaimer(resident).expect(10 * MiB)
    assert resident.trims == 0, "it fits"
    reclaimer(resident).expect(11 * MiB)
    assert (resident.trims, resident.read()) == (1, 60 * MiB)


@pytest.mark.parametrize(("used", "looks"), [(10 * MiB, 3), (99 * MiB, 5)], ids=["every 4 MiB", "every 2 MiB"])
def test_near_the_limit_it_looks_oftener(used: int, looks: int) -> None:
    resident = Resident(used=used, freed=0)
    watching = reclaimer(resident)
    for _ in range(16):
        watching.created(1 * MiB)
    assert resident.reads == looks


def test_where_pages_are_kept_it_looks_less_often() -> None:
    resident = Resident(used=99 * MiB, freed=0)
    watching = reclaimer(resident, kept=True)
    for _ in range(18):
        watching.created(1 * MiB)
    assert resident.reads == 2


def test_what_was_expected_and_did_not_come_hides_nothing_that_comes_later() -> None:
    resident = Resident(used=40 * MiB, freed=0)
    watching = reclaimer(resident)
    watching.expect(50 * MiB)  # a bound: 4 bytes were created
    resident.reads = 0
    for _ in range(5):
        watching.created(1 * MiB)
    assert resident.reads == 1


def test_what_workers_are_filling_is_on_its_way_in_until_it_arrived() -> None:
    # Two copies of 10 MiB each fitted below the limit, and were above it together.
    resident = Resident(used=60 * MiB, freed=15 * MiB)
    watching = reclaimer(resident)
    watching.expect(10 * MiB)
    watching.arrives(10 * MiB)
    assert resident.trims == 0, "the first fits"
    watching.expect(16 * MiB)
    assert resident.trims == 1
    resident.used, resident.freed = 70 * MiB, 10 * MiB
    watching.arrived(10 * MiB)
    watching.expect(16 * MiB)
    assert resident.trims == 1, "it is counted once"


def test_the_highest_point_is_what_cannot_be_returned_and_what_comes() -> None:
    resident = Resident(used=60 * MiB, freed=20 * MiB)
    watching = reclaimer(resident)
    watching.expect(10 * MiB)
    assert watching.highest == 0, "nobody had to look for it"
    watching.expect(30 * MiB)
    assert watching.highest == 90 * MiB
    watching.arrives(20 * MiB)
    resident.used = 95 * MiB  # most of what arrives is there
    watching.settle()
    assert watching.highest == 95 * MiB


def test_without_a_limit_nothing_is_read_or_trimmed() -> None:
    resident = Resident(used=1 << 40, freed=1 << 40)
    watching = Reclaimer(cast(Any, resident))
    watching.expect(1 << 40)
    watching.created(1 << 40)
    assert (resident.trims, resident.reads) == (0, 0)


def test_a_matrix_product_is_expected_in_full_and_what_has_a_loose_bound_by_its_likely_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A quarter of a product's size was expected once: the rest of it could come above the limit.
    expected: list[int] = []
    monkeypatch.setattr(Reclaimer, "expect", lambda self, nbytes: expected.append(nbytes))
    engine = TensorEngine(LRU(), GiB)
    few, many = torch.ones(512, 8), torch.ones(8, 512)
    engine.begin_step([])
    try:
        product = few @ many
        assert product.untyped_storage().nbytes() == MiB
        torch.relu(product)
    finally:
        engine.end_step()
        engine.close()
    assert expected == [pytest.approx(MiB, abs=256)] * 2


@pytest.mark.parametrize("policy", [LRU(short_chain=0), LRU(short_chain=8, worth=inf)], ids=["copied", "recomputed"])
def test_what_comes_back_counts_towards_the_next_look(policy: LRU, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[int] = []
    engine = TensorEngine(policy, 4 * MiB + KiB)
    counters = engine.controller.counters
    engine.begin_step([])
    try:
        first = torch.ones(1024, 256).relu()
        later = [first]
        for _ in range(6):
            later.append(torch.relu(later[-1]))
        del later
        counters = engine.controller.counters
        before = counters.reloads + counters.recomputed_ops
        with monkeypatch.context() as patch:
            patch.setattr(Reclaimer, "created", lambda self, nbytes: created.append(nbytes))
            torch.relu_(first)
    finally:
        engine.end_step()
        engine.close()
    assert (counters.recomputed_ops > 0) == (policy.short_chain > 0)
    assert created.count(MiB) == counters.reloads + counters.recomputed_ops - before > 0


SMAPS = """
import ctypes, sys, torch
from spillway.internals.process_memory import HeldHeap, prefer_huge_pages

def wishes():
    return sum(" hg" in line for line in open("/proc/self/smaps") if line.startswith("VmFlags"))

heap = HeldHeap()
if "freed" in sys.argv:
    # Asked of the C library itself: between tensors lie objects of torch's own, and what is freed is no single hole.
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    first = [library.malloc(size << 20) for size in (30, 30, 30, 30, 1)]
    for address in first[:4]:
        library.free(address)
before, kept = wishes(), []
for mebibytes in map(int, sys.argv[1].split()):
    kept.append(torch.empty(mebibytes << 18))
    prefer_huge_pages(kept[-1].data_ptr(), mebibytes << 20)
print(wishes() - before)
"""


@pytest.mark.long
def test_huge_pages_are_asked_for_where_the_wish_ends_with_the_block() -> None:
    # In the heap it stays: later on an op that creates 1 MiB made the process 4 MiB larger, and at 35 % of the plain
    # peak the resident set went 13 MiB further above the budget than it had to.
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage") or not os.path.exists("/proc/self/smaps"):
        pytest.skip("this system has no huge pages, or does not say who has them")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    for sizes, wishes in ((["8 16"], b"0"), (["48"], b"1"), (["48", "freed"], b"0")):
        run = [sys.executable, "-c", SMAPS, *sizes]
        assert subprocess.run(run, env=environment, check=True, capture_output=True).stdout.strip() == wishes


FAULTS = """
import resource, torch
from spillway.internals.process_memory import HeldHeap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(24 << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.zeros(1)
heaps = HeldHeap(), HeldHeap()
faults()
held = faults()
heaps[0].release()
heaps[0].release()
still = faults()
heaps[1].release()
print(held, still)
"""


@pytest.mark.long
def test_while_a_session_is_open_the_c_library_returns_nothing_by_itself() -> None:
    # 20 storages of 24 MiB, one after the other: 6,144 pages each, touched anew wherever they went back.
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library is not glibc")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = [sys.executable, "-c", FAULTS]
    held, still = map(int, subprocess.run(run, env=environment, check=True, capture_output=True).stdout.split())
    assert held < 1000
    assert still < 1000, "another session is open"
    left_alone = {**environment, "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    held, *_ = map(int, subprocess.run(run, env=left_alone, check=True, capture_output=True).stdout.split())
    assert held > 20 * 6000, "what the environment says was changed"


ENDS = """
import ctypes, sys, threading, torch
from spillway.internals.process_memory import HeldHeap, ResidentSet

def at_the_end():
    if "failed" in sys.argv:  # the C library then turns to another heap for good
        try:
            torch.empty(1 << 55, dtype=torch.uint8)
        except RuntimeError:
            pass
    library, resident = ctypes.CDLL(None), ResidentSet()
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    resident.trim()
    before = resident.read()
    address = library.malloc(16 << 20)
    ctypes.memset(address, 1, 16 << 20)
    there = resident.read() - before
    library.free(address)
    kept = resident.read() - before
    resident.trim()
    print(there, kept, resident.read() - before)

heap = HeldHeap()
if "thread" in sys.argv:
    thread = threading.Thread(target=at_the_end)
    thread.start()
    thread.join()
else:
    at_the_end()
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["first", "thread", "failed"])
def test_the_free_end_of_every_heap_goes_back(where: str) -> None:
    # A thread has a heap of its own, whose end `malloc_trim` leaves alone: sessions in threads counted on pages that
    # were there already when the step began, and did not see the tensors that lay in them.
    if not hasattr(ctypes.CDLL(None), "malloc_trim") or not os.path.exists("/proc/self/statm"):
        pytest.skip("this C library returns nothing, or this system does not say what is resident")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = [sys.executable, "-c", ENDS, where]
    there, kept, left = map(int, subprocess.run(run, env=environment, check=True, capture_output=True).stdout.split())
    assert there > 15 * MiB
    assert kept > 15 * MiB
    assert left < MiB
