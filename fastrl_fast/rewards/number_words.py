"""Numbers in words at the beginning of an answer, in English or Chinese: `twenty-one`, `two thirds`, `四十二`."""

import re

_SMALL = re.findall(
    "[a-z]+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall("[a-z]+", "twenty thirty forty fifty sixty seventy eighty ninety")
_VALUES = (
    {"a": 1, "an": 1} | {word: i for i, word in enumerate(_SMALL)} | {word: 10 * i for i, word in enumerate(_TENS, 2)}
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4} | {
    f"{stem}th": i for i, stem in enumerate(("four", "fif", "six", "seven", "eigh", "nin", "ten"), 4)
}
_ANY_SMALL = "|".join(sorted(_SMALL, reverse=True))  # seventeen before seven
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[\s-]+(?:{'|'.join(_SMALL[1:10])}))?|{_ANY_SMALL})"
_BELOW_1000 = rf"(?:(?:{_BELOW_100}\s+|an?\s+)?hundred(?:\s+(?:and\s+)?{_BELOW_100})?|{_BELOW_100})"
_ENGLISH = re.compile(
    rf"\s*(minus\s+|negative\s+)?({_BELOW_1000}(?:\s+(?:{'|'.join(_SCALES)})(?:,?\s+(?:and\s+)?{_BELOW_1000})?)*)"
    rf"((?:\s+(?!and|or|of|to|more|less|than|times)[a-z]+){{0,2}})\s*",
    re.IGNORECASE,
)
_PART = re.compile(
    rf"\s*(minus\s+|negative\s+)?(?:({_BELOW_1000})\s+and\s+)?"
    rf"(?:(?:(an?|{_BELOW_100})[\s-]+)?(hal(?:f|ve))|(an?|{_BELOW_100})[\s-]+({'|'.join(_PARTS)}))s?\s*",
    re.IGNORECASE,
)
_CHINESE = re.compile("(负?)([零〇一二两三四五六七八九十百千万亿]{1,20})([个元人米只条本岁天次种倍]?)")
_CHINESE_DIGITS = {char: i for i, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_CHINESE_SCALES = {"十": 10, "百": 100, "千": 1000}


def digits_for_words(text: str) -> str:
    """The text with its number in digits where it is nothing but a number in words and perhaps what it counts."""
    if found := _PART.fullmatch(text):
        sign, whole, halves, half, count, part = found.groups()
        fraction = f"{_english(halves or count or 'a')}/{_PARTS[(half or part).lower()]}"
        return f"{'-' if sign else ''}{str(_english(whole)) + ' ' if whole else ''}{fraction}"
    if found := _ENGLISH.fullmatch(text):
        return f"{'-' if found[1] else ''}{_english(found[2])}{found[3]}"
    if not text.isascii() and (found := _CHINESE.fullmatch(text)):
        return f"{'-' if found[1] else ''}{_chinese(found[2])}{found[3]}"
    return text


def _english(text: str) -> int:
    total = group = 0
    for word in re.findall("[a-z]+", text.lower()):
        if word in _SCALES:
            total, group = total + group * _SCALES[word], 0
        elif word == "hundred":
            group = max(group, 1) * 100
        else:
            group += _VALUES.get(word, 0)
    return total + group


def _chinese(text: str) -> int:
    if not set(text) & set("十百千万亿"):
        return int("".join(str(_CHINESE_DIGITS[char]) for char in text))
    for char, scale in (("亿", 10**8), ("万", 10**4)):
        above, found, below = text.rpartition(char)
        if found:
            return (_chinese(above) if above else 1) * scale + (_chinese(below) if below else 0)
    total, digit = 0, None
    for char in text:
        if char in _CHINESE_DIGITS:
            digit = _CHINESE_DIGITS[char]
        else:
            total += (1 if digit is None else digit) * _CHINESE_SCALES[char]
            digit = None
    return total + (digit or 0)
