"""The static architecture of a dynamic network, learned: the union of the paths that it was seen to take.

The paper finds it by static analysis of the script (section IV-A), which no tool for PyTorch does for networks whose
control flow depends on data. Here it grows with what is seen. A branch that was never seen is a misprediction, and no
error.

Ops that were always seen together are one part of the network. A part that ran in some paths and not in others is a
decision, and a path is resolved by one bit for each: whether the part ran. Where two paths part, the op in front of
the difference has several successors, which is a decision row.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, cast, final

import numpy as np

from spillway.pilots.paths import BaseType, Numbers, OpSignature, ParameterStorage, PathOp, ResolvedPath
from spillway.units import format_bytes

MOST_WAYS: Final = 4
"""Of a decision row that is shown; behind them stands how many more there are."""


@final
class Architecture:
    """What a network was seen to do, everything numbered from 0 in the order in which it was first seen."""

    def __init__(self, network: str, base: BaseType) -> None:
        self.network = network
        self.base = base
        """What it is built of."""
        self.ops: list[PathOp] = []
        """By the numbers in `ResolvedPath.keys`."""
        self.signatures: list[OpSignature] = []
        """By the numbers in `Sample.signatures`."""
        self.parameters: list[ParameterStorage] = []
        """By the numbers in `PathOp.parameters`."""
        self.paths: list[ResolvedPath] = []
        """By `ResolvedPath.number`."""
        self.part_of: list[int] = []
        """The part of every op, by the op's number; -1 where no path has it yet. Part 0 ran in every path."""
        self.parts: list[set[int]] = [set()]
        """The ops of every part. Parts from 1 are decisions, `parts[d + 1]` the ops that decision `d` is about."""
        self.successors: dict[int, dict[int, None]] = {}
        """By the number of an op, -1 for the beginning: the ops that were seen to run next, -1 for the end."""
        self.statements: dict[str, tuple[str, ...]] = {}
        """By the name of a module: the control statements of its forward, `if is_open`, to be shown."""
        self._op_numbers: dict[PathOp, int] = {}
        self._signature_numbers: dict[OpSignature, int] = {}
        self._parameter_numbers: dict[str, int] = {}
        self._path_numbers: dict[bytes, ResolvedPath] = {}
        self._after: dict[int, int] = {-1: -1}  # by op: the next in the order of the program, -1 for both of its ends

    # ------------------------------------------------------------------ numbers

    def op(self, op: PathOp) -> int:
        """The number of an op, which is new if it was not seen before."""
        number = self._op_numbers.setdefault(op, len(self.ops))
        if number == len(self.ops):
            self.ops.append(op)
        return number

    def signature(self, signature: OpSignature) -> int:
        """The number of a signature, which is new if it was not seen before."""
        number = self._signature_numbers.setdefault(signature, len(self.signatures))
        if number == len(self.signatures):
            self.signatures.append(signature)
        return number

    def parameter(self, parameter: ParameterStorage) -> int:
        """The number of a parameter, which is new if none of its name was seen before.

        Raises ValueError if one of its name has another size.
        """
        number = self._parameter_numbers.setdefault(parameter.name, len(self.parameters))
        if number == len(self.parameters):
            self.parameters.append(parameter)
        elif self.parameters[number] != parameter:
            raise ValueError(f"{parameter} was {self.parameters[number]} before")
        return number

    # ------------------------------------------------------------------ paths

    def path(self, keys: Sequence[int] | Numbers, starts: Sequence[int] | Numbers, operands: Sequence[int] | Numbers
             ) -> ResolvedPath:  # fmt: skip
        """The one object of a path, from the numbers of its ops and what each reads (`ResolvedPath`); it is learned if
        it was not seen before. Takes time in proportion to its ops, and adds at most one part for each part it meets.
        """
        arrays = [np.ascontiguousarray(given, dtype=np.int32) for given in (keys, starts, operands)]
        identity = b"|".join(array.tobytes() for array in arrays)
        found = self._path_numbers.get(identity)
        if found is None:
            for array in arrays:
                array.flags.writeable = False
            found = ResolvedPath(len(self.paths), *arrays)
            self._path_numbers[identity] = found
            self._learn(found)
            self.paths.append(found)
        return found

    def _learn(self, path: ResolvedPath) -> None:
        previous = -1
        for key in path.keys.tolist():
            self.successors.setdefault(previous, {})[key] = None
            if key not in self._after:
                self._after[key], self._after[previous] = self._after[previous], key
            previous = key
        self.successors.setdefault(previous, {})[-1] = None
        self.part_of += [-1] * (len(self.ops) - len(self.part_of))
        ran: dict[int, set[int]] = {}
        for key in set(path.keys.tolist()):
            ran.setdefault(self.part_of[key], set()).add(key)
        unseen = ran.pop(-1, set())
        if not self.paths:
            self._put(unseen, 0)
            return
        for part in sorted({0, *ran}):
            # What ran keeps the number, so that part 0 stays what always runs.
            left_out = self.parts[part] - ran.get(part, set())
            if left_out:
                self.parts[part] -= left_out
                self._put(left_out, len(self.parts))
        if unseen:
            self._put(unseen, len(self.parts))

    def _put(self, ops: set[int], part: int) -> None:
        self.parts[part : part + 1] = [ops]
        for op in ops:
            self.part_of[op] = part

    # ------------------------------------------------------------------ decisions

    @property
    def decisions(self) -> int:
        """How many bits resolve a path; it grows with what is seen."""
        return len(self.parts) - 1

    def in_order(self) -> list[int]:
        """The ops in the order of the program: what a path shows for the first time stands behind what was in front of
        it there."""
        order, key = list[int](), self._after[-1]
        while key != -1:
            order.append(key)
            key = self._after[key]
        return order

    def rows(self) -> Iterator[tuple[int, list[int]]]:
        """The ops after which paths part, -1 for the beginning, and the numbers of what was seen to run next."""
        for op, after in self.successors.items():
            if len(after) > 1:
                yield op, list(after)

    # ------------------------------------------------------------------ for people

    def __str__(self) -> str:
        return "\n".join(self._listing())

    def _listing(self) -> Iterator[str]:
        counts = f"{len(self.ops)} ops, {len(self.parameters)} parameters, {self.decisions} decisions"
        yield f"{self.network} ({self.base}): {counts}, {len(self.paths)} paths seen"
        parting = dict(self.rows())
        if -1 in parting:
            yield from self._row(-1, parting[-1])
        sites = ((self.ops[key].site, key) for key in self.in_order())
        calls = [(f"{site.module or 'model'}[{site.call}]", key) for site, key in sites]
        for (call, part), group in groupby(calls, key=lambda one: (one[0], self.part_of[one[1]])):
            keys = [key for _, key in group]
            nbytes = sum(self.parameters[one].nbytes for one in {p for key in keys for p in self.ops[key].parameters})
            line = f"  {'' if part == 0 else f'[{part - 1}] '}{call}: {len(keys)} op{'s' * (len(keys) != 1)}"
            yield line + (f", {format_bytes(nbytes)} of parameters" if nbytes else "")
            for key in keys:
                if key in parting:
                    yield from self._row(key, parting[key])

    def _row(self, key: int, after: list[int]) -> Iterator[str]:
        """A decision row: the statements of the module around all that may follow, and where each way begins."""
        ops = [self.ops[one] for one in (key, *after) if one >= 0]
        places = [re.sub(r"\[\d+\]", "", op.site.module) for op in ops]
        around = places[0].split(".")
        while not all(f"{place}.".startswith(".".join([*around, ""])) for place in places):
            around = around[:-1]
        while around and ".".join(around) not in self.statements:
            around = around[:-1]
        statements = self.statements.get(".".join(around), ())
        ways = " | ".join("the end" if one < 0 else str(self.ops[one].site) for one in after[:MOST_WAYS])
        more = f" | {len(after) - MOST_WAYS} more" if len(after) > MOST_WAYS else ""
        yield f"    -> {ways}{more}" + (f"    by {'; '.join(statements)}" if statements else "")


def control_statements(function: object) -> tuple[str, ...]:
    """The heads of the control statements of a function, `if is_open`, as Python's `ast` finds them; none for a
    function whose source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cast(Any, function))))
    except (OSError, TypeError, SyntaxError):
        return ()
    return tuple(_head(node) for node in ast.walk(tree) if isinstance(node, ast.If | ast.For | ast.While | ast.IfExp))


def _head(node: ast.If | ast.For | ast.While | ast.IfExp) -> str:
    if isinstance(node, ast.For):
        return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
    return f"{'while' if isinstance(node, ast.While) else 'if'} {ast.unparse(node.test)}"
