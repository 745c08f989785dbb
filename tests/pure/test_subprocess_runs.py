"""Rows: the figures of runs, and the first place where two of them differ."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest

from spillway.cli.training import broken_promises, print_rows
from spillway.ir import StepReport
from spillway.subprocess_runs.rows import FINAL_STATE, RefusedRow, Row, first_difference, plain_row, row
from spillway.subprocess_runs.run import RunRequest, RunResult, StepDone

REPORT = StepReport(
    step=0,
    signature="",
    managed=True,
    allowed=100,
    start_bytes=10,
    peak_bytes=90,
    end_bytes=10,
    peak_rss_bytes=0,
    working_bytes=0,
    seconds=2.0,
    stall_seconds=0.25,
    transfer_seconds=0.5,
    hidden_seconds=0.375,
    recomputed_ops=5,
    recomputed_seconds=0.0,
    ops=100,
    bytes_out=30,
    bytes_in=20,
    dropped_bytes=0,
    drops=0,
    moves=0,
    refusals={},
    escaped=0,
    unmanaged=0,
    logged={"loss": 4.0},
)
REQUEST = RunRequest(workload="w", seed=0, steps=3, method="lru", budget_bytes=100)


def result(*, losses: tuple[float, ...] = (4.0, 3.0, 2.0), state: str = "same", report: StepReport | None) -> RunResult:
    seconds = (9.0, 1.0, 3.0)
    steps = [StepDone(seconds=s, loss=loss, report=report) for s, loss in zip(seconds, losses, strict=False)]
    return RunResult(peak_rss_bytes=120, state=state, steps=steps)


PLAIN = result(report=None)
MANAGED = result(report=REPORT)


def test_a_row_adds_up_the_steps_and_compares_them_with_the_plain_ones() -> None:
    slower = dataclasses.replace(
        MANAGED, steps=[dataclasses.replace(step, seconds=step.seconds * 1.5) for step in MANAGED.steps]
    )
    assert row(REQUEST, slower, PLAIN) == Row(
        budget_bytes=100,
        method="lru",
        steps=3,
        peak_bytes=90,
        peak_rss_bytes=120,
        seconds_per_step=3.0,
        ratio=1.5,
        later_seconds=3.0,
        later_ratio=1.5,
        stall_seconds=0.75,
        transfer_seconds=1.5,
        hidden_seconds=1.125,
        bytes_to_disk=90,
        bytes_from_disk=60,
        recomputed_ops=15,
        recomputed_share=0.05,
        identical=True,
        first_difference=None,
        losses=[4.0, 3.0, 2.0],
    )


def test_without_a_plain_run_nothing_is_said_about_it() -> None:
    alone = row(REQUEST, MANAGED, None)
    assert (alone.ratio, alone.identical, alone.first_difference) == (None, None, None)


def test_the_plain_row_takes_its_peak_from_the_run_that_kept_account() -> None:
    request = dataclasses.replace(REQUEST, method=None, budget_bytes=None)
    plain = plain_row(request, PLAIN, MANAGED)
    assert (plain.method, plain.peak_bytes, plain.ratio, plain.identical) == (None, 90, 1.0, True)
    other = plain_row(request, PLAIN, result(losses=(4.0, 3.5, 2.0), report=REPORT))
    assert (other.identical, other.first_difference) == (False, 1)


def test_the_first_step_whose_loss_differs_in_one_bit_is_found() -> None:
    nearly = result(losses=(4.0, 3.0, 2.0000000000000004), report=REPORT)
    assert first_difference(nearly, PLAIN) == 2
    assert row(REQUEST, nearly, PLAIN).identical is False


def test_a_state_that_differs_after_equal_losses_is_found() -> None:
    assert first_difference(result(state="other", report=REPORT), PLAIN) == FINAL_STATE


def test_a_run_that_stopped_early_differs_where_it_stopped() -> None:
    assert first_difference(result(losses=(4.0, 3.0), report=REPORT), PLAIN) == 2
    assert first_difference(result(losses=(4.0, 2.0), report=REPORT), PLAIN) == 1


def test_losses_that_are_no_numbers_are_the_same_if_both_runs_have_them() -> None:
    diverged = (4.0, float("nan"), float("inf"))
    assert first_difference(result(losses=diverged, report=REPORT), result(losses=diverged, report=None)) is None


def test_a_refused_run_is_a_row_with_the_same_keys_and_no_figures() -> None:
    refused = RefusedRow(budget_bytes=200, method="lru", refused="too little.", smallest_budget_bytes=320).to_json()
    finished = row(REQUEST, MANAGED, PLAIN).to_json()
    assert set(refused) == set(finished)
    assert (refused["refused"], refused["smallest_budget_bytes"]) == ("too little.", 320)
    assert (refused["identical"], refused["peak_bytes"], finished["refused"]) == (None, None, None)


def test_the_table_has_a_line_for_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    plain = plain_row(dataclasses.replace(REQUEST, method=None, budget_bytes=None), PLAIN, MANAGED)
    differs = row(REQUEST, result(losses=(4.0, 3.5, 2.0), report=REPORT), PLAIN)
    refused = RefusedRow(budget_bytes=50, method="lru", refused="too little.", smallest_budget_bytes=320)
    print_rows("w", [plain, row(REQUEST, MANAGED, PLAIN), differs, refused], "lru")
    out = capsys.readouterr().out
    assert out.startswith("w, 3 steps, method lru, one thread")
    lines = [re.split(r" *│ *", line.strip("│ ")) for line in out.splitlines() if line[0] == "│"]
    assert lines == [
        ["plain", "90 B", "120 B", "2.00 s", "1.00", "0 B", "0 %", "identical with account"],
        ["100 B", "90 B", "120 B", "2.00 s", "1.00", "90 B", "5.0 %", "identical"],
        ["100 B", "90 B", "120 B", "2.00 s", "1.00", "90 B", "5.0 %", "differs from the loss of step 1 on"],
        ["50 B", "", "", "", "", "", "", "refused: needs 320 B or more"],
    ]


def test_every_broken_promise_is_told() -> None:
    over = row(REQUEST, result(report=dataclasses.replace(REPORT, peak_bytes=101)), PLAIN)
    differs = row(REQUEST, result(state="other", report=REPORT), PLAIN)
    assert list(broken_promises([row(REQUEST, MANAGED, PLAIN)])) == []
    assert list(broken_promises([over, differs])) == [
        "The run under 100 B had a peak of 101 B.",
        "The run under 100 B is not the plain one: it differs in the final state.",
    ]


def test_what_a_process_tells_is_read_as_it_was_written() -> None:
    for told in (*PLAIN.steps, *MANAGED.steps):
        assert pickle.loads(pickle.dumps(told)) == told
    assert pickle.loads(pickle.dumps(REQUEST)) == REQUEST
