"""One quantity in two scales: an angle in degrees and in radians, money in cents and in dollars."""

import re

_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|[°º˚]|\\degree|(?:\\text\s*\{\s*)?\bdeg(?:rees?)?\b\s*\}?)")
_RADIANS = re.compile(r"\\pi(?![a-z])|π|\brad(?:ian)?s?\b")
_MIXED = re.compile(r"\\?(?:sin|cos|tan|sec|csc|cot|cis)|'|′")
_CENTS = re.compile(r"\s*(?:\\(?:text|mbox)\s*\{\s*cents?\s*\}|\bcents?\b|¢)")
_DOLLARS = re.compile(r"\\\$|\bdollars?\b|\bUSD\b|^\$[\d.,]+$")


_PAIRS = ((_DEGREES, _RADIANS, r"\\cdot\\pi/180", _MIXED), (_CENTS, _DOLLARS, "/100", re.compile(r"(?!)")))


def aligned(right: str, given: str) -> tuple[str, str]:
    """Both as they are; where one is in degrees or cents and the other in radians or dollars, both in the latter."""
    for small, large, factor, unless in _PAIRS:
        first, second = (right, given) if small.search(right) else (given, right)
        if not small.search(first) or small.search(second) or unless.search(right + given):
            continue
        if large.search(second) and not large.search(first):
            return small.sub(factor, right), small.sub(factor, given)
    return right, given
