"""ResNets on a CUDA device: the same bits, the allocator's peak against the budget, and what overlapping is worth.

DELTA's section 5.2 and table II (memory), and section 5.4 (overlap). Needs a CUDA device, so it runs only when named:
`make bench-gpu`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor, nn

import spillway
from benchmarks import bottlenecks, columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from spillway.errors import SpillwayError
from spillway.methods import LRU, AbstractPolicy, Delta
from spillway.units import Bytes, Seconds

METHODS: Final[Mapping[str, Callable[[], AbstractPolicy]]] = MappingProxyType(
    {
        "lru": LRU,
        "delta": Delta,
        "delta, copies in turn": lambda: Delta(most_copies_out=0, most_copies_in=0),
        "delta-published": Delta.as_published,
    }
)
"""The third is what overlapping is compared with: compute waits for every copy."""

PUBLISHED: Final[Mapping[tuple[str, int], float]] = MappingProxyType(
    {
        ("resnet50", 128): 4.11 / 11.2,
        ("resnet50", 256): 8.4 / 21.3,
        ("resnet101", 128): 4577 / 16553,
        ("resnext50_32x4d", 128): 5356 / 14726,
    }
)
"""Peak under DELTA as a share of the plain one: section 5.2, and table II, whose batch sizes are not told."""


@frozen
class Size:
    """How much is measured."""

    runs: Sequence[tuple[str, int]]
    """Models and batch sizes."""
    shares: Sequence[float]
    """Budgets of ResNet-50 as shares of its plain peak, besides the published one."""
    side: int
    """Pictures are so high and so wide."""
    steps: int
    """Of which the first three warm up: costs are measured in the first, and copies ahead know the order from then."""


@final
@dataclass(slots=True, kw_only=True)
class Trained:
    """A training of some steps."""

    losses: list[str] = field(default_factory=list)
    """Exactly, as `float.hex` writes them."""
    state: dict[str, Tensor] = field(default_factory=dict)
    seconds: list[Seconds] = field(default_factory=list)
    peaks: list[Bytes] = field(default_factory=list)
    """Of the allocator, by step."""
    told: list[Bytes] = field(default_factory=list)
    """The same as the session has it."""
    reports: list[spillway.StepReport] = field(default_factory=list)


WARM_UP: Final = 3

MOST_SECONDS: Final = 450.0
"""What would begin later is left out, so that everything fits one call of ten minutes."""

NOTHING_TO_COMPARE: Final = 99.0
"""In place of a ratio, where no run copied for 30 % of a step."""


@final
class AllocatorPeak:
    """`torch.cuda.max_memory_allocated` of all that runs inside.

    A session lets torch's peak begin anew around ops that it measures, so what stood there is read before that.
    """

    def __init__(self) -> None:
        self.nbytes: Bytes = 0

    def __enter__(self) -> AllocatorPeak:
        self._reset = torch.cuda.reset_peak_memory_stats
        self._reset()
        torch.cuda.reset_peak_memory_stats = self._note_and_reset
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.reset_peak_memory_stats = self._reset
        self._note()

    def _note(self) -> None:
        self.nbytes = max(self.nbytes, torch.cuda.max_memory_allocated())

    def _note_and_reset(self, device: Any = None) -> None:
        self._note()
        self._reset(device)


def train(name: str, batch: int, size: Size, method: str | None, budget: Bytes | None) -> Trained:
    """Train on random pictures, plainly or under a session, from the same seeds."""
    device, trained = torch.device("cuda", torch.cuda.current_device()), Trained()
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    model = bottlenecks.build(name).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # section 5.1
    pictures = torch.randn(batch, 3, size.side, size.side, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    memory = None if method is None else spillway.manage(model, optimizer, budget=budget, method=METHODS[method]())
    try:
        for _ in range(size.steps):
            _one_step(model, optimizer, (pictures, labels), memory, trained)
        trained.reports = [] if memory is None else list(memory.history)
    finally:
        if memory is not None:
            memory.close()
    trained.state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    return trained


def _one_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    memory: spillway.Session | None,
    trained: Trained,
) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()

    def run() -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with AllocatorPeak() as peak:
        begin.record()
        if memory is None:
            loss = run()
        else:
            with memory.step(batch):
                loss = run()
            trained.told.append(memory.history[-1].device_peak_bytes)
        end.record()
        torch.cuda.synchronize()
    trained.losses.append(float(loss).hex())
    trained.seconds.append(begin.elapsed_time(end) / 1e3)
    trained.peaks.append(peak.nbytes)


def run(size: Size, tell: Tell) -> Result:
    """Every model plainly, then under every budget and method."""
    if not torch.cuda.is_available():
        raise SystemExit("The benchmark gpu needs a CUDA device, and torch sees none.")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    rows: list[Row] = []
    began = time.perf_counter()
    for name, batch in size.runs:
        rows += _rows_of(name, batch, size, tell, began)
    return Result(
        title=f"ResNets, {size.side} x {size.side} pictures, {size.steps} steps each, Adam, fp32",
        columns=COLUMNS,
        rows=rows,
        notes=(*NOTES, f"On {torch.cuda.get_device_name()}, torch {torch.__version__}."),
    )


def _checks(result: Result) -> Iterator[Check]:
    managed = [row for row in result.rows if row["method"] != "plain" and row["outcome"] != "refused"]
    yield Check(what="without a run that was not refused", measured=not managed)
    yield Check(what="runs that are not exact", measured=sum(row["outcome"] != "identical" for row in managed))
    over = max((row["over"] for row in managed), default=0)
    yield Check(what="largest peak over budget", measured=over, at_most=1)
    told = max((row["peak"] / row["told"] for row in managed if row.get("told")), default=0)
    yield Check(what="largest peak over what the session says it was", measured=told, at_most=1.01)
    yield Check(what="step with overlap over step without", measured=_overlap(result.rows), at_most=0.8)


def _rows_of(name: str, batch: int, size: Size, tell: Tell, began: Seconds) -> list[Row]:
    tell(f"{name}, batch {batch}")
    try:
        plain = train(name, batch, size, None, None)
    except RuntimeError as error:
        tell(f"{name} was left out: {error}")
        _clean_up()
        return []
    peak, seconds = max(plain.peaks), statistics.median(plain.seconds[WARM_UP:])
    first = {"model": name, "batch": batch, "method": "plain", "peak": peak, "seconds": seconds, "times": 1.0}
    found: list[Row] = [first]
    shares = (PUBLISHED[name, batch], *(size.shares if name == "resnet50" else ()))
    for share in shares:
        for method in METHODS:
            if time.perf_counter() - began > MOST_SECONDS:
                tell(f"left out for want of time: {name}, batch {batch}, {share:.0%}, {method}")
                continue
            tell(f"{name}, batch {batch}, {share:.0%}, {method}")
            found.append(_row(name, batch, size, method, int(peak * share), plain))
            _clean_up()
    return found


def _row(name: str, batch: int, size: Size, method: str, budget: Bytes, plain: Trained) -> Row:
    row: dict[str, Any] = {"model": name, "batch": batch, "method": method, "budget": budget}
    try:
        trained = train(name, batch, size, method, budget)
    except SpillwayError as error:
        return row | {"outcome": "refused", "over": 0.0, "why": str(error)}
    except RuntimeError as error:
        return row | {"outcome": "FAILED", "over": 0.0, "why": str(error)}
    seconds = statistics.median(trained.seconds[WARM_UP:])
    last = trained.reports[-1]
    same = trained.losses == plain.losses and all(torch.equal(v, trained.state[k]) for k, v in plain.state.items())
    return row | {
        "peak": max(trained.peaks), "told": max(trained.told), "first_over": trained.peaks[0] / budget,
        "over": max(trained.peaks) / budget,
        "seconds": seconds, "times": seconds / statistics.median(plain.seconds[WARM_UP:]),
        "outcome": "identical" if same else "DIFFERS", "bytes_out": last.bytes_out, "bytes_in": last.bytes_in,
        "recomputed": last.recomputed_ops / max(last.ops, 1), "copying": last.transfer_seconds,
        "stall": last.stall_seconds, "reserved": last.reserved_bytes,
        "hidden": last.hidden_share if last.transfer_seconds else None,
    }  # fmt: skip


def _overlap(rows: Sequence[Row]) -> float:
    """The best ratio of a step with copies beside the ops to one without, among those that copy for 30 % of a step."""
    times = {(r["model"], r["batch"], r.get("budget"), r["method"]): r for r in rows if "copying" in r}
    ratios = [
        times[*key, "delta"]["seconds"] / row["seconds"]
        for (*key, method), row in times.items()
        if method == "delta, copies in turn" and (*key, "delta") in times and row["copying"] >= 0.3 * row["seconds"]
    ]
    return min(ratios, default=NOTHING_TO_COMPARE)


def _clean_up() -> None:
    gc.collect()
    torch.cuda.empty_cache()


COLUMNS: Final = (
    *columns.text(model="model", batch="batch", method="method"),
    *columns.nbytes(budget="budget", peak="peak, allocator", told="peak, session", reserved="set aside"),
    *columns.ratios(over="peak / budget", first_over="of the first step", times="times plain"),
    *columns.seconds(seconds="step", copying="copies", stall="stall"),
    *columns.shares(hidden="copies hidden", recomputed="recomputed"),
    *columns.nbytes(bytes_out="out", bytes_in="in"),
    *columns.text(outcome="compared with plain"),
)

NOTES: Final = (
    "Peak: `torch.cuda.max_memory_allocated` of the worst step, the first included, read around the step; beside it "
    "what the session reports. Step: median on the device's clock without the first three.",
    "The first budget of each model is the share of the plain peak that DELTA reports: section 5.2 for ResNet-50 "
    "(11.2 -> 4.11 GB at batch 128, 21.3 -> 8.4 GB at 256), table II for ResNet-101 and ResNeXt-50.",
    "Copies hidden: of the time that the lanes spent on copies, what compute did not wait for. The paper's overlap "
    "shortens a step by 20 %.",
)

BENCHMARK: Final = Benchmark(
    name="gpu",
    run=run,
    judge=_checks,
    full=Size(runs=tuple(PUBLISHED), shares=(0.5,), side=224, steps=7),
    quick=Size(runs=(("resnet50", 128),), shares=(0.7,), side=64, steps=4),
)
