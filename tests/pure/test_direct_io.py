"""Direct I/O: past the page cache, and the same content whichever way it is looked at."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spillway.errors import SpillBusyError, SpillCorruptedError, SpillDirectoryError, SpillFullError, UsageError
from spillway.tiers import disk, spill_file
from spillway.tiers.disk import DiskTier, Slot
from spillway.units import KiB, MiB
from tests.pure.test_disk_tier import content, damage, files_end_at, mapping, read, write
from tests.shared import HANGS

ANYWHERE = Path.cwd()
"""Where the tests run: a file system with direct I/O, more likely than among the temporary files."""


@pytest.fixture
def tier() -> Iterator[DiskTier]:
    tier = DiskTier(ANYWHERE, "direct")
    if tier.io != "direct":
        tier.close()
        pytest.skip(tier.io_note)
    yield tier
    tier.close()


def pages_in_cache(tier: DiskTier, slot: Slot) -> int:
    """Of a mapped slot, without touching it."""
    buffer, start = tier.mapped(slot).buffer, tier.mapped(slot).start
    pages = (ctypes.c_ubyte * (slot.capacity // spill_file.PAGE))()
    address = ctypes.c_void_p(ctypes.addressof(buffer) + start)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(slot.capacity), pages) == 0
    return sum(page & 1 for page in pages)


# ---------------------------------------------------------------------- the same bytes, aligned or not


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 100_003, MiB, MiB + 1, 3 * MiB + 5])
@pytest.mark.parametrize(("shift", "through"), [(0, False), (0, True), (64, True), (4096 - 64, True)])
def test_what_goes_out_past_the_cache_comes_back_bit_for_bit(
    tier: DiskTier, nbytes: int, shift: int, through: bool
) -> None:
    tier._spill._tried = {way: [float(way != through)] * 8 for way in (True, False)}
    room = np.zeros(nbytes + 2 * 4096, np.uint8)
    begin = -room.ctypes.data % 4096 + shift
    data = room[begin : begin + nbytes]
    data[:] = content(nbytes)
    slot = tier.write(data.ctypes.data, nbytes)
    assert np.array_equal(mapping(tier, slot), content(nbytes))
    data[:] = 0
    assert tier.read(slot, data.ctypes.data)
    assert np.array_equal(data, content(nbytes))
    assert not room[:begin].any()
    assert not room[begin + nbytes :].any(), "the rest of the last page was read into what lies behind"


@pytest.mark.parametrize("faster", [True, False])
def test_long_reads_go_both_ways_until_one_is_known_to_be_faster(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    room = np.zeros(2 * MiB + 4096, np.uint8)
    data = room[-room.ctypes.data % 4096 :][: 2 * MiB]
    data[:] = content(2 * MiB)
    slot, ways, clock, read_all = tier.write(data.ctypes.data, data.nbytes), list[bool](), [0.0], spill_file._read_all

    def slower_one_way(descriptor: int, offset: int, target: memoryview, needed: int) -> None:
        ways.append(ctypes.addressof(ctypes.c_char.from_buffer(target)) != data.ctypes.data)
        clock[0] += 1.0 if ways[-1] == faster else 2.0
        read_all(descriptor, offset, target, needed)

    monkeypatch.setattr(spill_file, "_read_all", slower_one_way)
    monkeypatch.setattr(spill_file, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for _ in range(20):
        data[:] = 0
        tier.read(slot, data.ctypes.data)
        assert np.array_equal(data, content(2 * MiB))
    assert ways == [True, False] * 8 + [faster] * 4


def test_the_page_cache_stays_empty(tier: DiskTier) -> None:
    data = content(3 * MiB)
    past, buffered_tier = write(tier, data), DiskTier(ANYWHERE)
    through = write(buffered_tier, data)
    assert np.array_equal(read(tier, past)[0], data)
    assert np.array_equal(read(buffered_tier, through)[0], data)
    assert pages_in_cache(buffered_tier, through) == 768
    assert pages_in_cache(tier, past) == 0
    buffered_tier.close()


# ---------------------------------------------------------------------- the mapping


def test_a_slot_that_was_read_in_place_shows_what_is_written_next(tier: DiskTier) -> None:
    first = write(tier, content(300_000))
    assert np.array_equal(mapping(tier, first), content(300_000))
    tier.free(first)
    second = write(tier, content(300_000, seed=1))
    assert second.offset == first.offset
    assert np.array_equal(mapping(tier, second), content(300_000, seed=1))


def test_what_was_written_in_place_does_not_show_in_the_next_use_of_the_slot(tier: DiskTier) -> None:
    first = write(tier, content(300_000))
    mapping(tier, first)[::1000] = 99
    tier.free(first)
    second = write(tier, content(300_000, seed=1))
    assert np.array_equal(mapping(tier, second), content(300_000, seed=1))


def test_readers_of_the_mapping_see_right_bytes_while_slots_beside_them_are_written(tier: DiskTier) -> None:
    """Their faults read ahead, into slots that are being written."""
    sizes = [20_480 + 4096 * (number % 5) for number in range(40)]
    slots = [write(tier, content(nbytes, seed)) for seed, nbytes in enumerate(sizes)]
    wrong: list[int] = []
    ended = threading.Event()

    def reads() -> None:
        while not ended.is_set():
            for seed in range(0, 40, 2):
                os.posix_fadvise(tier._spill.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                spill_file.forget_pages(tier.mapped(slots[seed]).buffer, tier.mapped(slots[seed]).start, sizes[seed])
                if not np.array_equal(mapping(tier, slots[seed]), content(sizes[seed], seed)):
                    wrong.append(seed)

    reader = threading.Thread(target=reads)
    reader.start()
    for turn in range(1, 12):
        for seed in range(1, 40, 2):
            tier.free(slots[seed])
            slots[seed] = write(tier, content(sizes[seed], seed + 100 * turn))
            if not np.array_equal(mapping(tier, slots[seed]), content(sizes[seed], seed + 100 * turn)):
                wrong.append(seed)
    ended.set()
    reader.join()
    assert wrong == []


def test_damage_is_noticed_past_the_cache_too(tier: DiskTier) -> None:
    slot = write(tier, content(50_000))
    damage(tier, slot.offset + 49_999)
    with pytest.raises(SpillCorruptedError, match="changed since they were written"):
        read(tier, slot)
    # At an end between two pages reads past the cache may tell more bytes
    os.ftruncate(tier._spill.descriptor, slot.offset + 8192)
    with pytest.raises(SpillCorruptedError, match=r"ends 40\.83 KiB too early"):
        read(tier, slot)


def test_a_full_disk_is_a_full_disk_past_the_cache_too(tier: DiskTier) -> None:
    kept = write(tier, content(50_000))
    with files_end_at(MiB), pytest.raises(SpillFullError):
        write(tier, content(2 * MiB))
    assert np.array_equal(read(tier, kept)[0], content(50_000))
    assert np.array_equal(mapping(tier, write(tier, content(2 * MiB))), content(2 * MiB))


# ---------------------------------------------------------------------- where there is none


def test_where_the_file_system_refuses_it_bytes_go_through_the_cache_and_the_note_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = spill_file.write_all

    def refuses(descriptor: int, offset: int, source: memoryview) -> None:
        if os.get_blocking(descriptor) and len(source) % 4096 == 0 and offset == 0 and source[:5] == b"spill":
            raise OSError(22, "Invalid argument")
        write_all(descriptor, offset, source)

    monkeypatch.setattr(spill_file, "write_all", refuses)
    tier = DiskTier(tmp_path, "direct")
    assert tier.io == "buffered"
    assert tier.io_note.startswith(f"{tmp_path} has no direct I/O (")
    assert np.array_equal(read(tier, write(tier, content(50_000)))[0], content(50_000))
    tier.close()


def test_a_system_without_it_goes_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    tier = DiskTier(tmp_path, "direct")
    assert (tier.io, list(tmp_path.iterdir())) == ("buffered", [])
    assert tier.io_note.endswith("(the system has no such thing): spilled bytes fill the page cache.")
    tier.close()


def test_it_has_to_be_asked_for() -> None:
    tier = DiskTier()
    assert (tier.io, tier.io_note) == ("buffered", "")
    tier.close()
    with pytest.raises(UsageError, match=r'^spill_io is "buffered" or "direct", not \'fast\'\.$'):
        DiskTier(io="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("io", ["buffered", "direct"])
def test_no_descriptor_is_left_whether_it_is_closed_forgotten_or_refused(io: spill_file.SpillIO) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for closes in (True, False):
        tier = DiskTier(ANYWHERE, io)
        slot = write(tier, content(50_000))
        still_mapped = mapping(tier, slot)
        assert len(os.listdir("/proc/self/fd")) == len(before) + (2 if tier.io == "direct" else 1)
        if closes:
            tier.close()
        del tier
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert np.array_equal(still_mapped, content(50_000))
    with pytest.raises(SpillDirectoryError):
        DiskTier(ANYWHERE / "missing", io)
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------- the queue, and forked processes


def test_the_queue_of_the_workers_is_bounded_in_copies_and_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, gate = DiskTier(tmp_path), threading.Event()
    plainly = DiskTier._fill

    def held_up(tier: DiskTier, slot: Slot, address: int) -> None:
        assert gate.wait(HANGS)
        plainly(tier, slot, address)

    monkeypatch.setattr(DiskTier, "_fill", held_up)
    data = content(64 * KiB)
    slots = [tier.start_write(data.ctypes.data, 4096) for _ in range(disk.MOST_JOBS)]
    used = tier.used
    with pytest.raises(SpillBusyError, match=r"^The workers have 64 copies of 256\.00 KiB before them; 4\.00 KiB more"):
        tier.start_write(data.ctypes.data, 4096)
    with pytest.raises(SpillBusyError):
        tier.start_read(slots[0], data.ctypes.data)
    assert tier.used == used
    gate.set()
    for slot in slots:
        tier.finish_write(slot)
    gate.clear()
    monkeypatch.setattr(disk, "MOST_QUEUED", 100 * KiB)
    one = tier.start_write(data.ctypes.data, 64 * KiB)
    with pytest.raises(SpillBusyError, match=r"^The workers have 1 copies of 64\.00 KiB before"):
        tier.start_write(data.ctypes.data, 64 * KiB)
    gate.set()
    tier.finish_write(one)
    monkeypatch.setattr(disk, "MOST_QUEUED", 1)
    two = tier.start_write(data.ctypes.data, 64 * KiB)  # one is always taken, however large
    tier.finish_write(two)
    tier.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_leaves_the_buffers_to_both_and_others_are_used(tier: DiskTier) -> None:
    slot, before = write(tier, content(MiB)), tier._spill._buffer()
    assert tier._spill._buffer() is before
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert tier._spill._buffer() is not before
    assert np.array_equal(read(tier, slot)[0], content(MiB))


def forked(reads: Slot, tier: DiskTier, expected: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> tuple[int, int]:
    """A child that looks at the slot when it is told to, and the pipe that tells it."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)
        os._exit(42 if np.array_equal(mapping(tier, reads), expected) else 1)
    os.close(told)
    return child, tell


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("pipes", [True, False], ids=["", "no descriptor is left for a pipe"])
def test_a_slot_that_a_forked_process_may_read_is_not_written_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipes: bool
) -> None:
    tier, data = DiskTier(tmp_path), content(50_000)
    slot = write(tier, data)
    descriptors = len(os.listdir("/proc/self/fd"))
    if not pipes:
        pipe = os.pipe
        calls = iter([True])
        monkeypatch.setattr(os, "pipe", lambda: pipe() if next(calls, False) else os.open("/no such", 0))
    child, tell = forked(slot, tier, data)
    tier.free(slot)
    second = write(tier, content(50_000, seed=1))
    assert second.offset != slot.offset
    os.close(tell)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    third = write(tier, content(50_000, seed=2))
    assert (third.offset == slot.offset) == pipes
    assert np.array_equal(read(tier, second)[0], content(50_000, seed=1))
    tier.free(third)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    tier.close()
