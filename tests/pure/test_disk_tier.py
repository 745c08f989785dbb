"""The disk tier: slots in one file that nobody else can open, checked when they are read."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from spillway.errors import SpillCorruptedError, SpillDirectoryError, SpillFullError
from spillway.tiers import disk
from spillway.tiers.disk import DiskTier, Slot, checksum, slot_capacity
from spillway.tiers.spill_file import PAGE
from spillway.units import KiB, MiB

Bytes1D = npt.NDArray[np.uint8]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path)
    yield tier
    tier.close()


def content(nbytes: int, seed: int = 0) -> Bytes1D:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def write(tier: DiskTier, data: npt.NDArray[np.generic]) -> Slot:
    return tier.write(data.ctypes.data, data.nbytes)


def read(tier: DiskTier, slot: Slot) -> tuple[Bytes1D, bool]:
    """What comes back from a slot, and whether the slot still holds it."""
    data = np.zeros(slot.nbytes, np.uint8)
    unchanged = tier.read(slot, data.ctypes.data)
    return data, unchanged


def mapping(tier: DiskTier, slot: Slot) -> Bytes1D:
    """The slot's bytes as anybody reads and writes them in place."""
    mapped = tier.mapped(slot)
    return np.frombuffer(mapped.buffer, np.uint8, slot.nbytes, mapped.start)


def damage(tier: DiskTier, offset: int) -> None:
    """Flip a bit in the file, behind the tier's back."""
    (byte,) = os.pread(tier._spill.descriptor, 1, offset)
    os.pwrite(tier._spill.descriptor, bytes([byte ^ 1]), offset)


