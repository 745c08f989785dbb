"""What the modules of a block hold beside parameters, as a forward found it: buffers, attributes, training flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from spillway.engines.blocks.containers import FrozenTensor, address, freeze, thaw

_OWN: Final = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of every module that are torch's own business, and ours."""
_MISSING: Final = object()
_Place = tuple[nn.Module, str]


@final
class Snapshot:
    """One block when one of its calls began."""

    __slots__ = ("attributes", "buffers", "training", "versions")

    def __init__(
        self,
        training: list[bool],
        buffers: dict[_Place, Tensor | None],
        attributes: dict[_Place, Any],
        versions: list[tuple[Tensor, int, str]],
    ) -> None:
        self.training = training
        self.buffers = buffers
        """Copies of those that the forward may change."""
        self.attributes = attributes
        self.versions = versions
        """Parameters and the other buffers: not copied, and not to be changed until the block has run again."""

    def written(self) -> str:
        """The name of a parameter or buffer that was written to since; empty if there is none."""
        return next((name for tensor, version, name in self.versions if tensor._version != version), "")


class ModuleState:
    """Takes snapshots of a block, and runs its recompute on one.

    The first call copies every buffer and learns, by value, which of them the forward changes (`native_batch_norm`
    raises no version counter). Later calls copy these alone.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = tuple(block.modules())
        self._names = {module: name for name, module in block.named_modules()}
        self._watched: dict[tuple[bool, ...], tuple[set[_Place], set[_Place]]] = {}
        """Buffers and attributes that change, by the training flags of the modules."""
        self._everything: dict[nn.Module, dict[str, Any]] = {}

    def snapshot(self) -> Snapshot:
        """The block now."""
        training = [module.training for module in self._modules]
        known = self._watched.get(tuple(training))
        buffers: dict[_Place, Tensor | None] = {}
        versions: list[tuple[Tensor, int, str]] = []
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    versions.append((parameter, parameter._version, name))
            for name, buffer in module._buffers.items():
                if known is None or (module, name) in known[0]:
                    buffers[module, name] = None if buffer is None else buffer.detach().clone()
                elif buffer is not None:
                    versions.append((buffer, buffer._version, name))
        attributes = {} if known is None else {place: _attribute(*place) for place in known[1]}
        if known is None:
            self._everything = {module: dict(vars(module)) for module in self._modules}
        return Snapshot(training, buffers, attributes, versions)

    def learn(self, snapshot: Snapshot) -> str:
        """After the forward: what it changed. The name of what it changed and no snapshot holds; empty if none."""
        known = self._watched.get(tuple(snapshot.training))
        if known is None:
            self._learn_all(snapshot)
            return ""
        written = snapshot.written()
        if written:
            for module in self._modules:
                known[0].update((module, name) for name in module._buffers if name == written)
        return written

    def _learn_all(self, snapshot: Snapshot) -> None:
        changed = {place for place, before in snapshot.buffers.items() if _differs(place, before)}
        attributes: set[_Place] = set()
        for module, before in self._everything.items():
            now = vars(module)
            for name in (before.keys() | now.keys()) - _OWN:
                if before.get(name, _MISSING) is not now.get(name, _MISSING):
                    attributes.add((module, name))
                    snapshot.attributes[module, name] = _frozen(before.get(name, _MISSING))
        self._everything = {}
        self._watched[tuple(snapshot.training)] = (changed, attributes)
        for place in snapshot.buffers.keys() - changed:
            del snapshot.buffers[place]
            buffer = place[0]._buffers.get(place[1])
            if buffer is not None:
                snapshot.versions.append((buffer, buffer._version, place[1]))

    def fixed(self) -> set[int]:
        """Addresses of the storages of parameters and buffers: dropping a reference to one frees nothing."""
        found: set[int] = set()
        for module in self._modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    found.add(address(tensor))
        return found

    @contextlib.contextmanager
    def as_of(self, snapshot: Snapshot) -> Iterator[None]:
        """The block as it was; afterwards it is again as before."""
        before = [(module, module.training, dict(module._buffers)) for module in self._modules]
        places = snapshot.attributes.keys()
        present = {place: vars(place[0])[place[1]] for place in places if place[1] in vars(place[0])}
        try:
            for module, flag in zip(self._modules, snapshot.training, strict=True):
                module.training = flag
            for (module, name), buffer in snapshot.buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()
            for (module, name), value in snapshot.attributes.items():
                if value is _MISSING:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = thaw(value)
            yield
        finally:
            for module, training, buffers in before:
                module.training = training
                module._buffers.clear()
                module._buffers.update(buffers)
            for module, name in places:
                if (module, name) in present:
                    vars(module)[name] = present[module, name]
                else:
                    vars(module).pop(name, None)


def _attribute(module: nn.Module, name: str) -> Any:
    return _frozen(vars(module).get(name, _MISSING))


def _frozen(value: Any) -> Any:
    """Without the graph that a tensor may hang in: the graph of one step must not hold that of the step before."""
    return freeze(value, lambda tensor: FrozenTensor(tensor, None))


def _differs(place: _Place, before: Tensor | None) -> bool:
    module, name = place
    now = module._buffers.get(name)
    if now is None or before is None:
        return now is not before
    if isinstance(module, _NormBase) and module.training and module.track_running_stats:
        return True  # also where this batch happened to leave the values as they were
    if now.shape != before.shape or now.dtype != before.dtype:
        return True
    return not torch.equal(_bits(now), _bits(before))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes: NaN equals itself, and zero is not minus zero."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
