"""Runs random programs plainly and under budgets, and says what is wrong with them.

`python -m tests.cpu.program_judge FIRST COUNT POLICIES` runs so many programs, each under so many of the policies, and
prints a line of JSON for each. With `--shrink` it looks instead for the shortest program that fails as program FIRST
does, with `--plain` it only runs them plainly, and with `--planned` each step several times under a planner."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import subprocess
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any, final

import torch

from spillway.engines.tensors.tensor_engine import TensorEngine
from spillway.memory.budget import UNLIMITED
from spillway.methods import LRU, METHODS, AbstractPlanner, AbstractPolicy, KeepAll, method_named
from spillway.methods.planned import SelfPlanned
from tests.cpu.pressure import copying_beside
from tests.cpu.program_runs import Counting, Needs, Ran, Shake, managed, plain, plain_until, poisoned
from tests.cpu.programs import random_program, repeated
from tests.cpu.world import Instruction, Part, Program

NEAR = 1.1
"""Refusals name at most so many times what is enough."""

WATCHED = "no budget"
"""Watched, and nothing leaves."""

SHAKEN = "shaken"
"""Storages also leave at random moments, whether room is short or not."""

ALIKE = ("recompute first", "move first", "largest", "keep-all")
"""What they decide depends on no clock."""

NAMED = ("lru", "delta", "delta-published", "dtr", "dtr-eqclass", "dtr-local", "largest", "msps", "keep-all")
"""Methods as users name them."""

POLICIES: dict[str, Callable[[], AbstractPolicy]] = {
    "recompute first": lambda: LRU(short_chain=32, worth=inf),
    "move first": lambda: LRU(short_chain=0),
    "copy beside": copying_beside,
    SHAKEN: lambda: LRU(short_chain=32, worth=inf),
    **{name: partial(method_named, name) for name in NAMED},
}


def _planning(name: str, otherwise: AbstractPolicy | None = None) -> AbstractPolicy:
    planner = METHODS[name].on_paper()
    assert isinstance(planner, AbstractPlanner)
    return SelfPlanned(planner, otherwise)


PLANNERS: dict[str, Callable[[], AbstractPolicy]] = {
    name: partial(_planning, name) for name in ("window", "window-published", "lms", "sqrt-n", "swap", "swap-prefetch")
} | {"auto": lambda: _planning("window-improved", LRU())}
"""What a session makes of these planners: steps are recorded, planned and followed."""


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first thing that differs, in words."""
    for name in ["notes", *sorted({*expected, *found})]:
        one, other = expected.get(name), found.get(name)
        if one != other:
            if name == "versions" and one and other:
                one, other = ({k: v[k] for k in v if one.get(k) != other.get(k)} for v in (one, other))
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
        with poisoned(0x55):
            first = plain(program)
        with poisoned(0xC3):
            second = plain(program, Counting())
        self.state = first | {"versions": second["versions"]}
        unwritten = difference(self.state, second)
        kept = managed(program, KeepAll(), UNLIMITED, lambda engine: Counting())
        managed(
            program, KeepAll(), UNLIMITED - 1, above
        )  # without a budget nobody asks who holds what comes from outside
        self.enough = needs[0].budget
        self.peak = max(kept.peak, self.enough)
        complaints = _complaints(self, kept, UNLIMITED)
        if unwritten is not None:
            complaints.insert(0, f"plain torch shows memory that nobody wrote: {unwritten}")
        self.row = self.row_of(WATCHED, kept, UNLIMITED, complaints)

    def row_of(self, policy: str, ran: Ran, allowed: int, complaints: list[str]) -> dict[str, Any]:
        """What became of the program under one policy."""
        return {
            "policy": policy, "allowed": allowed, "enough": self.enough, "plain_peak": self.peak, "peak": ran.peak,
            "refused": ran.refusal is not None, "natively": ran.natively, "complaints": complaints,
            "began planned": ran.began_planned, "ended planned": ran.ended_planned,
            **dataclasses.asdict(ran.figures),
        }  # fmt: skip


def judge(known: Known, name: str, share: float) -> dict[str, Any]:
    """Run the program under one policy, with a budget between what it needs (0) and its plain peak (1)."""
    allowed = max(int(known.enough + share * (known.peak - known.enough)), 1)
    ran = _under(known.program, name, allowed, counted=name == SHAKEN)
    if ran.refusal is None:
        return known.row_of(name, ran, allowed, _complaints(known, ran, allowed))
    first, ran = ran, _under(known.program, name, allowed)  # once more, where ops are counted
    complaints = _complaints(known, ran, allowed)
    if ran.refusal is None and name in ALIKE:
        complaints.append(f"refused by the hook, and not by the handlers in Python: {first.refusal}")
    complaints += _judge_refusal(known, name, ran, allowed)
    return known.row_of(name, ran, allowed, complaints)


def judge_planned(seed: int) -> list[dict[str, Any]]:
    """A program whose steps are several times alike, watched and under one of the planners."""
    known = Known(repeated(random_program(seed)))
    name = list(PLANNERS)[seed % len(PLANNERS)]
    return [known.row, judge(known, name, random.Random(f"budget of {seed}").random() ** 2)]


