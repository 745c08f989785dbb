"""Results of expensive ops, kept through a second run of their block.

NOTE [Selecting]. A dispatch mode stands around both runs of a block under a selective action. In the first it notes the
results of the ops that are selected; in the second it answers with them, and the kernel does not run. It stands below
autograd: the nodes of the second run save what they save, in the same order, with no need to know where a skipped
result was going to be saved. What keeps this exact:

 1. Selected ops are numbered in the order in which they run, and no others, so that a cast which autocast has cached
    in one of the runs shifts nothing. A result is given only to the same op on arguments that look the same; after the
    first that does not, every op of that run is run.
 2. An op that draws random numbers is never selected: what follows would see another stream. Attention with dropout
    draws, attention without does not.
 3. An op that writes to an argument, or returns a view of one, is never selected.
 4. A result that the block writes to after the op (`relu_`) is not kept in this call, and a copy of it in the next:
    the mode sees every write. If anybody writes to it after the block has ended the op runs again: version counters
    tell, also those of tensors that share bytes without saying so (`_unsafe_view`).
 5. Whatever is not kept runs: a result is never needed.
 6. Compiled kernels write to what ops return, and no mode sees it. So before anything runs compiled, the modes that
    are open in its thread let go of what they have, and pass everything: the block is recomputed in whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self, TypeAlias, final

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from spillway.engines.blocks.homes import Homes
from spillway.engines.blocks.saved import FrozenTensor
from spillway.engines.tensors.cpu_machine import tensors_of
from spillway.engines.tensors.torch_compile import asked_before, uncompiled
from spillway.internals.private import counted_storage, unheard_by_function_modes, unheard_by_modes
from spillway.internals.private import storage_address as address
from spillway.methods.actions import EXPENSIVE_NAMES
from spillway.units import Bytes

Looks: TypeAlias = tuple[Any, ...]


def _expensive() -> Mapping[Any, int | None]:
    packets = (getattr(torch.ops.aten, name, None) for name in EXPENSIVE_NAMES)
    ops = (getattr(packet, "default", None) for packet in packets)
    return MappingProxyType({op: _dropout(op) for op in ops if op is not None})


def _dropout(op: Any) -> int | None:
    """Where among the arguments the probability stands with which an op drops."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


EXPENSIVE: Final = _expensive()
"""The ops of these names that this torch has."""


_UNDECLARED: Final = frozenset(
    getattr(packet, overload)
    for packet in map(torch.ops.aten.__getattr__, ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"))
    for overload in packet.overloads()  # type: ignore[no-untyped-call]
)
"""They return views of their first argument without saying so."""


@final
class Result:
    """What one selected op returned."""

    __slots__ = ("kept", "looks", "made", "op", "twins")

    def __init__(self, op: Any, looks: Looks, made: Any, kept: list[FrozenTensor]) -> None:
        self.op = op
        self.looks = looks
        self.made = made
        """As the op returned it, each tensor replaced by its place in `kept`."""
        self.kept = kept
        self.twins: list[FrozenTensor] = []
        """Share bytes with what is kept, and no version counter."""

    @property
    def copied(self) -> bool:
        """Whether nobody else can write to what is kept."""
        return all(one.copied for one in self.kept)

    def again(self) -> Any:
        """What the op would return; None if that is not known any more."""
        if not self.copied and any(one.moved_on for one in (*self.kept, *self.twins)):
            return None
        with _versions_shared():
            return _replaced(self.made, _Placeholder, lambda one: self.kept[one.number].thaw())


@final
class Selection:
    """What the selected ops of one call of a block returned, by their numbers. To `overwritten`, calls and numbers of
    results that are known to be written to, it adds."""

    def __init__(self, call: int, overwritten: set[tuple[int, int]], homes: Homes | None = None) -> None:
        self.results: list[Result | None] = []
        self._call, self._overwritten, self._homes = call, overwritten, homes
        self._numbers: dict[int, int] = {}
        """Results by the storages that they hold."""

    @property
    def kept(self) -> list[FrozenTensor]:
        return [one for result in self.results if result is not None for one in result.kept]

    @unheard_by_modes
    def note(self, op: Any, looks: Looks, made: Any, given: list[Tensor]) -> None:
        """An op has run for the first time."""
        found = tensors_of(made)
        number = len(self.results)
        self.results.append(None)
        if not all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in found):
            return
        addresses = {address(tensor) for tensor in found}
        if addresses & {address(tensor) for tensor in given if torch._C._has_storage(tensor)}:
            return  # rule 3: some do so without saying it
        copied = (self._call, number) in self._overwritten
        with _versions_shared():
            kept = [FrozenTensor(tensor, {} if copied else None, self._homes) for tensor in found]
        for one in kept:
            one.written = copied
        numbers = iter(range(len(found)))
        self.results[number] = Result(op, looks, _replaced(made, Tensor, lambda _: _Placeholder(next(numbers))), kept)
        self._numbers.update(dict.fromkeys(addresses, number))

    def wrote(self, tensor: Tensor) -> None:
        """The block writes to a tensor (rule 4)."""
        number, result = self._of(tensor)
        if result is not None and not result.copied:
            self._overwritten.add((self._call, number))
            self.results[number] = None

    @unheard_by_modes
    def shares(self, tensor: Tensor, twins: list[Tensor]) -> None:
        """An op has returned other tensors over the bytes of one."""
        _, result = self._of(tensor)
        if result is not None:
            with _versions_shared():
                result.twins += [FrozenTensor(twin, None) for twin in twins]

    def settle(self) -> None:
        """The block has ended: hold no bytes but those that are kept."""
        for result in self.results:
            for twin in result.twins if result is not None else ():
                twin.let_go()

    def _of(self, tensor: Tensor) -> tuple[int, Result | None]:
        number = self._numbers.get(address(tensor), -1) if torch._C._has_storage(tensor) else -1
        return number, self.results[number] if number >= 0 else None

    def nbytes(self, shared: set[int]) -> Bytes:
        """Bytes of the storages that are kept, each once, but for those that others hold."""
        held = [one.alias for one in self.kept if one.alias is not None]
        found = {address(tensor): counted_storage(tensor).nbytes() for tensor in held}
        return sum(nbytes for key, nbytes in found.items() if key not in shared)


