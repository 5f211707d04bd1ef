r"""The `math` reward: is the answer of a completion the same mathematics as the right one?

Exact before approximate, own reading before the library: text, choices, tuples and sets, equations, values by
expression.py; only what is left (inequalities, matrices ...) goes to math-verify, gold first, behind size guards.
"""

import functools
import logging
import re
from types import ModuleType
from typing import Any

from .answers import bare_answer, final_answer, gold_text, text_of
from .choices import golds
from .expression import evaluate
from .faults import guarded
from .notation import normalise, split_unit, squeeze
from .structure import Items, items, named, sides
from .value import TooLarge, Unreadable, close_value, same_value

_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?")
_CHOSEN = re.compile(r"\(?\s*([A-Ja-j])\s*\)?(?:\s*[:.)].*)?", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-zA-Z]+\}")
_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf)[a-z]*\s*\{[^{}]*\}")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|\\(?!frac|sqrt|pi|cdot|binom|sin|cos|tan|log|ln|exp|arc)[a-z]+")
_LONG_DECIMAL = re.compile(r"-?\d*\.\d+")
_LONG_DIGITS = 10
_LONG_TOLERANCE = 1e-9
_POINTS = 3
_HEAVY = re.compile(
    r"\^[\s{(]*\d{3,}|\^[\s{(]*[^\s{}()]+\s*\^|\^\s*\{[^}]*\^|\d{30,}|\d{3,}[\s)}]*!|!\s*!|\d[eE]\d{2,}"
)
_MOST_POWERS = 4
_LONGEST_FOR_LIBRARY = 300
_LONGEST = 2000


