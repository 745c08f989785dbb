"""Options of `manage` that make no sense are refused where they are given, in one sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from spillway.errors import UsageError


@pytest.mark.parametrize(
    ("options", "field", "value", "takes"),
    [
        (spillway.SpillOptions, "directory", 3, "the path of a folder"),
        (spillway.SpillOptions, "io", "x", "'buffered' or 'direct'"),
        (spillway.SpillOptions, "return_freed", 1, "True or False"),
        (spillway.BlockOptions, "names", "0", "names of modules"),
        (spillway.BlockOptions, "names", 3, "names of modules"),
        (spillway.BlockOptions, "names", [], "names of modules"),
        (spillway.BlockOptions, "names", ["0", 1], "names of modules"),
        (spillway.BlockOptions, "size", 3, "a function of the batch"),
        (spillway.BlockOptions, "generators", 3, "generators of random numbers"),
        (spillway.BlockOptions, "generators", [3], "generators of random numbers"),
        (spillway.BlockOptions, "page", "no", "True or False"),
        (spillway.BlockOptions, "lossy", None, "True or False"),
        (spillway.ReportOptions, "run_file", 3.5, "the path of a file"),
        (spillway.ReportOptions, "timeline", "yes", "True or False"),
        (spillway.ReportOptions, "live", 0, "True or False"),
    ],
)
def test_a_value_that_makes_no_sense_is_named_with_what_would(
    options: Any, field: str, value: object, takes: str
) -> None:
    with pytest.raises(UsageError) as refused:
        options(**{field: value})
    assert str(refused.value).startswith(f"{options.__name__}({field}=...) takes {takes}")
    assert str(refused.value).endswith(f", got {value!r}.")


def test_generators_may_come_from_an_iterator() -> None:
    given = [random.Random(1), torch.Generator()]
    assert spillway.BlockOptions(generators=iter(given)).generators == tuple(given)


def test_a_run_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "run.jsonl"
    with pytest.raises(UsageError, match=r"run\.jsonl cannot be written: No such file or directory\."):
        spillway.manage(torch.nn.Linear(2, 2), budget=None, report=spillway.ReportOptions(run_file=path))
