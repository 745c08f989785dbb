"""Tasks for several processes, answered as they come.

The standard library's pools either wait forever for what a killed process was to answer, or cannot say which task it
had and how to end the others at once. So each process has a pipe of its own here, and one task at a time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final, Generic, TypeVar, final

from spillway.errors import SpillwayError

Task = TypeVar("Task")
Answer = TypeVar("Answer")

_CONTEXT: Final = multiprocessing.get_context("spawn")
"""Fresh processes: whoever calls may have threads, such as the one that draws its progress."""


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
    workers: list[_Worker[Task, Answer]] = []
    try:
        for _ in range(min(processes, len(waiting))):
            workers.append(_Worker(ask))
            workers[-1].give(waiting.popleft())
        while workers:
            heard = wait([worker.connection for worker in workers])
            for worker in [worker for worker in workers if worker.connection in heard]:
                yield worker.answer()
                if worker.alive and waiting:
                    worker.give(waiting.popleft())
                    continue
                workers.remove(worker)
                worker.end()
                if waiting:
                    workers.append(_Worker(ask))
                    workers[-1].give(waiting.popleft())
    finally:
        for worker in workers:
            worker.end()


def _asked(ask: Callable[[Task], Answer], task: Task) -> Answer | Unanswered[Task]:
    try:
        return ask(task)
    except SpillwayError as error:
        return Unanswered(task, str(error))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        why = f"{type(error).__name__} was raised ({error}); its traceback stands above. This is a bug in Spillway."
        return Unanswered(task, why)


@final
class _Worker(Generic[Task, Answer]):
    """A process, the pipe to it, and the task that it has."""

    def __init__(self, ask: Callable[[Task], Answer]) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.alive = True
        self._tasks: list[Task] = []
        self._process: SpawnProcess = _CONTEXT.Process(target=_serve, args=(theirs, ask), daemon=True)
        with _interrupts_wait():
            self._process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        """Have it work on a task."""
        self._tasks = [task]
        with contextlib.suppress(BrokenPipeError):  # that it is dead is heard
            self.connection.send(task)

    def answer(self) -> Answer | Unanswered[Task]:
        """What it says about its task, or that it is dead."""
        try:
            found: Answer | Unanswered[Task] = self.connection.recv()
            return found
        except (EOFError, ConnectionResetError):
            self.alive = False
            self._process.join()
            return Unanswered(self._tasks[0], f"The process that worked on it {_ended(self._process.exitcode or 0)}.")

    def end(self) -> None:
        """End it, whatever it does."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, ask: Callable[[Any], Any]) -> None:
    """Answer until nobody asks any more. Ctrl-C is for the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(_asked(ask, connection.recv()))


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """A process that starts within does not hear Ctrl-C before it has learned to ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed, as the system does when memory runs out"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
