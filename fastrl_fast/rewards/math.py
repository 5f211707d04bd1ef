r"""The `math` reward: is the answer of a completion the same mathematics as the right one?

Exact before approximate, own reading before the library: text, choices, tuples and sets, equations, values by
expression.py; only what is left (inequalities, matrices ...) goes to math-verify, gold first, behind size guards.
"""

import functools
import re
from typing import Any

from .answers import bare_answer, final_answer, gold_text, text_of
from .choices import golds
from .decimals import close_decimal, rounds_to
from .expression import evaluate
from .faults import guarded
from .library import library_parse, same_by_library, unfit
from .notation import normalise, squeeze
from .numerals import decimal_comma
from .structure import Items, as_interval, items, named, sides
from .units import split_unit
from .value import TooLarge, Unreadable, divide, same_value
from .words import VARIABLE, chooses, chosen, chosen_with_text, is_formula, is_prose, words

_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf)[a-z]*\s*\{[^{}]*\}")
_POINTS = 3
_LETTERS = re.compile(r"[A-Za-z]{2,3}")
_COMMA = re.compile(r"\s*,\s*")
_LONGEST = 2000
_INTERVALS = ("()", "[]", "(]", "[)", "\\cup")


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
    # 1,234 may be one number or two: whoever writes the same commas means the same.
    return bool(given) and (_COMMA.sub(",", gold) == _COMMA.sub(",", answer) or _same(normalise(gold), given))


@functools.lru_cache(maxsize=4096)
def _readable_gold(gold: str) -> bool:
    """Whether it can be told when an answer equals this one; a sentence can only be compared by `exact`."""
    if len(gold) > _LONGEST:
        return False
    right = normalise(gold)
    if _TEXT_COMMAND.search(gold) or not right:
        return bool(right)
    return not is_prose(split_unit(right)[0]) and _readable(right)


def _readable(right: str) -> bool:
    if parts := items(right):
        return all(_readable(part) or "\\infty" in part or part == "\\ldots" for part in parts.parts)
    if words(split_unit(right)[0]) or chosen(right):
        return True
    if right.count(":") > 1:
        return all(map(_has_value, right.split(":")))
    return all(map(_has_value, sides(right))) or (not unfit(right) and bool(library_parse(right)))


def _score(text: str, gold: str | None, truncated: bool, choices: Any = None) -> float | None:
    if not gold:
        return None
    answer = final_answer(text, truncated=truncated)
    if answer is None and not truncated:
        answer = bare_answer(text)
        if answer is not None and is_prose(split_unit(named(normalise(answer))[1])[0]):
            answer = None
    verdicts = [equal(right, answer or "") for right in golds(gold, choices)]
    known = [verdict for verdict in verdicts if verdict is not None]
    return float(any(known)) if known else None


def _same(right: str, given: str, depth: int = 0) -> bool:
    if _squeezed(right) == _squeezed(given):
        return True
    if letter := chosen(right):
        return chooses(given, letter)
    if depth > 4:
        return False
    if choice := chosen_with_text(right):
        return chooses(given, choice[0]) or (not chosen_with_text(given) and _same(choice[1], given, depth + 1))
    if choice := chosen_with_text(given):
        return _same(right, choice[1], depth + 1)
    many, others = items(right), items(given)
    if (range_ := as_interval(right)) is not None:
        named_others = as_interval(given) or (range_[0], others)
        if named_others[0] == range_[0] and named_others[1] is not None and named_others[1].brackets in _INTERVALS:
            return _same_items(range_[1], named_others[1], depth)
    if many and others and (many.alone == others.alone or many.brackets == others.brackets):
        return _same_items(many, others, depth)
    if "=" in right or "=" in given or "\\in" in right + given:
        verdict = _same_equations(right, given, depth)
        if verdict is not None:
            return verdict
    if many and not (others and others.alone):
        return _same_as_list(many, right, given, depth, list_is_gold=True)
    if others:
        return _same_as_list(others, given, right, depth, list_is_gold=False)
    return _same_values(right, given)


