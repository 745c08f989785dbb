from __future__ import annotations

import ast

from tests.architecture.source import ROOT, project_files

MOST_LINES_OF_A_FUNCTION = 60


def too_long(text: str) -> list[str]:
    """Functions that are longer than a reader can hold, docstring left out. A file may have any length: none is split
    to keep it short."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(function.name, _lines_without_docstring(function)) for function in functions]
    return [f"{name} has {size} lines" for name, size in sizes if size > MOST_LINES_OF_A_FUNCTION]


def _lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return _span(function) - (_span(function.body[0]) if ast.get_docstring(function) else 0)


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_too_long() -> None:
    found = {str(path.relative_to(ROOT)): too_long(path.read_text("utf-8")) for path in project_files()}
    assert {path: reasons for path, reasons in found.items() if reasons} == {}


def test_a_function_of_61_lines_is_found_wherever_it_stands() -> None:
    def nested(lines: int) -> str:
        head = 'class C:\n    def f(self):\n        """One.\n\n        Three.\n        """\n'
        return head + "        x = 0\n" * (lines - 1)

    assert too_long(nested(60)) == []
    assert too_long(nested(61)) == ["f has 61 lines"]
