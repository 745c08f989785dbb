"""Benchmarks at their quick sizes."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import machine, show
from benchmarks.command import BENCHMARKS, load
from benchmarks.record import Benchmark, Result
from papers import PAPERS


def named(name: str) -> Benchmark:
    """Of the benchmarks or of the papers'."""
    return load(name, BENCHMARKS if name in BENCHMARKS.modules else PAPERS)


def quick(name: str) -> Result:
    benchmark = named(name)
    result = benchmark.measured(benchmark.quick, lambda text: None)
    assert_complete(name, result)
    return result


def assert_complete(name: str, result: Result) -> None:
    """Every figure can be shown, every column but causes has a figure in some row, and JSON can hold everything."""
    data = show.document(name, result, machine.describe(), [0.0, 0.0], 1.0)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert result.checks != []
    for column, shown in zip(result.columns, zip(*data["table"]["rows"], strict=True), strict=True):
        # Nothing has a cause where nothing is apart, and a busy machine may have times that do not go with the batch.
        assert any(shown) or column.key in ("cause", "r_time"), column.head
    assert show.markdown([data], "benchmarks").count("\n|") == 2 + len(result.rows)


def rows_by(result: Result, key: str) -> dict[str, Any]:
    return {row[key]: row for row in result.rows}
