"""Random mixtures of all lossless actions, on the engine and in sessions: the same bits, and the budget kept.

`benchmarks/block_mixtures.py` runs thousands of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, final

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import spillway
from spillway.engines.blocks.block_engine import BlockEngine, HeldCall
from spillway.internals.private import bytes_over
from spillway.methods import Action
from spillway.methods.by_block import Decision, Forecast, Phase
from spillway.session.watch import Pass, StepWatch
from spillway.tiers.transfer import DiskLanes, SpilledStorage, Transfer
from tests.cpu.block_cases import CASES
from tests.cpu.block_mixtures import IN_SESSIONS, Course, Drawn, in_a_session, on_the_engine
from tests.cpu.test_block_engine import FLOATS, batch, engine_of, gradients, same, sines
from tests.cpu.test_block_host import late, plain_gradients

SEEN: Final[Counter[str]] = Counter()
"""What has happened in the mixtures of this file."""
SESSIONS: Final = (0, 2, 4, 5)
"""Seeds of a transformer, batch norm, shared inputs and a cache."""

pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")


@pytest.mark.long(but=6)
@pytest.mark.parametrize("seed", range(len(CASES)), ids=list(CASES))
def test_a_mixture_ends_as_plain_steps_do_whatever_is_given_up_on_the_way(seed: int) -> None:
    verdict = on_the_engine(seed)
    SEEN.update(verdict.counts)
    assert verdict.wrong == ""


@pytest.mark.long
@pytest.mark.parametrize("seed", SESSIONS, ids=[list(IN_SESSIONS)[seed] for seed in SESSIONS])
def test_a_session_keeps_the_budget_whatever_the_plan_mixes(seed: int) -> None:
    verdict = in_a_session(seed)
    SEEN.update(verdict.counts)
    assert (verdict.wrong, verdict.refused) == ("", ""), "recomputing every block keeps this budget"
    assert verdict.counts["planned"] > 0


def test_everything_has_happened_in_these() -> None:
    if SEEN["planned"] and SEEN["recomputed"]:
        wanted = ("revoked", "forgotten", "input sent late", "came in ahead", "moved")
        assert [what for what in wanted if not SEEN[what]] == []


def test_bytes_that_are_lost_when_a_copy_in_is_forgotten_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the first test."""

    def lose(source: SpilledStorage) -> None:
        if source._transfer.arrival is not None:
            (target,), reading = source._transfer.arrival
            reading.result()
            bytes_over(target).zero_()

    monkeypatch.setattr(SpilledStorage, "forget_arrival", lose)
    assert any(on_the_engine(seed).wrong for seed in range(len(CASES)))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["nothing gives way", "copies in look for no room"])
