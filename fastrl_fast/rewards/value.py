"""Numbers that are exact where they can be: a Fraction, else an mpmath number of 60 digits; bounded in size."""

import math
from fractions import Fraction
from typing import Any

import mpmath

Value = Any
"""A Fraction where the value is exact, else an mpmath number."""

mp = mpmath.MPContext()
mp.dps = 60

_CLOSE, _NOISE = mp.mpf(10) ** -45, mp.mpf(10) ** -50
_MOST_BITS = 50_000
_LARGEST_LITERAL_EXPONENT = 10_000
_LARGEST_FACTORIAL = 3000
_LARGEST_LOGARITHM = 10**9
"""Of a power's result: beyond it even the exponent of a floating-point number would fill the memory."""


class Unreadable(ValueError):
    """The text is not arithmetic that we know."""


class TooLarge(Unreadable):
    """The text is arithmetic, but its value cannot be worked out in reasonable time and memory."""


class Undefined(TooLarge):
    """The text is arithmetic, but has no value: it divides by zero."""


def same_value(left: Value, right: Value) -> bool:
    """Exactly equal as fractions, else equal to 45 digits relative to the larger."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = number(left), number(right)
    size = max(abs(left), abs(right))
    if not mp.isfinite(size):
        return False
    return bool(abs(left - right) <= size * _CLOSE)


def close_value(left: Value, right: Value, tolerance: float) -> bool:
    """Equal up to a relative tolerance, for a decimal that was cut after many digits."""
    left, right = number(left), number(right)
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))


def number(value: Value) -> Any:
    """The value as an mpmath number."""
    if isinstance(value, Fraction):
        return mp.mpf(value.numerator) / value.denominator
    return value


def literal(token: str) -> Fraction:
    """A number as written, such as 007, .5, 2. or 3e5; Unreadable where its exponent is out of all proportion."""
    digits, _, exponent = token.lower().partition("e")
    if exponent and (len(exponent) > 6 or abs(int(exponent)) > _LARGEST_LITERAL_EXPONENT):
        raise TooLarge("exponent")
    return Fraction(digits.rstrip(".")) * Fraction(10) ** int(exponent or 0)


def add(left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _checked(left + right)
    left, right = number(left), number(right)
    return without_noise(left + right, max(abs(left), abs(right)))


def without_noise(value: Any, size: Any) -> Value:
    """0 where the value is only the rounding of what it was worked out from, of that size: sqrt(8) - 2 sqrt(2)."""
    return Fraction(0) if abs(value) < _NOISE * size else value


def multiply(left: Value, right: Value) -> Value:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _checked(left * right)
    return number(left) * number(right)


def divide(left: Value, right: Value) -> Value:
    """ZeroDivisionError where `right` is zero."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _checked(left / right)
    return number(left) / number(right)


def power(base: Value, exponent: Value) -> Value:
    """Exact for whole exponents while the result is small; Unreadable where it would be astronomical."""
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        if abs(base) == 1:
            return base ** (exponent.numerator % 2)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
        if bits <= _MOST_BITS:
            return base**exponent.numerator
    base, exponent = number(base), number(exponent)
    if base and abs(exponent) * (abs(mp.log(abs(base))) + 1) > _LARGEST_LOGARITHM:
        raise TooLarge("power")
    return mp.power(base, exponent)


def root(value: Value, degree: Value) -> Value:
    """The principal root; the real one of a negative number when the degree is odd. Exact for squares."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree <= 1000:
        raise Unreadable("no root of this degree")
    if degree == 2 and isinstance(value, Fraction) and value >= 0:
        exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        return exact if exact * exact == value else mp.sqrt(number(value))
    value = number(value)
    if degree % 2 and mp.im(value) == 0 and mp.re(value) < 0:
        return -mp.root(-value, int(degree))
    return mp.root(value, int(degree))


def factorial(value: Value) -> Fraction:
    return Fraction(math.factorial(_small_whole(value)))


def double_factorial(value: Value) -> Fraction:
    """n!! = n (n - 2) (n - 4) ..."""
    return Fraction(math.prod(range(_small_whole(value), 0, -2)))


def binomial(top: Value, bottom: Value) -> Fraction:
    return Fraction(math.comb(_small_whole(top), _small_whole(bottom)))


def rounded(value: Value, *, up: bool) -> Fraction:
    """The whole number below or above."""
    if not isinstance(value, Fraction):
        if mp.im(value) != 0 or not abs(value) < _LARGEST_LOGARITHM:
            raise Unreadable("no whole number near it")
        value = Fraction(int(mp.ceil(value) if up else mp.floor(value)))
    return Fraction(math.ceil(value) if up else math.floor(value))


def _checked(value: Fraction) -> Value:
    """Exact while it is small: a few letters in high powers would otherwise grow without end."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        return number(value)
    return value


def _small_whole(value: Value) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise Unreadable("no factorial of this")
    if value > _LARGEST_FACTORIAL:
        raise TooLarge("factorial")
    return value.numerator
