"""Groups of rollouts to look at, out of a file that may be far larger than memory."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .run import json_lines

WINDOW_BYTES = 2_000_000
"""Read at each place; a group of sixteen long completions is about a tenth of it."""
PLACES = (0.0, 0.5, 1.0)
"""Where in the file to look: the beginning, the middle and the end of the run."""
GROUPS_PER_PLACE = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """One group as rollouts.jsonl has it."""

    step: int
    prompt: str
    answer: str
    """The right one as the data has it; empty where it has none."""
    rollouts: list[dict[str, Any]]


def read_samples(path: Path, notes: list[str]) -> list[Sample]:
    """The most telling groups of the beginning, middle and end of a rollouts.jsonl, in the order of the file."""
    if not path.is_file():
        return []
    size = path.stat().st_size
    starts = [round(place * max(size - WINDOW_BYTES, 0)) for place in PLACES] if size > WINDOW_BYTES else [0]
    samples: list[Sample] = []
    for start in starts:
        groups = _groups(_window(path, start, size, notes), whole=len(starts) == 1)
        samples += _telling(groups, GROUPS_PER_PLACE * len(PLACES) // len(starts))
    return samples


def _window(path: Path, start: int, size: int, notes: list[str]) -> list[dict[str, Any]]:
    """The records that lie whole in a window of the file; a cut line is news only at the file's end."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(WINDOW_BYTES)
    if start > 0:
        data = data.partition(b"\n")[2]
    if start + WINDOW_BYTES < size:
        data = data[: data.rfind(b"\n") + 1]
    return json_lines(path, data, notes)


def _groups(records: list[dict[str, Any]], *, whole: bool) -> list[list[dict[str, Any]]]:
    """Neighbours with the same step and prompt; of a window the first and last may be parts of a group."""
    groups = [list(rows) for _, rows in groupby(records, key=lambda r: (r["step"], r.get("prompt_id")))]
    return groups if whole or len(groups) < 3 else groups[1:-1]


def _telling(groups: list[list[dict[str, Any]]], count: int) -> list[Sample]:
    """The groups whose rollouts met the most different fates, of different steps where there are several."""
    order = sorted(range(len(groups)), key=lambda i: -len({(r.get("reward"), r.get("drop_reason")) for r in groups[i]}))
    steps = list(dict.fromkeys(group[0]["step"] for group in groups))
    spread = [steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)] if steps else []
    chosen: list[int] = []
    for step in spread:
        chosen += [i for i in order if groups[i][0]["step"] == step and i not in chosen][:1]
    return [_sample(groups[i]) for i in sorted(chosen)]


def _sample(group: list[dict[str, Any]]) -> Sample:
    first = group[0]
    return Sample(first["step"], _text(first.get("prompt")), str(first.get("answer") or ""), group)


def _text(prompt: Any) -> str:
    """A prompt as text: as it is, or the messages of a chat one after another."""
    if isinstance(prompt, list):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
    return str(prompt)
