"""What pilots are worth: forwards whose parameters wait in host memory, by who foresees them, and the referee's choice.

Networks are small here, so their link is made to fit: what a forward computes, by the roofline of the paper's RTX 6000
without launches, is so many times what its parameters take to come in. Everything else is as it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from benchmarks import columns
from benchmarks.record import Benchmark, Check, Result, Row, Tell, frozen
from papers.dynn_offload.samples import FROZEN, TRAINS, samples_of
from spillway.calibration.named_device import device_of
from spillway.costs import Device
from spillway.pilots.decisions import DecisionPilot
from spillway.pilots.paths import Sample
from spillway.pilots.pilot import AbstractPilot
from spillway.pilots.program import Program
from spillway.pilots.referee import Referee, modelled_seconds
from spillway.pilots.sample_files import RecordedSamples
from spillway.pilots.simple_pilots import taught
from spillway.pilots.ten_vectors import PublishedPilot, touches_of

ROOM: Final = 3
"""Times the largest group of parameters, for those in use, there and on their way."""
GATED: Final = "var-bert"
BY_SIZE: Final = ("var-lstm", "evoformer", "unrolled-gan")


@frozen
class Size:
    """How much is run."""

    networks: Mapping[str, tuple[int, ...]]
    """The seeds of each."""
    steps: int
    ratios: tuple[float, ...]
    published: bool = True


def run(size: Size, tell: Tell) -> Result:
    """A row a network, state, seed and ratio."""
    rows: list[Row] = []
    for head, recorded in recordings(size.networks, size.steps, tell):
        for ratio in size.ratios:
            rows.append(head | _row(recorded, head["seed"], ratio, size))
            tell("{network}, {state}, seed {seed}, ratio {ratio}: {winner}, {gain} of the gain".format(**rows[-1]))
    return Result(
        title="DyNN-Offload: forwards on demand, by pilot, and with the referee", columns=COLUMNS, rows=rows,
        notes=NOTES,
    )  # fmt: skip


def recordings(
    networks: Mapping[str, tuple[int, ...]], steps: int, tell: Tell
) -> Iterator[tuple[dict[str, Any], RecordedSamples]]:
    """Of every network and seed, as it trains, and of the gated one also as it stays; with what names each."""
    for network, seeds in networks.items():
        for state in (TRAINS, FROZEN) if network == GATED else (TRAINS,):
            for seed in seeds:
                recorded = samples_of(network, seed=seed, steps=steps, frozen=state == FROZEN, tell=tell)
                yield {"network": network, "state": state, "seed": seed}, recorded


def linked(program: Program, samples: Sequence[Sample], ratio: float) -> tuple[Device, Device]:
    """The paper's device without launches, and the same with a link at which a forward computes `ratio` times as long
    as its groups take to come in once."""
    device = replace(device_of("rtx6000"), op_seconds=0.0, copy_seconds=0.0)
    seconds = modelled_seconds(program.architecture, device)
    computing = float(np.mean([seconds[one.signatures].sum() for one in samples]))
    used = np.mean([sum(program.nbytes[group] for group in {*program.visits(one.path).groups}) for one in samples])
    return device, replace(device, in_per_second=float(used) * ratio / computing)


def pilots_of(program: Program, learned: Sequence[Sample], seed: int, *, published: bool) -> list[AbstractPilot]:
    """All pilots, having learned; the floor in front."""
    decisions = DecisionPilot(program, seed=seed)
    decisions.fit(learned)
    simple = taught(program, learned)
    if published:
        largest = max(int(touches_of(program, one).nbytes.sum()) for one in learned[::16])
        paper = PublishedPilot(program, allowed=largest // 2, width=256, seed=seed)
        paper.fit(learned, epochs=10)
        simple.append(paper)
    return [*simple, decisions]


def _row(recorded: RecordedSamples, seed: int, ratio: float, size: Size) -> Row:
    program = Program(recorded.architecture)
    learned, later = recorded.parted()
    computes, device = linked(program, learned, ratio)
    pilots = pilots_of(program, learned, seed, published=size.published)
    referee = Referee(program, pilots, device=device, room=ROOM * max(program.nbytes))
    seconds, plain = modelled_seconds(recorded.architecture, computes), 0.0
    for sample in later:
        taken = seconds[sample.signatures]
        plain += float(taken.sum())
        referee.learn(sample, taken)
    record = referee.record
    demanded = plain + record.on_demand_seconds
    possible = record.on_demand_seconds - record.known_seconds
    spared = record.on_demand_seconds - record.stall_seconds
    by_pilot = {
        f"time_{name.replace(' ', '_')}": (demanded - one.spared_seconds) / demanded
        for name, one in referee.standings.items()
    }
    acted = max(referee.standings.values(), key=lambda one: one.acted)
    return {
        "ratio": ratio, "steps": len(later), "decisions": program.decisions, "groups": len(program.nbytes), **by_pilot,
        "time_referee": (plain + record.stall_seconds) / demanded,
        "time_known": (plain + record.known_seconds) / demanded,
        "gain": spared / possible if possible > 0 else None, "winner": acted.pilot,
        "winner_acted": acted.acted / len(later), "exact": 1 - record.mispredictions / len(later),
        "mispredictions": record.mispredictions,
        "misprediction_share": record.misprediction_seconds / demanded,
        "hit_rates": {name: one.hit_rate for name, one in referee.standings.items()},
    }  # fmt: skip


def _checks(result: Result) -> Iterator[Check]:
    rows = result.rows
    yield Check(
        what="referee slower than the faster of program order and on demand, the worst row",
        measured=max(row["time_referee"] / min(1.0, row["time_program_order"]) - 1 for row in rows), at_most=0.02,
    )  # fmt: skip
    for state, least in ((TRAINS, 0.60), (FROZEN, 0.75)):
        gains = [
            row["gain"] for row in rows if (row["network"], row["state"]) == (GATED, state) and row["ratio"] <= 1
        ]  # fmt: skip
        if gains:
            yield Check(
                what=f"{GATED}, {state}: share of the gain that is missed at ratios up to 1, the worst",
                measured=1 - min(gains), at_most=1 - least,
            )  # fmt: skip
    for network in BY_SIZE:
        missed = [1 - row["exact"] for row in rows if row["network"] == network]
        if missed:
            yield Check(what=f"{network}: paths not exact through the referee", measured=max(missed), at_most=0.05)


COLUMNS: Final = (
    *columns.text(network="network", state="state", seed="seed"),
    *columns.shown("{:g}".format, ratio="compute/transfer"),
    *columns.ratios(
        time_program_order="program order", time_last_of_the_same_size="last of size", time_frequency="frequency",
        **{"time_1-NN": "1-NN"}, time_published="published", time_decisions="decisions", time_referee="referee",
        time_known="known",
    ),
    *columns.shares(gain="gain", exact="exact"),
    *columns.text(winner="acted most"),
)  # fmt: skip
NOTES: Final = (
    "Times are of the forward, as multiples of on demand. Known: the path is known; gain: the referee's share of what "
    "that spares. Pilots learned the first three quarters, and learn on in the last, which is what is shown.",
    "Exact: forwards that were in every decision as who acted had expected when they began.",
)
NETWORKS: Final[Mapping[str, tuple[int, ...]]] = dict.fromkeys(
    ("var-bert", "tree-lstm", "tree-cnn", "var-lstm", "moe", "unrolled-gan", "evoformer"), (0, 1, 2)
)
BENCHMARK: Final = Benchmark(
    name="dynn_prefetch",
    run=run,
    judge=_checks,
    full=Size(networks=NETWORKS, steps=2000, ratios=(0.5, 1.0)),
    quick=Size(networks={"var-lstm": (0,)}, steps=40, ratios=(1.0,), published=False),
)
