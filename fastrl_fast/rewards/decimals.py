"""Decimals that stand for the value they were rounded from."""

import re
from fractions import Fraction

from .expression import evaluate
from .units import split_unit
from .value import Unreadable, add, close_value, multiply, number
from .words import VARIABLE

_DECIMAL = re.compile(r"-?\d*\.\d+")
_NUMBER = re.compile(r"-?\d*\.?\d+")
_LONG_DIGITS = 10
_LONG_TOLERANCE = 1e-9


def rounds_to(text: str, decimal: str) -> bool:
    r"""Whether a value that is no decimal itself is about the decimal behind it, as in `3\pi \approx 9.42`."""
    (text, _), (decimal, _) = split_unit(text), split_unit(decimal)
    if "." in text or not _NUMBER.fullmatch(decimal) or set(VARIABLE.findall(text)) - {"e"}:
        return False
    try:
        value = evaluate(text)
        gap = number(add(value, multiply(Fraction(-1), evaluate(decimal))))
    except Unreadable:
        return False
    if "." not in decimal and isinstance(value, Fraction):  # 7/2 is not 4
        return False
    return bool(abs(gap) <= 0.5 * 10.0 ** -len(decimal.partition(".")[2]))


def close_decimal(right: str, given: str) -> bool:
    """A decimal of ten or more digits stands for what it was rounded from; two such decimals must be equal."""
    long = [
        bool(_DECIMAL.fullmatch(text)) and len(text.strip("-0.").replace(".", "")) >= _LONG_DIGITS
        for text in (right, given)
    ]
    if long[0] == long[1] or VARIABLE.search(right + given):
        return False
    return close_value(evaluate(right), evaluate(given), _LONG_TOLERANCE)
