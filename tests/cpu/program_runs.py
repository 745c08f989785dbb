"""Runs random programs plainly and under budgets, and says where they differ.

`python -m tests.cpu.program_runs FIRST COUNT` runs so many programs and prints a line of JSON for each. With
`--shrink` it looks for the shortest program that still fails instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import random
import subprocess
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.engines.controller import SMALLEST_MOVABLE, UNLIMITED
from spillway.engines.records import AWAY, HERE, Storage
from spillway.engines.tensors.calls import operands
from spillway.engines.tensors.engine import TensorEngine
from spillway.engines.tensors.ops import OpInfo
from spillway.engines.tensors.sizes import Sizes
from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.methods import LRU, AbstractPolicy, KeepAll
from spillway.methods.base import Drop, Move
from tests.cpu.programs import random_program
from tests.cpu.world import Instruction, Part, Program, World

POLICIES: dict[str, Callable[[], AbstractPolicy]] = {
    "recompute first": lambda: LRU(short_chain=32, worth=inf),
    "move first": lambda: LRU(short_chain=0),
    "as it comes": LRU,
    "shaken": lambda: LRU(short_chain=32, worth=inf),
}
"""Under `shaken`, storages also leave at random moments, whether room is short or not."""


@dataclass(slots=True)
class Figures:
    """What happened in the steps of a program."""

    drops: int = 0
    moves: int = 0
    replays: int = 0
    bytes_out: int = 0
    dropped_bytes: int = 0

    def add(self, engine: TensorEngine) -> None:
        counters = engine.controller.counters
        self.drops += counters.drops
        self.moves += counters.moves
        self.replays += counters.recomputed_ops
        self.bytes_out += counters.bytes_out
        self.dropped_bytes += counters.dropped_bytes


@dataclass(slots=True)
class Ran:
    """A program that was run under a budget, to its end or until it was refused."""

    state: dict[str, Any] = field(default_factory=dict)
    closed: dict[str, Any] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    peak: int = 0
    refusal: BudgetInfeasible | None = None
    part: int = 0
    ops: int = 0
    between_ops: bool = False
    wrong: list[str] = field(default_factory=list)


class Stopped(SpillwayError):
    """A plain run has come to where a managed one was refused."""


class Counting(TorchDispatchMode):
    """Counts ops as the engine does, and may do something before each."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.refused_in = 0
        """The op that was refused; 0 if none was."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += not _info(func).view
        self.before(func, args, kwargs or {})
        try:
            return func(*args, **(kwargs or {}))
        except BudgetInfeasible:
            self.refused_in = self.refused_in or self.ops
            raise

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Called before each op, views included."""


@final
class StopAt(Counting):
    """Raises instead of running the op of that number."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        if self.ops == self.last:
            raise Stopped("here")


@functools.cache
def _info(func: Any) -> OpInfo:
    return OpInfo(func)


_SIZES = Sizes()
"""Nothing is ever learned by it: it answers from shapes alone, as an engine does that sees an op for the first time."""


@final
class Needs(Counting):
    """Above an engine that keeps everything: the budget under which a program need not be refused.

    It is the most bytes that one op reads, writes and may create, and beside them everything that never leaves.
    """

    def __init__(self, engine: TensorEngine) -> None:
        super().__init__()
        self.engine = engine
        self.working = 0
        self.stuck = 0

    @property
    def budget(self) -> int:
        return self.working + self.stuck

    def __enter__(self) -> Needs:
        self._note_stuck(())
        return super().__enter__()  # type: ignore[no-any-return]

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        info = _info(func)
        with torch._C._DisableTorchDispatch():
            found = {self.engine.lookup(tensor) for _, tensor, _ in operands(info, args, kwargs)}
            needed = _SIZES.expected(info, args, kwargs)[1] if info.fresh or info.resizes else 0
            self.working = max(self.working, needed + sum(storage.nbytes for storage in found if storage))
            self._note_stuck(storage for storage in found if storage)

    def _note_stuck(self, used: Iterable[Storage]) -> None:
        for storage in used:
            storage.escaped = storage.escaped or self.engine.machine.escaped(storage)
        storages = list(self.engine.table.values())
        self.stuck = max(self.stuck, sum(s.nbytes for s in storages if s.nbytes < SMALLEST_MOVABLE or s.escaped))


@final
class Shake(Counting):
    """Makes some storages leave before every op."""

    def __init__(self, engine: TensorEngine, seed: int) -> None:
        super().__init__()
        self.engine = engine
        self.draw = random.Random(seed)

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        controller = self.engine.controller
        with controller.lock, torch._C._DisableTorchDispatch():
            for storage in list(self.engine.table.values()):
                if storage.nbytes >= SMALLEST_MOVABLE and self.draw.random() < 0.15:
                    controller.grant((Drop if self.draw.random() < 0.7 else Move)(storage))


# ---------------------------------------------------------------------- running


def plain(program: Program) -> dict[str, Any]:
    world = World(program.seed)
    for part in program.parts:
        world.run(part.inside)
        world.run(part.outside)
    return world.state()


def plain_until(program: Program, last: int, ops: int) -> dict[str, Any]:
    """As plain torch would have left everything if the op of that number in the last step had raised."""
    world = World(program.seed)
    for part in program.parts[:last]:
        world.run(part.inside)
        world.run(part.outside)
    if ops:
        with contextlib.suppress(Stopped), StopAt(ops):
            world.run(program.parts[last].inside)
    return world.state()


def managed(program: Program, policy: AbstractPolicy, allowed: int, above: Callable[[TensorEngine], Counting]) -> Ran:
    """Run it under a budget, with the mode that `above` makes over the engine's own."""
    ran, world, engine = Ran(), World(program.seed), TensorEngine(policy, allowed)
    mode = above(engine)
    try:
        for number, part in enumerate(program.parts):
            ran.part = number
            _run_part(world, engine, part, ran, mode)
            if ran.refusal is not None or ran.wrong:
                break
            world.run(part.outside)
        ran.state = world.state()
        _check_books(engine, ran)
    finally:
        engine.close()
    ran.closed = world.state()
    del world
    gc.collect()
    if engine.table:
        ran.wrong.append(f"{len(engine.table)} storages are still in the table of a closed engine")
    return ran


