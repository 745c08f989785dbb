"""The process that measures, started by `real`.

Asked with a method and a batch size, it answers with a trial, with the error that kept it from one, or with the exit
code of a trial that told nothing.

NOTE [Trials]. Every trial is a process of its own, forked from one that has loaded everything and has run no step:

 1. What a trial leaves in the allocator is gone with it, so that no trial's figures depend on those before it, and none
    waits for torch and the workload's libraries to be loaded.
 2. A process that has used CUDA cannot be forked. Where there is CUDA nothing is built before the fork.
 3. The time of a step is the median of several, on the same batches by number, whatever the size: where inputs have
    their natural lengths, the steps of a larger batch are longer than in proportion, as they are in training.
 4. The peak is that of one more step on each shape that was timed, the highest. It is traced from outside, plainly and
    under a session alike: every allocation since the step began, on top of what is known by name then.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final, NamedTuple, cast, final

import torch
from torch import Tensor

from spillway.advisor.bench import NAMES, OTHER, Trial
from spillway.advisor.ways import Way, way_of
from spillway.engines.blocks.trace import AllocationTrace, Held
from spillway.engines.tensors.devices import device_of
from spillway.errors import DeviceFullError, ModelError, NoBlocksError, SpillwayError, TrialError, WorkloadError
from spillway.internals.process_memory import found_no_memory
from spillway.ir import Kind
from spillway.methods import Checkpoint
from spillway.processes import as_sent
from spillway.recording.steps import named_tensors
from spillway.session import BlockOptions, BlockSession, ReportOptions, SpillOptions, manage
from spillway.session.inputs import signature_of, storages
from spillway.units import Bytes, Seconds
from spillway.workloads import Batch, Workload, get
from spillway.workloads.named import described
from spillway.workloads.workload import moved

ROOMY: Final = "100%"
"""The budget of sessions: without one nothing is in want of room, and a session does nothing with blocks."""
NEVER: Final = 1 << 63
"""Later than any time."""
_SMALL: Final = (1, 2, 8, 64)
"""Batch sizes at which a workload is built to look at it: the first that it takes."""


def main(connection: Connection, request: dict[str, Any]) -> None:
    """Tell what is known of the workload, then answer every question with a trial."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a look that uses CUDA forbids to fork
    torch.set_num_threads(1)

    def facts() -> None:
        told = _told(f"Building the workload {request['workload']}", partial(_facts, request))
        if isinstance(told, TrialError):  # at no batch size
            told = SpillwayError(str(told))
        elif told is None:
            told = SpillwayError(f"There is not enough memory to build the workload {request['workload']}.")
        connection.send(told)

    def answer() -> None:
        told = _told(f"A step of {method} at batch {size}", partial(_measured, request, way_of(method), size))
        connection.send(Trial(method=method, size=size, peak=None, seconds=None) if told is None else told)

    if torch.cuda.is_available():
        _forked(connection, facts)
    else:
        facts()
    while True:
        method, size = connection.recv()
        _forked(connection, answer)


