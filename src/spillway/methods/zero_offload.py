"""Optimizer state and gradients wait in host memory, whatever the budget, and the host runs the optimizer.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, arXiv:2101.06840. Section 4.1:
of the parts of mixed-precision training only the fp16 parameters and what forward and backward compute stay on the
device; fp32 parameters, momentum, variance and gradients live in host memory, and the host runs the optimizer.
Gradients are copied out one by one while the backward goes on, and the host's update of one part runs beside the copy
in of the part before (section 4.2).

On paper (`simulate`, `compare`) a step runs so: `ZeroOffload.as_run` takes the optimizer's ops and its state out of it,
and has the host update one parameter after the other, at `HOST_UPDATE`, each followed by its copy in. The device waits
meanwhile, as in the paper without its delayed update.

Differs from the paper in:

- Parameters that forward and backward compute with are updated in their own type. The paper's are fp16 copies of fp32
  parameters that only the update uses.
- A gradient leaves once nothing in the backward writes to it any more, as in the paper; the bucket that the paper
  collects small ones in is not there.
- What a plan of the recorded step says, which sessions follow and `spillway plan` prints, cannot send an op elsewhere.
  There the update runs where it was recorded, and state and gradients come back for it.

Not implemented: the delayed update of section 5.2, partitioning over several devices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, final

from spillway.costs.device import Device
from spillway.errors import UsageError
from spillway.ir import Gap, Host, Op, Phase, Plan, Step, StorageId, ValueId
from spillway.ir.lives import Life, idle_intervals, lives_of
from spillway.ir.timeline import Kind
from spillway.methods.base import SMALLEST, AbstractPlanner, Problem
from spillway.units import Bytes, Seconds

HOST_UPDATE: Final = 15.6e9
"""Bytes of fp32 parameters that the host updates in a second: 3.9e9 parameters, as the paper's CPU-Adam does on the two
24-core Xeons of a DGX-2 (10 billion in 2.57 s, its Table 4). Adam reads and writes 28 bytes for each, which is 109 GB/s
of host memory."""

ON_HOST: Final = "host.update"
"""The name of what stands for the optimizer's ops in a step that runs so."""
ON_DEVICE: Final = (
    "The update runs on the device in this plan, which can send no op elsewhere; `simulate` and `compare` run it on "
    "the host."
)


@final
class ZeroOffload(AbstractPlanner):
    """Static: what is offloaded depends on what a storage is for, not on the budget.

    Arguments:
        host_update: Bytes of parameters that the host updates in a second.
    """

    name = "zero-offload"
    uses_recipes = False

    def __init__(self, *, host_update: float = HOST_UPDATE) -> None:
        if not host_update > 0:
            raise UsageError(f"ZeRO-Offload needs a host that updates more than 0 bytes a second, got {host_update}.")
        self.host_update = host_update

    def plan(self, problem: Problem) -> Plan:
        """Raises BudgetInfeasible if the rest needs more than is allowed."""
        step, lives = problem.step, lives_of(problem.step)
        if any(op.name == ON_HOST for op in step.ops):
            return problem.plan_with(list(_of_gradients(step, lives, problem.device)), lives)
        plan = problem.plan_with(list(_gaps(step, lives)), lives)
        updated = any(op.phase is Phase.OPTIMIZER for op in step.ops)
        return replace(plan, remark=ON_DEVICE if updated else "")

    def as_run(self, step: Step, device: Device) -> tuple[Step, Bytes]:
        return _Sent(step).step(device, self.host_update)


# ---------------------------------------------------------------------- the update on the host


@final
@dataclass(slots=True)
class _Block:
    """Optimizer ops that follow each other."""

    at: int
    """The first of them."""
    written: dict[StorageId, ValueId]
    """What they leave behind on the device: the last value of each storage."""


