"""A run as its folder tells it, be it finished, going on, cut off, resumed or damaged."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .. import run_folder

Points = tuple[list[float], list[float]]
"""Steps, and the values at them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its settings, one record of metrics per step, its summary once it is finished, and what was amiss.

    `name` tells it from the other runs of a report.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    steps: list[dict[str, float]]
    summary: dict[str, Any]
    notes: list[str]

    @classmethod
    def read(cls, folder: Path, name: str) -> "Run":
        """Raises ValueError where `folder` is not the folder of a run."""
        try:
            settings = run_folder.load_settings(folder)
        except yaml.YAMLError as error:
            raise ValueError(f"run_dir: {folder / run_folder.CONFIG_FILE} is not valid YAML") from error
        notes: list[str] = []
        records = _records(folder / "metrics.jsonl", notes)
        return cls(name, folder, settings, _in_order(records, notes), _summary(folder, notes), notes)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def finished(self) -> bool:
        """A run that was raised in steps and goes on still has the summary of its first end."""
        return bool(self.summary) and self.summary["steps"] >= self.last_step

    @property
    def state(self) -> str:
        """How far the run is, in words."""
        if self.finished:
            return f"finished after {self.summary['steps']} steps"
        wanted = self.settings.get("max_steps")
        aim = f" of {wanted}" if wanted else ""
        return f"not finished: {self.last_step}{aim} steps so far" if self.steps else "no step is done yet"

    def points(self, metric: str, *, per: str | None = None) -> Points:
        """The steps that have a value of `metric`, and the values, divided by those of `per` where that is given;
        accuracy also before the first step."""
        found = [(step["step"], step[metric]) for step in self.steps if metric in step]
        if per is not None:
            found = [(s["step"], s[metric] / s[per]) for s in self.steps if metric in s and s.get(per)]
        before = self.summary.get("before", {}).get(metric.removeprefix("eval/"))
        if metric.startswith("eval/") and before is not None:
            found.insert(0, (0, before))
        return [step for step, _ in found], [value for _, value in found]

    def total(self, *metrics: str, until: int | None = None) -> float:
        """Sum of the metrics over the steps, up to step `until`."""
        steps = [step for step in self.steps if until is None or step["step"] <= until]
        return sum(step.get(metric, 0.0) for step in steps for metric in metrics)

    def names(self, section: str) -> list[str]:
        """Metrics of a section ("dropped/") that any step has, in the order of their first step."""
        return list(dict.fromkeys(name for step in self.steps for name in step if name.startswith(section)))


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs of a report, named by their folders; by their paths where folders have the same name."""
    paths = list(dict.fromkeys(folders))
    last = [path.resolve().name for path in paths]
    names = last if len(set(last)) == len(last) else [str(path) for path in paths]
    return [Run.read(path, name) for path, name in zip(paths, names, strict=True)]


def json_lines(path: Path, data: bytes, notes: list[str]) -> list[dict[str, Any]]:
    """The records of some lines of a .jsonl; what cannot be read is left out and noted."""
    lines = data.split(b"\n")
    if lines[-1]:
        notes.append(f"{path.name}: the last line is cut; it is left out")
    records = [record for line in lines[:-1] if (record := _record(line)) is not None]
    if bad := len(lines) - 1 - len(records):
        notes.append(f"{path.name}: {bad} lines cannot be read; they are left out")
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says of a step, None where it says nothing."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _records(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    return json_lines(path, path.read_bytes(), notes) if path.is_file() else []


def _in_order(records: list[dict[str, Any]], notes: list[str]) -> list[dict[str, float]]:
    """One record per step, the last written, and of it the numbers alone: a null was a NaN or an infinity."""
    by_step = {record["step"]: record for record in records}
    if len(by_step) < len(records):
        notes.append(f"metrics.jsonl: {len(records) - len(by_step)} steps are there twice; the later ones count")
    ordered = [by_step[step] for step in sorted(by_step)]
    numbers = [{k: v for k, v in record.items() if _finite(v)} for record in ordered]
    if lost := sum(len(record) for record in ordered) - sum(len(record) for record in numbers):
        notes.append(f"metrics.jsonl: {lost} values were not finite; they are left out")
    return numbers


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _summary(folder: Path, notes: list[str]) -> dict[str, Any]:
    path = folder / run_folder.SUMMARY_FILE
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_bytes())
        if isinstance(summary, dict) and isinstance(summary.get("steps"), int):
            return summary
    except ValueError:
        pass
    notes.append(f"{path.name} cannot be read; it is left out")
    return {}
