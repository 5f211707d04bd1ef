"""When a checkpoint counts, which ones stay, and a save that training does not wait for."""

import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .. import distributed
from . import shards
from .on_disk import FORMAT, PREFIX, STATE_FILE, best_of, check_file, check_format, complete, read_record, step_of

T = TypeVar("T")

PARTIAL = ".partial-"
"""Before the name of a folder that is not complete yet, or not wanted any more; the next save removes such folders."""


class Checkpointer:
    """Saves and restores a run: sharded weights and moments, and one small JSON of everything else.

    The learning rate and all randomness are functions of the seed and the step, so they need no state of their own.
    `keep` newest checkpoints stay, and with `keep_best` also the one with the highest first entry of
    `state["accuracy"]`.
    """

    def __init__(self, folder: Path, *, keep: int, keep_best: bool = True) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_best = keep_best
        # The thread that writes must not meet the main thread's collectives.
        self._group = distributed.side_group()
        self.rollouts: list[dict[str, Tensor]] = []
        """Of the checkpoint that was loaded, those of the ranks that this one looks after."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        rollouts: dict[str, Tensor] | None = None,
    ) -> None:
        """Copy what is to be saved and write it in the background; all ranks call this together.

        `rollouts` are this rank's own. One save is in flight at most: this waits for the one before. What went wrong is
        raised by `wait`, which the next save calls too.
        """
        self.wait()
        tensors = shards.snapshot(model, optimizer)
        tensors |= {f"{shards.ROLLOUTS}{name}": tensor for name, tensor in (rollouts or {}).items()}
        text = json.dumps({"step": step, **state})  # now: the trainer goes on to change it
        self._thread = threading.Thread(target=self._run, args=(step, tensors, text), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the last save has ended badly, on all ranks."""
        return self._error is not None

    def wait(self) -> None:
        """Return when nothing is in flight; all ranks call this together.

        Raises ValueError where the last save could not be written, with the checkpoints before it untouched.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error

    def settle(self, seconds: float) -> None:
        """Give a save in flight so long to end, whatever becomes of it: for a run that ends by an error."""
        if self._thread is not None:
            self._thread.join(seconds)

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Restore the newest readable checkpoint and return its state, or None where there is none; all ranks together.

        An unreadable one is left where it is, with a warning, and the one before it is tried, by all ranks alike. The
        number of ranks may differ from that of the save. Raises ValueError when there are checkpoints and none can be
        read, or the newest is of another format.
        """
        candidates = distributed.broadcast_object(complete(self.folder))
        reason = ""
        for folder in reversed(candidates):
            record = distributed.broadcast_object(read_record(folder) if distributed.rank() == 0 else {})
            check_format(folder, record)
            try:
                self.rollouts = distributed.together(partial(_load, folder, record, model, optimizer))
            except ValueError as error:
                reason = str(error)
                warnings.warn(f"checkpoint {folder} cannot be read: {reason}", stacklevel=2)
                continue
            return record["state"]
        if candidates:
            raise ValueError(
                f"run_dir: none of the {len(candidates)} checkpoints in {self.folder} can be read (oldest: {reason})"
            )
        return None

    def _run(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        try:
            self._write(step, tensors, state)
        except BaseException as error:
            self._error = error

    def _write(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        final = self.folder / f"{PREFIX}{step:06d}"
        partial = self.folder / f"{PARTIAL}{final.name}"
        size = sum(distributed.gather_lists([sum(t.nbytes for t in tensors.values())], group=self._group))
        try:
            self._together(step, lambda: self._make_room(partial, size))
            file = self._together(step, lambda: _write_shard(partial, tensors))
            files = dict(distributed.gather_lists([file], group=self._group))
            self._together(step, lambda: self._complete(step, partial, final, files, state))
        except ValueError:
            if distributed.rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _together(self, step: int, work: Callable[[], T]) -> T:
        """Work of all ranks that fails on all of them with one line."""

        def told() -> T:
            try:
                return work()
            except (OSError, SafetensorError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"run_dir: the checkpoint of step {step} cannot be written to {self.folder}; those before it are "
                    f"untouched: {reason}"
                ) from error

        return distributed.together(told, group=self._group)

    def _make_room(self, partial: Path, size: int) -> None:
        if distributed.rank() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise OSError(f"it needs {size / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free")
        partial.mkdir()

    def _complete(self, step: int, partial: Path, final: Path, files: dict[str, list[int]], state: str) -> None:
        """Rank 0, when every rank has written its file: see that all are there, and give the folder its name."""
        if distributed.rank() != 0:
            return
        for name, (size, _) in files.items():
            path = partial / name
            if not path.is_file() or path.stat().st_size != size:
                raise OSError(f"rank 0 does not see all of {name}: all ranks must write to the same file system")
        head = {"format": FORMAT, "ranks": len(files), "files": files}
        _write_durably(partial / STATE_FILE, f"{json.dumps(head)[:-1]}, " + f'"state": {state}}}')
        _sync(partial)
        if final.exists():  # one that could not be read when the run was resumed
            _remove(final)
        partial.rename(final)
        _sync(self.folder)
        for old in self._not_wanted(step):
            _remove(old)

    def _not_wanted(self, step: int) -> list[Path]:
        """Checkpoints to remove. Later ones than `step` are none: the run was resumed before them, as they could not
        be read, so they may not stand in for those that can."""
        done = [folder for folder in complete(self.folder) if step_of(folder) <= step]
        wanted = done[-self.keep :]
        if self.keep_best:
            wanted += [folder for folder in [best_of(done)] if folder is not None]
        return [folder for folder in done if folder not in wanted]


def _load(
    folder: Path, record: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[dict[str, Tensor]]:
    """The rollouts of this rank's share of the files. Raises ValueError for whatever is wrong with the checkpoint."""
    try:
        mine = range(record["ranks"])[distributed.share(record["ranks"])]
        for number in mine:
            check_file(folder, record, number)
        shards.restore(folder, record["ranks"], model, optimizer)
        return [shards.rollouts(folder, number) for number in mine]
    except (OSError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _write_shard(partial: Path, tensors: dict[str, Tensor]) -> tuple[str, list[int]]:
    """Write this rank's file; its name, bytes and checksum."""
    path = partial / shards.file_name(distributed.rank())
    shards.write(tensors, path)
    _sync(path)
    return path.name, [path.stat().st_size, shards.checksum(path)]


def _remove(folder: Path) -> None:
    """Under another name first: half a checkpoint must not look like one."""
    aside = folder.with_name(f"{PARTIAL}old-{folder.name}")
    folder.rename(aside)
    shutil.rmtree(aside)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
