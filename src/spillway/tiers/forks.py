"""Forked processes that read the spill file: what they may read is not written again while they live."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Iterable
from typing import NamedTuple, final

from spillway.units import Bytes


class _Children(NamedTuple):
    """Those of one fork, and what they fork in turn."""

    ends: int
    """A pipe that nobody writes to: it ends when the last of them does. Negative: nobody will ever know."""
    close: weakref.finalize[..., ForkedReaders] | None
    offsets: frozenset[Bytes]
    """Slots in use when they were forked."""


@final
class ForkedReaders:
    """Which slots processes that were forked from this one may still read, through mappings that they inherited.

    A child's tensors that were away point at the file. What this process puts into their slots later would be what the
    child reads: a `DataLoader`'s worker whose data set had been moved would give wrong samples.
    """

    def __init__(self) -> None:
        self._groups: list[_Children] = []
        self._forking: tuple[int, int, frozenset[Bytes]] | None = None

    def before_fork(self, in_use: Iterable[Bytes]) -> None:
        """A child is about to inherit the mapping, and with it these slots."""
        offsets = frozenset(in_use)
        if not offsets:
            return
        try:
            self._forking = (*os.pipe(), offsets)
        except OSError:
            self._forking = (-1, -1, offsets)

    def after_fork(self) -> None:
        """In this process: only the child holds the pipe open from now on."""
        if self._forking is None:
            return
        (ends, held, offsets), self._forking = self._forking, None
        if held >= 0:
            os.close(held)
        close = weakref.finalize(self, os.close, ends) if ends >= 0 else None
        if close is not None:
            close.atexit = False
        self._groups.append(_Children(ends, close, offsets))

    def in_child(self) -> None:
        """In the child, which holds its end of the pipe until it ends, and writes nothing itself."""
        if self._forking is not None and self._forking[0] >= 0:
            os.close(self._forking[0])
        self._forking = None
        self._groups.clear()

    def may_read(self, offset: Bytes) -> bool:
        """Whether a living child has the slot that begins there."""
        for group in [group for group in self._groups if _has_ended(group.ends)]:
            self._groups.remove(group)
            _close(group)
        return any(offset in group.offsets for group in self._groups)

    def close(self) -> None:
        """Nothing will be written any more."""
        for group in self._groups:
            _close(group)
        self._groups.clear()


def _close(group: _Children) -> None:
    if group.close is not None:
        group.close()


def _has_ended(pipe: int) -> bool:
    if pipe < 0:
        return False
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))
