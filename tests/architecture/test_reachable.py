"""The package keeps nothing that only tests, papers or benchmarks use.

A module is used if a public name of the package, an integration or the command line leads to it. What a package's
`__init__` imports in order to offer it further is no use of it: whoever imports the name is.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping

from tests.architecture.source import ROOT, package_sources

Names = Mapping[str, tuple[str, str]]
"""What a package offers further, by its name there: the module it comes from, and its name in that."""


def unused(sources: Mapping[str, str], begin: set[str]) -> list[str]:
    """Modules that nothing leads to from those where use begins."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    packages = {module.rpartition(".")[0] for module in sources}
    offered = {module: _offered(tree) for module, tree in trees.items() if module in packages}
    seen: set[str] = set()
    found = set(begin)
    while found:
        module = found.pop()
        seen.add(module)
        further = {} if module in begin else offered.get(module, {})
        found |= {module.rpartition(".")[0], *_leads_to(trees[module], further, offered)} & trees.keys() - seen
    return sorted(trees.keys() - seen)


def _offered(tree: ast.Module) -> Names:
    """What is imported, and then only listed in `__all__`."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = ((node.module, alias) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names)
    return {
        alias.asname or alias.name: (module or "", alias.name)
        for module, alias in names
        if (alias.asname or alias.name) not in used
    }


def _leads_to(tree: ast.Module, further: Names, offered: Mapping[str, Names]) -> Iterator[str]:
    """Modules that a module imports, late or not, or names in a text, as late imports and processes do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (alias for alias in node.names if (alias.asname or alias.name) not in further)
            yield from (module for alias in names for module in _from(node.module or "", alias.name, offered))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def _from(module: str, name: str, offered: Mapping[str, Names]) -> list[str]:
    """The module that a name comes from, through packages that offer it further; or the module of that name."""
    while name in offered.get(module, {}):
        module, name = offered[module][name]
    return [module, f"{module}.{name}"]


def entry_points() -> set[str]:
    """The public names, what users of other libraries import, `python -m spillway`, and installed scripts."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    integrations = {module for module in package_sources() if module.startswith("spillway.integrations")}
    return {"spillway", "spillway.__main__", *integrations, *(target.partition(":")[0] for target in scripts.values())}


def test_the_package_keeps_nothing_that_only_tests_papers_or_benchmarks_use() -> None:
    assert unused(package_sources(), entry_points()) == []


def test_papers_and_benchmarks_are_not_imported_by_the_package() -> None:
    words = {module: text for module, text in package_sources().items() if "from papers" in text}
    words |= {module: text for module, text in package_sources().items() if "from benchmarks" in text}
    assert words == {}


# ---------------------------------------------------------------------- what these tests would find

SMALL = {
    "spillway": "from spillway.ir import Step\n_LATE = {'plan': 'spillway.simulation.plan_and_simulate'}",
    "spillway.ir": "from spillway.ir.step import Step\nfrom spillway.ir.spare import Spare\n__all__ = []",
    "spillway.ir.step": "",
    "spillway.simulation.plan_and_simulate": "def late():\n    import spillway.units",
    "spillway.units": "",
}


def test_a_module_that_a_package_only_offers_further_is_found() -> None:
    assert unused(SMALL | {"spillway.ir.spare": "import spillway.hidden", "spillway.hidden": ""}, {"spillway"}) == [
        "spillway.hidden",
        "spillway.ir.spare",
    ]


def test_a_module_whose_offered_name_somebody_imports_is_used() -> None:
    used = SMALL | {"spillway.ir.spare": "", "spillway.units": "from spillway.ir import Spare"}
    assert unused(used, {"spillway"}) == []


def test_a_module_whose_name_its_package_uses_itself_is_used() -> None:
    registry = "from spillway.ir.step import Step\nfrom spillway.ir.spare import Spare\nALL = {'spare': Spare}"
    assert unused(SMALL | {"spillway.ir.spare": "", "spillway.ir": registry}, {"spillway"}) == []
