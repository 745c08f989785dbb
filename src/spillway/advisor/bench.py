"""What is measured, and who measures it: one step of a method at one batch size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

from spillway.ir.reading import read_fields
from spillway.ir.timeline import Kind
from spillway.units import Bytes, Seconds

NAMES: Final[Mapping[Kind, str]] = {
    Kind.PARAMETER: "parameters", Kind.GRADIENT: "gradients", Kind.OPTIMIZER_STATE: "optimizer state",
    Kind.ACTIVATION: "activations", Kind.INPUT: "input",
}  # fmt: skip
"""What kinds of bytes of a step are called."""
OTHER: Final = "other"
"""All further kinds."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One step of a method at a batch size."""

    method: str
    """A name of `ways`."""
    size: int
    """Samples in a batch."""
    peak: Bytes | None
    """None where memory ran out."""
    seconds: Seconds | None
    """Of the step; None where memory ran out."""
    by_kind: Mapping[str, Bytes] = field(default_factory=dict)
    """At the peak, by `NAMES` and `OTHER`; may be empty."""
    before_update: Bytes | None = None
    """The highest account before the optimizer began, which grows with the batch where that of the update does not;
    None where that is not known."""

    @property
    def ran_out(self) -> bool:
        return self.peak is None

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Trial:
        """Read what `to_json` gave. Raises ValueError for anything else."""
        trial = read_fields(cls, data, "trial")
        if trial.size < 1 or trial.seconds == 0 or (trial.peak is None) != (trial.seconds is None):
            raise ValueError(f"{trial} is no trial")
        return trial


class AbstractBench(ABC):
    """Measures trials of one workload on one machine."""

    name: str
    """Of the workload."""
    hardware: str
    """A device, or "this CPU"."""
    spread: tuple[float, ...] | None = None
    """Of simulated steps: measured seconds as multiples of simulated ones, 80 % between; None for measured ones."""

    def measure_again(self, method: str, size: int) -> Trial:
        """The same, by another step, whatever is known of it."""
        return self.measure(method, size)

    @abstractmethod
    def measure(self, method: str, size: int) -> Trial:
        """One trial. Raises SpillwayError for what cannot be measured at any size."""