def _under(program: Program, name: str, allowed: int, *, counted: bool = True) -> Ran:
    def above(engine: TensorEngine) -> Counting:
        return Shake(engine, program.seed) if name == SHAKEN else Counting()

    return managed(program, {**POLICIES, **PLANNERS}[name](), allowed, above if counted else None)


def _complaints(known: Known, ran: Ran, allowed: int) -> list[str]:
    expected, found = known.state, list(ran.wrong)
    if ran.refusal is not None:
        expected = plain_until(known.program, ran)
    earlier = plain_until(known.program, ran, early=True) if ran.between_ops else expected
    for when, state in (("after the last step", ran.state), ("after closing", ran.closed)):
        # A refusal between two ops may come before or after whatever plain torch does there.
        likely = {key: value for key, value in expected.items() if key in state or key in earlier}
        likely |= {key: value for key, value in earlier.items() if state.get(key) == value}
        different = difference(likely, state)
        if different is not None:
            found.append(f"{when}, {different}")
    if ran.refusal is None and ran.peak > allowed:
        found.append(f"the peak of {ran.peak} is over the budget of {allowed}")
    return found


def _judge_refusal(known: Known, name: str, ran: Ran, allowed: int) -> list[str]:
    """A refusal is right if the budget was below what the program needs and the budget that it names leads on. What a
    policy that recomputes holds in between is not known to who tells the needs, so that neither is exact."""
    complaints: list[str] = []
    while ran.refusal is not None:
        smallest, enough = ran.refusal.smallest_budget, int((known.enough + ran.held) * NEAR)
        if allowed >= enough or not allowed < smallest <= enough:
            said = f"refused {allowed} bytes and named {smallest}, where {enough} are enough"
            return [*complaints, f"{said}: {ran.refusal}"]
        allowed = smallest
        ran = _under(known.program, name, allowed)
        complaints += _complaints(known, ran, allowed)
    return complaints


def judge_all(seed: int, policies: int = len(POLICIES)) -> list[dict[str, Any]]:
    """One program, watched and under the next so many of the policies, each with a budget of its own."""
    known = Known(random_program(seed))
    names = [list(POLICIES)[number % len(POLICIES)] for number in range(seed * policies, (seed + 1) * policies)]
    return [known.row, *(judge(known, name, shares(seed)[name]) for name in names)]


def shares(seed: int) -> dict[str, float]:
    """Where each policy's budget lies: mostly little above what is needed, now and then below it."""
    draw = random.Random(f"budgets of {seed}")
    return {name: draw.random() ** 2 - 0.02 for name in POLICIES}


# ---------------------------------------------------------------------- many programs


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.set_warn_always(False)
    first, count, policies = map(int, arguments[:3])
    if "--shrink" in arguments:
        print(*shrunk(first))
        return
    for seed in range(first, first + count):
        gc.collect()
        gc.freeze()  # what was imported by now, some of it by the programs before, is not looked through again
        if "--plain" in arguments:
            plain(random_program(seed))
            continue
        try:
            rows = judge_planned(seed) if "--planned" in arguments else judge_all(seed, policies)
        except Exception:
            rows = [{"policy": "", "complaints": [traceback.format_exc()]}]
        print(json.dumps({"seed": seed, "rows": rows}), flush=True)


def many(first: int, count: int, policies: int = len(POLICIES)) -> Iterator[dict[str, Any]]:
    """The same in a process of its own, which may crash: then that is what is said of the program that ran."""
    end = first + count
    while first < end:
        numbers = [str(first), str(end - first), str(policies)]
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.cpu.program_judge", *numbers]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):  # MKL prints what it thinks of singular matrices
                    yield json.loads(line)
                    first += 1
        if first < end:
            alone = subprocess.run(
                [*command[:5], str(first), "1", "0", "--plain"], env=environment, capture_output=True
            )
            whose = "crashed" if alone.returncode == 0 else "plain torch crashed"
            yield {"seed": first, "rows": [{"policy": "", "complaints": [f"{whose} with {process.returncode}"]}]}
            first += 1


# ---------------------------------------------------------------------- the shortest program that fails


def shrunk(seed: int) -> tuple[Any, ...]:
    """The shortest program found, the policy and the place of the budget with which it fails, and what is wrong."""
    program = random_program(seed)
    for name, share in ((WATCHED, 0.0), *shares(seed).items()):
        found = _way_it_ends(program, name, share)
        if found:
            program = shortest(program, lambda p, n=name, s=share, f=found: _way_it_ends(p, n, s) == f)
            return program, name, share, _complaints_of(program, name, share)
    return (f"Program {seed} does not fail.",)


def _complaints_of(program: Program, name: str, share: float) -> list[str]:
    try:
        known = Known(program)
        row = known.row if name == WATCHED else judge(known, name, share)
        complaints: list[str] = row["complaints"]
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


def shortest(program: Program, fails: Callable[[Program], bool]) -> Program:
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
