from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.budgets import parse_budget, parse_bytes, parse_bytes_per_second, parse_seconds
from spillway.errors import BudgetError, UsageError
from spillway.units import GiB, KiB, MiB, TiB, format_bytes, format_seconds

NONSENSE = ["12 apples", "", "  ", "GiB", "6G", "1.5", "1,5 GiB", "1e9", "6GiB6", "--6", "80%", "\u0666 MB", "9" * 5000]


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (1536, 1536),
        (np.int64(7), 7),
        ("1536", 1536),
        ("6_442_450_944", 6 * GiB),
        ("512 B", 512),
        ("6GiB", 6 * GiB),
        ("  6  gib ", 6 * GiB),
        ("1.5GiB", 3 * GiB // 2),
        ("500 MB", 500_000_000),
        ("+2KB", 2000),
        ("2 KiB", 2 * KiB),
        ("0.5 TB", 500_000_000_000),
        ("2TiB", 2 * TiB),
        ("0.1 KiB", 102),
    ],
)
def test_bytes_are_read_with_decimal_and_binary_units(written: int | str, nbytes: int) -> None:
    assert parse_bytes(written) == nbytes


@pytest.mark.parametrize("text", NONSENSE)
def test_what_is_no_number_of_bytes_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BudgetError, match="is not a number of bytes; write for example '6GiB' or '500 MB'"):
        parse_bytes(text)


def test_the_refusal_names_the_offending_text_on_one_line() -> None:
    with pytest.raises(BudgetError) as refusal:
        parse_bytes("12 apples\n")
    assert "'12 apples\\n'" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("value", [True, False, 0.8, 6e9, None, b"6GiB", [6]])
def test_what_is_neither_text_nor_an_integer_is_refused(value: object) -> None:
    with pytest.raises(BudgetError, match="is not a number of bytes"):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, "-1", "-2 GiB"])
def test_negative_bytes_are_refused(value: int | str) -> None:
    with pytest.raises(BudgetError, match="cannot be negative"):
        parse_bytes(value)


@given(st.text())
def test_any_text_is_read_as_bytes_or_refused_with_one_line(text: str) -> None:
    try:
        answer = str(parse_bytes(text))
    except BudgetError as refusal:
        answer = str(refusal)
    assert re.fullmatch(r"[0-9]+|.* is not a number of bytes; .*|A number of bytes cannot be negative, .*", answer)


@pytest.mark.parametrize(
    ("written", "budget"),
    [(1, 1), ("6GiB", 6 * GiB), ("80%", 8 * 10**9), ("80 %", 8 * 10**9), ("12.5%", 1_250_000_000), ("100%", 10**10)],
)
def test_a_budget_is_bytes_or_a_share_of_the_device(written: int | str, budget: int) -> None:
    assert parse_budget(written, device_bytes=10**10) == budget


def test_a_share_is_taken_without_rounding_errors() -> None:
    assert parse_budget("29%", device_bytes=100) == 29
    assert parse_budget("99.9999999%", device_bytes=2**60) == 2**60 * 999_999_999 // 10**9


@pytest.mark.parametrize("value", [0, "0", "0 GiB", "0%", "-5%", "0.0000001%", "0.3 B"])
def test_a_budget_of_nothing_is_refused(value: int | str) -> None:
    with pytest.raises(BudgetError, match="has to be more than 0 bytes"):
        parse_budget(value, device_bytes=10**8)


@pytest.mark.parametrize("value", [2 * GiB + 1, "2.01GiB", "900 TiB"])
def test_a_budget_above_the_device_is_refused_with_the_size_of_the_device(value: int | str) -> None:
    with pytest.raises(BudgetError, match=r"more than the 2\.00 GiB that the device has"):
        parse_budget(value, device_bytes=2 * GiB)


@pytest.mark.parametrize("value", ["100.1%", "120 %"])
def test_a_share_above_the_device_is_refused_as_a_share_whatever_the_device_has(value: str) -> None:
    with pytest.raises(BudgetError, match=rf"^A share of .* is more than 0 and at most 100%, and '{value}' is not\."):
        parse_budget(value, device_bytes=1 << 62)


@pytest.mark.parametrize("value", ["half", "80%%", "%", "1.5"])
def test_an_unreadable_budget_is_refused_like_unreadable_bytes(value: str) -> None:
    with pytest.raises(BudgetError, match="is not a number of bytes"):
        parse_budget(value, device_bytes=GiB)


def test_a_share_of_a_peak_that_nobody_knows_is_told_apart_from_bytes() -> None:
    with pytest.raises(BudgetError, match=r"^0\.8 is a share of the plain peak, which nobody knows here; write bytes"):
        parse_budget(0.8, device_bytes=GiB)


@pytest.mark.parametrize(
    ("nbytes", "written"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (GiB - 1, "1.00 GiB"),
        (3 * GiB // 2, "1.50 GiB"),
        (1000 * MiB, "1000.00 MiB"),
        (5000 * TiB, "5000.00 TiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_bytes_are_written_with_the_largest_unit_that_fits(nbytes: int, written: str) -> None:
    assert format_bytes(nbytes) == written


@given(st.integers(min_value=0, max_value=2**60))
def test_written_bytes_read_back_to_within_the_digits_shown(nbytes: int) -> None:
    written = format_bytes(nbytes)
    assert parse_bytes(written) == pytest.approx(nbytes, rel=0.006)
    assert float(written.split()[0]) < 1024 or written.endswith("TiB")


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0, "0.0 us"),
        (4.56e-5, "45.6 us"),
        (9.99999e-4, "1.0 ms"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (1.5, "1.50 s"),
        (59.996, "1 min 00 s"),
        (123.4, "2 min 03 s"),
        (3599.6, "1 h 00 min"),
        (3720.0, "1 h 02 min"),
        (-1.5, "-1.50 s"),
    ],
)
def test_seconds_are_written_with_the_unit_that_suits_them(seconds: float, written: str) -> None:
    assert format_seconds(seconds) == written


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("20us", 20e-6),
        (" 1.5 ms ", 1.5e-3),
        ("2 s", 2.0),
        ("0s", 0.0),
        ("2 min", 120.0),
        ("1.5h", 5400.0),
        ("3 MS", 3e-3),
    ],
)
def test_durations_are_read_with_their_unit(written: str, seconds: float) -> None:
    assert parse_seconds(written) == seconds


@pytest.mark.parametrize("text", ["", "20", "us", "-1 s", "1e3 s", "2 days", "1,5 s", "\u0666 s", "9" * 5000])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration; write for example '20us'"):
        parse_seconds(text)


def test_speeds_are_bytes_for_each_second() -> None:
    assert parse_bytes_per_second("25GB/s") == 25e9
    assert parse_bytes_per_second(" 1.5 GiB / s ") == 1.5 * GiB
    for text in ("25GB", "25GB/min", "/s", "GB/s", "-1GB/s", ""):
        with pytest.raises(BudgetError):
            parse_bytes_per_second(text)
