"""Compiles the native part where there is a compiler, once, and keeps it in the user's cache."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch

from spillway.errors import NativeError

SOURCES: Final = tuple(map(Path(__file__).with_name, ("arena.cpp", "device_arena.cpp")))
FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
LONGEST: Final = 600
"""Seconds that a compiler may take."""


def wanted() -> bool:
    """Whether the native part may be used: not where `SPILLWAY_NATIVE=0` says so."""
    return os.environ.get("SPILLWAY_NATIVE", "1") != "0"


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the first of the usual names that there is."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def library_path() -> Path:
    """Where the library for this torch, on this processor, from these sources belongs."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()
    sources = (source.read_text("utf-8") for source in SOURCES)
    made_of = (*sources, torch.__version__, str(torch._C._GLIBCXX_USE_CXX11_ABI), *FLAGS)
    digest = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    return folder / "spillway" / "native" / f"torch-{torch.__version__}-{platform.machine()}-{digest}.so"


def build() -> Path:
    """The library, compiled if it is not there yet. Another process that compiles it is waited for.

    Raises:
        NativeError: It cannot be compiled, or its place cannot be written.
    """
    library = library_path()
    try:
        if library.is_file():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                _compile(library)
    except OSError as error:
        raise NativeError(f"{library.parent} cannot be written ({error.strerror}): set XDG_CACHE_HOME.") from error
    return library


def _compile(library: Path) -> None:
    found = compiler()
    if found is None:
        named = os.environ.get("CXX")
        fix = f"CXX names {named}, which is not there." if named else "install g++, or name one in CXX."
        raise NativeError(f"there is no C++ compiler: {fix}")
    print("spillway: compiling the native part, once; this takes some seconds.", file=sys.stderr, flush=True)
    base = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "made.so"
        command = [
            found, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-I{base / 'include'}", *map(str, SOURCES), "-o", str(made), f"-L{base / 'lib'}", "-lc10", "-ldl",
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
    """The library, built where necessary.

    Raises:
        NativeError: It cannot be built or loaded, or `SPILLWAY_NATIVE=0` forbids it.
    """
    if not wanted():
        raise NativeError("SPILLWAY_NATIVE=0 says so.")
    library = build()
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeError(f"{library} does not load: {error}. Remove it to have it compiled again.") from error
