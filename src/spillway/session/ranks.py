"""The processes of a group, each with a session of its own: where one cannot go on, all of them stop.

NOTE [Stopping together]. A rank that stops leaves the others in their next collective, for as long as the timeout of
the process group, half an hour.

 1. The rank that stops leaves its error in the store of the default process group: its number, its sentence. The first
    one counts, whoever stops next raises that.
 2. In every rank a thread polls the store four times a second, whatever the others of its process wait for. It answers
    with the connections that its process has, so that the last rank to look needs no store that others may take along.
 3. When all have answered, or a while later, each disconnects from the others: connections of which both ends are
    ranks, but not those of the store. Whatever waits in a collective of gloo fails at once. Communicators of NCCL are
    aborted.
 4. What fails in a step, or within the `with` of a session, after there was an error in the store, is raised as that
    error; so is the begin of any later step or session in this process group, whose store keeps it. A store serves one
    process group.
 5. Where no connection could be told, as behind a translation of addresses, nobody can be called out of a collective: a
    process that has not come back by then says the error and ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import stat
import sys
import threading
import uuid
import weakref
import zlib
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any, Final, final

import torch

from spillway import errors
from spillway.errors import SpillwayError, pass_notes
from spillway.internals.private import (
    default_store,
    is_distributed,
    local_of,
    nccl_backends,
    ports_of,
    process_groups,
)
from spillway.units import Seconds

POLL_INTERVAL: Final[Seconds] = 0.25
"""Between two looks for an error in the store."""
FAILURES: Final = 3
"""Of the store in a row, after which nobody keeps it."""
PATIENCE: Final[Seconds] = 3.0
"""For the answers of the others: one that has no session gives none."""
LAST: Final[Seconds] = 4.0
"""After that, for whoever cannot be called out of a collective."""

_ERROR: Final = "spillway error"

Connection = tuple[str, int, str, int]
"""Own address and port, those of the other end."""


@final
class Agreement:
    """Ranks whose second runs of blocks gather parameters, so that all have to run the same blocks again. `part` is a
    module that `fully_shard` gathers."""

    def __init__(self, part: torch.nn.Module) -> None:
        given: Any = next(one for one in part.parameters() if is_distributed(one))
        mesh, placements = given.device_mesh, given.placements
        self._group = mesh.get_group(next(at for at, one in enumerate(placements) if one.is_shard()))
        self._device = local_of(given).device

    def reached(self, recomputed: Collection[int], calls: int) -> bool:
        """Whether all ranks run these again, of so many calls that they know of. All have to ask at once."""
        number = zlib.crc32(repr((sorted(recomputed), calls if recomputed else 0)).encode())
        told = torch.tensor([number, -number], device=self._device)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, self._group)
        most, least = told.tolist()
        return bool(most == -least)


@final
class Ranks:
    """This process among those of the default process group, from here until `close`."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = group.rank()
        self._world: int = group.size()
        self._store: Any = default_store().clone()  # with a connection of its own: others block theirs
        self._lock = threading.Lock()
        self._error: dict[str, Any] | None = None
        self._closed, self._disconnected, self._raised = threading.Event(), threading.Event(), threading.Event()
        self._store.set_timeout(timedelta(seconds=PATIENCE))
        self._poll()
        self._thread = threading.Thread(target=self._listen, name="spillway ranks", daemon=True)
        self._thread.start()
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)  # a thread that comes back from C++ into an interpreter that is gone aborts all

    @property
    def error(self) -> SpillwayError | None:
        """What a rank has stopped with, to be raised."""
        if self._error is None:
            return None
        self._raised.set()
        return _restored(self._error)

    def abort(self, error: SpillwayError) -> SpillwayError:
        """All ranks stop with this, or with what another has stopped with before. Returns what is to be raised, when
        the others know."""
        attributes = {name: value for name, value in vars(error).items() if isinstance(value, int | float | str)}
        mine = {
            "kind": type(error).__name__, "sentence": str(error), "rank": self.rank, "attributes": attributes,
            "answers": uuid.uuid4().hex,
        }  # fmt: skip
        with contextlib.suppress(Exception):  # the store is gone, and so is who kept it
            self._receive(self._store.compare_set(_ERROR, "", json.dumps(mine)))
            self._disconnected.wait(2 * PATIENCE)
        told = self.error or error
        pass_notes(error, told)
        return told

    def cause_of(self, error: Exception) -> Exception:
        """What is to be raised where something failed: the error in the store, if there is one by now."""
        with contextlib.suppress(Exception):
            self._poll()
        return self.error or error

    def stop_listening(self) -> None:
        """As soon as the thread looks up."""
        self._closed.set()
        self._raised.set()

    def close(self) -> None:
        """Listen no more."""
        self.stop_listening()
        self._thread.join()
        atexit.unregister(self._at_exit)

    def _listen(self) -> None:
        with contextlib.suppress(Exception):
            if not self._wait_for_error():
                self._disconnected.set()
                return
            assert self._error is not None
            disconnected = self._disconnect(self._error)
            self._disconnected.set()
            while not (disconnected or self._raised.wait(LAST) or self._closed.is_set()):
                if not _waits_for_ranks():
                    continue  # it is busy, such as with writing a checkpoint
                with contextlib.suppress(Exception):
                    sys.stdout.flush()  # what the script has printed so far
                print(_restored(self._error), file=sys.stderr, flush=True)
                os._exit(1)
        self._disconnected.set()

    def _wait_for_error(self) -> bool:
        """Listens until there is an error; False as soon as nobody is to listen any more, or nobody keeps the store."""
        failures = 0
        while not self._closed.is_set():
            try:
                if self._poll():
                    return True
                failures = 0
            except RuntimeError:  # of the store: one that is slow for once is asked again
                failures += 1
                if failures == FAILURES:
                    return False
            self._closed.wait(POLL_INTERVAL)
        return False

    def _poll(self) -> bool:
        if self._error is None and self._store.check([_ERROR]):
            self._receive(self._store.get(_ERROR))
        return self._error is not None

    def _receive(self, said: bytes) -> None:
        with self._lock:
            self._error = self._error or json.loads(said)

    def _disconnect(self, told: dict[str, Any]) -> bool:
        """Whether anybody who waits for another rank is called out of that, or none listens."""
        mine = dict(_connections(ports_of(self._store)))
        answers = [f"{told['answers']} {rank}" for rank in range(self._world)]
        self._store.set(answers[self.rank], json.dumps([*mine.values()]))
        for _ in range(int(PATIENCE / POLL_INTERVAL)):
            if self._store.check(answers) or self._closed.wait(POLL_INTERVAL):
                break
        theirs = [one for one in answers if one != answers[self.rank] and self._store.check([one])]
        ends = {(*one[2:], *one[:2]) for answer in theirs for one in json.loads(self._store.get(answer))}
        backends = nccl_backends()
        for backend in backends:
            backend.abort()
        for number, connection in _connections(ports_of(self._store)):  # a number may be of another file by now
            if connection in ends:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
                    line.shutdown(socket.SHUT_RDWR)
        return bool(ends.intersection(mine.values()) or backends) or not theirs


