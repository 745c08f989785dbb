"""`spillway advise`: which method trains fastest, at which batch size, by PAPAYA's model of measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final, final

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import spillway
from spillway.advisor.advice_figures import Kinds
from spillway.advisor.advice_page import advice_page
from spillway.advisor.bench import AbstractBench, Trial
from spillway.advisor.campaign import Campaign
from spillway.advisor.gains import Sweep, sweeps_of
from spillway.advisor.measurements import Experiment, read_measurements, seen_on, write_measurements
from spillway.advisor.offload_rule import BlockRule, offload_rules
from spillway.advisor.real import AROUND, STEPS, RealBench, RememberedBench, cache_file
from spillway.advisor.simulated import SimulatedBench, Steps
from spillway.advisor.verdict import (
    Accumulation,
    Row,
    Verified,
    accumulation_of,
    advise,
    default_limit,
    plain_row,
    recommended,
    sentence,
)
from spillway.advisor.ways import DEFAULT, PLAIN, WAYS, accumulated, chosen, way_of
from spillway.budgets import parse_budget, parse_bytes
from spillway.calibration.named_device import device_of
from spillway.cli import advice_tables as tables
from spillway.cli.common import (
    INTERRUPTED,
    WORKLOADS,
    Json,
    Seed,
    check_writable,
    naming,
    numbers,
    print_json,
    record_workload,
    say,
    to_print,
    to_terminal,
)
from spillway.doctor import on_system
from spillway.errors import BudgetError, SpillwayError, UsageError
from spillway.internals.machine_memory import usable_memory
from spillway.ir import Step
from spillway.report.drawing import check_drawing
from spillway.units import Bytes, Seconds, format_bytes, format_seconds

Workload = Annotated[str | None, typer.Argument(
    help=f"It is measured, or simulated: file.py:function, or one of {', '.join(WORKLOADS)}."
)]  # fmt: skip
Measurements = Annotated[Path | None, typer.Option(
    "--from", help="Instead of a workload: what steps took, by method and batch size, a CSV file."
)]  # fmt: skip
Methods = Annotated[
    str | None, typer.Option(help=f"To compare with plain: {', '.join(WAYS)}.", show_default=",".join(DEFAULT))
]
Memory = Annotated[str | None, typer.Option(
    help="What steps may take of the device, as 12.8GB or 80%; less than it has, because of fragments.",
    show_default="nine tenths of what is available, of a GPU eight; with --from the largest peak of the network",
)]  # fmt: skip
Simulate = Annotated[str | None, typer.Option(
    help="Ask a device that is not here, a preset or a device's .json file; nothing is measured."
)]  # fmt: skip
Batches = Annotated[str | None, typer.Option(help="Batch sizes to try, as 2,4,8.", show_default="chosen on the way")]
TrialSeconds = Annotated[
    float, typer.Option(min=0.01, help="How long a trial of one method at one batch size may take.")
]
Length = Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="its own")]
Layers = Annotated[str | None, typer.Option(
    help="Blocks of the model; of several numbers, as 2,4,8, each is answered.", show_default="its own"
)]  # fmt: skip
Width = Annotated[str | None, typer.Option(
    help="Width of the model; of several, as 64,128, each is answered.", show_default="its own"
)]  # fmt: skip
Device = Annotated[str | None, typer.Option(
    help="Where to measure, as torch names it: cpu, cuda, cuda:1.", show_default="where the model is"
)]  # fmt: skip
Lossless = Annotated[bool, typer.Option("--lossless", help="Leave out methods that change what training computes.")]
Verify = Annotated[bool, typer.Option(
    "--verify",
    help="Run what is recommended and plain training, and compare; each at its largest batch and the one to take.",
)]  # fmt: skip
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")]
Write = Annotated[
    Path | None, typer.Option(help="Where to write what was measured or simulated, as a CSV file that --from reads.")
]
SmallBatches = Annotated[bool, typer.Option(
    "--small-batches", help="Let time be flat for small batches, t = max(a, k x) + b, and not a line."
)]  # fmt: skip
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write a page with figures.")]
Devices = Annotated[str | None, typer.Option(
    help="Numbers of devices that train data parallel, as 1,2,4,8; each has a batch of its own."
)]  # fmt: skip
Gradients = Annotated[str | None, typer.Option(
    help="Bytes of gradients that devices exchange every step, as 1.3GB; the same for all networks of a file."
)]  # fmt: skip
Link = Annotated[str | None, typer.Option(help="How fast devices exchange them, as 25GB/s; with --devices.")]
Latency = Annotated[
    str | None, typer.Option(help="Of each message of the exchange, as 20us; with --devices.", show_default="none")
]

OF_GPU: Final = 0.8
"""Of a GPU's memory, what steps may take if nobody says: PAPAYA's share, the rest being fragments."""
OF_MACHINE: Final = 0.9
"""The same of RAM that is available: a process takes more than its tensors."""
LOSSY: Final = "lossy: gradients are other than plain PyTorch's"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """Where a workload is tried."""

    bench: AbstractBench
    memory: Bytes
    """That steps may take if nobody says."""
    device_bytes: Bytes
    gradient_bytes: Bytes
    longest: Seconds
    """A step that takes longer is not tried."""
    rules: Callable[[int], Sequence[BlockRule]] = lambda size: ()
    """Of the blocks at a batch size, where the device's link is known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is to be found out and shown."""

    memory: str | None
    """What steps may take, as it was given."""
    small_batches: bool
    devices: tuple[str | None, str | None, str | None, str | None]
    """Numbers of devices, gradients, link, latency, as they were given."""
    output: Path | None
    json: bool
    methods: Sequence[str] = ()
    """Names, plain training first."""
    batches: Sequence[int] = ()
    """To measure; empty to choose."""
    network: str = ""
    """The workload with its options."""
    verify: bool = False

    def limit(self, device_bytes: Bytes | None) -> Bytes | None:
        """What steps may take of a device with so much memory, if that was said.

        Raises BudgetError for what is none, and for a share where nobody knows of what.
        """
        if self.memory is None:
            return None
        if device_bytes is None and "%" in self.memory:
            raise BudgetError(
                f"--memory {self.memory} is a share of a device's memory, which measurements do not tell; write bytes."
            )
        shares = device_bytes is not None and self.memory.strip()[-1:] in ("%", "x")
        limit = parse_budget(self.memory, device_bytes or 0) if shares else parse_bytes(self.memory)
        if limit == 0:
            raise BudgetError("Steps take more than 0 bytes: give --memory what the device has for them.")
        return limit

    def exchange(self, known: Bytes | None = None) -> tables.Exchange | None:
        """Between devices; `known` are the bytes of the gradients where the model is there."""
        return tables.exchange_of(*self.devices, known=known)

    def page(
        self, answers: Sequence[Sequence[Row]], title: str, facts: Mapping[str, str], kinds: Kinds,
        exchange: tables.Exchange | None, swept: Sequence[Sweep],
    ) -> None:  # fmt: skip
        """Write it, if one is wanted, with sweeps over depth and width where experiments make some."""
        if self.output is None:
            return
        limits = {rows[0].limit for rows in answers if any(row.fitted for row in rows)}
        told = {**facts}
        if len(answers) > 1:
            told["networks"] = f"{len(answers)}"
        if len(limits) == 1:
            told["steps may take"] = format_bytes(round(limits.pop()))
        if exchange is not None:
            told["devices"] = f"{', '.join(map(str, exchange.counts))}; {exchange}"
        sweeps = [*sweeps_of(answers), *swept]
        with naming(self.output):
            page = advice_page(answers, title=title, facts=told, kinds=kinds, sweeps=sweeps)
            self.output.write_text(page, encoding="utf-8", errors="backslashreplace")  # as names of files may need
        if not self.json:
            print(self.output)


