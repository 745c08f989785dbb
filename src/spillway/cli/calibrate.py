"""`spillway calibrate`: what ops get of this machine, as a device file that every `--device` takes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from spillway.cli.common import Json, SpillDirectory, check_writable, naming, numbers, print_json, say, to_terminal
from spillway.costs.device_files import fields_of, write_device
from spillway.errors import SpillwayError
from spillway.units import format_seconds

SMALLEST: Final = 2
"""Of the networks: pictures are pooled by two."""


def calibrate(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The device file.")] = Path("device.json"),
    sizes: Annotated[
        str | None, typer.Option(help="Of the networks that are trained.", show_default="16,24; of a GPU 32,64,128")
    ] = None,
    spill_directory: SpillDirectory = None,
    json: Json = False,
) -> None:
    """Measure what each kind of op gets of this machine, and how far modelled steps are from measured ones.

    Trains five small networks: a minute or two on a CPU, on its GPU where there is one. `--device FILE` of the other
    verbs takes what is written, and shows intervals by it.
    """
    check_writable(output)
    wanted = numbers(sizes, "--sizes", "16,24", least=SMALLEST)
    try:
        from spillway.advisor.calibrating import calibrate_here
    except ImportError as error:
        raise SpillwayError(f"Measuring this machine takes torch, which cannot be imported: {error}.") from error
    console = to_terminal()
    directory = spill_directory or Path(tempfile.gettempdir())
    found = calibrate_here(directory, wanted, lambda line: say(console, line))
    with naming(output):
        write_device(output, found.device, {"networks": list(found.steps), "sizes": wanted})
    efficiency = found.device.efficiency
    if json:
        networks = [
            {"network": one.name, "op_error": one.error, "ops": one.seconds, "ops_foretold": one.foretold,
             "step": found.steps[one.name][0], "step_foretold": found.steps[one.name][1]} for one in found.networks
        ]  # fmt: skip
        print_json({"device": str(output), "networks": networks, "calibrated": fields_of(found.device)})
        return
    for one in found.networks:
        step, foretold = found.steps[one.name]
        print(
            f"{one.name}, foretold by the others: steps {format_seconds(foretold)}, measured {format_seconds(step)}; "
            f"single ops off by {one.error:.0%} at the median"
        )
    if efficiency is not None:
        low, high = efficiency.step_spread
        print(f"Of further steps 80 % should take between {low:.2f} and {high:.2f} times what is modelled.")
    print(f"device: {output}")
