"""What is rarely said to `manage`, by what it concerns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, final, get_args

from spillway.engines.environment import Generator
from spillway.errors import UsageError
from spillway.methods import AbstractPlanner, AbstractPolicy
from spillway.methods.by_block import AbstractBlockMethod
from spillway.tiers.spill_file import SpillIO


def _check(options: object, **wanted: tuple[bool, str]) -> None:
    for name, (given, what) in wanted.items():
        if not given:
            raise UsageError(f"{type(options).__name__}({name}=...) takes {what}, got {getattr(options, name)!r}.")


def _is_path(given: object) -> bool:
    return given is None or isinstance(given, str | os.PathLike)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpillOptions:
    """Where bytes wait that have left, and what becomes of the memory that they leave."""

    directory: str | os.PathLike[str] | None = None
    """Where the spill file goes, the system's temporary directory by default. It needs room for what leaves; the file
    has no name and is gone with the process."""
    io: SpillIO = "buffered"
    """"direct" writes and reads past the system's page cache where the file system can (O_DIRECT), so that spilled
    bytes do not take its place; "buffered" is faster as long as there is memory for the cache."""
    host_budget: int | str | None = None
    """For models on CUDA: the most host memory that is pinned for what leaves the device, in bytes or as a share of the
    memory that this process may use, that is of RAM or of what a control group allows of it; half of that by
    default."""
    return_freed: bool = True
    """Return freed memory to the system when the process's resident set is about to pass the budget by 5 %. False
    leaves it to the allocator: steps under pressure are faster, and the process may take twice the budget and more,
    because the allocator keeps what it cannot reuse."""

    def __post_init__(self) -> None:
        _check(
            self, directory=(_is_path(self.directory), "the path of a folder"),
            io=(self.io in get_args(SpillIO), "'buffered' or 'direct'"),
            return_freed=(isinstance(self.return_freed, bool), "True or False"),
        )  # fmt: skip


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """For methods of the block engine: what it cannot see for itself."""

    names: Sequence[str] | None = None
    """Names of the modules that are the blocks; consecutive children of a `Sequential` are one block, by the names of
    the first and the last, such as "features.0-4". Found in the first step if left out."""
    size: Callable[[Any], int | Sequence[int]] | None = None
    """Gives the size of a batch, a whole number or several. By default it is read from the shapes: the dimensions that
    differ between batches."""
    generators: Iterable[Generator] = ()
    """Random streams that the model draws from, beside the global ones and those that are attributes of its modules."""
    page: bool = False
    """Rather than refuse a step in which a block, or the optimizer, needs more at once than is allowed: recompute every
    block, and watch every op, so that storages leave in the middle of it. Such a step takes the cost per op of the
    tensor engine; others are as they were."""
    lossy: bool = False
    """Allow methods that quantize what the backward reads, such as `Checkpoint(Action.COMPRESS)`: their losses and
    gradients are other than plain PyTorch's. Nothing else quantizes because of it."""

    def __post_init__(self) -> None:
        names = self.names
        listed = names is None or (isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 0)
        streams = tuple(self.generators) if isinstance(self.generators, Iterable) else (None,)
        known = all(isinstance(stream, get_args(Generator)) for stream in streams)
        named = listed and all(isinstance(name, str) for name in names or ())
        _check(
            self, names=(named, "names of modules, such as ['layers.0']"),
            size=(self.size is None or callable(self.size), "a function of the batch"),
            generators=(known, "generators of random numbers, in a list"),
            page=(isinstance(self.page, bool), "True or False"), lossy=(isinstance(self.lossy, bool), "True or False"),
        )  # fmt: skip
        object.__setattr__(self, "generators", streams)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What is told of a run, beside `Session.history`."""

    run_file: str | os.PathLike[str] | None = None
    """JSON lines with the figures of every step."""
    timeline: bool = False
    """Keep the memory timeline of the step in which most bytes left and came back, for `Session.report`. The block
    engine has no timelines; it measures the peak of every step then, and not only of those of which something is to be
    learned."""
    live: bool = False
    """Show one line in the terminal while training; in a notebook a picture of the latest steps against the budget."""

    def __post_init__(self) -> None:
        _check(
            self, run_file=(_is_path(self.run_file), "the path of a file"),
            timeline=(isinstance(self.timeline, bool), "True or False"),
            live=(isinstance(self.live, bool), "True or False"),
        )  # fmt: skip


class ManageOptions(TypedDict, total=False):
    """What `spillway.manage` may be told besides model, optimizer and budget, as integrations pass it on."""

    method: str | AbstractPolicy | AbstractPlanner | AbstractBlockMethod
    spill: SpillOptions
    blocks: BlockOptions
    report: ReportOptions
