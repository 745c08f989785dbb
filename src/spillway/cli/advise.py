"""`spillway advise`: which method trains fastest, at which batch size, by PAPAYA's model of measured steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final, final

import typer
from rich.console import Console

import spillway
from spillway.advisor.bench import AbstractBench
from spillway.advisor.measurements import read_measurements
from spillway.advisor.real import AROUND, STEPS, RealBench
from spillway.advisor.remembered import RememberedBench, cache_file
from spillway.advisor.sweeps import Sweep
from spillway.advisor.verdict import Row, advise, default_limit
from spillway.advisor.ways import DEFAULT, WAYS, chosen
from spillway.cli.advice_page import check_page, page_facts, write_answers
from spillway.cli.advice_tables import print_answers, print_found
from spillway.cli.by_devices import (
    Devices,
    Exchange,
    Gradients,
    Latency,
    Link,
    answers_json,
    exchange_of,
    print_sweeps,
    sweeps_over,
)
from spillway.cli.campaigns import Asked, Found, find_out, given, parse_sizes, write_found
from spillway.cli.common import (
    Json,
    Seed,
    check_writable,
    naming,
    print_json,
    say,
    to_terminal,
)
from spillway.cli.compare import INTERRUPTED
from spillway.cli.simulated import simulated_bench
from spillway.doctor import on_system
from spillway.engines.memory import machine_memory
from spillway.errors import BudgetError, UsageError
from spillway.report.advice_figures import Kinds
from spillway.units import Bytes, Seconds, parse_bytes

Workload = Annotated[
    str | None,
    typer.Argument(help="A name that comes with Spillway, or file.py:function; it is measured, or simulated."),
]
Measurements = Annotated[
    Path | None,
    typer.Option("--from", help="Instead of a workload: what steps took, by method and batch size, a CSV file."),
]
Methods = Annotated[
    str | None, typer.Option(help=f"To compare with plain: {', '.join(WAYS)}.", show_default=",".join(DEFAULT))
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="What steps may take of the device, as 12.8GB; less than it has, because of fragments.",
        show_default="nine tenths of what is available, of a GPU eight; with --from the largest peak of the network",
    ),
]
Simulate = Annotated[
    str | None,
    typer.Option(help="Ask a device that is not here, a preset or a device's .json file; nothing is measured."),
]
Batches = Annotated[str | None, typer.Option(help="Batch sizes to try, as 2,4,8.", show_default="chosen on the way")]
TrialSeconds = Annotated[
    float, typer.Option(min=0.01, help="How long a trial of one method at one batch size may take.")
]
Length = Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="its own")]
Layers = Annotated[
    str | None,
    typer.Option(help="Blocks of the model; of several numbers, as 2,4,8, each is answered.", show_default="its own"),
]
Width = Annotated[
    str | None,
    typer.Option(help="Width of the model; of several, as 64,128, each is answered.", show_default="its own"),
]
Device = Annotated[
    str | None,
    typer.Option(help="Where to measure, as torch names it: cpu, cuda, cuda:1.", show_default="where the model is"),
]
Lossless = Annotated[bool, typer.Option("--lossless", help="Leave out methods that change what training computes.")]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Run what is recommended and plain training, and compare; each at its largest batch and the one to take.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")]
Write = Annotated[
    Path | None, typer.Option(help="Where to write what was measured or simulated, as a CSV file that --from reads.")
]
SmallBatches = Annotated[
    bool,
    typer.Option("--small-batches", help="Let time be flat for small batches, t = max(a, k x) + b, and not a line."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write a page with figures.")]


OF_GPU: Final = 0.8
"""Of a GPU's memory, what steps may take if nobody says: PAPAYA's share, the rest being fragments."""
OF_MACHINE: Final = 0.9
"""The same of RAM that is available: a process takes more than its tensors."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is to be shown of the answers."""

    devices: tuple[str | None, str | None, str | None, str | None]
    """Numbers of devices, gradients, link, latency, as they were given."""
    output: Path | None
    json: bool

    def exchange(self, known: Bytes | None = None) -> Exchange | None:
        """Between devices; `known` are the bytes of the gradients where the model is there."""
        return exchange_of(*self.devices, known=known)

    def page(
        self, answers: Sequence[Sequence[Row]], title: str, facts: Mapping[str, str], kinds: Kinds,
        exchange: Exchange | None, swept: Sequence[Sweep],
    ) -> None:  # fmt: skip
        """Write it, if one is wanted."""
        if self.output is None:
            return
        told = {**facts, **page_facts(answers, exchange)}
        write_answers(self.output, answers, title=title, facts=told, kinds=kinds, devices=swept)
        if not self.json:
            print(self.output)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a workload is tried."""

    bench: AbstractBench
    memory: Bytes
    """That steps may take if nobody says."""
    gradient_bytes: Bytes
    longest: Seconds
    """A step that takes longer is not tried."""


def advise_(
    *,
    workload: Workload = None,
    measurements: Measurements = None,
    methods: Methods = None,
    memory: Memory = None,
    device: Device = None,
    simulate: Simulate = None,
    batches: Batches = None,
    seconds: TrialSeconds = 6.0,
    length: Length = None,
    layers: Layers = None,
    width: Width = None,
    lossless: Lossless = False,
    verify: Verify = False,
    fresh: Fresh = False,
    write: Write = None,
    small_batches: SmallBatches = False,
    devices: Devices = None,
    gradients: Gradients = None,
    link: Link = None,
    latency: Latency = None,
    output: Output = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Say which method that saves memory trains faster than plain training, at which batch size, and how sure that is.

    A workload is measured at a few batch sizes of each method, each in a process of its own; what was measured is kept
    and not measured again. Ctrl-C answers from what is there, and the exit code is 130. With --simulate a device is
    asked that need not be here. Of a file every network and hardware is answered by itself. An answer is a sentence,
    then a table of all methods; with --devices two more have what each gains where gradients are exchanged.
    """
    limit = None if memory is None else _limit(memory)
    wanted = _Wanted(devices=(devices, gradients, link, latency), output=output, json=json)
    check_page(output)
    if measurements is not None:
        _check_nothing_is_measured({
            "WORKLOAD": workload, "--methods": methods, "--device": device, "--simulate": simulate,
            "--batches": batches, "--length": length, "--layers": layers, "--width": width, "--lossless": lossless,
            "--verify": verify, "--fresh": fresh, "--write": write,
        })  # fmt: skip
        _from_file(measurements, limit, wanted, small_batches=small_batches)
        return
    if workload is None:
        raise UsageError("Name a workload to measure, or give measurements with --from measurements.csv.")
    wanted.exchange(known=0)  # what is wrong with it is said now
    check_writable(write)
    ask = partial(
        _asked, methods=_ways(methods, lossless), batches=_each(batches, "--batches"),
        network=workload if length is None else f"{workload} length={length}", small_batches=small_batches,
        verify=verify,
    )  # fmt: skip
    console, every = to_terminal(), list[_Answer]()
    for depth, wide in product(_each(layers, "--layers") or (None,), _each(width, "--width") or (None,)):
        shape = {"length": length, "layers": depth, "width": wide}
        options = {name: value for name, value in shape.items() if value is not None}
        with (
            _measured(workload, options, seed, console, device, longest=seconds / (STEPS + AROUND), fresh=fresh)
            if simulate is None
            else _simulated(workload, options, simulate, device, fresh=fresh)
        ) as place:
            asked = ask(place, limit, layers=str(depth or ""), hidden=str(wide or ""))
            every.append(_Answer(find_out(place.bench, asked, console), place))
        if not every[-1].found.whole:
            break
    _tell(every, wanted, write, console)


