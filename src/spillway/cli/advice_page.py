"""The page that `spillway advise` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spillway.advisor.sweeps import Sweep, sweeps_of
from spillway.advisor.verdict import Row
from spillway.cli.by_devices import Exchange
from spillway.cli.common import check_writable, naming
from spillway.report.advice import write_advice
from spillway.report.advice_figures import Kinds
from spillway.report.drawing import check_drawing
from spillway.units import format_bytes


def check_page(output: Path | None) -> None:
    """Refuse now a page that could not be written after minutes of measuring. Raises SpillwayError."""
    check_writable(output)
    if output is not None:
        check_drawing("the page", "--output the table and --json need")


def page_facts(answers: Sequence[Sequence[Row]], exchange: Exchange | None) -> dict[str, str]:
    """What stands at the top of every page."""
    limits = {rows[0].limit for rows in answers if any(row.fitted for row in rows)}
    facts = {"networks": f"{len(answers)}"} if len(answers) > 1 else {}
    if len(limits) == 1:
        facts["steps may take"] = format_bytes(round(limits.pop()))
    if exchange is not None:
        facts["devices"] = f"{', '.join(map(str, exchange.counts))}; {exchange}"
    return facts


def write_answers(
    output: Path, answers: Sequence[Sequence[Row]], *, title: str, facts: Mapping[str, str], kinds: Kinds,
    devices: Sequence[Sweep],
) -> None:  # fmt: skip
    """Write the page, with sweeps over depth and width where experiments make some. Raises SpillwayError."""
    with naming(output):
        write_advice(output, answers, title=title, facts=facts, kinds=kinds, sweeps=[*sweeps_of(answers), *devices])
