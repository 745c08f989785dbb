"""Whole steps of the networks, at sizes at which a GPU has something to compute, for figures of training time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from spillway.costs import Device, timed
from spillway.ir import Step
from spillway.workloads.recorded import record

SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tree-cnn": {"width": 384, "batch": 2},
    "unrolled-gan": {"width": 1024, "batch": 4096},
    "tree-lstm": {"width": 768, "batch": 4},
    "var-lstm": {"width": 768, "batch": 32},
    "var-bert": {"width": 768, "batch": 16},
    "evoformer": {"single": 256, "pair": 64, "blocks": 4, "batch": 2, "shortest": 24},
    "bert-base": {"batch": 16},
}
"""Beside the builders' defaults. The last is static, and stands for the paper's fixed-Bert."""
STATIC: Final = ("bert-base",)
"""Recorded on tensors without content."""


def step_of(network: str, device: Device, **options: Any) -> Step:
    """The step of the first batch, with seconds of that device by its roofline."""
    given = {**SIZES[network], **options}
    return timed(record(network, fake=network in STATIC, **given).step, device)
