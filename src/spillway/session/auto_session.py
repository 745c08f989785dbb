"""Sessions of `auto`: blocks planned together where the model has them, every storage where it has none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Self, final

from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.errors import ModelError
from spillway.memory.budget import UNLIMITED
from spillway.session.abstract_session import Session
from spillway.session.block_session import BlockSession
from spillway.units import Bytes

UNSIZED: Final = 2
"""Steps in a row without a size after which none is expected any more."""


@final
class AutoSession:
    """A session that is one of the block engine as long as there are blocks to plan, and then one of the tensor engine.

    The tensor engine takes over before the first step if a block engine cannot have the model, before the second if the
    first found no blocks, and after `UNSIZED` in a row that were entered with no tensor that would tell the size of
    their input: of these the block engine has every op watched.
    Without a budget there is nothing to plan, and the tensor engine keeps account until one is named.

    Args:
        blocks: Opens a session of the block engine under that many bytes.
        storages: Opens one of the tensor engine; on that engine, where one is given.
    """

    def __init__(
        self,
        blocks: Callable[[Bytes], BlockSession],
        storages: Callable[[Bytes, TensorEngine | None], Session],
        allowed: Bytes,
    ) -> None:
        self._blocks, self._storages = blocks, storages
        self._unsized = 0
        """Steps in a row that were entered with nothing that tells a size."""
        self._unplanned = allowed >= UNLIMITED
        """Whether blocks were not looked for yet, since there is no budget."""
        self._now: Session = storages(allowed, None) if self._unplanned else self._opened(allowed)

    def _opened(self, allowed: Bytes) -> Session:
        try:
            return self._blocks(allowed)
        except ModelError:
            return self._storages(allowed, None)

    @property
    def budget(self) -> Bytes | None:
        return self._now.budget

    @budget.setter
    def budget(self, named: int | str | None) -> None:
        now = self._now
        allowed = now._changed(named)
        if self._unplanned and allowed < UNLIMITED:
            self._now = self._opened(allowed)  # first: an interruption may come out of what follows
            self._unplanned = False
            now._leave_to(self._now)
        else:
            now._allow(allowed)

    def __getattr__(self, name: str) -> Any:
        if name == "_now":
            raise AttributeError(name)
        return getattr(self._now, name)

    def step(self, batch: Any = None) -> AbstractContextManager[Session]:
        return self._for(batch).step(batch)

    def begin(self, batch: Any = None) -> None:
        self._for(batch).begin(batch)

    def __enter__(self) -> Self:
        self._now.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._now.__exit__(*raised)

    def _for(self, batch: Any) -> Session:
        """The session that is to run a step on this batch."""
        now = self._now
        if isinstance(now, BlockSession) and now._running is None and not now._closed:
            self._unsized = 0 if now.tells_size(batch) else self._unsized + 1
            if now.blockless or self._unsized > UNSIZED:
                if not now.blockless:
                    warnings.warn(
                        f"{self._unsized} steps in a row were entered with no tensor that would tell the size of their "
                        f"input, so that blocks cannot be planned: from here on every op is watched (method='lru'). "
                        f"Enter steps with their batch.",
                        stacklevel=3,
                    )
                self._now = self._storages(now.allowed, now.watching)  # first: what follows may be interrupted
                now._leave_to(self._now)
        return self._now


Session.register(AutoSession)
