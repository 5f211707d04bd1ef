"""Small runs whose rollouts come from real vLLM, and what must hold in them after every hand-over of weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl_fast.builtin import resolve_model
from fastrl_fast.config import (
    BudgetConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    UpdatesConfig,
)
from fastrl_fast.loss_config import ImportanceConfig, LossConfig
from fastrl_fast.model import full_weights
from fastrl_fast.packing import Sequence, pack
from fastrl_fast.rewards import Grader
from fastrl_fast.rollout import build_sampler
from fastrl_fast.rollout_config import VllmConfig
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import Parts, Trainer
from fastrl_fast.training_run import TrainingRun
from fastrl_fast.types import Group, PackedBatch, Prompt

STEPS = 3
AGREE = 1e-4
"""Largest difference of a logprob between engine and policy, float32."""
LENGTH = Path(__file__).with_name("workers") / "length_reward.py"


def make_config(path: str, **vllm: Any) -> Config:
    return Config(
        model=ModelConfig(path=path),
        data=DataConfig(path="demo:train?size=32", prompts_per_step=4),
        rollout=RolloutConfig(
            engine="vllm_server" if "servers" in vllm else "vllm",
            max_completion_tokens=24,
            vllm=VllmConfig(enforce_eager=True, gpu_memory_utilization=0.2, **vllm),
        ),
        reward=RewardConfig(functions={f"{LENGTH}:length": 1.0}, workers=1),
        budget=BudgetConfig(group_size=6),
        optimizer=OptimizerConfig(lr=2e-3),
        eval=EvalConfig(path="demo:heldout?size=8", prompts=8),
        max_steps=STEPS,
    )


def save_model(folder: Path, *, tied: bool) -> str:
    """The demo's model, or the same with a head of its own."""
    path = resolve_model("builtin:demo")
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if not tied:
        lm.config.tie_word_embeddings = False
        lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone())
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return str(folder)


def greedy(sampler: Any, prompts: list[Prompt]) -> list[list[int]]:
    groups = sampler.sample(prompts, [1] * len(prompts), seed=0, step=0, temperature=0)
    return [group.rollouts[0].completion_ids for group in groups]


def check_agreement(parts: Parts, config: Config) -> float:
    """Hold the engine's greedy tokens against the policy's own, and logprobs of samples; the largest difference."""
    prompts = parts.data.first(4)
    copy = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    own = build_sampler(
        dataclasses.replace(config.rollout, engine="local"), copy, AutoTokenizer.from_pretrained(config.model.path)
    )
    own.load_weights(full_weights(parts.policy))
    assert greedy(parts.sampler, prompts) == greedy(own, prompts)
    groups = parts.sampler.sample(prompts, [3] * len(prompts), seed=1, step=0)
    batch = pack_groups(groups)
    with torch.no_grad():
        logprobs, _ = parts.policy(batch)
    difference = float((logprobs - batch.rollout_logprobs).abs().max())
    assert difference < AGREE
    return difference


def pack_groups(groups: list[Group]) -> PackedBatch:
    return pack(
        [
            Sequence(group.prompt.token_ids, rollout.completion_ids, rollout.rollout_logprobs, 0.0, 0.0)
            for group in groups
            for rollout in group.rollouts
        ]
    )


def train(config: Config, grader: Grader, group: torch.device, folder: Path) -> tuple[Parts, list[float]]:
    """Three steps; the parts, and the differences after each hand-over."""
    differences = []
    parts = build_parts(config, load_inputs(config, grader), grader, group, folder=folder, log=None)
    trainer = Trainer(config, parts, total_steps=STEPS)
    sync = trainer.sync_sampler

    def checked() -> None:
        sync()
        differences.append(check_agreement(parts, config))

    trainer.sync_sampler = checked  # type: ignore[method-assign]
    before = torch.cat([weight.flatten().clone() for _, weight in full_weights(parts.policy)])
    run = TrainingRun(trainer)
    run.run()
    after = torch.cat([weight.flatten() for _, weight in full_weights(parts.policy)])
    assert float((after - before).abs().max()) > 1e-3, "a policy that does not move proves nothing"
    assert run.accuracy_after["ungraded"] == 0
    check_corrections(config, parts)
    assert len(differences) == 1 + STEPS, "before the first step, and after each"
    print(f"\nlargest difference of a logprob after each hand-over: {[f'{d:.1e}' for d in differences]}")
    return parts, differences


def check_corrections(config: Config, parts: Parts) -> None:
    """Weights of a faithful engine are 1; they come from its logprobs, also where those are the old ones."""
    for kind in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric"):
        loss = LossConfig(importance=ImportanceConfig(kind=kind))
        metrics = Trainer(dataclasses.replace(config, loss=loss), parts, total_steps=STEPS).step()
        assert metrics["policy/importance"] == pytest.approx(1.0, abs=1e-3) and metrics["policy/importance_cut"] == 0
        assert metrics["policy/sampler_gap"] < AGREE
    updates = UpdatesConfig(old_logprobs="rollout")
    metrics = Trainer(dataclasses.replace(config, updates=updates), parts, total_steps=STEPS).step()
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-3)
