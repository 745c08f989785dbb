"""Every family of models of the tests, under budgets far below what it asks for: the same bits, or rightly refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from spillway.methods import AbstractPolicy, Delta
from spillway.units import Bytes
from tests.cpu.families import FAMILIES
from tests.cpu.pressure import ORDERS
from tests.cpu.test_exactness import SHARES, Trained, different, managed, plain, plain_peak

FEWEST_FAMILIES: Final = 12

WAYS: Final[Mapping[str, Callable[[], AbstractPolicy]]] = {**ORDERS, "delta": Delta}
"""What decides: the policies that the tests drive to both ends, and DELTA, whose copies run beside the ops."""


@frozen
class Size:
    """How much is measured."""

    families: Sequence[str]
    percents: Sequence[int]
    """Budgets, in percent of the plain peak."""


@frozen
class Outcome:
    """What became of a family under a budget."""

    text: str
    """In a word or two."""
    refused: bool
    """Whether it was refused first."""


def run(size: Size, tell: Tell) -> Result:
    """Train every family plainly, then under every budget and every policy."""
    cells = [(percent, order) for percent in size.percents for order in WAYS]
    outcomes: dict[str, list[Outcome]] = {}
    for name in size.families:
        tell(name)
        outcomes[name] = [_outcome(name, plain_peak(name) * percent // 100, order) for percent, order in cells]
    refused = sum(o.refused for found in outcomes.values() for o in found)
    return Result(
        title=f"{len(outcomes)} families x {len(size.percents)} budgets x {len(WAYS)} policies, 5 steps each",
        columns=_columns(cells),
        rows=[_row(name, cells, found) for name, found in outcomes.items()],
        notes=(*NOTES, f"{refused} of {len(outcomes) * len(cells)} runs were refused first."),
    )


def _checks(result: Result) -> Iterator[Check]:
    texts = [row[key] for row in result.rows for key in row if key not in ("family", "peak_bytes")]
    wrong = sum(not text.startswith(EXACT) for text in texts)
    yield Check(what=f"runs of {len(texts)} that are not exact", measured=wrong)
    yield Check(what="families short of twelve", measured=max(0, FEWEST_FAMILIES - len(result.rows)))


EXACT: Final = ("identical", "refused, ")
"""How the texts of runs begin that ended in the same bits, the second of them under the budget that was named."""

NOTES: Final = (
    "Identical: losses, gradients before every optimizer step, and parameters, buffers, optimizer state and random "
    "streams after every step, in bytes, dtypes and strides; and no step's peak was above the budget. `refused, N "
    "%`: the budget was refused, and under the one that the refusal told, N % of the plain peak, the run was "
    "identical.",
)


def _columns(cells: Sequence[tuple[int, str]]) -> Sequence[Column]:
    heads = {f"{percent} {order}": f"{percent} %, {order}" for percent, order in cells}
    return (*columns.text(family="family"), *columns.nbytes(peak_bytes="plain peak"), *columns.text(**heads))


def _outcome(name: str, budget: Bytes, order: str) -> Outcome:
    found = managed(name, budget, WAYS[order]())
    if found.refused is None:
        return _compared(name, found, budget, "identical", refused=False)
    told = found.refused.smallest_budget
    text = f"refused, {told / plain_peak(name):.0%}"
    return _compared(name, managed(name, told, WAYS[order]()), told, text, refused=True)


def _compared(name: str, found: Trained, budget: Bytes, text: str, *, refused: bool) -> Outcome:
    wrong = _wrong(plain(name), found, budget)
    return Outcome(text=wrong or text, refused=refused)


def _wrong(expected: Trained, found: Trained, budget: Bytes) -> str | None:
    """The first thing that is not as it has to be; None if all is."""
    if found.refused is not None:
        return "REFUSED AGAIN"
    wrong = different(expected, found)
    if wrong is not None:
        return wrong
    over = [report.step for report in found.reports if report.peak_bytes > budget]
    return f"OVER BUDGET in step {over[0]}" if over else None


def _row(name: str, cells: Sequence[tuple[int, str]], outcomes: Sequence[Outcome]) -> Row:
    texts = {f"{percent} {order}": o.text for (percent, order), o in zip(cells, outcomes, strict=True)}
    return {"family": name, "peak_bytes": plain_peak(name), **texts}


BENCHMARK: Final = Benchmark(
    name="exactness",
    run=run,
    judge=_checks,
    full=Size(families=tuple(FAMILIES), percents=SHARES),
    quick=Size(families=("conv-bn-relu",), percents=(50,)),
)
