"""The page of what advise answers."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from spillway.advisor import advice_figures as figures
from spillway.advisor.advice_figures import STYLES, styles_of
from spillway.advisor.advice_page import advice_page
from spillway.advisor.gains import Sweep, over_devices, sweeps_of
from spillway.advisor.measurements import Experiment, Samples
from spillway.advisor.model import Cost
from spillway.advisor.verdict import Row, advise
from spillway.cli import main
from spillway.errors import UsageError
from spillway.report import drawing
from tests.shared import without_page

pytest.importorskip("matplotlib", reason="pictures take matplotlib")

PLAIN = Cost(alpha=200e6, beta=1e9, gamma=0.010, delta=0.2)
CHECKPOINT = Cost(alpha=40e6, beta=1e9, gamma=0.013, delta=0.2)
SWAP = Cost(alpha=30e6, beta=1e9, gamma=0.050, delta=0.2)
HEAVY = Cost(alpha=250e6, beta=1e9, gamma=0.009, delta=0.2)
LIMIT = 8e9
BAD = '<script>alert("1")</script>--><b>$x_{$\x07'


def samples(cost: Cost, sizes: Sequence[int] = (2, 4, 8, 16, 24)) -> Samples:
    return Samples(
        seconds={size: cost.seconds(size) for size in sizes}, peaks={size: cost.nbytes(size) for size in sizes}
    )


def answer(network: str = "net", layers: int = 24, **methods: Cost | Samples) -> list[Row]:
    named: Mapping[str, Cost | Samples] = methods or {"plain": PLAIN, "checkpoint": CHECKPOINT, "swap": SWAP}
    there = Experiment(
        hardware="card", network=network, layers=f"{layers}", hidden="", precision="", source="",
        methods={name: samples(one) if isinstance(one, Cost) else one for name, one in named.items()},
    )  # fmt: skip
    return advise(there, LIMIT)


KINDS = {
    (method, size): {"parameters": 400_000_000, "activations": size * 10**8, "odd": 10**7}
    for method in ("plain", "checkpoint") for size in (2, 4)
}  # fmt: skip


def page_of(answers: Sequence[Sequence[Row]], sweeps: Sequence[Sweep] = (), **more: Any) -> str:
    return advice_page(answers, **{"title": "net", "facts": {"device": "card"}, "kinds": {}} | more, sweeps=sweeps)


class Reader(HTMLParser):
    """What a browser would make of a page."""

    VOID = ("meta", "br", "img", "link", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.wanted: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and value:
                (self.targets if value.startswith("#") else self.wanted).append(value)
            if name == "id" and value:
                self.ids.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def whole() -> str:
    """Of one network, with everything that a page may have."""
    rows = answer()
    depth = sweeps_of([answer(layers=12), rows, answer(layers=48)])
    return page_of([rows], [over_devices(rows, [1, 2, 8], 10**9, 10e9), *depth], kinds=KINDS)


def test_the_answer_stands_on_top_and_every_method_in_a_table(whole: str) -> None:
    body = whole[whole.index("<body>") :]
    assert body.index("net, 24 layers on card: checkpoint pays: ") < body.index("<table>")
    table = body[body.index("<table>") : body.index("</table>")]
    assert re.findall(r'<th scope="row" class="text">([^<]*)', table) == ["plain", "checkpoint", "swap"]
    row = table[table.index(">checkpoint<") :]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
    plain, method = PLAIN.throughput(35), CHECKPOINT.throughput(175)
    assert cells[:4] == ["pays", "175", f"{method:.4g}", f"{method / plain:.3f}"]
    assert cells[6:9] == [f"{(160e6 / 0.003) / (7e9 / 0.2):.3f}", "40.00 MB", "953.67 MiB"]


def test_it_needs_nothing_else_and_has_no_id_twice(whole: str) -> None:
    found = read(whole)
    assert found.wanted == []
    assert "script" not in found.tags
    assert set(found.targets) <= {f"#{name}" for name in found.ids}
    assert set(re.findall(r"url\(#([^)]*)\)", whole)) <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert re.findall(r"https?://\S+", whole.replace("http://www.w3.org/", "")) == []


def test_every_figure_of_the_paper_is_there_with_words_for_who_cannot_see_it(whole: str) -> None:
    titles = re.findall(r"<figure>\s*<h3>([^<]*)</h3>", whole)
    assert titles == [
        "Throughput against batch", "Memory by kind", "Fits", "Score against point", "Gain by number of devices",
        "Gain by depth",
    ]  # fmt: skip
    pictures = re.findall(r"<svg.*?</svg>", whole, re.DOTALL)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", whole, re.DOTALL)
    assert len(pictures) == len(captions) == len(titles)
    assert all('role="img" aria-label="' in picture for picture in pictures)
    assert "plain at batch 2 582.7" not in captions[1]  # bytes have one form
    assert "plain at batch 2 581.74 MiB" in captions[1]
    assert "checkpoint R 1.0000 and R 1.0000" in captions[2]
    for picture in pictures:
        texts = {element.text for element in ElementTree.fromstring(picture).iter() if element.tag.endswith("text")}
        assert "checkpoint" in {word for text in texts for word in re.split(r"[ ,]", text or "")}


def test_colours_are_those_of_the_page_in_light_and_dark(whole: str) -> None:
    light, dark = whole.split("prefers-color-scheme: dark", 1)
    named = set(re.findall(r"var\(--(\w+)\)", whole))
    assert {
        "ink",
        "soft",
        "line",
        "paper",
        *(colour.variable for colour in (drawing.GREY, drawing.GREEN, drawing.ORANGE)),
    } <= named
    for name in named:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark
    pictures = "".join(re.findall(r"<svg.*?</svg>", whole, re.DOTALL))
    assert re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", pictures) == []


def test_where_a_method_begins_to_pay_is_said_below_a_sweep() -> None:
    shallow = answer(layers=12, plain=Cost(alpha=20e6, beta=1e9, gamma=0.010, delta=0.2), ckpt=CHECKPOINT)
    deep = answer(layers=48, plain=PLAIN, ckpt=CHECKPOINT)
    page = page_of([shallow, deep], sweeps_of([shallow, deep]))
    assert "ckpt: predicted: pays from 48 layers on, and not at 12 (between the two at " in page
    assert "By layers: net on card" in page
    assert '<li><a href="#s1">layers: net on card</a></li>' in page
    rows = answer(plain=PLAIN, ckpt=SWAP)
    swept = over_devices(rows, [1, 4], 10**9, 1e9)
    assert "ckpt: predicted: pays from 4 devices on, and not at 1." in page_of([rows], [swept])


def test_several_networks_have_a_section_each_and_a_table_of_contents() -> None:
    few = answer("few", plain=samples(PLAIN, [4]))
    page = page_of([answer("one"), few, answer("two")], [])
    found = read(page)
    assert [name for name in found.ids if name in ("e1", "e2", "e3", "rest")] == ["e1", "e2", "rest"]
    assert [target for target in found.targets if target in ("#e1", "#e2", "#rest")] == ["#e1", "#e2", "#rest"]
    rest = page[page.index('id="rest"') :]
    assert "few, 24 layers on card: nothing can be predicted" in rest
    assert "<nav" not in page_of([few])
    assert "Nothing can be predicted" in page_of([few])
    assert "Nothing can be predicted" in page_of([])


def test_names_from_a_file_are_text_wherever_they_stand() -> None:
    methods = {"plain": PLAIN, BAD: CHECKPOINT}
    rows = answer(BAD, **methods)
    sweeps = [over_devices(rows, [1, 2], 10**9, 1e9), *sweeps_of([rows, answer(BAD, 48, **methods)])]
    kinds = {(BAD, 2): {BAD: 10**9}}
    page = page_of([rows, answer(BAD, 48, **methods)], sweeps, title=BAD, facts={BAD: BAD})
    for written in (page, page_of([rows], sweeps, kinds=kinds, title=BAD)):
        assert "<script" not in written
        assert "<b>" not in written
        assert "&lt;script&gt;" in written
        assert {"script", "b"}.isdisjoint(read(written).tags)


def test_what_cannot_be_drawn_is_left_out() -> None:
    def titles(*answers: Sequence[Row]) -> list[str]:
        return re.findall(r"<figure>\s*<h3>([^<]*)</h3>", page_of(answers))

    all_of_it = ["Throughput against batch", "Memory by kind", "Fits", "Score against point"]
    assert titles(answer()) == all_of_it
    assert titles(answer(plain=PLAIN)) == all_of_it[:3]
    # One is not fitted, one found no memory, one does not fit, memory of one does not grow, one is no slower.
    odd = answer(
        plain=PLAIN, a=Samples(seconds={4: 1.0}), b=Samples(failed={4}), c=Cost(alpha=1, beta=9e9, gamma=1, delta=0),
        d=Cost(alpha=0, beta=1e9, gamma=1, delta=0), e=Cost(alpha=1e6, beta=1e9, gamma=0.001, delta=0.1), f=HEAVY,
    )  # fmt: skip
    assert titles(odd) == all_of_it
    assert titles(answer(plain=Cost(alpha=1e6, beta=9e9, gamma=1, delta=0), ckpt=CHECKPOINT))[0] == all_of_it[0]
    swept = over_devices(answer(plain=PLAIN, b=Samples(failed={4})), [2, 4], 1, 1.0)
    assert figures.gain(swept, styles_of(["b"]), "s") is None


def test_a_method_that_saves_memory_and_loses_nothing_is_drawn_where_no_time_is_fixed() -> None:
    plain, saving = (Cost(alpha=alpha, beta=0, gamma=0.25, delta=0) for alpha in (2e8, 1e8))
    page = page_of([answer(plain=plain, checkpoint=saving)])
    assert "checkpoint has inf times the point" in page
    assert " nan " not in page


def test_many_bars_are_the_smallest_and_the_largest_batch_of_each_method() -> None:
    kinds = {(method, size): {"other": size} for method in ("a", "b") for size in range(1, 31)}
    assert list(figures._fewer(kinds)) == [("a", 1), ("a", 30), ("b", 1), ("b", 30)]


def test_methods_are_told_apart() -> None:
    named = styles_of(["plain", "checkpoint", "swap", "compress", "checkpoint-swap", "compress-swap"])
    assert len(set(named.values())) == len(named)
    assert {style.mark for style in named.values()} == {"o", "s", "^", "D", "P", "X"}
    strange = styles_of([*STYLES, *(f"method {number}" for number in range(30))])
    others = [style for name, style in strange.items() if name not in STYLES]
    assert len(set(others)) == 30
    assert set(others).isdisjoint(STYLES.values())


def test_the_same_answers_are_the_same_page() -> None:
    rows = answer()
    assert page_of([rows]) == page_of([rows])


def test_without_matplotlib_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^Drawing the page takes matplotlib.*without --output the table"):
        page_of([answer()])


# The verb


Command = Callable[..., tuple[object, str, str]]


@pytest.fixture
def spillway(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `spillway advise --from m.csv` in a folder with measurements of a network and of one that ran once."""
    lines = ["hardware,network,algorithm,batch_size,batch_time_s,peak_mb"]
    lines += [
        f"gpu,net,{method},{size},{cost.seconds(size)!r},{cost.nbytes(size) / 1e6!r}"
        for method, cost in (("exact", PLAIN), ("ckpt", CHECKPOINT), ("swap", SWAP)) for size in (2, 4, 8, 16)
    ]  # fmt: skip
    (tmp_path / "m.csv").write_text("\n".join([*lines, "gpu,alone,exact,4,1.0,100"]), "utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["advise", "--from", "m.csv", "--memory", "8GB", *map(str, arguments)])
        written = capsys.readouterr()
        return ended.value.code, written.out, written.err

    return run


DEVICES = ("--devices", "4,1,2", "--gradients", "1GB", "--link", "2 GB/s", "--latency", "1ms")


def test_the_verb_writes_a_page_and_says_where(spillway: Command) -> None:
    code, out, err = spillway("--output", "page.html", *DEVICES)
    assert (code, out.splitlines()[-1], err) == (0, "page.html", "")
    page = Path("page.html").read_text("utf-8")
    assert "Which method pays: m.csv" in page
    assert "<dt>devices</dt><dd>1, 2, 4; 953.67 MiB of gradients at 1.86 GiB/s, 1.0 ms a message</dd>" in page
    assert "Gain by number of devices" in page
    code, out, _ = spillway("-o", "page.html", "--json")
    assert (code, len(json.loads(out))) == (0, 4)


def test_files_whose_names_are_no_text_are_read_and_named(
    spillway: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.csv").rename("m\udcff.csv")
    told = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", told)
    code, _, err = spillway("--from", "m\udcff.csv", "--output", "page\udcff.html")
    assert code in (0, None), err
    assert told.buffer.getvalue().endswith(b"page\\udcff.html\n")  # type: ignore[attr-defined]
    assert "m\\udcff.csv" in Path("page\udcff.html").read_text("utf-8")


def test_several_devices_are_a_table_and_rows_for_programs(spillway: Command) -> None:
    code, out, err = spillway(*DEVICES)
    assert (code, err) == (0, "")
    exchange = {1: 0.0, 2: 2 * (0.5e9 / 2e9 + 1e-3), 4: 6 * (0.25e9 / 2e9 + 1e-3)}
    assert out.count("net on gpu: data parallel, 953.67 MiB of gradients at 1.86 GiB/s, 1.0 ms a message") == 1
    alone = next(line for line in out.splitlines() if "exchange alone" in line)
    assert re.findall(r"[\d.]+ u?m?s", alone) == ["0.0 us", "502.0 ms", "756.0 ms"]
    rows: list[dict[str, Any]] = json.loads(spillway(*DEVICES, "--json")[1], parse_constant=pytest.fail)
    assert [row["by_devices"] is None for row in rows] == [False, False, False, True]
    ckpt = rows[1]
    assert [one["devices"] for one in ckpt["by_devices"]] == [1, 2, 4]
    for one in ckpt["by_devices"]:
        more = exchange[one["devices"]]
        assert one["exchange_seconds"] == pytest.approx(more)
        assert one["delta"] == pytest.approx(0.2 + more)
        plain, mine = (cost.with_communication(more) for cost in (PLAIN, CHECKPOINT))
        assert one["predicted_batch"] == 175
        assert one["predicted_throughput"] == pytest.approx(one["devices"] * mine.throughput(175))
        assert one["times_plain"] == pytest.approx(mine.throughput(175) / plain.throughput(35))
        assert one["point"] == pytest.approx(7e9 / (0.2 + more))
    assert ckpt["by_devices"][0]["verdict"] == ckpt["verdict"] == "pays"
    swap = [one["times_plain"] for one in rows[2]["by_devices"]]
    assert swap == sorted(set(swap))  # section 6.2: the larger batch gains with every device
    assert {one["verdict"] for one in rows[2]["by_devices"]} == {"does not pay"}
    assert rows[0]["by_devices"][0]["times_plain"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--devices", "0"),
            "--devices takes whole numbers from 1 to 1,000,000 with commas between them, as 1,2,4,8; got '0'.",
        ),
        (("--devices", "2,,4"), "--devices takes whole numbers"),
        (("--devices", "2", "--gradients", "1GB"), "Devices exchange gradients in every step: say how long that takes"),
        (("--devices", "2", "--link", "1GB/s"), "Devices exchange gradients in every step"),
        (("--devices", "2", "--gradients", "1GB", "--link", "0GB/s"), "Gradients never arrive at 0 B/s"),
        (("--devices", "2", "--gradients", "1GB", "--link", "1GB"), "'1GB' is not a number of bytes for each second"),
        (("--devices", "2", "--gradients", "x", "--link", "1GB/s"), "'x' is not a number of bytes"),
        ((*DEVICES[:-1], "3"), "'3' is not a duration; write for example '20us'"),
        (("--link", "1GB/s"), "--link is about several devices: say how many with --devices 1,2,4,8."),
        (("--output", "missing/page.html"), "missing/page.html cannot be written"),
        (("--output", "."), ". is a directory"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(spillway: Command, arguments: Sequence[str], expected: str) -> None:
    code, out, err = spillway(*arguments)
    assert (out, len(without_page(err))) == ("", 1)
    assert code != 0
    assert err.startswith(f"spillway: {expected}")