def _run_part(world: World, engine: TensorEngine, part: Part, ran: Ran, mode: Counting) -> None:
    mode.ops = 0
    try:
        engine.begin_step(world.named())
        with mode:
            world.run(part.inside)
    except BudgetInfeasible as error:
        began = error.op != "begin step"
        ran.refusal, ran.ops = error, (mode.refused_in or mode.ops + 1) if began else 0
        ran.between_ops = not mode.refused_in
    except Exception as error:
        ran.wrong.append("".join(traceback.format_exception(error)))
    ran.peak = max(ran.peak, engine.controller.peak)
    try:
        engine.end_step()
        ran.peak = max(ran.peak, engine.controller.peak)
    except BudgetInfeasible as error:
        if ran.refusal is None:
            ran.refusal, ran.ops = error, 1 << 40
    except Exception as error:
        ran.wrong.append("".join(traceback.format_exception(error)))
    ran.figures.add(engine)


def _check_books(engine: TensorEngine, ran: Ran) -> None:
    """What has to hold between steps."""
    controller, storages = engine.controller, list(engine.table.values())
    present = sum(s.nbytes for s in storages if s.value is not None and s.value.absent == HERE)
    if controller.resident != present:
        ran.wrong.append(f"the account says {controller.resident} bytes and {present} are present")
    if controller.dropped or controller.recipes:
        ran.wrong.append(f"{len(controller.dropped)} drops and {len(controller.recipes)} recipes outlive the step")
    if controller.away != sum(s.value is not None and s.value.absent == AWAY for s in storages):
        ran.wrong.append(f"the account says that {controller.away} storages are away")
    for storage in storages:
        if storage.locks or storage.held or storage.written or (storage.value is not None and storage.value.wanted):
            ran.wrong.append(f"{storage!r} is still locked, held, written or wanted")


