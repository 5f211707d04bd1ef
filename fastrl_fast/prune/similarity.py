"""FastRL's rule: rollouts that are like a kept one of the same advantage go (arXiv 2609.36932, MDAP)."""

import torch

from .. import ops
from ..drop_reasons import SIMILAR
from ..method_config import PruneConfig
from ..types import Group
from .rule import Dice
from .vectors import borders, cosines, gradient_sketches

CLASS_WIDTH = 1e-4
"""Advantages closer than this are one class (paper, section on continuous rewards)."""


def drop_similar(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Per advantage class walk the rollouts in sampling order and keep one when its distance to the kept ones (`mdap`)
    or to the class's first (`mdap_seed`) reaches `config.tau`: 1 - Jaccard, or 1 - cosine of gradient sketches.

    With `multiplicity` a kept rollout weighs 1 + the number of dropped rollouts nearest to it.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    classes = [label for group in groups for label in advantage_classes(group)]
    stands_for = _by_gradient if config.similarity == "gradient" else _by_tokens
    for index, kept in enumerate(stands_for(groups, classes, config)):
        if rollouts[index].kept and kept != index:
            rollouts[index].drop_reason = SIMILAR
            if config.weighting == "multiplicity":
                rollouts[kept].weight += 1.0


def _by_tokens(groups: list[Group], classes: list[int], config: PruneConfig) -> list[int]:
    """For each rollout itself where it stays, else the kept one of its class that is most like it."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    _, representative = ops.select_diverse(
        torch.tensor([token for r in rollouts for token in r.completion_ids], dtype=torch.int64),
        borders([len(r.completion_ids) for r in rollouts]),
        borders([len(group.rollouts) for group in groups]),
        torch.tensor(classes, dtype=torch.int64),
        rule="mdap_seed" if config.method == "mdap_seed" else "mdap",
        tau=config.tau,
        ngram=config.ngram,
    )
    return representative.tolist()


def _by_gradient(groups: list[Group], classes: list[int], config: PruneConfig) -> list[int]:
    """The same by the cosines of gradient sketches."""
    sketches = gradient_sketches(groups)
    answer: list[int] = []
    for group in groups:
        begin, count = len(answer), len(group.rollouts)
        alike = cosines(sketches[begin : begin + count]).tolist()
        labels = classes[begin : begin + count]
        kept: dict[int, list[int]] = {}
        for i, label in enumerate(labels):
            members = kept.setdefault(label, [])
            if config.method == "mdap_seed":
                near = bool(members) and alike[i][members[0]] >= 1 - config.tau
            else:
                near = any(1 - alike[i][j] < config.tau for j in members)
            if not near:
                members.append(i)
        # max takes the first of equals, and members are in order.
        answer += [
            begin + (i if i in kept[label] else max(kept[label], key=lambda j: alike[i][j]))
            for i, label in enumerate(labels)
        ]
    return answer


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
