r"""An answer's outer shape: tuples, intervals, sets, lists, unions, equations, and the two values of a \pm."""

import re
from dataclasses import dataclass

from .expression import evaluate
from .value import Unreadable, number

_MOST_ITEMS = 40
_MATRIX = re.compile(r"\\begin\{([pbB]?(?:small)?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_LETTER_NAME = r"(?:\{?[A-Za-z]\}?|\\(?!pi(?![a-z]))[a-z]+)(?:_(?:\w+|\{[^{}]*\}))?'*(?:\(-?\w+\))?"
_OF = r"[PEVf-hFGH]\([^()]*\)|\\(?:sin|cos|tan|cot|sec|csc)\s*\(?(?:[A-Z]|\\(?:angle\s*[A-Z]+|[a-z]+))\s*\)?"
_POINTS = r"\d?[A-Z](?:\s*[A-Z])*|\d"
_OF_FIGURE = rf"(?:m\s*)?\\(?:angle|widehat|overline|overarc|arc|triangle)\s*(?:{_POINTS}|\{{\s*(?:{_POINTS})\s*\}})"
_LENGTH = r"[A-Z]\s*[A-Z]|\|\s*(?:z|\{?\s*[A-Z]\s*[A-Z]\s*\}?)\s*\|"
_POINT = r"\((?:[A-Za-z]|\\[a-z]+)(?:\s*,\s*(?:[A-Za-z]|\\[a-z]+))+\s*\)"
_IN_WORDS = r"[A-Za-z]{4,}(?:\s+[A-Za-z]+){0,4}"
_WORKED_OUT = r"\\(?:int|sum|prod|lim)(?![a-z]).*"
_NAME = rf"\s*(?:{_LETTER_NAME}|{_OF}|{_POINT}|{_OF_FIGURE}|{_LENGTH}|{_IN_WORDS}|{_WORKED_OUT})\s*"
_NAMED = re.compile(_NAME, re.DOTALL)
_MEMBER = re.compile(rf"({_NAME})\\in(?![a-z])\s*(.+)", re.DOTALL)
_LABEL = re.compile(r"\s*[A-Z]\s*(?=\()")
_CASES = re.compile(
    r"(?:\\\{)?\s*\\begin\{(cases|aligned|gathered|array)\}(?:\{[clr|]*\})?(.*=.*)\\end\{\1\}", re.DOTALL
)
_REL = r"\s*(<|>|\\le(?![a-z])|\\ge(?![a-z]))\s*"
_RAY = re.compile(rf"([a-z]){_REL}([^<>,=]+)")
_REVERSED_RAY = re.compile(rf"([^<>,=]+?){_REL}([a-z])")
_CHAIN = re.compile(rf"([^<>,=]+?){_REL}([a-z]){_REL}([^<>,=]+)")
_LESS = ("<", "\\le")
_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


@dataclass(slots=True, frozen=True, kw_only=True)
class Items:
    r"""The parts of a compound answer; `brackets` as written, "" for a bare list, "\cup" for a union.

    A matrix has its cells for parts and its shape for brackets: `matrix 2x2` has two rows of two.
    """

    brackets: str
    parts: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        return self.brackets not in ("", "{}", "\\cup")

    @property
    def alone(self) -> bool:
        """A set of one, which is as good as what is in it."""
        return len(self.parts) == 1 and self.brackets == "{}"


def items(text: str) -> Items | None:
    r"""Take `(1, 2]`, `\{1, 2\}`, `1, 2`, `a \pm b`, `A \cup B` or a matrix apart; None for a single thing."""
    text = text.strip()
    if system := _CASES.fullmatch(text):
        text = ",".join(line for line in system[2].replace("&=", "=").split("\\\\") if line.strip())
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2]) if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return Items(brackets=f"matrix {shape}", parts=tuple(cell.strip() for row in rows for cell in row))
    if text.count("\\pm") == 1 and not _several(text):
        return Items(brackets="", parts=_both(text))
    union = _split(text, "\\cup")
    if len(union) > 1:
        return Items(brackets="\\cup", parts=tuple(union))
    brackets, inside = _opened(text)
    if not brackets and (label := _LABEL.match(text)) and "," in text:
        brackets, inside = _opened(text[label.end() :])
    parts = _split(inside, ",")
    if len(parts) > 1 and "\\pm" in inside and brackets in ("", "{}"):
        parts = [one for part in parts for one in (_both(part) if part.count("\\pm") == 1 else (part,))]
    if brackets == "[]" and (matrix_of_lists := _rows(parts)):
        return matrix_of_lists
    if len(parts) > _MOST_ITEMS or (len(parts) == 1 and brackets != "{}"):
        return None
    return Items(brackets=brackets, parts=tuple(parts)) if all(parts) else None


