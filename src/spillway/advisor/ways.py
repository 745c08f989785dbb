"""The methods that `spillway advise` compares, by name: what becomes of every block of the model.

Those of PAPAYA (section 2.2) come first, plain training before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from spillway.errors import UsageError
from spillway.methods.actions import Action

PLAIN: Final = "plain"
ACCUMULATED: Final = "plain-accumulated"
"""With `@` and the samples of a micro-batch behind it: plain training whose step sums up several micro-batches."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train."""

    name: str
    action: Action | None
    """What becomes of every block; None for plain training, without a session."""
    waits: bool = False
    """Whether compute waits for every copy."""
    micro: int = 0
    """Samples of a micro-batch where gradients are accumulated; 0 where they are not."""

    @property
    def lossy(self) -> bool:
        """Whether gradients are other than plain PyTorch's."""
        return self.action is not None and self.action.lossy


WAYS: Final[Mapping[str, Way]] = {
    name: Way(name=name, action=action, waits=name == "swap")
    for name, action in (
        (PLAIN, None),
        ("checkpoint", Action.RECOMPUTE),
        ("swap", Action.OFFLOAD),
        ("compress", Action.COMPRESS),
        ("checkpoint-swap", Action.RECOMPUTE_OFFLOADED),
        ("compress-swap", Action.COMPRESS_OFFLOADED),
        ("checkpoint-compress", Action.RECOMPUTE_COMPRESSED),
        ("selective", Action.SELECTIVE),
        ("selective-swap", Action.SELECTIVE_OFFLOADED),
        ("swap-prefetch", Action.OFFLOAD),
    )
}
"""By name. Compute waits for the copies of `swap`, and not for those of `swap-prefetch`."""

DEFAULT: Final = ("plain", "checkpoint", "swap", "compress", "checkpoint-swap", "compress-swap")
"""What is compared if nobody says what: PAPAYA's."""


def accumulated(micro: int) -> str:
    """The name of plain training that sums up gradients of micro-batches of so many samples."""
    return f"{ACCUMULATED}@{micro}"


def way_of(name: str) -> Way:
    """Raises UsageError for a name that is none."""
    stem, at, micro = name.partition("@")
    if stem == ACCUMULATED and at and micro.isdecimal() and int(micro):
        return Way(name=name, action=None, micro=int(micro))
    if name not in WAYS:
        raise UsageError(f"There is no method {name!r} to compare; choose from {', '.join(WAYS)}.")
    return WAYS[name]


def chosen(names: Sequence[str] = DEFAULT, *, lossless: bool = False) -> list[Way]:
    """The methods of these names, each once, plain training first, which is what the others are compared with; with
    `lossless` without those whose gradients are other than plain PyTorch's. Raises UsageError for a name that is none,
    or if plain training alone is left."""
    ways = [way_of(name) for name in dict.fromkeys((PLAIN, *names))]
    ways = [way for way in ways if not (lossless and way.lossy)]
    if len(ways) < 2:
        others = [way.name for way in WAYS.values() if way.action is not None and not (lossless and way.lossy)]
        raise UsageError(
            f"There is nothing to compare plain training with: name one or more of {', '.join(others)} with --methods."
        )
    return ways
