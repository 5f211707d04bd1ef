"""Numbers as the world writes them: digits of other scripts, separators of other countries, words for millions."""

import re
import unicodedata

_GROUPED = [
    re.compile(rf"(?<![\d.,'_]){pattern}")
    for pattern in (
        r"[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)",
        r"[1-9]\d?(?:,\d{2})+,\d{3}(?!\d|,\d)",
        r"[1-9]\d{0,2}(?:'\d{3})+(?!\d|'\d)",
        r"[1-9]\d{0,2}(?:_\d{3})+(?!\d|_\d)",
    )
]
_SPACED = re.compile(r"([-+]?[1-9]\d{0,2}(?: \d{3})+)(?:[.,](\d+))?(?=\s*[A-Za-z%]|$)")
_CONTINENTAL = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3})+),(\d+)(?!\d|[.,]\d)")
_DOTTED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3}){2,}(?!\d|[.,]\d)")
_HUNDREDTHS = re.compile(r"(?<![\d.,])(\d+),(0\d+)(?![\d.,])")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+\s*%?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\s*\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_DOTS_AT_ENDS = re.compile(r"\\dot\s*\{?(\d)\}?(\d*)\s*\\dot\s*\{?(\d)\}?")
_GOING_ON = re.compile(r"(\d*)\.(\d{0,8}?)(?:(\d)\3{2,}|(\d{2,12}?)\4+)\s*\\ldots(?![a-z])")
_IN_BRACKETS = re.compile(r"(\s*[-+]?)(\d*)\.(\d*)\((\d+)\)\s*")
_ILLIONS = re.compile(r"(?<=\d)\s*(thousand|million|billion|trillion)s?(?![A-Za-z])")
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LONGEST_PERIOD = 100


def ascii_digits(text: str) -> str:
    """Digits of any script as 0-9, and the separators of Arabic numbers as comma and point."""
    if text.isascii():
        return text
    text = text.replace("\u066c", ",").replace("\u066b", ".")
    return "".join(str(digit) if (digit := unicodedata.decimal(char, None)) is not None else char for char in text)


def plain_numbers(text: str) -> str:
    """Numbers without separators: 1,234.5, 12,34,567, 1.234,5, 1'234, 1_234 and, at the beginning, 1 234.

    Between brackets a comma parts items, unless those are parted by comma and space. `3,5` stays as it is: it may be
    two numbers, which 3,05 is not. 1.5 million becomes a product, a repeating decimal a fraction.
    """
    text = _repeating(text)
    text = _ILLIONS.sub(lambda found: rf"\cdot 10^{{{_ZEROS[found[1]]}}}", text)
    if spaced := _SPACED.match(text):
        text = spaced[1].replace(" ", "") + (f".{spaced[2]}" if spaced[2] else "") + text[spaced.end() :]
    if ", " not in text and (any(bracket in text for bracket in "([") or r"\{" in text):
        return text
    text = _CONTINENTAL.sub(lambda found: f"{found[1].replace('.', '')}.{found[2]}", text)
    text = _DOTTED.sub(lambda found: found[0].replace(".", ""), text)
    for pattern in _GROUPED:
        text = pattern.sub(lambda found: re.sub("[,'_]", "", found[0]), text)
    return _HUNDREDTHS.sub(r"\1.\2", text)


def decimal_comma(text: str) -> str | None:
    """`3,5` read as one number, 3.5; None where the text is anything else."""
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) else None


def _repeating(text: str) -> str:
    r"""Repeating decimals as fractions: `0.1\overline{6}`, `0.\dot{1}\dot{2}`, 0.1666..., and 0.1(6) alone."""
    if "\\ldots" in text:
        text = _GOING_ON.sub(r"\1.\2\\overline{\3\4}", text)
    elif found := _IN_BRACKETS.fullmatch(text):
        text = rf"{found[1]}{found[2]}.{found[3]}\overline{{{found[4]}}}"
    if "." not in text or "\\" not in text:
        return text
    return _REPEATING.sub(_as_fraction, _DOTS_AT_ENDS.sub(r"\\overline{\1\2\3}", text))


def _as_fraction(found: "re.Match[str]") -> str:
    whole, fixed, period = found.groups()
    if len(fixed + period) > _LONGEST_PERIOD:
        return found[0]
    zeros = 10 ** len(fixed)
    nines = 10 ** len(period) - 1
    return f"({int(whole + fixed or 0) * nines + int(period)}/{nines * zeros})"
