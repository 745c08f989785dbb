"""What one step did: the numbers that a session keeps and a run file holds, and what its blocks held."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, final

from spillway.ir.reading import read_fields
from spillway.units import Bytes, Seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The figures of one step, as measured; of one that ran on paper, as simulated."""

    step: int
    """Number of the step within its session, from 0."""
    signature: str
    """Shapes and dtypes of the step's inputs; empty if the step was entered without a batch."""
    managed: bool
    """False if the step was known to fit: nothing was prepared for dropping what its ops make. With `ops` of 0 nobody
    watched it but the arena, which counts small blocks as malloc gives them, and what ops take for themselves."""
    allowed: Bytes
    """The budget."""
    start_bytes: Bytes
    """Resident bytes when the step began, by our account."""
    peak_bytes: Bytes
    """Most bytes of live storages resident at once, by our account. `peak_measured` says whether all of it was seen."""
    end_bytes: Bytes
    """Resident bytes when the step ended."""
    peak_rss_bytes: Bytes
    """The process's highest resident set size during the step, as the system counts it; 0 where it does not say, or
    nobody watched the step."""
    working_bytes: Bytes
    """Most bytes that one op needed at once, among the ops that ran when room was short."""
    seconds: Seconds
    """Wall-clock time of the step."""
    stall_seconds: Seconds
    """Time that compute waited for copies, out for room and in for data."""
    recomputed_ops: int
    """Ops run again to restore what was dropped."""
    recomputed_seconds: Seconds
    """Time that they took."""
    ops: int
    """Ops of the step itself; 0 where nobody watched it."""
    bytes_out: Bytes
    """Bytes copied to the slower tier."""
    bytes_in: Bytes
    """Bytes copied back."""
    dropped_bytes: Bytes
    """Bytes dropped, to be recomputed."""
    drops: int
    """Storages dropped."""
    moves: int
    """Storages moved, those included whose bytes were in the slower tier already."""
    refusals: dict[str, int]
    """Proposals that were refused, by reason."""
    escaped: int
    """Storages left alone because something else holds their address."""
    unmanaged: int
    """Tensors passed by because they have no storage of their own (sparse, meta, foreign devices)."""
    logged: dict[str, float]
    """What the user logged during the step, the loss for example."""
    transfer_seconds: Seconds = 0.0
    """Time that copies took, out and in; two at a time count twice. The block engine does not tell, here and below."""
    hidden_seconds: Seconds = 0.0
    """The part of it in which compute did not wait for any copy."""
    bytes_out_beside: Bytes = 0
    """Of the bytes out, those whose copy began while ops ran."""
    bytes_in_beside: Bytes = 0
    """Of the bytes in, those whose copy began while ops ran."""
    device_peak_bytes: Bytes = 0
    """The most that the device's allocator had handed out, measured: with what ops take for themselves while they run.
    On the CPU the arena counts it, within steps under a budget; 0 where nobody does."""
    beyond_bytes: Bytes = 0
    """The most that an op took for itself above the budget, on the CPU, or what the step took outside of ops, or a step
    that nobody watched, or one of `auto` above its plan: it lay in the spill directory, which is slow. For ops room is
    made from then on, and such steps are watched."""
    reserved_bytes: Bytes = 0
    """Of the budget, what was reserved when the step ended, for what the account does not see: on CUDA workspaces,
    other tensors, odd pieces; on the CPU whatever kept the resident set too far above the budget.
    """

    input_size: list[int] | None = None
    """The input size that a method of the block engine planned by; None under the tensor engine, which has none."""
    blocks: int = 0
    """Calls of blocks, if the block engine watched them; it counts no ops."""
    recomputed_blocks: int = 0
    """Those of them that ran again."""
    revoked_blocks: int = 0
    """Those that were to be kept, and were given up when room got short."""
    projected_bytes: Bytes = 0
    """What the plan expected the peak to be; 0 without a plan."""
    projected_seconds: Seconds = 0.0
    """What the plan expected the step to take; 0 where it did not say."""
    planning_seconds: Seconds = 0.0
    """Time that the method took to decide."""
    room_seconds: Seconds = 0.0
    """The part of `stall_seconds` in which a step of the block engine waited for copies out, on the CPU."""
    peak_measured: bool = True
    """Whether `peak_bytes` was measured. Otherwise it is the higher of what was seen between blocks and what was
    expected."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> StepReport:
        """Read what `to_json` gave, now or before there were figures that have a default. Raises ValueError for
        anything else."""
        return read_fields(cls, data, "step report")

    @property
    def hidden_share(self) -> float:
        """Hidden seconds as a share of those of all transfers; 0.0 without any."""
        return self.hidden_seconds / self.transfer_seconds if self.transfer_seconds else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HeldByBlock:
    """What one call of a block saved for the backward, and what became of it."""

    block: str
    """Its name in the model."""
    kind: str
    """The class of the module; empty of several modules that are one block."""
    line: str
    """Of its forward, in the user's code; empty where that is torch's."""
    action: str
    """What became of what autograd saved in it, as `Action` has it."""
    saved_bytes: Bytes
    """That, without what it was called with and what it gave back."""
    held_bytes: Bytes
    """What of it stayed until the backward reached it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksAtPeak:
    """The blocks of the step with the highest peak of those that ran block by block, in the order of their forwards."""

    step: int
    peak_bytes: Bytes
    start_bytes: Bytes
    """Of what has a name when the step begins: parameters, gradients, optimizer state, the batch."""
    blocks: list[HeldByBlock]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> BlocksAtPeak:
        """Read what `to_json` gave. Raises ValueError for anything else."""
        return read_fields(cls, data, "record of blocks")
