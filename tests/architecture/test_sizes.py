from __future__ import annotations

import ast

from tests.architecture.source import ROOT, project_files

MOST_LINES_OF_A_FILE = 800
MOST_LINES_OF_A_FUNCTION = 60


def too_long(text: str) -> list[str]:
    """What is longer than a reader can hold: the file, or one of its functions, docstring left out."""
    lines = len(text.splitlines())
    found = [f"file of {lines} lines"] if lines > MOST_LINES_OF_A_FILE else []
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [(function.name, _lines_without_docstring(function)) for function in functions]
    return found + [f"{name} has {size} lines" for name, size in sizes if size > MOST_LINES_OF_A_FUNCTION]


def _lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return _span(function) - (_span(function.body[0]) if ast.get_docstring(function) else 0)


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_and_no_function_is_too_long() -> None:
    found = {str(path.relative_to(ROOT)): too_long(path.read_text("utf-8")) for path in project_files()}
    assert {path: reasons for path, reasons in found.items() if reasons} == {}


def test_a_file_of_801_lines_is_found_and_one_of_800_is_not() -> None:
    assert too_long("x = 0\n" * 800) == []
    assert too_long("x = 0\n" * 801) == ["file of 801 lines"]


def test_a_function_of_61_lines_is_found_wherever_it_stands() -> None:
    def nested(lines: int) -> str:
        head = 'class C:\n    def f(self):\n        """One.\n\n        Three.\n        """\n'
        return head + "        x = 0\n" * (lines - 1)

    assert too_long(nested(60)) == []
    assert too_long(nested(61)) == ["f has 61 lines"]
