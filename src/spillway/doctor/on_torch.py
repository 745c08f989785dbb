"""What this torch offers, and the devices that it sees: what Spillway makes of them, for people (`spillway doctor`)."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from spillway.calibration.measured import fastest, link_rates
from spillway.doctor import Finding, Problem
from spillway.doctor.on_spill import rate
from spillway.engines.tensors.devices import pinned_bytes
from spillway.errors import DeviceFullError, NativeError
from spillway.internals.private import CAN_SWAP
from spillway.native.arena import Arena
from spillway.native.device_arena import DRIVER, DeviceArena
from spillway.native.library import HOOK, library_path, load_hook
from spillway.processes import cores
from spillway.tiers.disk import WORKERS
from spillway.units import Bytes, MiB, Seconds, format_bytes

SAMPLE: Final[Bytes] = 64 * MiB
"""Bytes of one copy that is measured."""
PATIENCE: Final[Seconds] = 0.1
"""How long each is."""
_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_KERNELS: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
"""The first one that is set counts."""
_KERNELS_KEPT: Final = 1024
NATIVE: Final = "native"
"""The caching allocator of torch's own."""


def version() -> Finding:
    """The version, and the features that Spillway stands on."""
    problems = []
    if not CAN_SWAP:
        what = f"torch {torch.__version__} cannot exchange a storage's bytes in place, which models on the CPU need."
        fatal = not torch.cuda.is_available()
        problems.append(Problem(what=what, fix="Use torch 2.13 or newer.", fatal=fatal))
    swap = "exchanges a storage's bytes in place, so that anything may leave memory" if CAN_SWAP else "is too old"
    return Finding(
        topic="torch", sentence=f"torch {torch.__version__} {swap}.", problems=problems,
        facts={
            "version": str(torch.__version__), "_swap_data_ptr_": CAN_SWAP,
            "saved_tensors": hasattr(torch._C._autograd, "_make_saved_tensor"),
            "onednn": bool(torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]
        },
    )  # fmt: skip


def native() -> Finding:
    """The part in C++, compiled here if it is not there yet."""
    try:
        Arena().release()
    except NativeError as reason:
        what = f"The native part is not to be had: {reason}"
        fix = "Sessions run without it; what leaves memory and comes back costs page faults then."
        problem = Problem(what=what, fix=fix)
        return Finding(
            topic="native part", sentence="Not there.", facts={"library": None, "hook": None}, problems=[problem]
        )
    path = str(library_path())
    try:
        load_hook()
        hook, problems = str(library_path(HOOK)), []
    except NativeError as reason:
        fix = "Sessions run without it; every op of a watched step costs some microseconds of Python then."
        hook, problems = None, [Problem(what=f"The native hook is not to be had: {reason}", fix=fix)]
    return Finding(
        topic="native part", facts={"library": path, "hook": hook}, problems=problems,
        sentence=f"There, as {path}: pages that tensors free serve the next ones, and are never faulted in twice."
        + (" Most ops of a watched step are handled in C++." if hook else ""),
    )  # fmt: skip


def threads() -> Finding:
    """Threads that compute, and processors left for the workers that copy."""
    computing, there, problems = torch.get_num_threads(), cores(), []
    processors = f"{there} processor{'s' * (there != 1)}"
    if there - computing < 1:
        fewer = f"OMP_NUM_THREADS={there - 1} leaves them one" if there > 1 else "Another machine may have more of them"
        what = (
            f"Ops use {computing} thread{'s' * (computing != 1)} on {processors}: workers that copy beside the ops "
            f"have none of their own, and slow the ops down."
        )
        fix = f"{fewer}; sums depend on the number of threads, with plain PyTorch too."
        problems.append(Problem(what=what, fix=fix))
    return Finding(
        topic="threads", problems=problems,
        sentence=f"Ops use {computing} of {processors}; with `delta`, {WORKERS} workers copy beside them.",
        facts={"computing": computing, "processors": there, "workers": WORKERS},
    )  # fmt: skip


