"""Bytes of blocks on a CUDA device wait in pinned host memory. Written from the documentation, never run on a GPU.

NOTE [Order on the device]. The host enqueues and does not wait. These are the rules of
`engines/tensors/cuda_machine.py`, for storages that autograd or a block saved:

 1. A copy out begins after what the compute stream had been given before it, which has written the source.
 2. The source is given up when the copy is seen to be done, or when the compute stream has been made to wait for it:
    whoever gets the memory next writes in the compute stream's order.
 3. The target of a copy in is allocated on the compute stream, and the copy begins after what that had been given
    before, since the memory may have been somebody else's until then; and after the copy out that fills its block.
 4. The compute stream waits for a copy in before anything may read it. What nobody wants is kept until its copy is seen
    to be done.
 5. A block is given back when both copies are seen to be done: finalizers run in any thread, and must not make a stream
    wait.

`record_stream` is used nowhere: it would tie memory to the moment at which the host looks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch

from spillway.engines.blocks.stores import Parcel, Storage
from spillway.tiers.cuda_streams import Event, Streams
from spillway.tiers.host import Block, HostPool


class _Place(NamedTuple):
    block: Block
    done: Event
    """The copy out into it."""


class _Arrival(NamedTuple):
    target: Storage
    done: Event


@final
class HostLanes:
    """A lane out and a lane in, beside the compute stream."""

    def __init__(self, streams: Streams, pool: HostPool) -> None:
        self.streams, self.pool = streams, pool
        self._unwanted: list[_Arrival] = []

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tensors on the device."""
        return tensor.device == self.streams.device

    def start_out(self, parcel: Parcel) -> None:
        """Enqueue the copy (rule 1)."""
        assert parcel.source is not None
        block = self.pool.take(parcel.nbytes)
        try:
            parcel.place = _Place(block, self.streams.copy_out(parcel.source, block, (self.streams.reached(),)))
        except BaseException:
            self.pool.free(block)
            raise

    def finish_out(self, parcel: Parcel) -> None:
        """The device waits, not the host (rule 2)."""
        if parcel.source is not None and not parcel.place.done.query():
            self.streams.compute_waits(parcel.place.done)
        parcel.source = None

    def start_in(self, parcel: Parcel) -> _Arrival:
        """Enqueue the copy (rule 3). Raises `torch.OutOfMemoryError`."""
        place: _Place = parcel.place
        target = self.streams.fresh(parcel.nbytes)
        after = [self.streams.reached()]
        if not place.done.query():
            after.append(place.done)
        parcel.under_way = self.streams.copy_in(place.block, target, after)
        return _Arrival(target, parcel.under_way)

    def finish_in(self, parcel: Parcel, arrival: Any) -> Storage:
        """Ops that follow find the bytes (rule 4)."""
        found: _Arrival = arrival if arrival is not None else self.start_in(parcel)
        if not found.done.query():
            self.streams.compute_waits(found.done)
        return found.target

    def abandon(self, arrival: _Arrival) -> None:
        """Kept until the copy is done (rule 4)."""
        self._unwanted.append(arrival)

    def sender_let_go(self) -> None:
        """The allocator knows what is free."""

    def reap(self, parcel: Parcel) -> None:
        """By looking at the event of the copy out."""
        if parcel.source is not None and parcel.place.done.query():
            parcel.source = None

    def free(self, parcel: Parcel) -> bool:
        """If the device is done with the block (rule 5)."""
        self._unwanted = [arrival for arrival in self._unwanted if not arrival.done.query()]
        if not all(event.query() for event in _events(parcel)):
            return False
        self.pool.free(parcel.place.block)
        return True

    def settle(self, parcel: Parcel) -> None:
        """The host waits."""
        for event in _events(parcel):
            event.synchronize()

    def begin_step(self) -> None:
        """Seconds of copies are not asked for here."""
        self._unwanted = [arrival for arrival in self._unwanted if not arrival.done.query()]
        self.streams.forget_times()

    def close(self) -> None:
        """The host waits for the device; pinned memory goes back."""
        self.streams.synchronize()
        self._unwanted.clear()
        self.pool.close()


def _events(parcel: Parcel) -> list[Event]:
    place: _Place = parcel.place
    return [place.done] if parcel.under_way is None else [place.done, parcel.under_way]
