"""Where the numbers of a run go: metrics.jsonl, rollouts.jsonl, the console and trackers; and the clock that times
phases."""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TextIO, TypeVar

import nvtx
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import Tracker

P = ParamSpec("P")
R = TypeVar("R")

PHASES = ("sample", "grade", "prune", "pack", "score", "update", "sync", "evaluate", "save")
"""Phases of a step in order; seconds are reported under these names, and profilers show ranges of the same names."""


class Clock:
    """Seconds spent in each phase since the last `take`; `on_phase` is told the name of each phase that starts."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.on_phase = on_phase

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        if self.on_phase:
            self.on_phase(phase)
        started = time.perf_counter()
        with nvtx.annotate(phase, domain="fastrl_fast"), torch.profiler.record_function(phase):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken


class HasClock(Protocol):
    clock: Clock


def phase(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for a method of an object with a `clock`: times it and shows it as a range in profilers."""
    assert name in PHASES, f"{name} is not one of {PHASES}"

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            owner: HasClock = args[0]  # type: ignore[assignment]
            with owner.clock.measure(name):
                return method(*args, **kwargs)

        return timed

    return decorate


class _Console(Console):
    """Falls silent where nobody reads any more, a closed terminal or pipe: a run goes on without being watched."""

    def print(self, *objects: Any, **settings: Any) -> None:
        try:
            super().print(*objects, **settings)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer


class RunLog:
    """Writes a run's metrics; made on rank 0 only."""

    def __init__(self, folder: Path, *, total_steps: int, trackers: list[Tracker], settings: dict[str, Any]) -> None:
        self.folder = folder
        self.console = _Console(soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("start", total=total_steps)
        self.progress.start()
        self.trackers: list[MetricTracker] = []
        for name in _with_tensorboard(trackers):
            with self._minding(name):
                self.trackers.append(build_tracker(name, folder, settings))

    @contextmanager
    def _minding(self, name: str) -> Iterator[None]:
        """Whatever a tracker's service does, it must not end the run."""
        try:
            yield
        except Exception as error:
            self.trackers = [tracker for tracker in self.trackers if tracker.name != name]
            self.say(f"log.trackers: {name} failed and gets no more metrics: {error}")

    def resume_at(self, step: int) -> None:
        """Forget what was written for steps after `step`: those steps are trained again."""
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            path = self.folder / name
            if path.is_file():
                _keep_lines(path, lambda record: record["step"] <= step)
        self.progress.update(self.task, completed=step)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def alarm(self, text: str) -> None:
        """Say what should not be overlooked."""
        self.console.print(f"ALARM: {text}", style="bold red", highlight=False, markup=False)

    def during(self, phase: str) -> None:
        """Show the phase beside the progress bar."""
        self.progress.update(self.task, description=f"{phase:8}")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write one step's metrics, and one line for the reader."""
        # JSON has no NaN and no infinity.
        record = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self.folder / "metrics.jsonl", [{"step": step, **record}])
        self.say(step_line(step, metrics))
        self.progress.update(self.task, completed=step)
        for tracker in list(self.trackers):
            with self._minding(tracker.name):
                tracker.log(metrics, step)

    def rollouts(self, records: list[dict[str, Any]]) -> None:
        _append(self.folder / "rollouts.jsonl", records)

    def close(self) -> None:
        self.progress.stop()
        for tracker in list(self.trackers):
            with self._minding(tracker.name):
                tracker.close()


def step_line(step: int, metrics: dict[str, float]) -> str:
    """One line: reward, kept fraction, dead groups, tokens, seconds per phase, and accuracy where it was measured."""
    seconds = " ".join(
        f"{name} {metrics[f'seconds/{name}']:.2f}" for name in PHASES if metrics.get(f"seconds/{name}", 0) >= 0.005
    )
    measured = {k.removeprefix("eval/"): v for k, v in metrics.items() if k.startswith(("eval/avg", "eval/pass"))}
    accuracy = "".join(f"  {name} {value:.3f}" for name, value in measured.items())
    ungraded = metrics.get("dropped/ungraded", 0)
    return (
        f"step {step:4d}  reward {metrics['reward/mean']:.3f}  kept {metrics['rollouts/kept_fraction']:4.0%}  "
        f"dead {metrics['groups/dead']:.0f}/{metrics['groups/count']:.0f}  "
        f"{f'ungraded {ungraded:.0f}  ' if ungraded else ''}"
        f"tokens {metrics['tokens/generated']:.0f} -> {metrics['tokens/trained']:.0f}  "
        f"{metrics['seconds/step']:.2f} s ({seconds}){accuracy}"
    )


class MetricTracker(Protocol):
    """An experiment tracker."""

    name: Tracker

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder."""

    name: Tracker = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class RunTracker:
    """wandb, or trackio with the same interface."""

    def __init__(self, name: Tracker, folder: Path, settings: dict[str, Any]) -> None:
        self.name = name
        module = importlib.import_module(name)
        with open(os.devnull) as nobody, _stdin_from(nobody):  # without a login it would ask for one, and wait
            self.run = module.init(project="fastrl_fast", name=folder.name, config=settings)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


@contextmanager
def _stdin_from(source: TextIO) -> Iterator[None]:
    before, sys.stdin = sys.stdin, source
    try:
        yield
    finally:
        sys.stdin = before


def check_trackers(trackers: list[Tracker]) -> None:
    """Raise ValueError for a tracker that is not installed."""
    for name in trackers:
        if not _installed(name):
            raise ValueError(f"log.trackers: {name} is not installed; pip install {name}")


def build_tracker(name: Tracker, folder: Path, settings: dict[str, Any]) -> MetricTracker:
    if name == "tensorboard":
        return TensorBoard(folder)
    return RunTracker(name, folder, settings)


def _with_tensorboard(trackers: list[Tracker]) -> list[Tracker]:
    """TensorBoard needs no account and no network, so it is on wherever it is installed."""
    missing = "tensorboard" not in trackers and _installed("tensorboard")
    return [*trackers, "tensorboard"] if missing else trackers


def _installed(name: str) -> bool:
    """Whether there is a module of this name; a bare folder, such as the one wandb leaves behind, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    """Raises ValueError where it cannot be written, a full disk say."""
    try:
        # A lone surrogate has no UTF-8; its backslash form is how JSON writes it anyway.
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    except OSError as error:
        raise ValueError(f"run_dir: cannot write {path}: {error}") from error


def _keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a .jsonl with the records to keep; a torn line, left by a killed process or a full disk, goes too."""
    # Bytes: the tear may be inside a character, and as text a line would also end at U+2028 or U+0085.
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and _keeps(line, keep)]
    beside = path.with_suffix(".partial")
    beside.write_bytes(b"".join(kept))
    beside.replace(path)


def _keeps(line: bytes, keep: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and keep(record)
