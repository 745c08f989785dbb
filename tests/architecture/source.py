"""Reads the package as text: which module imports which. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]

When = Literal["import", "call", "types"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module."""

    importer: str
    imported: str
    line: int
    when: When
    """When it runs: as the importer is imported, as a function is called, or for the type checker alone."""

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.imported}"


def package_sources() -> dict[str, str]:
    """Every module of the package by its full name, `spillway.ir.timeline`, with its text."""
    top = ROOT / "src"
    return {_module_name(path.relative_to(top)): path.read_text("utf-8") for path in (top / "spillway").rglob("*.py")}


def project_files() -> list[Path]:
    """Every Python file that the project is made of."""
    folders = ("src", "tests", "benchmarks", "papers", "examples")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(sources: Mapping[str, str]) -> Iterator[Import]:
    """Every import of every module; an imported name that is a module of `sources` counts as that module."""
    for module, text in sources.items():
        for node, when in _imports_below(ast.parse(text), "import"):
            for name in _names(node, module, sources):
                yield Import(importer=module, imported=name, line=node.lineno, when=when)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports_below(node: ast.AST, when: When) -> Iterator[tuple[ast.Import | ast.ImportFrom, When]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, when
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for child in node.body:
            yield from _imports_below(child, "types")
        for child in node.orelse:
            yield from _imports_below(child, when)
    else:
        inner: When = "call" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else when
        for child in ast.iter_child_nodes(node):
            yield from _imports_below(child, inner)


def _names(node: ast.Import | ast.ImportFrom, module: str, sources: Mapping[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level or node.module is None:
        raise ValueError(f"{module}, line {node.lineno}: write the full name of what is imported")
    inside = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in sources else node.module for name in inside]
