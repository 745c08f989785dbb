"""What a random small program consists of, and everything that it can reach while it runs.

An instruction holds numbers only. What they mean is decided when it runs, from what is alive then: number 7 of the
float tensors, counted around. So every list of instructions is a program, and a failing one shrinks by leaving
instructions out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from spillway.errors import SpillwayError
from tests.cpu.bits import address_of, bytes_of, storage_of

MOST_TENSORS = 18
"""So many tensors are alive by name at a time; then the one that a program has held longest dies."""

LARGEST: int = 128 << 10
"""Results with more bytes than this die at once."""


class Instruction(NamedTuple):
    """What to do, and three numbers to choose the operands by."""

    name: str
    a: int
    b: int
    c: int


class Part(NamedTuple):
    """One step, and what happens after it, outside the engine's sight."""

    inside: tuple[Instruction, ...]
    outside: tuple[Instruction, ...]


class Program(NamedTuple):
    seed: int
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        lines = [f"Program(seed={self.seed}, parts=("]
        for part in self.parts:
            lines += ["    Part("]
            lines += [f"        ({''.join(f'{tuple(i)!r}, ' for i in instructions)})," for instructions in part]
            lines += ["    ),"]
        return "\n".join([*lines, "))"])


Action = Callable[["World", Instruction], Any]
ACTIONS: dict[str, tuple[int, Action]] = {}
"""Every instruction: how often programs use it, and what it does."""


def action(weight: int) -> Callable[[Action], Action]:
    def register(function: Action) -> Action:
        ACTIONS[function.__name__] = (weight, function)
        return function

    return register


@final
class World:
    """Everything that a running program can reach."""

    def __init__(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self.own = [torch.Generator().manual_seed(seed + number) for number in (1, 2)]
        self.tensors: list[Tensor] = []
        self.notes: list[str] = []
        self.rest: list[Any] = []
        """Things that only have to stay alive."""
        self.grad = True
        self.autocast = False
        self.network = _network()
        self.optimizer = _optimizer(seed % 6, self.network.parameters())

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """What a session would know by name at the start of a step."""
        yield from (("parameter", parameter) for parameter in self.network.parameters())
        yield from (("buffer", buffer) for buffer in self.network.buffers())

    def run(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            with torch.set_grad_enabled(self.grad), torch.autocast("cpu", enabled=self.autocast, cache_enabled=False):
                self._run_one(instruction)

    def _run_one(self, instruction: Instruction) -> None:
        try:
            self.keep(ACTIONS[instruction.name][1](self, instruction))
        except SpillwayError:
            raise
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            # Which view a reshape was is not the same under any dispatch mode.
            text = str(error).replace("ReshapeAlias", "View").replace("View is a view", "a view")
            self.note(instruction.name, type(error).__name__, text[:40])

    def keep(self, made: Any) -> None:
        for tensor in [made] if isinstance(made, Tensor) else made or ():
            if tensor.layout is torch.strided and storage_of(tensor).nbytes() <= LARGEST:
                self.tensors.append(tensor)
        del self.tensors[: max(len(self.tensors) - MOST_TENSORS, 0)]

    def note(self, *facts: Any) -> None:
        self.notes.append(" ".join(map(str, facts)))

    def pick(self, number: int, fits: Callable[[Tensor], bool] = lambda tensor: True) -> Tensor:
        """One of the living tensors that fit; a new one if none does."""
        fitting = [tensor for tensor in self.tensors if fits(tensor)]
        return fitting[number % len(fitting)] if fitting else torch.full((32, 32), 0.5)

    def floats(self, number: int, least: int = 2) -> Tensor:
        """A float tensor of at least so many dimensions, with elements."""
        return self.pick(number, lambda t: t.dtype == torch.float32 and t.dim() >= least and t.numel() > 0)

    def like(self, number: int, tensor: Tensor) -> Tensor:
        """Another tensor of the same shape, or the same one."""
        return self.pick(number, lambda t: t.shape == tensor.shape and t.dtype == tensor.dtype)

    def generator(self, number: int) -> torch.Generator | None:
        return (None, *self.own)[number % 3]

    def state(self) -> dict[str, Any]:
        """All that has to be the same with and without the engine, bit by bit."""
        found = {f"tensor {number}": tensor for number, tensor in enumerate(self.tensors)}
        found |= dict(self.network.state_dict(keep_vars=True))
        found |= {f"gradient of {name}": _gradient(tensor) for name, tensor in found.items()}
        for number, states in enumerate(self.optimizer.state.values()):
            found |= {f"{name} {number}": value for name, value in states.items()}
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        places: dict[int, int] = {}
        storages = {name: places.setdefault(address_of(tensor), len(places)) for name, tensor in tensors.items()}
        generators = [torch.default_generator, *self.own]
        return {
            **{name: (*_facts(tensor), storages[name]) for name, tensor in tensors.items()},
            "versions": {name: tensor._version for name, tensor in tensors.items()},
            **{f"generator {number}": _bytes(g.get_state()) for number, g in enumerate(generators)},
            "notes": self.notes,
        }


def _gradient(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view whose base was written in a way that autograd cannot follow
        return None


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.requires_grad,
        tensor.is_conj(), tensor.is_neg(), _bytes(tensor),
    )  # fmt: skip


def _bytes(tensor: Tensor) -> bytes:
    """The elements in order, read as plain code reads them, while storages may still be absent."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return bytes_of(storage_of(plain.clone(memory_format=torch.contiguous_format)))


def _network() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "linear": nn.Linear(64, 64),
            "wide": nn.BatchNorm1d(1024, momentum=0.3),
            "narrow": nn.BatchNorm1d(64),
            "table": nn.Embedding(40, 64),
            "convolution": nn.Conv2d(1, 2, 3, padding=1),
            "recurrent": nn.LSTM(32, 32),
        }
    )


def _optimizer(kind: int, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if kind < 2:
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=kind == 0)
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=kind == 2, fused=kind in (3, 4), amsgrad=kind == 4)
