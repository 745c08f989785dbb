"""Recorded samples of the dynamic networks, kept between runs because recording takes minutes a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from benchmarks.record import Tell
from spillway.pilots.sample_files import RecordedSamples, read_samples, write_samples
from spillway.workloads.recorded import record_samples

FOLDER: Final = Path(os.environ.get("SPILLWAY_SAMPLES", Path(__file__).parent / "samples"))
"""Where they are kept; git does not see them."""
TRAINS, FROZEN = "trains", "frozen"
"""What a network does while it is recorded."""
FROZEN_AFTER: Final = 600
"""Steps for which a network trains before it stays as it is, at"""
FROZEN_RATE: Final = 1e-3
"""which takes so few of them."""


def samples_of(network: str, *, seed: int, steps: int, frozen: bool = False, tell: Tell) -> RecordedSamples:
    """The steps of a network, from the file where they were recorded before; of a longer recording all."""
    path = FOLDER / f"{network}-{'frozen' if frozen else 'train'}-{seed}.jsonl.gz"
    if path.is_file():
        found = read_samples(path)
        if len(found.samples) >= steps:
            return found
    tell(f"recording {steps} steps of {network}, seed {seed}")
    options: dict[str, Any] = {"trained": FROZEN_AFTER, "rate": FROZEN_RATE} if frozen else {}
    recorded = record_samples(network, steps=steps, frozen=frozen, seed=seed, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_samples(path, recorded)
    return recorded
