r"""One way of writing an answer: Unicode and LaTeX variants become plain characters and a few LaTeX commands."""

import re
import unicodedata

# What NFKC would get wrong: "x²" would become "x2" and "2½" would become "21/2".
_SUPERSCRIPTS = {ord(mark): f"^{{{digit}}}" for mark, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True)}
_VULGAR = {
    ord(mark): f" {text}"
    for mark, text in zip("½⅓⅔¼¾⅕⅛", ("1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "1/8"), strict=True)
}
_SYMBOLS = {
    ord(mark): text
    for mark, text in {
        **dict.fromkeys("−‐‑‒–—﹣－", "-"),
        "×": r"\cdot ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "∙": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "√": r"\sqrt ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "，": ",",
        "。": ".",
        "\u200b": "",
        "\ufeff": "",
        "\u00a0": " ",
    }.items()
}
_COMMANDS = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge "),
        (r"\\(?:times|ast|cdotp)(?![a-zA-Z])", r"\\cdot "),
        (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", "|"),
        (r"\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\s*(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"(?<!\\)\\[()\[\]]|\\?\$|[€£¥]", ""),
        (r"\\%", "%"),
        (r"(\d)\{,\}(?=\d{3})", r"\1,"),
        (r"\*\*(?=[^*]*$)|^\*\*", " "),
    )
]
_POINTS = re.compile(r"[\s.,;:]+$")
_DEGREES = re.compile(r"\s*(?:\^\s*\\circ\s*|degrees?)$")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"\d{1,3}(?: \d{3})+")
_LOOSE_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_JOINED = re.compile(r"\s+(?:and|or)\s+")
_WITH_UNIT = re.compile(
    r"(.*(?:[\d)}]|\\pi))(\s*)([A-Za-z][A-Za-z ]*|[^\x00-\x7f]+)(?:\^\{?([23])\}?)?(/[a-z]+)?$", re.DOTALL
)
_SHORT_UNITS = re.compile("[mgshlLCFJNWVA]|[cmkd]m|k?g|mg|lb|oz|ft|in|yd|mi|m[lL]|hr|min|sec|km/?h|mph|k?Hz|cc")
_LONGEST_WITH_UNIT = 200
_IN_BASE = re.compile(r"([0-9A-F]+)\s*_\s*\{?\s*(\d+)\s*\}?")


def plain_text(text: str) -> str:
    """Unicode variants of digits, signs and spaces as plain characters, with LaTeX commands for what has none."""
    text = text.translate(_SUPERSCRIPTS).translate(_VULGAR).translate(_SYMBOLS)
    return unicodedata.normalize("NFKC", text).translate(_SYMBOLS)


def normalise(text: str) -> str:
    """The answer in the one notation that the comparison reads; spaces stay where they may part a mixed number."""
    text = plain_text(text)
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = _POINTS.sub("", text.strip())
    if not _TRIGONOMETRY.search(text):
        text = _DEGREES.sub("", text).strip()
    text = _JOINED.sub(", ", text)
    if not any(bracket in text for bracket in "([") and r"\{" not in text:
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return text.replace(" ", "") if _SPACED_THOUSANDS.fullmatch(text) else text


def squeeze(text: str) -> str:
    """The text without the spaces that mean nothing: those between two digits part a mixed number, as in `1 1/4`."""
    return _LOOSE_SPACE.sub("", text)


def split_unit(text: str) -> tuple[str, str]:
    """Part `35 cm`, `20 square feet` or `52_8` into number and unit or base; empty where there is none."""
    based = _IN_BASE.fullmatch(text)
    if based:
        return based[1], f"base {based[2]}"
    found = _WITH_UNIT.match(text) if len(text) <= _LONGEST_WITH_UNIT else None
    if not found:
        return text, ""
    body, space, words, power, per = found.groups()
    # A single letter right behind a number may as well be a variable; a word after a space cannot.
    if all(_SHORT_UNITS.fullmatch(word) or not word.isascii() or (len(word) >= 3 and space) for word in words.split()):
        return body, f"{' '.join(words.split())}{power or ''}{per or ''}".lower()
    return text, ""
