from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spillway.budgets import budget_of_peak, parse_budget, parse_budgets
from spillway.errors import BudgetError
from spillway.units import GiB, MiB


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("0.3..1.0", [300, 400, 500, 600, 700, 800, 900, 1000]),
        ("0.35..0.6", [350, 450, 550]),
        ("30% .. 50%", [6000, 8000, 10000]),
        ("0.3..1.0:5", [300, 475, 650, 825, 1000]),
        ("0.3..1.0 : 2", [300, 1000]),
        ("0.3x..0.5x", [300, 400, 500]),
        ("0.5x..100%:2", [500, 20000]),
        ("1x", [1000]),
        ("0.5,0.7", [500, 700]),
        ("0.7,0.5,0.7x, 0.5 x", [500, 700]),
        ("80%", [16000]),
        ("1", [1000]),
        ("1.0", [1000]),
        ("6GiB,8GiB", [6 * GiB, 8 * GiB]),
        ("600", [600]),
        ("0.2,600,0.3..0.5,1KiB", [200, 300, 400, 500, 600, 1024]),
        ("1MiB..4MiB:4", [MiB, 2 * MiB, 3 * MiB, 4 * MiB]),
        ("0.5..2000:3", [500, 1250, 2000]),
        ("0.9999", [999]),
    ],
)
def test_budgets_are_shares_of_the_plain_peak_or_of_the_device_or_bytes_alone_or_in_ranges(
    text: str, budgets: list[int]
) -> None:
    assert parse_budgets(text, 1000, 20_000) == budgets


def test_the_ends_of_a_range_are_hit_exactly_whatever_the_peak() -> None:
    for peak in (1001, 999_999_999_937, 17_151_253_504):
        assert parse_budgets("0.1..1.0", peak, 1)[-1] == parse_budgets("0.1..1.0:7", peak, 1)[-1] == peak
        assert len(parse_budgets("0.1..1.0", 10**12, 1)) == 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "",
            "'' is no budget; write for example '0.5x' (of the plain peak), '80%' (of the device's memory) or '6GiB'.",
        ),
        ("0.5,,0.7", "'' is no budget; write for example"),
        ("half", "'half' is no budget; write for example"),
        ("-0.5", "'-0.5' is no budget; write for example"),
        ("0.3..", "'' is no budget; write for example"),
        ("0.3...0.5", "'.0.5' is no budget; write for example"),
        ("0", "A share of the plain peak is more than 0 and at most 1, and '0' is not."),
        ("0.0", "A share of the plain peak is more than 0 and at most 1, and '0.0' is not."),
        ("120%", "A share of the device's memory is more than 0 and at most 100%, and '120%' is not."),
        ("1.5", "A share of the plain peak is more than 0 and at most 1, and '1.5' is not."),
        ("0.0001", "A budget has to be more than 0 bytes, and '0.0001' is not."),
        ("0B", "A budget has to be more than 0 bytes, and '0B' is not."),
        ("1.0..0.3", "The range '1.0..0.3' ends below its begin."),
        ("0.3..1.0:1", "The range '0.3..1.0:1' has to have 2 to 1000 budgets, and '1' is none of these."),
        ("0.3..1.0:x", "The range '0.3..1.0:x' has to have 2 to 1000 budgets, and 'x' is none of these."),
        ("0.3..1.0:", "The range '0.3..1.0:' has to have 2 to 1000 budgets, and '' is none of these."),
        ("2x", "A share of the plain peak is more than 0 and at most 1, and '2x' is not."),
        ("0.3..80%", "The range '0.3..80%' has to say how many budgets it has: '0.3..80%:5' are five."),
        ("1MiB..4MiB", "The range '1MiB..4MiB' has to say how many budgets it has: '1MiB..4MiB:5' are five."),
    ],
)
def test_what_is_no_budget_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BudgetError) as refused:
        parse_budgets(text, 1000, 20_000)
    assert str(refused.value).startswith(sentence)


def test_a_share_may_be_a_number_of_numpy() -> None:
    for share in np.linspace(0.1, 0.9, 9):
        assert budget_of_peak(share, 1000, 20_000) == budget_of_peak(float(share), 1000, 20_000)
    with pytest.raises(BudgetError, match=r"is a share of the plain peak, which nobody knows here; .* '50%'"):
        parse_budget(np.float64(0.5), 10**9)  # type: ignore[arg-type]


def test_there_is_an_end_to_how_many() -> None:
    with pytest.raises(BudgetError, match="are more than 1000 budgets"):
        parse_budgets("0.1..0.5:900,0.6..1.0:900", 10**9, 1)


@pytest.mark.parametrize(
    ("written", "instead"),
    [("0.5x", "50%"), ("0.5 x", "50%"), ("1x", "80%"), ("0.5", "50%"), ("0.125", "12.5%"), (0.7, "70%")],
)
def test_a_share_of_the_plain_peak_is_refused_where_nobody_knows_it(written: Any, instead: str) -> None:
    with pytest.raises(BudgetError) as refused:
        parse_budget(written, device_bytes=10**9)
    assert str(refused.value) == (
        f"{written!r} is a share of the plain peak, which nobody knows here; write bytes, as '6GiB', or a share of the "
        f"memory, as '{instead}'."
    )


def test_a_percentage_is_the_same_share_of_a_device_whether_a_plain_peak_is_known_or_not() -> None:
    for written in ("50%", "12.5 %", "100%"):
        assert parse_budget(written, 10**9) == budget_of_peak(written, 1000, 10**9)
        assert parse_budgets(written, 1000, 10**9) == [parse_budget(written, 10**9)]
