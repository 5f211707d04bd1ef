"""A reward that differs within nearly every group, whatever the model says."""

from typing import Any


def length(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion) % 3) for completion in completions]
