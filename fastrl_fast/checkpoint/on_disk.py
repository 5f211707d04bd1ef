"""Checkpoints on disk: which are complete, which is the best, and what they hold."""

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from . import shards

STATE_FILE = "state.json"
PREFIX = "step_"
FORMAT = 2
"""Of the files in a checkpoint; 1 was torch.distributed.checkpoint's, whose index is a pickle."""


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if (path / STATE_FILE).is_file()]
    return sorted((path for path in found if path.name.removeprefix(PREFIX).isdecimal()), key=step_of)


def choose(folder: Path, *, best: bool = False) -> Path:
    """The newest complete checkpoint in a folder, or the one that was most accurate on held-out prompts. Raises
    ValueError where there is none."""
    checkpoints = complete(folder)
    if not checkpoints:
        raise ValueError(f"run_dir: no complete checkpoint in {folder}")
    chosen = best_of(checkpoints) if best else checkpoints[-1]
    if chosen is None:
        raise ValueError(f"run_dir: no checkpoint in {folder} was measured on held-out prompts")
    return chosen


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Whole weights of a checkpoint by Hugging Face name, without a process group; in the order of its files, not the
    model's. Raises ValueError where it cannot be read."""
    record = read_record(checkpoint)
    check_format(checkpoint, record)
    try:
        for number in range(record["ranks"]):
            check_file(checkpoint, record, number)
        weights = shards.whole_weights(checkpoint, record["ranks"])
    except (OSError, KeyError, TypeError, SafetensorError, ValueError) as error:
        raise ValueError(f"run_dir: {checkpoint} cannot be read: {error}") from error
    return {name.removeprefix("lm."): weight for name, weight in weights.items()}


def check_file(folder: Path, record: dict[str, Any], rank: int) -> None:
    name = shards.file_name(rank)
    size, crc = record["files"][name]
    if (found := (folder / name).stat().st_size) != size:
        raise ValueError(f"{name} has {found} bytes instead of {size}")
    if shards.checksum(folder / name) != crc:
        raise ValueError(f"{name} is damaged: its checksum is another one")


def read_record(folder: Path) -> dict[str, Any]:
    """What state.json says; without a readable one nothing, in the present format, so that it is found damaged."""
    try:
        record = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    return record if isinstance(record, dict) else {"format": FORMAT}


def check_format(folder: Path, record: dict[str, Any]) -> None:
    if (found := record.get("format", 1)) != FORMAT:
        raise ValueError(
            f"run_dir: {folder} has checkpoint format {found}, this version of fastrl_fast reads format {FORMAT}: go "
            "on with the version that wrote it, or start anew with another run_dir"
        )


def best_of(folders: list[Path]) -> Path | None:
    """The checkpoint with the highest held-out accuracy, the later one of equals; None where none was measured."""
    measured = []
    for number, folder in enumerate(folders):
        accuracy = (read_record(folder).get("state") or {}).get("accuracy") or {}
        value = next(iter(accuracy.values()), math.nan)
        if not math.isnan(value):
            measured.append((value, number))
    return folders[max(measured)[1]] if measured else None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))
