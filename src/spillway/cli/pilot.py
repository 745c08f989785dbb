"""`spillway pilot`: a pilot trained ahead on recorded samples, and what one knows."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.table import Table

from spillway.budgets import budget_of_peak
from spillway.calibration.named_device import device_of
from spillway.cli.common import Json, Seed, check_writable, naming, print_json, to_print, to_terminal
from spillway.costs.device import Device
from spillway.errors import SpillwayError, UsageError
from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.pilot_files import SavedPilot, TrainedPilot, read_pilot, renumbered, write_pilot
from spillway.pilots.program import Program
from spillway.pilots.referee import Referee, modelled_seconds
from spillway.pilots.sample_files import RecordedSamples, read_samples, write_samples
from spillway.pilots.simple_pilots import taught
from spillway.pilots.ten_vectors import PublishedPilot, touches_of
from spillway.units import Bytes, format_bytes, format_seconds

app: Final = typer.Typer(
    help="Train a pilot of a dynamic network ahead of its runs, or show one.", no_args_is_help=True
)

OnDevice = Annotated[str, typer.Option(help="The device on which fetches ahead are judged.")]
Room = Annotated[
    str, typer.Option(help="Of it for parameters: bytes, 1GiB; a share of all parameters, 0.25x; of the device, 50%.")
]


@app.command()
def record(
    *,
    workload: Annotated[str, typer.Argument(help="A dynamic network that comes with Spillway, or file.py:function.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the samples to this file, compressed.")],
    steps: Annotated[int, typer.Option(min=1, help="Samples: one step each.")] = 2000,
    frozen: Annotated[bool, typer.Option("--frozen", help="Run forwards of a model that stays as it is.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Run a dynamic network, and record which ops its forward runs for every sample."""
    from spillway.workloads.named import told
    from spillway.workloads.recorded import record_samples

    check_writable(output, read=[workload])
    with told(f"A step of the workload {workload}"), redirect_stdout(sys.stderr), to_terminal().status("") as status:
        recorded = record_samples(
            workload, steps=steps, frozen=frozen, seed=seed,
            tell=lambda step: status.update(f"step {step} of {steps}"),
        )  # fmt: skip
    with naming(output):
        write_samples(output, recorded)
    known = recorded.architecture
    document = {
        "samples_file": str(output), "network": known.network, "base": known.base.value, "frozen": frozen, "seed": seed,
        "samples": steps, "paths": len(known.paths), "decisions": known.decisions, "ops": len(known.ops),
        "parameters": len(known.parameters), "output_bytes": output.stat().st_size,
    }  # fmt: skip
    if json:
        print_json(document)
        return
    print(
        "{network} ({base}): {samples} samples took {paths} paths, {decisions} decisions, {ops} ops".format(**document)
    )
    print(f"{output}: {format_bytes(output.stat().st_size)}")


