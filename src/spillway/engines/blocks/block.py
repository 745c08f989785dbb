"""A block of a model, and what its calls have taught about it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from spillway.engines.blocks.compiled_blocks import is_compiled
from spillway.engines.blocks.hook import OwnForward
from spillway.engines.blocks.module_state import ModuleState
from spillway.engines.blocks.reach import Copies
from spillway.internals.private import fully_sharded, process_groups
from spillway.methods.actions import Action
from spillway.units import Bytes, Seconds


@final
class Block:
    """A module whose calls are watched.

    Attributes:
        own: Gives what a call of it calls now, as `forward` does.
        compiled: Whether it or a part of it is compiled.
        scripted: Whether a part of it is run by TorchScript, whose kernels depend on how often it has run.
        calls: How many calls there were since the model's forward began.
        judged: Calls that a backward has come back to: it is known whether their arguments are written to.
        kept: How many times in a row calls could not run again. After two what they are called with is not copied.
        written: Pairs of a call and the number of a tensor among its arguments that is written to.
        gathers: Parts of it that `fully_shard` gathers by themselves. A second run adds collectives, so that the plan
            alone says whether there is one, and ranks agree on it.
        communicates: Whether a call of it began a collective; None before the first. Other processes would have to run
            it again as well, and theirs may have other plans.
        overwritten: Pairs of a call and the number of a selected op whose result is written to.
    """

    def __init__(
        self, name: str, module: nn.Module, own: OwnForward, copies: Copies, returned_to: set[tuple[type, str]]
    ) -> None:
        self.name = name
        self.module = module
        self.own, self.forward = own, own.now
        self.state = ModuleState(module, copies, returned_to)
        self.compiled = any(is_compiled(part) for part in module.modules())
        self.scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
        self.calls = 0
        self.judged: set[int] = set()
        self.kept: dict[int, int] = {}
        self.written: set[tuple[int, int]] = set()
        self.overwritten: set[tuple[int, int]] = set()
        self.communicates: bool | None = None
        self.gathers = [part for part in module.modules() if part is not module and fully_sharded(part)]
        self._may_checkpoint = hasattr(type(module), "gradient_checkpointing")

    def learn_from(self, other: Block) -> None:
        """Take over what calls have taught about the same module of another model."""
        self.judged, self.kept, self.written = set(other.judged), dict(other.kept), set(other.written)
        self.overwritten, self.communicates = set(other.overwritten), other.communicates
        self.state.learn_from(other.state)

    def checkpoints_itself(self) -> bool:
        """Whether a layer of transformers was told to, after the engine was there."""
        return self._may_checkpoint and bool(self.module.gradient_checkpointing) and self.module.training

    def may_communicate(self) -> bool:
        """Whether it does, or nobody knows yet and there are others."""
        unknown = self.communicates is None and bool(process_groups())
        return bool(self.communicates or self.gathers or unknown)

    def has_begun(self, collectives: int) -> None:
        """A call of it began so many. Those of parts that `fully_shard` gathers are begun again in a second run; its
        own parameters, which a compiled block has gathered within its call, are there by then."""
        gathers = self.gathers or (self.compiled and fully_sharded(self.module))
        self.communicates = bool(self.communicates or (collectives and not gathers))


def collectives_begun() -> int:
    """By this process, in all process groups of which it is a part and that count."""
    begun = 0
    for group in process_groups():
        with contextlib.suppress(RuntimeError):
            begun += group._get_sequence_number_for_group()
    return begun


@dataclass(slots=True, kw_only=True, eq=False)
class CallReport:
    """What one call of a block took so far; outlives the call."""

    block: str
    call: int
    action: Action
    seconds: Seconds = 0.0
    """Of the forward, without what the engine did before and after it."""
    saved_bytes: Bytes = 0
    """Storages that autograd saved inside, each once, without parameters, buffers, and what blocks inside saved."""
    own_bytes: Bytes = 0
    """Those of them that are neither arguments nor results of the block."""
    result_bytes: Bytes = 0
    """Those of them that are results and no arguments: held by the next block as well, where there is one."""
    leaving_bytes: Bytes = 0
    """Of `own_bytes`, those that leave where the block is offloaded."""
    inputs: tuple[tuple[int, Bytes], ...] = ()
    """Storages that it was called with and that may leave where it is recomputed: by what tells one from another, with
    bytes."""
    kept_bytes: Bytes = 0
    """Storages that a selective action keeps, or sends away, for the second run; without arguments and results."""
    beside_bytes: Bytes = 0
    """Of these, storages that autograd did not save: the block needs them on top while it runs, both times."""
    moved_bytes: Bytes = 0
    """Storages that were sent away, each once."""
    packed_bytes: Bytes = 0
    """What became of storages that were compressed; of one that several calls share, with the first of them."""
    recomputes: int = 0
    skipped_ops: int = 0
    """Ops that did not run in second runs, since their results had been kept."""
    recompute_seconds: Seconds = 0.0
    rehearsed_bytes: Bytes | None = None
    """What its first forward left where it has two (`BlockEngine.rehearses`), without the result; 0 where the data
    filter removes that (`data_filter.py`); None where it had one forward."""
    kept_because: str = ""
    """Why the block cannot run again, a clause; empty if it can."""

    @property
    def resident_bytes(self) -> Bytes:
        """What it holds from its end until its backward, above what recomputing it would leave: below 0 where its input
        is away, which others may hold all the same. What cannot run again counts as the rest of the step does."""
        stays = not (self.action.recomputes or self.action.compresses or self.kept_because)
        return self.kept_bytes + self.packed_bytes + stays * self.own_bytes - self.moved_bytes
