"""Advantages: of whole groups before anything is pruned, of a chosen subset, or from a posterior success rate."""

import math
from collections.abc import Callable
from typing import Any

import torch

from . import ops
from .budget import Outcome
from .drop_reasons import UNGRADED
from .method_config import AdvantageConfig, AdvantagePreset, DeadGroups
from .types import Group


def assign_advantages(groups: list[Group], *, preset: AdvantagePreset) -> None:
    """Set `advantage` of every rollout and `dead` of every group from the group's rewards.

    Rollouts without a completion token count as not graded: they have nothing that could be reinforced. Not graded
    rollouts (reward NaN) stay out of the group's moments, get advantage 0 and the drop reason `ungraded`.
    """
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if not rollout.graded:
            rollout.reward, rollout.drop_reason = math.nan, UNGRADED
    for group, dead in zip(groups, _assign(groups, preset), strict=True):
        group.dead = dead


def reassign_advantages(groups: list[Group], *, preset: AdvantagePreset) -> None:
    """Advantages of the kept rollouts from their own mean and deviation; dropped ones get 0, dead groups stay as they
    are."""
    _assign([group for group in groups if not group.dead], preset)


def _assign(groups: list[Group], preset: AdvantagePreset) -> list[bool]:
    """Advantages over each group's kept rollouts; returns which groups have no differences among them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward if rollout.kept else math.nan for rollout in rollouts]
    borders = torch.tensor([0, *(len(group.rollouts) for group in groups)], dtype=torch.int64).cumsum(0)
    advantages, dead = ops.group_advantage(torch.tensor(rewards, dtype=torch.float64), borders, preset=preset)
    for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True):
        rollout.advantage = advantage
    return dead.tolist()


POSTERIORS: dict[DeadGroups, Callable[[float, float], float]] = {
    "posterior_z": lambda right, u: (right - u) / math.sqrt(u * (1 - u)),
    "posterior_centered": lambda right, u: right - u,
    "posterior_const": lambda right, u: 2 * u - 1,
}
"""Advantage from right (0 or 1) and the posterior mean u (a reconstruction of AERO; algorithms.md 2.3)."""


class Posterior:
    """Advantages of dead groups from the posterior success rate u = (c + a) / (n + a + b) of c right among n.

    a = b = 1, plus, with `posterior_decay` d > 0, the prompt's earlier right and wrong answers, those of its latest
    visit times d, of the one before times d^2 and so on: this memory is in the checkpoint. Without it the z form of a
    group of n is +1 / sqrt(n + 1) where all are right and -1 / sqrt(n + 1) where all are wrong. AERO's own form is not
    public: this is a reconstruction (algorithms.md 2.3).
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self.kind = config.dead_groups
        self.decay = config.posterior_decay
        self.memory: dict[str, tuple[float, float]] = {}

    def assign(self, groups: list[Group]) -> None:
        """Set the advantages of the graded rollouts of dead groups."""
        if self.kind == "drop":
            return
        form = POSTERIORS[self.kind]
        for group in groups:
            graded = [rollout for rollout in group.rollouts if rollout.graded] if group.dead else []
            right, wrong = self.memory.get(group.prompt.id, (0.0, 0.0))
            for rollout in graded:
                u = (sum(r.right for r in graded) + 1 + right) / (len(graded) + 2 + right + wrong)
                rollout.advantage = form(float(rollout.right), u)

    def observe(self, outcomes: list[Outcome]) -> None:
        """Remember all ranks' outcomes of a step."""
        if self.decay == 0:
            return
        for o in outcomes:
            right, wrong = self.memory.get(o.prompt_id, (0.0, 0.0))
            self.memory[o.prompt_id] = (self.decay * (right + o.right), self.decay * (wrong + o.graded - o.right))

    def state_dict(self) -> dict[str, Any]:
        return {prompt_id: list(counts) for prompt_id, counts in self.memory.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory = {prompt_id: (right, wrong) for prompt_id, (right, wrong) in state.items()}
