"""The folder of a run: a fresh one, or the same run to go on with; never somebody else's files."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"

FREE_TO_CHANGE = ("run_dir", "overwrite", "max_steps", "epochs", "log", "checkpoint", "eval", "reward.workers")
"""Settings that may differ when a run is resumed: they do not touch what was trained so far."""


def open_run_folder(settings: dict[str, Any], recipe: str, *, total_steps: int) -> Path:
    """Return the folder to write to, created, with the settings in it.

    Without `run_dir` it is runs/RECIPE-HASH, with -2, -3 ... behind finished runs. An unfinished run of the same
    settings is gone on with. Raises ValueError where the folder holds another run, a finished run or other files.
    """
    folder = Path(settings["run_dir"]) if settings["run_dir"] else _default_folder(settings, recipe)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run_dir: {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / CONFIG_FILE).is_file():
            raise ValueError(f"run_dir: {folder} holds files that are not of a run; choose another")
        if settings["overwrite"]:
            shutil.rmtree(folder)
        else:
            _check_same_run(folder, settings)
            if (done := finished_steps(folder)) >= total_steps:
                raise ValueError(f"run_dir: {folder} holds a finished run of {done} steps; raise --max_steps to go on")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    return folder


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Mark the run as finished after `summary["steps"]` steps."""
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")


def finished_steps(folder: Path) -> int:
    """Steps of a finished run, 0 where the run is unfinished or new."""
    path = folder / SUMMARY_FILE
    return int(json.loads(path.read_text())["steps"]) if path.is_file() else 0


def load_settings(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run. Raises ValueError where the folder is not a run's."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"run_dir: {folder} is not the folder of a run (no {CONFIG_FILE})")
    return yaml.safe_load(path.read_text())


def _default_folder(settings: dict[str, Any], recipe: str) -> Path:
    identity = json.dumps(_flatten(settings), sort_keys=True, default=str).encode()
    name = f"{recipe}-{hashlib.sha256(identity).hexdigest()[:8]}"
    number = 1
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if settings["overwrite"] or finished_steps(folder) == 0:
            return folder
        number += 1


def _check_same_run(folder: Path, settings: dict[str, Any]) -> None:
    there, here = _flatten(load_settings(folder)), _flatten(settings)
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            raise ValueError(
                f"run_dir: {folder} holds a run with {key} = {there.get(key)!r}, not {here.get(key)!r}; "
                "choose another run_dir or --overwrite true"
            )


def _flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names to values of the settings that identify a run."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if key in FREE_TO_CHANGE:
            continue
        flat |= _flatten(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat
