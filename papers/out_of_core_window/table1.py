"""Table 1 of the window paper on its own machine: images a second of ResNet-50 by batch, beside what it says.

One number is fitted for each machine, the rate of its link, to the batch of 512: to "Schedule + VA" on the V100, to
"LMS" on the P100. A step takes what a line through the paper's baselines says: the part that grows with the batch is
spread over the ops as the roofline has them, the part that does not evenly. The README beside this tells what differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers import TABLES, table
from papers.out_of_core_window.least import bytes_in, least_bytes_in
from papers.out_of_core_window.nnabla import BucketAllocator, OneRegion, Script, WholeChunks
from spillway.calibration.named_device import device_of
from spillway.costs import Device, timed
from spillway.errors import BudgetInfeasible
from spillway.ir import Host, Kind, Op, Phase, Plan, Step, StorageInfo, Value
from spillway.methods import LMS, AbstractPlanner, ImprovedWindow, Problem, Window
from spillway.methods.lms import SHARE
from spillway.simulation.simulated_engine import simulate
from spillway.units import Bytes, MiB, Seconds
from spillway.workloads.recorded import record

GB: Final = 10**9
USABLE: Final[Bytes] = 15 * GB
"""Of the 16 GB of either device, what is left beside the context and the libraries; assumed."""
CHUNK: Final[Bytes] = 40 * MiB
"""The paper's physical chunk (section 4)."""
EXEMPT: Final[Bytes] = CHUNK // 2
"""Arrays below it share chunks in the row that shows what that brings."""
SLACK: Final[Bytes] = 2 * CHUNK
"""What is kept of the budget there for shared chunks that are not full."""
OURS: Final[Bytes] = 2 * MiB
"""Spillway's."""
STEP: Final[Bytes] = GB // 10
"""Budgets for the schedule alone are tried from all that is usable down, so far apart."""
SHARES: Final = 0.02
"""Shares of memory for LMS's search are tried from IBM's down, so far apart."""
ITERATIONS: Final = 3
"""What the allocator has to serve in a row."""
FITTED: Final = 512
"""The batch to which links are fitted."""
REST: Final = "X"
"""What the paper writes where a batch does not fit."""

