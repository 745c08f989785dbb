"""What Python code has attached to the tensors that a block is called with (`x.mask = mask`), and whether it reads it.

Nobody else may hold that when the block runs again, and it may be large, so that what the first run did not read is not
kept. To see what it reads, a descriptor of the name stands on `torch.Tensor` while the block runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn, TypeAlias, final

import torch

from spillway.errors import RecomputeError
from spillway.internals.locks import renew_in_children

Read: TypeAlias = tuple[int, str]
"""The id of a tensor, and the name of one of its attributes."""


@final
class Unread:
    """In the place of what the first run of a block did not read. Whoever does anything with it has read it in a way
    that is not seen, such as `vars(tensor)`."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RecomputeError(
            "A block runs again and reads what is attached to a tensor that it was called with, which was not seen to "
            "be read when it ran first, and is gone; read it as an attribute (x.name), or keep this block."
        )

    __getattr__ = __getitem__ = __call__ = __bool__ = __iter__ = __len__ = __torch_function__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __float__ = __int__ = __index__ = __contains__ = __eq__ = _refuse


UNREAD: Final = Unread()


@final
class _Seen:
    """In front of attributes of one name: a descriptor that has a setter comes before what the instance holds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by: list[set[Read]] = []
        """The runs that want to know."""

    def __get__(self, tensor: Any, kind: type) -> Any:
        if tensor is None or self.name not in vars(tensor):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        for read in self.by:
            read.add((id(tensor), self.name))
        return vars(tensor)[self.name]

    def __set__(self, tensor: Any, value: Any) -> None:
        vars(tensor)[self.name] = value

    def __delete__(self, tensor: Any) -> None:
        if vars(tensor).pop(self.name, self) is self:
            raise AttributeError(self.name)


@final
class _Watched:
    """The names that are watched now, in whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        renew_in_children(self, "_lock")

    def begin(self, name: str, read: set[Read]) -> None:
        with self._lock:
            seen = vars(torch.Tensor).get(name)
            if not isinstance(seen, _Seen):
                seen = _Seen(name)
                setattr(torch.Tensor, name, seen)
            seen.by.append(read)

    def end(self, name: str, read: set[Read]) -> None:
        with self._lock:
            seen: _Seen = vars(torch.Tensor)[name]
            seen.by[:] = [one for one in seen.by if one is not read]
            if not seen.by:
                delattr(torch.Tensor, name)


_WATCHED: Final = _Watched()


@contextlib.contextmanager
def reading(names: Iterable[str]) -> Iterator[set[Read]]:
    """What is read within of the attributes of these names."""
    read: set[Read] = set()
    with contextlib.ExitStack() as stack:
        for name in names:
            _WATCHED.begin(name, read)
            stack.callback(_WATCHED.end, name, read)
        yield read


def may_be_watched(name: str) -> bool:
    """Whether no tensor has an attribute of this name but what is attached to it."""
    return not hasattr(torch.Tensor, name)  # one that is watched has none on the class either
