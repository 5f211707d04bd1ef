"""Times of the day and dates: 7:00 am is 7 a.m., 17:00 is 5 PM, and 2020-03-03 is no difference."""

import re

_TIME = re.compile(r"(\d{1,2})(?:\s*:\s*([0-5]\d))?(?:\s*:\s*([0-5]\d))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)

_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}")


def is_time(text: str) -> bool:
    """Whether it can be nothing else: a date, or it says am or pm, or ends in :00, which is no ratio."""
    if _DATE.fullmatch(text):
        return True
    found = _TIME.fullmatch(text.strip())
    return found is not None and bool(found[4] or (found[2] == "00" and not found[3]))


def same_time(right: str, given: str) -> bool:
    """Whether both are the same time; which half of the day may be left out, but not be the other one."""
    if _DATE.fullmatch(right) and _DATE.fullmatch(given):
        return list(map(int, right.split("-"))) == list(map(int, given.split("-")))
    found = _TIME.fullmatch(right.strip()), _TIME.fullmatch(given.strip())
    if not (found[0] and found[1]):
        return False
    (hour, *rest, half), (other_hour, *other_rest, other_half) = found[0].groups(), found[1].groups()
    if [int(part or 0) for part in rest] != [int(part or 0) for part in other_rest]:
        return False
    if bool(half) == bool(other_half) or not (0 < int(hour) <= 12 and 0 < int(other_hour) <= 12):
        return _of_day(int(hour), half) == _of_day(int(other_hour), other_half)
    return int(hour) == int(other_hour)


def _of_day(hour: int, half: str | None) -> int:
    return hour % 12 + 12 * (half.lower() == "p") if half else hour
