from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Mapping

import pytest

from spillway.methods import METHODS
from tests.architecture.source import Import, imports, package_sources

# Later may import earlier: a rank for every top folder, without exceptions. Names on one line do not import each
# other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("units", "version"),
    ("errors",),
    ("budgets",),
    ("processes",),  # starts others, which run what is named to them
    ("ir",),
    ("costs",),
    ("pilots",),  # before the methods, one of which asks them
    ("methods",),
    ("memory",),  # the one place that keeps the budget
    ("internals",),  # what is asked of torch and of the system, for both engines
    ("tiers",),
    ("native",),
    ("engines",),
    ("recording",),
    ("calibration",),  # measures this machine: its ops, its tiers, its engine, a plan for a recorded step
    ("simulation",),
    ("report",),  # before the session, which offers it to the user
    ("session",),
    ("workloads", "doctor"),
    ("advisor", "integrations"),
    ("subprocess_runs",),
    ("",),  # spillway itself: the public names
    ("cli",),
    ("__main__",),
)
COMMON = ("absent_bytes", "actions", "base", "by_block", "linear_program", "plan_clock", "registry")
"""What methods of the two engines have in common, what may become of a block, what planners reckon of absent bytes and
of seconds, and the list of them."""
NEED_TORCH = (
    "internals.private",
    "internals.host_reads",
    "internals.dispatch_key",
    "internals.process_memory",
    "internals.interrupts",
    "tiers",
    "native",
    "engines",
    "calibration.measured",
    "calibration.watching",
    "recording",
    "session",
    "advisor.calibrating",
    "advisor.measuring",
    "integrations",
    "workloads",
    "doctor.on_spill",  # measures through a tier
    "doctor.on_torch",
    "subprocess_runs.child",
)
# These do without torch until a name or a verb that needs it is used.
LAZY = {"", "cli", "calibration"}

RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "spillway"


def inner_name(module: str) -> str:
    """`spillway.ir.files` -> `ir.files`, `spillway` -> the empty name."""
    return module.removeprefix("spillway").removeprefix(".")


def place(module: str) -> str:
    """The top folder, or file, in ORDER of a module of the package. Raises LookupError if it has no rank."""
    name = inner_name(module).partition(".")[0]
    if name not in RANKS:
        raise LookupError(f"{module} has no place in ORDER; docs/architecture.md says where it belongs")
    return name


def needs_torch(module: str) -> bool:
    return any(f"{inner_name(module)}.".startswith(f"{folder}.") for folder in NEED_TORCH)


def out_of_order(sources: Mapping[str, str]) -> list[str]:
    """Imports of a later rank or of a neighbour in the same rank, those for the type checker included."""
    return [str(found) for found in imports(sources) if is_ours(found.imported) and _is_backward(found)]


def _is_backward(found: Import) -> bool:
    importer, imported = place(found.importer), place(found.imported)
    return importer != imported and RANKS[imported] >= RANKS[importer]


def torch_where_it_may_not_be(sources: Mapping[str, str]) -> list[str]:
    """Imports of torch, or of modules that need it, by modules that promise to do without."""
    return [str(found) for found in imports(sources) if not needs_torch(found.importer) and _brings_torch(found)]


def _brings_torch(found: Import) -> bool:
    if found.imported.partition(".")[0] == "torch":
        return True
    late = found.when == "types" or (found.when == "call" and place(found.importer) in LAZY)
    return is_ours(found.imported) and needs_torch(found.imported) and not late


def methods_that_lean_on_each_other(sources: Mapping[str, str]) -> list[str]:
    """Imports of one method by another; they have the modules of `COMMON` in common, and no more. `auto` is made of
    others."""
    methods = [found for found in imports(sources) if _method(found.importer) not in ("", "auto")]
    return [str(found) for found in methods if _is_neighbour(found)]


def _is_neighbour(found: Import) -> bool:
    return _method(found.imported) not in ("", _method(found.importer))


def _method(module: str) -> str:
    """`spillway.methods.lru` -> `lru`; the empty text for what is no method."""
    inside = inner_name(module).split(".")
    return inside[1] if inside[0] == "methods" and len(inside) > 1 and inside[1] not in COMMON else ""


def test_the_package_imports_only_in_the_order_of_the_architecture() -> None:
    assert out_of_order(package_sources()) == []


def test_torch_is_imported_only_where_the_architecture_has_it() -> None:
    assert torch_where_it_may_not_be(package_sources()) == []


def test_no_method_imports_another_method() -> None:
    assert methods_that_lean_on_each_other(package_sources()) == []


