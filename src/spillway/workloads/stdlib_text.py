"""Real input that every machine has: the source text of the running interpreter's standard library.

One function is one sample, byte by byte, at its natural length. Nothing is downloaded, nothing is copied.
"""

from __future__ import annotations

import ast
import os
import random
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spillway.errors import WorkloadError

PAD, BEGIN, END = 256, 257, 258
"""Tokens after the 256 values of a byte: padding, and what stands before and after a function."""
VOCABULARY = 259
"""Number of different tokens."""

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def root() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


@cache
def source_files() -> tuple[Path, ...]:
    """The Python files of the standard library, tests and installed packages left out, in the order of their names.
    Raises WorkloadError if this interpreter comes without the source of its standard library."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root()):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    # Distributions link some files to places that a container may lack.
    found = [path for path in found if path.is_file()]
    if not found:
        raise WorkloadError(f"This interpreter has no source of its standard library under {root()}.")
    return tuple(sorted(found))


def functions(*, seed: int) -> Iterator[bytes]:
    """The source of every function of the standard library, again and again, in an order that the seed decides.

    Files are read as their functions are asked for. Functions within functions appear twice: alone, and as part of
    the function around them.
    """
    order = random.Random(seed)
    files = list(source_files())
    while True:
        order.shuffle(files)
        for path in files:
            yield from _functions_of(path)


def _functions_of(path: Path) -> list[bytes]:
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    return [
        b"".join(lines[node.lineno - 1 : node.end_lineno])[node.col_offset :].rstrip() for node in definitions(source)
    ]


def definitions(source: bytes) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a file; none of one that is no Python of today."""
    try:
        with warnings.catch_warnings():
            # Some of the library's own text is there to be warned about.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates, samples of older Pythons, zero bytes
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def clipped(text: bytes, length: int) -> bytes:
    """At most `length` bytes of a function: as many whole lines as fit, or as much of the first line.

    Whole lines, because it keeps lengths natural: cut anywhere, all long functions would be of one length.
    """
    if len(text) <= length:
        return text
    return text[: text.rfind(b"\n", 0, length + 1)] if b"\n" in text[: length + 1] else text[:length]


def batches(steps: int, *, seed: int, batch: int, longest: int, grouped: int) -> Iterator[dict[str, Tensor]]:
    """Padded batches of functions for next-byte prediction.

    Functions of similar length share a batch: of every `grouped` batches the shortest functions make up one, and the
    longest another, in random order. Each batch is as long as its longest function, so sizes change from step to step.

    Args:
        batch: Functions in a batch.
        longest: Tokens; longer functions are clipped.
        grouped: Batches sorted together; 1 leaves the functions as they come.

    Yields:
        `inputs` and `targets`, int64, both [batch, length] with `length <= longest`; padding is `PAD` in both.

    Raises WorkloadError if one of the three is less than 1.
    """
    if min(batch, longest, grouped) < 1:
        raise WorkloadError(f"Batches have one or more of each; got {batch=}, {longest=} and {grouped=}.")
    samples = functions(seed=seed)
    order = random.Random(seed)
    return islice(_endless(samples, order, batch, longest, grouped), steps)


def _endless(
    samples: Iterator[bytes], order: random.Random, batch: int, longest: int, grouped: int
) -> Iterator[dict[str, Tensor]]:
    pool: list[bytes] = []
    while True:
        # A file's functions come together; a pool of many files mixes them.
        pool += islice(samples, max(0, 16 * batch * grouped - len(pool)))
        order.shuffle(pool)
        group = sorted((clipped(pool.pop(), longest - 1) for _ in range(batch * grouped)), key=len)
        rows = [group[start : start + batch] for start in range(0, len(group), batch)]
        order.shuffle(rows)
        yield from map(padded, rows)


def padded(texts: list[bytes]) -> dict[str, Tensor]:
    """One batch of functions; `targets` is `inputs` one token later."""
    rows = [[BEGIN, *text, END] for text in texts]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def samples(count: int, *, longest: int = 256) -> list[Tensor]:
    """So many functions as int64 bytes [length], each at its natural length; clipped to `longest`."""
    return [torch.tensor(list(clipped(text, longest))) for text in islice(functions(seed=0), count)]


def collated(rows: list[Tensor]) -> dict[str, Tensor]:
    """One batch of samples as Hugging Face's language models take it, `input_ids`, `attention_mask` and `labels`, all
    int64 [batch, longest of these]; they shift `labels` themselves, which are -100 at padding."""
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}
