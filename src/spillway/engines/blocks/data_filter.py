"""The data filter of Fig. 12: which measurements of blocks say what the block saves.

Only the published collector needs it (`Options.forwards`): a block that is called within another one runs within both
forwards of that, and its own second one makes the bytes of the outer first forward too few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One forward of a block while blocks are measured."""

    name: str
    inside: int | None
    """The forward that called it, by its place in the record; None at the top."""
    checkpointed: bool
    """Whether it ran under a checkpoint, so that it saved nothing: the second of its two forwards."""


def valid_calls(record: Sequence[ModuleCall]) -> list[bool]:
    """The data filter of Fig. 12: for each call whether its bytes say what the module saves.

    They do not (1) if the call was checkpointed, (2) if one that it was made in, or one made in it, was; they do
    otherwise (3). The public code finds the same by counting checkpoints around each call.

    Args:
        record: Calls in the order in which they began, so that each stands behind the one it was made in.

    Raises ValueError if a call stands before the one that it was made in.
    """
    caller = [call.checkpointed for call in record]
    callee = [call.checkpointed for call in record]
    for place, call in enumerate(record):
        if call.inside is None:
            continue
        if not 0 <= call.inside < place:
            raise ValueError(f"Call {place} ({call.name}) is made in call {call.inside}, which is not before it.")
        caller[place] |= caller[call.inside]
    for place in range(len(record) - 1, -1, -1):
        inside = record[place].inside
        if inside is not None:
            callee[inside] |= callee[place]
    return [not (above or below) for above, below in zip(caller, callee, strict=True)]
