"""What the controller drives: a machine moves, frees and recomputes bytes, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from spillway.memory.records import Recipe, Storage
from spillway.units import Bytes, Seconds


class Machine(Protocol):
    """What the controller drives: real tensors, or a model of them."""

    def now(self) -> Seconds:
        """What time it is, since a moment that stays the same."""

    def run(self, recipe: Recipe, bindings: Sequence[Storage]) -> Sequence[Any]:
        """Run the op again on `bindings` (one per read, present); handles of the storages it creates, in order (rule
        6)."""

    def page_out(self, storage: Storage) -> Any:
        """Copy the bytes to the slower tier and free them; the home. Raises `SpillFullError`, then nothing has
        changed."""

    def page_in(self, storage: Storage, home: Any) -> bool:
        """Bring the bytes back; whether `home` still holds the same content (it does not if somebody wrote in
        between)."""

    def leave(self, storage: Storage, home: Any) -> None:
        """Free the bytes: `home` holds the same content, or will when a copy is done that this waits for. Raises
        `SpillFullError` if that copy failed, then nothing has changed."""

    def start_out(self, storage: Storage) -> Any:
        """Begin to copy the bytes to the slower tier; the home where they will be. The storage lives until then."""

    def start_in(self, storage: Storage, home: Any) -> Any:
        """Begin to bring the bytes back, beside the storage; a token for the three that follow."""

    def arrived(self, arrival: Any) -> bool:
        """Whether `finish_in` would not wait."""

    def finish_in(self, storage: Storage, arrival: Any) -> bool:
        """Give the bytes to the storage; what `page_in` returns."""

    def abandon(self, arrival: Any) -> None:
        """They are not wanted: free them."""

    def reap(self) -> None:
        """Let go of storages that lived on for copies which are done by now."""

    def release(self, storage: Storage) -> None:
        """Free the bytes; nothing is kept."""

    def transfer(self, source: Storage, target: Storage) -> None:
        """Move the bytes of a temporary into `target`, whose bytes are absent."""

    def hold(self, storage: Storage) -> None:
        """Keep the storage alive even if nobody else does."""

    def unhold(self, storage: Storage) -> None:
        """Stop keeping it alive."""

    def discard(self, home: Any) -> None:
        """The home is not needed any more, nor a copy to it that is under way."""

    def escaped(self, storage: Storage) -> bool:
        """Whether something that the machine cannot see may hold the storage's address (rule 10)."""

    @property
    def overlaps(self) -> bool:
        """Whether copies have a processor or a link of their own, so that ops do not pay for all of their time."""

    def measure_link(self) -> None:
        """Find out what `transfer_seconds` says, if nothing was copied so far."""

    def transfer_seconds(self, nbytes: Bytes) -> Seconds:
        """Seconds to copy `nbytes` out and in again."""

    def seconds_of(self, recipe: Recipe) -> Seconds:
        """Seconds that the op takes when it is run again."""

    def settle(self) -> None:
        """Called after room was made: return freed memory to the system if need be."""
