"""Results on the terminal, as JSON, and as the one page that shows them all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import sentence
from benchmarks.record import Result

WIDTH = 160
"""Columns of text; the same on a terminal and in a file."""

HEAD = """\
# What was measured

Written by `python -m {package}`, which `make {target}` runs; do not edit. Competitors of one table stand in one run and
take turns. "CPU" is the processor time of the competitor's process, which a busy machine disturbs less than the time.
"""


def document(name: str, result: Result, machine: dict[str, Any], loads: list[float], seconds: float) -> dict[str, Any]:
    """Everything about a result, as JSON can hold it."""
    return {
        "benchmark": name,
        "title": result.title,
        "machine": machine,
        "load": loads,
        "seconds": round(seconds, 1),
        "rows": [dict(row) for row in result.rows],
        "facts": dict(result.facts),
        "checks": [
            {"what": c.what, "measured": c.measured, "at_most": c.at_most, "met": c.met, "sentence": c.sentence()}
            for c in result.checks
        ],
        "notes": list(result.notes),
        "pictures": list(result.pictures),
        "table": {
            "head": [column.head for column in result.columns],
            "rows": [[column.cell(row) for column in result.columns] for row in result.rows],
        },
    }


def print_document(data: dict[str, Any]) -> None:
    """The table, the checks below it, then the notes."""
    console = Console(width=WIDTH, highlight=False, markup=False)
    table = Table(title=f"{data['benchmark']}: {data['title']}", title_justify="left", title_style="")
    for number, head in enumerate(data["table"]["head"]):
        table.add_column(head, justify="right" if number else "left")
    for row in data["table"]["rows"]:
        table.add_row(*row)
    console.print(table)
    for line in _lines(data):
        console.print(line)
    console.print()


def write(folder: Path, data: dict[str, Any], pictures: Mapping[str, bytes], package: str) -> None:
    """Write one result with its pictures, and the page anew from all results that lie in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / name).write_bytes(picture)
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{data['benchmark']}.json").write_text(text + "\n", "utf-8")
    everything = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    (folder / "summary.md").write_text(markdown(everything, package), "utf-8")


def markdown(documents: Sequence[dict[str, Any]], package: str) -> str:
    """A page with a section for every result of that package."""
    head = HEAD.format(package=package, target={"benchmarks": "bench"}.get(package, package))
    return head + "".join(_section(data) for data in documents)


def _section(data: dict[str, Any]) -> str:
    head, rows = data["table"]["head"], data["table"]["rows"]
    table = [_table_line(head), _table_line(["---"] + ["---:"] * (len(head) - 1)), *map(_table_line, rows)]
    lines = "".join(f"- {line}\n" for line in _lines(data))
    pictures = "".join(f"\n![{data['benchmark']}]({name})\n" for name in data.get("pictures", ()))
    return f"\n## {data['benchmark']}: {data['title']}\n\n" + "".join(table) + f"\n{lines}{pictures}"


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _lines(data: dict[str, Any]) -> list[str]:
    checks = [check["sentence"] for check in data["checks"]]
    return [*checks, *data["notes"], f"Took {data['seconds']:.0f} s on {sentence(data['machine'], data['load'])}."]
