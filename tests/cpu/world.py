"""What a random small program consists of, and everything that it can reach while it runs.

An instruction holds numbers only. What they mean is decided when it runs, from what is alive then: number 7 of the
float tensors, counted around. So every list of instructions is a program, and a failing one shrinks by leaving
instructions out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from spillway.engines.tensors.calls import inner_tensors
from spillway.errors import SpillwayError
from tests.cpu.bits import address_of, bytes_of, storage_of, strided

MOST_TENSORS = 18
"""So many tensors are alive by name at a time; then the one that a program has held longest dies."""

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (*FLOATS, torch.complex64, torch.complex128)

IN_A_ROW = 4
"""So many steps in a row are of one kind to a planner."""

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
        self.kept: list[Tensor] = []
        """What is carried from step to step."""
        self.odd: list[Tensor] = []
        """Sparse and nested tensors."""
        self.handles: list[Any] = []
        """Of hooks."""
        self.aliases: list[Any] = []
        """Other ways to the bytes of tensors."""
        self.averaged: Any = None
        self.begun = 0
        """Instructions that have begun, those within others too."""
        self.begins: Callable[[], None] = lambda: None
        """Called when one does."""
        self.grad = True
        self.autocast: torch.dtype | None = None
        self.network = _network(seed)
        dense = [parameter for name, parameter in self.network.named_parameters() if "sparse" not in name]
        self.optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)](dense)
        self.table = cast(nn.Embedding, self.network["sparse table" if "sparse table" in self.network else "table"])
        self.sparse_optimizer = torch.optim.SparseAdam([self.table.weight]) if self.table.sparse else self.optimizer

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """What a session would know by name at the start of a step."""
        yield from (("parameter", parameter) for parameter in self.network.parameters())
        yield from (("buffer", buffer) for buffer in self.network.buffers())

    def run(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            narrow = torch.autocast("cpu", self.autocast, self.autocast is not None, cache_enabled=False)
            with torch.set_grad_enabled(self.grad), narrow:
                self.run_one(instruction)

    def run_one(self, instruction: Instruction) -> None:
        """What goes wrong in it is noted: it has to go wrong in the same way under the engine."""
        self.begun += 1
        self.begins()
        try:
            self.keep(ACTIONS[instruction.name][1](self, instruction))
        except SpillwayError:
            raise
        except Exception as error:
            # Which view a reshape was is not the same under any dispatch mode.
            text = str(error).replace("ReshapeAlias", "View").replace("View is a view", "a view")
            self.note(instruction.name, type(error).__name__, text[:40])

    def keep(self, made: Any) -> None:
        for tensor in [made] if isinstance(made, Tensor) else made or ():
            if strided(tensor) and not tensor.is_nested and storage_of(tensor).nbytes() <= LARGEST:
                self.tensors.append(tensor)
        del self.tensors[: max(len(self.tensors) - MOST_TENSORS, 0)]

    def note(self, *facts: Any) -> None:
        self.notes.append(" ".join(map(str, facts)))

    def pick(self, number: int, fits: Callable[[Tensor], bool] = lambda tensor: True) -> Tensor:
        """One of the living tensors that fit; a new one if none does."""
        fitting = [tensor for tensor in (*self.tensors, *self.kept) if fits(tensor)]
        return fitting[number % len(fitting)] if fitting else torch.full((32, 32), 0.5)

    def floats(self, number: int, least: int = 2) -> Tensor:
        """A float tensor of at least so many dimensions, with elements; now and then a narrow or a wide one."""
        kinds = (torch.float32,) if number % 4 else FLOATS
        return self.pick(number // 4, lambda t: t.dtype in kinds and t.dim() >= least and t.numel() > 0)

    def numbers(self, number: int, least: int = 2) -> Tensor:
        """The same, complex ones included."""
        kinds = COMPLEX if number % 5 == 0 else FLOATS
        return self.pick(number // 5, lambda t: t.dtype in kinds and t.dim() >= least and t.numel() > 0)

    def like(self, number: int, tensor: Tensor) -> Tensor:
        """Another tensor of the same shape, or the same one."""
        return self.pick(number, lambda t: t.shape == tensor.shape and t.dtype == tensor.dtype)

    def generator(self, number: int) -> torch.Generator | None:
        return (None, *self.own)[number % 3]

    def state(self) -> dict[str, Any]:
        """All that has to be the same with and without the engine, bit by bit."""
        found = {f"tensor {number}": tensor for number, tensor in enumerate(self.tensors)}
        found |= {f"kept {number}": tensor for number, tensor in enumerate(self.kept)}
        found |= dict(self.network.state_dict(keep_vars=True))
        found |= {f"gradient of {name}": _gradient(tensor) for name, tensor in found.items()}
        for number, states in enumerate((*self.optimizer.state.values(), *self.sparse_optimizer.state.values())):
            found |= {f"{name} {number}": value for name, value in states.items()}
        if self.averaged is not None:
            found |= {f"average of {name}": value for name, value in self.averaged.state_dict().items()}
        odd = {f"odd {number}": tensor for number, tensor in enumerate(self.odd)}
        odd |= {name: value for name, value in found.items() if isinstance(value, Tensor) and not strided(value)}
        for name, value in odd.items():
            found |= {f"{name}, part {number}": part for number, part in enumerate(inner_tensors(value))}
        tensors = {name: value for name, value in found.items() if strided(value) and not value.is_nested}
        places: dict[int, int] = {}
        storages = {name: places.setdefault(address_of(tensor), len(places)) for name, tensor in tensors.items()}
        generators = [torch.default_generator, *self.own]
        return {
            **{name: (*_facts(tensor), storages[name]) for name, tensor in tensors.items()},
            **{f"kind of {name}": _kind(value) for name, value in odd.items()},
            "versions": {name: _version(tensor) for name, tensor in tensors.items()},
            **{f"generator {number}": _bytes(g.get_state()) for number, g in enumerate(generators)},
            "notes": self.notes,
        }


def _gradient(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # a view whose base was written in a way that autograd cannot follow
        return None


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors have none
        return -1


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.layout, tensor.dtype, tensor.requires_grad, None if tensor.is_nested else tuple(tensor.shape)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.requires_grad,
        tensor.is_conj(), tensor.is_neg(), _bytes(tensor),
    )  # fmt: skip


def _bytes(tensor: Tensor) -> bytes:
    """The elements in order, read as plain code reads them, while storages may still be absent."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    plain = tensor.detach().resolve_conj().resolve_neg()
    return bytes_of(storage_of(plain.clone(memory_format=torch.contiguous_format)))


