"""What the modules of a block hold beside parameters, as a forward found it: buffers, attributes, training flags."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from spillway.engines.blocks.attributes import Attribute, Attributes
from spillway.engines.blocks.attributes import Seen as SeenAttributes
from spillway.engines.blocks.fingerprints import Fingerprint, Seen, fingerprint
from spillway.engines.blocks.reach import Copies, Reach, hooks_of, is_plain, put_hooks, reach_of, version_of
from spillway.engines.tensors.twins import TENSOR_HOOKS
from spillway.internals.private import storage_address as address
from spillway.units import Bytes

LOOKS: Final = 3
"""Calls of a block in which all that can be reached from it is looked at."""
SMALL: Final[Bytes] = 4096
"""Buffers up to this size are copied until a backward has shown whether it writes to them, as counters of hooks are."""
WAITED: Final = 16
"""By so many calls, as a recurrent block has more of them before its first backward."""
_PLAIN: Final = (Tensor, nn.Parameter)


@final
@dataclass(slots=True, weakref_slot=True, eq=False)
class Snapshot:
    """One block when one of its calls began."""

    training: tuple[bool, ...]
    classes: list[tuple[nn.Module, type]]
    buffers: dict[Attribute, Tensor | None]
    """Copies of those that the forward may change."""
    parameters: list[tuple[Tensor, int, str, nn.Module]]
    differentiable: list[bool]
    """Which of these were."""
    versions: list[tuple[Tensor, int, str, nn.Module]]
    """The other buffers: like parameters not copied, and not to be changed until the block has run again; in the first
    call all of them."""
    seen: SeenAttributes
    reach: Reach | None
    """What lies deeper than attributes, where that is known to change or not known yet."""
    prints: list[tuple[Attribute, Tensor, Fingerprint]] = field(default_factory=list)
    """Of parameters that may be written to in a way that no version shows."""
    copied: dict[Attribute, tuple[Tensor, int]] = field(default_factory=dict)
    """Buffers of which there are copies, with their versions then."""

    def hand_over(self, earlier: Snapshot) -> None:
        """After the forward: a call that began earlier, which wrote to none of these buffers and so copied none of
        them, has the copies of those that were written to now, where they held what it saw."""
        left = []
        for entry in earlier.versions:
            buffer, version, name, module = entry
            mine, before = self.copied.get((module, name), (None, 0))
            written = version_of(buffer) != version or _held(module._buffers, name) is buffer
            if mine is buffer and before == version and written:
                earlier.buffers[module, name] = self.buffers[module, name]
            else:
                left.append(entry)
        earlier.versions = left

    def written(self) -> str:
        """What was written to since and is not put back: the name of a tensor of which there is no copy, or the class
        of a module; empty if there is none."""
        for tensor, version, name, _ in self.parameters:
            if tensor._version != version:
                return name
        for module, kind in self.classes:
            if type(module) is not kind:  # as parametrizations make and unmake
                return f"the class of a {kind.__name__}"
        buffers = ((tensor, version, name) for tensor, version, name, _ in self.versions)
        return next((n for tensor, v, n in (*buffers, *self.seen.versions) if version_of(tensor) != v), "")


class ModuleState:
    """Takes snapshots of a block, and runs its recompute on one.

    The first call copies every buffer and learns which of them the forward changes, by value (`native_batch_norm`
    raises no version counter) and by version (another batch may leave other values). Later calls copy these alone. In
    the first calls it also looks at what lies deeper than attributes, and at the values of parameters; what has changed
    by then is written down, or looked at, at every call.
    """

    def __init__(self, block: nn.Module, copies: Copies, returned_to: set[tuple[type, str]]) -> None:
        self._modules, self._copies = tuple(block.modules()), copies
        self._returned_to = returned_to
        """Buffers of any block that a backward has written to before the block ran again, by class and name."""
        self._attributes = Attributes(self._modules)
        self._watched: dict[tuple[bool, ...], set[Attribute]] = {}
        """Buffers that change, by the training flags of the modules."""
        self._living: dict[tuple[bool, ...], weakref.WeakSet[Snapshot]] = {}
        """Of calls whose backward may still come, by the same flags, where buffers were not copied."""
        self._reached = False
        """A backward has come back to a call, and has written to buffers by then or has not."""
        self._begun = 0
        """Calls so far."""
        self._looks = 0
        self._deep = False
        """Whether something changes that lies deeper than attributes."""
        self._last: Reach | None = None
        """As the last call found it, while that is compared."""
        self._unseen: set[Attribute] = set()
        """Parameters that a call wrote to although their versions do not say so."""
        self._unseen_writes = 0
        """Calls that did."""
        self._kept = ""
        """Why no call of it may run again: so many did, or there is more than can be looked at."""

    def learn_from(self, other: ModuleState) -> None:
        """Take over which buffers of the same block of another model change, and whether anything deeper does."""
        mine = dict(zip(other._modules, self._modules, strict=True))
        for training, watched in other._watched.items():
            self._watched[training] = {(mine[module], name) for module, name in watched}
        self._looks, self._deep, self._kept = other._looks, other._deep, other._kept
        self._unseen = {(mine[module], name) for module, name in other._unseen}
        self._unseen_writes = other._unseen_writes

    def snapshot(self) -> Snapshot:
        """The block now, with the names of all buffers."""
        training = tuple([module.training for module in self._modules])
        watched = self._watched.get(training)
        self._begun += 1
        buffers: dict[Attribute, Tensor | None] = {}
        parameters: list[tuple[Tensor, int, str, nn.Module]] = []
        versions: list[tuple[Tensor, int, str, nn.Module]] = []
        copied: dict[Attribute, tuple[Tensor, int]] = {}
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.append((parameter, parameter._version, name, module))
            for name, buffer in module._buffers.items():
                looked_at = (
                    watched is None or (module, name) in watched or self._may_be_returned_to(module, name, buffer)
                )
                copy = _copied(buffer) if buffer is not None and looked_at else None
                if buffer is not None and copy is not None:
                    copied[module, name] = buffer, version_of(buffer)
                if buffer is None or copy is not None:
                    buffers[module, name] = copy
                if buffer is not None and (watched is None or copy is None):
                    versions.append((buffer, version_of(buffer), name, module))
        classes = [(module, type(module)) for module in self._modules]
        differentiable = [parameter.requires_grad for parameter, *_ in parameters]
        seen_attributes, reach = self._attributes.look(training), self._look_deep()
        snapshot = Snapshot(training, classes, buffers, parameters, differentiable, versions, seen_attributes, reach)
        snapshot.copied = copied
        if not self._kept and (self._unseen or self._looks < LOOKS):
            seen: Seen = {}
            plain = (((module, name), one) for one, _, name, module in parameters if is_plain(one, _PLAIN))
            due = (entry for entry in plain if self._looks < LOOKS or entry[0] in self._unseen)
            snapshot.prints = [(attribute, one, fingerprint(one, seen)) for attribute, one in due]
        return snapshot

    def _look_deep(self) -> Reach | None:
        if not self._deep and self._last is not None:
            self._deep = self._last.changed()  # between two calls
            self._last = None
        if self._kept or (not self._deep and self._looks >= LOOKS):
            return None
        looks = self._looks < LOOKS
        return Reach(reach_of(self._modules), apart=self._modules, lasting=True, copies=self._copies, prints=looks)

    def _learn_deep(self, reach: Reach) -> str:
        """Why this call may not run again."""
        self._looks += 1
        if not self._deep:
            self._deep = reach.changed()
            if not self._deep:
                reach.drop_bytes()
                self._last = reach
        self._kept = self._kept or reach.too_much or reach.overwritten()
        lost = reach.lost()
        return f"it changes {lost}, which cannot be put back" if lost else ""

    def _learn_unseen(self, snapshot: Snapshot) -> str:
        """Why this call may not run again, as one that initializes a parameter by what it is called with."""
        seen: Seen = {}
        unseen = {one for one, parameter, was in snapshot.prints if not torch.equal(was, fingerprint(parameter, seen))}
        snapshot.prints = []
        if not unseen:
            return ""
        why = _uncopied(next(name for _, name in unseen))
        self._unseen |= unseen
        self._looks, self._unseen_writes = 0, self._unseen_writes + 1
        if self._unseen_writes == LOOKS:
            self._kept = why
        return why

    def learn(self, snapshot: Snapshot) -> str:
        """After the forward: what it changed. Why it cannot run again as it ran, as a clause; empty if it can."""
        beyond = self._attributes.learn(snapshot.training, snapshot.seen)
        watched = self._watched.get(snapshot.training)
        if watched is None:
            self._learn_buffers(snapshot)
        self._hand_over(snapshot)
        written = snapshot.written()
        if written and watched is not None:
            for module in self._modules:
                watched.update((module, name) for name in module._buffers if name == written)
        if watched is not None:
            watched.update(one for one, (copied, version) in snapshot.copied.items() if version_of(copied) != version)
        lost = self._learn_deep(snapshot.reach) if snapshot.reach is not None else ""
        unseen = self._learn_unseen(snapshot)
        return _uncopied(beyond or written) if beyond or written else self._kept or unseen or lost

    def _learn_buffers(self, snapshot: Snapshot) -> None:
        written = {(module, name) for one, version, name, module in snapshot.versions if version_of(one) != version}
        copies = snapshot.buffers.items()
        changed = {one for one, before in copies if one in written or _differs(one, before)}
        self._watched[snapshot.training] = set(changed)
        changed |= {one for one, before in copies if before is not None and self._may_be_returned_to(*one, before)}
        snapshot.versions = [entry for entry in snapshot.versions if (entry[3], entry[2]) not in changed]
        snapshot.buffers = {one: before for one, before in copies if one in changed or before is None}
        snapshot.copied = {one: before for one, before in snapshot.copied.items() if one in changed}

    def _may_be_returned_to(self, module: nn.Module, name: str, buffer: Tensor | None) -> bool:
        """Whether it is copied although no forward was seen to change it."""
        if (type(module), name) in self._returned_to:
            return True
        if self._reached or self._begun > WAITED or buffer is None:
            return False
        return buffer.layout is torch.strided and not buffer.is_nested and buffer.nbytes <= SMALL

    def reach(self, snapshot: Snapshot) -> None:
        """A backward has come back to a call: what was written to meanwhile is copied from the next one on."""
        self._reached = True
        copied = ((*both, name, module) for (module, name), both in snapshot.copied.items())
        moved = {(m, n) for one, version, n, m in (*copied, *snapshot.versions) if version_of(one) != version}
        self._watched[snapshot.training].update(moved)
        self._returned_to.update((type(module), name) for module, name in moved)

    def _hand_over(self, snapshot: Snapshot) -> None:
        """Modules that train write to what they only read where they evaluate: the calls before this one can run again
        all the same."""
        for training, living in self._living.items() if snapshot.copied else ():
            for earlier in living if training != snapshot.training else ():
                snapshot.hand_over(earlier)
        if snapshot.versions:
            self._living.setdefault(snapshot.training, weakref.WeakSet()).add(snapshot)

    def fixed(self) -> set[int]:
        """Addresses of the storages of parameters and buffers: dropping a reference to one frees nothing."""
        found: set[int] = set()
        for module in self._modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and torch._C._has_storage(tensor):
                    found.add(address(tensor))
        return found

    @contextlib.contextmanager
    def as_of(self, snapshot: Snapshot) -> Iterator[None]:
        """The block as it was; afterwards it is again as before."""
        flags = tuple([module.training for module in self._modules])
        before = [(one._buffers, dict(one._buffers.items())) for one in self._modules]
        known = {*snapshot.buffers, *((module, name) for _, _, name, module in snapshot.versions)}
        now = None
        if snapshot.reach is not None:
            now = Reach(reach_of(self._modules), apart=self._modules, copies=self._copies, beside=snapshot.reach)
        replaced = _replaced(snapshot)
        parameters = [(module, name, _held(module._parameters, name)) for _, _, name, module in replaced]
        pairs = zip(snapshot.parameters, snapshot.differentiable, strict=True)
        turned = [(one, was) for (one, *_), was in pairs if one.requires_grad is not was and one.is_leaf]
        hooks = [(one, name, hooks_of(one, name)) for one, *_ in snapshot.parameters for name in TENSOR_HOOKS]
        try:
            self._flag(snapshot.training)
            for parameter, was in turned:
                parameter.requires_grad_(was)
            for module in self._modules:
                for name in [name for name in module._buffers if (module, name) not in known]:  # made since
                    del module._buffers[name]
            for (module, name), buffer in snapshot.buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()
            for buffer, _, name, module in snapshot.versions:
                if _held(module._buffers, name) is not buffer:  # another one was assigned since
                    module._buffers[name] = buffer
            for parameter, _, name, module in replaced:
                module._parameters[name] = _leaf(parameter)
            with self._attributes.as_of(snapshot.seen):
                if snapshot.reach is not None:
                    snapshot.reach.restore(substitute=True)
                yield
        finally:
            if now is not None:
                now.restore()
            self._flag(flags)
            for parameter, was in turned:
                parameter.requires_grad_(not was)
            for held, buffers in before:
                refill(held, buffers)
            for module, name, original in parameters:
                module._parameters[name] = original
            for parameter, name, there in hooks:
                put_hooks(parameter, name, there)

    def _flag(self, training: tuple[bool, ...]) -> None:
        for module, flag in zip(self._modules, training, strict=True):
            if module.training != flag:
                module.training = flag


def _copied(buffer: Tensor) -> Tensor | None:
    """None of what torch has no copy of, as of tensors that are quantized by channels with float zero points."""
    try:
        return buffer.detach().clone()
    except RuntimeError:
        return None


def _held(tensors: Any, name: str) -> Any:
    """By name. What a scripted module has of the kind is no dict."""
    return tensors[name] if name in tensors else None  # noqa: SIM401


def refill(held: Any, tensors: dict[str, Tensor | None]) -> None:
    """A module's own parameters or buffers are these and no others."""
    if isinstance(held, dict):
        held.clear()
    for name, tensor in tensors.items():
        held[name] = tensor


