"""Scoring that must not raise: a library that fails on one odd answer costs that answer its reward, and is counted."""

from collections.abc import Callable

_count = 0


def guarded(score: Callable[..., float | None], *arguments: object) -> float | None:
    """`score(*arguments)`, or 0.0 with the fault counted where it raises; MemoryError passes, it ends the worker."""
    global _count
    try:
        return score(*arguments)
    except MemoryError:
        raise
    except Exception:
        _count += 1
        return 0.0


def take_count() -> int:
    """How many faults there were in this process since the last time this was asked."""
    global _count
    count, _count = _count, 0
    return count
