"""No module leads back to itself: imports for the type checker and imports within functions count as any other."""

from __future__ import annotations

from collections.abc import Mapping

from tests.architecture.source import imports, package_sources


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Modules each of which leads to all others of its list."""
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for found in imports(sources):
        if found.imported in graph and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    reached = {module: _reached(graph, module) for module in graph}
    together = {tuple(sorted({module, *(o for o in reached[module] if module in reached[o])})) for module in graph}
    return sorted(list(modules) for modules in together if len(modules) > 1)


def _reached(graph: Mapping[str, set[str]], begin: str) -> set[str]:
    found: set[str] = set()
    ahead = [begin]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_no_module_leads_back_to_itself() -> None:
    assert circles(package_sources()) == []


def test_a_circle_is_found_however_its_imports_are_written() -> None:
    sources = {
        "spillway.a": "if TYPE_CHECKING:\n    from spillway.b import B",
        "spillway.b": "def late():\n    from spillway import c",
        "spillway.c": "import spillway.a\nimport spillway.d",
        "spillway.d": "",
    }
    assert circles(sources) == [["spillway.a", "spillway.b", "spillway.c"]]
