"""`spillway.simulate`, and the verb: names, files and figures around the simulated engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import spillway
from spillway.cli import main
from spillway.costs.device import DEVICES
from spillway.costs.roofline import timed
from spillway.errors import BudgetError, UnknownMethodError, UsageError
from spillway.ir import Change, Recorded, read_run, write_step
from spillway.methods import LRU
from tests.pure.recorded import layers

STEP = layers(16)
PEAK = STEP.plain_peak()
COUNTED = replace(STEP, ops=tuple(replace(op, traffic=10**9) for op in STEP.ops))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.jsonl"
    write_step(path, Recorded(step=STEP, workload="layers", facts={}))
    return path


def test_names_files_and_shares_are_understood(file: Path) -> None:
    by_name = spillway.simulate(file, "0.5x", "lru", "a100")
    assert by_name == spillway.simulate(STEP, PEAK // 2, LRU(), DEVICES["a100"])
    assert by_name.peak_bytes <= PEAK // 2


def test_ops_take_the_devices_seconds_unless_the_measured_ones_are_wanted() -> None:
    assert spillway.simulate(COUNTED, "1x", "keep-all", measured=True).plain_seconds == pytest.approx(32e-3)
    modelled = sum(op.seconds or 0 for op in timed(COUNTED, DEVICES["a100"]).ops)
    assert spillway.simulate(COUNTED, "1x", "keep-all").plain_seconds == pytest.approx(modelled)
    assert modelled != pytest.approx(32e-3)
    without = replace(COUNTED, ops=tuple(replace(op, seconds=None) for op in COUNTED.ops))
    assert spillway.simulate(without, "1x", "keep-all").plain_seconds == pytest.approx(modelled)
    with pytest.raises(UsageError, match="nothing was measured"):
        spillway.simulate(without, "1x", "keep-all", measured=True)


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    with pytest.raises(UnknownMethodError, match="no method 'best'; choose one of auto, checkmate, checkpoint, delta"):
        spillway.simulate(STEP, "0.5x", "best")
    with pytest.raises(UnknownMethodError, match="no method 5; choose one of"):
        spillway.simulate(STEP, "0.5x", 5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no device 'abacus'"):
        spillway.simulate(STEP, "0.5x", "lru", "abacus")
    with pytest.raises(BudgetError, match="more than 0 and at most 1"):
        spillway.simulate(STEP, "0x", "lru")
    with pytest.raises(UsageError, match="no tier 'nvme'; choose one of host, disk"):
        spillway.simulate(STEP, "0.5x", "lru", tier="nvme")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="1 step or more; got 0"):
        spillway.simulate(STEP, 1, "window", steps=0)  # before a planner is asked, which has no plan


def test_the_verb_prints_its_figures_and_writes_a_run_file_that_can_be_drawn(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(file), "--budget", "0.4x", "--method", "delta", "-o", str(run), "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    ran = spillway.simulate(STEP, "0.4x", "delta")
    assert (told["status"], told["peak_bytes"], told["seconds"]) == ("ok", ran.peak_bytes, ran.seconds)
    written = read_run(run)
    assert written.timelines == [ran.timeline]
    assert any(event.change is Change.MOVE for event in written.timelines[0].events)
    report = written.steps[0]
    assert (report.peak_bytes, report.bytes_out, report.seconds) == (ran.peak_bytes, ran.bytes_out, ran.seconds)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--perfetto", str(tmp_path / "trace.json")])
    assert ended.value.code == 0
    page = (tmp_path / "run.html").read_text()
    assert "copy-out" in page
    assert "copy-in" in (tmp_path / "trace.json").read_text()


def test_the_verb_says_in_a_sentence_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(tmp_path / "none"), "--budget", "1GiB"])
    assert ended.value.code == 1
    assert "none: No such file or directory." in capsys.readouterr().err


def test_the_verb_prints_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", str(file), "--budget", "2MiB", "--method", "lru"])
    out = capsys.readouterr().out
    assert out.startswith("layers under lru on a100, simulated: oom. Op 1 (aten.layer.default) needs 3.00 MiB")