VA, ALONE, LARGE_MODEL, OWN = "schedule + VA", "schedule alone", "LMS", "Spillway's window"
SHARING, AT_OPS = "schedule + VA, small arrays share chunks", "Spillway's window, copies in at their ops"
LEAST, AGAIN, IMPROVED = "window, gaps of the least bytes", "window, cheap values recomputed", "improved window"
OURS_SHARED: Final[Mapping[str, Bytes]] = {"chunk": OURS, "exempt": OURS // 2}
"""Small storages share Spillway's chunks."""
OWN_ROWS: Final[Mapping[str, AbstractPlanner]] = {
    AT_OPS: Window(issue="at op", **OURS_SHARED),
    OWN: Window(**OURS_SHARED),
    LEAST: ImprovedWindow(recompute=False, **OURS_SHARED),
    AGAIN: ImprovedWindow(gaps="window", **OURS_SHARED),
    IMPROVED: ImprovedWindow(**OURS_SHARED),
}
"""What is not in the paper and runs under Spillway's controller: each improvement, and all together."""
PUBLISHED: Final[Mapping[str, tuple[str, str]]] = {
    VA: ("Schedule + VA", "V100"),
    ALONE: ("Schedule", "V100"),
    LARGE_MODEL: ("LMS (Le et al., 2019)", "P100"),
}
"""The paper's rows by ours."""
BASELINES: Final[Mapping[str, tuple[str, str]]] = {
    "V100": ("Baseline", "V100"), "P100": ("Baseline", "P100(Le et al.)"),
}  # fmt: skip
DEVICES: Final[Mapping[str, str]] = {"V100": "v100-nvlink", "P100": "p100-nvlink"}


@frozen
class Size:
    """How much is run."""

    batches: tuple[int, ...]
    bounded: tuple[int, ...] = ()
    """Those of them whose bytes are held against the least."""
    other: str = ""
    """A workload whose plans are timed, and that runs under less than it needs, too."""
    others: tuple[tuple[int, Bytes], ...] = ()
    """Its batches, and budgets."""
    lengths: tuple[int, ...] = ()
    """Ops of chains whose plans are timed."""


@frozen
class Cell:
    """What came out for a batch; None for images a second where it does not fit."""

    method: str
    batch: int
    ips: float | None
    out: Bytes = 0
    back: Bytes = 0
    note: str = ""


def run(size: Size, tell: Tell) -> Result:
    """Record every batch, fit both links, then fill the rows."""
    told = _published()
    lab = Lab(told, tell)
    v100, p100 = (
        lab.fitted("V100", _window(CHUNK), VA),
        lab.fitted("P100", _served(lab.step(FITTED, "P100")), LARGE_MODEL),
    )
    tell(f"links: {v100.out_per_second / GB:.1f} and {p100.out_per_second / GB:.1f} GB/s")
    cells: list[Cell] = []
    for batch in size.batches:
        cells += [
            *(_in_chunks(lab, batch, v100, method) for method in (VA, SHARING)), _alone(lab, batch, v100),
            _large_model(lab, batch, p100), *(_own(lab, batch, v100, method) for method in OWN_ROWS),
        ]  # fmt: skip
        tell(f"batch {batch}: " + ", ".join(f"{one.method} {_shown(one.ips)}" for one in cells if one.batch == batch))
    order = (VA, ALONE, LARGE_MODEL, SHARING, *OWN_ROWS)
    rows = [_row(cell, told) for method in order for cell in cells if cell.method == method]
    links: list[Row] = [
        {"method": f"link of the {name}, fitted", "note": f"{device.out_per_second / GB:.2f} GB/s, one lane"}
        for name, device in (("V100", v100), ("P100", p100))
    ]
    times, least, others = list(_times(lab, size, tell)), list(_least(lab, size, v100, tell)), list(_others(size, v100))
    return Result(
        title="Table 1 of the window paper: ResNet-50, images a second", columns=COLUMNS,
        rows=[*rows, *links, *others, *least, *times], notes=NOTES,
    )  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    cells = [row for row in result.rows if "paper_ips" in row]
    yield from _against_the_paper(cells)
    yield from _of_improved_rows(cells)
    others = [row for row in result.rows if "planner" in row and "ips" in row]
    yield from _of_the_other_workload(others)
    yield from _of_bytes([row for row in result.rows if "over" in row])
    yield from _of_times([row for row in result.rows if "plan_seconds" in row])


# ---------------------------------------------------------------------- the paper's machine


Told = Mapping[tuple[str, str], Mapping[int, float | None]]
"""Images a second by the paper's row and device, then batch; None where it does not fit."""


def _published() -> Told:
    return {
        (row["row"], row["gpu"]): {
            int(name.removeprefix("bs")): None if number.upper() == REST else float(number)
            for name, number in row.items()
            if name.startswith("bs")
        }
        for row in table(TABLES / "ooc_table1_resnet50_ips.csv")
    }  # fmt: skip


def _window(chunk: Bytes, exempt: Bytes = 0) -> Window:
    """As published, with small arrays in chunks like all others but those that are exempt."""
    return Window.as_published(chunk=chunk, exempt=exempt, smallest=0)


class Lab:
    """Steps as they are asked for, by batch and device."""

    def __init__(self, told: Told, tell: Tell) -> None:
        self._told = told
        self._tell = tell
        self._recorded: dict[int, Step] = {}

    def step(self, batch: int, device: str) -> Step:
        """With seconds that add up to the line through the device's baselines."""
        if batch not in self._recorded:
            self._tell(f"recording a batch of {batch}")
            self._recorded[batch] = record("resnet50", fake=True, batch=batch).step
        # Without launches, which do not grow with the batch.
        step = timed(self._recorded[batch], replace(device_of(DEVICES[device]), op_seconds=0.0))
        slope, rest = self._line(device)
        times = [op.seconds or 0.0 for op in step.ops]
        factor, each = slope * batch / sum(times), rest / sum(seconds > 0 for seconds in times)
        ops = (replace(op, seconds=seconds * factor + each * (seconds > 0)) for op, seconds in
               zip(step.ops, times, strict=True))  # fmt: skip
        return replace(step, ops=tuple(ops))

    def _line(self, device: str) -> tuple[Seconds, Seconds]:
        """Seconds an image, and of a step without any: least squares over the paper's baselines."""
        points = [(batch, batch / ips) for batch, ips in self._told[BASELINES[device]].items() if ips is not None]
        mean, middle = (sum(values) / len(points) for values in zip(*points, strict=True))
        slope = sum((batch - mean) * seconds for batch, seconds in points) / sum((b - mean) ** 2 for b, _ in points)
        return slope, middle - slope * mean

    def fitted(self, name: str, planner: AbstractPlanner, method: str) -> Device:
        """The device with the link at which that row's batch of 512 is as fast as published."""
        device, step = _linked(device_of(DEVICES[name]), GB), self.step(FITTED, name)
        script = Script(step, planner.plan(Problem(step=step, allowed=USABLE, device=device)))
        wanted = self._told[PUBLISHED[method]][FITTED]
        slow, fast = float(GB), 1e3 * GB
        for _ in range(60):
            middle = (slow * fast) ** 0.5
            slower = FITTED / script.seconds(_linked(device, middle)) < (wanted or 0.0)
            slow, fast = (middle, fast) if slower else (slow, middle)
        return _linked(device, fast)


def _linked(device: Device, rate: float) -> Device:
    return replace(device, out_per_second=rate, in_per_second=rate, duplex=False)


def _planned(planner: AbstractPlanner, step: Step, allowed: Bytes, device: Device) -> Plan | None:
    try:
        return planner.plan(Problem(step=step, allowed=allowed, device=device))
    except BudgetInfeasible:
        return None


def _cell(method: str, batch: int, script: Script, device: Device, note: str = "") -> Cell:
    ips = batch / script.seconds(device)
    return Cell(method=method, batch=batch, ips=ips, out=script.bytes_out, back=script.bytes_in, note=note)


# ---------------------------------------------------------------------- rows


def _in_chunks(lab: Lab, batch: int, device: Device, method: str) -> Cell:
    """With `SHARING`, which is not in the paper: what the rule that is commented out in the public code brings."""
    step, exempt, slack = lab.step(batch, "V100"), *((EXEMPT, SLACK) if method == SHARING else (0, 0))
    plan = _planned(_window(CHUNK, exempt), step, USABLE - slack, device)
    if plan is None:
        return Cell(method=method, batch=batch, ips=None)
    script, chunks = Script(step, plan, CHUNK, exempt), WholeChunks(USABLE, CHUNK, exempt)
    if not script.fits(chunks, ITERATIONS):
        return Cell(method=method, batch=batch, ips=None, note="the plan does not fit in chunks")
    note = f"{chunks.most_lost / GB:.2f} GB lost within chunks"
    bound = "" if exempt else f", of at most {chunks.most_arrays * CHUNK / GB:.2f}"
    return _cell(method, batch, script, device, note + bound)


def _alone(lab: Lab, batch: int, device: Device) -> Cell:
    """With the largest budget whose plan the caching allocator can serve."""
    step, planner = lab.step(batch, "V100"), _window(1)
    for allowed in range(USABLE, 0, -STEP):
        plan = _planned(planner, step, allowed, device)
        if plan is None:
            return Cell(method=ALONE, batch=batch, ips=None, note=f"an op needs more than {allowed / GB:.1f} GB")
        script = Script(step, plan)
        if script.fits(BucketAllocator(USABLE), ITERATIONS):
            return _cell(ALONE, batch, script, device, f"budget {allowed / GB:.1f} GB")
    return Cell(method=ALONE, batch=batch, ips=None)


def _large_model(lab: Lab, batch: int, device: Device) -> Cell:
    step = lab.step(batch, "P100")
    problem = Problem(step=step, allowed=USABLE, device=device)
    try:
        planner = _served(step)
    except BudgetInfeasible as refused:
        note = f"no plan that is served; the last search needs {refused.needed / GB:.1f} GB"
        return Cell(method=LARGE_MODEL, batch=batch, ips=None, note=note)
    found, script = planner.parameters(problem), Script(step, planner.plan(problem))
    note = (
        f"threshold {found.threshold}, ahead {found.ahead}, groupby {found.groupby}, mode {found.mode}, "
        f"{planner.share:.0%} of memory"
    )  # fmt: skip
    return _cell(LARGE_MODEL, batch, script, device, note)


def _served(step: Step) -> LMS:
    """With the largest share of memory for its search whose plan TensorFlow's allocator can serve, all copies out done
    as they begin. Raises BudgetInfeasible if the search finds nothing before that."""
    problem, share = Problem(step=step, allowed=USABLE, device=device_of(DEVICES["P100"])), SHARE
    while True:
        planner = LMS(smallest=0, share=share)
        if Script(step, planner.plan(problem), at_once=True).fits(OneRegion(USABLE), ITERATIONS):
            return planner
        share = round(share - SHARES, 6)


def _own(lab: Lab, batch: int, device: Device, method: str) -> Cell:
    """Not in the paper: in Spillway's chunks, under Spillway's controller."""
    step, planner = lab.step(batch, "V100"), OWN_ROWS[method]
    if _planned(planner, step, USABLE - SLACK, device) is None:
        return Cell(method=method, batch=batch, ips=None)
    ran = simulate(
        step, allowed=USABLE - SLACK, method=planner, device=device, allocator="chunks", limit=USABLE, steps=ITERATIONS
    )
    if ran.status != "ok":
        return Cell(method=method, batch=batch, ips=None, note=ran.why)
    note = f"{ran.recomputed_ops} ops run again, {ran.recomputed_seconds:.3f} s" if ran.recomputed_ops else ""
    return Cell(method=method, batch=batch, ips=batch / ran.seconds, out=ran.bytes_out, back=ran.bytes_in, note=note)


def _others(size: Size, v100: Device) -> Iterator[Row]:
    """Another workload, in which weights move, on the same device and on one whose link is slower."""
    planners = {
        OWN: Window(), LEAST: ImprovedWindow(recompute=False), AGAIN: ImprovedWindow(gaps="window"),
        IMPROVED: ImprovedWindow(),
    }  # fmt: skip
    for batch, allowed in size.others:
        recorded = record(size.other, fake=True, batch=batch).step
        for device in (v100, device_of("v100-pcie")):
            step = timed(recorded, device)
            for method, planner in planners.items():
                ran = simulate(step, allowed=allowed, method=planner, device=device, steps=ITERATIONS)
                yield {
                    "method": f"{size.other}, {allowed / GB:.0f} GB, {device.name}: {method}", "batch": batch,
                    "planner": method, "ips": batch / ran.seconds, "here": f"{batch / ran.seconds:.1f}",
                    "gb_out": ran.bytes_out / GB, "gb_in": ran.bytes_in / GB,
                    "note": f"{ran.recomputed_ops} ops run again" if ran.recomputed_ops else "",
                }  # fmt: skip


def _row(cell: Cell, told: Told) -> Row:
    paper = told[PUBLISHED[cell.method]][cell.batch] if cell.method in PUBLISHED else None
    fits = cell.method not in PUBLISHED or paper is not None
    off = cell.ips / paper - 1 if cell.ips is not None and paper is not None else None
    return {
        "method": cell.method, "batch": cell.batch,
        "published": None if cell.method not in PUBLISHED else _shown(paper),
        "here": _shown(cell.ips), "ips": cell.ips, "paper_ips": paper, "off": off, "fits_in_the_paper": fits,
        "gb_out": cell.out / GB, "gb_in": cell.back / GB, "note": cell.note,
    }  # fmt: skip


def _shown(ips: float | None) -> str:
    return REST if ips is None else f"{ips:.0f}"


# ---------------------------------------------------------------------- bytes, and the least of them


def _least(lab: Lab, size: Size, device: Device, tell: Tell) -> Iterator[Row]:
    """What comes in beside the least that a linear program finds, nothing in chunks."""
    for batch in size.bounded:
        step = lab.step(batch, "V100")
        least = least_bytes_in(step, USABLE)
        for planner in (Window(), Window.as_published(), ImprovedWindow(recompute=False), ImprovedWindow()):
            plan = planner.plan(Problem(step=step, allowed=USABLE, device=device))
            moved = bytes_in(step, (gap for gap in plan.gaps if isinstance(gap.home, Host)))
            tell(f"batch {batch}, {planner.name}: {moved / GB:.1f} GB in, at least {least / GB:.1f}")
            yield {
                "method": f"{planner.name}{_without(planner)}, bytes in beside the least", "batch": batch,
                "gb_in": moved / GB, "over": moved / least, "published_form": planner.name == "window-published",
                "note": f"{moved / least:.3f} of {least / GB:.1f} GB, the least of a linear program",
            }  # fmt: skip


def _without(planner: AbstractPlanner) -> str:
    return " without recomputing" if isinstance(planner, ImprovedWindow) and not planner.recompute else ""


def _of_bytes(rows: Sequence[Row]) -> Iterator[Check]:
    for row in rows:
        name = row["method"].partition(",")[0]
        if name == "window" and row["batch"] < 1000:
            yield Check(
                what=f"window, batch {row['batch']}: bytes in over the least", measured=row["over"], at_most=1.05
            )
        if name == ImprovedWindow.name and row["batch"] >= 1000:
            what = f"{name}, batch {row['batch']}: bytes in over the least"
            yield Check(what=what, measured=row["over"], at_most=1.10)


# ---------------------------------------------------------------------- seconds to plan


def _times(lab: Lab, size: Size, tell: Tell) -> Iterator[Row]:
    largest = max(size.batches)
    steps = {f"ResNet-50, batch {largest}": (lab.step(largest, "V100"), USABLE)}
    if size.other:
        step = timed(record(size.other, fake=True, batch=8).step, device_of("v100-nvlink"))
        steps[f"{size.other}, batch 8"] = (step, 2 * GB)
    for ops in size.lengths:
        chain = _chain(ops)
        steps[f"chain of {ops} ops"] = (chain, chain.plain_peak() // 3)
    for what, (step, allowed) in steps.items():
        problem = Problem(step=step, allowed=allowed, device=device_of("v100-nvlink"))
        for planner in (Window(),) if what.startswith("chain") else (Window(), Window.as_published(), ImprovedWindow()):
            again = f", {planner.schedule(problem).restarts} restarts" if isinstance(planner, Window) else ""
            least = _least_seconds(planner, problem)
            tell(f"{what}, {planner.name}: {least:.3f} s")
            yield {
                "method": f"seconds of a plan: {what}, {planner.name}", "plan_seconds": least,
                "note": f"{len(step.ops)} ops{again}", "ops": len(step.ops), "planner": planner.name,
            }  # fmt: skip


def _least_seconds(planner: AbstractPlanner, problem: Problem) -> Seconds:
    """Processor time, the least of three times: of the window's schedule, or of a whole plan."""
    took = []
    for _ in range(3):
        began = time.process_time()
        if isinstance(planner, Window):
            planner.schedule(problem)
        else:
            planner.plan(problem)
        took.append(time.process_time() - began)
    return min(took)


def _chain(ops: int) -> Step:
    """Layers, and their gradients in the opposite order, each of which reads what went into its layer."""
    layers, nbytes = ops // 2, 8192
    storages = [
        StorageInfo(
            id=0, nbytes=nbytes, kind=Kind.INPUT, alive_from=0, alive_until=2 * layers, present_at_start=True,
            present_at_end=True,
        )
    ]  # fmt: skip
    made = []
    for op in range(2 * layers):
        forward = op < layers
        reads = (op,) if forward else (2 * layers - 1 - op, op)
        until = 2 * layers - op - 1 if forward and op < layers - 1 else min(op + 2, 2 * layers)
        storages.append(
            StorageInfo(id=op + 1, nbytes=nbytes, kind=Kind.ACTIVATION, alive_from=op, alive_until=max(until, op + 1))
        )
        phase = Phase.FORWARD if forward else Phase.BACKWARD
        made.append(Op(number=op, name="aten.mm.default", phase=phase, reads=reads, creates=(op + 1,), seconds=1e-4))
    values = tuple(Value(id=storage.id, storage=storage.id, version=0) for storage in storages)
    return Step(storages=tuple(storages), values=values, ops=tuple(made))


# ---------------------------------------------------------------------- checks


def _against_the_paper(cells: Sequence[Row]) -> Iterator[Check]:
    by = {(cell["method"], cell["batch"]): cell["ips"] or 0.0 for cell in cells}
    for method, what, wanted, limit in (
        (VA, "the worst batch but that of the link", lambda batch: batch != FITTED, 0.10),
        (ALONE, "the worst of 256, 512 and 928", lambda batch: batch >= 256, 0.10),
        (ALONE, "up to 190", lambda batch: batch < 256, 0.15),
        (LARGE_MODEL, "the worst of 190 and 256", lambda batch: batch in (190, 256), 0.10),
        (LARGE_MODEL, "928", lambda batch: batch == 928, 0.30),
    ):
        found = [
            abs((cell["ips"] or 0.0) / cell["paper_ips"] - 1)
            for cell in cells
            if cell["method"] == method and cell["paper_ips"] is not None and wanted(cell["batch"])
        ]
        if found:
            yield Check(what=f"{method}, off the paper, {what}", measured=max(found), at_most=limit)
    wrong = sum(
        (cell["ips"] is None) is cell["fits_in_the_paper"]
        for cell in cells
        if cell["method"] in PUBLISHED
        and (cell["method"] != LARGE_MODEL or cell["fits_in_the_paper"] or cell["batch"] > 928)
    )
    yield Check(what="cells that fit here and not in the paper, or the other way round", measured=wrong, at_most=0)
    ahead = sum((by[VA, batch] > by[ALONE, batch]) is not (batch >= 928) for method, batch in by if method == VA)
    yield Check(what="batches where the other of VA and alone is ahead", measured=ahead, at_most=0)
    slower = sum(
        by[OWN, batch] < max(ips for (method, at), ips in by.items() if at == batch and
                             method not in (LARGE_MODEL, *OWN_ROWS))
        for method, batch in by if method == OWN
    )  # fmt: skip
    yield Check(what="batches where Spillway's window is behind another row of the V100", measured=slower, at_most=0)


AT_LEAST: Final[Mapping[int, float]] = {512: 550.0, 928: 500.0, 1440: 360.0}
"""Images a second that the improved window has to reach, by batch."""


def _of_improved_rows(cells: Sequence[Row]) -> Iterator[Check]:
    by = {(cell["method"], cell["batch"]): cell["ips"] or 0.0 for cell in cells}
    for batch, least in AT_LEAST.items():
        if (IMPROVED, batch) in by:
            what = f"{IMPROVED}, batch {batch}: {least:.0f} images a second over those here"
            yield Check(what=what, measured=least / max(by[IMPROVED, batch], 1.0), at_most=1.0)
    slower = sum(
        ips < by[OWN, batch] for (method, batch), ips in by.items() if method in (LEAST, AGAIN, IMPROVED)
    )  # fmt: skip
    yield Check(what="cells of improved rows that are slower than Spillway's window", measured=slower, at_most=0)


def _of_the_other_workload(rows: Sequence[Row]) -> Iterator[Check]:
    plain, slower = 0.0, 0
    for row in rows:
        plain = row["ips"] if row["planner"] == OWN else plain
        slower += row["ips"] < plain
    if rows:
        yield Check(what="rows of the other workload that are slower than the window", measured=slower, at_most=0)


def _of_times(rows: Sequence[Row]) -> Iterator[Check]:
    limits = {
        ("ResNet-50", Window.name): 0.1, ("bert-large", Window.name): 0.25, ("chain of 100000 ops", Window.name): 10.0,
        ("ResNet-50", ImprovedWindow.name): 1.0,
    }  # fmt: skip
    for row in rows:
        for (name, planner), limit in limits.items():
            if name in row["method"] and planner == row["planner"]:
                yield Check(what=row["method"], measured=row["plan_seconds"], at_most=limit)


COLUMNS: Final = (
    *columns.text(method="row", batch="batch", published="published", here="here"),
    *columns.shares(off="difference"),
    *columns.shown("{:.1f}".format, gb_out="GB out", gb_in="GB in"),
    *columns.seconds(plan_seconds="CPU"),
    *columns.text(note="note"),
)
NOTES: Final = (
    "Images a second; X where a batch does not fit. A link is fitted to the batch of 512 alone, so that batch is no "
    "prediction for VA and LMS. GB are 10^9 bytes.",
    "Rows without a published number are not in the paper. Small arrays are those below half a chunk. The rows of "
    "Spillway: they share chunks of 2 MiB, copies in begin as early as there is room, under Spillway's controller on "
    "the same device.",
)

BENCHMARK: Final = Benchmark(
    name="window_table1",
    run=run,
    judge=_checks,
    full=Size(
        batches=(64, 128, 190, 256, 512, 928, 1120, 1248, 1440),
        bounded=(512, 928, 1440),
        other="bert-large",
        others=((8, 2 * GB), (32, 4 * GB)),
        lengths=(1000, 10_000, 100_000),
    ),
    quick=Size(batches=(64, 512), bounded=(512,)),
)
