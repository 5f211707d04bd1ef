"""The `format` reward: did the completion think once, then answer in one box?"""

from typing import Any

from .answers import find_boxes, text_of

_OPEN, _CLOSE = "<thinking>", "</thinking>"


def format_reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    r"""1.0 where the whole completion is `<thinking>...</thinking>`, then text with a single `\boxed{...}`, else 0.0.

    Exactly one block and one non-empty box after it, so that repeating either earns nothing.
    """
    return [1.0 if _well_formed(text_of(completion).strip()) else 0.0 for completion in completions]


def _well_formed(text: str) -> bool:
    if not text.startswith(_OPEN) or text.count(_OPEN) != 1 or text.count(_CLOSE) != 1:
        return False
    boxes = find_boxes(text.partition(_CLOSE)[2])
    return len(boxes) == 1 and bool(boxes[0].strip())
