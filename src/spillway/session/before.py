"""What a step of the block engine that is refused puts back: the buffers and random streams with which it began."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from spillway.engines.environment import Environment
from spillway.internals.dispatch_key import unwatched
from spillway.units import Bytes, KiB

SMALL: Final[Bytes] = 64 * KiB
"""A buffer of no more bytes is copied in every step: a batch norm's, a counter."""


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Unheard by modes and autograd, through guards in C++: no interruption leaves them half-way."""
    with torch._C.DisableTorchFunction(), unwatched(), torch._C._AutoDispatchBelowAutograd():
        yield


@final
class Before:
    """Buffers and random streams as they were when the latest step began.

    The copies are made anew in every step, in the same memory, which counts as named storages do. A large buffer, such
    as a mask, is copied until a whole step has shown that training does not change it; if a later one does, a refusal
    cannot put it back, and says so.

    Args:
        model: Whose buffers.
        environment: Which random streams.
    """

    def __init__(self, model: nn.Module, environment: Environment) -> None:
        self._model = model
        self._environment = environment
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers that training may change, by id, and their copies."""
        self._constant: dict[int, tuple[Tensor, int]] = {}
        """Large ones that it does not change, and their versions."""
        self._places: list[tuple[nn.Module, str, Tensor]] = []
        self._streams: list[Any] = []

    @property
    def copies(self) -> list[Tensor]:
        """Of buffers and of torch's random streams, there in every step."""
        states = [state for state in self._streams if isinstance(state, Tensor)]
        return [*(copy for _, copy in self._copies.values()), *states]

    @_unseen()
    def remember(self) -> None:
        """A step begins."""
        found = [(m, n, one) for m in self._model.modules() for n, one in m._buffers.items() if one is not None]
        self._places = [place for place in found if place[2].layout is torch.strided and not place[2].is_meta]
        buffers = {id(one): one for _, _, one in self._places}
        self._constant = {k: one for k, one in self._constant.items() if k in buffers and one[0]._version == one[1]}
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for key, one in buffers.items():
            if key not in self._constant:
                _, copy = self._copies.get(key, (one, None))
                if copy is None or copy.shape != one.shape or copy.dtype != one.dtype:
                    copy = torch.empty_like(one)
                kept[key] = one, copy
        self._copies = kept
        if kept:
            torch._foreach_copy_([copy for _, copy in kept.values()], [one for one, _ in kept.values()])
        self._streams = self._environment.streams()

    @_unseen()
    def learn(self) -> None:
        """The step has ended as it should: what of the large buffers it did not change is not copied again."""
        for key, (one, copy) in self._copies.items():
            if one.nbytes > SMALL and torch.equal(one, copy):
                self._constant[key] = one, one._version

    @_unseen()
    def put_back(self) -> str:
        """All is as it was when the step began; the name of a buffer that is not, or nothing."""
        lost = ""
        for module, name, buffer in self._places:
            module._buffers[name] = buffer
            if id(buffer) in self._constant:
                lost = name if self._constant[id(buffer)][1] != buffer._version else lost
            elif not torch.equal(buffer, copy := self._copies[id(buffer)][1]):
                buffer.resize_(copy.shape).copy_(copy)
        self._environment.set_streams(self._streams)
        return lost