def ranks_now(before: Ranks | None) -> Ranks | None:
    """Those of the default process group as it is now, with more than one; None without."""
    groups = process_groups()
    group = groups[0] if groups and groups[0].size() > 1 else None
    if before is not None and before.group is group:
        return before
    if before is not None:
        before.close()
    try:
        return Ranks(group) if group is not None else None
    except (RuntimeError, NotImplementedError):  # a store that cannot be asked beside others
        return None


def _waits_for_ranks() -> bool:
    """Whether the main thread is in a collective or a backward, which may wait for one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("torch.distributed.checkpoint"):
            return False
        if module.startswith(("torch.distributed.", "torch.autograd.")):
            return True
        frame = frame.f_back
    return False


def _close(ranks: weakref.ref[Ranks]) -> None:
    if (listening := ranks()) is not None:
        listening.close()


def _restored(told: dict[str, Any]) -> SpillwayError:
    kind = getattr(errors, told["kind"], SpillwayError)
    said = kind.__new__(kind, f"Rank {told['rank']} stops all ranks: {told['sentence']}")
    vars(said).update(told["attributes"], rank=told["rank"])
    restored: SpillwayError = said
    return restored


def _connections(ports: set[int]) -> Iterator[tuple[int, Connection]]:
    """Of this process over TCP, by the numbers of their files; none that begins or ends at one of these ports."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as line:
                    over_tcp = line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM
                    own, other = (line.getsockname()[:2], line.getpeername()[:2]) if over_tcp else (("", 0), ("", 0))
                if over_tcp and not {own[1], other[1]} & ports:
                    yield int(name), (*own, *other)
