"""What a dynamic network did with one sample: the sites of its forward in order, as numbers of an architecture.

A site is a place in the code that runs: a module, which call of it, which op within that call. What a network may do is
an `Architecture` (`architecture.py`), which numbers what it has seen: sites with their op and the parameters that the
op touches (`PathOp`), and what ops compute on (`OpSignature`). A path holds those numbers, and there is one object for
every path that differs, so that comparing two ops is comparing two numbers, and comparing two paths asks for identity.

The forward alone is a path: the backward is the tape of it in reverse, and the optimizer follows from the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from spillway.units import Bytes, format_bytes

Numbers: TypeAlias = npt.NDArray[np.int32]
"""Indices, or counts."""
Floats: TypeAlias = npt.NDArray[np.float32]
"""Features."""


def finite(numbers: Floats) -> Floats:
    """What is no finite number counts 0: one step that went wrong is not to spoil what was learned of all others."""
    found: Floats = np.where(np.isfinite(numbers), numbers, np.float32(0))
    return found


@final
class BaseType(StrEnum):
    """What a network is built of; it selects one of the published pilot's three MLPs (section IV-C)."""

    CNN = "cnn"
    LSTM = "lstm"
    TRANSFORMER = "transformer"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamism:
    """What is to be known about a network whose forward differs from sample to sample, by whoever foresees it."""

    base: BaseType
    """What the network is built of."""
    embedding: str
    """Qualified name of the module whose result embeds the sample, [..., width]."""
    sizes: Callable[[Any], tuple[float, ...]]
    """Size features of a batch, as many for every one."""
    structure: Callable[[Any], Sequence[float]] = lambda batch: ()
    """What of a batch decides which way the forward takes, where it says so itself, such as which nodes of a tree have
    children: as many numbers for every one. No mean of an embedding tells that."""


@final
@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A place in the code of the forward."""

    module: str
    """Qualified name of the module whose forward runs, empty for the model itself. Behind a module around it stands
    which call of that it is, unless it is the first one: `cell[20].of_children`."""
    call: int
    """Which call of that module it is within the call around it, from 0."""
    op: int
    """Which op of that call, from 0; ops of modules called within are theirs."""

    def __str__(self) -> str:
        return f"{self.module or 'model'}[{self.call}].{self.op}"


@final
@dataclass(frozen=True, slots=True)
class PathOp:
    """What runs at a site; another op there, or one on other parameters, is another `PathOp`."""

    site: Site
    name: str
    """The operator, `aten.addmm.default`."""
    parameters: tuple[int, ...]
    """The parameters that it touches, by their numbers, each once."""


@final
@dataclass(frozen=True, slots=True)
class OpSignature:
    """What an op computes on, beside which op it is."""

    name: str
    """The operator."""
    dims: tuple[int, int, int]
    """Sums over its inputs of the dimensions (product of the leading ones, last but one, last); see `idioms.py`."""
    created: Bytes
    """Bytes of what it creates; 0 of what writes in place."""
    flops: int
    """Floating-point operations."""
    traffic: Bytes
    """Bytes that it reads and writes."""


@final
@dataclass(frozen=True, slots=True)
class ParameterStorage:
    """The bytes behind a parameter; all that can be brought in ahead during a forward."""

    name: str
    """What the model calls it, `encoder.layer.0.weight`."""
    nbytes: Bytes

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.nbytes)})"


@final
@dataclass(frozen=True, slots=True, eq=False)
class ResolvedPath:
    """The ops of one forward in order. An architecture makes one object of equal paths, so that `is` compares them."""

    number: int
    """Its index in the architecture."""
    keys: Numbers
    """[ops] Index of each op's `PathOp` in the architecture."""
    starts: Numbers
    """[ops + 1] Where the operands of each op begin in `operands`, and where the last one's end."""
    operands: Numbers
    """What ops read of what earlier ops created, each by the number of the op that created it in this path. What came
    from outside, parameters and the batch, is not listed; what writes in place counts as the op that created it."""

    def __len__(self) -> int:
        return len(self.keys)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One step of a network: what a pilot may know before and during the forward, and what the forward then did."""

    step: int
    """Which step of the run, from 0."""
    sizes: tuple[float, ...]
    """Size features of the batch, such as tokens, nodes and depth; as many in every sample of a network."""
    structure: tuple[float, ...] = ()
    """See `Dynamism.structure`."""
    embedding: Floats
    """[width] Mean of what the network's own embedding made of the sample."""
    base: BaseType
    """What the network is built of."""
    path: ResolvedPath
    """What the forward did; `Architecture.bits` says it as decisions."""
    signatures: Numbers
    """[ops] Index in the architecture of each op's signature; they differ with sizes where the path does not."""
    hidden: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """[asked, width] At every op that hands a number to the host: the mean of the last state, as wide as the embedding,
    that a module was given."""
    asked_at: Numbers = field(default_factory=lambda: np.zeros(0, np.int32))
    """[asked] The index of that op in the path: what follows it may depend on the number."""
    loss: float = float("nan")
    """The step's loss."""
