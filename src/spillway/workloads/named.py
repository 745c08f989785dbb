"""From a name, or `path/to/file.py:function`, to a workload."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final

from spillway.errors import SpillwayError, WorkloadError
from spillway.workloads import deep_narrow, published, resnet, stdlib_lm
from spillway.workloads.dynamic import evoformer, moe, tree_cnn, tree_lstm, unrolled_gan, var_bert, var_lstm
from spillway.workloads.workload import Workload

DYNAMIC: Final = (tree_lstm, tree_cnn, var_lstm, var_bert, moe, unrolled_gan, evoformer)
"""Those whose forward differs from sample to sample."""
WORKLOADS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {own.NAME: own.build for own in (stdlib_lm, resnet, deep_narrow, *DYNAMIC)} | dict(published.BUILDERS)
)
"""Every workload that comes with Spillway, by its name."""


def get(name_or_file: str, *, seed: int = 0, **options: object) -> Workload:
    """Builds the workload of that name, or the one that a function of a user's file returns.

    The function is called as `function(seed=seed, **options)`, seeds the random streams (`seed_everything`) and returns
    a `Workload`. While its file is loaded and while it runs, the file's folder is on the path for imports, as it is for
    a script.

    Raises WorkloadError if there is no such name, file or function, or what it gave is not a workload.
    """
    if name_or_file in WORKLOADS:
        return _built(WORKLOADS[name_or_file], name_or_file, seed, options)
    file, colon, function = name_or_file.rpartition(":")
    if not colon and name_or_file.endswith(".py"):
        raise WorkloadError(f"{name_or_file!r} names a file but no function in it; write {name_or_file}:function.")
    if not colon:
        names = ", ".join(sorted(WORKLOADS))
        raise WorkloadError(
            f"There is no workload {name_or_file!r}; choose one of {names}, or write path/to/file.py:function."
        )
    if not file or not function.isidentifier():
        raise WorkloadError(f"{name_or_file!r} is not a workload's file and function; write path/to/file.py:function.")
    path = Path(os.path.expanduser(file))
    if not os.path.isfile(path):  # false where the system does not say, too
        raise WorkloadError(f"There is no file {file} to load a workload from.")
    entry = str(path.parent.resolve())
    sys.path.insert(0, entry)
    try:
        found = getattr(_loaded(path), function, None)
        if found is None:
            raise WorkloadError(f"{path} has no function {function!r}.")
        if not callable(found):
            raise WorkloadError(f"{function!r} in {path} is not a function but {_a(found)}.")
        return _built(found, name_or_file, seed, options)
    finally:
        # The file may have changed the path itself; only what was put there is taken away.
        if entry in sys.path:
            sys.path.remove(entry)


def _loaded(path: Path) -> ModuleType:
    # A name of its own, so that a user's `resnet.py` is not taken for something that is installed.
    name = f"spillway_workload_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} is not a Python file; its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Pickling and dataclasses look a class's module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise WorkloadError(f"Loading {path} raised {described(error)}.") from error
    return module


def _built(build: Callable[..., object], name: str, seed: int, options: Mapping[str, object]) -> Workload:
    _check_takes(build, name, ["seed", *options])
    try:
        workload = build(seed=seed, **options)
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in {"seed": seed, **options}.items())
        raise WorkloadError(f"The workload {name} called with {given} raised {described(error)}.") from error
    if not isinstance(workload, Workload):
        raise WorkloadError(f"{name} returned {_a(workload)} where a spillway.workloads.Workload was expected.")
    return workload


def _check_takes(build: Callable[..., object], name: str, given: Sequence[str]) -> None:
    try:
        takes = inspect.signature(build).parameters
    except (TypeError, ValueError):  # of some callables nobody knows
        return
    missing = [one for one in given if one not in takes]
    if missing and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        raise WorkloadError(
            f"The workload {name} takes no {' and no '.join(missing)}, which it was given; it takes "
            f"{', '.join(takes) or 'nothing'}."
        )


@contextmanager
def told(what: str) -> Iterator[None]:
    """What a workload's own code raises within is told in one sentence, as verbs of the command line want it. Raises
    WorkloadError from what was raised, with the place where it was."""
    try:
        yield
    except SpillwayError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"{what} raised {described(error)}.") from error


def described(error: BaseException) -> str:
    """The type, the first line of the message, which says what it is about, and the line of the user's code."""
    message = str(error).strip().partition("\n")[0]
    said = f"{type(error).__name__}: {message.rstrip('.')}" if message else type(error).__name__
    places = [one for one in traceback.extract_tb(error.__traceback__) if _is_users(one.filename)]
    return f"{said} ({places[-1].filename}, line {places[-1].lineno})" if places else said


def _is_users(file: str) -> bool:
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others = [Path(__file__).parents[1], *installed]
    return not file.startswith("<") and not any(Path(file).is_relative_to(other) for other in others)


def _a(thing: object) -> str:
    return "None" if thing is None else f"an object of type {type(thing).__name__}"
