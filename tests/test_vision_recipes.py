"""The FastRL paper's jobs: every combination of data, objective and method has its numbers, and trains on a CPU."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fastrl_fast import cli
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import Config
from fastrl_fast.data import PromptData
from fastrl_fast.demo.shapes import examples
from fastrl_fast.evaluate import evaluate
from fastrl_fast.loss import build_objective
from fastrl_fast.rewards import Grader
from fastrl_fast.train import Inputs, build_parts, load_inputs
from fastrl_fast.trainer import Trainer

DATA = {"geometry3k": (25, 2048), "geoqa8k": (15, 4096)}
"""Recipe -> the paper's epochs and longest answers."""
OBJECTIVES = {
    "grpo": ("token", 0.2, 0.3, 3.0, "token-mean", 0.01),
    "dapo": ("token", 0.2, 0.28, None, "token-mean", 0.0),
    "gspo": ("sequence_token", 3e-4, 4e-4, None, "seq-mean-token-mean", 0.0),
}
"""Objective -> ratio, both clips, dual clip, aggregation and the weight of the KL penalty."""
METHODS = {
    "plain": ("fixed", "none"),
    "cppo": ("fixed", "cppo"),
    "fastrl": ("ars", "mdap"),
    "aero": ("aero", "aero"),
    "fastrl_aero": ("aero_ars", "aero_mdap"),
}
"""Method -> budget and pruning."""
COMBINATIONS = list(itertools.product(DATA, OBJECTIVES, METHODS))


def recipes(data: str, objective: str, method: str) -> list[str]:
    """Behind the data the method, and behind that its objective; the data's own is GRPO's."""
    behind = ([] if method == "plain" else [method]) + ([] if objective == "grpo" else [objective])
    return [argument for name in (data, *behind) for argument in ("--config", name)]


def parse(data: str, objective: str, method: str, *extra: str) -> Config:
    return cli.parse([*recipes(data, objective, method), *extra], prog="train")[0]


@pytest.mark.parametrize(("data", "objective", "method"), COMBINATIONS)
def test_every_combination_has_the_papers_numbers(data: str, objective: str, method: str) -> None:
    """algorithms.md 1.5: of EasyR1 with the paper's settings; the methods' own are those of their recipes."""
    config = parse(data, objective, method)
    epochs, longest = DATA[data]
    loss = build_objective(config.loss)
    assert OBJECTIVES[objective] == (
        loss.ratio, loss.clip_low, loss.clip_high, loss.dual_clip, loss.aggregation, loss.kl_coef,
    )  # fmt: skip
    assert loss.kl_kind == "k3"
    assert (config.budget.kind, config.prune.method) == METHODS[method]
    assert (config.budget.group_size, config.budget.max_group_size, config.data.prompts_per_step) == (8, 16, 256)
    assert (config.prune.tau, config.prune.ngram, config.prune.keep_fraction) == (0.8, 1, 0.5)
    assert (config.budget.filter, config.budget.filter_low, config.budget.filter_high) == (
        objective == "dapo", 0.01, 0.99,
    )  # fmt: skip
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.warmup_steps, optimizer.max_grad_norm) == (1e-6, 0.01, 0, 1)
    assert optimizer.schedule == "constant" and config.advantage.preset == "fastrl"
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.max_completion_tokens) == (1, 1, longest)
    assert (config.data.max_prompt_tokens, config.updates.minibatches, config.updates.epochs) == (2048, 4, 1)
    assert (config.epochs, config.max_steps) == (epochs, None)
    assert config.reward.functions == {"math": 1.0, "format": 0.5} and config.reward.right_name == "math"
    assert config.model.path == "Qwen/Qwen2.5-VL-7B-Instruct" and config.model.dtype == "bfloat16"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drawings with the columns of each data set."""
    folder, rows = tmp_path_factory.mktemp("drawings"), list(examples("train", 12, 0))
    asked = [row["prompt"] for row in rows]
    tables = {
        "geometry3k": {
            "images": pa.array([row["images"] for row in rows]),
            "problem": asked,
            "answer": [row["answer"] for row in rows],
        },
        "geoqa8k": {
            "image": pa.array([{"bytes": row["images"][0], "path": None} for row in rows]),
            "problem": [text.removeprefix("<image>") for text in asked],
            "solution": [f"<answer> {row['answer']} </answer>" for row in rows],
        },
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return {name: folder / f"{name}.parquet" for name in tables}


def small(files: dict[str, Path], data: str, objective: str, method: str) -> Config:
    """The CPU's version with the model that answers in boxes, so that there is something to tell apart."""
    sizes = ["--rollout.max_completion_tokens=24", "--budget.group_size=4", "--updates.minibatches=1"]
    settings = ["--model.path=builtin:shapes", f"--data.path={files[data]}", *sizes]
    return parse(f"{data}_cpu", objective, method, *settings)


@pytest.fixture(scope="module")
def grader(files: dict[str, Path]) -> Iterator[Grader]:
    with build_grader(small(files, "geometry3k", "grpo", "plain").reward) as made:
        yield made


@pytest.fixture(scope="module")
def make(files, grader: Grader, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], Trainer]:
    read = load_inputs(small(files, "geometry3k", "grpo", "plain"), grader)

    def made(config: Config) -> Trainer:
        data = PromptData(config.data, read.tokenizer, seed=config.seed, images=read.images)
        inputs = Inputs(copy.deepcopy(read.lm), read.tokenizer, data, None, read.images)
        folder = tmp_path_factory.mktemp("run")
        parts = build_parts(config, inputs, grader, torch.device("cpu"), folder=folder, log=None)
        return Trainer(config, parts, total_steps=2)

    return made


@pytest.mark.parametrize(("data", "objective", "method"), COMBINATIONS)
def test_every_combination_trains_on_a_cpu(make, files, process_group, data: str, objective: str, method: str) -> None:
    """Two steps on drawings: groups that differ, gradients, weights of tower and language model that move."""
    config = small(files, data, objective, method)
    paper = parse(data, objective, method)
    assert (config.loss, config.prune, config.budget.kind) == (paper.loss, paper.prune, paper.budget.kind)
    trainer = make(config)
    named = dict(trainer.parts.policy.lm.named_parameters())
    before = {name: weight.detach().clone() for name, weight in named.items()}
    steps = [trainer.step(), trainer.step()]
    assert sum(step["optimizer/updates"] for step in steps) > 0
    assert all(step["policy/sampler_gap"] < 1e-5 for step in steps if step["optimizer/updates"])
    assert sum(step["flops/update"] for step in steps) > 0
    moved = [name for name, weight in named.items() if not torch.equal(before[name], weight)]
    assert any(".visual." in name for name in moved) and any(".layers." in name for name in moved)


def test_accuracy_on_a_held_out_file(files: dict[str, Path], process_group: torch.device) -> None:
    """avg@16 and pass@16 of the paper's evaluation; chances of what is right a third of the time."""
    settings = (f"--eval.path={files['geoqa8k']}", "--eval.samples=16", "--model.path=builtin:shapes")
    config = parse("geoqa8k_cpu", "grpo", "plain", f"--data.path={files['geoqa8k']}", *settings)
    result = evaluate(config, None, process_group)
    assert set(result) == {"avg@16", "pass@2", "pass@4", "pass@8", "pass@16", "ungraded"}
    assert 0.1 < result["avg@16"] < result["pass@2"] < result["pass@16"] <= 1 and result["ungraded"] == 0
    assert parse("geometry3k", "grpo", "plain").eval.samples == parse("geoqa8k", "grpo", "plain").eval.samples == 16
