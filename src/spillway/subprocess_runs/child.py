"""The process of one run, started by `run`."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch

from spillway.errors import SpillwayError, WorkloadError
from spillway.internals.process_memory import PeakMemory
from spillway.methods import Mimose
from spillway.processes import as_sent
from spillway.session import ReportOptions, Session, SpillOptions, manage
from spillway.session.input_sizes import largest_size
from spillway.subprocess_runs.run import STATIC, RunRequest, RunResult, StepDone
from spillway.units import Bytes
from spillway.workloads import Batch, Workload, get
from spillway.workloads.named import told


def main(connection: Connection, request: RunRequest) -> None:
    """Carry out the request, and tell of it."""
    torch.set_num_threads(1)
    try:
        batches = _batches(request)
        _warm_up()
        memory = PeakMemory()
        workload = get(request.workload, seed=request.seed)
        with _session(request, workload, batches) as session:
            peak = _train(workload, batches, session, memory, connection)
        connection.send(RunResult(peak_rss_bytes=peak, state=_digest(workload)))
    except SpillwayError as error:
        connection.send(as_sent(error))


def _batches(request: RunRequest) -> list[Batch]:
    """All input of the run, made before memory is measured; the model that comes with it is given up again."""
    workload = get(request.workload, seed=request.seed)
    with told(f"Making the batches of the workload {request.workload}"):
        batches = list(islice(workload.batches(request.steps), request.steps))
    if not batches:
        raise WorkloadError(f"The workload {request.workload} has no batches.")
    return batches


def _warm_up() -> None:
    """A small step of a small model loads what the first step of a process loads: it is torch's, not the workload's."""
    model = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, 64)).sum().backward()
    optimizer.step()


@contextmanager
def _session(request: RunRequest, workload: Workload, batches: list[Batch]) -> Iterator[Session | None]:
    if request.method is None:
        yield None
        return
    # The static plan has to know the largest input, which only a run knows that has all of them.
    method = Mimose.static(largest_size(batches)) if request.method == STATIC else request.method
    session = manage(
        workload.model, workload.optimizers, budget=request.budget_bytes, method=method,
        spill=SpillOptions(directory=request.spill_directory, io=request.spill_io, return_freed=request.return_freed),
        report=ReportOptions(run_file=request.run_file, timeline=request.timeline),
    )  # fmt: skip
    with session:
        yield session


def _train(
    workload: Workload, batches: list[Batch], session: Session | None, memory: PeakMemory, connection: Connection
) -> Bytes:
    """Train one step per batch. Returns the highest resident set above the start."""
    peak = 0
    for number, batch in enumerate(batches):
        began = time.perf_counter()
        with nullcontext() if session is None else session.step(batch):
            with told(f"Step {number} of the workload {workload.name}"):
                loss = float(workload.train_step(batch))
            if session is not None:
                session.log(loss=loss)
        seconds = time.perf_counter() - began
        peak = max(peak, memory.above_start())
        report = None if session is None else session.history[-1]
        connection.send(StepDone(seconds=seconds, loss=loss, report=report))
    return peak


def _digest(workload: Workload) -> str:
    """SHA-256 of everything that the steps may have changed."""
    digest = hashlib.sha256()
    model = workload.model
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    optimizers = [optimizer.state_dict() for optimizer in workload.optimizers]
    streams = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()]
    for part in _flat([parameters, dict(model.named_buffers()), gradients, optimizers, streams]):
        digest.update(part)
    return digest.hexdigest()


def _flat(state: Any) -> Iterator[bytes]:
    if isinstance(state, dict):
        yield from _flat([item for pair in state.items() for item in pair])
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _flat(item)
    elif isinstance(state, torch.Tensor):
        yield f"{state.dtype} {tuple(state.shape)} {state.stride()}".encode()
        yield state.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(state, numpy.ndarray):
        yield state.tobytes()
    else:
        yield repr(state).encode()
