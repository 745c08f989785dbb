"""Whose bytes are resident at one moment: by what they are for, the module, the op and the line of the user's code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

from spillway.ir.spans import Work
from spillway.ir.timeline import Kind, Origin, StorageLine, Timeline
from spillway.units import Bytes, format_bytes

ROWS: Final = 12
"""Rows that are seen at once; the rest of the list is folded."""
TOLD: Final = 3
"""Holders that are told of at every column."""
NO_MODULE: Final = "outside of any module"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Storages of one origin."""

    nbytes: Bytes
    storages: int
    kind: str
    """What they are for; several kinds where they are taken together."""
    module: str
    """Qualified name of the module; `NO_MODULE` if there is none. `layers.*.norm (6)` are six of a list."""
    op: str
    """What created them, `mm`; empty of what was there before, and where ops are taken together."""
    line: str
    """Of the user's code; empty where nobody knows, and where lines are taken together."""

    @property
    def told(self) -> str:
        made = " ".join(part for part in (self.op, self.line and f"at {self.line}") if part)
        return f"{format_bytes(self.nbytes)} {self.kind} of {self.module}{f': {made}' if made else ''}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AtPeak:
    """What fills memory at the fullest moment of a step."""

    op: int
    """Which op it is; the number of ops stands for what came after the last one."""
    name: str
    """The op's name; empty where nobody noted it."""
    nbytes: Bytes
    by_module: list[Holder]
    """From the largest."""
    by_origin: list[Holder]
    """From the largest, each with its op and line."""


def at_peak(timeline: Timeline) -> AtPeak | None:
    """Who holds how much at the peak; None if the timeline does not know where storages come from."""
    if not timeline.origins:
        return None
    totals = [nbytes for _, nbytes in timeline.resident()]
    op = max(range(len(totals)), key=totals.__getitem__)
    lines = timeline.present_at([op])[op]
    name = next((span.name for span in timeline.spans if span.op == op and span.work is Work.OP), "")
    return AtPeak(
        op=op, name=short_op(name), nbytes=totals[op],
        by_module=_grouped(timeline, lines, lambda kind, module, op, line: module),
        by_origin=_by_origin(timeline, lines),
    )  # fmt: skip


def largest_at(timeline: Timeline, ops: Iterable[int]) -> Mapping[int, list[str]]:
    """At the fullest moments of these ops the largest holders, a line each; nothing if nobody knows of any."""
    if not timeline.origins:
        return {}
    found = timeline.present_at(ops)
    return {op: [holder.told for holder in _by_origin(timeline, lines)[:TOLD]] for op, lines in found.items()}


def short_op(name: str) -> str:
    """`aten::mm` and `aten.mm.default` are `mm` to people."""
    return name.removeprefix("aten::").removeprefix("aten.").removesuffix(".default")


def _by_origin(timeline: Timeline, lines: Iterable[StorageLine]) -> list[Holder]:
    """By kind, op and line; modules that differ in their numbers alone, as those of a list do, are taken together."""
    return _grouped(timeline, lines, lambda kind, module, op, line: (kind, _NUMBERS.sub("*", module), op, line))


_NUMBERS: Final = re.compile(r"(?<![^.])\d+(?![^.])")


def _grouped(
    timeline: Timeline, lines: Iterable[StorageLine], key: Callable[[str, str, str, str], Hashable]
) -> list[Holder]:  # fmt: skip
    """Storages by what `key` makes of kind, module, op and line, the largest first."""
    origins = {origin.storage: origin for origin in timeline.origins}
    groups = defaultdict[Hashable, list[tuple[Bytes, tuple[str, str, str, str]]]](list)
    for line in lines:
        where = _where(line, origins.get(line.storage))
        groups[key(*where)].append((line.nbytes, where))
    holders = []
    for members in groups.values():
        kinds, modules, ops, places = (list(dict.fromkeys(part)) for part in zip(*(w for _, w in members), strict=True))
        several = len(modules) > 1
        holders.append(
            Holder(
                nbytes=sum(nbytes for nbytes, _ in members), storages=len(members), kind=", ".join(kinds),
                module=f"{_NUMBERS.sub('*', modules[0])} ({len(modules)})" if several else modules[0],
                op=ops[0] if len(ops) == 1 else "", line=places[0] if len(places) == 1 else "",
            )
        )  # fmt: skip
    return sorted(holders, key=lambda holder: -holder.nbytes)


def _where(line: StorageLine, origin: Origin | None) -> tuple[str, str, str, str]:
    """Kind, module, op and line of one storage."""
    if origin is None:
        again = line.kind is Kind.TEMPORARY and not line.present_at_start
        return line.kind.value, NO_MODULE, "recomputing" if again else "", ""
    module = origin.name.rpartition(".")[0] or origin.name or origin.module or NO_MODULE
    if origin.name and line.kind in _NAMED:
        return line.kind.value, module, "", ""
    return line.kind.value, module, short_op(origin.op), origin.line


_NAMED: Final = (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
"""Known by a name rather than by what made them."""
