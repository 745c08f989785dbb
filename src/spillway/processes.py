"""Processes of Python that this one starts, talks with, and ends whatever happens here: one protocol for all of them.

A process runs `module:function(connection, request)`. Messages are objects, both ways, through a pair of sockets; an
error of Spillway's is a message too, for whoever hears it to raise. What the process prints otherwise, and what a
workload prints, comes through a pipe and is passed on.

The standard library's pools either wait forever for what a killed process was to answer, or cannot say which task it
had and how to end the others at once: `answers` is one that does both.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import IO, Any, Final, Generic, TypeVar, final

from spillway.errors import SpillwayError
from spillway.units import Seconds

Task = TypeVar("Task")
Answer = TypeVar("Answer")

GRACE: Final[Seconds] = 5.0
"""What a process gets to end after SIGTERM."""
ONE_THREAD: Final[Mapping[str, str]] = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_BEGIN: Final = "import sys; from spillway.processes import begin; begin(int(sys.argv[1]))"
# -P: what lies in the current directory must not stand for a module of the same name. -u: nothing printed is lost.
_COMMAND: Final = (sys.executable, "-P", "-u", "-X", "faulthandler", "-c", _BEGIN)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A running process and what goes to and fro."""

    process: subprocess.Popen[str]
    connection: Connection

    def ask(self, question: object) -> None:
        """Send a message. If the process is gone, who listens learns of it."""
        with contextlib.suppress(OSError):
            self.connection.send(question)

    def hear(self) -> Any:
        """The next message. Raises EOFError when the process has ended."""
        try:
            return self.connection.recv()
        except OSError as error:
            raise EOFError from error


@contextmanager
def talking(
    target: str, request: object, output: Callable[[str], None] | None = None, *,
    environment: Mapping[str, str] = ONE_THREAD,
) -> Iterator[Talk]:  # fmt: skip
    """Start a process that runs `target(connection, request)`, and end it afterwards, with all that it started.

    Arguments:
        target: `module:function`; what it needs is imported there and not here.
        output: Called, from another thread, with every line that the process prints; None to let it print.
        environment: Variables that it gets beside those of this process.
    """
    ours, theirs = Pipe()
    with ours, theirs:
        process = subprocess.Popen(
            [*_COMMAND, str(theirs.fileno())], stdin=subprocess.DEVNULL,
            stdout=None if output is None else subprocess.PIPE, stderr=None if output is None else subprocess.STDOUT,
            pass_fds=(theirs.fileno(),), env={**os.environ, **environment}, text=True, errors="replace",
            # A Ctrl-C in the terminal reaches this process alone, which then ends the other.
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        passing_on = Thread(target=_pass_on, args=(process.stdout, output), daemon=True)
        passing_on.start()
        try:
            talk = Talk(process=process, connection=ours)
            talk.ask((target, request))
            yield talk
        finally:
            if process.poll() is None:
                # The second is for what it started, too, where that stays when it ends.
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE)
            passing_on.join(GRACE)  # not for ever: a grandchild may hold the pipe open


def _pass_on(printed: IO[str] | None, output: Callable[[str], None] | None) -> None:
    with printed or contextlib.nullcontext(()) as lines:
        for line in lines:
            if output is not None:
                output(line.rstrip("\n"))


def begin(descriptor: int) -> None:
    """What a started process does. Whoever listened may be gone; then there is nobody left to go on for."""
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        target, request = connection.recv()
        module, _, function = target.partition(":")
        getattr(import_module(module), function)(connection, request)


def as_sent(error: SpillwayError) -> SpillwayError:
    """The error as another process can read it: classes of a user's own are not known there."""
    return error if type(error).__module__ == SpillwayError.__module__ else SpillwayError(str(error))


def how_it_ended(what: str, code: int) -> SpillwayError:
    """The sentence about a process that ended before it was done, by its exit code."""
    if code < 0:
        return SpillwayError(f"{what}: it {_ended(code)}.")
    return SpillwayError(f"{what} with exit code {code}; what it printed stands above.")


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed, as the system does when memory runs out"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# ---------------------------------------------------------------------- many tasks for several processes


@final
@dataclass(frozen=True, slots=True)
class Unanswered(Generic[Task]):
    """A task without an answer."""

    task: Task
    why: str
    """A whole sentence."""


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def answers(
    ask: Callable[[Task], Answer], tasks: Iterable[Task], processes: int
) -> Generator[Answer | Unanswered[Task], None, None]:
    """Ask for every task, in processes of their own if there are to be several, and yield what they say as it comes.

    Whoever stops listening, as Ctrl-C makes it, ends all processes.

    Arguments:
        ask: What pickle can send. Where it raises, or its process dies, the answer is `Unanswered`.
    """
    waiting = deque(tasks)
    if processes <= 1 or len(waiting) <= 1:
        yield from (_asked(ask, task) for task in waiting)
        return
    request, idle, busy = (sys.path, pickle.dumps(ask)), list[Talk](), dict[Connection, tuple[Talk, Task]]()
    with ExitStack() as started:
        while waiting or busy:
            while waiting and len(busy) < processes:
                new = talking("spillway.processes:serve", request, environment={})
                talk, task = idle.pop() if idle else started.enter_context(new), waiting.popleft()
                talk.ask(task)
                busy[talk.connection] = talk, task
            for heard in wait(list(busy)):
                assert isinstance(heard, Connection)
                talk, task = busy.pop(heard)
                try:
                    found: Answer | Unanswered[Task] = talk.hear()
                    idle.append(talk)
                except EOFError:
                    found = Unanswered(task, f"The process that worked on it {_ended(talk.process.wait())}.")
                yield found


def serve(connection: Connection, request: tuple[list[str], bytes]) -> None:
    """Answer until nobody asks any more. Ctrl-C is for the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = request[0]
    ask = pickle.loads(request[1])
    while True:
        connection.send(_asked(ask, connection.recv()))


def _asked(ask: Callable[[Task], Answer], task: Task) -> Answer | Unanswered[Task]:
    try:
        return ask(task)
    except SpillwayError as error:
        return Unanswered(task, str(error))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        why = f"{type(error).__name__} was raised ({error}); its traceback stands above. This is a bug in Spillway."
        return Unanswered(task, why)
