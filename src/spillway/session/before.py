"""What a step of the block engine that is refused puts back: the buffers and random streams with which it began."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from spillway.engines.blocks.fingerprints import Fingerprint, fingerprint
from spillway.engines.blocks.module_state import refill
from spillway.engines.environment import Environment
from spillway.internals.dispatch_key import unwatched
from spillway.internals.private import Place, bytes_over, is_hollow
from spillway.session.inputs import parameters_of
from spillway.units import Bytes, KiB

SMALL: Final[Bytes] = 64 * KiB
"""A buffer of no more bytes is copied in every step: a batch norm's, a counter."""


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Unheard by modes and autograd, through guards in C++: no interruption leaves them half-way."""
    with torch._C.DisableTorchFunction(), unwatched(), torch._C._AutoDispatchBelowAutograd():
        yield


class _Location(NamedTuple):
    """Where a buffer lay."""

    name: str
    buffer: Tensor
    storage: torch.UntypedStorage
    place: Place | None
    version: int


@final
class Before:
    """Buffers and random streams as they were when the latest step began.

    Copied are storages, byte by byte, whatever the buffers make of them. The copies are made anew in every step, in the
    same memory, which counts as named storages do. A large one, such as a mask's, is copied until a whole step has
    shown that training does not change it; if a later one does, a refusal cannot put it back, and says so.

    Args:
        environment: Which random streams.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """Storages that training may change, by identity, and what was in them."""
        self._constant: dict[int, tuple[torch.UntypedStorage, int, Fingerprint]] = {}
        """Large ones that it does not change, with the version and the content that they are known by."""
        self._held: list[tuple[Any, dict[str, Tensor | None]]] = []
        self._locations: list[_Location] = []
        self._others: list[tuple[str, Tensor, int]] = []
        """Buffers without a storage of their own, such as sparse ones."""
        self._parameters: list[tuple[Tensor, int]] = []
        self._streams: list[Any] = []

    @property
    def copies(self) -> list[Tensor]:
        """Of buffers and of torch's random streams, there in every step."""
        states = [state for state in self._streams if isinstance(state, Tensor)]
        return [*(copy for _, copy in self._copies.values()), *states]

    @_unseen()
    def remember(self, modules: Sequence[nn.Module], *, large: bool = True) -> None:
        """A step of these modules begins. `large` says whether there is room for copies of large storages; what changes
        in these cannot be put back otherwise, and a refusal says so."""
        self._held = [(module._buffers, dict(module._buffers.items())) for module in modules]
        self._parameters = [(one, _version(one)) for one in parameters_of(modules)]
        self._locations, self._others = [], []
        for _, buffers in self._held:
            for name, one in buffers.items():
                if one is not None and not one.is_meta:
                    if torch._C._has_storage(one) and not is_hollow(one):
                        storage = one.untyped_storage()
                        self._locations.append(_Location(name, one, storage, Place.of(one), _version(one)))
                    else:
                        self._others.append((name, one, _version(one)))
        known: dict[int, torch.UntypedStorage] = {}
        for location in self._locations:
            key = location.storage._cdata
            known[key] = location.storage
            if key in self._constant and self._constant[key][1] != location.version:
                del self._constant[key]
        self._constant = {key: one for key, one in self._constant.items() if key in known}
        kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        for key, storage in known.items():
            if key not in self._constant and (large or storage.nbytes() <= SMALL):
                _, copy = self._copies.get(key, (storage, None))
                if copy is None or copy.numel() != storage.nbytes():
                    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
                copy.untyped_storage().copy_(storage)
                kept[key] = storage, copy
        self._copies = kept
        self._streams = self._environment.streams()

    @_unseen()
    def learn(self) -> None:
        """The step has ended as it should: what of the large buffers it did not change is not copied again."""
        for location in self._locations:
            key = location.storage._cdata
            if location.storage.nbytes() > SMALL and key in self._copies and location.version >= 0:
                content = bytes_over(location.storage)
                if torch.equal(content, self._copies[key][1]):
                    self._constant[key] = location.storage, _version(location.buffer), fingerprint(content, {})

    @property
    def replaced(self) -> list[Tensor]:
        """Buffers in the place of which others have been put since."""
        pairs = ((one, held.get(name)) for held, buffers in self._held for name, one in buffers.items())
        return [one for one, now in pairs if one is not None and now is not one]

    @_unseen()
    def put_back(self, *, updated: bool) -> str:
        """All is as it was when the step began, unless parameters were `updated`. Returns a sentence about what is not,
        or nothing."""
        if updated or any(_version(parameter) != version for parameter, version in self._parameters):
            return "Parameters had been changed by then, so that buffers and random streams stay as the step left them."
        self._environment.set_streams(self._streams)
        for held, buffers in self._held:
            if len(held) != len(buffers) or any(
                name != other or one is not another
                for (name, one), (other, another) in zip(held.items(), buffers.items(), strict=True)
            ):
                refill(held, buffers)
        lost = [name for name, one, version in self._others if _version(one) != version]
        for location in self._locations:
            try:
                restored = self._restore(location)
            except RuntimeError:
                restored = False
            lost += [] if restored else [location.name]
        return f"The buffer {lost[0]!r} could not be put back: there is no copy of it." if lost else ""

    def _restore(self, location: _Location) -> bool:
        key, buffer, storage = location.storage._cdata, location.buffer, location.storage
        if key in self._constant:
            fine = torch.equal(fingerprint(bytes_over(storage), {}), self._constant[key][2])
        elif key in self._copies:
            copy = self._copies[key][1]
            if storage.nbytes() != copy.numel():
                storage.resize_(copy.numel())
            if not torch.equal(bytes_over(storage), copy):
                storage.copy_(copy.untyped_storage())
            fine = True
        else:
            fine = _version(buffer) == location.version >= 0
        if location.place is not None:
            location.place.put_back(buffer)
        return fine


def _version(tensor: Tensor) -> int:
    """-1 where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version
