r"""The `math` reward: is the answer of a completion the same mathematics as the right one?

Exact before approximate, own reading before the library: text, choices, tuples and sets, equations, values by
expression.py; only what is left (inequalities, matrices ...) goes to math-verify, gold first, behind size guards.
"""

import functools
import re
from typing import Any

from .answers import bare_answer, final_answer, gold_text, joined_boxes, text_of
from .choices import golds
from .clock import is_time
from .decimals import rounds_to
from .faults import guarded
from .library import library_parse, same_by_library, unfit
from .notation import normalise
from .numerals import decimal_comma
from .quantity import has_value, same_quantity, squeezed
from .relation import replaced, same_relation
from .scales import aligned
from .structure import Items, as_interval, items, named, sides
from .units import split_unit
from .words import chooses, chosen, chosen_with_text, is_prose, words

_TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf)[a-z]*\s*\{[^{}]*\}")
_COMMA = re.compile(r"\s*,\s*")
_OF_LETTER = re.compile(r"([A-Za-z])\(([a-z])\)")
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
    right, given = map(normalise, aligned(gold, answer))
    # 1,234 may be one number or two: whoever writes the same commas means the same.
    return bool(given) and (_COMMA.sub(",", gold) == _COMMA.sub(",", answer) or _same(right, given))


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
    if words(split_unit(right)[0]) or chosen(right) or chosen_with_text(right) or is_time(right):
        return True
    if (parted := named(right))[0]:
        return _readable(parted[1])
    if right.count(":") > 1:
        return all(map(has_value, right.split(":")))
    return all(map(has_value, sides(right))) or (not unfit(right) and bool(library_parse(right)))


def _score(text: str, gold: str | None, truncated: bool, choices: Any = None) -> float | None:
    if not gold:
        return None
    answer = final_answer(text, truncated=truncated)
    if answer is None and not truncated:
        answer = bare_answer(text)
        if answer is not None and is_prose(split_unit(named(normalise(answer))[1])[0]):
            answer = None
    rights = golds(gold, choices)
    known = [verdict for right in rights if (verdict := equal(right, answer or "")) is not None]
    if known and not any(known) and (several := joined_boxes(text)):
        known = [bool(equal(right, several)) for right in rights]
    return float(any(known)) if known else None


def _same(right: str, given: str, depth: int = 0) -> bool:
    if squeezed(right) == squeezed(given):
        return True
    if letter := chosen(right):
        return chooses(given, letter)
    if depth > 4:
        return False
    if choice := chosen_with_text(right):
        other = chosen_with_text(given)
        if other and other[0] == choice[0] and has_value(choice[1]) and has_value(other[1]):
            return _same(choice[1], other[1], depth + 1)  # the right letter with a wrong number is not right
        return chooses(given, choice[0]) or (not other and _same(choice[1], given, depth + 1))
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
    return same_quantity(right, given)


def _same_as_list(many: Items, text: str, other: str, depth: int, *, list_is_gold: bool) -> bool:
    """Whether a list is the same as what is none: {5} is 5, 3,5 is 3.5, and an inequality may be an interval."""

    def same(part: str) -> bool:
        return _same(part, other, depth + 1) if list_is_gold else _same(other, part, depth + 1)

    if many.alone:
        return many.parts[0] != r"\emptyset" and same(many.parts[0])
    if number := decimal_comma(split_unit(text)[0]):
        return same_quantity(number, split_unit(other)[0])
    if has_value(other):  # one answer is no list of answers
        return False
    return same_by_library(text, other) if list_is_gold else same_by_library(other, text)


def _same_equations(right: str, given: str, depth: int) -> bool | None:
    """Named values by their value, equations by whether their differences of sides are proportional; else None."""
    (right_name, right_value), (given_name, given_value) = named(right), named(given)
    if (right_name and given_name and right_name == given_name) or (
        bool(right_name) != bool(given_name) and ("=" not in (given if right_name else right))
    ):
        return _same(right_value, given_value, depth + 1)
    if renamed := _renamed(right_name, given_name, given_value):
        return _same(right_value, renamed, depth + 1)
    left, other = sides(right), sides(given)
    if 1 < len(left) != len(other) > 1 and left[0] == other[0]:
        return _same("=".join(left[1:]), "=".join(other[1:]), depth + 1)
    if len(left) == 1 and len(other) > 1:
        return any(_same(right, part, depth + 1) for part in _chain(other, depth))
    if len(other) == 1 and len(left) > 1:
        return any(_same(part, given, depth + 1) for part in _chain(left, depth))
    if len(left) != 2 or len(other) != 2:
        return None
    return same_relation(left, other)


def _renamed(right: str, given: str, value: str) -> str:
    """The value of f(t) in the letter of f(x), which may be the same function; empty where it is no such thing."""
    found = _OF_LETTER.fullmatch(right), _OF_LETTER.fullmatch(given)
    if not (found[0] and found[1]) or found[0][1] != found[1][1] or replaced(value, found[0][2], "") != value:
        return ""
    return replaced(value, found[1][2], found[0][2])


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


def _distinct(many: Items, depth: int) -> Items:
    """A set without what it names twice."""
    if many.brackets != "{}":
        return many
    parts: list[str] = []
    for part in many.parts:
        if not any(_same(part, other, depth + 1) for other in parts):
            parts.append(part)
    return Items(brackets=many.brackets, parts=tuple(parts))


def _chain(parts: list[str], depth: int) -> list[str]:
    """What is one value in `a = b = c`, but for a name at the beginning: all of 2 + 3 = 5, and nothing of x + 1 = 5."""
    values = parts[1:] if named(f"{parts[0]} = {parts[1]}")[0] else parts
    same = all(_same(part, values[-1], depth + 1) or rounds_to(part, values[-1]) for part in values[:-1])
    return values if same else []
