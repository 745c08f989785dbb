"""Compiles the native parts where there is a compiler, once, and keeps them in the user's cache."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from spillway.errors import NativeError
from spillway.internals.user_cache import user_cache


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One library."""

    name: str
    sources: tuple[str, ...]
    links: tuple[str, ...]
    for_python: bool = False
    """Whether it is a module of Python's, and wants its headers."""


ARENA: Final = Part("arena", ("arena.cpp", "device_arena.cpp"), ("c10", "dl"))
HOOK: Final = Part("hook", ("hook.cpp",), ("c10", "torch_cpu", "torch_python"), for_python=True)
PARTS: Final = (ARENA, HOOK)

FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
LONGEST: Final = 600
"""Seconds that a compiler may take."""


def wanted(part: Part = ARENA) -> bool:
    """Whether a part may be used: none where `SPILLWAY_NATIVE=0` says so, and the arena alone with `=arena`."""
    said = os.environ.get("SPILLWAY_NATIVE", "1")
    return said != "0" and (said != "arena" or part is ARENA)


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the first of the usual names that there is."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def library_path(part: Part = ARENA) -> Path:
    """Where the library for this torch, on this processor, from these sources belongs."""
    sources = (Path(__file__).with_name(source).read_text("utf-8") for source in part.sources)
    python = sys.implementation.cache_tag if part.for_python else ""
    made_of = (*sources, torch.__version__, str(torch._C._GLIBCXX_USE_CXX11_ABI), *FLAGS, python)
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    name = f"{part.name}-torch-{torch.__version__}-{platform.machine()}-{digest}.so"
    return user_cache() / "native" / name


def build(part: Part = ARENA) -> Path:
    """The library, compiled if it is not there yet. Another process that compiles it is waited for. Raises NativeError
    if it cannot be compiled, or its place cannot be written."""
    library = library_path(part)
    try:
        if library.is_file():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                _compile(part, library)
    except OSError as error:
        raise NativeError(f"{library.parent} cannot be written ({error.strerror}): set XDG_CACHE_HOME.") from error
    return library


def _compile(part: Part, library: Path) -> None:
    found = compiler()
    if found is None:
        named = os.environ.get("CXX")
        fix = f"CXX names {named}, which is not there." if named else "install g++, or name one in CXX."
        raise NativeError(f"there is no C++ compiler: {fix}")
    print(f"spillway: compiling the native {part.name}, once; this takes some seconds.", file=sys.stderr, flush=True)
    base = Path(torch.__file__).parent
    headers = [f"-I{base / 'include'}"]
    if part.for_python:
        headers += [f"-I{base / 'include/torch/csrc/api/include'}", f"-I{sysconfig.get_paths()['include']}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "made.so"
        command = [
            found, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            *headers, *(str(Path(__file__).with_name(source)) for source in part.sources), "-o", str(made),
            f"-L{base / 'lib'}", *(f"-l{link}" for link in part.links),
        ]  # fmt: skip
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
        except subprocess.TimeoutExpired as error:
            raise NativeError(f"{found} took more than {LONGEST} s.") from error
        if ran.returncode != 0:
            said = ran.stderr.splitlines() or ["it said nothing."]
            lines = [line for line in said if "error" in line] or said
            raise NativeError(f"{found} ended with {ran.returncode}: {lines[0][:300]}")
        os.replace(made, library)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, built where necessary. Raises NativeError if it cannot be built or loaded, or `SPILLWAY_NATIVE=0`
    forbids it."""
    if not wanted():
        raise NativeError("SPILLWAY_NATIVE=0 says so.")
    library = build()
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeError(f"{library} does not load: {error}. Remove it to have it compiled again.") from error


@functools.cache
def load_hook() -> Any:
    """The hook's module, built where necessary. Raises NativeError if it cannot be built or loaded, or
    `SPILLWAY_NATIVE` forbids it."""
    if not wanted(HOOK):
        raise NativeError(f"SPILLWAY_NATIVE={os.environ['SPILLWAY_NATIVE']} says so.")
    library = build(HOOK)
    try:
        spec = importlib.util.spec_from_file_location("spillway_hook", library)
        assert spec is not None, "a path that ends in .so has one"
        assert spec.loader is not None, "and so has that"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise NativeError(f"{library} does not load: {error}. Remove it to have it compiled again.") from error
    return module