def test_what_does_without_torch_is_imported_where_torch_is_not_installed() -> None:
    modules = sorted(module for module in package_sources() if not needs_torch(module))
    program = "import importlib, sys; sys.modules['torch'] = None; [importlib.import_module(m) for m in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def small_package(module: str, text: str) -> dict[str, str]:
    """One module with the given text among empty ones."""
    empty = ("", ".errors", ".ir", ".ir.step", ".methods", ".methods.base", ".methods.lru", ".session", ".cli")
    return {f"spillway{name}": "" for name in empty} | {module: text}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("spillway.ir.step", "from spillway import methods"),
        ("spillway.ir.step", "from spillway.methods.base import AbstractPolicy"),
        ("spillway.ir.step", "import spillway.session"),
        ("spillway.errors", "def late():\n    import spillway.ir.step"),
        ("spillway.memory.controller", "if TYPE_CHECKING:\n    import spillway.session"),
        ("spillway.tiers.disk", "from spillway.engines.tensors import cpu_machine"),
        ("spillway.report.html", "from spillway.workloads import demo"),
        ("spillway.doctor", "from spillway.workloads import demo"),
        ("spillway.session", "from spillway import manage"),
        ("spillway", "import spillway.cli"),
    ],
)
def test_an_import_against_the_order_is_found(module: str, text: str) -> None:
    assert len(out_of_order(small_package(module, text))) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("spillway.errors", "from spillway.units import format_bytes"),
        ("spillway.methods.lru", "from spillway.ir import step\nfrom spillway.methods import base"),
        ("spillway.engines.tensors.cpu_machine", "from spillway.tiers import disk"),
        ("spillway.cli", "import spillway, torchless, numpy"),
    ],
)
def test_an_import_along_the_order_is_granted(module: str, text: str) -> None:
    assert out_of_order(small_package(module, text)) == []


def test_a_module_that_the_order_does_not_know_has_to_be_given_a_place() -> None:
    with pytest.raises(LookupError, match=r"spillway\.helpers has no place in ORDER"):
        out_of_order(small_package("spillway.helpers", "import spillway.ir"))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("spillway.ir.step", "import torch"),
        ("spillway.ir.step", "def late():\n    from torch.nn import Module"),
        ("spillway.memory.controller", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("spillway.costs.roofline", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ("spillway.report.html", "def late():\n    from spillway.session import Session"),
        ("spillway", "from spillway.session import manage"),
        ("spillway.cli", "class Verb:\n    import spillway.workloads"),
        ("spillway.cli", "def demo():\n    import torch"),
    ],
)
def test_torch_in_the_wrong_place_is_found_in_whatever_way_it_comes(module: str, text: str) -> None:
    assert len(torch_where_it_may_not_be(small_package(module, text))) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("spillway.session", "import torch"),
        ("spillway.engines.tensors.cpu_machine", "from torch import Tensor"),
        ("spillway.cli", "def train():\n    from spillway.session import manage"),
        ("spillway", "if TYPE_CHECKING:\n    from spillway.session import manage"),
        ("spillway.ir.step", "import torchless"),
    ],
)
def test_torch_in_its_place_is_granted(module: str, text: str) -> None:
    assert torch_where_it_may_not_be(small_package(module, text)) == []


def test_a_method_that_leans_on_another_is_found() -> None:
    leaning = small_package("spillway.methods.dtr", "from spillway.methods import base, lru")
    assert methods_that_lean_on_each_other(leaning) == ["spillway.methods.dtr, line 1: imports spillway.methods.lru"]


def test_the_list_of_methods_imports_every_method() -> None:
    assert methods_that_lean_on_each_other(small_package("spillway.methods", "import spillway.methods.lru")) == []


def test_a_relative_import_is_refused() -> None:
    with pytest.raises(ValueError, match=r"spillway\.cli, line 1: write the full name"):
        out_of_order(small_package("spillway.cli", "from . import session"))


def names_with_two_meanings(sources: Mapping[str, str], methods: Collection[str]) -> list[str]:
    """Basenames of modules that stand twice, or that are a method's name outside the methods.

    A verb's module, in `cli`, has the name of what the verb is about, and a folder's `__init__` that of the folder.
    """
    seen: dict[str, str] = {}
    found: list[str] = []
    for module in sorted(sources):
        above, _, name = module.rpartition(".")
        if above == "spillway.cli":
            continue
        if name in seen:
            found.append(f"{name}: {seen[name]} and {module}")
        if name.replace("_", "-") in methods and above != "spillway.methods":
            found.append(f"{name}: {module}, and a method")
        seen[name] = module
    return found


def test_a_modules_name_and_a_methods_name_mean_one_thing() -> None:
    assert names_with_two_meanings(package_sources(), METHODS.keys()) == []


def test_a_name_with_two_meanings_is_found() -> None:
    sources = small_package("spillway.engines.step", "") | {"spillway.tiers.lru": ""}
    assert names_with_two_meanings(sources, ["lru"]) == [
        "step: spillway.engines.step and spillway.ir.step",
        "lru: spillway.methods.lru and spillway.tiers.lru",
        "lru: spillway.tiers.lru, and a method",
    ]
