"""Reads the documents as text: which files, names, commands and methods they speak of."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.architecture.source import ROOT

PLACES = (Path(), Path("src/spillway"))
"""Where a path in a document may begin, besides the document's own folder."""

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<block>.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#\s]+)\)")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
_SUFFIXES = (".py", ".md", ".toml", ".txt")
_MEMBER = re.compile(r"(?P<owner>[A-Z]\w+)\.(?P<name>\w+)")
_STATUS = re.compile(r"# .*\n\nStatus: ((?:accepted|superseded)\b.*, \d{4}-\d\d-\d\d)\n")
_DECISION = re.compile(r"^\| \d+ \| \[.+\]\((?P<page>[\w-]+\.md)\) \| (?P<status>.+) \|$", re.MULTILINE)
MOST_DECISIONS = 15
_ENTRY = re.compile(r"(?P<indent> +)(?P<name>[\w.]+/?) +\S.*")


def documents() -> dict[str, str]:
    """Every document by its path in the project, with its text."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "papers").glob("*/README.md")]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sorted(paths)}


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of that language, in order."""
    return [match["block"] for match in _FENCE.finditer(text) if match["language"] == language]


def words_of(text: str) -> int:
    """How many words stand outside of fenced blocks."""
    return len(_FENCE.sub("", text).split())


def spans(text: str) -> list[str]:
    """What stands between backquotes within the prose."""
    return _SPAN.findall(_FENCE.sub("", text))


def missing_paths(document: str, text: str) -> list[str]:
    """Paths in the prose, and targets of links, that are neither in the project nor in the package."""
    prose = _FENCE.sub("", text)
    links = [link for link in _LINK.findall(prose) if "://" not in link]
    begin = (ROOT / document).parent
    roots = [begin, *(ROOT / place for place in PLACES)]
    return [
        *(link for link in links if not (begin / link).exists()),
        *(path for path in spans(text) if _is_path(path) and not any((root / path).exists() for root in roots)),
    ]


def _is_path(span: str) -> bool:
    return _PATH.fullmatch(span) is not None and ("/" in span or span.endswith(_SUFFIXES))


def tree(text: str) -> list[tuple[int, str]]:
    """Depth and path below `src/spillway` of every entry of the tree that a document prints, in order."""
    printed = next(block for block in blocks(text, "") if block.startswith("src/spillway/\n"))
    entries: list[tuple[int, str]] = []
    above: list[str] = []
    for line in printed.splitlines()[1:]:
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise ValueError(f"{line!r} is not a name of the tree and one role")
        depth = len(match["indent"]) // 2
        above[depth - 1 :] = [match["name"]]
        entries.append((depth, "".join(above)))
    return entries


def members(sources: Iterable[str]) -> dict[str, set[str]]:
    """What every class of the package has of its own: methods, fields, and attributes set on `self`."""
    found: dict[str, set[str]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_members_of(node))
    return found


def _members_of(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def unknown_members(text: str, known: Mapping[str, set[str]]) -> list[str]:
    """Names such as `Controller.prepare` whose class is the package's and has no such member."""
    matches = [match for match in map(_MEMBER.fullmatch, spans(text)) if match is not None]
    return [match[0] for match in matches if match["name"] not in known.get(match["owner"], {match["name"]})]


def ready_methods(text: str) -> list[str]:
    """Names in the rows of the table of methods whose last column says that they are ready."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    names = [row[1] for row in rows if row[-1] == "ready"]
    return [name.strip("`") for name in names]


def commands(text: str) -> list[list[str]]:
    """Words of every line of a block, and every span, that calls `spillway` with a verb."""
    lines = [line for block in blocks(text, "") for line in block.splitlines()] + spans(text)
    split = [line.split("#")[0].split() for line in lines]
    return [words for words in split if len(words) > 1 and words[0] == "spillway"]


def wrong_words(words: list[str], command_line: Mapping[str, list[str]]) -> list[str]:
    """A verb that does not exist, or its options that do not."""
    grouped = " ".join(words[1:3])
    verb = grouped if grouped in command_line else words[1]
    own = itertools.takewhile(lambda word: not word.endswith(".py"), words[2:])  # what follows a script is the script's
    options = [word for word in own if word.startswith("--")]
    if verb not in command_line:
        return [verb]
    offered = {name for word in command_line[verb] for name in word.strip("[]").split("/")}
    return [f"{verb} {option}" for option in options if option not in offered]


def targets(text: str) -> list[str]:
    """Every `make` target in the prose and in the blocks."""
    lines = [line for block in blocks(text, "") for line in block.splitlines()] + spans(text)
    return [match[1] for match in map(re.compile(r"make ([a-z]+)\b.*").fullmatch, lines) if match is not None]


def status(decision: str) -> str | None:
    """Whether a decision holds and since when, as its page says under the title; None if it does not say."""
    said = _STATUS.match(decision)
    return said[1] if said is not None else None


def wrong_numbers(pages: Mapping[str, str]) -> list[str]:
    """Pages of decisions whose number, in the name and in the title, is not their place, or is one too many."""
    return [
        name
        for place, (name, text) in enumerate(sorted(pages.items()), 1)
        if place > MOST_DECISIONS or not (name.startswith(f"{place:04}-") and text.startswith(f"# {place}. "))
    ]


def listed_decisions(text: str) -> dict[str, str]:
    """Pages in the list of decisions, with the status that it tells of each."""
    return {row["page"]: row["status"] for row in _DECISION.finditer(text)}