@final
class _Sent:
    """A step whose optimizer ops leave it, with what only they touch."""

    def __init__(self, step: Step) -> None:
        self._step = step
        updates = [op for op in step.ops if op.phase is Phase.OPTIMIZER]
        made_there = {value for op in updates for value in op.creates}
        named = made_there.union(*(op.reads for op in updates))
        here = {value for op in step.ops if op.phase is not Phase.OPTIMIZER for value in (*op.reads, *op.creates)}
        used, there = ({step.values[value].storage for value in values} for values in (here, named))
        self._gone = {
            storage.id
            for storage in step.storages
            if storage.id not in used and (storage.kind is Kind.OPTIMIZER_STATE or not storage.present_at_start)
            and storage.id in there
        }  # fmt: skip
        self._blocks = list(self._found(here))
        kept = {value for block in self._blocks for value in block.written.values()}
        self._values = [
            value
            for value in step.values
            if value.storage not in self._gone and (value.id not in made_there or value.id in kept)
        ]

    def _found(self, here: set[ValueId]) -> Iterator[_Block]:
        """The blocks. A gradient that is only scaled or zeroed there need not come back."""
        step, block = self._step, None
        for op in step.ops:
            if op.phase is not Phase.OPTIMIZER:
                if block is not None:
                    yield block
                block = None
                continue
            block = block or _Block(op.number, {})
            for number in op.creates:
                storage = step.storages[step.values[number].storage]
                if storage.id not in self._gone and (storage.kind is not Kind.GRADIENT or number in here):
                    block.written[storage.id] = number
        if block is not None:
            yield block

    def step(self, device: Device, rate: float) -> tuple[Step, Bytes]:
        """The step without them, and the bytes that come in from the host."""
        if not self._blocks:
            return self._step, 0
        old, moved = self._step, 0
        numbers = {value.id: number for number, value in enumerate(self._values)}
        blocks, ops, places = {block.at: block for block in self._blocks}, list[Op](), list[int]()
        for op in old.ops:
            places.append(len(ops))
            if op.phase is not Phase.OPTIMIZER:
                reads, creates = (tuple(numbers[value] for value in of) for of in (op.reads, op.creates))
                ops.append(replace(op, number=len(ops), reads=reads, creates=creates))
            for storage, nbytes, seconds in self._updates(blocks.get(op.number), device, rate):
                made = (numbers[blocks[op.number].written[storage]],)
                ops.append(
                    Op(number=len(ops), name=ON_HOST, phase=Phase.OPTIMIZER, reads=(), creates=made, seconds=seconds,
                       replayable=False)
                )  # fmt: skip
                moved += nbytes
        return self._with(ops, [*places, len(ops)], numbers), moved

    def _updates(self, block: _Block | None, device: Device, rate: float) -> Iterator[tuple[StorageId, Bytes, Seconds]]:
        """Each storage that comes back from the host, and the seconds until it has after the one before: the host's
        update of it, a call for each as on the device, runs beside the copies in of those before."""
        updated = arrived = 0.0
        for storage in () if block is None else block.written:
            nbytes, before = self._step.storages[storage].nbytes, arrived
            updated += device.op_seconds + nbytes / rate
            arrived = max(arrived, updated) + device.in_seconds(nbytes)
            yield storage, nbytes, arrived - before

    def _with(self, ops: list[Op], places: list[int], numbers: dict[ValueId, ValueId]) -> Step:
        old, versions = self._step, dict[StorageId, int]()
        ids = {storage.id: number for number, storage in enumerate(s for s in old.storages if s.id not in self._gone)}
        values = []
        for value in self._values:
            version = versions[value.storage] = versions.get(value.storage, -1) + 1
            values.append(replace(value, id=numbers[value.id], storage=ids[value.storage], version=version))
        ends = dict.fromkeys(ids, 0)
        first = dict[StorageId, int]()
        for op in ops:
            for number in (*op.reads, *op.creates):
                storage = self._values[number].storage
                ends[storage] = op.number + 1
                first.setdefault(storage, op.number)
        storages = []
        for info in old.storages:
            if info.id in ids:
                begins = 0 if info.present_at_start else first[info.id]
                # What died with an op of the optimizer dies once the host has what it wants of it.
                until = len(ops) if info.present_at_end else max(places[info.alive_until], ends[info.id], begins)
                storages.append(replace(info, id=ids[info.id], alive_from=begins, alive_until=until))
        saved = tuple(numbers[value] for value in old.saved)
        savings = tuple(replace(one, value=numbers[one.value], after=places[one.after]) for one in old.savings)
        return Step(storages=tuple(storages), values=tuple(values), ops=tuple(ops), saved=saved, savings=savings)


def _of_gradients(step: Step, lives: Sequence[Life], device: Device) -> Iterator[Gap]:
    """Each from where its copy out is done, if the lane works in order and nobody waits for it, but no later than the
    update begins."""
    ends = list(accumulate(op.seconds or 0.0 for op in step.ops))
    free = 0.0
    left = sorted(
        (max(life.uses), value.id)
        for value, life in zip(step.values, lives, strict=True)
        if step.storages[value.storage].kind is Kind.GRADIENT and step.storages[value.storage].nbytes >= SMALLEST
        and life.overwritten is None and max(life.uses) >= 0 and step.ops[max(life.uses)].phase is Phase.BACKWARD
    )  # fmt: skip
    for last, value in left:
        free = max(free, ends[last]) + device.out_seconds(step.storages[step.values[value].storage].nbytes)
        update = next((op.number for op in step.ops[last:] if op.name == ON_HOST), len(step.ops))
        start, end = min(max(bisect_left(ends, free) + 1, last + 1), update), min(lives[value].dies, len(step.ops))
        if start < end:
            yield Gap(value=value, start=start, end=end, home=Host())


# ---------------------------------------------------------------------- the update on the device


def _gaps(step: Step, lives: Sequence[Life]) -> Iterator[Gap]:
    for value in step.values:
        storage, life = step.storages[value.storage], lives[value.id]
        if storage.nbytes < SMALLEST or storage.kind not in (Kind.OPTIMIZER_STATE, Kind.GRADIENT):
            continue
        for start, end in idle_intervals(life, len(step.ops)):
            made = start > 0 and step.ops[start - 1].phase is Phase.BACKWARD
            waits = made and end in life.reads and step.ops[end].phase is Phase.OPTIMIZER  # for the update
            if storage.kind is Kind.OPTIMIZER_STATE or waits:
                yield Gap(value=value.id, start=start, end=end, home=Host())
