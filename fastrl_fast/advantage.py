"""Advantages of whole groups, taken before anything is pruned."""

import math

import torch

from . import ops
from .config import AdvantagePreset
from .prune import UNGRADED
from .types import Group


def assign_advantages(groups: list[Group], *, preset: AdvantagePreset) -> None:
    """Set `advantage` of every rollout and `dead` of every group from the group's rewards.

    Rollouts without a completion token count as not graded: they have nothing that could be reinforced. Not graded
    rollouts (reward NaN) stay out of the group's moments, get advantage 0 and the drop reason `ungraded`.
    """
    rewards, borders = [], [0]
    for group in groups:
        for rollout in group.rollouts:
            if not rollout.completion_ids:
                rollout.reward = math.nan
            rewards.append(rollout.reward)
        borders.append(len(rewards))
    advantages, dead = ops.group_advantage(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(borders, dtype=torch.int64), preset=preset
    )
    values = iter(advantages.tolist())
    for group, group_dead in zip(groups, dead.tolist(), strict=True):
        group.dead = group_dead
        for rollout in group.rollouts:
            rollout.advantage = next(values)
            if math.isnan(rollout.reward):
                rollout.drop_reason = UNGRADED
