"""Several processes that train the programs of `process_programs`, and whether a session changed what they did."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = "tests.cpu.process_programs"
LIMIT: Final = 600
"""Seconds after which processes are killed that have not answered: on a busy machine some runs take minutes."""
TRIES: Final = 8
"""How often a budget is tried that a refusal named."""


class GroupDied(Exception):
    """A process ended, or did not answer."""


class Verdict(NamedTuple):
    """Of one program under one method and budget."""

    complaints: list[str]
    refusals: int
    """Budgets that were refused before one was not."""
    moves: int = 0
    drops: int = 0


class Group:
    """Processes that wait for runs. A run after one in which processes were killed begins with new ones."""

    def __init__(self, world: int, folder: Path, program: str = PROGRAM) -> None:
        self.world = world
        self._program = program
        self._folder = folder
        self._started = 0
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str]] = []
        self._listeners: list[threading.Thread] = []

    def ask(self, **line: Any) -> list[dict[str, Any]]:
        """What every rank says of one run.

        Raises:
            GroupDied: One does not.
        """
        self._tell(line)
        try:
            said = [answers.get(timeout=LIMIT) for answers in self._answers]
        except queue.Empty:
            said = [""]
        if "" in said:
            codes = self.kill()
            raise GroupDied(f"processes ended with {codes}: {self._complaints()}")
        return [json.loads(one) for one in said]

    def ending(self, rank: int, **line: Any) -> tuple[int, str]:
        """With what one rank ends in a run that it does not survive, and what it has said on standard error by then."""
        self._tell(line)
        code = self._processes[rank].wait(LIMIT)
        self.kill()
        return code, (self._folder / f"stderr{rank}").read_text()

    def _tell(self, line: dict[str, Any]) -> None:
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(line) + "\n")
                process.stdin.flush()

    def kill(self) -> list[int]:
        for process in self._processes:
            process.kill()
        codes = [process.wait() for process in self._processes]
        for process, listener in zip(self._processes, self._listeners, strict=True):
            listener.join()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self._processes, self._answers, self._listeners = [], [], []
        return codes

    def _start(self) -> None:
        self._started += 1
        store = self._folder / f"store{self._started}"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
        for rank in range(self.world):
            with (self._folder / f"stderr{rank}").open("w") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._program, str(rank), str(self.world), str(store)],
                    cwd=ROOT, env=environment | {"TMPDIR": str(self._folder)}, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
            answers: queue.Queue[str] = queue.Queue()
            listener = threading.Thread(target=_listen, args=(process, answers), daemon=True)
            listener.start()
            self._listeners.append(listener)
            self._processes.append(process)
            self._answers.append(answers)

    def _complaints(self) -> str:
        return " | ".join((self._folder / f"stderr{rank}").read_text()[-600:] for rank in range(self.world))


def _listen(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answers.put(line)
    answers.put("")


@contextlib.contextmanager
def group(world: int, folder: Path, program: str = PROGRAM) -> Iterator[Group]:
    processes = Group(world, folder, program)
    try:
        yield processes
    finally:
        processes.kill()


class Plain(NamedTuple):
    """What a program does without a session, and the peak of one that only keeps account."""

    answers: list[dict[str, Any]]
    peak: int


def plainly(processes: Group, program: str) -> Plain:
    """Raises AssertionError where watching alone changes anything."""
    answers = processes.ask(program=program)
    watched = processes.ask(program=program, method="keep-all", budget=None)
    assert all("trace" in answer for answer in answers), answers
    assert not _complaints_about(watched, answers), f"{program} without a budget: {_complaints_about(watched, answers)}"
    return Plain(answers, max(answer["peak"] for answer in watched))


def judged(processes: Group, program: str, method: str, plain: Plain, share: float, *, plant: bool = False) -> Verdict:
    """Run it under a share of the plain peak, or under the budget that refusals name.

    The peak of every step is measured, also where the block engine would not do that by itself.
    """
    budget, refusals = int(share * plain.peak), 0
    while True:
        try:
            answers = processes.ask(program=program, method=method, budget=budget, plant=plant)
        except GroupDied as death:
            return Verdict([str(death)], refusals)
        named = [answer["refused"] for answer in answers if "refused" in answer]
        if not named:
            complaints = _complaints_about(answers, plain.answers)
            return Verdict(complaints, refusals, *(max(a.get(key, 0) for a in answers) for key in ("moves", "drops")))
        refusals += 1
        if refusals > TRIES:
            return Verdict([f"refused {refusals} times, the last time under {budget}"], refusals)
        budget = max(*named, budget + 1)


def _complaints_about(answers: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> list[str]:
    complaints = []
    for rank, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
        if "error" in answer:
            complaints.append(f"rank {rank}: {answer['error'][:400]}")
        elif answer["trace"] != wanted["trace"]:
            first = next(
                i for i, pair in enumerate(zip(answer["trace"], wanted["trace"], strict=True)) if len({*pair}) > 1
            )
            complaints.append(f"rank {rank}: other bits, first in tensor {first} of {len(wanted['trace'])}")
        elif answer["unmeasured"]:
            complaints.append(f"rank {rank}: the peaks of {answer['unmeasured']} steps were not measured")
        elif answer["peak"] > answer["allowed"]:
            complaints.append(f"rank {rank}: a peak of {answer['peak']} under {answer['allowed']}")
    equal = len({tuple(one["weights"]) for one in plain}) == 1
    if equal and not complaints and len({tuple(answer["weights"]) for answer in answers}) > 1:
        complaints.append("the ranks differ")
    return complaints