def _several(text: str) -> bool:
    """Whether it is a list or a set, whose members have a \\pm of their own."""
    brackets, inside = _opened(text)
    return brackets in ("", "{}") and len(_split(inside, ",")) > 1


def _both(text: str) -> tuple[str, str]:
    return text.replace("\\pm", "+"), text.replace("\\pm", "-")


def as_interval(text: str) -> tuple[str, Items] | None:
    """An inequality in one letter as that letter and the interval, `1 < x \\le 2` or `x > 1, x < 2`, or the union of
    two, `x < 1, x > 2`; None for all else."""
    chain = _CHAIN.fullmatch(text)
    if chain:
        left, first, name, second, right = chain.groups()
        if (first in _LESS) != (second in _LESS):
            return None
        rays = [_ray(name, _MIRRORED[first], left), _ray(name, second, right)]
    else:
        rays = [ray for part in _split(text, ",") if (ray := _one_ray(part))]
        if len(rays) != text.count(",") + 1 or len(rays) > 2 or rays[0][0] != rays[-1][0]:
            return None
    name = rays[0][0]
    if len(rays) == 1:
        return name, _interval(rays[0][1], rays[0][2])
    below = next((ray for ray in rays if ray[1] is None), None)
    above = next((ray for ray in rays if ray[2] is None), None)
    if below is None or above is None or below[2] is None or above[1] is None:
        return None
    if chain or _is_less(above[1][1], below[2][1]):
        return name, _interval(above[1], below[2])
    parts = tuple(
        f"{i.brackets[0]}{','.join(i.parts)}{i.brackets[1]}"
        for i in (_interval(None, below[2]), _interval(above[1], None))
    )
    return name, Items(brackets="\\cup", parts=parts)


def named(text: str) -> tuple[str, str]:
    r"""Part `x = 5`, `f(x) = 2x`, `AB = 5` or `m\angle A = 5` into name and value; the name is empty where it is
    no such thing."""
    name, *values = sides(text)
    if len(values) == 1 and values[0] and _NAMED.fullmatch(name):
        # e is about 2.7, but may be an eccentricity
        return ("", text) if name == "e" and values[0].startswith("2.7") else (_bare(name), values[0])
    found = _MEMBER.fullmatch(text) if "\\in" in text and not values else None
    return (_bare(found[1]), found[2]) if found else ("", text)


def _bare(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)


def sides(text: str) -> list[str]:
    """The parts of `a = b = c`."""
    return _split(text, "=") if "=" in text else [text.strip()]


_Bound = tuple[str, str] | None
"""A bracket and a value; None for infinity."""


def _one_ray(text: str) -> tuple[str, _Bound, _Bound] | None:
    if found := _RAY.fullmatch(text):
        return _ray(*found.groups())
    if found := _REVERSED_RAY.fullmatch(text):
        value, relation, name = found.groups()
        return _ray(name, _MIRRORED[relation], value)
    return None


def _ray(name: str, relation: str, value: str) -> tuple[str, _Bound, _Bound]:
    """Name, lower and upper bound."""
    if relation in _LESS:
        return name, None, (")" if relation == "<" else "]", value.strip())
    return name, ("(" if relation == ">" else "[", value.strip()), None


def _interval(lower: _Bound, upper: _Bound) -> Items:
    left, low = lower or ("(", "-\\infty")
    right, high = upper or (")", "\\infty")
    return Items(brackets=left + right, parts=(low, high))


def _rows(parts: list[str]) -> Items | None:
    """`[[1,2],[3,4]]` is a matrix."""
    opened = [_opened(part) for part in parts]
    rows = [_split(inside, ",") for brackets, inside in opened if brackets == "[]"]
    if len(rows) < len(parts):
        return None
    shape = "x".join(str(len(row)) for row in rows)
    return Items(brackets=f"matrix {shape}", parts=tuple(cell for row in rows for cell in row))


def _is_less(left: str, right: str) -> bool:
    try:
        return bool(number(evaluate(left)) < number(evaluate(right)))
    except (Unreadable, TypeError):
        return False


def _opened(text: str) -> tuple[str, str]:
    """Outer brackets, where one pair holds the whole text, and what is inside them."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{}", text[2:-2]
    if len(text) < 2 or text[0] not in "([{" or text[-1] not in ")]}":
        return "", text
    depth = 0
    for i, char in enumerate(text):
        depth += _BRACKETS.get(char, 0)
        if depth == 0 and i < len(text) - 1:
            return "", text
    return text[0] + text[-1], text[1:-1]


def _split(text: str, separator: str) -> list[str]:
    """Split at the separators outside all brackets."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        depth += _BRACKETS.get(text[at], 0)
        if depth == 0 and text.startswith(separator, at):
            parts.append(text[start:at].strip())
            at = start = at + len(separator)
        else:
            at += 1
    return [*parts, text[start:].strip()]
