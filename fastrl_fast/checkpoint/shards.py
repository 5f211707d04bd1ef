"""Weights and moments as one safetensors file per rank, and back under any number of ranks.

A file holds the rows that FSDP2 gives the rank, so what it holds follows from the number of ranks alone. safetensors
rather than torch's own formats: nothing in it can run when it is read, which a pickle can.
"""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import distributed

WEIGHTS, MOMENTS, ROLLOUTS = "model.", "optimizer.", "rollouts."
_BLOCK = 1 << 20


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def rows_of(rank: int, *, ranks: int, rows: int) -> tuple[int, int]:
    """First row, and the row after the last, that FSDP2 gives `rank` of a tensor of `rows` rows: torch.chunk's."""
    size = -(-rows // ranks)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies in CPU memory of what this rank writes: its rows of sharded tensors, and the others on rank 0 alone."""
    copies = {}
    for name, tensor in _named(model, optimizer):
        if isinstance(tensor, DTensor) or distributed.rank() == 0:
            local = _local(tensor)
            if local.numel() or not isinstance(tensor, DTensor):
                copies[name] = torch.empty(local.shape, dtype=local.dtype).copy_(local)
    return copies


def write(tensors: dict[str, Tensor], path: Path) -> None:
    """Raises ValueError where a weight or moment is not finite: a run must not lose its last good checkpoint to a bad
    one. Rollouts may hold such numbers: an update that they spoil is skipped."""
    for name, tensor in tensors.items():
        if not name.startswith(ROLLOUTS) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    save_file(tensors, path)


def checksum(path: Path) -> int:
    """CRC-32 of a file: finds damage, not malice."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def restore(folder: Path, ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill the model and replace the optimizer's state from the files of `ranks` ranks.

    Raises ValueError where a tensor of the model is not there or has another shape.
    """
    optimizer.state.clear()
    with ExitStack() as stack:
        files = _Files(folder, ranks, stack)
        for name, parameter in model.named_parameters():
            files.fill(f"{WEIGHTS}{name}", parameter.detach())
            state = {}
            for key in files.keys_below(f"{MOMENTS}{name}."):
                full = f"{MOMENTS}{name}.{key}"
                state[key] = torch.empty(()) if files.is_scalar(full) else torch.zeros_like(parameter.detach())
                files.fill(full, state[key])
            if state:
                optimizer.state[parameter] = state


def whole_weights(folder: Path, ranks: int) -> dict[str, Tensor]:
    """Every weight of the model, put together from the files of `ranks` ranks."""
    parts: dict[str, list[Tensor]] = {}
    for rank in range(ranks):
        with safe_open(folder / file_name(rank), "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dictionary
                if name.startswith(WEIGHTS):
                    parts.setdefault(name.removeprefix(WEIGHTS), []).append(file.get_tensor(name))
    return {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in parts.items()}


def rollouts(folder: Path, rank: int) -> dict[str, Tensor]:
    """What the file of a rank holds of rollouts that were not trained on yet."""
    with safe_open(folder / file_name(rank), "pt") as file:
        names = [name for name in file.keys() if name.startswith(ROLLOUTS)]  # noqa: SIM118, it is no dictionary
        return {name.removeprefix(ROLLOUTS): file.get_tensor(name) for name in names}


class _Files:
    """The files of one checkpoint, opened as they are needed."""

    def __init__(self, folder: Path, ranks: int, stack: ExitStack) -> None:
        self.folder, self.ranks, self.stack = folder, ranks, stack
        self.opened: dict[int, Any] = {}
        # Rank 0 has the first rows of everything.
        self.names: list[str] = list(self.of(0).keys())

    def of(self, rank: int) -> Any:
        if rank not in self.opened:
            self.opened[rank] = self.stack.enter_context(safe_open(self.folder / file_name(rank), "pt"))
        return self.opened[rank]

    def keys_below(self, prefix: str) -> list[str]:
        """Moments of one parameter; another parameter's name may go on where this one's ends, a moment's has no dot."""
        keys = (name.removeprefix(prefix) for name in self.names if name.startswith(prefix))
        return [key for key in keys if "." not in key]

    def is_scalar(self, name: str) -> bool:
        return self.of(0).get_slice(name).get_shape() == []

    def fill(self, name: str, target: Tensor) -> None:
        """Copy into this rank's part of `target`."""
        if name not in self.names:
            raise ValueError(f"it holds no {name}")
        if target.ndim == 0:
            target.copy_(self.of(0).get_tensor(name))
            return
        local, rows = _local(target), target.shape[0]
        start, stop = (0, rows)
        if isinstance(target, DTensor):
            start, stop = rows_of(distributed.rank(), ranks=distributed.world_size(), rows=rows)
        for rank in range(self.ranks):
            first, end = rows_of(rank, ranks=self.ranks, rows=rows)
            low, high = max(first, start), min(end, stop)
            if low < high:
                part = self.of(rank).get_slice(name)
                expected = [end - first, *target.shape[1:]]
                if part.get_shape() != expected:
                    raise ValueError(f"{name} has rows of another shape: {part.get_shape()}, not {expected}")
                local[low - start : high - start].copy_(part[low - first : high - first])


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"{WEIGHTS}{name}", parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{MOMENTS}{name}.{key}", value


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
