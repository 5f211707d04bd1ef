"""The `reasoning_gym` reward: the package's own scorer of the data set that an entry came from."""

import functools
import json
from collections.abc import Callable
from typing import Any

from .answers import final_answer, text_of
from .faults import guarded


def load_gym() -> None:
    """Import the package; ValueError with the cure where it is missing."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"reward 'reasoning_gym' misses its package ({error}): pip install 'fastrl_fast[reasoning-gym]'"
        ) from error


def reasoning_gym_reward(
    prompts: list[Any], completions: list[Any], *, rg_dataset: list[str], rg_entry: list[str], **columns: Any
) -> list[float | None]:
    """What reasoning_gym gives for each completion, in [0, 1].

    `rg_dataset` is the name of the data set, `rg_entry` the json of the entry. The answer is the last box or <answer>
    block, else the whole completion. A scorer that raises gives 0.0; an unknown data set raises ValueError.
    """
    load_gym()
    return [
        guarded(_score, _scorer(name), text_of(completion), entry)
        for completion, name, entry in zip(completions, rg_dataset, rg_entry, strict=True)
    ]


@functools.lru_cache(maxsize=256)
def _scorer(name: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    try:
        scorer: Callable[..., float] = get_score_answer_fn(name)
    except ValueError as error:
        raise ValueError(f"reward 'reasoning_gym': column rg_dataset: {error}") from error
    return scorer


def _score(scorer: Callable[..., float], text: str, entry: str) -> float:
    answer = final_answer(text)
    return float(scorer(answer=text.strip() if answer is None else answer, entry=json.loads(entry)))
