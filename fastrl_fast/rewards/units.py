"""Units of measure: parted from their number, and one name for all spellings of each."""

import re

from .words import VARIABLE

_SPELLINGS = {
    "m": "meter metre 米",
    "cm": "centimeter centimetre 厘米",
    "mm": "millimeter millimetre 毫米",
    "km": "kilometer kilometre 千米 公里",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "g": "gm gram gramme 克",
    "kg": "kilogram kilo kilogramme 千克 公斤",
    "mg": "milligram",
    "lb": "pound",
    "oz": "ounce",
    "s": "sec second 秒",
    "min": "minute 分钟",
    "h": "hr hour 小时",
    "l": "liter litre 升",
    "ml": "milliliter millilitre 毫升",
    "yr": "year 年",
    "d": "day 天",
    "mph": "mi/h",
    "km/h": "kph kmh",
    "n": "newton",
    "j": "joule",
    "w": "watt",
    "v": "volt",
    "a": "amp ampere",
    "hz": "hertz",
    "°c": "c celsius",
    "°f": "f fahrenheit",
    "person": "people",
    "cc": "cm^3",
    "rad": "radian",
}
_CANONICAL = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_SQUARE = re.compile(r"(?:square|sq\.?)\s+(.+)|(.+)\s+squared|平方(.+)")
_CUBIC = re.compile(r"(?:cubic|cu\.?)\s+(.+)|(.+)\s+cubed|立方(.+)")
_PER = re.compile(r"\s*(?:/|\bper\b)\s*")
_POWER = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?$")
_WORD = r"(?:[A-Za-z]+|[^\x00-\x7f]+)"
_WITH_UNIT = re.compile(
    rf"(.*(?:[\d)}}%]|\\pi))(\s*)((?:(?:sq|cu)\.\s*)?{_WORD}(?:\s+{_WORD}|\s*\\cdot\s+{_WORD})*"
    rf"(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?(?:\s*/\s*[A-Za-z]+(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?)?)$",
    re.DOTALL,
)
_SHORT_UNITS = re.compile(
    "[mgshlLCFJNWVA]|gm|rad|[cmkd]m|k?g|mg|lb|oz|ft|in|yd|mi|m[lL]|hr|min|sec|sq|km/?h|mph|kph|k?Hz|cc|lbs|hrs"
)
_LETTERS = re.compile(r"[A-Za-z](\s+[A-Za-z])*(?:\s*\^\s*\{?\s*[23]\s*\}?)?")
_LONGEST = 200
_DIGITS = r"([-+]?)\(?\s*(?:\\overline\s*\{)?([0-9A-F]+)\}?\s*\)?"
_IN_BASE = re.compile(rf"{_DIGITS}\s*(?:_\s*\{{?\s*(\w+)\s*\}}?|\(?\s*(?:in\s+)?base\s+(\w+)\s*\)?)")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
_MODULO = re.compile(r"(.*?)\s*\\mod\{(\w+)\}", re.DOTALL)


def split_unit(text: str) -> tuple[str, str]:
    """Part `35 cm`, `20 square feet` or `52_8` into number and unit or base; empty where there is none."""
    if (based := _IN_BASE.fullmatch(text)) and _is_base(based[2], base := _base(based)):
        return based[1] + based[2], f"base {base}"
    if "\\mod" in text and (residue := _MODULO.fullmatch(text)):
        return residue[1], f"mod {residue[2]}"
    found = _WITH_UNIT.match(text) if len(text) <= _LONGEST else None
    if not found:
        return text, ""
    body, space, unit = found.groups()
    # A single letter right behind a number may as well be a variable; a word after a space cannot.
    for word in re.findall(_WORD, unit):
        if word.isascii() and not _SHORT_UNITS.fullmatch(word) and not (len(word) >= 3 and space):
            return text, ""
    return (text, "") if _is_factor(body, unit) else (body, _canonical(unit))


def _base(found: "re.Match[str]") -> str:
    base = found[3] or found[4]
    return _BASES.get(base, base)


def _is_base(digits: str, base: str) -> bool:
    """Whether `52_8` is a number in base 8; `A_1` is a name."""
    return (
        base.isdecimal()
        and len(base) < 3
        and 2 <= int(base) <= 36
        and all(int(digit, 16) < int(base) for digit in digits)
    )


def _is_factor(body: str, unit: str) -> bool:
    """Whether single letters are variables: behind others, as in `\\pi r^2 h`, or side by side, as in `2 m g`."""
    letters = _LETTERS.fullmatch(unit) if "=" not in body and unit != "N m" else None
    return letters is not None and bool(letters[1] or VARIABLE.search(body))


def _canonical(unit: str) -> str:
    """One name for `square centimeters`, `sq. cm` and `cm^2`, or for `kilometers per hour` and `km/h`."""
    top, *rest = _PER.split(" ".join(unit.lower().split()), maxsplit=1)
    name = _one(top)
    if rest:
        name = f"{name}/{_one(rest[0])}"
    return _CANONICAL.get(name, name)


def _one(unit: str) -> str:
    for pattern, power in ((_SQUARE, "^2"), (_CUBIC, "^3")):
        if found := pattern.fullmatch(unit):
            return _one(next(filter(None, found.groups()))) + power
    if found := _POWER.search(unit):
        return f"{_one(unit[: found.start()])}^{found[1]}"
    singular = unit[:-1] if len(unit) > 2 and unit.endswith("s") else unit
    return _CANONICAL.get(unit, _CANONICAL.get(singular, singular))
