"""Every page in headless Chromium: nothing on the console, nothing asked for, nothing cut off, all without a mouse.

`pytest tests/pages --screenshots docs/images` also writes the pictures that the documents show.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pages.written import PAGES, SIMULATED, STEPS, write_all, write_papers

sync_api = pytest.importorskip("playwright.sync_api", reason="pages are looked at with playwright")
pytest.importorskip("matplotlib", reason="two of the pages have pictures of matplotlib's")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
SCREENS = {
    "wide": ("light", 1200),
    "phone": ("dark", 360),
    "wide, dark": ("dark", 1200),
    "phone, light": ("light", 360),
}
SMALLEST_TEXT = 7.0
"""Pixels of the letters of a picture on a phone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("pages")
    write_all(folder)
    torch.set_num_threads(before)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Opened:
    """A page in a browser, and what it said and asked for meanwhile."""

    def __init__(self, browser: Any, path: Path, screen: str, *, script: bool = True) -> None:
        scheme, width = SCREENS[screen]
        self.context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 800}, java_script_enabled=script, offline=True
        )
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def find(self, script: str) -> Any:
        return self.page.evaluate(f"() => {{ {script} }}")


CUT = """
const cut = [];
const note = (what, one) => cut.push(what + ": " + one.outerHTML.slice(0, 90));
for (const one of document.body.querySelectorAll("*")) {
  const style = getComputedStyle(one);
  if (one.closest("svg") || one.closest("[hidden]") || style.display === "inline") continue;
  const scrolls = ["auto", "scroll"].includes(style.overflowX);
  if (style.textOverflow === "ellipsis") note("ellipsis", one);
  if (one.scrollWidth <= one.clientWidth + 1) continue;
  if (!scrolls) note("too wide", one);
  if (scrolls && one.tabIndex < 0) note("by mouse alone", one);
}
return cut;
"""
CONTRAST = """
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (text) => {
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = numbers(text).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = (one) => {
  for (; one; one = one.parentElement) {
    const [r, g, b, a] = numbers(getComputedStyle(one).backgroundColor);
    if (a !== 0) return `rgb(${r}, ${g}, ${b})`;
  }
  return "rgb(255, 255, 255)";
};
const found = [];
const texts = "h1, h2, h3, h4, p, dt, dd, th, td, li, summary, code, figcaption, a";
for (const one of document.body.querySelectorAll(texts)) {
  if (!one.innerText) continue;
  const [above, below] = [light(getComputedStyle(one).color), light(paper(one))].sort((a, b) => b - a);
  if ((above + 0.05) / (below + 0.05) < 4.5) found.push(one.outerHTML.slice(0, 90));
}
return [light(paper(document.body)), found];
"""
LETTERS = """
return [...document.querySelectorAll("svg text")].filter((one) => one.textContent.trim()).map((one) => {
  const matrix = one.getScreenCTM();
  return parseFloat(getComputedStyle(one).fontSize) * Math.hypot(matrix.a, matrix.b);
});
"""


@pytest.mark.long(but=3)
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_nothing_on_the_console_asks_for_nothing_and_cuts_nothing_off(
    browser: Any, folder: Path, name: str, screen: str
) -> None:
    path = folder / f"{name}.html"
    with Opened(browser, path, screen) as opened:
        assert opened.said == []
        assert opened.asked == [path.as_uri()]
        opened.find('document.querySelectorAll("details").forEach((one) => (one.open = true))')
        assert opened.find("return document.documentElement.scrollWidth") <= SCREENS[screen][1]
        assert opened.find(CUT) == []
        brightness, hard_to_read = opened.find(CONTRAST)
        assert hard_to_read == []
        assert (brightness > 0.5) is (SCREENS[screen][0] == "light")
        assert min(opened.find(LETTERS), default=SMALLEST_TEXT) >= SMALLEST_TEXT


@pytest.mark.parametrize("name", PAGES)
def test_what_is_to_be_reached_is_reached_by_the_tab_key_and_has_a_name(browser: Any, folder: Path, name: str) -> None:
    with Opened(browser, folder / f"{name}.html", "phone") as opened:
        wanted = opened.find(
            'return [...document.querySelectorAll("a[href], summary, [tabindex]")]'
            ".filter((one) => one.checkVisibility()).length"
        )  # fmt: skip
        assert opened.find(
            'return [...document.querySelectorAll(".scroll, .table, svg[role]")]'
            '.filter((one) => !one.getAttribute("aria-label")).length'
        ) == 0  # fmt: skip
        reached = 0
        while reached <= wanted:
            opened.page.keyboard.press("Tab")
            if opened.find("return document.activeElement === document.body"):
                break
            reached += 1
        assert reached == wanted


