from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from spillway.methods import METHODS
from tests.architecture.documents import (
    blocks,
    commands,
    documents,
    listed_decisions,
    members,
    missing_paths,
    ready_methods,
    status,
    targets,
    tree,
    unknown_members,
    words_of,
    wrong_numbers,
    wrong_words,
)
from tests.architecture.source import ROOT, package_sources
from tests.architecture.test_command_line import COMMAND_LINE
from tests.architecture.test_import_order import RANKS, place

DOCUMENTS = documents()
README = DOCUMENTS["README.md"]
PACKAGE = ROOT / "src" / "spillway"
LINES_OF_THE_EXAMPLE = 15
DECISIONS = {name.removeprefix("docs/decisions/"): text for name, text in DOCUMENTS.items() if "decisions/0" in name}


@functools.cache
def members_of_the_package() -> dict[str, set[str]]:
    """Of every class."""
    return members(package_sources().values())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_that_a_document_names_exists(name: str) -> None:
    assert missing_paths(name, DOCUMENTS[name]) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_member_of_a_class_that_a_document_names_exists(name: str) -> None:
    assert unknown_members(DOCUMENTS[name], members_of_the_package()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_in_a_document_can_be_given(name: str) -> None:
    assert [wrong for words in commands(DOCUMENTS[name]) for wrong in wrong_words(words, COMMAND_LINE)] == []
    offered = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert sorted(set(targets(DOCUMENTS[name])) - set(offered)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_example_in_a_document_is_python(name: str) -> None:
    for block in blocks(DOCUMENTS[name], "python"):
        compile(block, name, "exec")


def test_the_readme_has_one_example_of_fifteen_lines() -> None:
    (example,) = blocks(README, "python")
    assert len([line for line in example.splitlines() if line]) == LINES_OF_THE_EXAMPLE


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in README.splitlines() if "MiB |" in line
    ]
    assert len(rows) > 1
    for *_, peak, resident, ratio, losses, benchmark in rows:
        results = json.loads((ROOT / "benchmarks" / "results" / f"{benchmark}.json").read_text("utf-8"))
        assert any({peak, resident, ratio, losses} <= set(row) for row in results["table"]["rows"]), (benchmark, peak)


def test_the_figures_of_the_window_papers_table_are_those_of_the_results() -> None:
    folder = ROOT / "papers" / "out_of_core_window"
    lines = (folder / "README.md").read_text("utf-8").splitlines()
    first = lines.index("| images a second | 64 | 128 | 190 | 256 | 512 | 928 | 1120 | 1248 | 1440 |")
    told = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines[first + 2 : first + 17]]
    results: dict[str, list[list[str]]] = {}
    table = json.loads((folder / "results" / "window_table1.json").read_text("utf-8"))["table"]
    for name, batch, *cells in table["rows"]:
        if batch and len(results.setdefault(name, [])) < 9:
            results[name].append(cells)
    rows = list(results.values())[:9]
    for number, paper in enumerate(rows[:3]):
        published, here, _ = told[3 * number : 3 * number + 3]
        assert (published, here) == ([cells[0] for cells in paper], [cells[1] for cells in paper])
    assert told[9:] == [[cells[1] for cells in row] for row in rows[3:]]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def of_delta(kept: dict[str, Any]) -> list[str]:
    moved = [
        row["beside"]["filters"]
        for row in kept["rows"]
        if row["table"] == "Fig. 8" and row["what"].startswith("ResNet-50")
    ]
    more = [
        [
            sum(one[name][link] for one in moved) / sum(one["lru"][link] for one in moved) - 1
            for name in ("greedy", "base")
        ]
        for link in (0, 1)
    ]
    under = [
        row["ours"] / row["paper"] for row in kept["rows"] if "DELTA under" in row["what"] and "BERT" not in row["what"]
    ]
    return [
        f"greedy offloads {percent(more[0][0])} more than lru with the paper's link and base "
        f"{percent(more[1][1])} more with the physical one",
        f"needs {min(under):.1f} to {max(under):.1f} times the paper's memory",
    ]


def of_costs(kept: dict[str, Any]) -> list[str]:
    peak = max(abs(row["peak_ratio"] - 1) for row in kept["rows"] if row["model"] == "Bert-Large")
    return [f"BERT {100 * peak:.1f} %, ResNet-50"]


def of_window(kept: dict[str, Any]) -> list[str]:
    found = re.search(r"of at most ([\d.]+)", kept["rows"][0]["note"])
    assert found is not None
    return [f"{round(float(found[1]) * 1e9 / (40 << 20))} arrays in 40 MiB each"]


