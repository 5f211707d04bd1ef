"""Two equations: are they the same, but for a factor or for which letter they are solved for?"""

import re

from .expression import evaluate
from .quantity import POINTS
from .structure import named
from .value import Unreadable, divide, same_value

_LETTER_OR_COMMAND = re.compile(r"\\[a-zA-Z]+|[A-Za-z]")


def same_relation(right: list[str], given: list[str]) -> bool | None:
    """Whether the differences of the sides of two equations are proportional, or one is the other solved for a letter;
    None where they cannot be read."""
    first, second = (f"({pair[0]}) - ({pair[1]})" for pair in (right, given))
    try:
        ratios = [divide(evaluate(first, point=point), evaluate(second, point=point)) for point in range(POINTS)]
        if ratios[0] != 0 and all(same_value(ratio, ratios[0]) for ratio in ratios):
            return True
        return _solves(right, second) or _solves(given, first)
    except (Unreadable, ZeroDivisionError):
        return None


def replaced(text: str, letter: str, by: str) -> str:
    """The text with another letter or, in brackets, a value for a letter."""
    return _LETTER_OR_COMMAND.sub(lambda found: by if found[0] == letter else found[0], text)


def _solves(solved: list[str], difference: str) -> bool:
    """Whether y = 1/x is all that x y - 1 = 0 says: it is zero there, and linear in y."""
    letter, value = named("=".join(solved))
    if len(letter) != 1 or letter in value or letter not in difference:
        return False
    for point in range(POINTS):
        at, above, twice = (
            evaluate(replaced(difference, letter, f"({value} + {shift})"), point=point) for shift in range(3)
        )
        if at != 0 or above == 0 or not same_value(twice, 2 * above):
            return False
    return True
