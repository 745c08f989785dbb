"""`spillway advise WORKLOAD --simulate DEVICE`: the answer for a device that is not here, for every shape asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cpu.test_advise_measuring import advise

ASKED = ("bert-small", "--simulate", "v100-pcie", "--memory", "1GB", "--methods", "checkpoint", "--batches", "32,64,96")


@pytest.mark.long
def test_every_depth_and_width_is_answered_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    shapes = ("--layers", "1,2", "--width", "64,128")
    code, out, err = advise(capsys, *ASKED, *shapes, "--json", "--output", page)
    assert code == 0, err
    networks = json.loads(out)["networks"]
    rows = [row for network in networks for row in network["rows"] if row["method"] == "plain"]
    assert [(row["layers"], row["hidden"]) for row in rows] == [("1", "64"), ("1", "128"), ("2", "64"), ("2", "128")]
    assert all("v100-pcie" in row["hardware"] and row["r_memory"] > 0.999 for row in rows)
    alphas = [row["alpha"] for row in rows]
    assert sorted(alphas) == [alphas[0], alphas[2], alphas[1], alphas[3]], "wider and deeper takes more"
    for network in networks:
        for rule in network["offload_or_recompute"]:
            assert rule["phi"]["recompute, input offloaded"] > rule["phi"]["offload"] > 0
            assert rule["first"] in rule["sentence"]
    assert all(network["offload_or_recompute"] for network in networks[2:]), "one layer does not repeat"
    drawn = page.read_text("utf-8")
    assert "hidden size" in drawn
    assert "layers" in drawn


@pytest.mark.long
@pytest.mark.parametrize("how", [(), ("--verify",), ("--devices", "1,4", "--link", "1GB/s"), ("--json",)])
def test_what_is_simulated_is_nowhere_called_measured(
    how: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    code, out, err = advise(capsys, *ASKED[:-1], "32,64", *how, "--output", page, "--write", table)
    assert code == 0, err
    assert "simulated" in out
    if how == ("--json",):
        document = json.loads(out)
        assert document["figures"] == "simulated"
        assert {"simulated_batch", "simulated_throughput"} <= document["rows"][0].keys()
    drawn = re.sub("<svg.*?</svg>|<style.*?</style>", "", page.read_text("utf-8"), flags=re.DOTALL)
    for text in (out, err, drawn):
        assert "measure" not in text.lower()
    code, again, err = advise(capsys, "--from", table)
    assert (code, "easure" in again) == (0, False), "what is read back is known to be simulated"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--width", "100"), "The workload bert-small has a width that is a multiple of 64, not 100."),
        (("--width", "64,x"), "--width"),
        (("--fresh",), "--fresh is for measuring, and --simulate measures nothing: leave one out."),
    ],
)
def test_what_cannot_be_asked_gets_one_sentence(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = advise(capsys, *ASKED, *arguments)
    assert (code, out) == (1, "")
    assert reason in " ".join(err.split())
    assert "Traceback" not in err


def test_a_width_is_not_for_a_file_of_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = advise(capsys, "--from", tmp_path / "m.csv", "--width", "64")
    assert (code, "--width is for measuring" in err) == (1, True)
