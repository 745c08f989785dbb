"""Real models on real data for the command line, the tests and the benchmarks; nothing is downloaded."""

from __future__ import annotations

from spillway.workloads.base import Batch, Workload, seed_everything
from spillway.workloads.finding import WORKLOADS, get

__all__ = ["WORKLOADS", "Batch", "Workload", "get", "seed_everything"]
