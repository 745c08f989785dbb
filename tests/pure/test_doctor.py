"""The doctor reads what a system says of itself, names what stands in the way, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from spillway.doctor import Finding, on_spill, on_system
from spillway.errors import SpillError, SpillFullError
from spillway.internals import machine_memory as memory
from spillway.internals.machine_memory import container_free, container_limit, usable_memory
from spillway.tiers import speed
from spillway.units import GiB, MiB, TiB
from tests.pure.test_disk_tier import files_end_at


def system(root: Path, **files: str) -> Path:
    """A root with files whose names have `__` for a slash."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MEMINFO = (
    "MemTotal:       16777216 kB\nMemFree:         1024 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
)


def whats(finding: Finding) -> list[str]:
    return [problem.what for problem in finding.problems]


def test_memory_without_a_limit_is_what_the_machine_has(tmp_path: Path) -> None:
    finding = on_system.memory(system(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/user.slice\n"))
    assert finding.facts == {
        "physical": 16 * GiB,
        "available": 8 * GiB,
        "container_limit": None,
        "container_free": None,
    }
    assert finding.sentence == (
        "16.00 GiB of RAM, 8.00 GiB available now: a budget in per cent is one of 16.00 GiB."
    )  # fmt: skip
    assert finding.problems == []


def test_in_a_container_a_budget_in_per_cent_is_one_of_its_memory(tmp_path: Path) -> None:
    root = system(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/a/b\n")
    for group, limit in (("a", str(4 * GiB)), ("a/b", "max")):  # the parent's limit holds as well
        (root / "sys/fs/cgroup" / group).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / group / "memory.max").write_text(f"{limit}\n")
    finding = on_system.memory(root)
    assert finding.facts["container_limit"] == 4 * GiB
    assert finding.problems == []
    assert finding.sentence.endswith("a budget in per cent is one of 4.00 GiB.")


@pytest.mark.parametrize(("limit", "expected"), [(str(2 * GiB), 2 * GiB), (str(0x7FFFFFFFFFFFF000), None)])
def test_limits_of_the_older_control_groups_are_read(tmp_path: Path, limit: str, expected: int | None) -> None:
    root = system(tmp_path, proc__self__cgroup="12:cpu,cpuacct:/x\n7:memory:/docker/abc\n0::/x\n")
    # Within a container the group of the outside is mounted as the root.
    (root / "sys/fs/cgroup/memory").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(limit)
    assert container_limit(root) == expected


@pytest.mark.parametrize(("limit", "expected"), [(str(4 * GiB), 4 * GiB), (str(64 * GiB), 16 * GiB), ("max", 16 * GiB)])
def test_what_a_process_may_use_is_the_machines_memory_or_what_its_container_allows(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: 16 * GiB)
    root = system(tmp_path, proc__self__cgroup="0::/a\n")
    (root / "sys/fs/cgroup/a").mkdir(parents=True)
    (root / "sys/fs/cgroup/a/memory.max").write_text(f"{limit}\n")
    assert usable_memory(root) == expected


def test_what_is_left_below_a_limit_leaves_out_file_caches(tmp_path: Path) -> None:
    root = system(tmp_path, proc__self__cgroup="0::/a\n")
    folder = root / "sys/fs/cgroup/a"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{4 * GiB}\n")
    assert container_free(root) is None, "nobody tells what is used"
    (folder / "memory.current").write_text(f"{3 * GiB}\n")
    (folder / "memory.stat").write_text(f"anon {2 * GiB}\ninactive_file {GiB // 2}\n")
    assert container_free(root) == GiB + GiB // 2


def test_a_system_that_says_nothing_has_no_limit(tmp_path: Path) -> None:
    assert container_limit(tmp_path) is None
    assert on_system.huge_pages(tmp_path).facts == {"mode": None, "middle_sizes": {}}
    assert on_system.huge_pages(tmp_path).problems == []
    assert on_spill.file_system(tmp_path, tmp_path / "mountinfo") == ""


def test_too_few_addresses_for_dropped_storages_are_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (TiB, TiB))
    (problem,) = [problem for problem in on_system.memory().problems if problem.fatal]
    assert "A process may use 1.00 TiB of addresses" in problem.what
    assert problem.fix == "Lift the limit with `ulimit -v unlimited`."


def test_an_allocator_in_the_place_of_the_c_librarys_is_a_problem() -> None:
    finding = on_system.allocator({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2", "MALLOC_ARENA_MAX": "2"})
    assert finding.facts["settings"] == {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2", "MALLOC_ARENA_MAX": "2"}
    assert whats(finding)[0].startswith("LD_PRELOAD puts jemalloc in the allocator's place")
    plain = on_system.allocator({})
    assert (plain.problems, plain.facts["settings"]) == ([], {})


@pytest.mark.parametrize(
    ("text", "mode", "word"),
    [
        ("always [madvise] never", "madvise", "Spillway does"),
        ("[always] madvise never", "always", "Always"),
        ("always madvise [never]", "never", "small pages"),
    ],
)
def test_huge_pages_are_as_the_system_says(tmp_path: Path, text: str, mode: str, word: str) -> None:
    finding = on_system.huge_pages(system(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=f"{text}\n"))
    assert finding.facts == {"mode": mode, "middle_sizes": {}}
    assert word in finding.sentence


@pytest.mark.parametrize(
    ("top", "middle", "fix"),
    [
        ("madvise", "never", "hugepages-64kB"),
        ("madvise", "madvise", "hugepages-64kB"),  # nobody asks for them
        ("never", "inherit", "hugepages-64kB"),
        ("always", "inherit", ""),
        ("never", "always", ""),
        ("always", "never", ""),  # larger ones then
    ],
)
def test_pages_of_a_middle_size_are_recommended_where_nobody_gets_them(
    tmp_path: Path, top: str, middle: str, fix: str
) -> None:
    folder = system(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=f"[{top}]\n")
    for size, chosen in ((64, middle), (128, "never")):
        place = folder / f"sys/kernel/mm/transparent_hugepage/hugepages-{size}kB"
        place.mkdir()
        (place / "enabled").write_text(f"[{chosen}]\n")
    finding = on_system.huge_pages(folder)
    assert finding.facts["middle_sizes"] == {"64 KiB": top if middle == "inherit" else middle, "128 KiB": "never"}
    assert [fix in problem.fix for problem in finding.problems] == [True] * bool(fix)


def test_the_file_system_is_that_of_the_deepest_and_latest_mount(tmp_path: Path) -> None:
    place = tmp_path / "a b" / "c"
    place.mkdir(parents=True)
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    lines = [
        f"25 1 0:2 / {spaced} rw shared:1 - xfs /dev/b rw",
        "20 1 0:1 / / rw - ext4 /dev/a rw",
        f"26 1 0:3 / {spaced}/c rw - ramfs none rw",
        f"27 1 0:4 / {spaced}/c rw - tmpfs none rw",
        f"28 1 0:5 / {spaced}/cc rw - nfs host:/x rw",
    ]
    mounts.write_text("\n".join(lines) + "\n")
    assert [on_spill.file_system(path, mounts) for path in (place, tmp_path / "a b", tmp_path)] == [
        "tmpfs", "xfs", "ext4"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "free", "said"),
    [
        ("tmpfs", 9 * GiB, ["is a tmpfs, which is RAM itself: what moves there frees nothing."]),
        ("nfs4", 9 * GiB, ["is on a network (nfs4): copies will be slow."]),
        ("ext4", 3 * MiB, ["has 3.00 MiB left; what is away at once has to fit."]),
        ("ext4", 9 * GiB, []),
    ],
)
def test_a_spill_directory_that_does_not_serve_is_told_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, free: int, said: list[str]
) -> None:
    monkeypatch.setattr(on_spill, "file_system", lambda directory: kind)
    monkeypatch.setattr(on_spill.shutil, "disk_usage", lambda directory: Usage(free))
    finding = on_spill.spill_directory(tmp_path)
    assert whats(finding) == [f"{tmp_path} {what}" for what in said]
    assert all("SpillOptions(directory=...)" in problem.fix and not problem.fatal for problem in finding.problems)
    assert (finding.facts["file_system"], finding.facts["free"]) == (kind, free)
    assert os.listdir(tmp_path) == []


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_a_spill_directory_that_is_not_there_is_fatal(tmp_path: Path) -> None:
    finding = on_spill.spill_directory(tmp_path / "missing")
    (problem,) = finding.problems
    assert problem.fatal
    assert problem.what == f"{tmp_path / 'missing'}: No such file or directory."
    assert not finding.facts["usable"]


def test_a_measurement_has_both_ways_and_leaves_nothing_behind(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for measure in (speed.tier_speed, speed.disk_speed):
        found = measure(tmp_path, 2 * speed.PIECE)
        assert found.out > 0
        assert found.back > 0
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_disk_without_room_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with files_end_at(speed.PIECE // 2):
        for measure in (speed.tier_speed, speed.disk_speed):
            with pytest.raises(SpillFullError, match="no room for"):
                measure(tmp_path, 2 * speed.PIECE)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_slow_disk_is_measured_with_what_it_takes_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    whole = speed.write_all
    monkeypatch.setattr(speed, "write_all", lambda file, at, piece: written.append(1) or whole(file, at, piece))
    monkeypatch.setattr(speed, "PATIENCE", 0.0)
    assert speed.disk_speed(tmp_path, 100 * speed.PIECE).out > 0
    assert len(written) == 1


def test_a_speed_that_cannot_be_measured_is_a_problem_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_spill.shutil, "disk_usage", lambda directory: Usage(2 * on_spill.SAMPLE - 1))
    finding = on_spill.speed(tmp_path)
    assert finding.facts == {"measured": False}
    assert whats(finding) == ["There is no room for the 128.00 MiB that a measurement writes."]


def test_direct_io_is_tried_with_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def refused(file: int, content: object, offset: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", refused)
    assert speed.has_direct_io(tmp_path) is False
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.delattr(os, "O_DIRECT")
    assert speed.has_direct_io(tmp_path) is False
    with pytest.raises(SpillError, match="cannot be used"):
        speed.has_direct_io(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


def test_what_was_found_survives_json(tmp_path: Path) -> None:
    finding = on_spill.spill_directory(tmp_path / "missing")
    document = finding.to_json()
    assert document["problems"][0]["fatal"] is True
    assert document["facts"] == {"directory": str(tmp_path / "missing"), "usable": False}
