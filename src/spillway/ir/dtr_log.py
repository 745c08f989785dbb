"""DTR's operator logs, read: one training step as the prototype of DTR wrote it down, an instruction a line.

M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 5.1 and appendix C; the logs are published
with its simulator. A line is a JSON object whose `INSTRUCTION` is one of

    CONSTANT NAME               a tensor that no op makes: a parameter, a buffer, the batch, a wrapped number
    CALL NAME ARGS RESULT TIME  an operator, by name, and nanoseconds
    MUTATE NAME ARGS MUTATE TIME  an operator that writes to the arguments at those places
    MEMORY NAME MEMORY          bytes of the tensor that was named last
    ALIAS NAME ALIAS            which argument a result shares its storage with; -1 if it has its own
    COPY DST SRC                another name for the same tensor
    COPY_FROM DST SRC           a name that is given to another tensor
    RELEASE NAME                a name that is no longer needed
    ANNOTATE ANNOTATION         START, BACKWARD

`MEMORY` and `ALIAS` are folded into what they belong to, so that an instruction here is a whole one.
"""

from __future__ import annotations

import lzma
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from typing import Annotated, Any, BinaryIO, Final, TypeAlias, cast, final
from zipfile import BadZipFile, ZipFile

from spillway.errors import FileFormatError
from spillway.ir.reading import WHOLE, at_most, content_of, document, fault_in, opened, read_value, shown
from spillway.ir.step import Op, Phase, Step, StorageInfo, Value, ValueId
from spillway.ir.timeline import Kind
from spillway.units import Bytes, Within