def advise_(
    *, workload: Workload = None, measurements: Measurements = None, methods: Methods = None, memory: Memory = None,
    device: Device = None, simulate: Simulate = None, batches: Batches = None, seconds: TrialSeconds = 6.0,
    length: Length = None, layers: Layers = None, width: Width = None, lossless: Lossless = False,
    verify: Verify = False, fresh: Fresh = False, write: Write = None, small_batches: SmallBatches = False,
    devices: Devices = None, gradients: Gradients = None, link: Link = None, latency: Latency = None,
    output: Output = None, seed: Seed = 0, json: Json = False,
) -> None:  # fmt: skip
    """Say which method that saves memory trains faster than plain training, at which batch size, and how sure that is.

    A workload is measured at a few batch sizes of each method, each in a process of its own; what was measured is kept
    and not measured again. Ctrl-C answers from what is there, and the exit code is 130. With --simulate a device is
    asked that need not be here. Of a file every network and hardware is answered by itself. An answer is a sentence,
    then a table of all methods; with --devices two more have what each gains where gradients are exchanged.
    """
    exchanged = (devices, gradients, link, latency)
    wanted = _Wanted(memory=memory, small_batches=small_batches, devices=exchanged, output=output, json=json)
    wanted.limit(None if measurements is not None else usable_memory())  # what is wrong with it is said now
    check_writable(output, write, read=[one for one in (workload, measurements, simulate) if one is not None])
    if output is not None:
        check_drawing("the page", "--output the table and --json need")
    if measurements is not None:
        _check_not_given("--from looks at what was measured", {
            "WORKLOAD": workload, "--methods": methods, "--device": device, "--simulate": simulate,
            "--batches": batches, "--length": length, "--layers": layers, "--width": width, "--lossless": lossless,
            "--verify": verify, "--fresh": fresh, "--write": write,
        })  # fmt: skip
        _from_file(measurements, wanted)
        return
    if workload is None:
        raise UsageError("Name a workload to measure, or give measurements with --from measurements.csv.")
    wanted.exchange(known=0)  # what is wrong with it is said now
    names = DEFAULT if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    wanted = replace(
        wanted, methods=[way.name for way in chosen(names, lossless=lossless)], verify=verify,
        batches=numbers(batches, "--batches", "2,4,8"),
        network=workload if length is None else f"{workload} length={length}",
    )  # fmt: skip
    console, every = to_terminal(), list[Found]()
    for depth, wide in product(
        numbers(layers, "--layers", "2,4,8") or (None,), numbers(width, "--width", "64,128") or (None,)
    ):
        shape = {"length": length, "layers": depth, "width": wide}
        options = {name: value for name, value in shape.items() if value is not None}
        tried = (
            _measured(workload, options, seed, console, device, longest=seconds / (STEPS + AROUND), fresh=fresh)
            if simulate is None else _simulated(workload, options, seed, simulate, device, fresh=fresh)
        )  # fmt: skip
        with tried as setting:
            every.append(find_out(setting, wanted, console, layers=str(depth or ""), hidden=str(wide or "")))
        if not every[-1].whole:
            break
    _tell(every, wanted, write, console)


