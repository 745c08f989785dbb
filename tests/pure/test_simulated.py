"""The simulated engine: a step under the real controller, on the machine on paper."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from math import inf, sqrt

import pytest

from spillway.errors import UsageError
from spillway.ir import Change, Lane, Step
from spillway.memory.budget import UNLIMITED
from spillway.memory.controller import Controller
from spillway.memory.records import EXACT, TEMPORARY, Recipe, Storage
from spillway.methods import DTR, LRU, Delta, KeepAll, SqrtN, Window
from spillway.methods.base import AbstractPolicy, MemoryView, Move, Proposal
from spillway.simulation import simulated_engine
from spillway.simulation.allocators import ExactAllocator
from spillway.simulation.paper_machine import PaperMachine
from spillway.simulation.simulated_engine import simulate
from spillway.units import MiB
from tests.pure.recorded import DEVICE, LAYER, layers

DEEP = layers(16)
PEAK = DEEP.plain_peak()
DROPS = LRU(short_chain=4, worth=inf)


def test_without_a_budget_a_step_is_its_ops() -> None:
    ran = simulate(DEEP, allowed=UNLIMITED, method=KeepAll(), device=DEVICE)
    assert (ran.status, ran.why, ran.peak_bytes, ran.reserved_bytes) == ("ok", "", PEAK, PEAK)
    assert (ran.seconds, ran.overhead) == (pytest.approx(32e-3), pytest.approx(1.0))
    assert (ran.bytes_out, ran.bytes_in, ran.recomputed_ops, ran.stall_seconds) == (0, 0, 0, 0)
    assert ran.timeline.peak() == PEAK
    assert [span.lane for span in ran.timeline.spans] == [Lane.COMPUTE] * 32


@pytest.mark.parametrize("method", [KeepAll(), LRU(), DROPS, Delta(), Delta.as_published()])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_the_budget_is_kept_by_account_and_by_allocator(method: AbstractPolicy, share: float) -> None:
    allowed = int(PEAK * share)
    ran = simulate(DEEP, allowed=allowed, method=method, device=DEVICE)
    assert ran.status == "ok"
    assert ran.timeline.peak() <= ran.peak_bytes == ran.reserved_bytes <= allowed
    assert ran.seconds == pytest.approx(ran.plain_seconds + ran.recomputed_seconds + ran.stall_seconds)


def test_what_is_too_much_for_one_op_is_out_of_memory() -> None:
    ran = simulate(DEEP, allowed=2 * LAYER, method=LRU(), device=DEVICE)
    assert ran.status == "oom"
    assert "(aten.layer.default) needs 3.00 MiB" in ran.why
    assert ran.timeline.ops == len(DEEP.ops)


def test_recomputing_more_than_it_is_worth_is_thrashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_engine, "THRASH", 0.25)
    ran = simulate(layers(40), allowed=5 * LAYER, method=LRU(short_chain=32, worth=inf), device=DEVICE)
    assert (ran.status, ran.recomputed_ops) == ("thrash", 20)
    assert "20.0 ms may" in ran.why


def test_a_copy_takes_what_the_device_says_and_compute_waits_for_it() -> None:
    ran = simulate(DEEP, allowed=PEAK - LAYER, method=KeepAll(), device=DEVICE, steps=1)
    assert (ran.bytes_out, ran.bytes_in) == (LAYER, LAYER)
    assert ran.stall_seconds == pytest.approx(2 * LAYER / 1e9)
    copies = [span for span in ran.timeline.spans if span.lane is not Lane.COMPUTE]
    assert [(span.lane, span.stalled) for span in copies] == [
        (Lane.COPY_OUT, pytest.approx(LAYER / 1e9)), (Lane.COPY_IN, pytest.approx(LAYER / 1e9)),
    ]  # fmt: skip


class Asks(AbstractPolicy):
    """Moves the stalest, and asks three things about it before."""

    name = "asks"

    def relieve(self, view: MemoryView, needed: int) -> Generator[Proposal, bool, None]:
        for storage in view.candidates():
            view.transfer_seconds(storage)
            view.own_seconds(storage)
            view.recompute_seconds(storage)
            yield Move(storage)


def test_watching_and_handling_take_what_the_device_says_unless_the_step_fits() -> None:
    device = replace(DEVICE, watch_seconds=1e-4, handling_seconds=1e-3, question_seconds=1.0)
    ran = simulate(DEEP, allowed=PEAK - LAYER, method=KeepAll(), device=device, steps=1)
    assert (ran.moves, ran.drops, ran.recomputed_ops) == (1, 0, 0)
    assert ran.python_seconds == pytest.approx(32e-4 + 2e-3)  # 32 ops; one storage left and came back
    assert ran.seconds == pytest.approx(ran.plain_seconds + ran.stall_seconds + ran.python_seconds)
    asking = simulate(DEEP, allowed=PEAK - LAYER, method=Asks(), device=device, steps=1)
    assert asking.python_seconds == pytest.approx(32e-4 + 2e-3 + 3)  # three questions about the one that left
    device = replace(device, question_seconds=0.0)
    dropped = simulate(DEEP, allowed=PEAK - LAYER, method=DROPS, device=device, steps=2)
    assert dropped.python_seconds == pytest.approx(32e-4 + 2e-3)  # one left, one op ran again; the last step counts
    ending = simulate(DEEP, allowed=int(PEAK * 0.85), method=DTR("largest"), device=device)
    assert ending.status == "ok"
    events = ending.drops + ending.moves + ending.recomputed_ops + ending.bytes_in // LAYER
    assert ending.python_seconds == pytest.approx(32e-4 + events * 1e-3)  # the end of the step too
    planned = simulate(DEEP, allowed=PEAK, method=SqrtN(), device=device)
    assert planned.python_seconds == pytest.approx(32e-4 + (planned.drops + planned.recomputed_ops) * 1e-3)
    fits = simulate(DEEP, allowed=PEAK, method=KeepAll(), device=device)
    assert (fits.python_seconds, fits.overhead) == (0.0, pytest.approx(1.0))


def test_a_copy_beside_ops_costs_more_of_python() -> None:
    device = replace(DEVICE, beside_seconds=1e-3)
    planned = simulate(DEEP, allowed=PEAK // 2, method=Window(), device=device)
    copied = planned.bytes_out_beside // LAYER + planned.bytes_in_beside // LAYER
    assert copied > 4
    assert planned.python_seconds == pytest.approx(copied * 1e-3)
    asked = simulate(DEEP, allowed=PEAK // 2, method=LRU(short_chain=0), device=device)
    assert asked.python_seconds == 0


def test_python_takes_longer_around_a_long_op_than_around_a_short_one() -> None:
    """`cold_root` times the square root of its seconds, of all that is done around it."""
    roots = sum(sqrt(op.seconds or 0.0) for op in DEEP.ops)
    device = replace(DEVICE, watch_seconds=1e-4, cold_root=500.0)
    ran = simulate(DEEP, allowed=PEAK - LAYER, method=KeepAll(), device=device, steps=1)
    assert ran.python_seconds == pytest.approx(1e-4 * (len(DEEP.ops) + 500 * roots))
    handling = replace(DEVICE, handling_seconds=1e-3)
    quick = simulate(DEEP, allowed=PEAK // 2, method=LRU(), device=handling)
    cold = simulate(DEEP, allowed=PEAK // 2, method=LRU(), device=replace(handling, cold_root=500.0))
    assert cold.python_seconds > 1.1 * quick.python_seconds > 0


def test_the_disk_is_a_lane_of_its_own_and_as_slow_as_the_device_says() -> None:
    ran = simulate(DEEP, allowed=PEAK - LAYER, method=KeepAll(), device=DEVICE, steps=1, tier="disk")
    assert ran.stall_seconds == pytest.approx(2 * LAYER / 5e8)
    assert [span.lane for span in ran.timeline.spans if span.lane is Lane.DISK] == [Lane.DISK] * 2


def test_copies_that_begin_early_are_hidden() -> None:
    plain = simulate(DEEP, allowed=PEAK // 2, method=LRU(short_chain=0), device=DEVICE)
    early = simulate(DEEP, allowed=PEAK // 2, method=Delta(), device=DEVICE)
    assert plain.hidden_seconds == 0
    assert early.hidden_seconds > 0
    assert early.seconds < plain.seconds


def test_the_same_simulation_twice_is_the_same() -> None:
    one, other = (simulate(DEEP, allowed=PEAK // 2, method=Delta(), device=DEVICE) for _ in range(2))
    assert one == other


def test_what_is_dropped_is_recomputed_and_takes_no_copy() -> None:
    ran = simulate(DEEP, allowed=PEAK - LAYER, method=DROPS, device=DEVICE, steps=1)
    assert (ran.bytes_out, ran.recomputed_ops, ran.recomputed_seconds) == (0, 1, pytest.approx(1e-3))
    changes = [event.change for event in ran.timeline.events if event.change not in (Change.CREATE, Change.DIE)]
    assert changes == [Change.DROP, Change.RECOMPUTE]


def test_what_may_not_be_replayed_is_moved() -> None:
    ran = simulate(layers(16, replayable=False), allowed=PEAK // 2, method=DROPS, device=DEVICE)
    assert (ran.status, ran.drops, ran.refusals) == ("ok", 0, {})
    assert ran.bytes_out > 0


def test_more_than_the_device_has_is_out_of_memory() -> None:
    ran = simulate(DEEP, allowed=UNLIMITED, method=KeepAll(), device=DEVICE, limit=PEAK - 1)
    assert ran.status == "oom"
    assert "does not fit in the" in ran.why


def test_a_step_without_seconds_is_refused() -> None:
    step = Step(storages=(), values=(), ops=())
    assert simulate(step, allowed=1, method=KeepAll(), device=DEVICE).overhead == 1.0
    with pytest.raises(UsageError, match=r"op 0 \(aten.layer.default\) has no seconds"):
        simulate(layers(1, seconds=None), allowed=1, method=KeepAll(), device=DEVICE)


@pytest.mark.parametrize("allocator", ["exact", "caching", "chunks"])
def test_a_peak_can_be_read_from_every_allocator_model(allocator: str) -> None:
    step = layers(30, nbytes=LAYER + 1)
    ran = simulate(step, allowed=step.plain_peak() // 2, method=LRU(), device=DEVICE, allocator=allocator)
    plain = simulate(step, allowed=UNLIMITED, method=KeepAll(), device=DEVICE, allocator=allocator)
    expected = {"exact": step.plain_peak(), "caching": 40 * MiB, "chunks": 32 * 2 * MiB}
    assert plain.reserved_bytes == expected[allocator]
    assert ran.peak_bytes <= ran.reserved_bytes < plain.reserved_bytes


def test_a_temporary_of_a_replay_that_was_moved_to_make_room_is_still_there() -> None:
    machine = PaperMachine(DEVICE, ExactAllocator())
    controller = Controller(machine, KeepAll(), UNLIMITED)
    died: list[Storage] = []
    machine.died = died.append
    value = controller.adopt(1, LAYER, machine.create(LAYER)).value
    assert value is not None
    recipe = Recipe(1, "aten.layer.default", [], None, 1e-3, EXACT, (value,), (), LAYER)
    (sheet,) = machine.run(recipe, [])
    temporary = controller.adopt(TEMPORARY, LAYER, sheet, temporary=True)
    assert controller.grant(Move(temporary))
    assert died == []
    assert temporary.value is not None
    controller.page_in(temporary.value, "aten.layer.default")
    assert len(machine.run(recipe, [temporary])) == 1
