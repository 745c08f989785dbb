"""Other ways to the bytes of a tensor, taken before a session, in a step and between steps, read and written. Run as a
program, because what is missed here ends a process: it prints which cases went as they do without a session."""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import spillway
from tests.cpu.pressure import PLENTY, Drop, Move, put_away

SIDE = 32

ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "numpy.from_dlpack": numpy.from_dlpack,
    "torch.from_dlpack": torch.from_dlpack,
    "torch.from_dlpack of an alias": lambda t: torch.from_dlpack(t.view(-1)),
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "numpy": lambda t: t.numpy(),
    "numpy of a view": lambda t: t[3:].numpy(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "asarray": lambda t: torch.asarray(t.numpy()),
    "share_memory_": lambda t: t.share_memory_(),
    "untyped_storage": lambda t: t.untyped_storage(),
    "typed storage": lambda t: t._typed_storage()._untyped_storage,
    "part of a storage": lambda t: t.untyped_storage()[: SIDE * SIDE * 4],
    "storage from its weak reference": lambda t: torch.UntypedStorage._new_with_weak_ptr(
        t.untyped_storage()._weak_ref()
    ),
    "detach": lambda t: t.detach(),
    "as_strided": lambda t: torch.as_strided(t, (8, 8), (SIDE, 1)),
    "set_": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (SIDE, SIDE)),  # type: ignore[call-overload]
    "another parameter": lambda t: nn.Parameter(t),
    "view as another type": lambda t: t.view(torch.int32),
}
MOMENTS = ("before the session", "in a step", "between steps")
KINDS = ("parameter", "tensor", "loaded parameter", "loaded tensor")


def loaded(tensor: Tensor) -> Tensor:
    """The same from a file: `torch.load` makes storages that cannot be resized."""
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    again: Tensor = torch.load(file)
    return again


def content(alias: Any) -> bytes:
    if isinstance(alias, Tensor):
        return bytes(alias.detach().contiguous().view(torch.uint8).flatten().tolist())
    if isinstance(alias, torch.UntypedStorage):
        return ctypes.string_at(alias.data_ptr(), alias.nbytes())
    return bytes(alias.tobytes())


def write(alias: Any) -> None:
    if isinstance(alias, Tensor):
        alias.detach().fill_(1)
    elif isinstance(alias, memoryview):
        alias[0, 0] = 1
    else:
        alias.fill(1) if isinstance(alias, numpy.ndarray) else alias.fill_(1)


def ran(make: Callable[[Tensor], Any], moment: str, kind: str, *, managed: bool) -> list[Any]:
    """All that was read on the way, from the tensor and from its alias."""
    torch.manual_seed(0)
    t, parameter = torch.randn(SIDE, SIDE), "parameter" in kind
    t = loaded(t) if "loaded" in kind else t
    t = nn.Parameter(t) if parameter else t
    found: list[Any] = []
    alias = make(t.detach() if parameter else t) if moment == MOMENTS[0] else None
    model = nn.ParameterList([t]) if parameter else nn.Linear(2, 2)
    with (
        torch.no_grad(),
        spillway.manage(model, budget=PLENTY, method="lru") if managed else contextlib.nullcontext() as memory,
    ):

        @contextlib.contextmanager
        def step() -> Iterator[None]:
            with memory.step(None if parameter else t) if managed else contextlib.nullcontext():
                yield

        def leave() -> None:
            if managed:
                put_away(memory, t, Drop)
                put_away(memory, t, Move)

        def use() -> None:
            leave()
            found.append(content(alias))
            t.add_(1)
            leave()
            found.append(content(alias))
            leave()
            write(alias)
            found.append(content(t))
            leave()
            found.append((t * 2).sum().item())

        with step():
            t.sum()
            leave()
            if moment == MOMENTS[1]:
                alias = make(t.detach() if parameter else t)
            if moment != MOMENTS[2]:
                use()
            leave()
        if moment == MOMENTS[2]:
            alias = make(t.detach() if parameter else t)
        found += [content(alias), content(t)]
        t.add_(1)
        found.append(content(alias))
        write(alias)
        with step():
            use()
    found += [content(alias), content(t)]
    write(alias)
    found.append(content(t))
    return found


def main() -> None:
    for name, moment, kind in product(ALIASES, MOMENTS, KINDS):
        plain, managed = (ran(ALIASES[name], moment, kind, managed=managed) for managed in (False, True))
        print(name, moment, kind, plain == managed, flush=True)


if __name__ == "__main__":
    main()
