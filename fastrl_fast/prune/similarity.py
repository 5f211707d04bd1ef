"""FastRL's rule: rollouts that are like a kept one of the same advantage go (arXiv 2609.36932, MDAP)."""

import torch

from .. import ops
from ..drop_reasons import SIMILAR
from ..method_config import PruneConfig
from ..types import Group
from .rule import Dice

CLASS_WIDTH = 1e-4
"""Advantages closer than this are one class (paper, section on continuous rewards)."""


def drop_similar(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Per advantage class walk the rollouts in sampling order and keep one when its Jaccard distance to the kept ones
    (`mdap`) or to the class's first (`mdap_seed`) reaches `config.tau`.

    With `multiplicity` a kept rollout weighs 1 + the number of dropped rollouts nearest to it.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    classes = [label for group in groups for label in advantage_classes(group)]
    kept, representative = ops.select_diverse(
        torch.tensor([token for r in rollouts for token in r.completion_ids], dtype=torch.int64),
        _borders([len(r.completion_ids) for r in rollouts]),
        _borders([len(group.rollouts) for group in groups]),
        torch.tensor(classes, dtype=torch.int64),
        rule="mdap_seed" if config.method == "mdap_seed" else "mdap",
        tau=config.tau,
    )
    for index, (rollout, stays) in enumerate(zip(rollouts, kept.tolist(), strict=True)):
        if rollout.kept and not stays:
            rollout.drop_reason = SIMILAR
            if config.weighting == "multiplicity":
                rollouts[int(representative[index])].weight += 1.0


def advantage_classes(group: Group) -> list[int]:
    """Label each rollout with its advantage class, 0, 1, ... from the lowest advantage; -1 where it is not kept so
    far."""
    order = sorted((r.advantage, i) for i, r in enumerate(group.rollouts) if r.kept)
    labels = [-1] * len(group.rollouts)
    label, first = -1, float("-inf")
    for advantage, index in order:
        if advantage - first >= CLASS_WIDTH:
            label, first = label + 1, advantage
        labels[index] = label
    return labels


def _borders(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
