"""`spillway compare` from its command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spillway.calibration.named_device import device_of
from spillway.cli import compare as verb
from spillway.cli import main
from spillway.costs.roofline import timed
from spillway.errors import UsageError
from spillway.ir import Recorded, write_step
from spillway.methods import METHODS, Method
from spillway.report import drawing
from spillway.simulation.simulated_engine import simulate
from spillway.units import MiB
from tests.pure.recorded import layers
from tests.shared import HANGS, without_page

KEYS = [
    "method", "budget_bytes", "status", "overhead", "seconds", "peak_bytes", "bytes_out", "bytes_in",
    "recomputed_seconds", "overhead_range", "seconds_range", "why", "remark",
]  # fmt: skip


@pytest.fixture
def spillway(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[object, str, str]]:
    """Runs a command in a folder with a recorded step."""
    record(tmp_path, 12)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["compare", *map(str, arguments)])
        written = capsys.readouterr()
        return ended.value.code, written.out, written.err

    return run


def record(folder: Path, depth: int) -> None:
    write_step(folder / "step.jsonl", Recorded(step=layers(depth), workload="layers", facts={}))


Command = Callable[..., tuple[object, str, str]]


def test_json_is_a_list_of_rows_as_a_direct_simulation_has_them(spillway: Command) -> None:
    code, out, err = spillway("step.jsonl", "--budgets", "0.5,1", "--methods", "lru,delta", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert [list(row) for row in document] == [KEYS] * 4
    assert [(row["method"], row["budget_bytes"]) for row in document] == [
        (method, nbytes * MiB) for method in ("lru", "delta") for nbytes in (7, 14)
    ]
    for row in document:
        alone = simulate(
            layers(12),
            allowed=row["budget_bytes"],
            method=METHODS[row["method"]].on_paper(),
            device=device_of("a100"),
        )
        assert (row["status"], row["seconds"], row["peak_bytes"]) == ("ok", alone.seconds, alone.peak_bytes)
        assert (row["overhead"], row["bytes_out"], row["bytes_in"]) == (
            alone.overhead, alone.bytes_out, alone.bytes_in
        )  # fmt: skip
        assert row["recomputed_seconds"] == alone.recomputed_seconds


def test_the_table_the_page_and_the_picture_are_written(spillway: Command) -> None:
    code, out, err = spillway(
        "step.jsonl", "--budgets", "2MiB,0.5..1.0:3", "--methods", "lru,sqrt-n", "--no-bounds", "-o",
        "page.html", "--png", "picture.png",
    )  # fmt: skip
    assert code == 0, err
    lines = out.splitlines()
    (lru,) = [line for line in lines if "lru" in line]
    assert lru.replace("│", " ").split()[:2] == ["lru", "oom"]
    assert "Seconds of ops are those measured when it was recorded; copies take what a100 takes." in lines
    assert lines[-2:] == ["page.html", "picture.png"]
    assert "methods compared" in Path("page.html").read_text("utf-8")
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")


def test_where_there_is_no_terminal_progress_is_a_line_a_row(spillway: Command) -> None:
    _, _, err = spillway("step.jsonl", "--budgets", "1.0", "--methods", "lru,keep-all", "--json", "--processes", 1)
    assert err.splitlines() == ["1 of 2: lru under 14.00 MiB: 1.000", "2 of 2: keep-all under 14.00 MiB: 1.000"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("step.jsonl", "--methods", "fastest"),
            "There is no method 'fastest'; choose 'all' or some of auto, keep-all, lru",
        ),
        (("step.jsonl", "--budgets", "half"), "'half' is no budget; write for example '0.5x' (of the plain peak)"),
        (("step.jsonl", "--device", "abacus"), "There is no device 'abacus'; choose one of here, "),
        (("missing.jsonl",), "missing.jsonl: No such file or directory."),
        (("resnet",), "resnet: No such file or directory. `spillway record resnet -o step.jsonl` records a step of"),
        (("bad.jsonl",), "bad.jsonl, line 1: "),
        (("step.jsonl", "-o", "missing/page.html"), "missing/page.html cannot be written"),
        (("step.jsonl", "--png", "."), ". is a directory and cannot be written as a file."),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(spillway: Command, arguments: tuple[str, ...], expected: str) -> None:
    Path("bad.jsonl").write_text("step,loss\n")
    code, out, err = spillway(*arguments)
    assert (code, out, len(without_page(err))) == (1, "", 1)
    assert err.startswith(f"spillway: {expected}")


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(
    spillway: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    code, out, err = spillway("step.jsonl", "--png", "picture.png")
    assert (code, out) == (1, "")
    assert err.startswith("spillway: Drawing a comparison takes matplotlib, which is not installed")
    assert spillway("step.jsonl", "--methods", "lru", "--no-bounds")[0] == 0


def test_a_row_that_cannot_be_worked_out_leaves_the_others_and_exit_code_1(
    spillway: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise UsageError("Something is not installed.")

    monkeypatch.setattr("spillway.simulation.sweep.METHODS", {**METHODS, "lru": Method(refused)})
    code, out, err = spillway(
        "step.jsonl", "--methods", "lru,delta", "--budgets", "0.8,1", "--json", "--processes", 1, "-o", "page.html"
    )
    assert code == 1
    assert [row["method"] for row in json.loads(out)] == ["delta", "delta"]
    assert err.splitlines()[-1] == (
        "spillway: lru under 14.00 MiB: Something is not installed. 1 more could not be worked out."
    )
    assert "Incomplete: 2 of 4 rows were worked out." in Path("page.html").read_text("utf-8")


@pytest.mark.long
def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    record(tmp_path, 300)
    program = "import sys; from spillway.cli import main; main(sys.argv[1:])"
    arguments = ["compare", "step.jsonl", "--budgets", "0.2..1.0:200", "--methods", "lru,delta,dtr-eqclass", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *arguments, "-o", "page.html", "--no-bounds",
         "--processes", "2"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert process.stderr is not None
    seen = [process.stderr.readline() for _ in range(3)]
    assert seen[0].startswith("1 of 600: "), seen
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: every process of the group hears it
    out, err = process.communicate(timeout=HANGS)
    document: list[dict[str, Any]] = json.loads(out)
    assert process.returncode == 130
    assert 3 <= len(document) < 600
    assert all(list(row) == KEYS for row in document)
    assert "Traceback" not in err
    assert err.splitlines()[-1] == (
        f"spillway: interrupted. Incomplete: {len(document)} of 600 rows were worked out. What was done is kept."
    )
    assert f"Incomplete: {len(document)} of 600" in (tmp_path / "page.html").read_text("utf-8")
    deadline = time.monotonic() + HANGS
    while _group_lives(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_step_is_timed_for_the_device_where_somebody_counted(spillway: Command) -> None:
    step = layers(4, seconds=None)
    write_step("plain.jsonl", Recorded(step=step, workload="layers", facts={}))
    code, out, _ = spillway(
        "plain.jsonl", "--budgets", "1.0", "--methods", "keep-all", "--device", "v100-pcie", "--json"
    )
    (row,) = json.loads(out)
    expected = sum(op.seconds or 0.0 for op in timed(step, device_of("v100-pcie")).ops)
    assert (code, row["seconds"]) == (0, pytest.approx(expected))


def test_nobody_looks_for_bounds_that_nobody_would_see(spillway: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = verb.compare

    def spied(*given: Any, bounds: bool, **options: Any) -> Any:
        asked.append(bounds)
        return real(*given, bounds=False, **options)

    monkeypatch.setattr(verb, "compare", spied)
    for more in (["--json"], [], ["--json", "-o", "page.html"]):
        assert spillway("step.jsonl", "--budgets", "1.0", "--methods", "lru", *more)[0] == 0
    assert asked == [False, True, True]
