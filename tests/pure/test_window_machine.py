"""The machine of the window paper's table: when copies run, what allocators are asked for, and what they can serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from papers.out_of_core_window.least import bytes_in, least_bytes_in
from papers.out_of_core_window.nnabla import BucketAllocator, Memory, OneRegion, Script, WholeChunks
from spillway.costs import Device
from spillway.costs.device_files import read_device
from spillway.errors import DeviceFullError
from spillway.ir import Gap, Host, Plan, Step
from spillway.methods import Problem, Window
from spillway.simulation.simulated_engine import simulate
from spillway.units import KiB, MiB
from tests.pure.linear_graphs import linear_step
from tests.pure.recorded import DEVICE
from tests.pure.training_steps import training_step

UNIT = 1 << 20
FOLDER: Final = Path(__file__).parents[2] / "papers" / "out_of_core_window"


def link(milliseconds: float, *, duplex: bool = False) -> Device:
    """A unit takes so long each way. Ops of linear steps take a millisecond."""
    rate = UNIT / (milliseconds * 1e-3)
    return replace(DEVICE, out_per_second=rate, in_per_second=rate, copy_seconds=0.0, duplex=duplex)


def plan(step: Step, *gaps: tuple[int, int, int], units: int = 99) -> Plan:
    homes = tuple(Gap(value=value, start=start, end=end, home=Host()) for value, start, end in gaps)
    return Plan(step=step.digest(), allowed=units * UNIT, projected=units * UNIT, gaps=homes)


def milliseconds(script: Script, device: Device) -> float:
    return round(1e3 * script.seconds(device), 6)


# The chain of four layers has nine ops; its input, value 0, is there before and after, and op 8 reads it last.


def test_a_step_takes_its_ops_and_the_copies_that_they_wait_for() -> None:
    step = linear_step(4)
    script = Script(step, plan(step))
    # Nothing is gone: the input comes in before op 0, and host memory has it already when the step ends.
    assert (script.bytes_in, script.bytes_out) == (UNIT, 0)
    assert milliseconds(script, link(2)) == 11
    # Value 1, last used by op 1, leaves then and is waited for before op 4; it comes in before op 6, for op 7.
    moved = Script(step, plan(step, (1, 4, 6)))
    assert (moved.bytes_in, moved.bytes_out) == (2 * UNIT, UNIT)
    # Op 1 has ended at 1 + 2, so the copy out at 5 with a link of 2; op 4 would begin at 5. In from 7 to 8 for op 7.
    assert milliseconds(moved, link(1)) == 10
    # With a link of 3: op 0 at 3, op 1 done at 5, the copy at 8, when op 4 begins; in from 10 to 13, and two more ops.
    assert milliseconds(moved, link(3)) == 15


def test_both_directions_share_one_lane_unless_the_device_is_duplex() -> None:
    step = linear_step(4)
    # Ops 0 to 2 end at 7, when the copy out of 2 begins and the copy in of 0. With two lanes both are done at 11, when
    # op 5 begins, and 2 is back at 16 for op 6. With one lane 0 is there at 15, and 2 at 19.
    script = Script(step, plan(step, (0, 2, 3), (2, 5, 6)))
    assert milliseconds(script, link(4, duplex=True)) == 19
    assert milliseconds(script, link(4)) == 22


def test_what_is_precleared_is_freed_without_a_copy() -> None:
    step = linear_step(4)
    kept = replace(step, storages=tuple(replace(one, alive_until=9) if one.id == 5 else one for one in step.storages))
    script = Script(kept, plan(kept, (5, 6, 9)))
    assert script.bytes_out == 0
    assert list(script.memory()).index(Memory(5, False)) < list(script.memory()).index(Memory(7, True))


def test_the_allocator_is_asked_for_what_comes_in_and_the_oldest_copy_out_makes_room() -> None:
    step = linear_step(4)
    given = Problem(step=step, allowed=4 * UNIT, device=DEVICE)
    asked = list(Script(step, Window.as_published(smallest=0).plan(given)).memory())
    there, most = set[int](), 0
    for storage, taken in asked:
        assert (storage in there) is not taken
        (there.add if taken else there.remove)(storage)
        most = max(most, len(there))
    assert (len(there), most) == (0, 4)


def test_it_agrees_with_the_simulated_engine_on_what_both_do_alike() -> None:
    step = training_step(11, layers=12, scale=1 << 20)
    given = Problem(step=step, allowed=step.plain_peak() // 2, device=DEVICE)
    device = replace(link(1), duplex=True)
    method = Window(issue="at op")
    script = Script(step, method.plan(given))
    ran = simulate(step, allowed=given.allowed, method=method, device=device)
    assert script.bytes_in >= ran.bytes_in > 0  # what stays from step to step comes in too
    assert script.seconds(device) == pytest.approx(ran.seconds, rel=0.02)


# ---------------------------------------------------------------------- allocators


def test_the_bucket_allocator_splits_joins_and_gives_back_what_is_whole() -> None:
    allocator = BucketAllocator(8 * MiB)
    first = allocator.allocate(4 * MiB)
    allocator.free(first)
    halves = [allocator.allocate(2 * MiB - 128 * KiB) for _ in range(2)]
    assert allocator.reserved == 4 * MiB  # both lie in the first piece
    allocator.free(halves[0])
    allocator.allocate(4 * MiB)
    with pytest.raises(DeviceFullError, match="in pieces that do not fit"):
        allocator.allocate(4 * MiB)
    allocator.free(halves[1])
    allocator.allocate(3 * MiB)  # the halves are one again
    assert allocator.reserved == 8 * MiB


def test_requests_are_rounded_and_small_ones_have_a_pool_of_their_own() -> None:
    allocator = BucketAllocator(8 * MiB)
    allocator.allocate(1)
    allocator.allocate(MiB + 1)
    assert allocator.reserved == 512 + MiB + 128 * KiB


def test_whole_chunks_lose_less_than_a_chunk_for_every_array() -> None:
    chunks = WholeChunks(10 * MiB, 2 * MiB)
    tokens = [chunks.allocate(nbytes) for nbytes in (1, 3 * MiB, 2 * MiB)]
    assert (chunks.reserved, chunks.most_arrays) == (8 * MiB, 3)
    assert chunks.most_lost == 3 * MiB - 1 < 3 * 2 * MiB
    with pytest.raises(DeviceFullError):
        chunks.allocate(2 * MiB + 1)
    chunks.free(tokens[1])
    chunks.allocate(5 * MiB)
    assert chunks.reserved == 10 * MiB


# ---------------------------------------------------------------------- the device


def test_the_device_file_has_the_link_that_was_fitted() -> None:
    device, _ = read_device(FOLDER / "v100-window-paper.json")
    rows = json.loads((FOLDER / "results" / "window_table1.json").read_text("utf-8"))["rows"]
    (link_row,) = [row for row in rows if row["method"] == "link of the V100, fitted"]
    assert link_row["note"] == f"{device.out_per_second / 1e9:.2f} GB/s, one lane"
    assert (device.in_per_second, device.duplex) == (device.out_per_second, False)


# ---------------------------------------------------------------------- the least bytes


def test_the_least_bytes_are_those_of_the_best_choice_of_gaps() -> None:
    pytest.importorskip("scipy")
    step = linear_step(4)
    # Six units are needed during op 4. Under five, one of the values has to be gone then, and any of them comes back.
    assert least_bytes_in(step, 6 * UNIT) == 0
    assert least_bytes_in(step, 5 * UNIT) == UNIT
    # Half a unit less, and half of another value does.
    assert least_bytes_in(step, 9 * UNIT // 2) == 3 * UNIT // 2
    for units in (3, 4, 5):
        made = Window().plan(Problem(step=step, allowed=units * UNIT, device=DEVICE))
        assert bytes_in(step, made.gaps) == least_bytes_in(step, units * UNIT) == (6 - units) * UNIT
    with pytest.raises(ArithmeticError, match="no optimum"):
        least_bytes_in(step, 2 * UNIT)


def test_a_region_is_split_where_twice_as_much_is_there_or_much_would_be_left() -> None:
    region = OneRegion(400 * MiB)
    first = region.allocate(240 * MiB)  # 160 are left: more than 128
    second = region.allocate(96 * MiB)  # all of these 160: less than twice, and 64 would be left
    with pytest.raises(DeviceFullError):
        region.allocate(MiB)
    region.free(first)
    third = region.allocate(100 * MiB)  # 240 are more than twice
    assert region.allocated == 196 * MiB
    region.free(second)
    region.free(third)
    region.allocate(400 * MiB)  # everything is one again


def test_what_is_copied_out_at_once_is_freed_right_after_its_last_use() -> None:
    step = linear_step(4)
    moved = plan(step, (1, 4, 6))
    for at_once, before in ((False, 4), (True, 2)):  # op 1 reads value 1 last
        asked = list(Script(step, moved, at_once=at_once).memory())
        assert asked.index(Memory(1, False)) < asked.index(Memory(before + 1, True))
        assert asked.index(Memory(1, False)) > asked.index(Memory(before, True))
