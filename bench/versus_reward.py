"""The reward of bench.versus_trl, in a file of its own: our graders load it by path."""

import zlib
from typing import Any


def parity(completions: list[str], **columns: Any) -> list[float]:
    """0 or 1 by every letter of the text: a reward in TRL's signature that costs nothing and favours no length."""
    return [float(zlib.crc32(text.encode()) & 1) for text in completions]
