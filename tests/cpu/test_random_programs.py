from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spillway.engines.tensors.calls import Call
from spillway.engines.tensors.sizes import Sizes
from spillway.memory.controller import Controller
from spillway.memory.records import Value
from spillway.tiers.disk import DiskTier
from tests.cpu.program_judge import (
    POLICIES,
    SHAKEN,
    Known,
    judge,
    judge_all,
    judge_planned,
    many,
    shares,
    shortest,
)  # fmt: skip
from tests.cpu.programs import random_program
from tests.cpu.world import ACTIONS

PROGRAMS = int(os.environ.get("SPILLWAY_PROGRAMS", "10"))

ONCE_WRONG = {
    9: "recompute first", 11: "lru", 13: "dtr", 30: "copy beside", 79: "largest", 116: "dtr", 139: "copy beside",
    78: "shaken", 260: "shaken", 361: "copy beside", 5027: "msps", 20742: "shaken",
    21360: "dtr", 22250: "lru", 22289: "shaken", 30003: "largest", 37079: "move first",
    52741: "recompute first", 53020: "recompute first", 55320: "dtr", 57654: "msps", 58042: "lru",
    8000078: "shaken", 8000117: "delta", 8000134: "largest", 8000977: "msps",
    1000913: "lru", 3000999: "shaken", 3102110: "largest", 3200836: "move first", 3301540: "lru",
}  # fmt: skip
"""Programs with which something was found, and the policy under which it was."""

POLICIES_EACH = 4


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """What became of every program under every policy."""
    rows = [{"seed": program["seed"], **row} for program in many(0, PROGRAMS, POLICIES_EACH) for row in program["rows"]]
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        totals = ", ".join(
            f"{sum(row[name] for row in rows)} {name}" for name in ("drops", "moves", "replays", "refused")
        )
        print(f"\nrandom programs: {PROGRAMS} programs, {len(rows)} runs under a budget, {totals}")


def test_random_programs_are_identical_within_their_budget_or_rightly_refused(rows: list[dict[str, Any]]) -> None:
    wrong = {(row["seed"], row["policy"]): row["complaints"] for row in rows if row["complaints"]}
    shrink = "python -m tests.cpu.program_judge SEED 1 0 --shrink finds the shortest program that fails"
    assert wrong == {}, shrink


@pytest.mark.long(but=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_a_program_that_was_wrong_once_is_right(seed: int) -> None:
    known = Known(random_program(seed))
    row = judge(known, ONCE_WRONG[seed], shares(seed)[ONCE_WRONG[seed]])
    assert known.row["complaints"] + row["complaints"] == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_programs_whose_steps_are_recorded_planned_and_followed_are_identical() -> None:
    rows = [judge_planned(seed) for seed in (6, 13, 38)]
    assert [row["complaints"] for both in rows for row in both] == [[]] * 2 * len(rows)
    assert sum(row["began planned"] for _, row in rows) >= 5


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_much_leaves_and_comes_back(rows: list[dict[str, Any]], policy: str) -> None:
    ran = [row for row in rows if row["policy"] == policy]
    assert len(ran) >= PROGRAMS * POLICIES_EACH // len(POLICIES) // 2
    assert sum(row["moves"] + row["drops"] for row in ran) >= 10 * len(ran)
    if policy in ("recompute first", SHAKEN):
        assert sum(row["drops"] for row in ran) >= 5 * len(ran)
        assert sum(row["replays"] for row in ran) >= sum(row["drops"] for row in ran) // 2


def test_most_programs_run_under_less_than_their_plain_peak_and_some_are_refused(rows: list[dict[str, Any]]) -> None:
    limited = [row for row in rows if row["policy"] in POLICIES]
    tight = [row for row in limited if row["allowed"] < row["plain_peak"] and not row["refused"]]
    assert len(tight) > 0.8 * len(limited)
    assert any(row["refused"] for row in rows)


# ---------------------------------------------------------------------- an engine that is wrong is found out


def _bring_back_a_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DiskTier.read

    def flipped(self: DiskTier, slot: Any, address: int) -> bool:
        unchanged = read(self, slot, address)
        byte = ctypes.c_uint8.from_address(address)
        byte.value ^= 1
        return unchanged

    monkeypatch.setattr(DiskTier, "read", flipped)


def _replay_with_other_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Call.again
    monkeypatch.setattr(Call, "again", lambda self, storages: again(self._replace(random=None), storages))


def _expect_nothing_to_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Sizes.expected
    monkeypatch.setattr(Sizes, "expected", lambda *arguments: (expected(*arguments)[0], 0))


def _refuse_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = Controller.make_room
    monkeypatch.setattr(Controller, "make_room", lambda self, needed, name: make_room(self, needed + 65536, name))


def _forget_what_was_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "overwrite", lambda self, storage, recipe: Value(storage, recipe))  # put nowhere


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    "break_something",
    [
        _bring_back_a_flipped_bit,
        _replay_with_other_random_numbers,
        _expect_nothing_to_be_created,
        _refuse_too_early,
        _forget_what_was_written_in_place,
    ],
)
def test_an_engine_that_is_wrong_is_found_out(
    break_something: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_something(monkeypatch)
    child = os.fork()  # such an engine may also crash
    if child == 0:
        found = any(row["complaints"] for seed in range(11) for row in judge_all(seed, 3))
        os._exit(1 if found else 0)
    assert os.waitpid(child, 0)[1] != 0


def test_a_program_that_shows_memory_that_nobody_wrote_is_told_from_a_wrong_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ACTIONS, "make", (0, lambda world, i: torch.empty(64, 64)))
    complaints = Known(random_program(0)).row["complaints"]
    assert complaints[0].startswith("plain torch shows memory that nobody wrote: ")


def test_a_failing_program_shrinks_to_what_makes_it_fail() -> None:
    def fails(program: Any) -> bool:
        names = [instruction.name for part in program.parts for instruction in part.inside]
        return "die" in names and "foreach" in names[names.index("die") :]

    program = next(program for program in map(random_program, range(99)) if fails(program))
    short = shortest(program, fails)
    assert [i.name for part in short.parts for instructions in part for i in instructions] == ["die", "foreach"]
