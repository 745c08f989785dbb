"""The notebook runs, cell by cell, and shows its training while it trains; IPython is not installed for the tests."""

from __future__ import annotations

import ast
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from spillway.report import live
from spillway.report.live import LiveLine, LiveView

NOTEBOOK = Path(__file__).parents[2] / "examples" / "under_a_budget.ipynb"
CODE = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


class Front:
    """What a notebook displays. Stands in for IPython, whose `display` gives a handle for something with an id and
    shows anything else for good."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kernel: bool = True) -> None:
        self.displays: list[list[str]] = []
        """Of every place, all that was ever seen there."""
        shell = types.SimpleNamespace(kernel=object()) if kernel else types.SimpleNamespace()
        package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        vars(package).update(__path__=[], get_ipython=lambda: shell, display=module)
        vars(module).update(display=self.display)
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", module)

    def display(self, shown: Any, *, display_id: bool = False) -> Any:
        place = [self.seen(shown)]
        self.displays.append(place)
        update = lambda shown: place.append(self.seen(shown))  # noqa: E731
        return types.SimpleNamespace(update=update) if display_id else None

    @staticmethod
    def seen(shown: Any) -> str:
        html = getattr(shown, "_repr_html_", None)
        return str(html() if html is not None else repr(shown))


def run(cell: str, names: dict[str, Any], front: Front) -> None:
    """As IPython does: what the last line of a cell comes to is displayed."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if isinstance(last, ast.Expr) and (value := eval(compile(ast.Expression(last.value), "cell", "eval"), names)):
        front.display(value)


def trained(steps: int) -> spillway.Session:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters())
    report = spillway.ReportOptions(live=True)
    with spillway.manage(model, optimizer, budget="600KiB", method="lru", report=report) as memory:
        for _ in range(steps):
            with memory.step():
                model(torch.ones(512, 64)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                memory.log(loss=0.5)
    return memory


@pytest.mark.long
def test_every_cell_of_the_notebook_runs_and_the_training_is_shown_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "REDRAW", 0.0)
    front, names = Front(monkeypatch), dict[str, Any]()
    for cell in CODE:
        run("".join(cell["source"]), names, front)
    while_training, afterwards = front.displays
    for number, (html, loss) in enumerate(zip(while_training, names["plain"], strict=True)):
        assert f"step {number}, loss {loss:.4g}<" in html
    assert while_training[-1] == afterwards[0]
    assert "<svg" in (tmp_path / "run.html").read_text("utf-8")
    assert "the smallest budget that should work is" in capsys.readouterr().out


def test_the_notebook_is_kept_without_what_it_printed() -> None:
    assert [cell["outputs"] for cell in CODE if cell["outputs"]] == []


def test_a_picture_has_the_peak_of_every_step_the_budget_and_what_left(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(monkeypatch)
    memory = trained(3)
    ((*_, html),) = front.displays
    latest = memory.history[-1]
    assert latest.bytes_out + latest.dropped_bytes > 0
    assert html.count("<svg") == 2
    assert "budget 600.00 KiB" in html
    assert "step 2, loss 0.5<" in html
    assert re.findall(r"https?:|<script|@import", html) == []


def test_the_last_step_is_shown_when_the_session_closes_and_no_step_in_between_that_came_too_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "REDRAW", 3600.0)
    front = Front(monkeypatch)
    memory = trained(4)
    ((first, last),) = front.displays
    assert "step 0," in first
    assert "step 3," in last
    memory.close()
    assert len(front.displays[0]) == 2


def test_a_long_run_takes_no_longer_to_draw_than_its_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    Front(monkeypatch)
    (report,) = trained(1).history
    view = LiveView([report] * (3 * live.SHOWN))
    assert view._repr_html_() == LiveView([report] * live.SHOWN)._repr_html_()
    assert repr(view) == live.line(report)
    assert "No step has ended" in LiveView()._repr_html_()


@pytest.mark.parametrize("kernel", [True, False])
def test_what_suits_is_shown(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Front(monkeypatch, kernel=kernel)
    assert isinstance(live.shown(), LiveView if kernel else LiveLine)
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert isinstance(live.shown(), LiveLine)


def test_a_session_that_shows_nothing_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(monkeypatch)
    monkeypatch.setattr(live, "shown", None)  # would raise, were it called
    model = torch.nn.Linear(4, 4)
    with spillway.manage(model, budget=None) as memory, memory.step():
        model(torch.ones(1, 4)).sum().backward()
    assert front.displays == []
    assert memory._live is None