class AbstractSelecting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What both modes share: which ops are selected."""

    supports_higher_order_operators = True

    def __init__(self, selection: Selection) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.selection = selection
        self.count = 0
        """How many ops were selected."""
        self.left = False
        """Whether something compiled came (rule 6)."""
        self._asked = asked_before(_leave)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that costs time with every op

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled in a block runs compiled."""
        return True

    def __enter__(self) -> Self:
        self._asked.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        finally:
            self._asked.__exit__(None, None, None)

    def leave(self) -> None:
        """Let go of everything, and look at nothing any more (rule 6)."""
        self.left = True
        self.selection.results.clear()
        handler: Any = type(self).__torch_dispatch__
        uncompiled(handler, handler.__wrapped__)

    def leaves(self, op: Any) -> bool:
        """Whether an op is none that can be looked at."""
        if isinstance(op, HigherOrderOperator):
            self.leave()
        return self.left

    def selects(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what an op returns is to be kept."""
        if op not in EXPENSIVE:
            return False
        place = EXPENSIVE[op]
        if place is None:
            return True
        return not (args[place] if len(args) > place else kwargs.get("dropout_p", 0.0))


def _leave() -> bool:
    """Something is about to run compiled in this thread, and may."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, AbstractSelecting):
            mode.leave()
    return True


@final
class Keeping(AbstractSelecting):  # type: ignore[no-untyped-call]
    """Around the first run."""

    @unheard_by_function_modes
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and note what it returns and what it writes to."""
        kwargs = kwargs or {}
        if self.left or self.leaves(op):
            return op(*args, **kwargs)
        made = op(*args, **kwargs)
        written = _written(op)
        if written:
            for name, place in written:
                for tensor in tensors_of(args[place] if place < len(args) else kwargs.get(name)):
                    self.selection.wrote(tensor)
        elif op in _UNDECLARED:
            self.selection.shares(args[0], tensors_of(made))
        elif self.selects(op, args, kwargs):
            self.count += 1
            self.selection.note(op, _looks(args, kwargs), made, tensors_of((*args, *kwargs.values())))
        return made


@final
class Supplying(AbstractSelecting):  # type: ignore[no-untyped-call]
    """Around the second run."""

    def __init__(self, selection: Selection) -> None:
        super().__init__(selection)
        self._astray = False
        self.skipped = 0
        """Ops that did not run."""

    @unheard_by_function_modes
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer with what was kept, or run the op."""
        kwargs = kwargs or {}
        if self.left or self.leaves(op):
            return op(*args, **kwargs)
        if self.selects(op, args, kwargs):
            made = self._kept(op, args, kwargs)
            if made is not None:
                self.skipped += 1
                return made
        return op(*args, **kwargs)

    @unheard_by_modes
    def _kept(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, results = self.count, self.selection.results
        self.count += 1
        result = results[number] if number < len(results) else None
        if self._astray or result is None:
            return None
        self._astray = result.op is not op or result.looks != _looks(args, kwargs)
        return None if self._astray else result.again()


@final
class _Placeholder:
    """Stands for a tensor in what an op returned."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _looks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Looks:
    """What can be seen of arguments without looking at their content; which parameters they are."""
    return tuple(_look(value) for value in (*args, *sorted(kwargs.items())))


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        which = address(value) if isinstance(value, nn.Parameter) and torch._C._has_storage(value) else None
        return value.shape, value.dtype, value.stride() if value.layout is torch.strided else None, which
    if isinstance(value, list | tuple):
        return tuple(_look(item) for item in value)
    return value if isinstance(value, int | float | bool | str | None | torch.dtype) else repr(value)


def _replaced(made: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    if isinstance(made, kind):
        return replace(made)
    if isinstance(made, list | tuple):
        return type(made)(_replaced(item, kind, replace) for item in made)
    return made


@functools.cache
def _written(op: Any) -> tuple[tuple[str, int], ...]:
    """Names and places of the arguments that an op writes to."""
    arguments = enumerate(op._schema.arguments)
    return tuple(
        (one.name, place) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write
    )


def _versions_shared() -> Any:
    """Inside a dispatch mode: an alias of a tensor shares its version counter, as it does outside."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
