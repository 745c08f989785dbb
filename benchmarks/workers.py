"""Competitors in processes of their own, asked in turn.

While one answers the others wait, so that they share the machine with strangers only, and with the same ones. The
processes are forked from one that has imported everything and run nothing: each starts clean, soon, and at the same
addresses.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, final

import torch

from benchmarks.record import frozen
from spillway.errors import SpillwayError

GRACE: Final = 10.0
"""Seconds that a process gets to end when nobody asks any more."""

PRELOADED: Final = ["benchmarks.training", "benchmarks.host_cost", "torch._dynamo"]
"""Torch loads the last one when the first optimizer is made, which would take most of a competitor's start."""


@frozen
class Job:
    """What a competitor is built from."""

    function: str
    """`module:function`, called in the competitor's process; what it returns is called, without arguments, for every
    question, and returns the answer."""
    options: Mapping[str, Any]
    """Its arguments."""


@final
@dataclass(frozen=True, slots=True)
class Worker:
    """A competitor that is ready."""

    channel: Connection

    def ask(self) -> Any:
        """Let it run once; what it tells.

        Raises:
            SpillwayError: As the competitor raised it.
            RuntimeError: It failed in any other way.
        """
        try:
            self.channel.send(None)
            answer, error = self.channel.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise RuntimeError("The process of a competitor has ended.") from None
        if error is not None:
            raise error if isinstance(error, SpillwayError) else RuntimeError(f"A competitor failed: {error}")
        return answer


@contextlib.contextmanager
def started(job: Job) -> Iterator[Worker]:
    """The competitor in its process, which ends with the block."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    here, there = processes.Pipe()
    process = processes.Process(target=_serve, args=(there, job), daemon=True)
    process.start()
    there.close()
    try:
        yield Worker(here)
    finally:
        here.close()
        process.join(GRACE)
        process.kill()
        process.join()
        process.close()


@contextlib.contextmanager
def all_started(jobs: Mapping[str, Job]) -> Iterator[Mapping[str, Worker]]:
    """Several competitors at once, by name."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(started(job)) for name, job in jobs.items()}


def _serve(channel: Connection, job: Job) -> None:
    """The life of a competitor's process: build it, then answer until nobody asks any more."""
    torch.set_num_threads(1)
    module, _, function = job.function.partition(":")
    with contextlib.suppress(EOFError):
        try:
            competitor = getattr(importlib.import_module(module), function)(**job.options)
            while True:
                channel.recv()
                channel.send((competitor(), None))
        except SpillwayError as error:
            channel.send((None, error))
        except EOFError:
            raise
        except Exception:
            channel.send((None, traceback.format_exc()))