_MODULES: dict[str, Callable[[], nn.Module]] = {
    "both ways": lambda: nn.LSTM(64, 32, num_layers=2, bidirectional=True, dropout=0.1),
    "gru": lambda: nn.GRU(64, 32, bidirectional=True),
    "plain recurrence": lambda: nn.RNN(64, 32, nonlinearity="relu"),
    "cell": lambda: nn.LSTMCell(64, 64),
    "gru cell": lambda: nn.GRUCell(64, 64),
    "attention": lambda: nn.MultiheadAttention(64, 4, dropout=0.1),
    "encoder": lambda: nn.TransformerEncoderLayer(64, 4, 96, dropout=0.1),
    "decoder": lambda: nn.TransformerDecoderLayer(64, 2, 64),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 48)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)),
    "old norm": lambda: nn.utils.spectral_norm(nn.Linear(64, 64)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)),
    "sparse table": lambda: nn.Embedding(40, 64, sparse=True),
    "bag": lambda: nn.EmbeddingBag(40, 64, mode="max"),
    "transposed": lambda: nn.ConvTranspose2d(1, 2, 3, stride=2),
    "instance norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "bilinear": lambda: nn.Bilinear(64, 64, 8),
    "chain": lambda: nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(inplace=True)
    ),
    "layer norm": lambda: nn.LayerNorm(64),
    "rms": lambda: nn.RMSNorm(64),
}  # fmt: skip


def _network(seed: int) -> nn.ModuleDict:
    """The same few modules always, and some more."""
    usual = {
        "linear": nn.Linear(64, 64),
        "wide": nn.BatchNorm1d(1024, momentum=0.3),
        "narrow": nn.BatchNorm1d(64),
        "table": nn.Embedding(40, 64),
        "convolution": nn.Conv2d(1, 2, 3, padding=1),
        "recurrent": nn.LSTM(32, 32),
    }
    return nn.ModuleDict(usual | {name: _MODULES[name]() for name in random.Random(seed).sample(list(_MODULES), 6)})


_O = torch.optim
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: _O.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
    lambda p: _O.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    lambda p: _O.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    lambda p: _O.AdamW(p, lr=1e-2, foreach=False),
    lambda p: _O.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    lambda p: _O.AdamW(p, lr=1e-2, fused=True),
    lambda p: _O.Adam(p, lr=1e-2, fused=True, amsgrad=True),
    lambda p: _O.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    lambda p: _O.Adagrad(p, lr=1e-2),
    lambda p: _O.Adagrad(p, lr=1e-2, fused=True),
    lambda p: _O.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    lambda p: _O.RMSprop(p, lr=1e-3, foreach=True),
    lambda p: _O.NAdam(p, lr=1e-2),
    lambda p: _O.RAdam(p, lr=1e-2, foreach=True),
    lambda p: _O.Adadelta(p, foreach=False),
    lambda p: _O.Adamax(p, foreach=True),
    lambda p: _O.ASGD(p, foreach=False),
    lambda p: _O.Rprop(p, lr=1e-3),
    lambda p: _O.Adafactor(p),
    lambda p: _O.AdamW([{"params": p[:3]}, {"params": p[3:], "lr": 1e-3}], lr=torch.tensor(1e-2), foreach=False),
)
