"""Two single answers, a number, a formula or a word each, with or without a unit: are they the same?"""

import re

from .clock import is_time, same_time
from .decimals import close_decimal
from .expression import evaluate
from .library import same_by_library
from .notation import squeeze
from .units import split_unit
from .value import TooLarge, Unreadable, divide, same_value
from .words import VARIABLE, is_formula, plain_words, words

POINTS = 3
"""So many values of its letters tell a formula."""
_LETTERS = re.compile(r"[A-Za-z]{2,3}")
_GLUED = re.compile(r".*[\d)}][a-ln-zA-Z]", re.DOTALL)
"""4s may be four seconds or four times s, which nobody may leave out; metres are behind many a number of GeoQA."""


def squeezed(text: str) -> str:
    """The text without spaces that mean nothing; of words neither case, articles nor plurals matter."""
    return squeeze(plain_words(text)) if words(text) else squeeze(text)


def same_quantity(right: str, given: str) -> bool:
    """Exactly the same value at every point, as far as units, percent signs and bases let them be compared."""
    if is_time(right) or is_time(given):
        return same_time(right, given)
    whole, other_whole = right, given
    (right, right_unit), (given, given_unit) = split_unit(right), split_unit(given)
    if right_unit.startswith("base"):  # digits, not values; 2A may be hexadecimal, or two amperes
        return squeeze(right) == squeeze(given if given_unit == right_unit else other_whole)
    if given_unit != right_unit and _other_unit(right_unit, given_unit):
        return False
    if bool(right_unit) != bool(given_unit) and _GLUED.fullmatch(whole if right_unit else other_whole):
        return False
    if (words(right) and not _is_product(right, given)) or (words(given) and not _is_product(given, right)):
        return squeezed(right) == squeezed(given)
    if right.count(":") > 1 or given.count(":") > 1:
        return _same_ratios(right.split(":"), given.split(":"))
    try:
        value = evaluate(right)
    except TooLarge:
        return False
    except Unreadable:
        return same_by_library(right, given)
    try:
        if right.endswith("%") != given.endswith("%"):
            return _same_percent(right, given)
        points = range(POINTS if VARIABLE.search(right + given) else 1)
        return close_decimal(right, given) or all(
            same_value(value if point == 0 else evaluate(right, point=point), evaluate(given, point=point))
            for point in points
        )
    except Unreadable:
        return False


def _same_ratios(right: list[str], given: list[str]) -> bool:
    """Whether 1:2:3 is 2:4:6."""
    if len(right) != len(given):
        return False
    try:
        first, *rest = (divide(evaluate(a), evaluate(b)) for a, b in zip(right, given, strict=True))
    except (Unreadable, ZeroDivisionError):
        return False
    return all(same_value(first, ratio) for ratio in rest)


def _other_unit(right: str, given: str) -> bool:
    """Whether two units contradict each other: one may be left out (a base only by the answer) or be in Chinese."""
    if not (right and given):
        return given.startswith("base") and given != "base 10"
    return right.isascii() == given.isascii()


def _same_percent(right: str, given: str) -> bool:
    """50% is 0.5; and where one side leaves the sign out, 50% is 50, but 0.5% is not 0.5 when it was not asked for."""
    value, answer = evaluate(right), evaluate(given)
    if same_value(value, answer):
        return True
    plain = same_value(evaluate(right.rstrip("%")), evaluate(given.rstrip("%")))
    return plain and (right.endswith("%") or abs(value) > 1)


def has_value(text: str) -> bool:
    try:
        evaluate(split_unit(text)[0])
    except Unreadable:
        return False
    return True


def _is_product(text: str, other: str) -> bool:
    """Whether two or three letters are a product, `xy`, because the other answer is a formula."""
    return bool(_LETTERS.fullmatch(text)) and is_formula(other)
