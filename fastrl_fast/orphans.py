"""No process outlives the one that started it."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal to get when the parent ends."""


def end_with_parent() -> None:
    """Have the kernel end this process when its parent (on Linux: the thread that started it) ends, be it by kill -9;
    elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
