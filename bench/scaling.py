"""What an update sends and holds on each of several ranks: a formula, and the same measured on gloo.

python -m bench.scaling [--ranks 1 2 4] [--json FILE]        measured beside the formula
python -m bench.scaling --table                              the formula for 1.5B, 7B and 32B on 8 to 512 GPUs
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import timing

# isort: split
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from fastrl_fast import distributed
from fastrl_fast.config import Config, DataConfig, ModelConfig, UpdatesConfig
from fastrl_fast.memory import STATE_BYTES, ModelSize, estimate_memory
from fastrl_fast.model import build_policy
from fastrl_fast.optimizer import build_optimizer

from .load import make_groups
from .step import CONFIG, update_trainer

QWEN25 = {
    "1.5B": dict(layers=28, hidden=1536, intermediate=8960, queries=1536, keys=256, vocabulary=151936, tied=True),
    "7B": dict(layers=28, hidden=3584, intermediate=18944, queries=3584, keys=512, vocabulary=152064, tied=False),
    "32B": dict(layers=64, hidden=5120, intermediate=27648, queries=5120, keys=1024, vocabulary=152064, tied=False),
}
MEASURED = Qwen2Config(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
TOKENS = 1024
"""Of a micro-batch in the measurement."""
MICROBATCHES = 2


def update_traffic(
    size: ModelSize, *, ranks: int, width: int, microbatches: int, reductions: int = 1
) -> dict[str, float]:
    """Bytes that each rank receives in one update under FSDP2: {"gather": ..., "reduce": ...}.

    A micro-batch gathers all P parameters for its forward pass and again, but for the root's (the embedding and the
    last norm), for its backward pass, in numbers of `width` bytes; gradients are reduced in float32, once or with every
    micro-batch. Of every collective a rank already holds 1 / ranks.
    """
    away = (ranks - 1) / ranks
    root = size.table + size.hidden
    gathered = microbatches * width * (2 * size.parameters - root)
    return {"gather": away * gathered, "reduce": away * reductions * STATE_BYTES * size.parameters}


class Traffic(TorchDispatchMode):
    """Counts the bytes that FSDP2's collectives hand to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.received = {"gather": 0.0, "reduce": 0.0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        away = (distributed.world_size() - 1) / distributed.world_size()
        name = func.name()
        if name.startswith("c10d::_allgather_base_"):
            self.received["gather"] += away * _bytes(args[0])
        elif name.startswith("c10d::_reduce_scatter_base_"):
            self.received["reduce"] += away * _bytes(args[1])
        return func(*args, **(kwargs or {}))


def _bytes(x: Tensor) -> float:
    return float(x.numel() * x.element_size())


