r"""The value of an answer: a small reader of arithmetic in LaTeX that is exact where it can be and bounded everywhere.

Fractions stay fractions; roots, \pi, e and functions become numbers of 60 digits. Letters get fixed odd values, so two
formulas that agree at several such points are the same formula (as polynomials are that agree at random points).
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from .value import (
    TooLarge,
    Undefined,
    Unreadable,
    Value,
    add,
    binomial,
    divide,
    double_factorial,
    factorial,
    literal,
    mp,
    multiply,
    number,
    power,
    root,
    rounded,
    without_noise,
)

_LONGEST = 2000
_DEEPEST = 60

_TOKEN = re.compile(r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+(?![\d.]))?|\\[a-zA-Z]+|\S)")
_MIXED = re.compile(r"\s*(\d+)\s+(\d+)\s*/\s*(\d+)(?!\s*[\d.])")
_LATEX_MIXED = re.compile(r"\s*(\d+)\s*\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    name: getattr(mp, name) for name in ("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "exp", "ln")
} | {"arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "log": mp.log10, "lg": mp.log10, "cis": mp.expj}
_INVERSE = {name: getattr(mp, f"a{name}") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
_GREEK = re.compile("alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|rho|sigma|omega|tau|epsilon")
_ROUNDED = {"lfloor": r"\rfloor", "lceil": r"\rceil"}
_LETTER = re.compile(rf"[A-Za-z]|\\(?:{_GREEK.pattern})")


def evaluate(text: str, *, point: int = 0) -> Value:
    """The value of a normalised answer, its letters taken at one of the fixed points 0, 1, 2 ...; raises Unreadable."""
    if not text.strip() or len(text) > _LONGEST:
        raise Unreadable("empty or too long")
    try:
        return _Reader(text, point).read()
    except ZeroDivisionError as error:
        raise Undefined(str(error)) from error
    except (ArithmeticError, TypeError) as error:
        raise Unreadable(str(error)) from error


class _Reader:
    """Recursive descent over the tokens; every method reads one rule and gives its value."""

    def __init__(self, text: str, point: int) -> None:
        self._text, self._at, self._point, self._depth = text, 0, point, 0

    def read(self) -> Value:
        value = self._sum()
        if self._peek():
            raise Unreadable(f"unexpected {self._peek()!r}")
        return value

    def _peek(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        return found[1] if found else ""

    def _take(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        if not found:
            raise Unreadable("ends too early")
        self._at = found.end()
        return found[1]

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise Unreadable(f"{token!r} is missing")

    def _sum(self) -> Value:
        value = self._product()
        while (sign := self._peek()) in ("+", "-"):
            self._take()
            other = self._product()
            value = add(value, other if sign == "+" else multiply(Fraction(-1), other))
        return value

    def _product(self) -> Value:
        value = self._signed()
        while token := self._peek():
            if token in ("*", r"\cdot"):
                self._take()
                value = multiply(value, self._signed())
            elif token in ("/", ":", r"\div"):
                self._take()
                value = divide(value, self._signed())
            elif token in ("+", "-", ")", "]", "}", "|", ",", "=", r"\rfloor", r"\rceil"):
                break
            elif (token[0].isdigit() or token[0] == ".") and self._text[self._at - 1] != "!":
                break  # a number after a factor is no product: "4 10" is two answers, but 5!5! is one
            else:
                value = multiply(value, self._power())
        return value

    def _signed(self) -> Value:
        sign = 1
        while self._peek() in ("+", "-"):
            sign = sign if self._take() == "+" else -sign
        value = self._power()
        return value if sign > 0 else multiply(Fraction(-1), value)

    def _power(self) -> Value:
        value = self._atom()
        while (token := self._peek()) in ("!", "%", "^"):
            self._take()
            if token == "!" and self._peek() == "!":
                self._take()
                value = double_factorial(value)
            elif token == "!":
                value = factorial(value)
            elif token == "%":
                value = divide(value, Fraction(100))
            elif self._peek() == r"\circ":
                self._take()
                value = multiply(value, mp.pi / 180)
            else:
                value = power(value, self._exponent())
        return value

    def _exponent(self) -> Value:
        return self._deeper(self._signed if self._peek() in ("-", "+") else self._power)

    def _atom(self) -> Value:
        return self._deeper(self._primary)

    def _deeper(self, read: Callable[[], Value]) -> Value:
        """What `read` reads; whatever nests, nests through here."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Unreadable("too deep")
        value = read()
        self._depth -= 1
        return value

    def _primary(self) -> Value:
        mixed = _MIXED.match(self._text, self._at) or _LATEX_MIXED.match(self._text, self._at)
        if mixed:
            value = self._mixed(mixed)
            if value is not None:
                return value
        token = self._take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return literal(token)
        if token in ("(", "{", "["):
            value = self._sum()
            self._expect({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token == "|":
            value = self._sum()
            self._expect("|")
            return abs(value)
        if token.isascii() and token.isalpha():
            return self._letter(token)
        if token.startswith("\\") and len(token) > 1:
            return self._command(token[1:])
        raise Unreadable(f"unexpected {token!r}")

    def _mixed(self, found: "re.Match[str]") -> Value | None:
        whole, top, bottom = (int(text) for text in found.groups() if text is not None)
        if 0 < top < bottom:
            self._at = found.end()
            return whole + Fraction(top, bottom)
        if found.re is _MIXED:
            raise Unreadable("two numbers side by side")
        return None  # 4\frac{10}{3} is a product

    def _letter(self, letter: str) -> Value:
        name = letter
        if self._peek() == "_":
            self._take()
            name += "_" + self._name()
        if name == "e":
            return +mp.e
        if name == "i":
            return mp.mpc(0, 1)
        return _at_point(name, self._point)

    def _name(self) -> str:
        if self._peek() != "{":
            return self._take()
        self._take()
        parts = []
        while self._peek() not in ("}", ""):
            parts.append(self._take())
        self._expect("}")
        return "".join(parts)

    def _command(self, name: str) -> Value:
        if name == "frac":
            top = self._argument(one_digit=True)
            return divide(top, self._argument(one_digit=True))
        if name == "sqrt":
            return self._root()
        if name == "pi":
            return +mp.pi
        if name == "binom":
            return binomial(self._argument(one_digit=True), self._argument(one_digit=True))
        if name in _FUNCTIONS:
            return self._function(name)
        if name in _ROUNDED:
            value = self._sum()
            self._expect(_ROUNDED[name])
            return rounded(value, up=name == "lceil")
        if _GREEK.fullmatch(name):
            return self._letter(name)
        raise Unreadable(f"unknown command {name!r}")

    def _argument(self, *, one_digit: bool = False) -> Value:
        if self._peek() in ("{", "("):
            return self._atom()
        token = self._peek()
        if one_digit and len(token) > 1 and token[0].isdigit():  # \frac12 is a half
            self._at = self._text.index(token, self._at) + 1
            return Fraction(int(token[0]))
        return self._atom()

    def _root(self) -> Value:
        degree = self._atom() if self._peek() == "[" else Fraction(2)
        return root(self._argument(), degree)

    def _function(self, name: str) -> Value:
        exponent = base = None
        if self._peek() == "_":
            self._take()
            base = self._argument()
        if self._peek() == "^":
            self._take()
            exponent = self._exponent() if self._peek() == "-" else self._argument(one_digit=True)
        argument = number(self._argument() if self._peek() in ("(", "{") else self._bare_argument())
        if abs(argument) > 10**6:
            raise TooLarge("argument of a function")
        if exponent == -1 and name in _INVERSE:
            value, exponent = _INVERSE[name](argument), None
        else:
            value = _FUNCTIONS[name](argument)
        if base is not None:
            value = mp.log(argument) / mp.log(number(base))
        if not mp.isfinite(value):
            raise Undefined(f"{name} of {argument}")
        if name != "exp":  # which is never zero, but may be tiny
            value = without_noise(value, min(1, abs(argument)))
        return value if exponent is None else power(value, exponent)

    def _bare_argument(self) -> Value:
        r"""The 2x of `\sin 2x \cos x`: a factor and the letters right behind it."""
        value = self._power()
        while (token := self._peek()) and (_LETTER.fullmatch(token) or token == r"\pi"):
            value = multiply(value, self._power())
        return value


def _at_point(name: str, point: int) -> Fraction:
    """A value for a letter: odd, of either sign, always the same for the same name and point."""
    seed = sum(ord(char) * 31**i for i, char in enumerate(name))
    value = Fraction(1009 + (seed * 7919 + point * 104729) % 4001, 1501 + 2 * ((seed * 131 + point * 17) % 700))
    return -value if point % 2 else value
