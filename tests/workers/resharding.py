"""Saves under some number of ranks, loads under others, and lets single ranks fail; prints one JSON line for each.

Usage: resharding.py FOLDER. Ranks are forks of this process, which has started no thread; they are FSDP2's over gloo.
"""

import json
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fastrl_fast import distributed
from fastrl_fast.checkpoint import Checkpointer, complete, shards
from fastrl_fast.config import OptimizerConfig
from fastrl_fast.optimizer import build_optimizer


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Rows that no number of ranks divides, and a layer of one row: some ranks have none of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1))
    distributed.shard(model, list(model), dtype=torch.float32, device=torch.device("cpu"))
    return model, build_optimizer(model.parameters(), OptimizerConfig(lr=0.1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.full((1, 3), step + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Every number of the model and the moments, whole."""
    tensors = []
    for parameter in model.parameters():
        moments = optimizer.state.get(parameter, {})
        tensors += [parameter.detach(), *(moments[key] for key in sorted(moments))]
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.flatten().double() for t in whole]).tolist()


def save(folder: Path, steps: int, *, broken_rank: int | None = None) -> dict:
    model, optimizer = build()
    train(model, optimizer, steps)
    if distributed.rank() == broken_rank:

        def full(tensors: dict, path: Path) -> None:
            raise OSError(28, "No space left on device")

        shards.write = full
    saver = Checkpointer(folder, keep=5)
    saver.save(steps, model, optimizer, {})
    message = ""
    try:
        saver.wait()
    except ValueError as error:
        message = str(error)
    return {"message": message, "complete": [p.name for p in complete(folder)], "digest": digest(model, optimizer)}


def load(folder: Path, *, blind_rank: int | None = None) -> dict:
    model, optimizer = build()
    if distributed.rank() == blind_rank:
        shards.checksum = lambda path: -1 if "step_000002" in str(path) else shards.zlib.crc32(path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = Checkpointer(folder, keep=5).load_newest(model, optimizer)
    assert state is not None
    return {"step": state["step"], "digest": digest(model, optimizer)}


def with_ranks(ranks: int, work: Callable[[], dict]) -> list[dict]:
    """What each rank answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, children = [], []
    for rank in range(ranks):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            code = 1
            try:
                distributed.start()
                os.write(writer, json.dumps(work()).encode())
                distributed.barrier()
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        pipes.append(reader)
        children.append(child)
    answers = []
    for reader, child in zip(pipes, children, strict=True):
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        assert os.waitpid(child, 0)[1] == 0, "a rank failed"
        answers.append(json.loads(text))
    return answers


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    results: dict[str, list[dict]] = {}
    for ranks, others_in_turn in {1: (2,), 2: (1, 2, 3), 3: (2,)}.items():
        results[f"save {ranks}"] = with_ranks(ranks, lambda ranks=ranks: save(root / str(ranks), 2))
        for others in others_in_turn:
            results[f"{ranks} to {others}"] = with_ranks(others, lambda ranks=ranks: load(root / str(ranks)))
    folder = root / "faults"
    results["first"] = with_ranks(2, lambda: save(folder, 1))
    results["broken"] = with_ranks(2, lambda: save(folder, 2, broken_rank=1))
    results["second"] = with_ranks(2, lambda: save(folder, 2))
    results["blind"] = with_ranks(2, lambda: load(folder, blind_rank=1))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
