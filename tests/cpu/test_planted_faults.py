"""Every check of every benchmark and of every paper's page reports the wrong result that is planted for it.

A check is a function of a result's rows and facts (`Benchmark.judge`). Here it is given the results that are kept
beside the benchmarks, each with one figure changed for the worse, and has to be missed, by more than before. Where no
result is kept, or an older one in which a check has nothing to look at, `planted.RIGHT` stands in.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from benchmarks.command import BENCHMARKS, load
from benchmarks.record import Benchmark, Check, Collection, Result
from papers import PAPERS
from tests.cpu.planted import GONE, PLANTED, RIGHT, Plant

TARGETS = [(collection, name) for collection in (BENCHMARKS, PAPERS) for name in collection.modules]


class Kept(NamedTuple):
    """A result, and what judges it."""

    benchmark: Benchmark
    rows: list[dict[str, Any]]
    facts: dict[str, Any]

    def judged(self) -> list[Check]:
        return list(self.benchmark.judge(Result(title="", columns=(), rows=self.rows, facts=self.facts)))

    def planted(self, plant: Plant) -> Iterator[list[Check]]:
        """What is said of the result with the fault, once for every place where it can be."""
        if plant.fact is not None:
            facts = copy.deepcopy(self.facts)
            plant.fact(facts)
            yield self._replace(facts=facts).judged()
            return
        if plant.only is not None:
            yield self._replace(rows=self.rows[: plant.only]).judged()
            return
        places = [
            number
            for number, row in enumerate(self.rows)
            if plant.where.items() <= row.items()
            and all(key in row and (not callable(wrong) or is_figure(row[key])) for key, wrong in plant.figures.items())
        ]
        for chosen in [places] if plant.everywhere else [[place] for place in places]:
            rows = list(self.rows)
            for number in chosen:
                rows[number] = wronged(rows[number], plant)
            yield self._replace(rows=rows).judged()


def is_figure(value: Any) -> bool:
    """Whether it can be made worse: not what a table shows instead of a figure."""
    return value is not None and not isinstance(value, str)


def wronged(row: Mapping[str, Any], plant: Plant) -> dict[str, Any]:
    """The row with the fault."""
    figures = {key: wrong(row[key]) if callable(wrong) else wrong for key, wrong in plant.figures.items()}
    return {key: value for key, value in {**row, **figures}.items() if value is not GONE}


def kept(collection: Collection, name: str, right: Mapping[str, Any]) -> Kept:
    path = collection.results(name) / f"{name}.json"
    data = json.loads(path.read_text("utf-8")) if path.is_file() else {"rows": []}
    facts = {**{key: value for key, value in right.items() if key != "rows"}, **data.get("facts", {})}
    return Kept(load(name, collection), right.get("rows", data["rows"]), facts)


@pytest.mark.parametrize(("collection", "name"), TARGETS, ids=[name for _, name in TARGETS])
def test_every_check_reports_the_fault_that_is_planted_for_it(collection: Collection, name: str) -> None:
    everything_is_reported(kept(collection, name, RIGHT.get(name, {})), name)


def everything_is_reported(result: Kept, name: str) -> None:
    checks = result.judged()
    assert len({check.what for check in checks}) == len(checks) > 0
    before = {check.what: check for check in checks}
    reported = set[str]()
    for plant in PLANTED[name]:
        meant = {what for what in before if re.fullmatch(plant.what, what)}
        assert meant, f"{name} has no check that is called {plant.what!r}"
        for found in result.planted(plant):
            missed = (check for check in found if check.what in meant and not check.met)
            reported |= {check.what for check in missed if check.measured > before[check.what].measured}
    assert reported == {*before}


@pytest.mark.parametrize(("collection", "name"), [target for target in TARGETS if target[1] in RIGHT])
def test_nothing_stands_in_for_a_kept_result_that_will_do(collection: Collection, name: str) -> None:
    with pytest.raises((AssertionError, LookupError, ValueError)):
        everything_is_reported(kept(collection, name, {}), name)


def test_no_target_is_left_out_and_none_is_gone() -> None:
    assert {*PLANTED} == {name for _, name in TARGETS}
    assert len(PLANTED) >= 50
