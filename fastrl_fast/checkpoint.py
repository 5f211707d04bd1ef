"""Checkpoints that are either complete or not there, and the way back from the newest one."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from . import distributed

STATE_FILE = "state.json"
PREFIX = "step_"


class Checkpointer:
    """Saves and restores a run: sharded weights and optimizer, and one small JSON of everything else.

    The learning rate and all randomness are functions of the seed and the step, so they need no state of their own.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Write `step` beside its place and rename it when complete; all ranks call this together.

        Raises ValueError where it cannot be written, with the checkpoints before it untouched.
        """
        try:
            self._save(step, model, optimizer, state)
        except (OSError, dcp.CheckpointException) as error:
            # With a full disk torch's own reason may be an offset in a file.
            free = shutil.disk_usage(self.folder.parent).free
            raise ValueError(
                f"run_dir: the checkpoint of step {step} cannot be written to {self.folder} ({free / 1e6:.0f} MB "
                f"free); those before it are untouched: {_reason(error)}"
            ) from error

    def _save(self, step: int, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        final = self.folder / f"{PREFIX}{step:06d}"
        partial = self.folder / f".partial-{final.name}"
        if distributed.rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".partial-*"):
                shutil.rmtree(leftover)
        distributed.barrier()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=partial)
        if distributed.rank() == 0:
            _write_durably(partial / STATE_FILE, json.dumps({"step": step, **state}))
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _sync_folder(self.folder)
            for old in complete(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        distributed.barrier()

    def load_newest(self, model: nn.Module, optimizer: Any) -> dict[str, Any] | None:
        """Restore the newest readable checkpoint and return its state, or None where there is none; all ranks together.

        An unreadable one is left where it is, with a warning, and the one before it is tried. Raises ValueError when
        there are checkpoints and none can be read.
        """
        candidates = distributed.broadcast_object(complete(self.folder))
        for folder in reversed(candidates):
            try:
                state = json.loads((folder / STATE_FILE).read_text())
                weights, moments = get_state_dict(model, optimizer)
                dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
            except (OSError, ValueError, KeyError, RuntimeError, dcp.CheckpointException) as error:
                warnings.warn(f"checkpoint {folder} cannot be read: {type(error).__name__}: {error}", stacklevel=2)
                continue
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            return state
        if candidates:
            raise ValueError(f"run_dir: none of the {len(candidates)} checkpoints in {self.folder} can be read")
        return None


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / STATE_FILE).is_file())


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The newest checkpoint's whole weights by Hugging Face name, without a process group.

    Raises ValueError where the folder holds no complete checkpoint.
    """
    checkpoints = complete(folder)
    if not checkpoints:
        raise ValueError(f"run_dir: no complete checkpoint in {folder}")
    reader = dcp.FileSystemReader(checkpoints[-1])
    stored = reader.read_metadata().state_dict_metadata
    weights = {
        name.removeprefix("model."): torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in stored.items()
        if name.startswith("model.") and isinstance(tensor, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*(unavailable|uninitialized)")
        dcp.load({"model": weights}, storage_reader=reader)
    return {name.removeprefix("lm."): weight for name, weight in weights.items()}


def _reason(error: BaseException) -> str:
    """One line, of the first rank that has one; torch's own text is the tracebacks of all ranks."""
    failures = error.failures.values() if isinstance(error, dcp.CheckpointException) else ()
    return " ".join(str(next((failure for failure, _ in failures), error)).split())


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