def _check_not_given(why: str, options: Mapping[str, object]) -> None:
    told = [name for name, value in options.items() if value not in (None, False)]
    if told:
        raise UsageError(f"{told[0]} is for measuring, and {why}: leave one out.")


def _from_file(path: Path, wanted: _Wanted) -> None:
    exchange = wanted.exchange()
    with naming(path):
        experiments = read_measurements(path)
    answers = [
        advise(there, wanted.limit(None) or default_limit(there), small_batches=wanted.small_batches)
        for there in experiments
    ]  # fmt: skip
    swept = tables.sweeps_over(exchange, answers)
    if wanted.json:
        print_json(tables.answers_json(answers, exchange, swept))
    else:
        tables.print_answers(answers)
        tables.print_sweeps(exchange, swept)
    wanted.page(answers, path.name, {"measurements": str(path)}, {}, exchange, swept)


def _tell(every: Sequence[Found], wanted: _Wanted, write: Path | None, console: Console) -> None:
    if write is not None:
        peaks = [
            {
                method: {size: trial.peak for size, trial in trials.items() if trial.peak is not None}
                for method, trials in one.campaign.trials.items()
            }
            for one in every
        ]
        with naming(write):
            write_measurements(write, [one.experiment for one in every], peaks)
    documents, swept = [], list[Sweep]()
    for one in every:
        exchange = wanted.exchange(known=one.gradient_bytes)
        mine = tables.sweeps_over(exchange, [one.rows])
        swept += mine
        if wanted.json:
            document = one.to_json()
            rows = tables.answers_json([one.rows], exchange, mine)
            document["rows"] = [row | more for row, more in zip(document["rows"], rows, strict=True)]
            documents.append(document)
        else:
            for line in one.sentences():
                say(to_print(), line)
            tables.print_table(to_print(), one.rows, one.lossy)
            for line in one.remarks():
                say(to_print(), f"  {line}")
            tables.print_sweeps(exchange, mine)
    if wanted.json:
        print_json(documents[0] if len(documents) == 1 else {"networks": documents})
    first, kinds = every[0], dict[tuple[str, int], Mapping[str, Bytes]]()
    if len(every) == 1:  # by method and batch size alone
        kinds = {(trial.method, trial.size): trial.by_kind for trial in first.trials() if trial.by_kind}
    bench, exchange = first.campaign.bench, wanted.exchange(known=first.gradient_bytes)
    facts = {"workload": bench.name, "hardware": bench.hardware}
    wanted.page([one.rows for one in every], bench.name, facts, kinds, exchange, swept)
    if not every[-1].whole:
        seen = every[-1].experiment.seen
        kept = ", and kept" if seen == "measured" else ""
        say(console, f"spillway: interrupted. What was {seen} is answered from{kept}.")
        raise typer.Exit(INTERRUPTED)


