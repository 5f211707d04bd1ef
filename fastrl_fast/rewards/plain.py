"""The rewards that compare without algebra: `exact` (the same text) and `number` (the same number)."""

import re
from fractions import Fraction
from typing import Any

from .answers import gold_text, last_box, text_of
from .notation import plain_text

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?:/\d+)?")
_LONGEST = 1000
_LARGEST_EXPONENT = 1000


def exact_reward(
    prompts: list[Any], completions: list[Any], *, answer: list[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the last box, or the whole completion without one, is the answer's text; None without an answer."""
    return [_exact(text_of(text), gold_text(gold)) for text, gold in zip(completions, answer, strict=True)]


def number_reward(
    prompts: list[Any], completions: list[Any], *, answer: list[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the last number of the last box, or of the completion without one, is exactly the answer's number.

    Numbers are compared as fractions, so 1,234.00 equals 1234 and 1/2 equals 0.5. None where the answer has no number.
    """
    return [_number(text_of(text), gold_text(gold)) for text, gold in zip(completions, answer, strict=True)]


def last_number(text: str) -> Fraction | None:
    """The last number written in `text` (thousands separators, decimals, exponents, n/m), exactly; None without one."""
    found = [match for match in _NUMBER.findall(plain_text(text)) if any(map(str.isdigit, match))]
    if not found:
        return None
    if len(found[-1]) > _LONGEST:
        return None
    number, _, divisor = found[-1].replace(",", "").partition("/")
    mantissa, _, exponent = number.lower().partition("e")
    if abs(int(exponent or 0)) > _LARGEST_EXPONENT or not int(divisor or 1):
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0) / int(divisor or 1)


def _exact(text: str, gold: str | None) -> float | None:
    if not gold:
        return None
    box = last_box(text)
    return 1.0 if (text.strip() if box is None else box) == gold else 0.0


def _number(text: str, gold: str | None) -> float | None:
    right = last_number(gold) if gold else None
    if right is None:
        return None
    box = last_box(text)
    return 1.0 if last_number(text if box is None else box) == right else 0.0
