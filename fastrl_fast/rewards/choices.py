"""Multiple choice: the letter of the right answer and what it stands for are the same answer."""

import json
import re
from typing import Any

_LETTER = re.compile(r"\(?\s*([A-Ja-j])\s*\)?[.:]?")


def golds(gold: str, choices: Any) -> list[str]:
    """`gold` and, where the row's `choices` (a list of texts, or such a list as json) tell it, its other name: what a
    letter stands for, or the letter of the one choice with this text. A choice may begin with its own letter.
    """
    texts = _texts(choices)
    if letter := _LETTER.fullmatch(gold.strip()):
        place = ord(letter[1].upper()) - ord("A")
        # A choice that is itself a letter would make another choice's letter right.
        known = place < len(texts) and not _LETTER.fullmatch(texts[place]) and gold.strip() not in texts
        return [gold, texts[place]] if known else [gold]
    places = [place for place, text in enumerate(texts) if text == gold.strip()]
    return [gold, chr(ord("A") + places[0])] if len(places) == 1 else [gold]


def _texts(choices: Any) -> list[str]:
    if isinstance(choices, str):
        try:
            choices = json.loads(choices)
        except ValueError:
            return []
    if not isinstance(choices, (list, tuple)):
        return []
    texts = [str(choice).strip() for choice in choices]
    marks = [re.match(rf"\(?{chr(ord('A') + place)}[).:]\s*", text) for place, text in enumerate(texts)]
    if all(marks):
        texts = [text[mark.end() :] for text, mark in zip(texts, marks, strict=True) if mark]
    return texts[:10]
