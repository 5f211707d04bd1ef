"""Words in an answer, and the letters of a multiple choice."""

import re

VARIABLE = re.compile(
    r"(?<![\\A-Za-z])(?!e[-+]?\d)[A-Za-z]|\\(?!frac|sqrt|pi|pm|cdot|binom|sin|cos|tan|log|ln|exp|arc)[a-z]+"
)
"""A letter that is neither a command's nor that of an exponent, 3e5."""
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-zA-Z]+\}")
_WORD = re.compile(r"(?<!\\)(?<![^\W\d_])(?:[^\W\d_]{2,}|[^\W\d_\x00-\x7f])")
_PRODUCT = re.compile(
    r"(?:(?<=[\d{})+\-*/^=(])|(?<=[+\-*/=] ))[A-Za-z]{2,3}(?![A-Za-z])"
    r"|(?<![A-Za-z\\])[A-Za-z]{2,3}(?=\s?[+\-*/^=])"
)
_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(([A-J])\)(?:\s+|(?=[-\d\\]))|([A-J])(?:[.:)]\s+|\)(?=[-\d\\])))(.+)", re.DOTALL)
_CHOSEN = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?[(\[]?\s*([A-J])\s*[)\]]?(?:\s*[:.)].*|\s+\([^A-Za-z]*\))?",
    re.DOTALL | re.IGNORECASE,
)


_ARTICLE = re.compile(r"\s*(?:the|an?)\s+(?=[^\W\d_]{2})", re.IGNORECASE)
_PLURAL = re.compile(r"(?<=[a-z]{3})s(?![a-z])")


def words(text: str) -> list[str]:
    """Runs of letters in it; two or three beside a sign or a digit, as in `2ab + bc`, are a product of variables."""
    return _WORD.findall(_PRODUCT.sub(" ", _ENVIRONMENT.sub("", text)))


def plain_words(text: str) -> str:
    """Words without what does not matter: case, an article before them, the s of a plural."""
    return _PLURAL.sub("", _ARTICLE.sub("", text, count=1).casefold())


def is_prose(text: str) -> bool:
    """Two or more words: a sentence, from which no number may be picked."""
    return len(words(text)) > 1


def is_formula(text: str) -> bool:
    """Whether letters are multiplied, added or raised in it."""
    return bool(_PRODUCT.search(text)) or any(sign in text for sign in ("+", "*", "^", r"\cdot"))


def chosen(text: str) -> str:
    """The letter of a right answer that is a choice, such as `B` or `(B)`; empty where it is none."""
    found = _CHOICE.fullmatch(text)
    return found[1] if found else ""


def chosen_with_text(text: str) -> tuple[str, str] | None:
    """Letter and text of a right answer such as `(B) 12`."""
    found = _CHOICE_WITH_TEXT.fullmatch(text)
    return (found[1] or found[2], found[3]) if found else None


def chooses(text: str, letter: str) -> bool:
    """Whether an answer is this letter alone: `b`, `(B)`, `Option B`, `B: what it stands for`, but not `B, C`."""
    found = _CHOSEN.fullmatch(text)
    several = [part for part in text.split(",") if chosen(part.strip())]
    return found is not None and found[1].upper() == letter and len(several) < 2
