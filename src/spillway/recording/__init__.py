"""Watches one step, on real or on fake tensors, and writes down what it does: an `ir.Step`."""

from __future__ import annotations

from spillway.recording.steps import Trainable, record, record_step

__all__ = ["Trainable", "record", "record_step"]