def _same_as_list(many: Items, text: str, other: str, depth: int, *, list_is_gold: bool) -> bool:
    """Whether a list is the same as what is none: {5} is 5, 3,5 is 3.5, and an inequality may be an interval."""

    def same(part: str) -> bool:
        return _same(part, other, depth + 1) if list_is_gold else _same(other, part, depth + 1)

    if many.alone:
        return many.parts[0] != r"\emptyset" and same(many.parts[0])
    if number := decimal_comma(split_unit(text)[0]):
        return _same_values(number, split_unit(other)[0])
    if _has_value(other):  # one answer is no list of answers
        return False
    return same_by_library(text, other) if list_is_gold else same_by_library(other, text)


def _squeezed(text: str) -> str:
    return squeeze(text).casefold() if words(text) else squeeze(text)


def _same_equations(right: str, given: str, depth: int) -> bool | None:
    """Named values by their value, equations by whether their differences of sides are proportional; else None."""
    (right_name, right_value), (given_name, given_value) = named(right), named(given)
    if (right_name and given_name and right_name == given_name) or (
        bool(right_name) != bool(given_name) and ("=" not in (given if right_name else right))
    ):
        return _same(right_value, given_value, depth + 1)
    left, other = sides(right), sides(given)
    if len(left) == 1 and len(other) > 1:
        return any(_same(right, part, depth + 1) for part in _chain(other, depth))
    if len(other) == 1 and len(left) > 1:
        return any(_same(part, given, depth + 1) for part in _chain(left, depth))
    if len(left) != 2 or len(other) != 2:
        return None
    try:
        ratios = []
        for point in range(_POINTS):
            first, second = (evaluate(f"({pair[0]}) - ({pair[1]})", point=point) for pair in (left, other))
            ratios.append(divide(first, second))
    except (Unreadable, ZeroDivisionError):
        return None
    return ratios[0] != 0 and all(same_value(ratio, ratios[0]) for ratio in ratios)


def _same_items(right: Items, given: Items, depth: int) -> bool:
    right, given = _distinct(right, depth), _distinct(given, depth)
    if len(right.parts) != len(given.parts):
        return False
    if right.brackets != given.brackets:
        if "\\cup" in (right.brackets, given.brackets):
            return False
        if "" not in (right.brackets, given.brackets) or {"(]", "[)"} & {right.brackets, given.brackets}:
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


def _is_product(text: str, other: str) -> bool:
    """Whether two or three letters are a product, `xy`, because the other answer is a formula."""
    return bool(_LETTERS.fullmatch(text)) and is_formula(other)


def _distinct(many: Items, depth: int) -> Items:
    """A set without what it names twice."""
    if many.brackets != "{}":
        return many
    parts: list[str] = []
    for part in many.parts:
        if not any(_same(part, other, depth + 1) for other in parts):
            parts.append(part)
    return Items(brackets=many.brackets, parts=tuple(parts))


def _same_values(right: str, given: str) -> bool:
    (right, right_unit), (given, given_unit) = split_unit(right), split_unit(given)
    if given_unit != right_unit and _other_unit(right_unit, given_unit):
        return False
    if (words(right) and not _is_product(right, given)) or (words(given) and not _is_product(given, right)):
        return _squeezed(right) == _squeezed(given)
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
        points = range(_POINTS if VARIABLE.search(right + given) else 1)
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


def _chain(parts: list[str], depth: int) -> list[str]:
    """What is one value in `a = b = c`, but for a name at the beginning: all of 2 + 3 = 5, and nothing of x + 1 = 5."""
    values = parts[1:] if named(f"{parts[0]} = 0")[0] else parts
    same = all(_same(part, values[-1], depth + 1) or rounds_to(part, values[-1]) for part in values[:-1])
    return values if same else []