def math_reward(
    prompts: list[Any],
    completions: list[Any],
    *,
    answer: list[Any],
    finish_reason: list[str] | None = None,
    choices: list[Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the completion's answer equals `answer`, 0.0 where it does not, None where `answer` cannot be read.

    Where a row has `choices`, the right one's letter and its text are both right, whichever of them `answer` is.
    The completion's answer is its last <answer> block, last \boxed or \fbox, `#### ...` or "answer is ...", or the
    whole of a one-line completion. Where `finish_reason` is "length" only a closed block or box counts.
    """
    reasons = finish_reason or [""] * len(completions)
    offered = choices or [None] * len(completions)
    return [
        guarded(_score, text_of(completion), gold_text(gold), reason == "length", own)
        for completion, gold, reason, own in zip(completions, answer, reasons, offered, strict=True)
    ]


def load_math() -> None:
    """Import the library and use it once, so that the first answer does not pay for it."""
    _library_parse("x < 1")


@functools.lru_cache(maxsize=4096)
def equal(gold: str, answer: str) -> bool | None:
    r"""Whether two answers are the same; None where `gold` cannot be read. The gold answer comes first.

    An inequality as gold accepts the interval (`x<3`, `(-\infty,3)`) but not the reverse. A unit, a base or a percent
    sign may be left out, but not be another one. Lists without brackets and sets have no order, tuples and intervals
    have one.
    """
    if not _readable_gold(gold):
        return None
    if len(answer) > _LONGEST:
        return False
    given = normalise(answer)
    return bool(given) and bool(_same(normalise(gold), given))


@functools.lru_cache(maxsize=4096)
def _readable_gold(gold: str) -> bool:
    """Whether it can be told when an answer equals this one; a sentence can only be compared by `exact`."""
    if len(gold) > _LONGEST:
        return False
    right = normalise(gold)
    if _TEXT_COMMAND.search(gold) or not right:
        return bool(right)
    return not _is_prose(split_unit(right)[0]) and _readable(right)


def _readable(right: str) -> bool:
    if parts := items(right):
        return all(_readable(part) or "\\infty" in part for part in parts.parts)
    if _WORD.search(_ENVIRONMENT.sub("", split_unit(right)[0])) or _CHOICE.fullmatch(right):
        return True
    return all(map(_has_value, sides(right))) or (not _unfit(right) and bool(_library_parse(right)))


def _score(text: str, gold: str | None, truncated: bool, choices: Any = None) -> float | None:
    if not gold:
        return None
    answer = final_answer(text, truncated=truncated)
    if answer is None and not truncated:
        answer = bare_answer(text)
        if answer is not None and _is_prose(split_unit(named(normalise(answer))[1])[0]):
            answer = None
    verdicts = [equal(right, answer or "") for right in golds(gold, choices)]
    known = [verdict for verdict in verdicts if verdict is not None]
    return float(any(known)) if known else None


def _is_prose(text: str) -> bool:
    """Two or more words: a sentence, from which no number may be picked."""
    return len(_WORD.findall(_ENVIRONMENT.sub("", text))) > 1


def _same(right: str, given: str, depth: int = 0) -> bool:
    if _squeezed(right) == _squeezed(given):
        return True
    choice = _CHOICE.fullmatch(right)
    if choice:
        other = _CHOSEN.fullmatch(given)
        return other is not None and other[1].upper() == choice[1]
    if depth > 4:
        return False
    if "=" in right or "=" in given or "\\in" in right + given:
        verdict = _same_equations(right, given, depth)
        if verdict is not None:
            return verdict
    many, others = items(right), items(given)
    if many and not others and len(many.parts) == 1:  # {5} is 5
        return _same(many.parts[0], given, depth + 1)
    if others and not many and len(others.parts) == 1:
        return _same(right, others.parts[0], depth + 1)
    if many and others:
        return _same_items(many, others, depth)
    if many or others:  # one answer is no list of answers, but an inequality may be an interval
        return False if _has_value(given if many else right) else _same_by_library(right, given)
    return _same_values(right, given)


def _squeezed(text: str) -> str:
    return squeeze(text).casefold() if _WORD.search(text) else squeeze(text)


def _same_equations(right: str, given: str, depth: int) -> bool | None:
    """Named values by their value, equations by whether their differences of sides are proportional; else None."""
    (right_name, right_value), (given_name, given_value) = named(right), named(given)
    if (right_name and given_name and right_name == given_name) or (
        bool(right_name) != bool(given_name) and ("=" not in (given if right_name else right))
    ):
        return _same(right_value, given_value, depth + 1)
    left, other = sides(right), sides(given)
    if len(left) == 1 and len(other) > 1:  # 2 + 3 = 5 for 5, but not x + 1 = 5
        head = other[:-1] if not named(f"{other[0]} = 0")[0] else other[1:-1]
        return all(_same(part, other[-1], depth + 1) for part in head) and _same(right, other[-1], depth + 1)
    if len(left) != 2 or len(other) != 2:
        return None
    try:
        ratios = []
        for point in range(_POINTS):
            first, second = (evaluate(f"({pair[0]}) - ({pair[1]})", point=point) for pair in (left, other))
            ratios.append(first / second)
    except (Unreadable, ZeroDivisionError):
        return None
    return ratios[0] != 0 and all(same_value(ratio, ratios[0]) for ratio in ratios)


def _same_items(right: Items, given: Items, depth: int) -> bool:
    if len(right.parts) != len(given.parts):
        return False
    if right.brackets != given.brackets:
        if "\\cup" in (right.brackets, given.brackets):
            return False
        if "" not in (right.brackets, given.brackets):
            return False
    if right.ordered or given.ordered:
        return all(_same(a, b, depth + 1) for a, b in zip(right.parts, given.parts, strict=True))
    left = list(given.parts)
    for part in right.parts:
        match = next((other for other in left if _same(part, other, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_values(right: str, given: str) -> bool:
    (right, right_unit), (given, given_unit) = split_unit(right), split_unit(given)
    if given_unit != right_unit and _other_unit(right_unit, given_unit):
        return False
    if _WORD.search(right) or _WORD.search(given):
        return _squeezed(right) == _squeezed(given)
    try:
        value = evaluate(right)
    except TooLarge:
        return False
    except Unreadable:
        return _same_by_library(right, given)
    try:
        if right.endswith("%") != given.endswith("%"):
            return _same_percent(right, given)
        points = range(_POINTS if _VARIABLE.search(right + given) else 1)
        return _close_decimal(right, given) or all(
            same_value(value if point == 0 else evaluate(right, point=point), evaluate(given, point=point))
            for point in points
        )
    except Unreadable:
        return False


def _other_unit(right: str, given: str) -> bool:
    """Whether two units contradict each other: one may be left out (a base only by the answer) or be in Chinese."""
    if not (right and given):
        return given.startswith("base")
    return right.isascii() == given.isascii()


def _has_value(text: str) -> bool:
    try:
        evaluate(split_unit(text)[0])
    except Unreadable:
        return False
    return True


def _same_percent(right: str, given: str) -> bool:
    """50% is 0.5; and where one side leaves the sign out, 50% is 50, but 0.5% is not 0.5 when it was not asked for."""
    value, answer = evaluate(right), evaluate(given)
    if same_value(value, answer):
        return True
    plain = same_value(evaluate(right.rstrip("%")), evaluate(given.rstrip("%")))
    return plain and (right.endswith("%") or abs(value) > 1)


def _close_decimal(right: str, given: str) -> bool:
    """A decimal of ten or more digits stands for what it was rounded from; two such decimals must be equal."""
    long = [
        bool(_LONG_DECIMAL.fullmatch(text)) and len(text.strip("-0.").replace(".", "")) >= _LONG_DIGITS
        for text in (right, given)
    ]
    if long[0] == long[1] or _VARIABLE.search(right + given):
        return False
    return close_value(evaluate(right), evaluate(given), _LONG_TOLERANCE)


def _same_by_library(right: str, given: str) -> bool:
    """What math-verify says, gold first."""
    if _unfit(right) or _unfit(given) or _is_prose(given):
        return False
    gold, answer = _library_parse(right), _library_parse(given)
    # Its own time limits need the main thread of a process (SIGALRM) and are off: the pool's hold everywhere.
    return bool(gold and answer and _library().verify(gold, answer, float_rounding=12, timeout_seconds=None))


@functools.cache
def _library() -> ModuleType:
    import math_verify

    library: ModuleType = math_verify
    # It warns at every call that its time limits are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library


def _unfit(text: str) -> bool:
    """Whether the library must not see this: too long, brackets that do not match, or powers that it would work out."""
    if len(text) > _LONGEST_FOR_LIBRARY or _HEAVY.search(text) or text.count("^") > _MOST_POWERS:
        return True
    try:
        evaluate(text)
    except TooLarge:
        return True
    except Unreadable:
        pass
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return True
    return depth != 0


@functools.lru_cache(maxsize=4096)
def _library_parse(text: str) -> list[Any]:
    library = _library()
    # Whole expressions in LaTeX only: the fallbacks would take a number out of what could not be read.
    parsed: list[Any] = library.parse(
        f"\\boxed{{{text}}}",
        extraction_config=[library.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return parsed
