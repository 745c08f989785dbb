"""What all frames of an engine share: the environment, the spill file, and who is running."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, final

import torch
import torch.utils.checkpoint

from spillway.engines.blocks.compiled import CompiledHook
from spillway.engines.blocks.compress import Compressor
from spillway.engines.blocks.environment import Environment
from spillway.engines.blocks.frame import Frame
from spillway.engines.blocks.hook import Hook
from spillway.engines.blocks.packing import Packing
from spillway.engines.blocks.replays import Passing, Replay
from spillway.engines.blocks.selective import AbstractSelecting
from spillway.engines.blocks.sites import Site
from spillway.engines.blocks.stores import Store
from spillway.engines.locks import renew_in_children
from spillway.units import Bytes

Hooks: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]


@final
class Conductor:
    """Knows, for every thread, which frame is running and which is running again.

    Args:
        environment: Read at the beginning of each call.
        open_store: Opens the spill file, when something is to wait there for the first time.
        by_module: Whether the user has named modules whose results are to be kept.
        checks_values: Whether values that a second run brings back are compared with those of the first.
        ahead: Bytes that may be read before the backward asks for them; None for those of one block.
        compressor: Quantizes what blocks saved.
    """

    def __init__(
        self,
        environment: Environment,
        open_store: Callable[[], Store],
        ahead: Bytes | None,
        *,
        compressor: Compressor,
        by_module: bool,
        checks_values: bool,
    ) -> None:
        self.environment = environment
        self.by_module = by_module
        self.checks_values = checks_values
        self.compressor = compressor
        self.lock = threading.RLock()
        """One second run at a time: it changes random streams and modules for a while."""
        renew_in_children(self, "lock")
        self.removed: tuple[Hook | CompiledHook, ...] = ()
        """Hooks of an engine that was closed."""
        self.ahead = ahead
        self.store: Store | None = None
        self.sent = 0
        """How many frames have sent something away."""
        self._open_store = open_store
        self._away: weakref.WeakValueDictionary[int, Frame] = weakref.WeakValueDictionary()
        self._local = _Local()

    @property
    def replay(self) -> Replay | Passing | None:
        """The second run that this thread is in."""
        return self._local.replays[-1] if self._local.replays else None

    @property
    def frame(self) -> Frame | None:
        """The call of a block that this thread is in."""
        return self._local.frames[-1] if self._local.frames else None

    @property
    def runs_nothing(self) -> bool:
        """Whether this thread is in no call of a block, and in no second run."""
        return self.replay is None and self.frame is None

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

    @contextlib.contextmanager
    def selecting(self, mode: AbstractSelecting | None) -> Iterator[None]:
        """A run of a frame under a selective action, if there is a mode for it."""
        if mode is None:
            yield
            return
        self._local.modes.append(mode)
        try:
            with mode:
                yield
        finally:
            self._local.modes.pop()

    def call_selected(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module whose results are to be kept."""
        modes = tuple(self._local.modes)
        if not modes:
            return forward(*args, **kwargs)
        for mode in modes:
            mode.enter()
        output = None
        try:
            output = forward(*args, **kwargs)
        finally:
            for mode in modes:
                mode.leave(output)
        return output

    def pass_through(self, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site, *, holds: bool) -> Any:
        """Call a block from which nothing is wanted any more."""
        passing = Passing(holds=holds)
        with self.replaying(passing), Packing(passing.fill, lambda value: value):
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

    @contextlib.contextmanager
    def sending(self, frame: Frame) -> Iterator[Store]:
        """Where something of this frame is going to wait; it is sent inside."""
        if self.store is None:
            self.store = self._open_store()
        self._away[self.sent] = frame
        self.sent += 1
        self.store.begin_block()
        yield self.store
        self.store.end_block()

    def read_ahead(self, frame: Frame) -> None:
        """A backward has come to this frame: let come what it will want next, which is what was sent before."""
        if self.store is None or self.ahead == 0 or torch._C._current_graph_task_id() == -1:
            return
        left = self.ahead
        earlier = (number for number in list(self._away.keys()) if number < frame.sent)
        for number in sorted(earlier, reverse=True):
            other = self._away.get(number)
            if other is None or not other.waiting():
                continue
            if left is None:
                other.start_in(None)
                return
            left -= other.start_in(left)
            if any(home.absent for home in other.waiting()):
                return  # there is no room for more

    def begin_step(self) -> None:
        """A forward of the model begins."""
        if self.store is not None:
            self.store.begin_step()

    def close(self) -> None:
        """Bring back what waits in the spill file, and give that back."""
        if self.store is None:
            return
        try:
            for frame in list(self._away.values()):
                frame.come_home()
        finally:
            self.store.close()
            self.store = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.replays: list[Replay | Passing] = []
        self.modes: list[AbstractSelecting] = []
