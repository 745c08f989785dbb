"""Processes of Python that tell what they do in JSON lines, and are ended whatever happens here.

A process writes its messages into a pipe of its own, whose file descriptor is its first argument. What it prints
otherwise, and what a workload prints, comes through another pipe and is passed on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import IO, Any, Final, final

from spillway.errors import BudgetInfeasible, SpillwayError
from spillway.units import Seconds

GRACE: Final[Seconds] = 5.0
"""What a process gets to end after SIGTERM."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A running process and what goes to and fro."""

    process: subprocess.Popen[str]
    messages: Iterator[dict[str, Any]]
    """What it tells; ends when it does."""

    def ask(self, question: Mapping[str, Any]) -> None:
        """Write a line to its standard input, if it has one. Raises BrokenPipeError if it is gone."""
        if self.process.stdin is None:
            raise ValueError("this process was started without a standard input")
        print(json.dumps(question), file=self.process.stdin, flush=True)


@contextmanager
def talking(
    module: str,
    request: Mapping[str, Any],
    output: Callable[[str], None],
    *,
    listens: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Talk]:
    """Start `python -m module FILE_DESCRIPTOR REQUEST` with one thread, and end it afterwards.

    Arguments:
        output: Called, from another thread, with every line that the process prints.
        listens: Whether it reads questions from its standard input.
        environment: Variables that it gets beside those of this process.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as messages:
        try:
            process = _start(module, request, writing, environment or {}, listens=listens)
        finally:
            os.close(writing)
        passing_on = Thread(target=_pass_on, args=(process.stdout, output), daemon=True)
        passing_on.start()
        try:
            yield Talk(process=process, messages=map(json.loads, messages))
        finally:
            with contextlib.suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
            _end(process)
            # Not for ever: a grandchild may hold the pipe open.
            passing_on.join(GRACE)


def _start(
    module: str, request: Mapping[str, Any], writing: int, environment: Mapping[str, str], *, listens: bool
) -> subprocess.Popen[str]:
    # -P: what lies in the current directory must not stand for a module of the same name. -u: nothing printed is lost.
    command = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", module]
    return subprocess.Popen(
        [*command, str(writing), json.dumps(request)],
        stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(writing,),
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment},
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


def as_raised(error: dict[str, Any]) -> SpillwayError:
    """The error that a process has told of in its `{"error": ...}`, to be raised again here."""
    infeasible = error["infeasible"]
    return SpillwayError(error["sentence"]) if infeasible is None else BudgetInfeasible(**infeasible)


def how_it_ended(what: str, code: int) -> SpillwayError:
    """The sentence about a process that ended before it was done, by its exit code."""
    if code == -signal.SIGKILL:
        return SpillwayError(f"{what}: it was killed, as the system does when memory runs out.")
    if code < 0:
        return SpillwayError(f"{what}: it was ended by {signal.Signals(-code).name}.")
    return SpillwayError(f"{what} with exit code {code}; what it printed stands above.")