def of_papaya(kept: dict[str, Any]) -> list[str]:
    of = {(row["model"], row["method"]): row for row in kept["rows"]}
    plain, again, swap = (of["Bert-Large", name]["gamma"] for name in ("plain", "checkpoint", "swap"))
    wide = of["Wide-ResNet-50", "swap"]
    return [
        f"Wide-ResNet-50 is {wide['throughput']:.1f} samples/s, published {wide['paper_throughput']:.1f}",
        f"in a row come to {1e3 * (again + swap - plain):.1f}",
    ]


def of_pays(kept: dict[str, Any]) -> list[str]:
    lm, again, trunk, deeper = kept["rows"]
    slow = percent(1 - lm["predicted"] / lm["measured"])
    return [
        f"was foretold {slow} too slow",
        f"{again['taken'] / lm['fastest']:.2f} times as many",
        f"{deeper['taken']:.1f} at the batch to take and {deeper['fastest']:.1f} at {deeper['batch']}",
        f"{deeper['taken'] / trunk['fastest']:.2f} times",
    ]


def of_accuracy(kept: dict[str, Any]) -> list[str]:
    took = {row["what"].partition(": ")[2]: 1e6 * row["cost_seconds"] for row in kept["rows"] if "cost_seconds" in row}
    asked = took["from a sample to probabilities"], took["the same, re-directed"]
    return ["{:.0f} us from a sample to probabilities ({:.0f} when re-directed)".format(*asked)]


def of_partition(kept: dict[str, Any]) -> list[str]:
    told = []
    for cut in ("max-fill", "greedy", "dynamic programming"):
        taken = [1e3 * row["cut_seconds"] for row in kept["rows"] if row["cut"] == cut]
        told.append(f"{min(taken):.1g} to {max(taken):.2g} ms |")
    return told


def of_dtr(kept: dict[str, Any]) -> list[str]:
    return [f"with classes | | {kept['facts']['fast'][0]:.1f} s of CPU"]


@pytest.mark.parametrize(
    ("paper", "target", "told"),
    [
        ("delta", "delta_tables", of_delta), ("costs", "costs_plain", of_costs),
        ("out_of_core_window", "window_table1", of_window), ("papaya", "papaya_simulated", of_papaya),
        ("papaya", "papaya_pays", of_pays), ("dynn_offload", "dynn_accuracy", of_accuracy),
        ("dynn_offload", "dynn_partition", of_partition), ("dtr", "dtr_reference", of_dtr),
    ],
)  # fmt: skip
def test_the_figures_of_a_papers_page_are_those_of_the_results(
    paper: str, target: str, told: Callable[[dict[str, Any]], list[str]]
) -> None:
    folder = ROOT / "papers" / paper
    kept = json.loads((folder / "results" / f"{target}.json").read_text("utf-8"))
    page = " ".join((folder / "README.md").read_text("utf-8").split())
    assert [sentence for sentence in told(kept) if sentence not in page] == []


def test_the_page_of_methods_lists_exactly_those_that_there_are_as_ready() -> None:
    assert ready_methods(DOCUMENTS["docs/methods.md"]) == list(METHODS)


def test_every_verb_stands_in_the_table_of_the_page_about_commands() -> None:
    rows = [line for line in DOCUMENTS["docs/commands.md"].splitlines() if line.startswith("| `spillway ")]
    named = {name for row in rows for name in re.findall(r"`spillway ([a-z ]+)`", row.split("|")[1])}
    assert named == set(COMMAND_LINE) - {""}


def test_the_readme_prints_exactly_the_top_of_the_tree() -> None:
    there = {path.name for path in PACKAGE.glob("*.py")} | {f"{path.parent.name}/" for path in PACKAGE.glob("*/*.py")}
    assert sorted(name for _, name in tree(README)) == sorted(there)


def test_the_tree_of_the_readme_stands_in_the_order_of_imports() -> None:
    names = [name.removesuffix(".py").rstrip("/").replace("__init__", "") for _, name in tree(README)]
    ranks = [RANKS[place(f"spillway.{name}".rstrip("."))] for name in names]
    assert ranks == sorted(ranks)


def test_the_tree_of_the_architecture_has_the_readmes_at_its_top_and_every_module_below() -> None:
    entries = tree(DOCUMENTS["docs/architecture.md"])
    assert [name for depth, name in entries if depth == 1] == [name for _, name in tree(README)]
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    modules = {str(path) for path in files if path.name != "__init__.py" or path.parent.name == ""}
    assert {name for _, name in entries if name.endswith(".py")} == modules


@pytest.mark.parametrize(("name", "most"), [("README.md", 950), ("docs/architecture.md", 2500)])
def test_a_page_that_is_to_be_short_is_short(name: str, most: int) -> None:
    """Words outside of what is fenced: trees and code."""
    assert words_of(DOCUMENTS[name]) <= most