def memory_copy() -> Finding:
    """How fast memory is copied within RAM."""
    source = torch.ones(SAMPLE, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = fastest(lambda: target.copy_(source), PATIENCE)
    return Finding(
        topic="memory copy",
        sentence=f"RAM is copied at {rate(SAMPLE / seconds)}: no copy to a slower tier is faster than this.",
        facts={"bytes_per_second": round(SAMPLE / seconds)},
    )


def kernels(environment: Mapping[str, str] = os.environ) -> Finding:
    """What oneDNN keeps for every shape that it meets: memory of the process, in no account."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        sentence = "This torch has no oneDNN: no kernel is compiled for a shape and kept."
        return Finding(topic="kernels", sentence=sentence, facts={"onednn_kept": 0})
    name = next((name for name in _KERNELS if environment.get(name)), _KERNELS[0])
    given = environment.get(name) or str(_KERNELS_KEPT)
    number = re.match(r"\s*\+?\d+", given)
    kept = int(number.group()) if number else 0  # oneDNN reads what is no number as 0
    grows = (
        f"oneDNN keeps up to {kept:,} compiled kernels, some kilobytes each for an op and a shape: where sizes of "
        f"inputs change, the process grows by them ({name}=64 keeps fewer, where a step needs no more)."
    )
    none = f"oneDNN keeps no compiled kernels ({name}={given}): it compiles them anew for every op."
    return Finding(topic="kernels", sentence=grows if kept else none, facts={"onednn_kept": kept})


def devices(*, measure: bool, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """A line for every CUDA device, or one that says that there is none."""
    settings = {name: environment[name] for name in _SETTINGS if environment.get(name)}
    if torch.cuda.is_available():
        return [_device(number, environment, settings, measure) for number in range(torch.cuda.device_count())]
    sentence = "No device: models are managed on the CPU, where the budget is RAM."
    return [Finding(topic="CUDA", sentence=sentence, facts={"available": False, "settings": settings})]


def _device(number: int, environment: Mapping[str, str], settings: Mapping[str, str], measure: bool) -> Finding:
    topic, device = f"CUDA {number}", torch.device("cuda", number)
    facts: dict[str, Any] = {"available": False, "device": number, "settings": settings}
    try:
        name, (free, total) = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)
        facts |= {
            "name": name, "memory": int(total), "free": int(free), "allocator": torch.cuda.get_allocator_backend(),
            "expandable_segments": expandable_segments(environment), **addressing(number),
        }  # fmt: skip
    except RuntimeError as error:  # of CUDA; that the device has no memory is one too
        what = f"torch finds device {number} and cannot ask it: {_first_sentence(error)}"
        fix = "See what `nvidia-smi` says of it; models can be trained on the CPU."
        problem = Problem(what=what, fix=fix)
        return Finding(topic=topic, sentence="It cannot be used.", facts=facts, problems=[problem])
    pinned, locked, problems = pinned_bytes(device, None), _locked_limit(), []
    facts |= {"available": True, "host_budget": pinned, "locked_memory_limit": locked}
    told = f"{name}, {format_bytes(facts['free'])} of {format_bytes(facts['memory'])} free"
    if facts["allocator"] != NATIVE:
        what = (
            f"The allocator is {facts['allocator']}: Spillway reads its counters as those of torch's own, was not "
            f"written for it, and was never run with it."
        )
        fix = "Leave `backend:` out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF."
        problems.append(Problem(what=what, fix=fix))
    if measure:
        try:
            out, back = link_rates(number, SAMPLE, PATIENCE)
            facts |= {"copy_out": round(out), "copy_in": round(back)}
            told += f", pinned copies out at {rate(facts['copy_out'])} and in at {rate(facts['copy_in'])}"
        except RuntimeError as error:
            what = f"Copies between pinned memory and the device could not be measured: {_first_sentence(error)}"
            fix = (
                f"They take {format_bytes(SAMPLE)} of the device and as much of the host; see who has the rest with "
                f"`nvidia-smi` and `free`, or leave measuring out with --no-measure."
            )
            problems.append(Problem(what=what, fix=fix))
    locks = "locks as much memory as it likes" if locked is None else f"may lock {format_bytes(locked)}"
    waits = (
        f"What leaves waits in pinned host memory, of which a session takes up to {format_bytes(pinned)} unless "
        f"SpillOptions(host_budget=...) says otherwise; a process {locks} here, which counts where the driver "
        f"keeps to it."
    )
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    set_up = f"The allocator is set up by {given}." if given else "No setting of the allocator is in the environment."
    return Finding(
        topic=topic, sentence=f"{told}. {' '.join((waits, *notes(facts), set_up))}", facts=facts, problems=problems
    )


def notes(facts: Mapping[str, Any]) -> Iterator[str]:
    """What follows of a device's facts for a session, a sentence each."""
    yield (
        "Moved storages point at pinned host memory: code that does not ask reads them there, slowly and right."
        if CAN_SWAP
        else "This torch cannot exchange bytes under a storage (2.13 can): absent storages have no bytes, and at the "
        "end of every step all are brought back, which has to fit in the budget."
    )
    if facts["allocator"] != NATIVE:
        yield f"The allocator is {facts['allocator']}, not torch's own, and expandable_segments is not its setting."
    elif facts["expandable_segments"]:
        yield "expandable_segments is on: odd pieces of memory hardly count."
    else:
        yield (
            "expandable_segments is off: blocks may be up to 1 MiB larger than their storages, which is set aside in "
            "the budget; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of it."
        )
    behind = {
        True: "host memory can stand behind their addresses",
        False: "host memory cannot stand behind their addresses",
        None: "whether host memory can stand behind their addresses could not be tried",
    }[facts["host_behind"]]
    yield (
        f"Virtual addressing maps chunks of {format_bytes(facts['chunk'])}; {behind}."
        if facts["chunk"]
        else "Virtual addressing (spillway.native.device_arena) is not to be had here."
    )
    if torch.backends.cudnn.benchmark:
        yield "cudnn.benchmark is on: convolutions are moved and not recomputed."


def addressing(device: int, driver: str = DRIVER) -> dict[str, Any]:
    """`chunk` and `host_behind`, found by paging one chunk out."""
    try:
        arena = DeviceArena.of(device, driver=driver)
    except NativeError:
        return {"chunk": 0, "host_behind": None}
    behind = None
    with contextlib.suppress(DeviceFullError, NativeError):
        block = arena.take(arena.chunk)
        try:
            behind = arena.page_out(block)
        finally:
            arena.give(block)
            if not arena.counts().requested:
                arena.trim()
    return {"chunk": arena.chunk, "host_behind": behind}


def expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """As the allocator has it, or else as the environment asks for it."""
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):  # a private function, whose answer has changed its shape before
            snapshot: Any = torch.cuda.memory._snapshot()
            return bool(snapshot["allocator_settings"]["expandable_segments"])
    asked = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = dict(part.strip().partition(":")[::2] for part in asked.split(",") if part.strip())
    return settings.get("expandable_segments", "").strip().lower() == "true"


def _first_sentence(error: RuntimeError) -> str:
    first = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")
    return f"{first or type(error).__name__}."


def _locked_limit() -> Bytes | None:
    """What a process may lock, of which pinned memory is a part on some systems; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit in (resource.RLIM_INFINITY, -1) else limit
