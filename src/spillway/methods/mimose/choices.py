"""What can be chosen about Mimose, the paper's choices and Spillway's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, final

from spillway.errors import UsageError
from spillway.methods.by_block import InputSize
from spillway.units import Bytes

HALF_GB: Bytes = 500_000_000
"""The smallest reserve of the public scripts; the paper says 0.5 to 1 GB (section 6.4)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of Mimose. The defaults serve best here; `as_published` has the paper's.

    Every field says what the paper has and, where the default is another, why.
    """

    iterations: int = 10
    """Steps of the collecting phase. 10 in the paper's evaluation, 10 to 30 in its text."""
    ends_early: bool = True
    """Whether the collecting phase ends as soon as the bytes of every block are known to follow an exact law. Paper:
    no. Because more samples of an exact law say nothing new, and a collecting step recomputes every block."""
    collects_known_sizes: bool = False
    """Whether a collecting step of a size that was measured is measured again. Paper: no in section 4.2, yes in the
    public code. Because bytes of the same size are the same, and what differs is learned while training."""
    first_counts: bool = True
    """Whether the first step is a sample of the whole model. Paper: no, because optimizer state and what libraries take
    come into being in it. Here peaks end where the optimizer begins, and count tensors alone."""
    forwards: Literal[1, 2] = 1
    """How often a block's forward runs to be measured. Paper: 2, one with everything saved and one without (Fig. 7):
    bytes are then those that the first one made and left, its result apart, of calls that the data filter lets count.
    Because bytes can be counted as they are handed to autograd, and let go at once."""
    exact_bytes: bool = True
    """Whether exact polynomials are looked for, of the size or of how many whole windows of it there are. Paper: least
    squares of degree 2 alone. Because bytes are integers that follow such laws, and a fit to a padded model is off by
    5 % and more. Where there is no law, estimates err upwards (`estimator.py`) if `checks_peak` is on."""
    checks_peak: bool = True
    """Whether plans have to hold in every moment of a simulated step, backward included. Paper: only the excess of
    the whole model is covered. Because recomputed bytes come back in the backward (Fig. 11), which the paper leaves to
    `reserve`."""
    corrects: bool = True
    """Whether what later steps measure corrects estimates. Paper: no, the collector is frozen (section 4.1). Because a
    budget that was passed once is otherwise passed at every step of that size."""
    reserve: Bytes = 0
    """Bytes that stay free below what is available. Paper: 0.5 to 1 GB for fragmentation, in the public scripts up to
    16. Because what is counted here is simulated (`checks_peak`) and what is not is corrected (`corrects`)."""
    interval: int = 1
    """Sizes are rounded up to multiples of this, and share a plan. Paper: 5 for text, 100 for pictures. Because
    `similar` takes its place. The number of samples of `batched` is not rounded."""
    similar: float = 0.02
    """Where `interval` is 1: sizes that are at most about this share apart have one plan, that of the largest of them
    which was seen; 0 for a plan of every size. Paper: none, sizes are rounded. Because a share wastes the same at every
    length, and a size that no larger one was seen beside wastes nothing."""
    batched: bool = False
    """Whether the first number of an input size counts samples, by which all bytes are multiplied. Paper: the size is
    one number, and the number of samples is fixed."""
    static_size: InputSize | None = None
    """A size for which one plan is made and used for all sizes of as many numbers: what the paper's Fig. 13 calls
    Sublinear. Meant for comparing; None is Mimose."""

    def __post_init__(self) -> None:
        if not 0 <= self.similar < 1:
            raise UsageError(f"Mimose takes sizes for similar that are a share from 0 to 1 apart, not {self.similar}.")
        if self.iterations < 2 or self.interval < 1 or self.reserve < 0:
            raise UsageError(
                f"Mimose needs 2 collecting steps or more, an interval of 1 or more and a reserve that is not "
                f"negative, got {self.iterations}, {self.interval} and {self.reserve}: the first step does not count "
                f"for the whole model."
            )

    @classmethod
    def as_published(
        cls,
        *,
        iterations: int = 10,
        interval: int = 5,
        reserve: Bytes = HALF_GB,
        static_size: InputSize | None = None,
    ) -> Self:
        """The paper's choices; its own runs differ in these arguments.

        Args:
            iterations: Of the collecting phase: 10 or 20 for text, 30 for pictures.
            interval: 5 for text, 100 for pictures, where the size is height times width.
            reserve: What the public code calls buffer.
            static_size: For the static plan of Fig. 13.
        """
        return cls(
            iterations=iterations, ends_early=False, collects_known_sizes=True, first_counts=False, forwards=2,
            exact_bytes=False, checks_peak=False, corrects=False, reserve=reserve, interval=interval, similar=0.0,
            static_size=static_size,
        )  # fmt: skip