@app.command()
def train(
    *,
    samples: Annotated[Path, typer.Argument(help="Recorded samples of the network.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the pilot to this file.")],
    pilot: Annotated[
        Literal["decisions", "published"], typer.Option(help="One output a decision, or the paper's vectors.")
    ] = "decisions",
    width: Annotated[int, typer.Option(min=1, help="Of both hidden layers.")] = 256,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="How often every sample is learned; as often as needed if left out."),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="For the blocks of `published`: bytes; a share of what a forward uses, 0.5x; of the device, 50%."
        ),
    ] = "0.5",
    device: OnDevice = "rtx6000",
    room: Room = "0.25",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Train a pilot on the first three quarters of the samples, and judge it by the rest."""
    check_writable(output, read=[samples, device])
    recorded = _read(samples)
    learned, _ = recorded.parted()
    if not learned:
        raise SpillwayError(f"{samples} holds too few samples to learn from: {len(recorded.samples)}.")
    on, room_bytes = _place(recorded, device, room)
    program = Program(recorded.architecture)
    made: TrainedPilot
    if pilot == "decisions":
        made = DecisionPilot(program, width=width, seed=seed)
    else:
        largest = max(int(touches_of(program, one).nbytes.sum()) for one in learned[:: max(len(learned) // 16, 1)])
        allowed = budget_of_peak(budget, largest, on.memory)
        made = PublishedPilot(program, allowed=allowed, width=width, seed=seed)
    try:
        taken = made.fit(learned, epochs=epochs)
    except MemoryError as error:
        raise SpillwayError(f"There is not enough memory for a pilot whose layers are {width} wide.") from error
    facts = {"samples": len(learned), "epochs": taken, "seed": seed, "recorded": dict(recorded.facts)}
    saved = SavedPilot(pilot=made, facts=facts)
    with naming(output):
        write_pilot(output, saved)
    document = {"pilot_file": str(output), **_facts(saved)}
    _print(document, _judged(made, recorded, on, room_bytes), json=json)


@app.command()
def show(
    *,
    pilot: Annotated[Path, typer.Argument(help="A file of `spillway pilot train`.")],
    samples: Annotated[
        Path | None, typer.Option(help="Judge it by the last quarter of these samples.", show_default=False)
    ] = None,
    device: OnDevice = "rtx6000",
    room: Room = "0.25",
    architecture: Annotated[
        bool, typer.Option("--architecture", help="Print the network as it was seen, with its decision rows.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a pilot was trained on, and how it does on samples."""
    recorded = None if samples is None else _read(samples)
    with naming(pilot):
        saved = read_pilot(pilot, network=None if recorded is None else recorded.architecture.network)
    document = {"pilot_file": str(pilot), **_facts(saved)}
    if architecture:
        document["architecture"] = str(saved.pilot.program.architecture).splitlines()
        if not json:
            print(saved.pilot.program.architecture)
    if recorded is None:
        _print(document, None, json=json)
        return
    known = saved.pilot.program.architecture
    try:
        moved = RecordedSamples(architecture=known, samples=tuple(renumbered(recorded, known)), facts=recorded.facts)
    except ValueError as error:
        raise UsageError(f"{pilot} cannot be judged by {samples}: {error}.") from None
    saved.pilot.program.follow()
    _print(document, _judged(saved.pilot, moved, *_place(moved, device, room)), json=json)


def _read(samples: Path) -> RecordedSamples:
    with naming(samples):
        return read_samples(samples)


def _facts(saved: SavedPilot) -> dict[str, Any]:
    known = saved.pilot.program.architecture
    return {
        "pilot": saved.pilot.name, "network": known.network, "base": known.base.value, "decisions": known.decisions,
        "paths": len(known.paths), "ops": len(known.ops), "parameters": len(known.parameters),
        "width": saved.pilot.width, "trained": dict(saved.facts),
    }  # fmt: skip


def _place(recorded: RecordedSamples, device: str, room: str) -> tuple[Device, Bytes]:
    """Where fetches ahead are judged, and the room for parameters there."""
    on = device_of(device)
    return on, budget_of_peak(room, sum(one.nbytes for one in recorded.architecture.parameters), on.memory)


def _judged(pilot: TrainedPilot, recorded: RecordedSamples, on: Device, room: Bytes) -> dict[str, Any]:
    """What the referee says of it among the simple pilots, on samples that none of them has seen."""
    program = pilot.program
    learned, later = recorded.parted()
    pilots = [*taught(program, learned), pilot]
    referee = Referee(program, pilots, device=on, room=room)
    seconds = modelled_seconds(recorded.architecture, on)
    for sample in later:
        referee.learn(sample, seconds[sample.signatures])
    return {"device": on.name, "room_bytes": room, "samples": len(later), **referee.told()}


def _print(document: dict[str, Any], judged: dict[str, Any] | None, *, json: bool) -> None:
    if json:
        print_json(document if judged is None else {**document, "judged": judged})
        return
    console = to_print()
    say = "{pilot} pilot of {network} ({base}), {width} wide: {decisions} decisions, {paths} paths, {ops} ops"
    print(say.format(**document))
    print(f"trained on {document['trained'].get('samples', 0)} samples; {document['pilot_file']}")
    if judged is None:
        return
    table = Table(title="{samples} samples that came later, on {device}".format(**judged))
    for head in ("pilot", "as expected", "stalls spared", "acted"):
        table.add_column(head, justify="left" if head == "pilot" else "right")
    for one in judged["standings"]:
        table.add_row(one["pilot"], f"{one['hit_rate']:.1%}", format_seconds(one["spared_seconds"]), str(one["acted"]))
    console.print(table)
    stalls, demanded, known = (format_seconds(judged[f"{what}_seconds"]) for what in ("stall", "on_demand", "known"))
    room = format_bytes(judged["room_bytes"])
    print(f"room for {room} of parameters: {stalls} of stalls, {demanded} on demand, {known} if all were known")
    cost = format_seconds(judged["misprediction_seconds"])
    print(f"{judged['mispredictions']} mispredictions by who acted cost {cost}; {judged['winner']} acts now")
