r"""One way of writing an answer: Unicode and LaTeX variants become plain characters and a few LaTeX commands."""

import functools
import re
import unicodedata

from .number_words import digits_for_words
from .numerals import ascii_digits, plain_numbers

# What NFKC would get wrong: "x²" would become "x2" and "2½" would become "21/2".
_RAISED = re.compile("[⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = re.compile("[₊₋₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = {ord(mark): " " + unicodedata.normalize("NFKC", mark).replace("⁄", "/") for mark in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_GREEK = "ALPHA BETA GAMMA DELTA EPSILON THETA MU RHO SIGMA TAU PHI OMEGA PI"
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
        "∛": r"\sqrt[3]",
        "∜": r"\sqrt[4]",
        "∨": r"\lor ",
        "∧": r"\land ",
        "≡": r"\equiv ",
        "∞": r"\infty ",
        **dict.fromkeys("≤⩽≦", r"\le "),
        **dict.fromkeys("≥⩾≧", r"\ge "),
        "≠": r"\ne ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "≈": "=",
        **{letter: rf"\mathbb{{{name}}}" for letter, name in zip("ℝℤℚℕℂ", "RZQNC", strict=True)},
        "∠": r"\angle ",
        "△": r"\triangle ",
        "⟨": r"\langle ",
        "⟩": r"\rangle ",
        "′": "'",
        "’": "'",
        "″": "''",
        "…": r"\ldots ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "˚": r"^\circ ",
        "λ": r"\lambda ",
        "，": ",",
        "、": ",",
        "。": ".",
        **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", ""),
        "\u00a0": " ",
        **dict.fromkeys("€£¥₹₽₩₪₫₴฿", ""),
        "¢": " cents",
        **{unicodedata.lookup(f"GREEK SMALL LETTER {name}"): rf"\{name.lower()} " for name in _GREEK.split()},
    }.items()
}
_FUNCTIONS = "sqrt|pi|arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|cis|ln|log|exp|alpha|beta|gamma|theta"
_NOT_A_COMMAND = "(?![a-zA-Z])"
_TEXT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|underline|boldsymbol|bm)"
    r"\s*\{([^{}]*)\}"
)
_COMMANDS = [
    (re.compile(pattern), text, "\\" if re.match(r"\\\\[^?+]", pattern) else "")
    for pattern, text in (
        (rf"\\(?:left|right|middle|[bB]igg?[lrm]?|(?:display|text|script)style|limits|strut){_NOT_A_COMMAND}", ""),
        (rf"\\(?:small|large|Large|LARGE|huge|Huge|normalsize|mathstrut|hfill|bf|rm|it){_NOT_A_COMMAND}", " "),
        (r"\\(?:hspace\*?|phantom|vphantom|hphantom)\s*\{[^{}]*\}", " "),
        (rf"\\(?:vec|overrightarrow|hat|ensuremath){_NOT_A_COMMAND}", ""),
        (rf"\\(?:[dtc]frac|nicefrac|sfrac){_NOT_A_COMMAND}", r"\\frac"),
        (rf"\\[dt]binom{_NOT_A_COMMAND}", r"\\binom"),
        (rf"\{{([^{{}}]+)\\choose{_NOT_A_COMMAND}([^{{}}]+)\}}", r"\\binom{\1}{\2}"),
        (rf"\{{([^{{}}]+)\\over{_NOT_A_COMMAND}([^{{}}]+)\}}", r"\\frac{\1}{\2}"),
        (rf"\\(?:leq|leqslant){_NOT_A_COMMAND}", r"\\le "),
        (rf"\\(?:geq|geqslant){_NOT_A_COMMAND}", r"\\ge "),
        (rf"\\(?:times|ast|cdotp){_NOT_A_COMMAND}", r"\\cdot "),
        (rf"\\(?:approx|simeq|equiv){_NOT_A_COMMAND}", "="),
        (rf"\\colon{_NOT_A_COMMAND}", ":"),
        (rf"\\(?:vee|lor|wedge|land){_NOT_A_COMMAND}", ", "),
        (rf"\\cr{_NOT_A_COMMAND}", r"\\\\"),
        (rf"\\(?:pounds|euro|yen){_NOT_A_COMMAND}", ""),
        (rf"\\(arc)?tg{_NOT_A_COMMAND}", r"\\\1tan "),
        (rf"\\(arc)?ctg{_NOT_A_COMMAND}", r"\\\1cot "),
        (rf"\\(?:lvert|rvert|vert){_NOT_A_COMMAND}", "|"),
        (rf"\\langle{_NOT_A_COMMAND}", "("),
        (rf"\\rangle{_NOT_A_COMMAND}", ")"),
        (rf"\\lbrace{_NOT_A_COMMAND}", r"\\{"),
        (rf"\\rbrace{_NOT_A_COMMAND}", r"\\}"),
        (rf"\\lbrack{_NOT_A_COMMAND}", "["),
        (rf"\\rbrack{_NOT_A_COMMAND}", "]"),
        (rf"\\[lc]?dots{_NOT_A_COMMAND}", r"\\ldots "),
        (rf"\\varnothing{_NOT_A_COMMAND}|\\\{{\s*\\\}}", r"\\emptyset "),
        (r"\\mathbb\s*([A-Z])(?![A-Za-z])", r"\\mathbb{\1}"),
        (rf"\\degree{_NOT_A_COMMAND}", r"^\\circ "),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\(?:text)?color\s*\{[a-zA-Z]*\}", ""),
        *[(_TEXT, r" \1 ")] * 2,  # which nest
        (r"\s*(?<!\\)\\!\s*", ""),
        (r"\s*\\+\s*$", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|\\thinspace(?![a-zA-Z])|~", " "),
        (r"(?<![A-Za-z\\])(?:(?:US|HK|CA?|AU?|NZ)\s*\\?\$|USD|EUR|GBP|INR|Rs\.?)(?=\s*\d)", ""),
        (r"(?<!\\)\\[()\[\]]|\\?\$", ""),
        (r"\\%", "%"),
        (r"\\_", "_"),
        (r"(\d)\{,\}(?=\d{3})", r"\1,"),
        (r"(\d)\{,\}(?=\d)", r"\1."),
        (r"(\.\d+)\.{3,}", r"\1\\ldots "),
        (r"(?<=[\w)}])\*\*(?=[\w(\-])", "^"),
        (r"\*\*(?=[^*]*$)|^\*\*", " "),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\cdot "),
        (rf"(?<![\\A-Za-z])a(sin|cos|tan){_NOT_A_COMMAND}", r"\\arc\1 "),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS}){_NOT_A_COMMAND}", r"\\\1 "),
        (rf"(?<![\\A-Za-z])(?:infinity|inf|oo){_NOT_A_COMMAND}", r"\\infty "),
        (r"\s*per\s?cent(?![a-z])", "%"),
        (r"(?<=\d)(?:\s*\^\s*\{\s*(?:st|nd|rd|th)\s*\}|\^?(?:st|nd|rd|th)(?![A-Za-z]))", ""),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"(?<=[\d}])\s*\(\s*[A-Za-z]{3}[A-Za-z\s]*\)\s*$", ""),
        (r"(?<=[a-z])\.(?=\s*\^)", ""),
        (r"\+/-", r"\\pm "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"[\s(]*\\?\b[pb]?mod(?![a-z])\s*\{?\s*(\w+)\s*\}?\s*\)?\s*$", r" \\mod{\1}"),
        (r"^\s*(\d+)\s+to\s+(\d+)\s*$", r"\1:\2"),
        (r"(?i)^\s*(?:the set of\s+)?all real(?:s|\s+numbers?)[\s.]*$", r"\\mathbb{R}"),
        (r"(?i)^\s*no\s+solutions?[\s.]*$", r"\\emptyset"),
        (r"(?i)^\s*does not exist[\s.]*$", "DNE"),
        (r"\s*(?:\bor\s+)?\b(?:approximately|approx\.?|about|roughly)\s+(?=[-+\d\\])", " = "),
        (r"\(\s*=\s*([^()=]*)\)$", r"= \1"),
        (r"\\Omega(?![a-z])", " ohm"),
        (r"^\s*=", ""),
    )
]
_SPACES = re.compile(r"\s+")
_POINTS = re.compile(r"[\s.,;:]+$")
_QUOTED = re.compile(r"([\"`*“])(.*)[\"`*”]")
_TEMPERATURE = re.compile(r"(?:\^\s*\\circ|(?<![A-Za-z])degrees?)\s*([CF])(?:elsius|ahrenheit)?(?![a-zA-Z])")
_DEGREES = re.compile(r"\s*\^\s*\\circ\s*|(?<=[\d)}])\s*(?:\{\s*degrees?\s*\}|(?:degrees?|deg)(?![a-z]))")
_MINUTES = re.compile(r"(\d+)\^\s*\\circ\s*(\d+)\s*'(?!')\s*(?:(\d+(?:\.\d+)?)\s*'')?")
_INCHES = re.compile(r"(?<=\d)\s*('{1,2})$")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot|cis)(?![a-z])")
_OPEN_ENDED = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")
_LOOSE_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_JOINED = re.compile(r"\s*(?:,|\s)\s*(?:and|or|et|ou|und|oder|и|или)\s+|\s*(?:或者?|和)\s*")
_BOTH = re.compile(r"^\s*(?:both|either)\s+")


