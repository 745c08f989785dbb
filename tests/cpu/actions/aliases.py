"""Bytes that somebody else reads and writes, and tensors without versions.

No program draws these by weight: they are put into some of them, so that every other is the program that it was.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.cpu.actions.control import inner
from tests.cpu.alias_cases import ALIASES, SIDE, content, write
from tests.cpu.world import Instruction, World, action


@action(0)
def alias(world: World, i: Instruction) -> Any:
    """Another way to the bytes of a tensor or of a parameter is taken and kept; a tensor of its storage is drawn too.

    What only has memory in common is left behind by a change of the storage's size, in plain PyTorch too.
    """
    parameters = [p for p in world.network.parameters() if p.dim() == 2]
    x = parameters[i.a % len(parameters)] if i.c % 3 == 0 else world.floats(4 * i.a + 1)
    if x.untyped_storage().nbytes() < 4 * SIDE * SIDE:
        return None  # some of them would make it larger, by bytes that nobody wrote
    name = list(ALIASES)[i.b % len(ALIASES)]
    if name == "share_memory_":
        world.aliases.clear()  # plain PyTorch frees the memory that they show
    made = ALIASES[name](x.detach().resolve_neg())
    world.aliases.append(made)
    del world.aliases[:-6]
    shares = isinstance(made, torch.Tensor) and made.untyped_storage()._cdata == x.untyped_storage()._cdata
    return made if shares and i.c % 2 else None


@action(0)
def through_alias(world: World, i: Instruction) -> None:
    """What it shows is noted; it is written too."""
    if world.aliases:
        taken = world.aliases[i.a % len(world.aliases)]
        world.note("alias", hash(content(taken)[:256]))  # a storage may end in bytes that nobody wrote
        if i.b % 3:
            write(taken)
            world.note("alias", hash(content(taken)[:256]))


@action(0)
def inferred(world: World, i: Instruction) -> None:
    """What is made here autograd refuses later, and nobody counts its versions."""
    with torch.inference_mode():
        for instruction in inner(i, 1 + i.c % 4):
            world.run_one(instruction)