def _ways(methods: str | None, lossless: bool) -> list[str]:
    return [way.name for way in chosen(DEFAULT if methods is None else _names(methods), lossless=lossless)]


def _each(text: str | None, option: str) -> list[int]:
    return [] if text is None else parse_sizes(text, option)


def _asked(place: _Place, limit: Bytes | None, **more: Any) -> Asked:
    return Asked(
        limit=limit or place.memory, longest=place.longest, gradient_bytes=place.gradient_bytes, **more
    )  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class _Answer:
    """About one network."""

    found: Found
    place: _Place


def _tell(every: Sequence[_Answer], wanted: _Wanted, write: Path | None, console: Console) -> None:
    if write is not None:
        write_found(write, [one.found for one in every])
    documents, swept = [], list[Sweep]()
    for one in every:
        exchange = wanted.exchange(known=one.place.gradient_bytes)
        mine = sweeps_over(exchange, [one.found.rows])
        swept += mine
        if wanted.json:
            document = one.found.to_json()
            rows = answers_json([one.found.rows], exchange, mine)
            document["rows"] = [row | more for row, more in zip(document["rows"], rows, strict=True)]
            documents.append(document)
        else:
            print_found(one.found)
            print_sweeps(exchange, mine)
    if wanted.json:
        print_json(documents[0] if len(documents) == 1 else {"networks": documents})
    _page(every, wanted, swept)
    if not every[-1].found.whole:
        kept = ", and kept" if every[-1].found.experiment.seen == "measured" else ""
        say(console, f"spillway: interrupted. What was {every[-1].found.experiment.seen} is answered from{kept}.")
        raise typer.Exit(INTERRUPTED)


