"""Starts the process of a run, listens to it, and ends it whatever happens here.

The process writes JSON lines into a pipe of its own: `{"step": ...}` after every step, then `{"result": ...}` or
`{"error": ...}`. What it prints otherwise, and what a workload prints, comes through another pipe and is passed on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import IO, Any, Final, final

from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.runs.records import RunRequest, RunResult, StepDone
from spillway.units import Seconds

GRACE: Final[Seconds] = 5.0
"""What a process gets to end after SIGTERM."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who hears of a run while it runs."""

    step: Callable[[StepDone], None]
    """Called after every step."""
    output: Callable[[str], None]
    """Called, from another thread, with every line that the process prints."""


def run(request: RunRequest, listener: Listener) -> RunResult:
    """Run what is asked for in a fresh process with one thread.

    Raises:
        BudgetInfeasible: A step cannot run under the budget.
        SpillwayError: Whatever else kept the run from its end, in one sentence.
    """
    steps: list[StepDone] = []
    with _process(request, listener) as (process, messages):
        for message in messages:
            match message:
                case {"step": dict(step)}:
                    steps.append(StepDone.from_json(step))
                    listener.step(steps[-1])
                case {"result": dict(result)}:
                    return RunResult(**result, steps=steps)
                case {"error": dict(error)}:
                    raise _as_raised(error)
        raise _ended(process.wait(), len(steps))


@contextmanager
def _process(
    request: RunRequest, listener: Listener
) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as messages:
        try:
            process = _start(request, writing)
        finally:
            os.close(writing)
        passing_on = Thread(target=_pass_on, args=(process.stdout, listener.output), daemon=True)
        passing_on.start()
        try:
            yield process, map(json.loads, messages)
        finally:
            _end(process)
            # Not for ever: a grandchild may hold the pipe open.
            passing_on.join(GRACE)


def _start(request: RunRequest, writing: int) -> subprocess.Popen[str]:
    # -P: what lies in the current directory must not stand for a module of the same name. -u: nothing printed is lost.
    command = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "spillway.runs.child"]
    return subprocess.Popen(
        [*command, str(writing), json.dumps(request.to_json())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(writing,),
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        text=True,
        errors="replace",
        # A Ctrl-C in the terminal reaches this process alone, which then ends the other.
        start_new_session=True,
    )


def _pass_on(printed: IO[str] | None, output: Callable[[str], None]) -> None:
    with printed or contextlib.nullcontext(()) as lines:
        for line in lines:
            output(line.rstrip("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def _as_raised(error: dict[str, Any]) -> SpillwayError:
    """The error of the process, raised again here."""
    infeasible = error["infeasible"]
    return SpillwayError(error["sentence"]) if infeasible is None else BudgetInfeasible(**infeasible)


def _ended(code: int, steps: int) -> SpillwayError:
    after = f"The process of the run ended after {steps} step{'s' * (steps != 1)}"
    if code == -signal.SIGKILL:
        return SpillwayError(f"{after}: it was killed, as the system does when memory runs out.")
    if code < 0:
        return SpillwayError(f"{after}: it was ended by {signal.Signals(-code).name}.")
    return SpillwayError(f"{after} with exit code {code}; what it printed stands above.")
