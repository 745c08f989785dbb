"""The page of `spillway advise`: the answer, every method, and the figures of PAPAYA's paper for what was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from spillway.advisor import advice_figures as figures
from spillway.advisor.advice_figures import COLOURS, Kinds, Style
from spillway.advisor.gains import Sweep, SweepPoint, crossover_sentence
from spillway.advisor.measurements import MB
from spillway.advisor.verdict import Row, cells, ratios, sentence
from spillway.report.drawing import check_drawing, template
from spillway.units import format_bytes

HEADS: Final = {
    "verdict": "against plain training, by whole batches",
    "batch": "the largest that fits, predicted",
    "samples/s": "predicted at that batch",
    "x plain": "of predicted throughputs",
    "seen": "highest throughput, and its batch; taken where it is the one to train at",
    "sure": "of the verdict, as far as scatter goes",
    "score/point": "1 or more: pays, if beta and delta were plain's",
    "alpha": "bytes per sample",
    "beta": "bytes without a sample",
    "R of memory": "of the line of memory",
    "gamma": "time per sample",
    "delta": "time without a sample",
    "R of time": "of the line of time",
}
"""Columns behind the method, and what they say; of those of `verdict.cells`."""


def advice_page(
    answers: Sequence[Sequence[Row]], *, title: str, facts: Mapping[str, str], kinds: Kinds, sweeps: Sequence[Sweep]
) -> str:
    """One HTML file that needs nothing else. Raises UsageError without matplotlib.

    Arguments:
        answers: The rows of each experiment, as `verdict.advise` gives them.
        facts: What stands at the top, by name.
        kinds: Bytes at the peak by what they are, by method and batch size; of a single experiment. May be empty.
        sweeps: Those over devices stand with the experiment that they are of, the others at the end. May be empty.
    """
    check_drawing("the page", "--output the table and --json need")
    styles = figures.styles_of(row.method for rows in answers for row in rows)
    answered = [rows for rows in answers if any(row.fitted for row in rows)]
    of_each = [[sweep for sweep in sweeps if _is_of(sweep, rows)] for rows in answered]
    rest = [sweep for sweep in sweeps if not any(sweep in own for own in of_each)]
    sections = [
        _section(rows, kinds if len(answered) == 1 else {}, own, styles, f"e{number}")
        for number, (rows, own) in enumerate(zip(answered, of_each, strict=True), start=1)
    ]
    seen = {rows[0].experiment.seen for rows in answers}
    return template("advice.html.jinja").render(
        title=title, how=seen.pop() if len(seen) == 1 else "", facts=facts, sections=sections,
        unanswered=[sentence(rows) for rows in answers if rows not in answered],
        sweeps=[_swept(sweep, styles, f"s{number}") for number, sweep in enumerate(rest, start=1)],
        colours=[(colour.variable, *colour) for colour in COLOURS],
    )  # fmt: skip


def _is_of(sweep: Sweep, rows: Sequence[Row]) -> bool:
    return sweep.over == "devices" and sweep.points[0].rows[0].experiment is rows[0].experiment


def _section(
    rows: Sequence[Row], kinds: Kinds, sweeps: Sequence[Sweep], styles: Mapping[str, Style], name: str
) -> dict[str, object]:
    """One experiment, as the template reads it."""
    there, times = rows[0].experiment, ratios(rows)
    made = [(row.method, _cells(row, times.get(row.method))) for row in rows]
    drawn = (
        figures.throughput(rows, styles, name), figures.memory(rows, kinds, name), figures.fits(rows, styles, name),
        figures.scores(rows, styles, name),
    )  # fmt: skip
    return {
        "title": there.about, "answer": sentence(rows), "limit": format_bytes(round(rows[0].limit)),
        "heads": [("R" if head[:2] == "R " else there.seen if head == "seen" else head, HEADS[head]) for head in HEADS],
        "rows": made, "seen": there.seen,
        "intervals": [
            (method, "; ".join(f"{head} {cell['told'].removeprefix('95 %: ')}" for head, cell in told))
            for method, row in made if (told := [(h, cell) for h, cell in zip(HEADS, row, strict=True) if cell["told"]])
        ],
        "warnings": [(row.method, warning) for row in rows for warning in row.warnings],
        "pictures": [picture for picture in drawn if picture is not None],
        "sweeps": [_swept(sweep, styles, f"{name}d{number}") for number, sweep in enumerate(sweeps)],
    }  # fmt: skip


def _cells(row: Row, times: float | None) -> list[dict[str, str]]:
    """Of a table, with what a reader who points at each is told."""
    told = dict[str, str]()
    if row.fitted is not None:
        memory, time = row.fitted.memory, row.fitted.law_of_time
        intervals = (
            ("alpha", memory.slope_interval, f"{MB:,} bytes", MB),
            ("beta", memory.intercept_interval, f"{MB:,} bytes", MB),
            ("gamma", time.slope_interval, "ms", 1e-3), ("delta", time.intercept_interval, "ms", 1e-3),
        )  # fmt: skip
        told = {
            name: f"95 %: {ends[0] / size:.4g} to {ends[1] / size:.4g} {unit}"
            for name, ends, unit, size in intervals if ends is not None
        }  # fmt: skip
    found = cells(row, times, digits=4)
    return [{"text": found[name], "told": told.get(name, "")} for name in HEADS]


def _swept(sweep: Sweep, styles: Mapping[str, Style], name: str) -> dict[str, object]:
    picture = figures.gain(sweep, styles, name)
    return {
        "name": sweep.name, "seen": sweep.seen, "pictures": [] if picture is None else [picture],
        "sentences": [crossover_sentence(sweep, method) for method in sweep.methods],
        "heads": [sweep.unit, *(f"{point.value:g}" for point in sweep.points)],
        "table": [(method, [_gains(point, method) for point in sweep.points]) for method in sweep.methods],
    }  # fmt: skip


def _gains(point: SweepPoint, method: str) -> str:
    predicted, measured = (
        "" if one is None else f"{one:.3f}" for one in (point.predicted(method), point.measured(method))
    )
    return f"{predicted} ({measured})" if measured else predicted
