"""Checks of settings, whose messages name the field, the rule and the value."""

import math


def require(ok: bool, field_name: str, rule: str, value: object) -> None:
    """Raise ValueError naming the field, the rule and the value where a rule does not hold."""
    if not ok:
        raise ValueError(f"{field_name} must be {rule}, got {value!r}")


def positive(section: str, **values: float) -> None:
    """Require finite values greater than 0, named SECTION.NAME in the message."""
    for name, value in values.items():
        require(math.isfinite(value), f"{section}.{name}", "finite", value)
        require(value > 0, f"{section}.{name}", "greater than 0", value)


def not_negative(section: str, **values: float) -> None:
    """Require finite values of 0 or greater, named SECTION.NAME in the message."""
    for name, value in values.items():
        require(math.isfinite(value), f"{section}.{name}", "finite", value)
        require(value >= 0, f"{section}.{name}", "0 or greater", value)
