"""Which rollouts of a group are worth a forward pass, decided from rewards and token ids alone."""

import torch

from . import ops
from .config import PruneConfig
from .types import Group, Rollout

CLASS_WIDTH = 1e-4
"""Advantages closer than this are one class (paper, section on continuous rewards)."""

FREE = "zero advantage"
"""Drop reason of rollouts whose gradient is exactly zero: they cost no forward pass, yet count in the loss's
divisor."""

SIMILAR = "similar"
"""Drop reason of rollouts too close to a kept one of the same advantage."""

UNGRADED = "ungraded"
"""Drop reason of rollouts that no reward could be given to."""

DROP_REASONS = (UNGRADED, SIMILAR, FREE)


def prune(groups: list[Group], config: PruneConfig, *, kl: bool) -> None:
    """Set `drop_reason` and `weight` of every rollout; advantages stay those of the full group (FastRL, section MDAP).

    Per advantage class the rule walks the rollouts in sampling order and keeps one when its Jaccard distance to the
    kept ones (`mdap`) or to the class's first (`mdap_seed`) reaches `config.tau`. With `multiplicity` a kept rollout
    weighs 1 + the number of pruned rollouts nearest to it. Without a KL term (`kl` false) kept rollouts of zero
    advantage are then marked FREE, which changes no gradient.
    """
    if config.method != "none":
        _drop_similar(groups, config)
    if not kl:
        for rollout in _kept(groups):
            if rollout.advantage == 0:
                rollout.drop_reason = FREE


def counted(rollout: Rollout) -> bool:
    """Whether the rollout's tokens are in the divisor of the loss."""
    return rollout.kept or rollout.drop_reason == FREE


def _kept(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts if rollout.kept]


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


def _drop_similar(groups: list[Group], config: PruneConfig) -> None:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    classes = [label for group in groups for label in advantage_classes(group)]
    kept, representative = ops.select_diverse(
        torch.tensor([token for r in rollouts for token in r.completion_ids], dtype=torch.int64),
        _borders([len(r.completion_ids) for r in rollouts]),
        _borders([len(group.rollouts) for group in groups]),
        torch.tensor(classes, dtype=torch.int64),
        rule=config.method,
        tau=config.tau,
    )
    for index, (rollout, stays) in enumerate(zip(rollouts, kept.tolist(), strict=True)):
        if rollout.kept and not stays:
            rollout.drop_reason = SIMILAR
            if config.weighting == "multiplicity":
                rollouts[int(representative[index])].weight += 1.0


def _borders(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
