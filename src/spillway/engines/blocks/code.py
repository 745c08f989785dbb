"""What Python code names, and whose it is: a library's, an installed package's, or the user's own."""

from __future__ import annotations

import functools
import opcode
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Final, NamedTuple

FOREIGN: Final = frozenset(
    {
        "torch", "numpy", "spillway", "logging", "threading", "queue", "multiprocessing", "concurrent", "asyncio",
        "abc", "socket", "subprocess", "importlib", "re", "inspect", "typing", "weakref", "enum", "pathlib",
        "contextlib", "contextvars", "warnings", "unittest", "pytest", "_pytest", "tqdm", "rich",
    }
)  # fmt: skip
"""Packages whose objects have nothing to do with what a model computes."""
STATEFUL: Final = (
    "torch.quasirandom", "torch.distributions.", "torch.utils.data.sampler", "torch.utils.data.distributed",
    "torch.utils.weak", "torch.utils.flop_counter", "torch.utils.module_tracker", "torch.nn.utils.", "torch.optim.",
    "torch.amp.", "torch.cuda.amp.",
)  # fmt: skip
"""What in `FOREIGN` has objects that it does have to do with."""
LIBRARIES: Final = FOREIGN | sys.stdlib_module_names | {
    "transformers", "accelerate", "peft", "triton", "lightning", "pytorch_lightning", "lightning_fabric",
}  # fmt: skip
"""Packages whose code is not looked into."""
_STANDARD: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED: Final = ("site-packages", "dist-packages")
_DYNAMIC: Final = frozenset({"setattr", "delattr", "vars", "__dict__", "globals", "modules"})
"""What code that names things by strings names."""


@functools.cache
def package(module: object) -> str:
    """The first part of a module's name; "" for a module of the user's that has the name of one of Python's own, and
    for what is no name, as the `__module__` of some classes."""
    if not isinstance(module, str):
        return ""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        file = getattr(sys.modules.get(top), "__file__", None)
        if file is not None and (not file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)):
            return ""
    return top


@functools.cache
def is_foreign(module: object) -> bool:
    """Whether objects of a module's classes have nothing to do with what a model computes."""
    return package(module) in FOREIGN and not str(module).startswith(STATEFUL)


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a package manager put it there, so that it is not the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(part in file for part in _INSTALLED)


class Names(NamedTuple):
    """What a function names, and what is defined in it."""

    globals: frozenset[str]
    read: frozenset[str]
    """Globals, attributes, and strings that may be names of them."""
    written: frozenset[str]
    """Globals that it assigns."""
    attributes: frozenset[str]
    """Attributes that it assigns, of whatever it is."""


@functools.lru_cache(maxsize=8192)
def names_of(code: types.CodeType) -> Names:
    """Of its code and of all code inside it."""
    read: set[str] = set()
    strings: set[str] = set()
    found: dict[str, set[str]] = {"read": set(), "written": set(), "attributes": set()}
    for one in _nested(code):
        read.update(one.co_names)
        strings.update(text for constant in one.co_consts for text in _strings(constant))
        for kind, name in _uses(one):
            found[kind].add(name)
    if read & _DYNAMIC:
        found["attributes"] |= strings
    if "globals" in read:
        found["read"] |= strings
    if read & {"__name__", "globals"}:  # its own module, by its name
        found["written"] |= found["attributes"]
    return Names(frozenset(found["read"]), frozenset(read | strings), *map(frozenset, list(found.values())[1:]))


def modules_named(names: Names, package: str | None) -> Iterator[types.ModuleType]:
    """Modules that a function imports, or looks up by their names, and that are there already."""
    around = ["", *(f"{package}." for package in _outwards(package or ""))]
    for name in names.read:
        for prefix in around:
            found = sys.modules.get(prefix + name)
            if isinstance(found, types.ModuleType):
                yield found


def _outwards(package: str) -> Iterator[str]:
    while package:
        yield package
        package = package.rpartition(".")[0]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _strings(constant: object) -> Iterator[str]:
    if isinstance(constant, str):
        if constant.replace(".", "_").isidentifier():
            yield constant
    elif isinstance(constant, tuple | frozenset):
        for item in constant:
            yield from _strings(item)


_USES: Final = {
    opcode.opmap[op]: kind
    for op, kind in {
        "LOAD_GLOBAL": "read", "LOAD_NAME": "read", "LOAD_FROM_DICT_OR_GLOBALS": "read",
        "STORE_GLOBAL": "written", "DELETE_GLOBAL": "written", "STORE_ATTR": "attributes", "DELETE_ATTR": "attributes",
    }.items()
    if op in opcode.opmap
}  # fmt: skip


def _uses(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """How globals and attributes are used, with their names. `dis` would take ten times as long."""
    text, argument = code.co_code, 0
    for place in range(0, len(text), 2):
        argument = argument << 8 | text[place + 1]
        if text[place] == opcode.EXTENDED_ARG:
            continue
        kind = _USES.get(text[place])
        if kind is not None:
            yield kind, code.co_names[argument >> 1 if text[place] == opcode.opmap["LOAD_GLOBAL"] else argument]
        argument = 0
