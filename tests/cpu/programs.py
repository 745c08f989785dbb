"""Random small programs: what training code does to tensors, in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.cpu.actions import aliases, autograd, basics, control, layers, numbers, storages, training
from tests.cpu.world import ACTIONS, IN_A_ROW, Instruction, Part, Program

THEMES = (basics, storages, numbers, layers, autograd, training, control, aliases)
"""What was imported has registered its instructions."""

OUTSIDE = (
    "unary", "binary", "in_place", "view", "assign", "die", "look", "optimize", "set_data", "carry", "carried",
    "another_storage", "average", "toggle", "saved_state", "hook_of_module",
)  # fmt: skip
"""Instructions that programs also use between steps."""


def random_program(seed: int) -> Program:
    """Two to four steps of one to two dozen instructions."""
    draw = random.Random(seed)
    names, weights = list(ACTIONS), [weight for weight, _ in ACTIONS.values()]

    def instructions(choices: list[str]) -> Iterator[Instruction]:
        for name in choices:
            yield Instruction(name, draw.randrange(1 << 16), draw.randrange(1 << 16), draw.randrange(1 << 16))

    parts = []
    for _ in range(draw.choice((2, 2, 3, 3, 4))):
        middle = draw.choices(names, weights, k=draw.randint(10, 26))
        first, last = draw.choices(["make", "leaf", "draw"], k=4), draw.choices(["learn", "optimize", "die"], k=2)
        outside = draw.choices(OUTSIDE, k=draw.randint(0, 4))
        parts.append(Part(tuple(instructions([*first, *middle, *last])), tuple(instructions(outside))))
    return Program(seed, tuple(parts) if seed % 4 else _with_aliases(seed, parts))


def repeated(program: Program) -> Program:
    """Its first two steps so often in a row as makes a planner record and follow them; of every other program they
    begin with nothing but the network and its optimizer, and nothing happens between them, so that most are alike."""
    anew = (Instruction("begin_anew", 0, 0, 0),)
    parts = program.parts[:2]
    if program.seed % 2:
        parts = tuple(Part(anew + part.inside, ()) for part in parts)
    return Program(program.seed, tuple(part for part in parts for _ in range(IN_A_ROW)))


def _with_aliases(seed: int, parts: list[Part]) -> tuple[Part, ...]:
    """The same, and in some places an alias is taken or used, or autograd is left for good."""
    draw = random.Random(f"aliases of {seed}")
    names = draw.choices(("inferred", "alias", "through_alias"), (1, 2, 3), k=draw.randint(2, 8))
    for name in ["alias", *names]:
        place = draw.randrange(len(parts))
        both = [list(instructions) for instructions in parts[place]]
        between = draw.random() < 0.25 and name != "inferred"  # what it runs may resize (docs/limits.md)
        chosen = both[between]
        chosen.insert(draw.randint(0, len(chosen)), Instruction(name, *(draw.randrange(1 << 16) for _ in "abc")))
        parts[place] = Part(*map(tuple, both))
    return tuple(parts)