def _forked(connection: Connection, action: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        connection.send(code)


def _told(what: str, action: Callable[[], Any]) -> Any:
    """What is found out, None where memory ran out, or the error: a TrialError is what the workload raised, maybe at
    this batch size alone."""
    try:
        return action()
    except (torch.OutOfMemoryError, DeviceFullError):
        return None
    except WorkloadError as error:
        return TrialError(str(error))
    except SpillwayError as error:
        return as_sent(error)
    except Exception as error:
        if found_no_memory(error):
            return None
        return TrialError(f"{what} raised {described(error)}; name sizes that can be trained with --batches.")


def _facts(request: dict[str, Any]) -> dict[str, Any]:
    """What is known of the workload before anything is measured, built at the smallest size that it takes.

    Raises WorkloadError for one that is built at none, about the smallest.
    """
    workload, failed = None, list[WorkloadError]()
    for size in _SMALL:
        try:
            workload = _built(request, size)
            break
        except WorkloadError as error:
            if error.__cause__ is None or isinstance(error.__cause__, WorkloadError):
                raise
            failed.append(error)
    if workload is None:
        raise failed[0]
    with contextlib.suppress(Exception):  # a trial will tell
        next(iter(workload.batches(1)), None)  # what is read for the first batch need not be read in every trial
    device = device_of([workload.model])
    gradients = storages((Kind.GRADIENT, one) for one in workload.model.parameters() if one.requires_grad)
    hardware, free = "this CPU", None
    if device.type == "cuda":
        # What the model takes there is free too: peaks have that in them.
        hardware = torch.cuda.get_device_name(device)
        free = int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
    return {"hardware": hardware, "gradient_bytes": sum(one.nbytes() for one in gradients), "device_bytes": free}


def _built(request: dict[str, Any], size: int) -> Workload:
    name, options = request["workload"], request["options"]
    try:
        workload = get(name, seed=request["seed"], batch=size, **options)
        return workload if request.get("device") is None else moved(workload, request["device"])
    except WorkloadError as error:
        told = [one for one in ("batch", *options) if re.search(rf" no {one}(, which| and no )", str(error))]
        if not told:
            raise
        offered, why = "function(seed=0, *, batch=8)", "it is trained at several batch sizes"
        if told[0] != "batch":
            offered, why = f"function(seed=0, *, batch=8, {told[0]}=...)", f"--{told[0]} was given"
        raise WorkloadError(
            f"The workload {name} takes no {told[0]}=, and {why}: give its function that argument, as in {offered}."
        ) from error


def _measured(request: dict[str, Any], way: Way, size: int) -> Trial:
    if way.micro and size % way.micro:
        raise WorkloadError(f"A batch of {size} samples is no multiple of micro-batches of {way.micro}.")
    samples, count = (way.micro, size // way.micro) if way.micro else (size, 1)
    workload = _built(request, samples)
    drawn = list(workload.batches((request["steps"] + 1) * count))
    if not drawn:
        raise WorkloadError(f"The workload {workload.name} has no batches.")
    # The micro-batches of each step, the last of which are used again where there are not as many.
    first, *timed = [
        [drawn[(step * count + number) % len(drawn)] for number in range(count)]
        for step in range(request["steps"] + 1)
    ]  # fmt: skip
    with _session(workload, way, request["spill_directory"]) as session:
        run = _Steps(workload, session, samples)
        try:
            run.step(first)  # the optimizer makes its state, and the session finds the blocks
        except NoBlocksError as error:
            raise ModelError(
                f"No blocks were found in the workload's {type(workload.model).__name__}, and all methods but plain "
                f"training work on blocks ({error.reason}): give the model layers that repeat, modules of one class "
                f"with modules inside."
            ) from error
        seconds = [run.timed(step) for step in timed]
        peaks = [run.peak(step) for step in {signature_of(step): step for step in timed}.values()]
    highest = max(peaks, key=lambda one: one.nbytes)
    return Trial(
        method=way.name, size=size, peak=highest.nbytes, seconds=median(seconds), by_kind=highest.by_kind,
        before_update=None if highest.before_update is None else max(one.before_update or 0 for one in peaks),
    )  # fmt: skip


@contextmanager
def _session(workload: Workload, way: Way, spill_directory: str | None) -> Iterator[BlockSession | None]:
    if way.action is None:
        yield None
        return
    method = Checkpoint(way.action, waits=way.waits)
    on_cuda = device_of([workload.model]).type == "cuda"
    session = manage(
        workload.model, workload.optimizers, budget=ROOMY, method=method, blocks=BlockOptions(lossy=way.lossy),
        spill=SpillOptions(directory=spill_directory, return_freed=False),
        # Where the session's own peaks cost next to nothing, and another count would disturb them.
        report=ReportOptions(timeline=on_cuda),
    )  # fmt: skip
    with session:
        assert isinstance(session, BlockSession)
        yield session


class _Peak(NamedTuple):
    nbytes: Bytes
    by_kind: dict[str, Bytes]
    """Empty where nobody knows."""
    before_update: Bytes | None


@final
class _Steps:
    """Runs steps of a workload."""

    def __init__(self, workload: Workload, session: BlockSession | None, samples: int) -> None:
        self._workload = workload
        self._samples = samples
        self._session = session
        self._device = device_of([workload.model])

    def step(self, batches: Sequence[Batch]) -> None:
        if self._session is not None:
            (batch,) = batches
            with self._session.step(batch):
                self._workload.train_step(batch)
        elif len(batches) == 1:
            self._workload.train_step(batches[0])
        else:  # the gradients of all micro-batches, and one update by their mean
            workload = self._workload
            for batch in batches:
                loss = workload.loss(workload.model, batch) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
            workload.update()

    def timed(self, batches: Sequence[Batch]) -> Seconds:
        """By the wall clock."""
        self._wait()
        began = time.perf_counter()
        self.step(batches)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def peak(self, batches: Sequence[Batch]) -> _Peak:
        """The highest account of a step, and what it is of where that is known."""
        if self._device.type == "cuda":
            if self._session is None:
                torch.cuda.reset_peak_memory_stats(self._device)
            self.step(batches)
            there = torch.cuda.max_memory_allocated(self._device)
            return _Peak(there if self._session is None else self._session.history[-1].peak_bytes, {}, None)
        watched = _Watched(self._workload, batches)
        freed = self._session.when_freed if self._session is not None else None
        trace = AllocationTrace({address: nbytes for address, (nbytes, _) in watched.known.items()})
        if freed is not None:
            freed.append(trace.freed)
        try:
            with watched.watching(trace):
                trace.mark()
                self.step(batches)
        finally:
            if freed is not None:
                freed.remove(trace.freed)
            windows = trace.stop()
        held = trace.at_peak()
        if not windows or held is None:
            raise SpillwayError(
                "The peak of a step cannot be measured, because the workload profiles its own steps: leave that out."
            )
        by_kind = watched.by_kind(held, trace, self._samples)
        return _Peak(watched.start + max(window.peak for window in windows), by_kind, watched.start + windows[0].peak)


@final
@dataclass(slots=True)
class _Watched:
    """What is known by name when a step begins, and what becomes known while it runs."""

    workload: Workload
    batches: Sequence[Batch]
    known: dict[int, tuple[Bytes, str]] = field(default_factory=dict)
    """Bytes and kind of what is there when the step begins, by address."""
    gradients: list[tuple[int, int, Bytes]] = field(default_factory=list)
    """When a backward had made one, where it lies, and its bytes."""
    updating: int = NEVER
    """When the update began."""

    def __post_init__(self) -> None:
        for kind, _, tensor in named_tensors([self.workload.model], self.workload.optimizers, list(self.batches)):
            storage = tensor.untyped_storage()
            self.known.setdefault(storage.data_ptr(), (storage.nbytes(), NAMES.get(kind, OTHER)))

    @property
    def start(self) -> Bytes:
        """When the step begins."""
        return sum(nbytes for nbytes, _ in self.known.values())

    @contextmanager
    def watching(self, trace: AllocationTrace) -> Iterator[None]:
        """Notes gradients and the update."""

        def made(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                storage = gradient.untyped_storage()
                self.gradients.append((time.time_ns(), storage.data_ptr(), storage.nbytes()))

        def updates(*_: object) -> None:
            if self.updating == NEVER:
                trace.mark()
                self.updating = time.time_ns()

        parameters = [one for one in self.workload.model.parameters() if one.requires_grad and one.is_leaf]
        with ExitStack() as stack:
            for one in parameters:
                stack.callback(cast(Any, one).register_post_accumulate_grad_hook(made).remove)
            for optimizer in self.workload.optimizers:
                stack.callback(optimizer.register_step_pre_hook(updates).remove)
            yield

    def by_kind(self, held: Held, trace: AllocationTrace, samples: int) -> dict[str, Bytes]:
        """Of the bytes at the peak, of a batch of so many samples.

        What the update takes for itself is "other", and so are storages that are no multiple of the samples: what ops
        work with, as reordered weights, which does not grow with the batch. Where both are even that is not seen.
        """
        found = dict.fromkeys((*NAMES.values(), OTHER), 0)
        for nbytes, kind in self.known.values():
            found[kind] += nbytes
        rest = dict(held.storages)
        for at, address, nbytes in self.gradients:
            if address in rest and trace.allocated(address, at) == rest[address][0]:
                del rest[address]
                found["gradients"] += nbytes
        for _, nbytes in rest.values():
            found[OTHER if held.at >= self.updating or nbytes % samples else "activations"] += nbytes
        return found
