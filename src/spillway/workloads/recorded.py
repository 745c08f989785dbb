"""`spillway.record`: one step of a workload, by its name or as it is. And the samples of a dynamic one."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, final

import numpy as np
import torch

from spillway.engines.tensors.twins import streams_kept
from spillway.errors import UsageError
from spillway.internals.private import unheard
from spillway.ir import Recorded
from spillway.pilots.architecture import Architecture
from spillway.pilots.paths import Sample
from spillway.pilots.sample_files import RecordedSamples
from spillway.recording.path_recorder import ForwardRecorder
from spillway.recording.recorder import arriving, as_fake, fake_tensors
from spillway.recording.steps import leaves, record_step
from spillway.workloads.named import get
from spillway.workloads.workload import Workload


def record(
    workload: str | Workload | Callable[[], Workload],
    *,
    fake: bool = False,
    warm_up: int = 1,
    timed_steps: int = 0,
    seed: int = 0,
    **options: object,
) -> Recorded:
    """Record one training step: its ops in order, what they read and make, and how long everything lives.

    The step is the one that would run anyway, bit for bit, on the workload's first batch. By default the second step
    is recorded, because the first one creates the optimizer's state. What is built here leaves the global random
    streams as they were.

    Arguments:
        workload: A name from `spillway.workloads`, `path/to/file.py:function`, a workload, or a function that builds
            one. With `fake` it has to be built here: a workload that is there already has bytes.
        fake: On tensors without content: any size, in no memory to speak of; ops have no seconds.
        warm_up: Steps that run before.
        timed_steps: Further steps that run afterwards; an op's seconds are the median over all that made the same ops.
        seed: Of the model and the data, for a workload by name.
        options: What the workload takes besides, such as `batch` and `length`.

    Raises:
        UsageError: A workload that cannot be found, built or recorded; the message says why.
    """
    if not isinstance(workload, str) and options:
        raise TypeError(f"record() takes {', '.join(options)} only for a workload by name")
    if min(warm_up, timed_steps) < 0:
        raise UsageError(f"Steps beside the recorded one are 0 or more; got {warm_up=} and {timed_steps=}.")
    facts: dict[str, Any] = {}
    if isinstance(workload, str):
        facts = {"seed": seed, "options": _as_json(options)}
        workload = partial(get, workload, seed=seed, **options)
    if fake and not callable(workload):
        raise UsageError(
            "A workload to record on fake tensors has to be built among them: pass the function that does."
        )
    with ExitStack() as stack:
        if callable(workload):
            stack.enter_context(streams_kept())
        among = stack.enter_context(fake_tensors()) if fake else None
        built: object = workload() if callable(workload) else workload
        if not isinstance(built, Workload):
            raise UsageError(f"A workload is recorded, or what builds one, and not {built!r}.")
        batch: Any = next(iter(built.batches(1)), None)
        if batch is None:
            raise UsageError(f"The workload {built.name} has no batches.")
        batch = batch if among is None else as_fake(among, batch)
        step = record_step(
            lambda: built.train_step(batch), models=built.model, optimizers=built.optimizers, batch=batch,
            warm_up=warm_up, timed_steps=0 if fake else timed_steps, measured=not fake,
        )  # fmt: skip
    shapes = {name or "batch": f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in leaves(batch, "")}
    told = {"fake": fake, "batch": shapes, "torch": torch.__version__, **facts}
    if not fake:
        told |= {
            "threads": torch.get_num_threads(), "timed_steps": 1 + timed_steps,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        }  # fmt: skip
    return Recorded(step=step, workload=built.name, size=built.size, facts=told)


@final
class PathRecorder:
    """Runs steps of a workload, and writes down what their forwards do.

    Raises UsageError for a workload that does not say what is dynamic about it, or names no module of the model.
    """

    def __init__(self, workload: Workload) -> None:
        if workload.dynamism is None:
            raise UsageError(
                f"The workload {workload.name} does the same for every sample: there is no path to record."
            )
        self.architecture = Architecture(workload.name, workload.dynamism.base)
        """What was seen so far."""
        self._workload, self._dynamism = workload, workload.dynamism
        self._recorder = ForwardRecorder(self.architecture, [workload.model], workload.dynamism)
        self._steps = 0

    def sample(self, batch: Any, *, update: bool = True) -> Sample:
        """One step of the network, and what it did; with `update` the backward and the optimizers run after the
        forward."""
        recorder = self._recorder
        with recorder.watching(), arriving(self._handle):
            loss = self._workload.loss(self._workload.model, batch)
        if update:
            loss.backward()  # type: ignore[no-untyped-call]
            self._workload.update()
        self._steps += 1
        forward = recorder.forward
        if forward.embedding is None:
            raise UsageError(f"The forward of {self._workload.name} did not call {self._dynamism.embedding!r}.")
        return Sample(
            step=self._steps - 1, sizes=self._dynamism.sizes(batch), structure=tuple(self._dynamism.structure(batch)),
            embedding=forward.embedding, base=self._dynamism.base,
            path=self.architecture.path(forward.keys, forward.starts, forward.operands),
            signatures=np.array(forward.signatures, np.int32), asked_at=np.array(forward.asked_at, np.int32),
            hidden=np.array(forward.hidden, np.float32).reshape(-1, len(forward.embedding)),
            loss=float(loss.detach()),
        )  # fmt: skip

    @unheard
    def _handle(self, _: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        met = self._recorder.before(func, args, kwargs)
        out = func(*args, **kwargs)
        if met is not None:
            self._recorder.after(met, out)
        return out


def record_samples(
    workload: str, *, steps: int, frozen: bool = False, tell: Callable[[int], None] | None = None, seed: int = 0,
    **options: object,
) -> RecordedSamples:  # fmt: skip
    """Run a dynamic workload, and record what the forward of every step does.

    Arguments:
        workload: A name from `spillway.workloads`, or `path/to/file.py:function`.
        frozen: Whether the model stays as it is, in evaluation mode: forwards run, and no backward.
        tell: Called with the number of every step that was recorded.
        seed: Of the model and the data.
        options: What the workload takes besides.

    Raises:
        UsageError: A workload that cannot be found or built, does not say what is dynamic about it, or ends early.
    """
    with streams_kept():
        built = get(workload, seed=seed, **options)
        recorder, samples = PathRecorder(built), []
        built.model.train(not frozen)
        for batch in islice(built.batches(steps), steps):
            samples.append(recorder.sample(batch, update=not frozen))
            if tell is not None:
                tell(len(samples))
    if len(samples) < steps:
        raise UsageError(f"The workload {workload} has {len(samples)} batches of the {steps} to be recorded.")
    facts = {"seed": seed, "steps": steps, "frozen": frozen, "options": _as_json(options)}
    return RecordedSamples(architecture=recorder.architecture, samples=tuple(samples), facts=facts)


def _as_json(options: Mapping[str, object]) -> dict[str, object]:
    """What JSON gives back as it is."""
    kept = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, kept) else repr(value) for name, value in options.items()}