def plain_text(text: str) -> str:
    """Unicode variants of digits, signs and spaces as plain characters, with LaTeX commands for what has none."""
    if text.isascii():
        return text
    text = _LOWERED.sub(_as_index, _RAISED.sub(_as_power, text)).translate(_VULGAR).translate(_SYMBOLS)
    return ascii_digits(unicodedata.normalize("NFKC", text).translate(_SYMBOLS))


def _as_power(found: "re.Match[str]") -> str:
    return f"^{{{_plain(found)}}}"


def _as_index(found: "re.Match[str]") -> str:
    return f"_{{{_plain(found)}}}"


def _plain(found: "re.Match[str]") -> str:
    """Raised or lowered digits as digits: NFKC alone would make x2 of x²."""
    return unicodedata.normalize("NFKC", found[0]).translate(_SYMBOLS)


@functools.lru_cache(maxsize=4096)
def normalise(text: str) -> str:
    """The answer in the one notation that the comparison reads; spaces stay where they may part a mixed number."""
    text = _SPACES.sub(" ", plain_text(text))
    for pattern, replacement, needed in _COMMANDS:
        if needed in text:
            text = pattern.sub(replacement, text)
    text = _POINTS.sub("", text.strip())
    if quoted := _QUOTED.fullmatch(text):
        text = quoted[2]
    text = digits_for_words(_TEMPERATURE.sub(r" \1", text))
    if not _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(" ", _MINUTES.sub(_in_degrees, text)).strip()
    text = _INCHES.sub(lambda found: " in" if len(found[1]) == 2 else " ft", text)
    text = _OPEN_ENDED.sub(_french, _JOINED.sub(", ", _BOTH.sub("", text)))
    return plain_numbers(_semicolons(text) if ";" in text else text)


def _semicolons(text: str) -> str:
    """`1; 2` is a list, and in `1,5; 2,5` a comma is what others write as a point."""
    if "(" not in text and "[" not in text:
        text = re.sub(r"(?<=\d),(?=\d)", ".", text)
    return text.replace(";", ", ")


def _in_degrees(found: "re.Match[str]") -> str:
    degrees, minutes, seconds = found.groups()
    return f"({degrees}+{minutes}/60+{seconds or 0}/3600)"


def _french(found: "re.Match[str]") -> str:
    """`]0,1[` is the open interval (0,1)."""
    left, inside, right = found.groups()
    return f"{'(' if left == ']' else left}{inside}{')' if right == '[' else right}"


def squeeze(text: str) -> str:
    """The text without the spaces that mean nothing: those between two digits part a mixed number, as in `1 1/4`."""
    return _LOOSE_SPACE.sub("", text)
