"""The folder of a run: a fresh one, or the same run to go on with; never somebody else's files."""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from . import plain_yaml

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
OWN = ("checkpoints", "tensorboard", "metrics.jsonl", "rollouts.jsonl", REPORT_FILE, SUMMARY_FILE, CONFIG_FILE)
"""What a run writes into its folder, and so all that --overwrite deletes there; the config goes last."""
PARTIAL = ".partial-"
"""Before the name of a file that is not complete yet."""

_held: dict[Path, int] = {}
"""Folders that this process has locked, with the descriptors that hold the locks."""

FREE_TO_CHANGE = (
    "run_dir",
    "overwrite",
    "max_steps",
    "epochs",
    "log",
    "checkpoint",
    "eval",
    "reward.workers",
    "rollout.vllm",
)
"""Settings that may differ when a run is resumed: they do not touch what was trained so far."""


def open_run_folder(settings: dict[str, Any], recipe: str, *, total_steps: int) -> Path:
    """Return the folder to write to, created, with the settings in it.

    Without `run_dir` it is runs/RECIPE-HASH, with -2, -3 ... behind finished runs. An unfinished run of the same
    settings is gone on with. Until this process ends no other one may open the folder. Raises ValueError where the
    folder holds another run, a finished run or other files, is being written to, or cannot be written to.
    """
    folder = Path(settings["run_dir"]) if settings["run_dir"] else _default_folder(settings, recipe)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run_dir: {folder} is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir: cannot make {folder}: {error}") from error
    _lock(folder)
    if any(not path.name.startswith(PARTIAL) for path in folder.iterdir()):
        if not _is_run(folder, settings):
            raise ValueError(f"run_dir: {folder} holds files that are not of a run; choose another")
        if settings["overwrite"]:
            _delete_run(folder)
        else:
            _check_same_run(folder, settings)
            if (done := finished_steps(folder)) >= total_steps:
                raise ValueError(f"run_dir: {folder} holds a finished run of {done} steps; raise --max_steps to go on")
    try:
        _write_whole(folder / CONFIG_FILE, plain_yaml.dump(settings))
    except OSError as error:
        raise ValueError(f"run_dir: cannot write to {folder}: {error}") from error
    return folder


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Mark the run as finished after `summary["steps"]` steps."""
    _write_whole(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def finished_steps(folder: Path) -> int:
    """Steps of a finished run, 0 where the run is unfinished or new."""
    path = folder / SUMMARY_FILE
    return int(json.loads(path.read_text())["steps"]) if path.is_file() else 0


def load_settings(folder: Path) -> dict[str, Any]:
    """The resolved settings of a run. Raises ValueError where the folder is not a run's."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"run_dir: {folder} is not the folder of a run (no {CONFIG_FILE})")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _lock(folder: Path) -> None:
    """Raise ValueError where another process holds the folder; the kernel lets go of it when this one ends."""
    if (place := folder.resolve()) in _held:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"run_dir: another process is writing to {folder}; end it or choose another") from None
    except OSError:  # some network file systems know no locks
        os.close(descriptor)
    else:
        _held[place] = descriptor


def _is_run(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder's config is one of ours; many other programs keep a config.yaml too."""
    try:
        there = load_settings(folder)
    except (ValueError, yaml.YAMLError):
        return False
    sections = {name for name, value in settings.items() if isinstance(value, dict)}
    return isinstance(there, dict) and len(sections & there.keys()) > len(sections) / 2


def _delete_run(folder: Path) -> None:
    for path in (folder / name for name in OWN):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_whole(path: Path, text: str) -> None:
    """Write beside and rename, so that a killed process leaves no half of a file."""
    beside = path.with_name(PARTIAL + path.name)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


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
