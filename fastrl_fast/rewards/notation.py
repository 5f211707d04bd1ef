r"""One way of writing an answer: Unicode and LaTeX variants become plain characters and a few LaTeX commands."""

import re
import unicodedata

from .numerals import ascii_digits, plain_numbers

# What NFKC would get wrong: "x²" would become "x2" and "2½" would become "21/2".
_SUPERSCRIPTS = {ord(mark): f"^{{{digit}}}" for mark, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True)}
_VULGAR = {
    ord(mark): f" {text}"
    for mark, text in zip("½⅓⅔¼¾⅕⅛", ("1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "1/8"), strict=True)
}
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
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "≈": "=",
        "ℝ": r"\mathbb{R}",
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
        "\u200b": "",
        "\ufeff": "",
        "\u00a0": " ",
        **dict.fromkeys("€£¥₹₽₩₪₫₴฿", ""),
        **{unicodedata.lookup(f"GREEK SMALL LETTER {name}"): rf"\{name.lower()} " for name in _GREEK.split()},
    }.items()
}
_FUNCTIONS = "sqrt|pi|arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|ln|log|exp|alpha|beta|gamma|theta"
_NOT_A_COMMAND = "(?![a-zA-Z])"
_COMMANDS = [
    (re.compile(pattern), text)
    for pattern, text in (
        (rf"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|textstyle|limits){_NOT_A_COMMAND}", ""),
        (rf"\\[dtc]frac{_NOT_A_COMMAND}", r"\\frac"),
        (rf"\\[dt]binom{_NOT_A_COMMAND}", r"\\binom"),
        (rf"\{{([^{{}}]+)\\choose{_NOT_A_COMMAND}([^{{}}]+)\}}", r"\\binom{\1}{\2}"),
        (rf"\{{([^{{}}]+)\\over{_NOT_A_COMMAND}([^{{}}]+)\}}", r"\\frac{\1}{\2}"),
        (rf"\\(?:leq|leqslant){_NOT_A_COMMAND}", r"\\le "),
        (rf"\\(?:geq|geqslant){_NOT_A_COMMAND}", r"\\ge "),
        (rf"\\(?:times|ast|cdotp){_NOT_A_COMMAND}", r"\\cdot "),
        (rf"\\(?:approx|simeq){_NOT_A_COMMAND}", "="),
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
        (
            r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|underline|boldsymbol|bm)"
            r"\s*\{([^{}]*)\}",
            r" \1 ",
        ),
        (r"\s*(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|\\thinspace(?![a-zA-Z])|~", " "),
        (r"(?<!\\)\\[()\[\]]|\\?\$", ""),
        (r"\\%", "%"),
        (r"\\_", "_"),
        (r"(\d)\{,\}(?=\d{3})", r"\1,"),
        (r"(?<=[\w)}])\*\*(?=[\w(\-])", "^"),
        (r"\*\*(?=[^*]*$)|^\*\*", " "),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\cdot "),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS}){_NOT_A_COMMAND}", r"\\\1 "),
        (rf"(?<![\\A-Za-z])(?:infinity|inf|oo){_NOT_A_COMMAND}", r"\\infty "),
        (r"\s*per\s?cent(?![a-z])", "%"),
        (r"\\Omega(?![a-z])", " ohm"),
        (r"^\s*=", ""),
    )
]
_POINTS = re.compile(r"[\s.,;:]+$")
_TEMPERATURE = re.compile(r"(?:\^\s*\\circ|(?<![A-Za-z])degrees?)\s*([CF])(?:elsius|ahrenheit)?(?![a-zA-Z])")
_DEGREES = re.compile(r"\s*\^\s*\\circ\s*|(?<=[\d)}])\s*(?:degrees?|deg)(?![a-z])")
_MINUTES = re.compile(r"(\d+)\^\s*\\circ\s*(\d+)\s*'(?!')\s*(?:(\d+(?:\.\d+)?)\s*'')?")
_INCHES = re.compile(r"(?<=\d)\s*('{1,2})$")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|sec|csc|cot)(?![a-z])")
_OPEN_ENDED = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")
_LOOSE_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_JOINED = re.compile(r"\s+(?:and|or|et|ou|und|oder|и|или)\s+|\s*(?:或者?|和)\s*")


def plain_text(text: str) -> str:
    """Unicode variants of digits, signs and spaces as plain characters, with LaTeX commands for what has none."""
    text = text.translate(_SUPERSCRIPTS).translate(_VULGAR).translate(_SYMBOLS)
    return ascii_digits(unicodedata.normalize("NFKC", text).translate(_SYMBOLS))


def normalise(text: str) -> str:
    """The answer in the one notation that the comparison reads; spaces stay where they may part a mixed number."""
    text = plain_text(text)
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = _TEMPERATURE.sub(r" \1", _POINTS.sub("", text.strip()))
    if not _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(" ", _MINUTES.sub(_in_degrees, text)).strip()
    text = _INCHES.sub(lambda found: " in" if len(found[1]) == 2 else " ft", text)
    text = _OPEN_ENDED.sub(_french, _JOINED.sub(", ", text))
    return plain_numbers(text)


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
