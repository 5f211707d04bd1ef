r"""Where a completion states its answer: <answer> blocks, \boxed and \fbox, `####`, "the answer is", or all of it."""

import math
import re
from typing import Any

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BETWEEN = re.compile(r"[\s$]*(?:,?\s*(?:and|or)|[,;和或])[\s$]*\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_THOUGHT_END = re.compile(r"</think(?:ing)?>")
_TAGGED = re.compile(r".*<answer>(.*)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_UNBRACED = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))([-+]?\d[\d.,]*\d|[-+]?\d|[A-Z](?![A-Za-z]))")
_PHRASE = re.compile(
    r"(?:\banswer\b[*_ \t]*(?:is|are|:|=)|答案|答え|答(?=[:：])|정답|답(?=[:：은])|\bответ\b"
    r"|\b(?:respuesta|réponse|antwort|resposta|risposta)\b[*_ \t]*(?:(?:es|est|ist|é|è)\b|[:：=]))"
    r"[*_ \t]*(?:is|为|是|は|은|는)?[:：=*_ \t]*([^\n]+)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[。！]|[.!](?=\s|$)|(?:,|(?<!\s))\s+(?:because|since|as)\s")
_TEXT = re.compile(r"\\text[a-z]*\s*\{([^{}]*)\}")
_STATES = re.compile(
    r"\s*(?:(?:so|thus|therefore),?\s+)?(?:the\s+)?(?:\w+\s+)?(?:answer|option|choice)\s*(?:is|:|=)\s*:?\s*",
    re.IGNORECASE,
)
_LONGEST_BARE = 200


def text_of(completion: Any) -> str:
    """The text of a completion, be it a string or, as in TRL, a list of chat messages (the last one counts)."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        content = completion[-1].get("content") or ""
        if isinstance(content, str):
            return content
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return "" if completion is None or completion == [] else str(completion)


def gold_text(gold: Any) -> str | None:
    r"""The right answer as text: numbers are written out, None and NaN are None, of GSM8K's only what follows `####`,
    of R1-V's what stands in <answer>, of MATH's what stands in the last \boxed."""
    if gold is None:
        return None
    if hasattr(gold, "item") and not isinstance(gold, (int, float, str)):
        gold = gold.item()
    if isinstance(gold, float) and math.isnan(gold):  # a missing cell
        return None
    text = str(gold).strip()
    if tagged := _TAGGED.fullmatch(text):
        text = tagged[1].strip()
    box = last_box(text)
    if box is not None:
        return box
    found = _HASHES.findall(text)
    return found[-1].strip() if found else text


def find_boxes(text: str) -> list[str]:
    r"""The contents of the outermost \boxed{...} and \fbox{...}, in order; unclosed ones are left out. Linear time."""
    return [text[start + 1 : end] for start, end in _outermost(text)]


def _outermost(text: str) -> list[tuple[int, int]]:
    """The places of the braces of the outermost boxes."""
    starts = {found.end() for found in _BOX.finditer(text)}
    if not starts:
        return []
    boxes: list[tuple[int, int]] = []
    open_braces: list[int] = []
    for brace in _BRACE.finditer(text, min(starts)):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif brace[0] == "}" and open_braces:
            start = open_braces.pop()
            if start in starts:
                while boxes and boxes[-1][0] > start:  # it was inside this one
                    boxes.pop()
                boxes.append((start, brace.start()))
    return boxes


def last_box(text: str) -> str | None:
    """The content of the last box, taken out of boxes inside it too; None where no box was closed."""
    boxes = find_boxes(text)
    while boxes and (inner := find_boxes(boxes[-1])):
        boxes = inner
    return boxes[-1].strip() if boxes else None


def joined_boxes(text: str) -> str:
    r"""`\boxed{1}` and `\boxed{2}` as one list, where but a word of joining is between; empty for a single box."""
    text = _THOUGHT_END.split(text)[-1]
    boxes = [] if "</answer>" in text else _outermost(text)
    first = len(boxes) - 1
    while first > 0 and _BETWEEN.fullmatch(text, boxes[first - 1][1] + 1, boxes[first][0]):
        first -= 1
    return ", ".join(text[start + 1 : end] for start, end in boxes[first:]) if 0 <= first < len(boxes) - 1 else ""


def final_answer(text: str, *, truncated: bool = False) -> str | None:
    """The answer that a completion marks as its own, or None; what follows a closed block of thoughts goes first.

    In order: the last <answer> block (the box in it, if any), the last box, the line after the last `####`, what
    follows the last "answer is". Of a `truncated` completion only the first two count: half an answer may be right.
    """
    tail = _THOUGHT_END.split(text)[-1]
    for region in (tail, text) if tail is not text and len(tail) < len(text) else (text,):
        answer = _marked(region, truncated)
        if answer is not None:
            return answer
    return None


def bare_answer(text: str) -> str | None:
    r"""The whole text after any thoughts where it is one short line without a box; None otherwise."""
    text = _THOUGHT_END.split(text)[-1].strip()
    return text if text and len(text) <= _LONGEST_BARE and "\n" not in text and not _BOX.search(text) else None


def _marked(text: str, truncated: bool) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        content = text[start + len("<answer>") : end].strip()
        inside = last_box(content)
        return _stated(content if inside is None else inside)
    box = last_box(text)
    if box is not None or truncated:
        return box if box is None else _stated(box)
    found = _UNBRACED.findall(text) or _HASHES.findall(text)
    if found:
        return str(found[-1]).strip()
    found = _PHRASE.findall(text)
    if not found:
        return None
    line = str(found[-1])
    while later := _PHRASE.search(line):
        line = later[1]
    return None if "\\boxed" in line else _SENTENCE_END.split(line.strip(), maxsplit=1)[0].strip(" *_")


def _stated(text: str) -> str:
    r"""What a block or box says that the answer is: 5 of `\text{The answer is } 5`."""
    plain = _TEXT.sub(r"\1", text)
    found = _STATES.match(plain)
    return plain[found.end() :] if found else text
