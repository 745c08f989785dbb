"""`spillway.record`: one step of a workload, by its name or as it is. And the samples of a dynamic one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

from spillway.engines.tensors.twins import streams_kept
from spillway.errors import UsageError
from spillway.ir import Recorded
from spillway.pilots.sample_files import RecordedSamples
from spillway.recording import Trainable
from spillway.recording import record as record_workload
from spillway.recording.path_recorder import PathRecorder
from spillway.workloads.named import get


def record(
    workload: str | Trainable | Callable[[], Trainable],
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
    facts = None
    if isinstance(workload, str):
        facts = {"seed": seed, "options": _as_json(options)}
        workload = partial(get, workload, seed=seed, **options)
    with streams_kept() if callable(workload) else nullcontext():
        return record_workload(workload, fake=fake, warm_up=warm_up, timed_steps=timed_steps, facts=facts)


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
        for batch in built.batches(steps):
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
