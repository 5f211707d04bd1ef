"""What one step did, in numbers: sums on each rank, added over ranks once, and the means made of them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import distributed
from .config import RewardTerm
from .drop_reasons import DROP_REASONS
from .types import Group


def rollout_sums(groups: list[Group], terms: Sequence[RewardTerm]) -> dict[str, float]:
    """Sums over this rank's groups; the names are the same on every rank whatever the groups hold."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    graded = [rollout for rollout in rollouts if rollout.graded]
    kept = [rollout for rollout in rollouts if rollout.kept]
    alive = [group for group in groups if not group.dead]
    sums = {
        "groups": float(len(groups)),
        "groups_dead": float(sum(group.dead for group in groups)),
        "generated": float(len(rollouts)),
        "graded": float(len(graded)),
        "kept": float(len(kept)),
        "groups_kept": float(sum(any(rollout.kept for rollout in group.rollouts) for group in groups)),
        "alive_kept": float(sum(rollout.kept for group in alive for rollout in group.rollouts)),
        "fidelity": sum(group.fidelity * sum(rollout.kept for rollout in group.rollouts) for group in alive),
        "reward": sum(rollout.reward for rollout in graded),
        "reward_square": sum(rollout.reward**2 for rollout in graded),
        "tokens_prompt": float(sum(len(group.prompt.token_ids) for group in groups)),
        "tokens_generated": float(sum(len(rollout.completion_ids) for rollout in rollouts)),
        "tokens_graded": float(sum(len(rollout.completion_ids) for rollout in graded)),
        "tokens_trained": float(sum(len(rollout.completion_ids) for rollout in kept)),
        "truncated": float(sum(rollout.finish_reason == "length" for rollout in rollouts)),
    }
    for term in terms:
        values = [v for rollout in rollouts if (v := rollout.rewards[term.name]) is not None]
        sums[f"reward/{term.name}"] = sum(values)
        sums[f"graded/{term.name}"] = float(len(values))
    for reason in DROP_REASONS:
        dropped = [rollout for rollout in rollouts if rollout.drop_reason == reason]
        name = reason.replace(" ", "_")
        sums[f"dropped/{name}"] = float(len(dropped))
        sums[f"dropped_tokens/{name}"] = float(sum(len(rollout.completion_ids) for rollout in dropped))
    return sums


def add_up(sums: dict[str, float], update_sums: dict[str, Tensor]) -> dict[str, float]:
    """Both kinds of sums, added over all ranks; `update_sums` leave their device in one copy."""
    on_host = torch.tensor(list(sums.values()), dtype=torch.float64)
    moved = torch.stack([value.detach().double() for value in update_sums.values()]).cpu()
    everywhere = distributed.all_sum(torch.cat([on_host, moved]))
    return dict(zip([*sums, *update_sums], everywhere.tolist(), strict=True))


AS_THEY_ARE = ("dropped/", "dropped_tokens/", "flops/", "flops_saved/", "flops_shared/", "grader/")
"""Sums that are metrics under their own names."""


def step_metrics(sums: dict[str, float], terms: Sequence[RewardTerm]) -> dict[str, float]:
    """Means and shares by their public names, from sums over all ranks; what is a mean over trained tokens or groups is
    left out where there were none."""
    rewards, generated = _ratio(sums["reward"], sums["graded"]), sums["generated"]
    variance = _ratio(sums["reward_square"], sums["graded"]) - rewards**2
    metrics = {
        "reward/mean": rewards,
        "reward/std": math.sqrt(max(variance, 0.0)),
        "groups/count": sums["groups"],
        "groups/dead": sums["groups_dead"],
        "rollouts/generated": generated,
        "rollouts/graded": sums["graded"],
        "rollouts/kept": sums["kept"],
        "rollouts/kept_fraction": _ratio(sums["kept"], generated),
        "tokens/prompt": sums["tokens_prompt"],
        "tokens/generated": sums["tokens_generated"],
        "tokens/graded": sums["tokens_graded"],
        "tokens/trained": sums["tokens_trained"],
        "completion/length": _ratio(sums["tokens_generated"], generated),
        "completion/truncated_fraction": _ratio(sums["truncated"], generated),
        "loss/value": sums["loss"],
    }
    metrics |= {f"reward/{t.name}": _ratio(sums[f"reward/{t.name}"], sums[f"graded/{t.name}"]) for t in terms}
    metrics |= {name: value for name, value in sums.items() if name.startswith(AS_THEY_ARE)}
    if sums["groups_kept"]:
        metrics["groups/effective_size"] = sums["kept"] / sums["groups_kept"]
    if sums["alive_kept"]:
        metrics["prune/fidelity"] = sums["fidelity"] / sums["alive_kept"]
    if tokens := sums["update_tokens"]:
        metrics |= {name: sums[key] / tokens for name, key in UPDATE_MEANS.items() if key in sums}
    return metrics


UPDATE_MEANS = {
    "policy/entropy": "entropy",
    "policy/ratio": "ratio",
    "policy/clipped_low": "clipped_low",
    "policy/clipped_high": "clipped_high",
    "policy/kl": "kl",
    "policy/sampler_gap": "sampler_gap",
    "policy/importance": "importance",
    "policy/importance_cut": "importance_cut",
    "policy/logprobs_above_zero": "above_zero",
}
"""Means over the tokens of all updates of a step; sampler_gap is |logprob - rollout_logprob|, not 0 after an update."""


def rollout_records(groups: list[Group], step: int) -> list[dict[str, Any]]:
    """One record per rollout for rollouts.jsonl."""
    return [
        {
            "step": step,
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "answer": group.prompt.columns.get("answer"),
            "completion": rollout.text,
            "tokens": len(rollout.completion_ids),
            "finish_reason": rollout.finish_reason,
            "rewards": rollout.rewards,
            "reward": None if math.isnan(rollout.reward) else rollout.reward,
            "advantage": rollout.advantage,
            "weight": rollout.weight,
            "kept": rollout.kept,
            "drop_reason": rollout.drop_reason,
        }
        for group in groups
        for rollout in group.rollouts
    ]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
