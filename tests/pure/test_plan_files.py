"""Plans survive their file, and what is not theirs is told in a sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import spillway
from spillway.cli import main
from spillway.errors import BudgetError, FileFormatError, PlanRejected, SpillwayError, UnknownMethodError
from spillway.ir import Gap, Host, Plan, Recompute
from spillway.ir.plan_files import read_plan, write_plan
from spillway.ir.step_files import Recorded, write_step
from spillway.methods import LRU, Problem, SqrtN
from spillway.methods.base import Absence
from tests.pure.linear_graphs import linear_step
from tests.shared import without_page

STEP = linear_step(8)
PLAN = Plan(
    step=STEP.digest(),
    allowed=10 << 20,
    projected=10 << 20,
    gaps=(
        Gap(value=2, start=3, end=14, home=Recompute(ops=(1,), temporaries=7)),
        Gap(value=3, start=4, end=13, home=Host()),
        Gap(value=4, start=5, end=12, home=Host()),
        Gap(value=5, start=6, end=11, home=Host()),
    ),
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "plan.jsonl"
    write_plan(path, PLAN, {"method": "by hand"})
    return path


def test_a_plan_comes_back_as_it_was_and_verified(written: Path) -> None:
    found = read_plan(written, STEP)
    assert (found.plan, found.facts) == (PLAN, {"method": "by hand"})
    assert [path.name for path in written.parent.iterdir()] == ["plan.jsonl"]


def test_held_leaves_come_back_too(tmp_path: Path) -> None:
    plan = Plan(
        step="x", allowed=1, projected=1, gaps=(Gap(value=1, start=1, end=2, home=Recompute(ops=(0,), held=(3,))),)
    )
    write_plan(tmp_path / "p", plan, {})
    assert read_plan(tmp_path / "p").plan == plan


def test_the_plan_of_another_step_is_refused(written: Path) -> None:
    with pytest.raises(FileFormatError, match=r"line 1: the plan is for step [0-9a-f]{12}, and this is step"):
        read_plan(written, linear_step(9))


def test_a_plan_that_could_not_run_is_rejected(tmp_path: Path) -> None:
    broken = Plan(
        step=STEP.digest(), allowed=1 << 30, projected=1 << 30, gaps=(Gap(value=2, start=1, end=14, home=Host()),)
    )
    write_plan(tmp_path / "p", broken, {})
    assert read_plan(tmp_path / "p").plan == broken
    with pytest.raises(PlanRejected, match="gap-before-creation"):
        read_plan(tmp_path / "p", STEP)


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda found: [], "line 1: this is not the first line of a plan"),
        (lambda found: [b'{"format":"spillway-run","version":2}\n'], "line 1: this is not the first line of a plan"),
        (lambda found: [b'{"format":"spillway-plan","version":9}\n'], "line 1: written in version 9 of the format"),
        (lambda found: found[:-1], "line 1: 3 gaps follow of the 4"),
        (lambda found: [*found, found[-1]], "line 6: the line is damaged"),
        (lambda found: [*found[:2], found[2].replace(b"13", b"14"), *found[3:]], "line 3: the line is damaged"),
        (lambda found: [*found[:2], found[3], found[2], found[4]], "line 3: the line is damaged"),
        (lambda found: [*found[:-1], found[-1][:20]], "line 5: the line is damaged"),
    ],
)
def test_damage_is_told_with_its_line(written: Path, spoil, sentence: str) -> None:  # type: ignore[no-untyped-def]
    written.write_bytes(b"".join(spoil(lines(written))))
    with pytest.raises(FileFormatError) as caught:
        read_plan(written)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "record",
    [
        {"value": 1, "gone": [3], "home": "host"},
        {"value": 1, "gone": [3, 2], "home": "host"},
        {"value": 1, "gone": [1, 2], "home": "attic"},
        {"value": 1, "gone": [1, 2], "home": "recompute", "ops": ["1"], "temporaries": 0},
        {"value": 1, "gone": [1, 2], "home": "packed"},
    ],
)
def test_a_sealed_line_that_is_no_gap_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    from spillway.ir.sealed import encoded, seal

    header = {
        "format": "spillway-plan",
        "version": 1,
        "step": "x",
        "allowed": 1,
        "projected": 1,
        "gaps": 1,
        "facts": {},
    }
    first, checksum = seal(encoded(header), 0)
    second, _ = seal(encoded(record), checksum)
    (tmp_path / "p").write_bytes(first + second)
    with pytest.raises(FileFormatError, match="line 2"):
        read_plan(tmp_path / "p")


# spillway.plan and `spillway plan`


def test_the_public_function_plans_a_step_a_recorded_one_and_a_file(tmp_path: Path) -> None:
    recorded = Recorded(step=STEP, workload="linear", facts={})
    write_step(tmp_path / "step.jsonl", recorded)
    plans = [spillway.plan(given, budget=0.9, method="sqrt-n") for given in (STEP, recorded, tmp_path / "step.jsonl")]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].allowed == STEP.plain_peak() * 9 // 10


@pytest.mark.parametrize(
    ("budget", "allowed"),
    [
        (9 << 20, 9 << 20),
        ("9MiB", 9 << 20),
        (0.9, 9 << 20),
        ("0.9", 9 << 20),
        ("0.9x", 9 << 20),
        ("10%", 8 << 30),
        (1.0, 10 << 20),
    ],
)
def test_a_budget_is_bytes_or_a_share_of_the_plain_peak(budget: str | float, allowed: int) -> None:
    assert spillway.plan(STEP, budget=budget, method="sqrt-n", device="a100").allowed == allowed


@pytest.mark.parametrize("budget", ["0.0", "-0.5", "1e3", "lots", "0.5.1", 1e9])
def test_a_budget_that_makes_no_sense_is_refused(budget: str | float) -> None:
    with pytest.raises(BudgetError):
        spillway.plan(STEP, budget=budget, method="sqrt-n")


def test_a_policy_makes_no_plan() -> None:
    with pytest.raises(UnknownMethodError, match="'lru' decides while the step runs and makes no plan; choose one of"):
        spillway.plan(STEP, budget=0.9, method="lru")


def run(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_verb_writes_a_plan_that_fits_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "step.jsonl", tmp_path / "plan.jsonl"
    write_step(path, Recorded(step=STEP, workload="linear", facts={}))
    options = ["--budget", "0.7", "--method", "sqrt-n", "--device", "v100-pcie", "-o", str(output)]
    assert run("plan", str(path), *options, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plain_seconds"] == pytest.approx(17e-3)
    assert told["projected_bytes"] <= told["budget_bytes"] == STEP.plain_peak() * 7 // 10
    assert told["recomputed_ops"] == 3
    found = read_plan(output, STEP)
    assert (found.facts["method"], found.facts["device"]) == ("sqrt-n", "v100-pcie")
    assert run("plan", str(path), *options) == 0
    assert "3 ops again" in capsys.readouterr().out


def test_the_verb_plans_as_the_function_does_for_who_asks_what_policies_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path / "step.jsonl", Recorded(step=STEP, workload="linear", facts={}))
    found: list[Sequence[Absence]] = []
    plan = SqrtN.plan

    def asking(planner: SqrtN, problem: Problem) -> Plan:
        assert problem.rehearse is not None
        found.append(problem.rehearse(LRU()))
        return plan(planner, problem)

    monkeypatch.setattr(SqrtN, "plan", asking)
    spillway.plan(tmp_path / "step.jsonl", budget=0.7, method="sqrt-n", device="v100-pcie")
    assert (
        run("plan", str(tmp_path / "step.jsonl"), "--budget", "0.7", "--method", "sqrt-n", "--device", "v100-pcie") == 0
    )
    assert found[0] == found[1] != []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"STEP": "nothing.jsonl"}, "nothing.jsonl: No such file"),
        ({"--method": "lru"}, "makes no plan"),
        ({"--method": "magic"}, "There is no method 'magic'"),
        ({"--device": "abacus"}, "There is no device 'abacus'"),
        ({"--budget": "0.1"}, "the smallest budget that should work"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    change: dict[str, str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step(tmp_path / "step.jsonl", Recorded(step=STEP, workload="linear", facts={}))
    words = {"STEP": str(tmp_path / "step.jsonl"), "--budget": "0.7", "--method": "sqrt-n", "--device": "a100"} | change
    assert run("plan", words.pop("STEP"), *[word for pair in words.items() for word in pair]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert len(without_page(error)) == 1
    assert issubclass(UnknownMethodError, SpillwayError)