# ---------------------------------------------------------------------- where it is tried


@contextmanager
def _measured(
    workload: str, options: Mapping[str, object], seed: int, console: Console, device: str | None, *,
    longest: Seconds, fresh: bool,
) -> Iterator[_Setting]:  # fmt: skip
    """On this machine. If nobody says, steps may take what is free of the device, or available of the machine, less a
    part for what is in no account."""
    with RealBench(workload, options=options, seed=seed, output=partial(say, console), device=device) as real:
        key = real.key() | {"spillway": spillway.__version__}
        bench = RememberedBench(real, lambda: real.facts, cache_file(key), key, fresh=fresh)
        memory, gradient_bytes = bench.facts["device_bytes"], int(bench.facts["gradient_bytes"])
        there = usable_memory() if memory is None else int(memory)
        if memory is None:
            system = on_system.memory().facts
            limits = [limit for limit in (system["available"], system["container_free"]) if limit]
            memory = int(OF_MACHINE * min(limits, default=usable_memory()))
        else:
            memory = int(OF_GPU * memory)
        yield _Setting(bench=bench, memory=memory, device_bytes=there, gradient_bytes=gradient_bytes, longest=longest)
        if bench.remembered:
            say(console, f"{bench.remembered} trials were measured by earlier runs; --fresh measures them again.")


@contextmanager
def _simulated(
    workload: str, options: Mapping[str, Any], seed: int, simulated: str, device: str | None, *, fresh: bool
) -> Iterator[_Setting]:
    """On paper, a device by its name or file."""
    _check_not_given("--simulate measures nothing", {"--device": device, "--fresh": fresh})

    def recorded(size: int) -> Step:
        return record_workload(workload, fake=True, seed=seed, batch=size, **options).step

    bench = SimulatedBench(workload, Steps(recorded), device_of(simulated))
    yield _Setting(
        bench=bench, memory=int(OF_GPU * bench.device.memory), device_bytes=bench.device.memory,
        gradient_bytes=bench.gradient_bytes(), longest=inf,
        rules=lambda size: offload_rules(bench.step_of(way_of(PLAIN), size).step, bench.device),
    )  # fmt: skip


# ---------------------------------------------------------------------- what comes of it


@final
@dataclass(slots=True)
class Found:
    """What came of it."""

    campaign: Campaign
    experiment: Experiment
    rows: Sequence[Row]
    gradient_bytes: Bytes
    accumulation: Accumulation | None = None
    verified: list[Verified] = field(default_factory=list)
    verifies: bool = False
    """Whether predictions are to be measured."""
    whole: bool = True
    """Whether nobody pressed Ctrl-C."""
    rules: Sequence[BlockRule] = ()
    """When offloading takes less than recomputing, kind of block by kind."""

    def sentences(self) -> Iterator[str]:
        """The answer: the first says which method, and those behind it what to know about that."""
        yield sentence(self.rows)
        best = recommended(self.rows)
        if best is not None and way_of(best.method).lossy:
            others = recommended([row for row in self.rows if not way_of(row.method).lossy])
            instead = others and others.taken
            more = "" if others is None or instead is None else (
                f"; the fastest that changes no bit is {others.method}, with {instead.throughput:.4g} samples/s at "
                f"batch {instead.size}"
            )  # fmt: skip
            yield f"{best.method} is {LOSSY}{more}."
        if self.accumulation is not None:
            yield self.accumulation.sentence()

    def remarks(self) -> Iterator[str]:
        """What could not be measured, and how predictions came out."""
        for method, fault in self.campaign.faults.items():
            yield f"{method} was not {self.experiment.seen}: {fault}"
        for method, sizes in self.campaign.left_out.items():
            yield f"{method} was not {self.experiment.seen} at batch {', '.join(map(str, sizes))}, which would not fit."
        for method, size in self.campaign.unknown.items():
            yield (
                f"{method}: up to batch {size} its peak was not seen to grow with the batch, so that no larger one can "
                f"be told from it: allow longer trials with --seconds, or name larger ones with --batches."
            )
        for one in self.verified:
            yield one.sentence(self.campaign.limit)
        for rule in self.rules:
            yield rule.sentence()
        if self.verifies and not self.verified:
            yield "Nothing was verified, because nothing was predicted."

    @property
    def lossy(self) -> frozenset[str]:
        """The methods whose gradients are other than plain PyTorch's."""
        return frozenset(row.method for row in self.rows if way_of(row.method).lossy)

    def trials(self) -> Iterator[Trial]:
        """All of them, method by method."""
        for trials in self.campaign.trials.values():
            yield from (trials[size] for size in sorted(trials))

    def to_json(self) -> dict[str, Any]:
        """The one document of the verb."""
        seen = self.experiment.seen
        return {
            "figures": seen, "answer": list(self.sentences()), "limit_bytes": self.campaign.limit, "whole": self.whole,
            "rows": [row.to_json() | {"lossy": row.method in self.lossy} for row in self.rows],
            "accumulation": self.accumulation and self.accumulation.to_json(),
            "verified": [one.to_json() for one in self.verified],
            "offload_or_recompute": [rule.to_json() for rule in self.rules],
            f"not_{seen}": dict(self.campaign.faults), "trials": [trial.to_json() for trial in self.trials()],
        }  # fmt: skip


