"""What all frames of an engine share: the environment, the spill file, and who is running."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, final

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from spillway.engines.blocks.environment import Environment
from spillway.engines.blocks.frame import Frame
from spillway.engines.blocks.hook import Hook
from spillway.engines.blocks.replays import Passing, Replay
from spillway.engines.blocks.sites import Site
from spillway.engines.tiers.disk import DiskTier

Hooks: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]


@final
class Conductor:
    """Knows, for every thread, which frame is running and which is running again.

    Args:
        environment: Read at the beginning of each call.
        open_tier: Opens the spill file, when something is to wait there for the first time.
    """

    def __init__(self, environment: Environment, open_tier: Callable[[], DiskTier]) -> None:
        self.environment = environment
        self.lock = threading.RLock()
        """One second run at a time: it changes random streams and modules for a while."""
        self.removed: tuple[Hook, ...] = ()
        """Hooks of an engine that was closed."""
        self._open_tier = open_tier
        self._tier: DiskTier | None = None
        self._away: weakref.WeakSet[Frame] = weakref.WeakSet()
        self._local = _Local()

    @property
    def replay(self) -> Replay | Passing | None:
        """The second run that this thread is in."""
        return self._local.replays[-1] if self._local.replays else None

    @property
    def frame(self) -> Frame | None:
        """The call of a block that this thread is in."""
        return self._local.frames[-1] if self._local.frames else None

    @contextlib.contextmanager
    def inside(self, frame: Frame) -> Iterator[None]:
        """The first run of a frame."""
        self._local.frames.append(frame)
        try:
            yield
        finally:
            self._local.frames.pop()

    @contextlib.contextmanager
    def replaying(self, replay: Replay | Passing) -> Iterator[None]:
        """A second run."""
        self._local.replays.append(replay)
        try:
            yield
        finally:
            self._local.replays.pop()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """What an engine that was closed has removed is there again: a second run finds blocks inside by it."""
        with contextlib.ExitStack() as stack:
            for hook in self.removed:
                stack.enter_context(hook.back())
            yield

    def pass_through(self, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site, *, holds: bool) -> Any:
        """Call a block from which nothing is wanted any more."""
        passing = Passing(holds=holds)
        with self.replaying(passing), saved_tensors_hooks(passing.fill, lambda value: value):
            return site.forward(*args, **kwargs)

    def hooks_around(self) -> Hooks | None:
        """Hooks for saved tensors that somebody else has put around the block."""
        top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        around = getattr(top[0], "__self__", None) if top is not None else None
        return around.outer if isinstance(around, Frame) else top

    def is_checkpointed(self) -> bool:
        """Whether `torch.utils.checkpoint` stands around what runs now: it holds nothing of it, and runs it again."""
        top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and getattr(top[0], "__module__", "") == torch.utils.checkpoint.__name__

    def tier(self, frame: Frame) -> DiskTier:
        """The spill file, in which something of this frame is going to wait."""
        if self._tier is None:
            self._tier = self._open_tier()
        self._away.add(frame)
        return self._tier

    def close(self) -> None:
        """Bring back what waits in the spill file, and give that back."""
        if self._tier is not None:
            for frame in tuple(self._away):
                frame.come_home()
            self._tier.close()
            self._tier = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.replays: list[Replay | Passing] = []
