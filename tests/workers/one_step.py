"""Runs one training step per scenario under torchrun and lets rank 0 save the whole weights and the metrics.

Usage: torchrun ... one_step.py OUT MODEL DATA REWARD_FILE
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl_fast import distributed
from fastrl_fast.accuracy import build_grader
from fastrl_fast.budget.greso import GresoBudget
from fastrl_fast.config import (
    AdvantageConfig,
    BudgetConfig,
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PruneConfig,
    RewardConfig,
    RolloutConfig,
    UpdatesConfig,
)
from fastrl_fast.model import full_weights
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import Parts, Trainer


def scenarios(model: str, data: str, reward: str) -> dict[str, Config]:
    plain = Config(
        model=ModelConfig(path=model),
        data=DataConfig(path=data, prompts_per_step=4, shuffle=False),
        rollout=RolloutConfig(max_completion_tokens=12),
        reward=RewardConfig(functions={f"{reward}:length": 1.0}, workers=1),
        budget=BudgetConfig(group_size=4),
        prune=PruneConfig(method="none"),
        optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=1e9),
        updates=UpdatesConfig(tokens_per_microbatch=64),
    )
    change = dataclasses.replace
    return {
        "plain": plain,
        "reduced_often": change(plain, updates=UpdatesConfig(tokens_per_microbatch=64, reduce_gradients="microbatch")),
        "unshared": change(plain, updates=UpdatesConfig(tokens_per_microbatch=64, share_prompts=False)),
        "pruned": change(
            plain, prune=PruneConfig(method="mdap", tau=1.0, weighting="multiplicity"), loss=LossConfig(kind="dapo")
        ),
        "kl_and_two_updates": change(
            plain, loss=LossConfig(kind="gspo_token", kl_coef=0.1), updates=UpdatesConfig(minibatches=2)
        ),
        # The head is a unit of its own, and later updates need the ratios of whole sequences.
        "untied_gspo": change(
            plain,
            model=ModelConfig(path=f"{model}_untied"),
            loss=LossConfig(kind="gspo", kl_coef=0.1),
            updates=UpdatesConfig(minibatches=2, epochs=2, tokens_per_microbatch=64),
        ),
        # Only the first prompt's group is alive, so every other rank's own rollouts are all gone.
        "dead_elsewhere": change(plain, reward=RewardConfig(functions={f"{reward}:first_prompt": 1.0}, workers=1)),
        # Two sequences are left in all: with three ranks one of them has none to train on.
        "two_sequences": change(
            plain,
            reward=RewardConfig(functions={f"{reward}:first_two": 1.0}, workers=1),
            budget=BudgetConfig(group_size=4),
        ),
        "aero": change(
            plain,
            reward=RewardConfig(functions={f"{reward}:rare": 1.0}, workers=1),
            budget=BudgetConfig(kind="aero", group_size=4, extra=2, max_group_size=9),
            advantage=AdvantageConfig(dead_groups="posterior_z"),
            prune=PruneConfig(method="aero_mdap", tau=0.9, keep=3),
        ),
        "refilled": change(
            plain,
            reward=RewardConfig(functions={f"{reward}:rare": 1.0}, workers=1),
            budget=BudgetConfig(group_size=4, filter=True, tries=5),
            updates=UpdatesConfig(minibatches=2),
        ),
        "never_passes": change(
            plain,
            reward=RewardConfig(functions={f"{reward}:constant": 1.0}, workers=1),
            budget=BudgetConfig(group_size=4, filter=True, tries=3),
        ),
        "aligned": change(
            plain,
            prune=PruneConfig(method="mdap", tau=1.0, align=4),
            updates=UpdatesConfig(rollouts_per_update=4),
        ),
        "cut_over_the_step": change(plain, prune=PruneConfig(method="cppo_batch", keep_fraction=0.3)),
        "matched": change(plain, prune=PruneConfig(method="maxmin", similarity="gradient", weighting="match")),
        # All prompts but one are mostly skipped: in some tries there are fewer prompts than ranks.
        "skipping": change(plain, budget=BudgetConfig(kind="greso", group_size=4, tries=6)),
        "bfloat16": change(plain, model=ModelConfig(path=model, dtype="bfloat16", activation_checkpointing=True)),
        "nothing_left": change(plain, reward=RewardConfig(functions={f"{reward}:constant": 1.0}, workers=1)),
    }


class Reductions(TorchDispatchMode):
    """Counts the calls in which FSDP2 adds up gradients: one for each of its units."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith("c10d::_reduce_scatter_base_")
        return func(*args, **(kwargs or {}))


def run(config: Config, device: torch.device, folder: Path) -> dict[str, object]:
    with build_grader(config.reward) as grader:
        parts = build_parts(config, load_inputs(config, grader), grader, device, folder=folder, log=None)
        trainer = Trainer(config, parts, total_steps=10)
        if isinstance(parts.budget, GresoBudget):
            parts.budget.alike = {prompt.id: (9, "hard") for prompt in parts.data.first(8)[1:]}
        start, forwards, gradients = whole_weights(parts), [], []
        parts.policy.head.register_forward_hook(lambda *_: forwards.append(1))
        parts.optimizer.register_step_pre_hook(lambda *_: gradients.append(whole_gradient(parts)))
        with Reductions() as reductions:
            metrics = trainer.step()
        counts = {"forwards": len(forwards), "reductions": reductions.count}
        return {"start": start, "metrics": metrics, "weights": whole_weights(parts), "gradients": gradients, **counts}


def whole_weights(parts: Parts) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in full_weights(parts.policy)}


def whole_gradient(parts: Parts) -> torch.Tensor:
    gradients = (p.grad for p in parts.policy.parameters())
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in gradients])


def main() -> None:
    out, model, data, reward = sys.argv[1:]
    torch.set_num_threads(1)
    device = distributed.start()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(config, device, Path(folder)) for name, config in scenarios(model, data, reward).items()}
    if distributed.rank() == 0:
        torch.save(results, out)
    distributed.stop()


if __name__ == "__main__":
    main()