def test_a_session_without_a_part_of_the_account_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted faults of the second test."""
    start_in = HeldCall.start_in
    if fault == "nothing gives way":
        monkeypatch.setattr(StepWatch, "_give_way", lambda watch, over, running: None)
    else:
        monkeypatch.setattr(HeldCall, "start_in", lambda call, most=None: start_in(call))
    seeds = range(0, 10 * len(IN_SESSIONS), len(IN_SESSIONS))  # of one model
    assert any(in_a_session(seed).refused for seed in seeds)


def waiting_calls(model: Any, engine: BlockEngine) -> tuple[Tensor, list[HeldCall]]:
    """A loss, and its calls, whose bytes are away."""
    loss = model(batch()).square().sum()
    engine.settle()
    return loss, [engine.call(number) for number in range(engine.begun)]


def test_a_forgotten_copy_in_gives_its_memory_back_and_can_be_read_again() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=3)
    plain = gradients(model, model(batch()).square().sum())
    engine.read_ahead = 0
    seen: list[tuple[int, ...]] = []

    def look(calls: list[HeldCall]) -> None:
        begun = calls[0].start_in()
        arrived = [source._transfer.arrival[0][0] for source in engine._calls["blocks.0", 1]().waiting()]
        weak: Any = StorageWeakRef
        there = [weak(one) for one in arrived]
        del arrived
        before = engine.arrived_bytes
        freed = calls[0].forget_arrivals()
        seen.append((begun, before, freed, engine.arrived_bytes, sum(not one.expired() for one in there)))
        calls[0].start_in(FLOATS)
        seen.append((engine.arrived_bytes, *calls[0].there))

    hidden = model.blocks[0](model.embed(batch()))
    hidden = model.blocks[2](model.blocks[1](hidden))
    loss = hidden.square().sum()
    engine.settle()
    calls = [engine.call(number) for number in range(3, 6)]
    hidden.register_hook(lambda _: look(calls))
    assert same(plain, gradients(model, loss))
    assert seen == [(3 * FLOATS, 3 * FLOATS, 3 * FLOATS, 0, 0), (FLOATS, FLOATS, False)]


def test_on_a_device_compute_waits_for_the_copy_in_whose_memory_it_wants() -> None:
    model, engine = engine_of(sines, Action.OFFLOAD, count=3)
    streams = late(engine, lag=1 << 30)
    plain = plain_gradients(model, engine)
    engine.read_ahead = 0
    hidden = model.blocks[2](model.blocks[1](model.blocks[0](model.embed(batch()))))
    loss = hidden.square().sum()
    engine.settle()
    first = engine.call(engine.begun - 3)
    freed: list[int] = []
    hidden.register_hook(lambda _: freed.append(first.start_in() and first.forget_arrivals()))
    waits = streams.waits
    assert same(plain, gradients(model, loss))
    assert freed == [3 * FLOATS]
    assert streams.waits >= waits + 3


def test_an_input_is_sent_late_only_where_nobody_else_holds_it() -> None:
    actions = {("blocks.0", 0): Action.OFFLOAD, ("blocks.1", 0): Action.RECOMPUTE, ("blocks.3", 0): Action.RECOMPUTE}
    model, engine = engine_of(sines, Action.KEEP, count=4)
    plain = gradients(model, model(batch()).square().sum())
    engine.actions = {(block, call + 1): action for (block, call), action in actions.items()} | actions
    held: list[Tensor] = []
    model.blocks[3].register_forward_pre_hook(lambda _, args: held.append(args[0]))
    for _ in range(2):  # in the first, arguments are copied: nobody knows yet whether they are written to
        loss = model(batch()).square().sum()
        calls = [engine.call(number) for number in range(4)]
        sent = [call.send_input() for call in calls]
        engine.settle()
        assert same(plain, gradients(model, loss))
    assert sent == [0, FLOATS, 0, 0], "block 0 has sent what it saved, 2 keeps it, and what 3 was called with is held"


@final
@dataclass
class FakeCall:
    """Gives way by so many bytes, each of them once."""

    name: str
    told: list[str]
    holds: int = 0
    ahead: int = 0
    input: int = 0

    def _gives(self, what: str, nbytes: int) -> int:
        if nbytes:
            self.told.append(f"{what} {self.name}")
        return nbytes

    def forget_arrivals(self) -> int:
        nbytes, self.ahead = self.ahead, 0
        return self._gives("forget", nbytes)

    def revoke(self) -> int:
        return self._gives("revoke", self.holds)

    def send_input(self) -> int:
        nbytes, self.input = self.input, 0
        return self._gives("send", nbytes)


@final
@dataclass
class FakeEngine:
    told: list[str]
    leaving_bytes: int = 0
    spill_full: bool = False
    waited: int = 0

    def wait_out(self, nbytes: int) -> None:
        self.waited = min(nbytes, self.leaving_bytes)
        self.leaving_bytes -= self.waited
        self.told.append(f"wait for {nbytes}")

    def settle(self) -> None:
        self.told.append("settle")


@final
@dataclass
class Pressed:
    """A watch in whose step so many bytes are too many: three calls hold something, one of them is running."""

    seconds: tuple[float, ...] = (1.0, 1.0, 1.0)
    leaving: int = 0
    told: list[str] = field(default_factory=list)

    def give(self, over: int) -> list[str]:
        engine = FakeEngine(self.told, self.leaving)
        calls = [FakeCall(str(number), self.told, holds=10, ahead=5, input=2) for number in range(3)]
        forecast = Forecast(
            saved=(10, 10, 10), seconds=self.seconds, turn=0, rest=0, working=(0, 0, 0), gradients=(0, 0, 0)
        )
        plan: Any = type("Kept", (), {"action": lambda plan, number: Action.KEEP})()
        one = Pass(Decision(Phase.PLANNED, plan, False), forecast, (1,), 0, 0, set())
        one.ended.update(enumerate(calls))  # type: ignore[arg-type]
        one.holds.update({number: call.holds for number, call in enumerate(calls)})
        one.revocable.update(list(enumerate(calls))[:2])  # type: ignore[arg-type]
        watch: Any = StepWatch.__new__(StepWatch)
        watch.passes, watch._engine, watch._taken = [one], engine, lambda: 0
        watch._budget = type("Account", (), {"short": lambda account, needed: over - engine.waited - forgotten()})()

        def forgotten() -> int:
            return sum(5 for call in calls if not call.ahead)

        watch._give_way(over, calls[2])
        return self.told


def test_what_gives_way_first_and_how_far() -> None:
    assert Pressed(leaving=7).give(7) == ["wait for 7"]
    assert Pressed(leaving=7).give(8) == ["forget 0", "wait for 3"]
    assert Pressed(leaving=0).give(10) == ["forget 0", "forget 1"]
    assert Pressed(leaving=0).give(11) == ["forget 0", "forget 1", "revoke 0"]
    assert Pressed(leaving=0).give(21) == ["forget 0", "forget 1", "revoke 0", "revoke 1"]
    assert Pressed(leaving=0).give(31) == [
        "forget 0", "forget 1", "revoke 0", "revoke 1", "send 0", "settle"
    ]  # fmt: skip


def test_fewest_seconds_per_byte_are_revoked_first_and_among_alike_ones_the_earliest() -> None:
    assert Pressed(seconds=(1.05, 1.0, 0.1)).give(11)[2:] == ["revoke 0"]
    assert Pressed(seconds=(1.5, 1.0, 0.1)).give(11)[2:] == ["revoke 1"]


def begun_at(budget: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, int]], int]:
    """When copies in begin of a step that offloads every block, each due two blocks before its own: pairs of the block
    that goes backward and the block whose copy begins; and the step's peak."""
    found: list[tuple[int, int]] = []
    at: list[int] = []
    reaches, start_in = StepWatch._backward_reaches, HeldCall.start_in

    def reached(watch: StepWatch, of: int, number: int) -> None:
        at[:] = [number]
        if budget == 1 << 30:
            watch._engine.settle()  # what is still on its way out need not come in
        reaches(watch, of, number)

    def begins(call: HeldCall, most: int | None = None) -> int:
        nbytes = start_in(call, most)
        if nbytes:
            found.append((at[0], int(call.report.block.split(".")[-1])))
        return nbytes

    def offloads(drawn: Drawn, size: Any, available: int) -> Decision:
        decision = begin(drawn, size, available)
        if decision.phase is Phase.PLANNED:
            found.clear()
            blocks = len(decision.plan.actions)
            for name, value in (
                ("actions", (Action.OFFLOAD,) * blocks),
                ("comes_in", tuple(min(number + 2, blocks - 1) for number in range(blocks))),
            ):
                object.__setattr__(decision.plan, name, value)
        return decision

    begin = Drawn.begin
    with monkeypatch.context() as patch:
        patch.setattr(StepWatch, "_backward_reaches", reached)
        patch.setattr(HeldCall, "start_in", begins)
        patch.setattr(Drawn, "begin", offloads)
        course = Course("dropout")
        with course.managed(budget, Drawn("offloads", Counter())) as memory:
            course.run(memory)
    return found, memory.history[-1].peak_bytes


