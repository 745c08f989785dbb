"""Bytes, seconds and budgets as users write them: the only place where they are read from text.

NOTE [Budgets]. A budget means the same wherever it is written:

 - `6GiB`, `500 MB`, 6000000: bytes;
 - `50%`: a share of what the device has, a named one or this one; on the CPU, of what this process may use of the RAM;
 - `0.5x`, or a fraction alone, `0.5`: of the plain peak, where the step has run without a budget before or is recorded.
"""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from spillway.errors import BudgetError, UsageError
from spillway.units import Bytes, GiB, KiB, MiB, Seconds, TiB, format_bytes

# "6G" is left out on purpose: it means 6.00 GiB to some tools and 5.59 GiB to others.
_BYTES_PER_UNIT: dict[str, Bytes] = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB
}  # fmt: skip
# At most 18 digits: beyond any memory, and below the length at which Python refuses to convert.
_QUANTITY = re.compile(r"(?P<number>[+-]?[0-9][0-9_]{0,17}(\.[0-9]{1,18})?)\s*(?P<unit>[A-Za-z]*)")
_DURATION = re.compile(r"(?P<number>[0-9]{1,18}(\.[0-9]{1,18})?)\s*(?P<unit>[a-z]*)")
_SECONDS_PER_UNIT: dict[str, Fraction] = {
    "us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60), "h": Fraction(3600)
}  # fmt: skip
_SHARE = re.compile(r"(?P<number>[+-]?[0-9]{1,18}(\.[0-9]{1,18})?)\s*(?P<unit>[%x]?)")

APART: Final = Fraction(1, 10)
"""How far the shares of a range are apart that does not say how many it has."""
MOST_BUDGETS: Final = 1000
"""In one list."""


def parse_bytes(value: int | str) -> Bytes:
    """Read a number of bytes, `500` or `"500 MB"` or `"1.5GiB"`; a fraction of a byte is cut off.

    Raises BudgetError for anything else, and for less than zero.
    """
    if isinstance(value, bool):
        raise _unreadable(value)
    try:  # integers of any library, and neither booleans nor floats: 0.8 might have meant 80 %
        nbytes = _quantity(value) if isinstance(value, str) else operator.index(value)
    except TypeError:
        raise _unreadable(value) from None
    if nbytes < 0:
        raise BudgetError(f"A number of bytes cannot be negative, as {reprlib.repr(value)} is.")
    return nbytes


def parse_budget(value: int | str, device_bytes: Bytes) -> Bytes:
    """Read a budget: what `parse_bytes` reads, or a share of the device such as `"80%"`.

    Raises BudgetError if it cannot be read, is not positive, or exceeds `device_bytes`.
    """
    text = str(value) if isinstance(value, float) else value  # of a float of NumPy, repr says more than the number
    share = _SHARE.fullmatch(text.strip()) if isinstance(text, str) else None
    given = reprlib.repr(value)
    part = Fraction(share["number"]) if share is not None else Fraction(0)
    if share is not None and (share["unit"] == "x" or (not share["unit"] and 0 < part < 1)):
        raise BudgetError(
            f"{given} is a share of the plain peak, which nobody knows here; write bytes, as '6GiB', or a share of the "
            f"memory, as '{float(100 * part) if 0 < part < 1 else 80:g}%'."
        )
    of_device = share is not None and bool(share["unit"])
    if of_device and part > 100:
        raise BudgetError(f"A share of the device's memory is more than 0 and at most 100%, and {given} is not.")
    budget = int(part * device_bytes / 100) if of_device else parse_bytes(value)
    if budget <= 0:
        raise BudgetError(f"A budget has to be more than 0 bytes, and {given} is not.")
    if budget > device_bytes:
        raise BudgetError(f"A budget of {given} is more than the {format_bytes(device_bytes)} that the device has.")
    return budget


def budget_of_peak(budget: int | float | str, plain_peak: Bytes, device_bytes: Bytes) -> Bytes:
    """Read a budget where the plain peak is known: a float is a share of it. See NOTE [Budgets].

    A fraction of a byte is cut off. Raises BudgetError as `parse_budgets` does.
    """
    if not isinstance(budget, float | str):
        return _whole_budget(Fraction(parse_bytes(budget)), budget)
    return _whole_budget(_budget(str(budget), plain_peak, device_bytes), budget)


