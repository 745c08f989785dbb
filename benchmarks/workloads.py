"""The demo's language model, found as `file.py:function` like a user's own."""

from __future__ import annotations

from spillway.workloads import Workload, resnet, stdlib_lm


def demo_lm(seed: int) -> Workload:
    """The demo's model and batches."""
    return stdlib_lm.build(seed)


def tiny_lm(seed: int) -> Workload:
    """A model that takes a few milliseconds a step."""
    return stdlib_lm.build(seed, width=64, layers=3, batch=4, longest=96)


def small_lm(seed: int) -> Workload:
    """A model that takes some ten milliseconds a step."""
    return stdlib_lm.build(seed, width=128, layers=6, batch=4, longest=192)


def small_resnet(seed: int) -> Workload:
    """A residual network that takes a tenth of a second a step."""
    return resnet.build(seed, width=8, batch=8)
