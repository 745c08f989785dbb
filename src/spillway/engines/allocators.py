"""Models of device allocators, from which the peak of a simulated step can be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

from spillway.errors import DeviceFullError, UsageError
from spillway.units import Bytes, format_bytes


class AbstractAllocator(ABC):
    """Hands out device memory of which there are `limit` bytes, or no end of it."""

    def __init__(self, limit: Bytes | None = None) -> None:
        self.limit = limit
        self.allocated: Bytes = 0
        """Bytes that were asked for and are in use."""
        self.reserved: Bytes = 0
        """Bytes taken from the device for them."""
        self.peak_reserved: Bytes = 0
        """The most there were of these, since `reset_peak`."""

    @abstractmethod
    def allocate(self, nbytes: Bytes) -> Any:
        """A token for so many bytes. Raises DeviceFullError if they do not fit; then nothing has changed."""

    @abstractmethod
    def free(self, token: Any) -> None:
        """Take the bytes back."""

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.peak_reserved = self.reserved

    def _note_peak(self) -> None:
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _full(self, nbytes: Bytes) -> DeviceFullError:
        """What to raise when `nbytes` do not fit."""
        idle = self.reserved - self.allocated
        odd = f", {format_bytes(idle)} of it in pieces that do not fit" if idle else ""
        return DeviceFullError(
            f"An allocation of {format_bytes(nbytes)} does not fit in the {format_bytes(self.limit or 0)} of the "
            f"device: {format_bytes(self.reserved)} are reserved{odd}."
        )


@final
class ExactAllocator(AbstractAllocator):
    """Takes exactly the bytes that are in use: no rounding, no fragmentation."""

    def allocate(self, nbytes: Bytes) -> Bytes:
        """The token is the size."""
        if self.limit is not None and self.allocated + nbytes > self.limit:
            raise self._full(nbytes)
        self.allocated += nbytes
        self.reserved = self.allocated
        self._note_peak()
        return nbytes

    def free(self, token: Bytes) -> None:
        """Nothing stays reserved."""
        self.allocated -= token
        self.reserved = self.allocated


ALLOCATORS: Mapping[str, Callable[[Bytes | None], AbstractAllocator]] = MappingProxyType({"exact": ExactAllocator})
"""The models by name."""


def allocator_named(name: str, limit: Bytes | None) -> AbstractAllocator:
    """One of `ALLOCATORS`. Raises UsageError for any other name."""
    if name in ALLOCATORS:
        return ALLOCATORS[name](limit)
    raise UsageError(f"There is no allocator model {name!r}; choose one of {', '.join(ALLOCATORS)}.")
