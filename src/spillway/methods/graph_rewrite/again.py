"""Second runs of blocks, as ops of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from spillway.ir.step import Op, Phase, StorageId, ValueId
from spillway.ir.step_draft import position_of
from spillway.ir.timeline import Kind
from spillway.methods.graph_rewrite.packs import Packer
from spillway.methods.graph_rewrite.saved_values import Call, SavedInBlocks

_OURS: Final = (Kind.ACTIVATION, Kind.TEMPORARY)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SecondRun:
    """What runs of a block before its backward."""

    call: Call
    before: int
    """The op of the backward before which it runs."""
    ops: tuple[int, ...]
    wanted: tuple[ValueId, ...]
    """What it brings back for the backward."""
    inputs: tuple[ValueId, ...]
    """Activations from before the block that it reads, or the block's backward does."""
    results: tuple[ValueId, ...]
    """Of the block, from ops that do not run again; it reads them, or the block's backward does."""


def second_runs(blocks: SavedInBlocks, keeps: Callable[[Op], bool] | None) -> list[SecondRun]:
    """Of all calls that have something to bring back, in the order of the forward."""
    found = (_second_run(blocks, call, keeps) for call in blocks.calls)
    return [run for run in found if run is not None]


def _second_run(blocks: SavedInBlocks, call: Call, keeps: Callable[[Op], bool] | None) -> SecondRun | None:
    inside = set(call.ops)
    lives, step = blocks.lives, blocks.step
    saved = [value for value in blocks.saved_by(call) if blocks.reads(value, call)]

    def runs(value: ValueId) -> bool:
        op = lives[value].created
        return op in inside and step.ops[op].replayable and not (keeps is not None and keeps(step.ops[op]))

    wanted = [value for value in saved if runs(value)]
    if not wanted:
        return None
    ops: set[int] = set()
    read: dict[ValueId, None] = dict.fromkeys(value for value in saved if not runs(value))
    open_ = list(wanted)
    while open_:
        value = open_.pop()
        if not runs(value):
            read[value] = None
        elif lives[value].created not in ops:
            ops.add(lives[value].created)
            open_ += step.ops[lives[value].created].reads
    before = min(op for value in saved for op in blocks.reads(value, call))
    if any(lives[value].ends < before for value in read if lives[value].overwritten is not None):
        return None  # what it reads is not there any more
    activations = [value for value in read if step.storages[step.values[value].storage].kind in _OURS]
    return SecondRun(
        call=call, before=before, ops=tuple(sorted(ops)),
        wanted=tuple(wanted), inputs=tuple(value for value in activations if lives[value].created not in inside),
        results=tuple(value for value in activations if lives[value].created in inside),
    )  # fmt: skip


def run_again(run: SecondRun, packer: Packer) -> None:
    """Add the ops of a second run; the block's backward reads what they make."""
    blocks, draft, step = packer.blocks, packer.draft, packer.blocks.step
    now: dict[ValueId, ValueId] = {}
    for number in run.inputs:
        packed = packer.packs.get(step.values[number].storage)
        if packed is not None and packed.value == number:
            unpacked = packer.unpack(packed, run.call, run.before)
            if unpacked is not None:
                now[number] = unpacked
    copies: dict[StorageId, StorageId] = {}
    for op in (step.ops[number] for number in run.ops):
        made = []
        for value in op.creates:
            storage = step.values[value].storage
            if storage not in copies:  # or it is a copy of what stands before the block, such as statistics
                info = step.storages[storage]
                kind = info.kind if info.kind in _OURS else Kind.TEMPORARY
                copies[storage] = draft.storage(info.nbytes, kind, info.dtype)
            now[value] = draft.value(copies[storage])
            made.append(now[value])
        draft.add(
            run.before, op.name, Phase.BACKWARD, [now.get(value, value) for value in op.reads], made, module=op.module,
            flops=op.flops, traffic=op.traffic, shape=op.shape, seconds=op.seconds, seeded=op.seeded,
            replayable=op.replayable,
        )  # fmt: skip
    for value in run.wanted:
        packer.stand_in(copies[step.values[value].storage], now[value], value, blocks.reads(value, run.call))
    last = max(op for value in blocks.saved_by(run.call) for op in blocks.reads(value, run.call))
    for number in run.inputs:
        packed = packer.packs.get(step.values[number].storage)
        if packed is not None:  # what the block was called with is held for as long as anything that it saved
            draft.outlive(packed.form_storage, position_of(last))
