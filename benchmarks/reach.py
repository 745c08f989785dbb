"""How far down a budget can go: the smallest that works, beside the largest single op, below which none can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spillway
from benchmarks import columns
from benchmarks.record import Benchmark, Check, Column, Result, Row, Tell, frozen
from benchmarks.training import METHODS, account, longest_batch, managed_step
from spillway.units import Bytes
from spillway.workloads import Workload, get
from tests.cpu.refusal_cases import smallest_that_works

FLOOR: Final = 0.15
"""A budget of this share of the plain peak has to work, unless a single op needs more."""
BESIDE_THE_OP: Final = 1.2
"""Times the largest single op."""
STEPS: Final = 2
"""Of every try: in the second the optimizer has its state."""


@frozen
class Task:
    """A workload with its options."""

    workload: str
    options: Mapping[str, Any]


@frozen
class Size:
    """How much is measured."""

    tasks: Sequence[Task]
    among: int
    """Batches of which the longest is trained on."""
    parts: int
    """The smallest budget is found to one part in so many."""
    methods: Sequence[str] = ("lru", "delta", "delta-published")


class LargestOp(TorchDispatchMode):
    """Notes the op whose inputs and outputs have the most bytes together, every storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Bytes = 0
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        if sum(storages.values()) > self.nbytes:
            self.nbytes, self.name = sum(storages.values()), str(func)
        return out


@final
class Search:
    """Tries budgets on one workload under one method, each in a fresh session on a fresh model."""

    def __init__(self, task: Task, method: str, among: int, tell: Tell) -> None:
        self._task = task
        self._method = method
        self._tell = tell
        self._batch = longest_batch(self._built(), among)
        plain = account(self._built(), self._batch, STEPS)
        self.peak, self.losses = plain.peak, plain.losses
        self.tried: dict[Bytes, tuple[str, ...] | None] = {}
        """The losses under each budget, exactly; None where it was refused."""

    def largest_op(self) -> LargestOp:
        """Of a plain step."""
        workload = self._built()
        workload.train_step(self._batch)
        with LargestOp() as largest:
            workload.train_step(self._batch)
        return largest

    def works(self, budget: Bytes) -> bool:
        """Train `STEPS` steps under a budget."""
        workload, method = self._built(), METHODS[self._method]()
        self._tell(f"{self._task.workload}, {self._method}: {budget / self.peak:.1%} of the plain peak")
        self.tried[budget] = None
        with (
            contextlib.suppress(spillway.BudgetInfeasible),
            spillway.manage(workload.model, workload.optimizers, budget=budget, method=method) as memory,
        ):
            self.tried[budget] = tuple(managed_step(workload, self._batch, memory) for _ in range(STEPS))
        return self.tried[budget] is not None

    def _built(self) -> Workload:
        return get(self._task.workload, **self._task.options)


def run(size: Size, tell: Tell) -> Result:
    """Search on every workload."""
    return Result(
        title="the smallest budget that works",
        columns=COLUMNS,
        rows=[_row(task, method, size, tell) for task in size.tasks for method in size.methods],
        notes=NOTES,
    )


COLUMNS: Final[Sequence[Column]] = (
    *columns.text(workload="workload", method="method"),
    *columns.nbytes(peak_bytes="plain peak", smallest_bytes="smallest"),
    *columns.shares(smallest_share="share", target_share="target"),
    *columns.text(largest_op="largest op"),
    *columns.nbytes(largest_op_bytes="bytes"),
    *columns.shares(largest_op_share="share"),
    *columns.text(tries="tries", refused="refused"),
    *columns.shown(lambda same: "as plain" if same else "DIFFER", identical="losses"),
)

NOTES: Final = (
    f"Each try is a fresh model and session, {STEPS} steps of the longest batch. Shares are of the plain peak. The "
    f"target is {FLOOR:.0%}, or {BESIDE_THE_OP} times the largest single op (inputs and outputs, every storage once) "
    "where that is more. What refusals name is tried in the benchmark `refusals`.",
)


def _row(task: Task, method: str, size: Size, tell: Tell) -> Row:
    search = Search(task, method, size.among, tell)
    largest = search.largest_op()
    smallest = smallest_that_works(search.works, search.peak, size.parts)
    peak = search.peak
    return {
        "workload": task.workload,
        "method": method,
        "peak_bytes": peak,
        "smallest_bytes": smallest,
        "smallest_share": smallest / peak,
        "target_share": max(FLOOR, BESIDE_THE_OP * largest.nbytes / peak),
        "largest_op": largest.name.removeprefix("aten."),
        "largest_op_bytes": largest.nbytes,
        "largest_op_share": largest.nbytes / peak,
        "tries": len(search.tried),
        "refused": list(search.tried.values()).count(None),
        "identical": all(losses in (search.losses, None) for losses in search.tried.values()),
    }


def _checks(result: Result) -> Iterator[Check]:
    for row in result.rows:
        name = f"{row['workload']}, {row['method']}"
        what = f"{name}, smallest budget that works, share of the plain peak"
        yield Check(what=what, measured=row["smallest_share"], at_most=row["target_share"])
        yield Check(what=f"{name}, searches in which losses differ", measured=not row["identical"])


BENCHMARK: Final = Benchmark(
    name="reach",
    run=run,
    judge=_checks,
    full=Size(
        tasks=[Task(workload="stdlib-lm", options={}), Task(workload="deep-narrow", options={})], among=200, parts=100
    ),
    quick=Size(
        tasks=[
            Task(workload="stdlib-lm", options={"width": 64, "layers": 3, "longest": 96}),
            Task(workload="deep-narrow", options={"width": 32, "layers": 16, "batch": 64}),
        ],
        among=4,
        parts=8,
    ),
)
