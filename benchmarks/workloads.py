"""The demo's language model at sizes that benchmarks can afford, found as `file.py:function` like a user's own."""

from __future__ import annotations

from spillway.workloads import Workload, stdlib_lm

SHORT = 192
"""Tokens at which functions are clipped; the demo has twice as many."""


def short_lm(seed: int) -> Workload:
    """The demo's model and batch size on functions of at most `SHORT` tokens."""
    return stdlib_lm.build(seed, longest=SHORT)


def tiny_lm(seed: int) -> Workload:
    """A model that takes a few milliseconds a step."""
    return stdlib_lm.build(seed, width=64, layers=3, batch=4, longest=96)
