"""What DTR's runtime is given to run: an operator log as a graph of tensors and storages, and the order of events.

M. Kirisame et al., "Dynamic Tensor Rematerialization", arXiv:2006.09616, appendix C.1. A mutation is rewritten as
the paper does it: the operator makes new tensors of the bytes of those that it writes to, and the names move on to
them. What still has a name when the log is over has to be there in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeAlias, final

from benchmarks.record import frozen
from spillway.errors import FileFormatError
from spillway.ir.dtr_log import Annotate, Call, Constant, Copy, CopyFrom, Instruction, Mutate, Release
from spillway.units import Bytes

TensorId: TypeAlias = int
"""Index of a tensor in its program."""


@final
class Event(Enum):
    """What happens next in a program."""

    RUN = "run"
    """An operator runs for the first time; its results have one reference each."""
    GET = "get"
    """A tensor gets one more reference."""
    RELEASE = "release"
    """A tensor loses one."""
    PIN = "pin"
    """A tensor has to be there, and its storage stays from here on."""


@frozen
class Operator:
    """One call of an operator."""

    nanoseconds: int
    """How long it takes."""
    reads: tuple[TensorId, ...]
    """The tensors it is given, as often as it is given them."""
    creates: tuple[TensorId, ...]
    """The tensors it returns."""
    nbytes: Bytes
    """Bytes of the storages that it creates."""


@frozen
class Tensor:
    """A tensor, or a view of one."""

    operator: int
    """Index of the operator that makes it."""
    storage: int
    """Index of the storage it looks into."""
    nbytes: Bytes
    """Bytes that making it takes: 0 for a view."""


@frozen
class Program:
    """An operator log, ready to be run under any budget by any heuristic."""

    operators: tuple[Operator, ...]
    """Every operator, constants included; each runs once, and then as often as it is recomputed."""
    tensors: tuple[Tensor, ...]
    """Every tensor."""
    storages: tuple[Bytes, ...]
    """Bytes of every storage."""
    events: tuple[tuple[Event, int], ...]
    """What happens, with the index of an operator (RUN) or of a tensor."""

    @property
    def nanoseconds(self) -> int:
        """Time of all operators, each run once."""
        return sum(operator.nanoseconds for operator in self.operators)


def program_of(instructions: Sequence[Instruction]) -> Program:
    """The program that a log tells. What stands before its START is left out.

    Raises:
        FileFormatError: A name is used that the log does not know, or given a second time.
    """
    starts = [place for place, told in enumerate(instructions) if isinstance(told, Annotate) and told.text == "START"]
    writer = _Writer()
    for told in instructions[starts[0] + 1 if starts else 0 :]:
        writer.write(told)
    return writer.finish()


@final
class _Writer:
    """Builds a program, instruction by instruction."""

    def __init__(self) -> None:
        self._operators: list[Operator] = []
        self._tensors: list[Tensor] = []
        self._storages: list[Bytes] = []
        self._events: list[tuple[Event, int]] = []
        self._named: dict[str, TensorId] = {}
        self._references: list[int] = []

    def write(self, told: Instruction) -> None:
        match told:
            case Constant():
                (tensor,) = self._run((), 0, [(told.nbytes, None)])
                self._name(told, told.name, tensor)
                self._events.append((Event.PIN, tensor))
            case Call():
                reads = [self._tensor(told, name) for name in told.args]
                made = self._run(reads, told.nanoseconds, [(result.nbytes, result.alias) for result in told.results])
                for result, tensor in zip(told.results, made, strict=True):
                    self._name(told, result.name, tensor)
            case Mutate():
                self._mutate(told)
            case Copy():
                self._name(told, told.destination, self._tensor(told, told.source))
                self._refer(self._named[told.destination])
            case CopyFrom():
                tensor = self._tensor(told, told.source)
                self._release(self._tensor(told, told.destination))
                self._named[told.destination] = tensor
                self._refer(tensor)
            case Release():
                if told.name in self._named:  # some logs release what they never named
                    self._release(self._named[told.name])
            case Annotate():
                pass

    def finish(self) -> Program:
        """Everything that is referred to has to come back, in the order in which names were first given."""
        for tensor in self._named.values():
            if self._references[tensor] > 0:
                self._events.append((Event.PIN, tensor))
        return Program(
            operators=tuple(self._operators), tensors=tuple(self._tensors), storages=tuple(self._storages),
            events=tuple(self._events),
        )  # fmt: skip

    def _mutate(self, told: Mutate) -> None:
        reads = [self._tensor(told, name) for name in told.args]
        sizes = [self._storages[self._tensors[reads[place]].storage] for place in told.mutated]
        made = self._run(reads, told.nanoseconds, [(nbytes, None) for nbytes in sizes])
        for place, tensor in zip(told.mutated, made, strict=True):
            old, self._named[told.args[place]] = self._named[told.args[place]], tensor
            self._release(old)

    def _run(
        self, reads: Iterable[TensorId], nanoseconds: int, results: Iterable[tuple[Bytes, int | None]]
    ) -> tuple[TensorId, ...]:
        reads, first = tuple(reads), len(self._tensors)
        for nbytes, alias in results:
            if alias is None:
                self._storages.append(nbytes)
            storage = len(self._storages) - 1 if alias is None else self._tensors[reads[alias]].storage
            own = nbytes if alias is None else 0
            self._tensors.append(Tensor(operator=len(self._operators), storage=storage, nbytes=own))
            self._references.append(1)
        creates = tuple(range(first, len(self._tensors)))
        nbytes = sum(self._tensors[tensor].nbytes for tensor in creates)
        self._events.append((Event.RUN, len(self._operators)))
        self._operators.append(Operator(nanoseconds=nanoseconds, reads=reads, creates=creates, nbytes=nbytes))
        return creates

    def _refer(self, tensor: TensorId) -> None:
        self._references[tensor] += 1
        self._events.append((Event.GET, tensor))

    def _release(self, tensor: TensorId) -> None:
        self._references[tensor] -= 1
        self._events.append((Event.RELEASE, tensor))

    def _name(self, told: Instruction, name: str, tensor: TensorId) -> None:
        if name in self._named:
            raise FileFormatError(f"{name} is named a second time", path="the log", line=told.line)
        self._named[name] = tensor

    def _tensor(self, told: Instruction, name: str) -> TensorId:
        if name not in self._named:
            raise FileFormatError(f"{name} is not known here", path="the log", line=told.line)
        return self._named[name]