@pytest.mark.long
def test_copies_in_begin_where_the_plan_has_them_begin_if_there_is_room_and_later_if_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, most = begun_at(1 << 30, monkeypatch)
    ahead = [(at, call) for at, call in found if call < at]
    assert ahead == [(5, 4), (5, 3), (4, 2), (3, 1), (2, 0)]
    least = Course("dropout")
    with least.managed(1 << 30, "checkpoint") as memory:
        least.run(memory)
    tight = int(1.02 * max(report.peak_bytes for report in memory.history))
    later, peak = begun_at(tight, monkeypatch)
    assert peak <= tight < most
    assert len([call for at, call in later if call == at]) > len([call for at, call in found if call == at])


def test_the_report_tells_seconds_for_room_from_those_for_data() -> None:
    course = Course("dropout")
    with course.managed(1 << 30, spillway.methods.Checkpoint(Action.OFFLOAD)) as memory:
        course.run(memory)
    assert all(0 < report.room_seconds < report.stall_seconds for report in memory.history)


@pytest.mark.long
def test_what_a_worker_still_copies_out_is_there_beside_what_its_own_backward_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The workers have begun every copy out and end none before somebody waits for it."""
    least = Course("dropout")
    with least.managed(1 << 30, "checkpoint") as memory:
        least.run(memory)
    tight = int(1.02 * max(report.peak_bytes for report in memory.history))
    written, free = DiskLanes._written, DiskLanes.free

    def by_the_host(lanes: DiskLanes, transfer: Transfer, writing: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            written(lanes, transfer, writing)

    monkeypatch.setattr(DiskLanes, "_written", by_the_host)
    monkeypatch.setattr(DiskLanes, "free", lambda lanes, transfer: transfer.source is None and free(lanes, transfer))
    _, peak = begun_at(tight, monkeypatch)
    assert peak <= tight