@pytest.mark.parametrize("name", ["run", "long", "simulated"])
def test_arrow_keys_and_the_mouse_tell_what_stands_as_text_below(browser: Any, folder: Path, name: str) -> None:
    with Opened(browser, folder / f"{name}.html", "wide") as opened:
        figure = opened.page.locator("figure").last
        figure.locator("details.as-text").evaluate("(one) => (one.open = true)")
        items = figure.locator("details.as-text li")
        told = figure.locator(".told")
        assert told.evaluate("(one) => getComputedStyle(one).visibility") == "hidden"
        view = figure.locator(".scroll").first
        view.focus()
        for key, number in (("ArrowRight", 0), ("ArrowRight", 1), ("End", items.count() - 1)):
            view.press(key)
            assert told.evaluate("(one) => getComputedStyle(one).visibility") == "visible"
            assert told.text_content() == items.nth(number).text_content()
        view.press("Escape")
        assert told.evaluate("(one) => getComputedStyle(one).visibility") == "hidden"
        view.locator("svg").hover()
        assert told.evaluate("(one) => getComputedStyle(one).visibility") == "visible"
        assert told.text_content() in items.all_text_contents()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_the_same_where_scripts_do_not_run(browser: Any, folder: Path, name: str) -> None:
    texts = []
    for script in (True, False):
        with Opened(browser, folder / f"{name}.html", "wide", script=script) as opened:
            texts.append(opened.page.locator("body").inner_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulated_page_says_so_in_title_headings_pictures_and_tables_and_never_measured(
    browser: Any, folder: Path, name: str
) -> None:
    with Opened(browser, folder / f"{name}.html", "wide") as opened:
        assert "simulated" in opened.page.title()
        assert "simulated" in opened.page.locator("h1").inner_text()
        opened.find('document.querySelectorAll("details").forEach((one) => (one.open = true))')
        everything = re.sub("predicted and measured|measured one", "", opened.page.locator("body").inner_text())
        assert "easured" not in everything
        for picture in opened.page.locator("figure").all():
            assert "imulated" in picture.inner_text()
        labels = opened.find(
            'return [...document.querySelectorAll(".scroll, .table.steps")]'
            '.map((one) => one.getAttribute("aria-label"))'
        )  # fmt: skip
        assert labels
        assert [label for label in labels if "imulated" not in label] == []


def test_memory_at_the_peak_is_told_by_module_op_and_line(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "run.html", "wide") as opened:
        rows = opened.page.locator("h4:has-text('By module, op and line') + .table tbody tr")
        cells = [row.locator("td").all_inner_texts() for row in rows.all()]
        assert any(re.fullmatch(r".*pages/written\.py:\d+", row[-1]) for row in cells)
        assert any(re.fullmatch(r"layers\.\*\.(wide|narrow|attention) \(\d\)", row[-3]) for row in cells)
        assert {"plain peak", "resident set above start"} <= set(opened.page.locator("dt").all_inner_texts())


def test_blocks_are_told_by_name_with_what_they_held_and_the_line_of_their_forward(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "blocks.html", "wide") as opened:
        rows = opened.page.locator("h2:has-text('What fills memory, by block') ~ .table tbody tr")
        cells = [row.locator("td").all_inner_texts() for row in rows.all()]
        assert [row[0] for row in cells] == [f"layers.{number}" for number in range(6)]
        assert {row[5] for row in cells} == {"Block"}
        assert all(re.fullmatch(r".*pages/written\.py:\d+", row[-1]) for row in cells)


def test_every_row_of_a_long_run_can_be_had(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "long.html", "wide") as opened:
        assert opened.find("return document.documentElement.scrollHeight") < 3000
        with opened.page.expect_download() as download:
            opened.page.locator("a[download]").click()
        lines = Path(download.value.path()).read_text("utf-8").splitlines()
        assert len(lines) == 1 + STEPS + 50
        assert lines[0].startswith("step,signature")


def test_bars_of_a_column_begin_at_one_place(browser: Any, folder: Path) -> None:
    with Opened(browser, folder / "run.html", "wide") as opened:
        opened.find('document.querySelectorAll("details").forEach((one) => (one.open = true))')
        lefts = opened.find(
            'return [...document.querySelectorAll(".steps .meter")].map((one) => one.getBoundingClientRect().left)'
        )
        assert len(lefts) > 1
        assert len(set(lefts)) == 1


@pytest.mark.long
def test_screenshots_for_the_documents(
    browser: Any, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wanted = request.config.getoption("--screenshots")
    if wanted is None:
        pytest.skip("pictures for the documents are made with --screenshots docs/images, in two minutes")
    write_papers(tmp_path)
    memory, lanes = "figure:has(path.activation) .scroll >> nth=0", "h3:has-text('What ran where') ~ .scroll >> nth=0"
    for path, picture, shown in (
        (folder / "run.html", "memory", memory),
        (folder / "run.html", "at-the-peak", "h4:has-text('By module, op and line') + .table"),
        (folder / "run.html", "lanes", lanes),
        (folder / "long.html", "steps", "figure .scroll >> nth=0"),
        (tmp_path / "delta.html", "paper-delta", memory),
        (tmp_path / "window.html", "paper-window", "h3:has-text('window') ~ .scroll >> nth=-1"),
        (tmp_path / "mimose.html", "paper-mimose", memory),
        (tmp_path / "dynn-offload.html", "paper-dynn-offload", lanes),
        (tmp_path / "papaya.html", "paper-papaya", "figure .scroll >> nth=0"),
    ):
        with Opened(browser, path, "wide") as opened:
            opened.page.locator(shown).screenshot(path=Path(wanted) / f"{picture}.png")