def parse_budgets(text: str, plain_peak: Bytes, device_bytes: Bytes) -> list[Bytes]:
    """Read budgets, separated by commas; ascending, each once.

    See NOTE [Budgets]. `0.3..1.0` is a range, every 0.1, and `30%..100%` one every 10 %; `0.3..1.0:5` are five, evenly
    spaced. A fraction of a byte is cut off.

    Raises BudgetError for what cannot be read, for shares of 0 or above 1, and for more than `MOST_BUDGETS` budgets.
    """
    budgets: set[Bytes] = set()
    for part in map(str.strip, text.split(",")):
        budgets.update(_whole_budget(found, part) for found in _range(part, plain_peak, device_bytes))
        if len(budgets) > MOST_BUDGETS:
            raise BudgetError(f"{text!r} are more than {MOST_BUDGETS} budgets.")
    return sorted(budgets)


def _range(text: str, plain_peak: Bytes, device_bytes: Bytes) -> Iterator[Fraction]:
    """The exact budgets of one part of a list."""
    begin, dots, rest = text.partition("..")
    low = _budget(begin, plain_peak, device_bytes)
    if not dots:
        yield low
        return
    end, colon, count = rest.partition(":")
    high = _budget(end, plain_peak, device_bytes)
    if low > high:
        raise BudgetError(f"The range {text!r} ends below its begin.")
    if colon:
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", count) or not 2 <= int(count) <= MOST_BUDGETS:
            raise BudgetError(
                f"The range {text!r} has to have 2 to {MOST_BUDGETS} budgets, and {count.strip()!r} is none of these."
            )
        yield from (low + (high - low) * index / (int(count) - 1) for index in range(int(count)))
        return
    shares = _share(begin), _share(rest)
    if shares[0] is None or shares[1] is None or shares[0][1] != shares[1][1]:
        raise BudgetError(f"The range {text!r} has to say how many budgets it has: '{text}:5' are five.")
    while low <= high:
        yield low
        low += APART * (device_bytes if shares[0][1] else plain_peak)


def _share(text: str) -> tuple[Fraction, bool] | None:
    """A share, and whether it is one of the device, with a percent sign, or of the plain peak: with an x, or a number
    alone that has a point or is at most 1."""
    found = _SHARE.fullmatch(text.strip())
    if found is None or found["number"][0] in "+-":
        return None
    number = found["number"]
    if not found["unit"] and "." not in number and int(number) > 1:
        return None
    of_device = found["unit"] == "%"
    return Fraction(number) / (100 if of_device else 1), of_device


def _budget(text: str, plain_peak: Bytes, device_bytes: Bytes) -> Fraction:
    """Bytes of one budget, not yet whole."""
    found = _share(text)
    if found is not None:
        share, of_device = found
        if not 0 < share <= 1:
            what, most = ("the device's memory", "100%") if of_device else ("the plain peak", "1")
            raise BudgetError(f"A share of {what} is more than 0 and at most {most}, and {text!r} is not.")
        return share * (device_bytes if of_device else plain_peak)
    try:
        return Fraction(parse_bytes(text))
    except BudgetError:
        raise BudgetError(
            f"{reprlib.repr(text)} is no budget; write for example '0.5x' (of the plain peak), '80%' (of the device's "
            f"memory) or '6GiB'."
        ) from None


def _whole_budget(nbytes: Fraction, given: object) -> Bytes:
    if nbytes < 1:
        raise BudgetError(f"A budget has to be more than 0 bytes, and {given!r} is not.")
    return int(nbytes)


def parse_bytes_per_second(text: str) -> float:
    """Read a speed, `"25GB/s"`: what `parse_bytes` reads, for each second.

    Raises BudgetError for anything else.
    """
    number, slash, second = text.strip().rpartition("/")
    if not slash or second.strip() != "s":
        raise BudgetError(f"{reprlib.repr(text)} is not a number of bytes for each second; write for example '25GB/s'.")
    return float(parse_bytes(number))


def parse_seconds(text: str) -> Seconds:
    """Read a duration with its unit, `"20us"`, `"1.5 ms"`, `"2 min"`. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or match["unit"] not in _SECONDS_PER_UNIT:
        raise UsageError(f"{reprlib.repr(text)} is not a duration; write for example '20us', '1.5 ms' or '2 s'.")
    return float(Fraction(match["number"]) * _SECONDS_PER_UNIT[match["unit"]])


def _quantity(text: str) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise _unreadable(text)
    number, unit = match["number"].replace("_", ""), match["unit"].lower()
    if not unit and "." not in number:
        return int(number)
    if unit not in _BYTES_PER_UNIT:
        raise _unreadable(text)
    return int(Fraction(number) * _BYTES_PER_UNIT[unit])


def _unreadable(value: object) -> BudgetError:
    return BudgetError(f"{reprlib.repr(value)} is not a number of bytes; write for example '6GiB' or '500 MB'.")
