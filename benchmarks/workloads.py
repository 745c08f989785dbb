"""The demo's language model at sizes that benchmarks can afford, found as `file.py:function` like a user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import cast

from torch import Tensor

from spillway.workloads import Batch, Workload, stdlib_lm

SHORT = 192
"""Tokens at which functions are clipped; the demo has twice as many."""

AMONG = 200
"""Batches of which the longest are taken."""


def short_lm(seed: int) -> Workload:
    """The demo's model and batch size on functions of at most `SHORT` tokens."""
    return stdlib_lm.build(seed, longest=SHORT)


def longest_of_short_lm(seed: int) -> Workload:
    """The same, on the longest of its batches again and again: where its memory peaks."""
    return _longest_only(short_lm(seed))


def tiny_lm(seed: int) -> Workload:
    """A model that takes a few milliseconds a step."""
    return stdlib_lm.build(seed, width=64, layers=3, batch=4, longest=96)


def longest_of_tiny_lm(seed: int) -> Workload:
    """The same, on the longest of its batches."""
    return _longest_only(tiny_lm(seed))


def _longest_only(workload: Workload) -> Workload:
    longest = max(workload.batches(AMONG), key=_tokens)

    def batches(steps: int) -> Iterator[Batch]:
        return islice(cycle([longest]), steps)

    return dataclasses.replace(workload, batches=batches)


def _tokens(batch: Batch) -> int:
    return cast(Mapping[str, Tensor], batch)["inputs"].numel()
