"""What a benchmark hands back: rows of raw figures, how to write them, and which targets they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, dataclass_transform

T = TypeVar("T")

Row: TypeAlias = Mapping[str, Any]
"""Raw figures by name: numbers, texts, booleans, or None where there is nothing to say."""

Tell: TypeAlias = Callable[[str], None]
"""Called with a line about how far a benchmark has come."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen(cls: type[T]) -> type[T]:
    """A dataclass whose fields are given by name, and then stay as they are."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


class Skipped(Exception):
    """A benchmark that cannot run here, with the reason; what was written before stays."""


@frozen
class Column:
    """A figure of every row, as the table shows it."""

    key: str
    """The figure's name in the row."""
    head: str
    """What stands above the column."""
    show: Callable[[Any], str] = str
    """Writes the figure for people; not called for None, which shows as nothing."""

    def cell(self, row: Row) -> str:
        """The text in this column."""
        value = row.get(self.key)
        return "" if value is None else self.show(value)


@frozen
class Check:
    """A figure that has a target."""

    what: str
    """What was measured, with its unit."""
    measured: float
    """The figure."""
    at_most: float = 0
    """The target; 0 for what is counted and must not be."""

    @property
    def met(self) -> bool:
        """Whether the figure keeps to its target."""
        return self.measured <= self.at_most

    def sentence(self) -> str:
        """The check in a line."""
        verdict = "met" if self.met else "MISSED"
        return f"{verdict}: {self.what}: {self.measured:.4g}, target at most {self.at_most:.4g}"


@frozen
class Result:
    """One benchmark's outcome, of which everything but the pictures is kept as JSON."""

    title: str
    """What was measured, in a line."""
    columns: Sequence[Column]
    """The table's columns."""
    rows: Sequence[Row]
    """The table's rows."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Figures that something is demanded of and that stand in no row, as JSON can hold them."""
    checks: Sequence[Check] = ()
    """Every figure that has a target: what `Benchmark.judge` says of the rows and the facts."""
    notes: Sequence[str] = ()
    """What a reader has to know to read the table."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """PNG by the name of its file, which stands beside the page of results."""


@frozen
class Benchmark:
    """A benchmark and its two sizes."""

    name: str
    """What the command line calls it."""
    run: Callable[[Any, Tell], Result]
    """Takes one of the sizes, and measures."""
    judge: Callable[[Result], Iterable[Check]]
    """What is demanded of a result. It looks at rows and facts and at nothing else, so that a result that was kept, or
    one in which a fault was planted, can be judged like one that was measured just now."""
    full: Any
    """The size whose figures count."""
    quick: Any
    """A size that shows within seconds whether the benchmark runs; its figures mean nothing."""

    def measured(self, size: Any, tell: Tell) -> Result:
        """A result with its checks."""
        result = self.run(size, tell)
        return replace(result, checks=list(self.judge(result)))


@frozen
class Collection:
    """Benchmarks that one command runs."""

    package: str
    """What follows `python -m`."""
    purpose: str
    """What they are for, in a sentence."""
    modules: Mapping[str, str]
    """Where each is, in the order in which they run: every module offers `BENCHMARK`."""
    on_a_gpu: Sequence[str] = ()
    """Those that need a CUDA device, and run when they are named."""

    def results(self, name: str) -> Path:
        """Where the figures of that benchmark are kept: beside its module."""
        return Path(__file__).parents[1].joinpath(*self.modules[name].split(".")[:-1], "results")
