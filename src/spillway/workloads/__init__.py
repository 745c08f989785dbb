"""Real models on real data for the command line, the tests and the benchmarks; nothing is downloaded."""

from __future__ import annotations

from spillway.workloads.named import WORKLOADS, get
from spillway.workloads.workload import Batch, Workload, seed_everything

__all__ = ["WORKLOADS", "Batch", "Workload", "get", "seed_everything"]
