from __future__ import annotations

import inspect
import pickle
import re
import traceback
from pathlib import Path

import pytest

from spillway import errors
from spillway.cli import main
from spillway.errors import (
    BudgetError,
    BudgetInfeasible,
    EngineError,
    FileFormatError,
    PlanRejected,
    SpillwayError,
    UsageError,
    pass_notes,
)
from spillway.units import GiB

INFEASIBLE = BudgetInfeasible(
    needed=3 * GiB, allowed=2 * GiB, op="aten.mm.default", op_index=812, smallest_budget=3 * GiB + 64, exact=True
)
EVERY_SHAPE = [
    BudgetError("A budget has to be more than 0 bytes."),
    INFEASIBLE,
    PlanRejected("op 7 reads storage 3 inside its gap", rule="gap-over-read"),
    FileFormatError("this is not a run file", path="run.jsonl", line=1),
    EngineError("A locked value was dropped."),
]


def test_every_error_stands_in_the_tree_at_the_top_of_the_module_under_its_base() -> None:
    drawn = re.findall(r"^([ |]*\+- )?(\w+)(?:  | \(also|$)", inspect.getdoc(errors) or "", flags=re.MULTILINE)
    bases: dict[int, str] = {}
    for branch, name in drawn:
        depth = len(branch) // 4
        bases[depth] = name
        expected = bases[depth - 1] if depth else "Exception"
        assert getattr(errors, name).__bases__[0].__name__ == expected
    defined = {name for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, SpillwayError)}
    assert {name for _, name in drawn} == defined


def test_an_error_of_usage_is_also_caught_as_a_value_error() -> None:
    assert issubclass(UsageError, ValueError)
    assert not issubclass(BudgetInfeasible, ValueError)


@pytest.mark.parametrize("error", EVERY_SHAPE, ids=lambda error: type(error).__name__)
def test_an_error_passes_between_processes_whole(error: SpillwayError) -> None:
    error.add_note("in step 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", EVERY_SHAPE, ids=lambda error: type(error).__name__)
def test_an_error_is_told_on_one_line_and_ends_as_a_sentence_does(error: SpillwayError) -> None:
    assert "\n" not in str(error)
    assert str(error).endswith(".")


PAGE = Path(errors.__file__).with_name("errors.md")
"""Installed with the package: who has the wheel alone can read it."""
KINDS = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, SpillwayError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_says_in_a_note_where_the_documents_say_what_to_do(
    kind: type[SpillwayError], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, _, anchor = (kind.__new__(kind).page or f"{PAGE}#").partition("#")
    headings = re.findall(r"^## (\w+)$", Path(page).read_text("utf-8"), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings] or kind in (SpillwayError, UsageError)
    assert getattr(kind.__new__(kind), "__notes__", []) == [f"What to do: {page}#{anchor}"] * bool(anchor)
    monkeypatch.setattr(errors, "SITE", "https://docs.example/")
    assert kind.__new__(kind).page == (f"https://docs.example/errors/#{anchor}" if anchor else None)


def test_an_error_of_a_users_own_names_the_page_of_its_base() -> None:
    class Mine(BudgetError):
        pass

    assert Mine("It is too small.").page == f"{PAGE}#budgeterror"
    assert not hasattr(type("Mine", (SpillwayError,), {})("It is too small."), "__notes__")


def test_a_traceback_shows_the_sentence_and_below_it_the_page() -> None:
    assert "".join(traceback.format_exception(BudgetError("It is too small."))).splitlines() == [
        "spillway.errors.BudgetError: It is too small.", f"What to do: {PAGE}#budgeterror",
    ]  # fmt: skip


def test_an_error_that_is_told_as_another_or_as_itself_passes_its_notes_on_once() -> None:
    first, second = BudgetError("First."), BudgetError("Second.")
    first.add_note("in step 3")
    pass_notes(first, second)
    pass_notes(first, second)
    pass_notes(first, first)
    assert second.__notes__ == first.__notes__ == [f"What to do: {PAGE}#budgeterror", "in step 3"]


def test_an_infeasible_budget_is_told_with_the_op_and_every_number() -> None:
    assert str(INFEASIBLE) == (
        "Op 812 (aten.mm.default) needs 3.00 GiB in memory at once and 2.00 GiB are allowed: "
        "the smallest budget that should work is 3221225536 bytes (3.00 GiB)."
    )
    assert (INFEASIBLE.needed, INFEASIBLE.allowed, INFEASIBLE.op_index) == (3 * GiB, 2 * GiB, 812)
    assert (INFEASIBLE.op, INFEASIBLE.smallest_budget, INFEASIBLE.exact) == ("aten.mm.default", 3 * GiB + 64, True)


def test_a_lower_bound_is_not_passed_off_as_a_budget_that_works() -> None:
    bound = BudgetInfeasible(needed=9, allowed=5, op="aten.relu.default", op_index=0, smallest_budget=9, exact=False)
    assert "it takes 9 bytes (9 B) or more" in str(bound)
    assert "smallest" not in str(bound)


def test_a_damaged_file_is_named_with_its_line() -> None:
    error = FileFormatError("this is not JSON", path=Path("runs") / "a.jsonl", line=12)
    assert str(error) == "runs/a.jsonl, line 12: this is not JSON."
    assert (error.path, error.line) == (Path("runs/a.jsonl"), 12)


def test_a_rejected_plan_names_the_rule_that_it_breaks() -> None:
    error = PlanRejected("op 7 reads storage 3 inside its gap", rule="gap-over-read")
    assert str(error) == "The plan breaks the rule gap-over-read: op 7 reads storage 3 inside its gap."
    assert error.rule == "gap-over-read"


def test_a_broken_invariant_asks_for_a_report() -> None:
    assert "please report it" in str(EngineError("A locked value was dropped."))


def test_the_command_line_names_the_page_below_the_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "foreign.jsonl").write_text("step,loss\n")
    for file, below in (
        ("foreign.jsonl", [f"spillway: what to do: {PAGE}#fileformaterror"]),
        ("none.jsonl", []),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(tmp_path / file)])
        assert ended.value.code == 1
        assert capsys.readouterr().err.splitlines()[1:] == below