def rank_worker() -> None:
    """On every rank of a torchrun: one update, what it received and what it held."""
    device = distributed.start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(MEASURED, dtype=torch.float32, attn_implementation="sdpa")
    policy = build_policy(lm, ModelConfig(path="none"), temperature=1.0)
    shape = policy.shape
    distributed.shard(policy, policy.shard_units, dtype=torch.float32, device=device)
    optimizer = build_optimizer(policy.parameters(), CONFIG.optimizer)
    trainer = update_trainer(policy, optimizer, tokens_per_microbatch=TOKENS, share_prompts=False)
    trainer.parts.shape = shape
    # As many tokens for each rank whatever their number, of which each packs two full micro-batches.
    groups = make_groups(64, [[192] * 4] * (MICROBATCHES * distributed.world_size()))
    mine = groups[distributed.share(len(groups))]
    trainer.update(trainer.pack(mine))
    before = timing.reset_peak()
    with Traffic() as traffic:
        trainer.update(trainer.pack(mine))
    held = {"parameters": sum(_bytes(_local(p)) for p in policy.parameters())}
    states = optimizer.state.values()
    held["optimizer"] = sum(_bytes(_local(s[name])) for s in states for name in ("exp_avg", "exp_avg_sq"))
    report = {
        "ranks": distributed.world_size(),
        "received": traffic.received,
        "held": held,
        "grown": (timing.memory_mb("VmHWM") - before) * 2**20,
    }
    reports = distributed.gather_lists([report])
    if distributed.rank() == 0:
        print(f"REPORT {json.dumps(reports)}", flush=True)
    distributed.stop()


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def measure(ranks: int) -> list[dict[str, Any]]:
    """One report per rank."""
    command = ["--standalone", f"--nproc-per-node={ranks}", "-m", "bench.scaling", "--rank-worker"]
    # Each tensor in pages of its own, which go back at once: the peak then counts what is alive, not what is torn.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    launch = [sys.executable, "-m", "torch.distributed.run", *command]
    done = subprocess.run(launch, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{ranks} ranks failed:\n{done.stderr[-3000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    return json.loads(line.removeprefix("REPORT "))


def compare(reports: list[dict[str, Any]]) -> list[str]:
    """The rank that did most beside the formula, in megabytes."""
    size, ranks = ModelSize.of(MEASURED), len(reports)
    memory = estimate_memory(size, _config(tokens=TOKENS), ranks=ranks, device="cpu")
    traffic = update_traffic(size, ranks=ranks, width=STATE_BYTES, microbatches=MICROBATCHES)
    pairs = {
        "gathered": (max(r["received"]["gather"] for r in reports), traffic["gather"]),
        "reduced": (max(r["received"]["reduce"] for r in reports), traffic["reduce"]),
        "parameters": (max(r["held"]["parameters"] for r in reports), memory.parameters),
        "optimizer": (max(r["held"]["optimizer"] for r in reports), memory.optimizer),
        "update, at most": (max(r["grown"] for r in reports), memory.update),
    }
    cells = [f"{name} {found / 1e6:.1f} ({formula / 1e6:.1f})" for name, (found, formula) in pairs.items()]
    return [f"{ranks} ranks, MB measured (formula): {'  '.join(cells)}"]


def _config(*, tokens: int, dtype: str = "float32", checkpointing: bool = False) -> Config:
    return Config(
        model=ModelConfig(path="none", dtype=dtype, activation_checkpointing=checkpointing),
        data=DataConfig(path="none"),
        updates=UpdatesConfig(tokens_per_microbatch=tokens),
    )


def table() -> list[str]:
    """Markdown: bytes per GPU in bfloat16 with checkpointing and micro-batches of 16384 tokens."""
    head = [
        "model",
        "GPUs",
        "states",
        "gradients, one / several",
        "activations",
        "head",
        "sampler",
        "peak, one / several",
    ]
    head.append("gathered per micro-batch + reduced")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    config = _config(tokens=16384, dtype="bfloat16", checkpointing=True)
    for name, widths in QWEN25.items():
        size = ModelSize(**widths)
        for ranks in (8, 64, 512):
            one, many = (estimate_memory(size, config, ranks=ranks, several_microbatches=s) for s in (False, True))
            traffic = update_traffic(size, ranks=ranks, width=2, microbatches=1)
            cells = [name, str(ranks), _gb(one.parameters + one.optimizer)]
            cells.append(f"{_gb(one.gradients)} / {_gb(many.gradients)}")
            cells += [_gb(one.activations), _gb(one.head), _gb(one.sampler), f"{_gb(one.total)} / {_gb(many.total)}"]
            cells.append(f"{_gb(traffic['gather'])} + {_gb(traffic['reduce'])}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--table", action="store_true", help="print the formula's table instead of measuring")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--rank-worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_worker:
        rank_worker()
        return 0
    if options.table:
        print("\n".join(table()))
        return 0
    reports = {ranks: measure(ranks) for ranks in options.ranks}
    for ranks in options.ranks:
        print("\n".join(compare(reports[ranks])), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": timing.machine("cpu", 1), "reports": reports}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
