"""Methods that change what a step does: a recorded step with the ops in it that they add.

A plan says which values are gone when. What PAPAYA compares (section 2.2) does more than that: activations are
quantized and read back, blocks run again on inputs that were quantized. Here such a method is a function from a step
to a step, with `spillway::pack`, `spillway::unpack` and second runs of blocks among its ops. The result is a step as
any other, so that costs, planners, the verifier and the simulated engine need to know nothing of it.

NOTE [As the block engine does it]. `engines/blocks` is followed where it decides bytes:

 1. What autograd saves in a block is packed when the block has ended, in the order of saving, each storage once, by the
    first block that saved it; the bytes are those of `costs/packed_bytes.py`, which the engine shares.
 2. It is there in full until the last op of the forward that names it, and until the block with that op has packed all
    that it saved.
 3. It is unpacked for each block by itself, before the first op of the backward that reads it there, and is gone with
    the last; the packed form stays for as long.
 4. Left alone is what `engines/blocks/compress.py` leaves alone, by dtype, size and whether it is differentiable; and
    what is saved outside of blocks.
 5. A second run is what it takes of a block to make again what autograd saved there, before the backward wants the
    first of it. It reads what the block was called with, as it is, or packed and unpacked.

Differs from the engine in: nobody knows contents, so that a mask is what was drawn by chance (dropout's) or is of bool,
and others of two values count as any tensor; a storage that somebody holds beyond the backward is left alone, where the
engine packs it for nothing; what a second run does not need for autograd does not run again.

What packs is lossy: nobody calls it for a user who has not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from spillway.ir.step import Op, Step, ValueId
from spillway.methods.actions import check_bits
from spillway.methods.graph_rewrite.again import run_again, second_runs
from spillway.methods.graph_rewrite.packs import PACK, UNPACK, Packer
from spillway.methods.graph_rewrite.saved_values import SavedInBlocks


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRewrite:
    """A step with a method in it."""

    step: Step
    waiting: tuple[ValueId, ...]
    """What waits for the backward in place of what blocks save: packed storages, inputs of blocks, results of ops that
    do not run again. Methods that swap besides move these."""


def compressed(step: Step, *, bits: int = 4) -> GraphRewrite:
    """What autograd saves in blocks is packed between the forward of the block and its backward.

    Where no blocks are found the whole forward is one.

    Raises UsageError if `bits` are none of 2, 4 and 8, or nobody wrote down how autograd saved.
    """
    check_bits(bits)
    blocks = SavedInBlocks(step, whole=True)
    packer = Packer(blocks, bits)
    for storage in blocks.storages:
        packer.pack(storage)
    packer.unpack_all()
    packer.let_go()
    return _done(packer, [found.form for found in packer.packs.values()])


def run_twice(step: Step, *, bits: int | None = None, keeps: Callable[[Op], bool] | None = None) -> GraphRewrite:
    """Blocks run a second time, for what autograd saves in them, when the backward reaches them.

    Where no blocks are found nothing changes.

    Args:
        bits: Of an element of what blocks are called with, which is packed; as it is if None.
        keeps: Tells ops that do not run again: their results stay.

    Raises UsageError if `bits` are none of 2, 4 and 8, or nobody wrote down how autograd saved.
    """
    if bits is not None:
        check_bits(bits)
    blocks = SavedInBlocks(step, whole=False)
    packer = Packer(blocks, bits or 4)
    runs = second_runs(blocks, keeps)
    waiting: dict[ValueId, None] = {}
    for run in runs:
        inputs = (number for number in run.inputs if blocks.is_ours(step.values[number].storage))
        for number in inputs:
            packed = packer.pack(step.values[number].storage, run.call) if bits is not None else None
            waiting[number if packed is None else packed.form] = None
        waiting |= dict.fromkeys(run.results)
    for run in runs:
        run_again(run, packer)
    packer.let_go()
    return _done(packer, list(waiting))


def _done(packer: Packer, waiting: list[ValueId]) -> GraphRewrite:
    saved = dict.fromkeys([*packer.blocks.saved_in_full(), *waiting])
    return GraphRewrite(step=packer.draft.build(list(saved)), waiting=tuple(waiting))


__all__ = ["PACK", "UNPACK", "GraphRewrite", "compressed", "run_twice"]
