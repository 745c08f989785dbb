"""What a machine offers, and what Spillway does with it: `spillway doctor`. `on_torch` alone needs torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that stands in the way, and what helps."""

    what: str
    """A sentence."""
    fix: str
    """A sentence."""
    fatal: bool = False
    """Whether nothing can be trained under a budget as long as it stands."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor."""

    topic: str
    """What was looked at, in a word or two."""
    sentence: str
    """What is there, and what Spillway does with it."""
    facts: dict[str, Any]
    """The same for programs; bytes, bytes per second, names."""
    problems: list[Problem] = field(default_factory=list)
    """Mostly none."""

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON can hold it."""
        return dataclasses.asdict(self)
