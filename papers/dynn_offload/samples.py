"""Recorded samples of the dynamic networks, kept between runs because recording takes minutes a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from benchmarks.record import Tell
from spillway.pilots.sample_files import RecordedSamples, read_samples, write_samples

FOLDER: Final = Path(os.environ.get("SPILLWAY_SAMPLES", Path(__file__).parent / "samples"))
"""Where they are kept; git does not see them."""
FROZEN_AFTER: Final = 600
"""Steps for which a network trains before it stays as it is."""


def samples_of(network: str, *, seed: int, steps: int, frozen: bool = False, tell: Tell) -> RecordedSamples:
    """The steps of a network, from the file where they were recorded before; of a longer recording all."""
    path = FOLDER / f"{network}-{'frozen' if frozen else 'train'}-{seed}.jsonl.gz"
    if path.is_file():
        found = read_samples(path)
        if len(found.samples) >= steps:
            return found
    tell(f"recording {steps} steps of {network}, seed {seed}")
    recorded = _record(network, seed, steps, frozen)
    path.parent.mkdir(exist_ok=True)
    write_samples(path, recorded)
    return read_samples(path)


def _record(network: str, seed: int, steps: int, frozen: bool) -> RecordedSamples:
    from spillway.recording.path_recorder import PathRecorder
    from spillway.workloads.named import get

    options = {"trained": FROZEN_AFTER} if frozen else {}
    workload = get(network, seed=seed, **options)
    if frozen:
        workload.model.eval()
    recorder = PathRecorder(workload)
    found = tuple(recorder.sample(batch, update=not frozen) for batch in workload.batches(steps))
    facts = {"seed": seed, "steps": steps, "frozen": frozen, "options": options}
    return RecordedSamples(architecture=recorder.architecture, samples=found, facts=facts)
