"""The live line: one line in a terminal, and next to nothing anywhere else."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from spillway.ir import StepReport
from spillway.report.figures import NO_BUDGET, format_share, recomputed_share, seconds_per_step
from spillway.report.live import LiveLine, line
from spillway.units import MiB

STEP = StepReport(
    step=12,
    signature="",
    managed=True,
    allowed=24 * MiB,
    start_bytes=0,
    peak_bytes=20 * MiB,
    end_bytes=6 * MiB,
    peak_rss_bytes=0,
    working_bytes=0,
    seconds=1.0,
    stall_seconds=0.0,
    recomputed_ops=16,
    recomputed_seconds=0.0,
    ops=200,
    bytes_out=3 * MiB,
    bytes_in=2 * MiB,
    dropped_bytes=0,
    drops=0,
    moves=0,
    refusals={},
    escaped=0,
    unmanaged=0,
    logged={"loss": 2.34567, "norm": 1.0},
)
QUIET = dataclasses.replace(STEP, recomputed_ops=0, bytes_out=0, bytes_in=0, logged={})


def console(*, terminal: bool, width: int = 200) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, width=width, soft_wrap=True), written


def test_the_line_has_step_loss_memory_against_the_budget_bytes_moved_and_recomputed_share() -> None:
    assert line(STEP) == (
        "step 12  loss 2.346  ██████▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░ peak 20.00 MiB of 24.00 MiB  moved 3.00 MiB out, 2.00 MiB in  "
        "recomputed 8.0 %"
    )


def test_of_blocks_that_ran_again_the_share_is_theirs() -> None:
    blocks = dataclasses.replace(QUIET, ops=0, blocks=8, recomputed_blocks=2)
    assert line(blocks).endswith("  recomputed 25 %")


def test_what_did_not_happen_is_not_mentioned() -> None:
    assert line(QUIET) == "step 12  ██████▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░ peak 20.00 MiB of 24.00 MiB"


def test_without_a_budget_there_is_no_bar() -> None:
    assert line(dataclasses.replace(QUIET, allowed=NO_BUDGET)) == "step 12  peak 20.00 MiB"


@pytest.mark.parametrize(
    ("end", "peak", "bar"),
    [(0, 0, "░" * 24), (1, 2, "█" + "░" * 23), (24 * MiB, 24 * MiB, "█" * 24), (0, 99 * MiB, "▒" * 24)],
)
def test_the_bar_is_as_long_whatever_is_resident(end: int, peak: int, bar: str) -> None:
    assert line(dataclasses.replace(QUIET, end_bytes=end, peak_bytes=peak)).split()[2] == bar


def test_in_a_terminal_the_latest_step_stays_behind_on_one_line() -> None:
    out, written = console(terminal=True)
    live = LiveLine(console=out)
    live.update(dataclasses.replace(STEP, step=0))
    assert "step 0 " in written.getvalue()
    live.update(STEP)
    live.close()
    assert written.getvalue().rpartition("step 12")[2].count("\n") == 1


def test_a_line_wider_than_the_terminal_is_cut_and_not_wrapped() -> None:
    out, written = console(terminal=True, width=30)
    live = LiveLine(console=out)
    live.update(STEP)
    live.close()
    last = written.getvalue().rpartition("step 12")[2]
    assert "…" in last
    assert "moved" not in last


def test_where_there_is_no_terminal_only_the_last_step_is_printed_and_without_colours() -> None:
    out, written = console(terminal=False)
    live = LiveLine(console=out)
    for step in range(5):
        live.update(dataclasses.replace(STEP, step=step))
        assert written.getvalue() == ""
    live.close()
    assert written.getvalue() == line(dataclasses.replace(STEP, step=4)) + "\n"


def test_a_session_without_steps_prints_nothing_and_closing_twice_does_no_harm() -> None:
    for terminal in (True, False):
        out, written = console(terminal=terminal)
        live = LiveLine(console=out)
        live.close()
        live.close()
        assert written.getvalue() == ""


def test_fast_steps_are_not_all_drawn() -> None:
    out, written = console(terminal=True)
    live = LiveLine(console=out)
    for step in range(200):
        live.update(dataclasses.replace(STEP, step=step))
    drawn = written.getvalue().count("step ")
    live.close()
    assert drawn < 200
    assert "step 199 " in written.getvalue()


def test_shares_of_steps_are_shares_of_their_ops() -> None:
    assert recomputed_share([STEP, dataclasses.replace(QUIET, ops=600)]) == 0.02
    assert recomputed_share([]) == 0.0


def test_the_time_of_a_step_is_the_median_without_the_first() -> None:
    assert seconds_per_step([9.0, 1.0, 3.0, 2.0]) == 2.0
    assert seconds_per_step([9.0]) == 9.0
    assert seconds_per_step([]) == 0.0


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.004, "0.4 %"), (0.0994, "9.9 %"), (0.0996, "10 %"), (1.5, "150 %")]
)
def test_a_share_is_written_with_a_decimal_where_it_matters(share: float, text: str) -> None:
    assert format_share(share) == text
