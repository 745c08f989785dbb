"""The bench that `spillway advise --simulate DEVICE` asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillway.advisor.simulated import SimulatedBench, Steps
from spillway.cli.common import record_workload
from spillway.costs.finding import device_of
from spillway.ir import Step


def simulated_bench(workload: str, device: str, options: Mapping[str, Any] | None = None) -> SimulatedBench:
    """A bench for a workload by its name, on a device by its name or file.

    Arguments:
        options: Of the workload, but for its batch size.

    Raises UsageError for an unknown device at once, and what `record_workload` raises when the first step is recorded.
    """
    where = device_of(device)

    def recorded(size: int) -> Step:
        return record_workload(workload, fake=True, **{**(options or {}), "batch": size}).step

    return SimulatedBench(workload, Steps(recorded), where)