# ---------------------------------------------------------------------- judging


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first thing that differs, in words.

    Versions are not compared: some ops count them differently under any dispatch mode.
    """
    for name in ["notes", *sorted({*expected, *found} - {"versions"})]:
        one, other = expected.get(name), found.get(name)
        if one != other:
            if name == "notes" and one and other:
                pairs = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
                return f"note: {pairs[0] if pairs else (len(one), len(other))}"
            return f"{name}: {_shorten(one)} became {_shorten(other)}"
    return None


def _shorten(facts: Any) -> str:
    return str(facts)[:160]


@final
class Known:
    """What is known of a program before it runs under a budget: the plain result, what it needs and its plain peak."""

    def __init__(self, program: Program) -> None:
        needs: list[Needs] = []

        def above(engine: TensorEngine) -> Needs:
            needs.append(Needs(engine))
            return needs[0]

        self.program = program
        self.state = plain(program)
        kept = managed(program, KeepAll(), UNLIMITED, above)
        self.versions = kept.state["versions"]
        self.enough = needs[0].budget
        self.peak = max(kept.peak, self.enough)
        self.complaints = [f"kept: {text}" for text in _complaints(self, kept, UNLIMITED)]


def judge(known: Known, name: str, share: float) -> dict[str, Any]:
    """Run the program under one policy, with a budget between what it needs (0) and its plain peak (1)."""
    allowed = max(int(known.enough + share * (known.peak - known.enough)), 1)
    ran = _under(known.program, name, allowed)
    complaints = known.complaints + _complaints(known, ran, allowed)
    if ran.refusal is not None:
        complaints += _judge_refusal(known, name, ran, allowed)
    return {
        "policy": name, "allowed": allowed, "enough": known.enough, "plain_peak": known.peak, "peak": ran.peak,
        "refused": ran.refusal is not None, "complaints": complaints, **dataclasses.asdict(ran.figures),
    }  # fmt: skip


def _under(program: Program, name: str, allowed: int) -> Ran:
    def above(engine: TensorEngine) -> Counting:
        return Shake(engine, program.seed) if name == "shaken" else Counting()

    return managed(program, POLICIES[name](), allowed, above)


def _complaints(known: Known, ran: Ran, allowed: int) -> list[str]:
    expected = plain_until(known.program, ran.part, ran.ops) if ran.refusal is not None else known.state
    found = list(ran.wrong)
    for when, state in (("after the last step", ran.state), ("after closing", ran.closed)):
        if ran.between_ops:  # plain torch went on and may have noted something before its next op
            state = state | {"notes": expected["notes"]}
        different = difference(expected, state)
        if different is not None:
            found.append(f"{when}, {different}")
    if ran.refusal is None and ran.state["versions"] != known.versions:
        found.append("version counters differ from those of a run in which nothing leaves")
    if ran.refusal is None and ran.peak > allowed:
        found.append(f"the peak of {ran.peak} is over the budget of {allowed}")
    return found


def _judge_refusal(known: Known, name: str, ran: Ran, allowed: int) -> list[str]:
    """A refusal is right if the budget was below what the program needs and the budget that it names leads on."""
    complaints: list[str] = []
    if allowed >= known.enough:
        complaints.append(f"refused {allowed} bytes although {known.enough} are enough: {ran.refusal}")
    while ran.refusal is not None:
        smallest = ran.refusal.smallest_budget
        if smallest <= allowed or smallest > known.enough:
            return [
                *complaints,
                f"{smallest} is named as the smallest budget; it was {allowed}, and {known.enough} "
                f"is enough: {ran.refusal}",
            ]
        allowed = smallest
        ran = _under(known.program, name, allowed)
        complaints += _complaints(known, ran, allowed)
    return complaints


def judge_all(seed: int) -> list[dict[str, Any]]:
    """One program under every policy, each with a budget of its own."""
    draw, known = random.Random(f"budgets of {seed}"), Known(random_program(seed))
    return [judge(known, name, _share(draw)) for name in POLICIES]


def _share(draw: random.Random) -> float:
    """Mostly little more than is needed, now and then less than that."""
    return draw.random() ** 2 - 0.02


# ---------------------------------------------------------------------- many programs


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first, count = int(arguments[0]), int(arguments[1])
    if "--shrink" in arguments:
        print(*shrunk(first))
        return
    for seed in range(first, first + count):
        gc.collect()
        gc.freeze()  # programs collect garbage, and what torch imports on the way is none
        try:
            rows = judge_all(seed)
        except Exception:
            rows = [{"policy": "", "complaints": [traceback.format_exc()]}]
        print(json.dumps({"seed": seed, "rows": rows}), flush=True)


def many(first: int, count: int) -> Iterator[dict[str, Any]]:
    """The same in a process of its own, which may crash: then that is what is said of the program that ran."""
    end = first + count
    while first < end:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.cpu.program_runs", str(first), str(end - first)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
                first += 1
        if first < end:
            yield {"seed": first, "rows": [{"policy": "", "complaints": [f"crashed with {process.returncode}"]}]}
            first += 1


# ---------------------------------------------------------------------- the shortest program that fails


def shrunk(seed: int) -> tuple[Any, ...]:
    """Policy, share of the budget and the shortest program found; the shares are those of `judge_all`."""
    draw, program = random.Random(f"budgets of {seed}"), random_program(seed)
    for name, share in [(name, _share(draw)) for name in POLICIES]:
        found = _way_it_ends(program, name, share)
        if found:
            program = _shortest(program, lambda p, n=name, s=share, f=found: _way_it_ends(p, n, s) == f)
            return program, name, share, _complaints_of(program, name, share)
    return (f"Program {seed} does not fail.",)


def _complaints_of(program: Program, name: str, share: float) -> list[str]:
    try:
        complaints: list[str] = judge(Known(program), name, share)["complaints"]
    except Exception:
        complaints = [traceback.format_exc()]
    return complaints


def _way_it_ends(program: Program, name: str, share: float) -> int:
    """0 if nothing is wrong, else a number for what is. In a process of its own, because it may crash."""
    child = os.fork()
    if child == 0:
        complaints = _complaints_of(program, name, share)
        words = "".join(letter for letter in "".join(complaints[:1])[:40] if not letter.isdigit())
        os._exit(1 + zlib.crc32(words.encode()) % 200 if complaints else 0)
    return os.waitpid(child, 0)[1]


def _shortest(program: Program, fails: Callable[[Program], bool]) -> Program:
    size = sum(len(instructions) for part in program.parts for instructions in part)
    while size:
        position = 0
        while (shorter := _without(program, position, size)) != program:
            if fails(shorter):
                program = shorter
            else:
                position += size
        size //= 2
    return program


def _without(program: Program, position: int, size: int) -> Program:
    """The program less `size` instructions from `position`, counted over all parts; empty parts at the end fall
    away."""
    counter = iter(range(1 << 30))

    def kept(instructions: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        return tuple(i for i in instructions if not position <= next(counter) < position + size)

    parts = [Part(kept(part.inside), kept(part.outside)) for part in program.parts]
    while len(parts) > 1 and not any(parts[-1]):
        parts.pop()
    return program._replace(parts=tuple(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
