"""Numbers as text: fixed decimals, signs and alignment, never a digit that the source does not have.

A value is a ``str`` or ``Decimal`` (digits as published or logged: "2.4282" in a column of six decimals
prints as
2.4282, padded by spaces and not by zeros) or a ``float`` (computed here: always all decimals). Rounding is
half up
on the decimal digits; a float's digits are those of its shortest repr.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

MINUS = "\u2212"
FIGURE_SPACE = "\u2007"  # as wide as a digit
PUNCTUATION_SPACE = "\u2008"  # as wide as a full stop

Value = str | float | int | Decimal | None


def decimal(value: Value) -> Decimal | None:
    """Exact decimal of ``value``; None for None, an empty string, NaN and infinities."""
    if value is None or value == "":
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = repr(float(value))
    elif not isinstance(value, (str, Decimal)):
        value = str(value)
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise ValueError(f"got {value!r}, needed a number") from None
    return number if number.is_finite() else None


def as_read(value: float | None) -> Decimal | None:
    """A value read from a table, with exactly the digits it has there (see the module's first paragraph)."""
    return decimal(None if value is None else float(value))


def fixed(value: Value, decimals: int, *, signed: bool = False, pad: bool = False) -> str:
    """``value`` with at most ``decimals`` decimals and thousands separators; '' for a missing value.

    signed: a plus before positive numbers. pad: fill absent decimals with digit-wide spaces so that
    right-aligned
    columns align at the decimal point.
    """
    number = decimal(value)
    if number is None:
        return ""
    available = max(0, -number.as_tuple().exponent)
    shown = decimals if isinstance(value, float) else min(decimals, available)
    rounded = number.quantize(Decimal(1).scaleb(-shown), rounding=ROUND_HALF_UP)
    text = f"{abs(rounded):,.{shown}f}"
    if rounded < 0:
        text = MINUS + text
    elif signed and rounded > 0:
        text = "+" + text
    if pad and shown < decimals:
        text += FIGURE_SPACE * (decimals - shown) + (PUNCTUATION_SPACE if shown == 0 else "")
    return text


def percent(value: Value) -> Decimal | None:
    """A fraction, as read, as a percentage with the same digits."""
    number = decimal(value)
    return None if number is None else number.scaleb(2)


def decimals_for(values: list[float], significant: int = 3, most: int = 8) -> int:
    """Decimals that show ``significant`` digits of the smallest non-zero magnitude in ``values``."""
    sizes = [abs(v) for v in values if v is not None and math.isfinite(v) and v != 0]
    if not sizes:
        return 1
    return int(min(most, max(0, significant - 1 - math.floor(math.log10(min(sizes))))))


def p_value(p: float | None) -> str:
    """A p value with two significant digits; '' when missing, '<0.001' below a thousandth."""
    if p is None or not math.isfinite(p):
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def p_equals(p: float) -> str:
    """'p = 0.012' or 'p < 0.001'."""
    text = p_value(p)
    return f"p {text[0]} {text[1:]}" if text.startswith("<") else f"p = {text}"


def count(number: int, noun: str, plural: str = "") -> str:
    """'1 seed', '3 seeds'."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
