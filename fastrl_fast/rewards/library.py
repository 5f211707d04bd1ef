"""math-verify behind size guards: what it says of two answers that our own reader does not know."""

import functools
import logging
import re
from types import ModuleType
from typing import Any

from .expression import evaluate
from .value import TooLarge, Unreadable
from .words import is_prose

_HEAVY = re.compile(
    r"\^[\s{(]*\d{3,}|\^[\s{(]*[^\s{}()]+\s*\^|\^\s*\{[^}]*\^|\d{30,}|\d{3,}[\s)}]*!|!\s*!|\d[eE]\d{2,}"
)
_MOST_POWERS = 4
_MOST_DIVISIONS = 12
_LONGEST = 300
_DEEPEST = 20


def load_library() -> None:
    """Import the library and use it once, so that the first answer does not pay for it."""
    library_parse("x < 1")


def same_by_library(right: str, given: str) -> bool:
    """What math-verify says, gold first; False where either must not or cannot be read."""
    if unfit(right) or unfit(given) or is_prose(given) or right.count("'") != given.count("'"):
        return False  # it takes f'(x) for f(x)
    gold, answer = library_parse(right), library_parse(given)
    # Its own time limits need the main thread of a process (SIGALRM) and are off: the pool's hold everywhere.
    return bool(gold and answer and _library().verify(gold, answer, float_rounding=12, timeout_seconds=None))


def unfit(text: str) -> bool:
    """Whether the library must not see this: too long, brackets that do not match or nest deep, powers that it would
    work out."""
    if len(text) > _LONGEST or _HEAVY.search(text) or text.count("^") > _MOST_POWERS:
        return True
    if text.count("/") + text.count("\\frac") > _MOST_DIVISIONS:  # twice as long for each
        return True
    try:
        evaluate(text)
    except TooLarge:
        return True
    except Unreadable:
        pass
    depth = 0
    for bracket in re.findall(r"\\.|[][{}()]", text):
        depth += (bracket in "{([") - (bracket in "})]")
        if not 0 <= depth <= _DEEPEST:
            return True
    return depth != 0


@functools.lru_cache(maxsize=4096)
def library_parse(text: str) -> list[Any]:
    """The library's expressions for a normalised answer; empty where it cannot read it."""
    library = _library()
    # Whole expressions in LaTeX only: the fallbacks would take a number out of what could not be read.
    parsed: list[Any] = library.parse(
        f"\\boxed{{{text}}}",
        extraction_config=[library.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return parsed


@functools.cache
def _library() -> ModuleType:
    import math_verify

    library: ModuleType = math_verify
    # It warns at every call that its time limits are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library
