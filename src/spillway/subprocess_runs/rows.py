"""Runs of the same steps, plain and under budgets, side by side."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, final

from spillway.report.figures import highest_peak, later_seconds, recomputed_share, seconds_per_step
from spillway.subprocess_runs.run import RunRequest, RunResult
from spillway.units import Bytes, Seconds

FINAL_STATE: Final = "final state"
"""Where two runs differ whose losses do not."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one run."""

    budget_bytes: Bytes | None
    """None for a run without one."""
    method: str | None
    """None for the plain run."""
    steps: int
    peak_bytes: Bytes | None
    """Highest peak by our account; None if nobody kept account."""
    peak_rss_bytes: Bytes
    """Highest resident set above that of the process before it built the model."""
    seconds_per_step: Seconds
    """Median without the first step."""
    ratio: float | None
    """Seconds per step, as a multiple of the plain run's; None if there was no plain run."""
    later_seconds: Seconds
    """Mean of the second half of the steps, when a method that measures first has measured."""
    later_ratio: float | None
    """The same, as a multiple of the plain run's; None if there was no plain run."""
    stall_seconds: Seconds
    """Time that compute waited for copies, in all steps."""
    transfer_seconds: Seconds
    """Time that copies took in all steps, out and in; two at a time count twice."""
    hidden_seconds: Seconds
    """The part of it in which compute did not wait for any copy."""
    bytes_to_disk: Bytes
    """Copied out in all steps."""
    bytes_from_disk: Bytes
    """Copied back in all steps."""
    recomputed_ops: int
    """Ops that were run again in all steps."""
    recomputed_share: float
    """The same as a share of the steps' own ops."""
    identical: bool | None
    """Whether losses and final state are bit for bit those of the plain run; None if that is not known."""
    first_difference: int | str | None
    """The first step whose loss differs, or `FINAL_STATE`; None if nothing differs or nothing was compared."""
    losses: list[float]

    def to_json(self) -> dict[str, Any]:
        """The row as JSON can hold it; what only a refused run has is null."""
        return {**dict.fromkeys(_names(RefusedRow)), **dataclasses.asdict(self)}

    @property
    def over_budget(self) -> bool:
        """Whether the first promise was broken."""
        return self.budget_bytes is not None and self.peak_bytes is not None and self.peak_bytes > self.budget_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """Instead of the figures of a run that its budget did not let come to its end."""

    budget_bytes: Bytes
    """Too small."""
    method: str
    """The method's name."""
    refused: str
    """What was needed and what was allowed, in a sentence."""
    smallest_budget_bytes: Bytes
    """No smaller budget can work."""

    def to_json(self) -> dict[str, Any]:
        """The row as JSON can hold it; what only a finished run has is null."""
        return {**dict.fromkeys(_names(Row)), **dataclasses.asdict(self)}


def _names(row: type[Row] | type[RefusedRow]) -> list[str]:
    return [field.name for field in dataclasses.fields(row)]


def row(request: RunRequest, result: RunResult, plain: RunResult | None) -> Row:
    """The figures of a run, compared with those of the plain run if there was one."""
    reports = result.reports
    seconds, later = seconds_per_step(result.seconds), later_seconds(result.seconds)
    difference = None if plain is None else first_difference(result, plain)
    names = ("stall_seconds", "transfer_seconds", "hidden_seconds", "recomputed_ops")
    return Row(
        budget_bytes=request.budget_bytes, method=request.method, steps=len(result.steps),
        peak_bytes=highest_peak(reports) if reports else None, peak_rss_bytes=result.peak_rss_bytes,
        seconds_per_step=seconds, ratio=None if plain is None else seconds / seconds_per_step(plain.seconds),
        later_seconds=later, later_ratio=None if plain is None else later / later_seconds(plain.seconds),
        bytes_to_disk=sum(report.bytes_out for report in reports),
        bytes_from_disk=sum(report.bytes_in for report in reports), recomputed_share=recomputed_share(reports),
        identical=None if plain is None else difference is None, first_difference=difference,
        losses=[step.loss for step in result.steps],
        **{name: sum(getattr(report, name) for report in reports) for name in names},
    )  # fmt: skip


def plain_row(request: RunRequest, plain: RunResult, account: RunResult) -> Row:
    """The row of a plain run whose peak another run knows: one that kept account of the same steps.

    `identical` tells of that other run.
    """
    kept = row(request, account, plain)
    known = {name: getattr(kept, name) for name in ("peak_bytes", "identical", "first_difference")}
    return dataclasses.replace(row(request, plain, plain), **known)


def first_difference(run: RunResult, plain: RunResult) -> int | str | None:
    """The first step whose loss differs in any bit or that one of them lacks, `FINAL_STATE` if only that differs, None
    if nothing does."""
    for step, (loss, expected) in enumerate(zip_longest(run.losses, plain.losses)):
        if loss != expected:
            return step
    return None if run.state == plain.state else FINAL_STATE