def find_out(setting: _Setting, wanted: _Wanted, console: Console, *, layers: str, hidden: str) -> Found:
    """Measure, fit, answer. Ctrl-C ends the measuring, and what is measured is answered from.

    Raises SpillwayError if plain training cannot be measured, and Exit if nothing was before Ctrl-C.
    """
    bench, limit = setting.bench, wanted.limit(setting.device_bytes) or setting.memory
    campaign = Campaign(bench, wanted.methods, limit, batches=wanted.batches, longest=setting.longest)
    whole = _interruptible(lambda: _collect(campaign, console))
    if not any(campaign.trials.values()):
        say(console, f"spillway: interrupted before anything was {seen_on(bench.hardware)}.")
        raise typer.Exit(INTERRUPTED)
    experiment = replace(campaign.experiment(layers=layers, hidden=hidden), network=wanted.network)
    rows = advise(experiment, limit, small_batches=wanted.small_batches)
    offered = accumulation_of(rows, setting.gradient_bytes)
    found = Found(campaign, experiment, rows, setting.gradient_bytes, offered, verifies=wanted.verify, whole=whole)
    sizes = [row.taken.size for row in (recommended(rows), plain_row(rows)) if row is not None and row.taken]
    if whole and sizes:
        found.rules = setting.rules(sizes[0])
    if whole:
        found.whole = _interruptible(lambda: _follow_up(found, console))
    return found


def _interruptible(action: Callable[[], None]) -> bool:
    """Whether nobody pressed Ctrl-C."""
    try:
        action()
    except KeyboardInterrupt:
        return False
    return True


def _collect(campaign: Campaign, console: Console) -> None:
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    with progress, closing(campaign.run()) as coming:
        task = progress.add_task("starting", total=None)
        for trial in coming:
            said, current, remaining = _told(trial, campaign.limit), campaign.current, campaign.remaining
            if not console.is_terminal:
                say(console, said)
                continue
            place = len(campaign.methods) if current is None else 1 + campaign.methods.index(current)
            left = "" if remaining is None else f", about {format_seconds(round(remaining))} left"
            progress.update(task, description=f"{said}; method {place} of {len(campaign.methods)}{left}")


def _follow_up(found: Found, console: Console) -> None:
    """Measure what the answer names: the step that accumulates, and with `--verify` predictions."""
    best, plain, offered = recommended(found.rows), plain_row(found.rows), found.accumulation
    if offered is not None:
        trial = _one(found, accumulated(offered.micro), offered.size, console)
        if trial is not None and trial.seconds is not None:
            found.accumulation = replace(offered, measured=offered.size / trial.seconds)
    for one in (best, None if plain is best else plain) if found.verifies else ():
        if one is None or one.fitted is None or one.predicted is None or one.taken is None:
            continue
        for size in sorted({one.taken.size, one.predicted.size}):
            measured = _one(found, one.method, size, console, again=True)
            if measured is not None:
                found.verified.append(Verified.of(one.method, one.fitted, measured, found.experiment.seen))


def _one(found: Found, method: str, size: int, console: Console, *, again: bool = False) -> Trial | None:
    try:
        trial = found.campaign.measure(method, size, again=again)
    except SpillwayError as error:
        found.campaign.faults[method] = str(error)
        return None
    say(console, _told(trial, found.campaign.limit))
    return trial


def _told(trial: Trial, limit: Bytes) -> str:
    at = f"{trial.method} at batch {trial.size}"
    if trial.peak is None or trial.seconds is None:
        return f"{at}: more than {format_bytes(limit)}"
    return f"{at}: {format_seconds(trial.seconds)} a step, {format_bytes(trial.peak)}"
