"""The table of integrations is whole, and a cell that says what is not so is found."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from spillway.errors import ModelError
from tests.cpu import integration_matrix
from tests.cpu.integration_matrix import HOLDS, METHODS, PAGE, SITUATIONS, Row, Trained, check

TABLE = integration_matrix._table(PAGE.read_text("utf-8"))
WANTED = {"`Trainer`", "`SFTTrainer` with LoRA", "Accelerate", "Lightning", "plain PyTorch", "DDP x2", "FSDP2 x2"}


def test_every_cell_says_what_happens_and_is_of_a_row_that_a_test_trains() -> None:
    modules = Path(__file__).parent.glob("test_integrations_*.py")
    trained = {name for one in modules for name in re.findall(r'"([^"]+)": Row\(', one.read_text("utf-8"))}
    assert trained >= WANTED
    assert set(TABLE) == set(itertools.product(trained, METHODS))
    cells = [row[situation] for row in TABLE.values() for situation in SITUATIONS]
    assert [cell for cell in cells if cell != HOLDS and not re.fullmatch(r"[A-Z].{40,}\.", cell)] == []
    assert {key for key, row in TABLE.items() if HOLDS not in row.values()} == {("FSDP2 x2", "delta")}


def row_of(name: str, value: Any) -> Row:
    """An integration whose training under "delta" leaves something else than its plain one."""

    def trained(situation: str, method: str | None, budget: int | None) -> Trained:
        left = {"told": [1.0], "state": {"weight": torch.ones(2)}, "peaks": [100 if budget is None else budget]}
        if method == "delta":
            if isinstance(value, Exception):
                raise value
            left[name] = value
        return Trained(**left)

    return Row(trained)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("told", [1.0 + 2**-52], "was told, and plainly"),
        ("told", [1.0, 1.0], "was told, and plainly"),
        ("state", {"weight": torch.tensor([1.0, 1.0 + 2**-23])}, "weight are other than after a plain training"),
        ("state", {"weight": torch.ones(2, dtype=torch.float64)}, "weight are other"),
        ("state", {}, "other tensors are left"),
        ("peaks", [71], "a peak of 71, a budget of 70"),
        ("peaks", [0], "a peak of 0"),
        ("raised", ModelError("It is not managed."), "the table says 'identical, within budget', and it is 'It is not"),
    ],
)
def test_a_training_that_does_not_do_what_its_cell_says_fails(name: str, value: Any, said: str) -> None:
    check({"Accelerate": row_of("told", [1.0])}, "Accelerate", "clipping")
    with pytest.raises(AssertionError, match=said):
        check({"Accelerate": row_of(name, value)}, "Accelerate", "clipping")


def test_a_row_that_the_table_does_not_have_fails() -> None:
    with pytest.raises(AssertionError, match="the table says None"):
        check({"Another": row_of("told", [1.0])}, "Another", "clipping")