def test_words_in_fences_do_not_count() -> None:
    assert words_of("one two\n```\nthree\n```\nfour\n") == 3


def test_every_decision_stands_in_the_list_of_decisions() -> None:
    assert listed_decisions(DOCUMENTS["docs/decisions/README.md"]) == {
        name: status(text) for name, text in DECISIONS.items()
    }


def test_every_decision_says_whether_it_is_accepted_or_superseded() -> None:
    assert [name for name, text in DECISIONS.items() if status(text) is None] == []


def test_decisions_are_at_most_fifteen_and_numbered_without_a_gap() -> None:
    assert wrong_numbers(DECISIONS) == []


# ---------------------------------------------------------------------- what these tests would find


@pytest.mark.parametrize(
    "text",
    ["see `docs/nothing.md`", "see `nothing.py`", "in `engines/nothing/`", "[here](nothing.md)", "[up](../README.md)"],
)
def test_a_path_that_leads_nowhere_is_found(text: str) -> None:
    assert len(missing_paths("README.md", text)) == 1


def test_paths_of_the_project_of_the_package_and_beside_the_document_lead_somewhere() -> None:
    text = "`ir/verify.py`, `src/spillway/ir/`, `Makefile`, [next](0001-one-account.md), `run.html`, `keep-all`"
    assert missing_paths("docs/decisions/README.md", text) == []


def test_a_member_that_a_class_does_not_have_is_found() -> None:
    known = members(["class One:\n    x: int\n    def f(self): self.y = 1\n"])
    assert unknown_members("`One.x`, `One.f`, `One.y`, `One.z`, `Tensor.z`, `one.z`", known) == ["One.z"]


def test_a_verb_or_an_option_that_does_not_exist_is_found() -> None:
    text = "`spillway demo --json`, `spillway fly`\n```\nspillway report x --fast\n```\n"
    assert [wrong_words(words, COMMAND_LINE) for words in commands(text)] == [["report --fast"], [], ["fly"]]
    assert targets("`make demo`, `make VENV=x test`\n```\nmake fly  # far\n```\n") == ["fly", "demo"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# 1. A\n\nStatus: accepted, 2026-11-25\n", "accepted, 2026-11-25"),
        ("# 1. A\n\nStatus: superseded by 2, 2026-11-25\n", "superseded by 2, 2026-11-25"),
        ("# 1. A\n\nStatus: proposed, 2026-11-25\n", None),
        ("# 1. A\n\nThe status: accepted, 2026-11-25\n", None),
        ("# 1. A\n\nStatus: accepted\n", None),
        ("# 1. A\n\n2026-11-25\n", None),
    ],
)
def test_a_decision_without_a_status_is_found(text: str, said: str | None) -> None:
    assert status(text) == said


def test_a_decision_too_many_a_gap_and_another_number_in_the_title_are_found() -> None:
    pages = {f"{number:04}-x.md": f"# {number}. X\n" for number in range(1, 17)}
    assert wrong_numbers(pages) == ["0016-x.md"]
    del pages["0003-x.md"], pages["0016-x.md"]
    assert wrong_numbers(pages) == [f"{number:04}-x.md" for number in range(4, 16)]
    assert wrong_numbers({"0001-x.md": "# 2. X\n"}) == ["0001-x.md"]


def test_a_decision_that_is_listed_with_another_status_is_found() -> None:
    row = "| 1 | [A](0001-a.md) | accepted, 2026-11-25 |\n"
    assert listed_decisions("| | decided | status |\n|---|---|---|\n" + row) == {"0001-a.md": "accepted, 2026-11-25"}


def test_a_line_of_the_tree_without_a_role_is_refused() -> None:
    with pytest.raises(ValueError, match="not a name of the tree"):
        tree("```\nsrc/spillway/\n  ir/\n```\n")


def test_folders_within_folders_are_read_as_paths() -> None:
    text = "```\nsrc/spillway/\n  a/   x\n    b/   x\n      c.py   x\n    d.py  x\n  e.py  x\n```\n"
    assert tree(text) == [(1, "a/"), (2, "a/b/"), (3, "a/b/c.py"), (2, "a/d.py"), (1, "e.py")]


def test_only_rows_that_say_so_are_ready() -> None:
    text = "| method | name | state |\n|---|---|---|\n| a | `a` | ready |\n| b | | planned |\n"
    assert ready_methods(text) == ["a"]


def test_every_test_that_the_page_about_faults_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOCUMENTS["docs/faults.md"]))
    defined = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 30
    assert named - defined == set()
