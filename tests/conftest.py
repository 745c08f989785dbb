"""Tiers: `pure` and `architecture` do without torch, `cpu` needs torch, the marker `gpu` needs a CUDA device, and what
the marker `long` names runs with `--long` alone."""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import signal
import sys
from typing import Any

import hypothesis
import pytest

from tests.shared import FULL_AUDIT

# The same examples on every run and every machine: a failure seen in CI is the failure seen at home.
hypothesis.settings.register_profile("spillway", derandomize=True, deadline=None)
hypothesis.settings.load_profile("spillway")

# One thread in processes that tests start too, unless told otherwise: where several processes share the processors,
# threads spin while they wait for each other, and that took longer than all that they computed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control has what it starts in the background ignore Ctrl-C, and so do all its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-torch", action="store_true", help="refuse every import of torch")
    parser.addoption("--long", action="store_true", default=FULL_AUDIT, help="also what takes long (make test-all)")
    parser.addoption("--screenshots", metavar="FOLDER", help="write the pictures of the documents, from tests/pages")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--without-torch"):
        return
    if "torch" in sys.modules:
        raise pytest.UsageError("torch was imported before --without-torch could refuse it")
    # What Python itself offers for this: an import of a name that stands for None is an ImportError.
    sys.modules["torch"] = None  # type: ignore[assignment]


def pytest_sessionstart(session: pytest.Session) -> None:
    """What torch consists of is not gone through while tests are collected, where that is done."""
    if not session.config.getoption("--without-torch") and not session.config.getoption("numprocesses", None):
        import torch._dynamo  # noqa: F401 which torch imports when the first optimizer is made

        gc.collect()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected is not gone through each time that garbage is collected, or tensors are."""
    if not session.config.getoption("--without-torch"):
        _freeze()


@pytest.fixture(autouse=True, scope="module")
def what_other_files_left_is_not_gone_through(pytestconfig: pytest.Config) -> None:
    """Libraries import much of themselves when it is used first, and that stays for all files that come later."""
    if not pytestconfig.getoption("--without-torch"):
        _freeze()


def _freeze() -> None:
    """Of what there is now, only tensors are gone through from here on: who holds one is looked for among those."""
    import torch

    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    _each(ctypes.pythonapi.PyObject_GC_UnTrack, tensors)
    gc.freeze()
    _each(ctypes.pythonapi.PyObject_GC_Track, tensors)


def _each(call: Any, tensors: list[Any]) -> None:
    for tensor in tensors:
        call(ctypes.py_object(tensor))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long") and not any("::" in named for named in config.args):
        tests = collections.defaultdict(list)
        for item in items:
            tests[item.nodeid.partition("[")[0]].append(item)
        left_out = {item for cases in tests.values() for item in _long(cases)}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def _long(cases: list[Any]) -> list[pytest.Item]:
    """Of the cases of one test those that take long; `long(but=2)` keeps two, the same ones in every process: one from
    the middle, then whichever has most values of parameters that no case before it had."""
    marked = cases[0].get_closest_marker("long")
    if marked is None:
        return []
    if marked.args or {*marked.kwargs} - {"but"}:
        raise pytest.UsageError(f"{cases[0].nodeid} is marked long({marked.args}, {marked.kwargs}); write long(but=2).")
    values = [
        {(name, repr(value)) for name, value in case.callspec.params.items()}
        for case in cases
        if hasattr(case, "callspec")
    ]
    kept, met = list[int](), set[tuple[str, str]]()
    for _ in range(min(marked.kwargs.get("but", 0), len(values))):
        rest = sorted(set(range(len(values))) - {*kept}, key=lambda number: number != len(values) // 2)
        kept.append(max(rest, key=lambda number: len(values[number] - met)))
        met |= values[kept[-1]]
    return [case for number, case in enumerate(cases) if number not in kept]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
