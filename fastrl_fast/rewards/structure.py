r"""An answer's outer shape: tuples, intervals, sets, lists, unions, equations, and the two values of a \pm."""

import re
from dataclasses import dataclass

_MOST_ITEMS = 40
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_NAME = r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\([a-z]\))?"
_POINTS = r"\d?[A-Z](?:\s*[A-Z])*|\d"
_OF_FIGURE = rf"(?:m\s*)?\\(?:angle|widehat|overline|overarc|arc|triangle)\s*(?:{_POINTS}|\{{\s*(?:{_POINTS})\s*\}})"
_LENGTH = r"[A-Z]\s*[A-Z]"
_NAMED = re.compile(rf"\s*({_NAME}|{_OF_FIGURE}|{_LENGTH})\s*(?:=|\\in(?![a-z]))\s*(.+)", re.DOTALL)
_EQUALS = re.compile(r"(?<![<>!\\])=")


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


def items(text: str) -> Items | None:
    r"""Take `(1, 2]`, `\{1, 2\}`, `1, 2`, `a \pm b`, `A \cup B` or a matrix apart; None for a single thing."""
    text = text.strip()
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2]) if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return Items(brackets=f"matrix {shape}", parts=tuple(cell.strip() for row in rows for cell in row))
    if text.count("\\pm") == 1:
        return Items(brackets="", parts=(text.replace("\\pm", "+"), text.replace("\\pm", "-")))
    union = _split(text, "\\cup")
    if len(union) > 1:
        return Items(brackets="\\cup", parts=tuple(union))
    brackets, inside = _opened(text)
    parts = _split(inside, ",")
    if len(parts) > _MOST_ITEMS or (len(parts) == 1 and brackets != "{}"):
        return None
    return Items(brackets=brackets, parts=tuple(parts)) if all(parts) else None


def named(text: str) -> tuple[str, str]:
    r"""Part `x = 5`, `f(x) = 2x`, `AB = 5` or `m\angle A = 5` into name and value; the name is empty where it is
    no such thing."""
    found = _NAMED.fullmatch(text)
    if not found or _EQUALS.search(found[2]):
        return "", text
    return found[1].replace("{", "").replace("}", ""), found[2]


def sides(text: str) -> list[str]:
    """The parts of `a = b = c`."""
    return [part.strip() for part in _EQUALS.split(text)]


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