def _replaced(snapshot: Snapshot) -> list[tuple[Tensor, int, str, nn.Module]]:
    """Parameters that somebody has put others in the place of, as `torch.func.functional_call` does for a while.

    Not those of other classes: FSDP puts parts and wholes in each other's place itself, also in a second run.
    """
    found = []
    for entry in snapshot.parameters:
        parameter, _, name, module = entry
        now = _held(module._parameters, name)
        if now is not parameter and type(parameter) in _PLAIN and type(now) in _PLAIN:
            found.append(entry)
    return found


def _leaf(tensor: Tensor) -> Any:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def _differs(attribute: Attribute, before: Tensor | None) -> bool:
    module, name = attribute
    now = _held(module._buffers, name)
    if now is None or before is None:
        return now is not before
    if isinstance(module, _NormBase) and module.training:
        return True  # also where this batch left the values as they were, or nothing is tracked for a while
    if not _can_be_compared(now) or now.shape != before.shape or now.dtype != before.dtype:
        return True
    return not torch.equal(_bits(now), _bits(before))


def _can_be_compared(buffer: Tensor) -> bool:
    """Whether its bytes can be looked at and its versions are counted; what cannot is copied at every call."""
    odd = buffer.is_nested or buffer.is_quantized or buffer.is_inference() or buffer.is_conj() or buffer.is_neg()
    return buffer.layout is torch.strided and not odd


def _bits(tensor: Tensor) -> Tensor:
    """The bytes: NaN equals itself, and zero is not minus zero."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _uncopied(name: str) -> str:
    return f"it changes {name}, which was not copied before"
