from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spillway.errors import UsageError
from spillway.methods import METHODS
from spillway.report import drawing
from spillway.report.comparison import FAMILIES, bound_sentence, render, svg, write_png
from spillway.report.drawing import spread, style_of
from spillway.simulation.sweep import Bound, Comparison, Failure, Row, SweepProblem
from spillway.units import MiB
from tests.pure.recorded import DEVICE, layers

pytest.importorskip("matplotlib", reason="pictures take matplotlib")

BUDGETS = [6 * MiB, 10 * MiB, 14 * MiB]


def ok(method: str, budget: int, overhead: float) -> Row:
    return Row(
        method=method, budget_bytes=budget, status="ok", overhead=overhead, seconds=0.024 * overhead,
        peak_bytes=budget - MiB // 2, bytes_out=MiB, bytes_in=2 * MiB, recomputed_seconds=1e-3,
    )  # fmt: skip


def comparison(*found: Row | Bound | Failure, methods: tuple[str, ...] = ("lru", "delta")) -> Comparison:
    problem = SweepProblem(step=layers(12), workload="<layers>", device=DEVICE, costs="As given.")
    return Comparison.of(problem, methods, BUDGETS, found)


OOM = Row(method="delta", budget_bytes=6 * MiB, status="oom", why="It takes 7 MiB & more.")
WHOLE = comparison(
    *(ok("lru", budget, 2.0 - budget / (14 * MiB)) for budget in BUDGETS), OOM,
    *(ok("delta", budget, 1.5 - budget / (28 * MiB)) for budget in BUDGETS[1:]),
    Bound(budget_bytes=6 * MiB, seconds=0.03, kind="cut"),
    Bound(budget_bytes=10 * MiB, seconds=0.024, kind="plain", why="Nothing fits that only recomputes."),
    Bound(budget_bytes=14 * MiB, seconds=0.024, kind="plain"),
)  # fmt: skip


class Resources(HTMLParser):
    """Everything that a page would have to fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = [value for name, value in attrs if name in ("src", "href", "xlink:href", "data") and value]
        self.found += [value for value in named if not value.startswith("#")]


def test_the_page_has_every_row_and_needs_nothing_else() -> None:
    page = render(WHOLE)
    assert page.count("<tr>") == 1 + len(WHOLE.rows) + 1 + len(WHOLE.bounds)
    assert "&lt;layers&gt; on test: methods compared" in page
    assert "It takes 7 MiB &amp; more." in page
    assert "Incomplete" not in page
    resources = Resources()
    resources.feed(page)
    assert resources.found == []
    assert re.findall(r"https?://\S+", page.replace("http://www.w3.org/", "")) == []
    assert "url(" not in re.sub(r"url\(#\w+\)", "", page)


def test_what_is_not_there_is_said_on_the_page() -> None:
    page = render(comparison(ok("lru", 6 * MiB, 1.2), Failure(method="lru", budget_bytes=MiB, why="It <broke>.")))
    assert "Incomplete: 1 of 6 rows were worked out." in page
    assert "lru under 1.00 MiB: It &lt;broke&gt;." in page
    assert "Incomplete: 0 of 6 rows" in render(comparison())


def test_the_picture_has_a_label_for_every_line_and_for_the_bounds() -> None:
    picture = ElementTree.fromstring(svg(WHOLE))
    texts = {element.text for element in picture.iter() if element.tag.endswith("text")}
    assert {"lru", "delta", "plain step: nothing takes less", "recompute only: lower bound"} <= texts
    assert "sqrt-n" not in texts


def test_every_colour_of_the_picture_is_one_of_the_page_that_knows_light_and_dark() -> None:
    picture = svg(WHOLE)
    named = set(re.findall(r"var\((--\w+)\)", picture))
    page = render(WHOLE)
    light, dark = page.split("prefers-color-scheme: dark", 1)
    assert {"--ink", "--soft", "--line"} < named
    for name in named:
        assert f"{name}:" in light
        assert f"{name}:" in dark
    assert re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", picture) == []


def test_the_same_comparison_is_the_same_page_and_a_png_is_a_png(tmp_path: Path) -> None:
    assert render(WHOLE) == render(WHOLE)
    write_png(tmp_path / "compare.png", WHOLE)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_every_method_has_a_colour_and_a_mark_of_its_own() -> None:
    styles = [style_of(name, FAMILIES) for name in METHODS]
    assert len(set(styles)) == len(styles)
    assert style_of("something new", FAMILIES) not in styles


def test_the_bound_is_named_for_what_it_is() -> None:
    assert bound_sentence(WHOLE) == (
        "Lower bound: the plain step's 24.0 ms; for what only recomputes, Checkmate's bound under 1 of 3 budgets. "
        "Without that bound under 1 of 3 budgets: Nothing fits that only recomputes."
    )
    assert bound_sentence(comparison()) == "Lower bound: the plain step's 24.0 ms."


def test_labels_keep_their_distance_and_stay_near() -> None:
    assert spread([0.5, 0.1, 0.9], 0.1) == pytest.approx([0.5, 0.1, 0.9])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert spread([0.5, 0.45, 0.4], 0.1) == pytest.approx([0.55, 0.45, 0.35])
    assert spread([], 0.1) == []
    many = sorted(spread([0.1, 0.11, 0.5, 0.51, 0.52, 0.9], 0.05))
    assert min(b - a for a, b in pairwise(many)) >= 0.05 - 1e-12


def test_without_matplotlib_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'torch-spillway\[pictures\]' adds it"):
        render(WHOLE)