_NUMBER: Final = re.compile("-?[0-9]{1,20}")
_NO_ZIP: Final = (BadZipFile, RuntimeError, EOFError, ValueError, zlib.error, lzma.LZMAError, struct.error)
"""What Python raises for a zip file that is damaged, encrypted, or packed in a way that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An instruction."""

    line: int
    """Where it stands in the log, from 1."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Line):
    """A tensor that no op makes."""

    name: str
    """What the log calls the tensor."""
    nbytes: Bytes = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A tensor that a call returns."""

    name: str
    """What the log calls it."""
    nbytes: Bytes
    """Its bytes; those of a view are counted in the storage that it looks into as well."""
    alias: int | None
    """Index of the argument whose storage it shares; None if it has its own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Line):
    """An operator that makes tensors."""

    operator: str
    """Its name, `cudnn_convolution`."""
    args: tuple[str, ...]
    """Names of the tensors it is given; one may be given twice."""
    results: tuple[Result, ...]
    """The tensors it returns."""
    nanoseconds: int
    """How long it took."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mutate(Line):
    """An operator that writes to some of its arguments and makes nothing."""

    operator: str
    """Its name, `add_`."""
    args: tuple[str, ...]
    """Names of the tensors it is given; one may be given twice."""
    mutated: tuple[int, ...]
    """Indices of the arguments that it writes to."""
    nanoseconds: int
    """How long it took."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Line):
    """One more name for a tensor."""

    source: str
    """A name that it has."""
    destination: str
    """The new name."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFrom(Line):
    """A name in use is given to another tensor; the one that had it loses it."""

    source: str
    """A name of the tensor that gets one more."""
    destination: str
    """The name that changes hands."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Line):
    """A name is given up; a tensor without names is needed by nobody outside of the graph."""

    name: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Annotate(Line):
    """A remark: `START` before the first instruction, `BACKWARD` where the backward begins."""

    text: str


Instruction: TypeAlias = Constant | Call | Mutate | Copy | CopyFrom | Release | Annotate
"""One line of a log, with the lines of its sizes and aliases folded in."""


def read_dtr_log(source: str | PathLike[str] | bytes) -> list[Instruction]:
    """Read a log: its bytes, its path, or `logs.zip:unet`, the name of one within a zip file.

    Raises FileFormatError with path and line for what is no such log, and OSError where the system does.
    """
    text, path = (source, "the log") if isinstance(source, bytes) else (dtr_log_bytes(source), str(source))
    instructions = list(_folded(path, text))
    if not instructions:
        raise FileFormatError("the log is empty", path=path, line=1)
    return instructions


def dtr_log_bytes(source: str | PathLike[str]) -> bytes:
    """The bytes of a log by its path, or by the path of a zip file, a colon, and the name of a log within it."""
    path, colon, name = str(source).rpartition(":")
    if not colon or not path.endswith(".zip"):
        return content_of(source)
    try:
        with opened(path) as file, ZipFile(file) as archive:
            members = archive.namelist()
            found = next((member for member in (name, f"{name}.log") if member in members), None)
            if found is None:
                known = shown(", ".join(member.removesuffix(".log") for member in members))
                raise FileFormatError(f"there is no log {shown(name)} in it; there are {known}", path=path, line=1)
            with archive.open(found) as member:
                return at_most(cast(BinaryIO, member), path)
    except _NO_ZIP as error:
        raise FileFormatError(f"this is no zip file that can be read ({error})", path=path, line=1) from None


def _folded(path: str, text: bytes) -> Iterator[Instruction]:
    """Yield whole instructions: each call with its results, each constant with its bytes."""
    lines = _records(path, text)
    for number, record in lines:
        with fault_in(path, number):
            whole = _instruction(number, record)
        if isinstance(whole, Constant):
            yield replace(whole, nbytes=_follow(path, lines, number, "MEMORY", whole.name))
        elif isinstance(whole, Call):
            named = [result.name for result in whole.results]
            yield replace(whole, results=tuple(_result(path, lines, whole, name) for name in named))
        else:
            yield whole


def _result(path: str, lines: Iterator[tuple[int, dict[str, Any]]], call: Call, name: str) -> Result:
    nbytes = _follow(path, lines, call.line, "MEMORY", name)
    alias = _follow(path, lines, call.line, "ALIAS", name)
    if not -1 <= alias < len(call.args):
        reason = f"{name} shares the storage of argument {alias} of {call.operator}, which has {len(call.args)}"
        raise FileFormatError(reason, path=path, line=call.line)
    return Result(name=name, nbytes=nbytes, alias=None if alias < 0 else alias)


def _follow(path: str, lines: Iterator[tuple[int, dict[str, Any]]], line: int, field: str, name: str) -> int:
    """The number in the line that has to come next: the `MEMORY` or the `ALIAS` of that tensor."""
    number, record = next(lines, (line, None))
    if record is not None and (record["INSTRUCTION"], record.get("NAME")) == (field, name):
        with fault_in(path, number):
            return _number(record, field, -1 if field == "ALIAS" else 0)
    raise FileFormatError(f"the {field} of {name}, named in line {line}, has to stand here", path=path, line=number)


def _records(path: str, text: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = document(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("INSTRUCTION"), str):
            raise FileFormatError("this is no line of an operator log of DTR", path=path, line=number)
        yield number, record


def _instruction(line: int, record: dict[str, Any]) -> Instruction:
    """One line, without what the lines after it add. Raises ValueError if it is none."""
    match record:
        case {"INSTRUCTION": "CONSTANT", "NAME": str(name)}:
            return Constant(line=line, name=name)
        case {"INSTRUCTION": "CALL", "NAME": str(operator), "ARGS": list(args), "RESULT": list(names)}:
            results = tuple(Result(name=name, nbytes=0, alias=None) for name in _names(names))
            time, operator = _number(record, "TIME", 0), read_value(str, operator, "NAME")
            return Call(line=line, operator=operator, args=_names(args), results=results, nanoseconds=time)
        case {"INSTRUCTION": "MUTATE", "NAME": str(operator), "ARGS": list(args), "MUTATE": list(places)}:
            mutated = tuple(_place(place, len(args)) for place in places)
            time, operator = _number(record, "TIME", 0), read_value(str, operator, "NAME")
            return Mutate(line=line, operator=operator, args=_names(args), mutated=mutated, nanoseconds=time)
        case {"INSTRUCTION": "COPY", "SRC": str(source), "DST": str(destination)}:
            return Copy(line=line, source=source, destination=destination)
        case {"INSTRUCTION": "COPY_FROM", "SRC": str(source), "DST": str(destination)}:
            return CopyFrom(line=line, source=source, destination=destination)
        case {"INSTRUCTION": "RELEASE", "NAME": str(name)}:
            return Release(line=line, name=name)
        case {"INSTRUCTION": "ANNOTATE", "ANNOTATION": str(text)}:
            return Annotate(line=line, text=text)
    raise ValueError(f"{shown(record['INSTRUCTION'])} has no place here, or lacks what belongs to it")


def _names(given: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in given):
        raise ValueError(f"{shown(given)} are not names of tensors")
    return tuple(given)


def _place(given: object, args: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < args:
        raise ValueError(f"{shown(given)} is no place of one of {args} arguments")
    return given


def _number(record: dict[str, Any], field: str, least: int) -> int:
    """A number that is written as text."""
    given = record.get(field)
    if not isinstance(given, str) or not _NUMBER.fullmatch(given):
        raise ValueError(f"{field} is {shown(given)}, not a whole number from {least} on")
    return int(read_value(Annotated[int, Within(least, WHOLE.most)], int(given), field))


# ---------------------------------------------------------------------- as a step

SEEDED: Final = ("dropout", "droupout", "bernoulli", "normal_", "uniform_", "random_", "rand", "multinomial")
"""What the names of operators that draw random numbers contain; `_fused_droupout_` is spelt so in the logs."""


def step_of_log(instructions: Iterable[Instruction], path: str | PathLike[str] = "the log") -> Step:
    """The step that a log tells of.

    Every `CALL` and every `MUTATE` is an op, views included, because the log has their time. A result that aliases an
    argument shares its storage and creates nothing; DTR's own simulator lets a `MUTATE` make a new tensor, where here
    the storage has its next version. A storage dies when its last name is given up. Constants before the first op are
    there when the step begins, others are created by an op `constant` that cannot be replayed.

    What a log does not say is told by the way things are used: a constant that gets a second name at once was made a
    parameter, any other before the first op is an input; what the backward makes and leaves behind is a gradient; what
    the forward makes and the backward uses is an activation.

    Raises FileFormatError with `path` and line for names that nobody gave.
    """
    reader = _StepReader(path)
    for instruction in instructions:
        reader.read(instruction)
    return reader.step()


@final
class _Bytes:
    """A storage while the log is read."""

    def __init__(self, number: int, nbytes: Bytes, born: int, *, present: bool, backward: bool) -> None:
        self.number, self.nbytes, self.born, self.present = number, nbytes, born, present
        self.died: int | None = None
        self.names = 0
        self.version = -1
        self.value: ValueId = -1
        self.backward = backward
        self.copied = self.needed_in_backward = False

    @property
    def kind(self) -> Kind:
        if self.present:
            return Kind.PARAMETER if self.copied else Kind.INPUT
        if self.backward:
            return Kind.GRADIENT if self.died is None else Kind.TEMPORARY
        return Kind.ACTIVATION if self.needed_in_backward else Kind.TEMPORARY


@final
class _StepReader:
    """Carries the instructions out on paper."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._names: dict[str, _Bytes] = {}
        self._storages: list[_Bytes] = []
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._phase = Phase.FORWARD

    def read(self, instruction: Instruction) -> None:
        match instruction:
            case Constant():
                self._constant(instruction)
            case Call():
                self._call(instruction)
            case Mutate():
                given = self._given(instruction.line, instruction.args)
                written = list(dict.fromkeys(given[place] for place in instruction.mutated))
                reads = self._reads(given)
                self._op(instruction.operator, reads, [self._write(one) for one in written], instruction.nanoseconds)
            case Copy():
                source = self._given(instruction.line, (instruction.source,))[0]
                source.copied |= source.present and not self._ops
                self._name(instruction.destination, source)
            case CopyFrom():
                source = self._given(instruction.line, (instruction.source,))[0]
                source.names += 1  # first, as both may be one name
                self._release(instruction.line, instruction.destination)
                self._names[instruction.destination] = source
            case Release():
                self._release(instruction.line, instruction.name)
            case Annotate(text="BACKWARD"):
                self._phase = Phase.BACKWARD
            case Annotate():
                pass

    def step(self) -> Step:
        end = len(self._ops)
        storages = tuple(
            StorageInfo(
                id=one.number, nbytes=one.nbytes, kind=one.kind, alive_from=one.born,
                alive_until=end if one.died is None else one.died, present_at_start=one.present,
                present_at_end=one.died is None,
            )
            for one in self._storages
        )  # fmt: skip
        return Step(storages=storages, values=tuple(self._values), ops=tuple(self._ops))

    def _constant(self, constant: Constant) -> None:
        present = not self._ops
        made = self._storage(constant.nbytes, present=present)
        if not present:
            self._op("constant", (), [made.value], 0, replayable=False)
        self._name(constant.name, made)

    def _call(self, call: Call) -> None:
        given = self._given(call.line, call.args)
        reads = self._reads(given)
        results = [
            self._storage(result.nbytes) if result.alias is None else given[result.alias] for result in call.results
        ]
        created = [one.value for one, result in zip(results, call.results, strict=True) if result.alias is None]
        self._op(call.operator, reads, created, call.nanoseconds)
        for one, result in zip(results, call.results, strict=True):
            self._name(result.name, one)

    def _op(
        self,
        name: str,
        reads: tuple[ValueId, ...],
        creates: list[ValueId],
        nanoseconds: int,
        *,
        replayable: bool = True,
    ) -> None:
        seeded = any(part in name for part in SEEDED)
        self._ops.append(
            Op(
                number=len(self._ops), name=name, phase=self._phase, reads=reads, creates=tuple(creates),
                seconds=nanoseconds / 1e9, seeded=seeded, replayable=replayable,
            )
        )  # fmt: skip

    def _storage(self, nbytes: Bytes, *, present: bool = False) -> _Bytes:
        backward = self._phase is Phase.BACKWARD
        made = _Bytes(len(self._storages), nbytes, len(self._ops), present=present, backward=backward)
        self._storages.append(made)
        self._write(made)
        return made

    def _write(self, one: _Bytes) -> ValueId:
        one.version, one.value = one.version + 1, len(self._values)
        self._values.append(Value(id=one.value, storage=one.number, version=one.version))
        return one.value

    def _given(self, line: int, names: tuple[str, ...]) -> list[_Bytes]:
        try:
            return [self._names[name] for name in names]
        except KeyError as unknown:
            raise FileFormatError(f"nothing has the name {unknown.args[0]}", path=self._path, line=line) from None

    def _reads(self, given: list[_Bytes]) -> tuple[ValueId, ...]:
        for one in given:
            one.needed_in_backward |= self._phase is Phase.BACKWARD
        return tuple(dict.fromkeys(one.value for one in given))

    def _name(self, name: str, one: _Bytes) -> None:
        self._names[name] = one
        one.names += 1

    def _release(self, line: int, name: str) -> None:
        one = self._given(line, (name,))[0]
        del self._names[name]
        one.names -= 1
        if not one.names:
            one.died = len(self._ops)
