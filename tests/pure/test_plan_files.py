"""Plans in their files, and as function and verb make them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import spillway
from spillway.cli import main
from spillway.errors import BudgetError, SpillwayError, UnknownMethodError
from spillway.ir import Gap, Host, Plan, Recompute
from spillway.ir.plan_files import write_plan
from spillway.ir.reading import lines_of
from spillway.ir.sealed import records_of, replace_file
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


def lines(path: Path) -> list[dict[str, object]]:
    """The records of a file, each of its lines sealed."""
    return [record for _, record in records_of(path, lines_of(path), name="spillway-plan", version=1, what="a plan")]


def test_a_plan_stands_in_its_file_gap_by_gap(written: Path) -> None:
    header, *gaps = lines(written)
    assert header["step"] == STEP.digest()
    assert (header["allowed"], header["projected"], header["gaps"]) == (10 << 20, 10 << 20, 4)
    assert header["facts"] == {"method": "by hand"}
    assert gaps == [
        {"value": 2, "gone": [3, 14], "home": "recompute", "ops": [1], "temporaries": 7},
        {"value": 3, "gone": [4, 13], "home": "host"},
        {"value": 4, "gone": [5, 12], "home": "host"},
        {"value": 5, "gone": [6, 11], "home": "host"},
    ]
    assert [path.name for path in written.parent.iterdir()] == ["plan.jsonl"]


def test_held_leaves_are_told_too(tmp_path: Path) -> None:
    gap = Gap(value=1, start=1, end=2, home=Recompute(ops=(0,), held=(3,)))
    write_plan(tmp_path / "p", Plan(step="x", allowed=1, projected=1, gaps=(gap,)), {})
    assert lines(tmp_path / "p")[1]["held"] == [3]


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
    header, *gaps = lines(output)
    made = spillway.plan(STEP, budget=0.7, method="sqrt-n", device="v100-pcie")
    assert header["step"] == made.step
    assert [(gap["value"], gap["gone"]) for gap in gaps] == [(gap.value, [gap.start, gap.end]) for gap in made.gaps]
    facts = header["facts"]
    assert isinstance(facts, dict)
    assert (facts["method"], facts["device"]) == ("sqrt-n", "v100-pcie")
    assert run("plan", str(path), *options) == 0
    assert "3 ops again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("plan", "resnet", "--budget", "0.7", "--method", "swap"), True),
        (("simulate", "resnet", "--budget", "0.7"), True),
        (("compare", "resnet"), True),
        (("report", "resnet"), False),
        (("pilot", "show", "resnet"), False),
        (("plan", "none.jsonl", "--budget", "0.7", "--method", "swap"), False),
    ],
)
def test_the_name_of_a_workload_is_told_from_a_step_where_a_step_is_wanted_and_nowhere_else(
    arguments: tuple[str, ...], hint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 1
    said = capsys.readouterr().err
    assert "No such file or directory." in said
    assert ("`spillway record resnet -o step.jsonl` records a step of that workload." in said) == hint


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


def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path, written: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "file.jsonl")
    write_plan(link, PLAN, {"method": "by hand"})
    assert link.is_symlink()
    assert (tmp_path / "file.jsonl").read_bytes() == written.read_bytes()


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    reader, device = os.openpty()
    try:
        replace_file(Path(os.ttyname(device)), b"a plan\n")
        assert os.read(reader, 100) == b"a plan\r\n"
        assert not Path(os.ttyname(device)).is_file()
    finally:
        os.close(reader)
        os.close(device)
