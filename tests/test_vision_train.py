"""The whole way from diagrams to updates, on one rank and on two."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageDraw

from fastrl_fast.builtin import resolve_model
from fastrl_fast.checkpoint import choose, load_weights
from fastrl_fast.config import DataConfig, ModelConfig
from fastrl_fast.export import export
from fastrl_fast.model import load_causal_lm, load_tokenizer
from fastrl_fast.vision import load_images

ROOT = Path(__file__).parents[1]
REWARD = f"{{{ROOT / 'tests' / 'workers' / 'length_reward.py'}:length: 1.0}}"


def shape(sides: int, size: tuple[int, int]) -> bytes:
    image = Image.new("RGB", size, "white")
    radius = min(size) // 2 - 2
    ImageDraw.Draw(image).regular_polygon((size[0] // 2, size[1] // 2, radius), sides, outline="black", width=2)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Shapes of several sizes, one row with two of them and one with none."""
    folder = tmp_path_factory.mktemp("vision")
    files = [[shape(3 + n, (60 + 20 * n, 80))] for n in range(6)] + [[shape(3, (60, 60)), shape(4, (90, 40))], []]
    asked = ["<image>How many sides are there?"] * 6 + ["<image><image>How many sides are there in all?", "3 + 4 = ?"]
    rows = {
        "images": pa.array(files, pa.list_(pa.binary())),
        "problem": asked,
        "answer": [*map(str, range(3, 9)), "7", "7"],
    }
    pq.write_table(pa.table(rows), folder / "shapes.parquet")
    return folder


def run(folder: Path, name: str, *args: str, ranks: int = 1) -> list[dict]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "fastrl_fast.train"]
    data = f"--data.path={folder / 'shapes.parquet'}"
    settings = ["--config", "geometry3k_cpu", data, "--data.prompts_per_step=8"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, *launch, *settings, f"--run_dir={folder / name}", "--reward.functions", REWARD, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


SMALL = ("--rollout.max_completion_tokens=8", "--updates.tokens_per_microbatch=128", "--prune.method=none")


def test_two_ranks_take_the_steps_of_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a rank's micro-batch has no image; the tower learns, and what is exported reads images."""
    one = run(folder, "one", *SMALL)
    two = run(folder, "two", *SMALL, ranks=2)
    for mine, theirs in zip(one, two, strict=True):
        assert mine["optimizer/updates"] == theirs["optimizer/updates"] == 1
        assert mine["policy/sampler_gap"] < 1e-5
        for name in ("reward/mean", "loss/value", "optimizer/grad_norm", "rollouts/kept"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    settings = ModelConfig(path="builtin:tiny_vlm")
    start = dict(load_causal_lm(resolve_model(settings.path), settings).named_parameters())
    ours, theirs = (
        load_weights(choose(folder / "one" / "checkpoints")),
        load_weights(choose(folder / "two" / "checkpoints")),
    )
    for name, weight in ours.items():
        # Adam's first steps are about lr whatever the gradient: where that is nearly 0 rounding decides.
        assert (weight - theirs[name]).abs().mean() < 2e-4, name
    moved = [name for name, weight in start.items() if not torch.equal(weight, ours[name])]
    assert any(".visual." in name for name in moved) and any(".layers." in name for name in moved)
    out = folder / "exported"
    export(folder / "one", out)
    tokenizer = load_tokenizer(str(out), settings)
    assert load_images(str(out), tokenizer, settings, DataConfig(path="none")) is not None
    assert all(torch.equal(p, ours[name]) for name, p in load_causal_lm(str(out), settings).named_parameters())


def test_a_frozen_tower_is_as_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, "frozen", *SMALL, "--model.freeze_vision=true", "--loss.kl_coef=0.01", ranks=2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    settings = ModelConfig(path="builtin:tiny_vlm")
    ours = load_weights(choose(folder / "frozen" / "checkpoints"))
    for name, weight in load_causal_lm(resolve_model(settings.path), settings).named_parameters():
        assert torch.equal(weight, ours[name]) == (".visual." in name), name
