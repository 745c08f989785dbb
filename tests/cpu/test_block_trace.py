"""Traces of allocations: what threads free that the profiler does not hear."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from spillway.engines.blocks.trace import AllocationTrace
from spillway.units import MiB

PAGE = 1024


def taken(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def peak_after_a_thread_freed(*, told: bool) -> int:
    """From then on, of 8 MiB that a thread frees, and 2 MiB beside them."""
    trace = AllocationTrace({})
    trace.mark()
    held, beside = [taken(8 * MiB)], taken(2 * MiB)

    def free() -> None:
        at, address, nbytes = time.time_ns(), held[0].data_ptr(), held[0].nbytes()
        held.clear()
        if told:
            trace.freed(at, address, nbytes)

    in_a_thread(free)
    trace.mark()
    windows = trace.stop()
    del beside
    return windows[1].peak


def test_what_a_thread_frees_is_gone_once_it_says_so() -> None:
    assert peak_after_a_thread_freed(told=True) == 2 * MiB


def test_what_a_thread_frees_without_a_word_counts_on() -> None:
    assert peak_after_a_thread_freed(told=False) == 10 * MiB


def test_who_takes_the_address_of_what_was_freed_unheard_takes_its_place() -> None:
    trace = AllocationTrace({})
    trace.mark()
    for _ in range(8):
        held = [taken(PAGE)]
        in_a_thread(held.clear)
    windows = trace.stop()
    addresses = len({event.address for event in trace._memory})
    assert windows[0].peak == addresses * PAGE  # and not 8 of them, if any was taken again


def test_a_profiler_that_is_open_in_another_thread_is_left_alone() -> None:
    opened, go_on, found = threading.Event(), threading.Event(), []

    def profile() -> None:
        with torch.autograd.profiler.profile():
            opened.set()
            go_on.wait()

    thread = threading.Thread(target=profile)
    thread.start()
    opened.wait()
    found.append(AllocationTrace.possible())
    go_on.set()
    thread.join()
    assert [*found, AllocationTrace.possible()] == [False, True]


def test_a_profiler_of_another_thread_begins_when_the_trace_has_ended_at_its_next_mark() -> None:
    trace, still_on = AllocationTrace({}), []

    def profile() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.ones(64)

    thread = threading.Thread(target=profile)
    thread.start()
    while thread.is_alive():
        trace.mark()
    still_on.append(torch._C._autograd._profiler_enabled())
    assert (trace.stop(), still_on) == ([], [False])