@contextmanager
def files_end_at(nbytes: int) -> Iterator[None]:
    """A file system that takes no byte of a file beyond `nbytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------------- slots


@pytest.mark.parametrize("nbytes", [1, 8, 4095, 4096, 4097, 100_003, 3 * MiB + 5])
def test_what_goes_out_comes_back_bit_for_bit(tier: DiskTier, nbytes: int) -> None:
    data = content(nbytes)
    slot = write(tier, data)
    back, unchanged = read(tier, slot)
    assert np.array_equal(back, data)
    assert unchanged
    assert np.array_equal(mapping(tier, slot), data)


def test_slots_are_whole_pages_and_begin_on_one() -> None:
    tier = DiskTier()
    slots = [write(tier, content(nbytes)) for nbytes in (1, 5000, 64, 70_000)]
    tier.close()
    assert [(slot.offset % PAGE, slot.capacity % PAGE) for slot in slots] == [(0, 0)] * 4
    assert [slot.capacity for slot in slots] == [4096, 8192, 4096, 73_728]
    assert PAGE % 64 == 0, "what reads a slot in place may ask for 64 bytes of alignment"


def test_slots_do_not_overlap(tier: DiskTier) -> None:
    slots = [write(tier, content(nbytes, seed)) for seed, nbytes in enumerate((1, 5000, 4096, 300_000, 9000))]
    ends = sorted((slot.offset, slot.offset + slot.capacity) for slot in slots)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    assert [np.array_equal(read(tier, slot)[0], content(slot.nbytes, seed)) for seed, slot in enumerate(slots)] == (
        [True] * 5
    )


def test_a_slot_that_was_given_back_is_used_again(tier: DiskTier) -> None:
    first = write(tier, content(50_000))
    used = tier.used
    tier.free(first)
    assert tier.used == 0
    second = write(tier, content(53_000, seed=1))
    assert (second.offset, tier.used) == (first.offset, used)
    assert np.array_equal(read(tier, second)[0], content(53_000, seed=1))


def test_a_slot_in_use_is_not_given_out_again(tier: DiskTier) -> None:
    slots = [write(tier, content(50_000)) for _ in range(3)]
    assert len({slot.offset for slot in slots}) == 3
    assert tier.used == sum(slot.capacity for slot in slots)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 65_537, 1_000_000, 3 * MiB + 1])
def test_a_slot_wastes_less_than_an_eighth_or_a_page(nbytes: int) -> None:
    assert 0 <= slot_capacity(nbytes) - nbytes < max(PAGE, nbytes / 8)


def test_capacities_come_in_few_sizes() -> None:
    assert len({slot_capacity(nbytes) for nbytes in range(MiB, 2 * MiB, 999)}) <= 9


def test_a_slot_never_straddles_two_windows_of_the_mapping(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_WINDOW", 64 * KiB)
    slots = [write(tier, content(40_000, seed)) for seed in range(3)]
    assert [slot.offset for slot in slots] == [0, 64 * KiB, 128 * KiB]
    assert all(np.array_equal(mapping(tier, slot), content(40_000, seed)) for seed, slot in enumerate(slots))


def test_a_slot_larger_than_a_window_and_those_beside_it_are_mapped_where_they_lie(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_WINDOW", 64 * KiB)
    sizes = (10_000, 150_000, 10_000, 200_000, 30_000)
    slots = [write(tier, content(nbytes, seed)) for seed, nbytes in enumerate(sizes)]
    for seed, slot in enumerate(slots):
        assert np.array_equal(mapping(tier, slot), content(slot.nbytes, seed)), f"slot {seed}"
    tier.free(slots[2])
    tier.free(slots[4])
    assert np.array_equal(mapping(tier, slots[1]), content(150_000, 1))


# ---------------------------------------------------------------------- checksums


@pytest.mark.parametrize("nbytes", [1, 7, 8, 1016, 1017, 4096, 100_003])
def test_the_checksum_sees_every_single_bit(nbytes: int) -> None:
    data = content(nbytes)
    whole = checksum(data.ctypes.data, nbytes)
    for place in {0, nbytes // 3, nbytes // 2, nbytes - 1}:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(data.ctypes.data, nbytes) != whole, f"bit {bit} of byte {place}"
            data[place] ^= 1 << bit
    assert checksum(data.ctypes.data, nbytes) == whole


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_the_checksum_sees_a_sign_that_changes(kind: type[np.floating]) -> None:
    data = np.random.default_rng(0).standard_normal(5000).astype(kind)
    before = checksum(data.ctypes.data, data.nbytes)
    for place in (0, 1, 127, 4999):
        data[place] *= -1
        assert checksum(data.ctypes.data, data.nbytes) != before
        data[place] *= -1


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("length", [64, 254, 508, 1000, 1024, 65_536, 100_001])
def test_the_checksum_sees_the_negation_of_everything(kind: type[np.floating], length: int) -> None:
    data = np.random.default_rng(0).standard_normal(length).astype(kind)
    before = checksum(data.ctypes.data, data.nbytes)
    np.negative(data, out=data)
    assert checksum(data.ctypes.data, data.nbytes) != before


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_checksum_sees_two_signs_that_change(kind: type[np.floating]) -> None:
    data = np.random.default_rng(0).standard_normal(5000).astype(kind)
    before = checksum(data.ctypes.data, data.nbytes)
    for other in (1, 2, 3, 100, 1000):
        changed = data.copy()
        changed[[5, 5 + other]] *= -1
        assert checksum(changed.ctypes.data, changed.nbytes) != before, f"{other} apart"


@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
def test_the_checksum_sees_neighbours_that_swap(kind: type[np.generic]) -> None:
    data = content(80_000).view(kind)
    before = checksum(data.ctypes.data, data.nbytes)
    for other in (1, 2, 3, 100):
        changed = data.copy()
        changed[[5, 5 + other]] = changed[[5 + other, 5]]
        assert checksum(changed.ctypes.data, changed.nbytes) != before, f"{other} apart"


@pytest.mark.parametrize("row", [64, 512, 768, 3072, PAGE])
def test_the_checksum_sees_rows_and_pages_that_swap(row: int) -> None:
    data = content(40 * row).reshape(40, row)
    before = checksum(data.ctypes.data, data.nbytes)
    changed = data.copy()
    changed[[3, 17]] = changed[[17, 3]]
    assert checksum(changed.ctypes.data, changed.nbytes) != before


def test_the_checksum_sees_how_long_the_content_is() -> None:
    data = np.zeros(10_000, np.uint8)
    assert len({checksum(data.ctypes.data, nbytes) for nbytes in range(1, 10_000, 37)}) == len(range(1, 10_000, 37))


def test_the_checksum_does_not_care_where_the_content_lies() -> None:
    data = content(10_000)
    elsewhere = np.zeros(10_100, np.uint8)
    for shift in (1, 3, 64):
        elsewhere[shift : shift + 10_000] = data
        assert checksum(elsewhere.ctypes.data + shift, 10_000) == checksum(data.ctypes.data, 10_000)


# ---------------------------------------------------------------------- damage and writes in place


def test_a_file_that_changed_behind_our_back_is_noticed(tier: DiskTier) -> None:
    slot = write(tier, content(50_000))
    damage(tier, slot.offset + 49_999)
    with pytest.raises(SpillCorruptedError, match=r"(?m)changed since they were written; check the disk under .*\.$"):
        read(tier, slot)


def test_a_file_that_changed_between_steps_is_noticed(tier: DiskTier) -> None:
    slot = write(tier, content(50_000))
    damage(tier, slot.offset)
    tier.generation += 1
    with pytest.raises(SpillCorruptedError):
        read(tier, slot)


def test_a_file_that_ends_too_early_is_noticed(tier: DiskTier) -> None:
    slot = write(tier, content(50_000))
    os.ftruncate(tier._spill.descriptor, slot.offset + 10_000)
    with pytest.raises(SpillCorruptedError, match=r"(?m)^The spill file ends 39\.06 KiB too early\.$"):
        read(tier, slot)


def test_what_is_written_through_the_mapping_between_steps_comes_back(tier: DiskTier) -> None:
    data = content(50_000)
    slot = write(tier, data)
    tier.generation += 1
    mapping(tier, slot)[[0, 40_000]] = data[[0, 40_000]] = 7
    tier.generation += 1
    back, unchanged = read(tier, slot)
    assert np.array_equal(back, data)
    assert not unchanged, "the file still holds the old content, so this home is good for nothing any more"


def test_a_damaged_file_is_noticed_even_where_somebody_wrote_through_the_mapping(tier: DiskTier) -> None:
    slot = write(tier, content(50_000))
    tier.generation += 1
    mapping(tier, slot)[0] ^= 1
    damage(tier, slot.offset + 40_000)
    with pytest.raises(SpillCorruptedError):
        read(tier, slot)


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_slot_of_an_earlier_step_is_trusted_if_nobody_wrote_to_its_pages(tier: DiskTier, looked_at: bool) -> None:
    slots = [write(tier, content(50_000, seed)) for seed in range(3)]
    tier.generation += 1
    if looked_at:
        assert np.array_equal(mapping(tier, slots[1]), content(50_000, 1))
    for neighbour in (0, 2):
        mapping(tier, slots[neighbour])[:] = 99
    back, unchanged = read(tier, slots[1])
    assert (np.array_equal(back, content(50_000, 1)), unchanged) == (True, True)
    assert [read(tier, slots[place])[1] for place in (0, 2)] == [False, False]


def test_the_same_content_written_to_a_slot_of_an_earlier_step_is_a_write_all_the_same(tier: DiskTier) -> None:
    slot = write(tier, content(50_000))
    tier.generation += 1
    mapping(tier, slot)[20_000] = content(50_000)[20_000]
    back, unchanged = read(tier, slot)
    assert (np.array_equal(back, content(50_000)), unchanged) == (True, False)


def test_where_the_system_tells_nothing_of_pages_a_slot_of_an_earlier_step_is_not_trusted_any_further(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("spillway.tiers.spill_file.open", refuse, raising=False)
    slot = write(tier, content(50_000))
    tier.generation += 1
    back, unchanged = read(tier, slot)
    assert (np.array_equal(back, content(50_000)), unchanged) == (True, False)


def test_what_was_written_through_the_mapping_does_not_show_in_the_next_use_of_the_slot(tier: DiskTier) -> None:
    first = write(tier, content(50_000))
    mapping(tier, first)[:] = 99
    tier.free(first)
    second = write(tier, content(50_000, seed=1))
    assert second.offset == first.offset
    assert np.array_equal(mapping(tier, second), content(50_000, seed=1))


def test_what_one_slot_gives_back_leaves_writes_in_its_neighbours_alone(tier: DiskTier) -> None:
    slots = [write(tier, content(5000, seed)) for seed in range(3)]
    for slot in slots:
        mapping(tier, slot)[:] = 99
    tier.free(slots[1])
    assert [int(mapping(tier, slots[place]).sum()) for place in (0, 2)] == [99 * 5000] * 2


# ---------------------------------------------------------------------- full and unusable places


def test_a_full_disk_is_one_sentence_and_nothing_has_changed(tier: DiskTier, tmp_path: Path) -> None:
    kept = write(tier, content(50_000))
    used = tier.used
    with files_end_at(100_000), pytest.raises(SpillFullError) as caught:
        write(tier, content(200_000))
    assert str(caught.value) == (
        f"The spill directory {tmp_path} has no room for 195.31 KiB more; free some space there or choose another "
        f"with SpillOptions(directory=...) or --spill-directory."
    )
    assert tier.used == used
    assert np.array_equal(read(tier, kept)[0], content(50_000))


def test_after_a_full_disk_the_same_slot_is_tried_again(tier: DiskTier) -> None:
    write(tier, content(50_000))
    with files_end_at(100_000), pytest.raises(SpillFullError):
        write(tier, content(200_000))
    slot = write(tier, content(200_000))
    assert slot.offset == slot_capacity(50_000)
    assert np.array_equal(read(tier, slot)[0], content(200_000))


def test_a_file_system_that_takes_no_large_files_is_a_full_disk_from_the_first_byte_on(tier: DiskTier) -> None:
    with files_end_at(MiB):
        with pytest.raises(SpillFullError, match="has no room for"):
            write(tier, content(5000))
        assert tier.used == 0
    slot = write(tier, content(5000))
    assert np.array_equal(read(tier, slot)[0], content(5000))
    assert tier.used == slot.capacity


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_directory_that_is_none_is_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(SpillDirectoryError) as caught:
        DiskTier(tmp_path / name)
    assert str(caught.value).startswith(f"The spill directory {tmp_path / name} cannot be used: ")
    assert str(caught.value).endswith("; choose a writable one with SpillOptions(directory=...) or --spill-directory.")


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    # Root may write anywhere but in a file system that has no files of its own.
    directory = Path("/proc") if os.geteuid() == 0 else tmp_path
    tmp_path.chmod(0o500)
    with pytest.raises(SpillDirectoryError, match=rf"(?m)^The spill directory {directory} cannot be used: .*\.$"):
        DiskTier(directory)


# ---------------------------------------------------------------------- the file itself


def test_the_file_has_no_name_and_nobody_else_may_open_it(tier: DiskTier, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(tier._spill.descriptor)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert not os.get_inheritable(tier._spill.descriptor)


def test_without_a_directory_it_lies_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tier = DiskTier()
    assert tier.directory == tmp_path
    tier.close()


def test_closing_gives_the_file_back_and_leaves_what_is_mapped_readable(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    slot = write(tier, content(50_000))
    still_mapped, number = mapping(tier, slot), tier._spill.descriptor
    tier.close()
    assert tier.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert np.array_equal(still_mapped, content(50_000))


def test_closing_twice_and_freeing_after_closing_are_fine(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    slot = write(tier, content(5000))
    tier.close()
    tier.close()
    tier.free(slot)
    assert tier.closed


def test_the_time_of_a_copy_is_guessed_before_and_measured_after_the_first_megabyte(tier: DiskTier) -> None:
    assert tier.seconds_for(1_000_000_000) == 1.0
    write(tier, content(2 * MiB))
    assert tier.seconds_for(0) == 0.0
    assert tier.seconds_for(4 * MiB) == pytest.approx(2 * tier.seconds_for(2 * MiB))
    assert tier.seconds_for(2 * MiB) > 0