def _page(every: Sequence[_Answer], wanted: _Wanted, swept: Sequence[Sweep]) -> None:
    place = every[0].place
    kinds: Kinds = {}
    if len(every) == 1:  # by method and batch size alone
        kinds = {(trial.method, trial.size): trial.by_kind for trial in every[0].found.trials() if trial.by_kind}
    facts = {"workload": place.bench.name, "hardware": place.bench.hardware}
    exchange = wanted.exchange(known=place.gradient_bytes)
    wanted.page([one.found.rows for one in every], place.bench.name, facts, kinds, exchange, swept)


def _check_nothing_is_measured(options: Mapping[str, object]) -> None:
    if told := given(options):
        raise UsageError(f"{told[0]} is for measuring, and --from looks at what was measured: leave one out.")


@contextmanager
def _measured(
    workload: str, options: Mapping[str, object], seed: int, console: Console, device: str | None, *,
    longest: Seconds, fresh: bool,
) -> Iterator[_Place]:  # fmt: skip
    """On this machine."""
    with RealBench(workload, options=options, seed=seed, output=partial(say, console), device=device) as real:
        key = real.key() | {"spillway": spillway.__version__}
        bench = RememberedBench(real, lambda: real.facts, cache_file(key), key, fresh=fresh)
        yield _Place(
            bench=bench, memory=_there(bench.facts), gradient_bytes=int(bench.facts["gradient_bytes"]), longest=longest
        )
        if bench.remembered:
            say(console, f"{bench.remembered} trials were measured by earlier runs; --fresh measures them again.")


@contextmanager
def _simulated(
    workload: str, options: Mapping[str, Any], simulated: str, device: str | None, *, fresh: bool
) -> Iterator[_Place]:
    """On paper."""
    if told := given({"--device": device, "--fresh": fresh}):
        raise UsageError(f"{told[0]} is for measuring, and --simulate measures nothing: leave one out.")
    bench = simulated_bench(workload, simulated, options)
    yield _Place(
        bench=bench, memory=int(OF_GPU * bench.device.memory), gradient_bytes=bench.gradient_bytes(), longest=inf
    )


def _there(facts: Mapping[str, Any]) -> Bytes:
    """Bytes that steps may take if nobody says: what is free of the device, or available of the machine, less a part
    for what is in no account."""
    if facts["device_bytes"] is not None:
        return int(OF_GPU * facts["device_bytes"])
    system = on_system.memory().facts
    limits = [system["available"], system["container_free"]]
    return int(OF_MACHINE * min((limit for limit in limits if limit), default=machine_memory()))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _limit(text: str) -> Bytes:
    nbytes = parse_bytes(text)
    if not nbytes:
        raise BudgetError("Steps take more than 0 bytes: give --memory what the device has for them.")
    return nbytes


def _from_file(path: Path, limit: Bytes | None, wanted: _Wanted, *, small_batches: bool) -> None:
    exchange = wanted.exchange()
    with naming(path):
        experiments = read_measurements(path)
    answers = [advise(there, limit or default_limit(there), small_batches=small_batches) for there in experiments]
    swept = sweeps_over(exchange, answers)
    if wanted.json:
        print_json(answers_json(answers, exchange, swept))
    else:
        print_answers(answers)
        print_sweeps(exchange, swept)
    wanted.page(answers, path.name, {"measurements": str(path)}, {}, exchange, swept)
