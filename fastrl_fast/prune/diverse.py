"""Rules that keep the share of a group that stands for all of it best (ours; algorithms.md 1.7)."""

import math
from collections import defaultdict

import torch

from .. import ops
from ..drop_reasons import UNCHOSEN
from ..method_config import PruneConfig
from ..types import Group
from .rule import Dice, keep_only, members, share
from .vectors import borders, similarity_vectors


def choose_diverse(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Keep at most floor(keep_fraction x n), at least one, of each group's n graded rollouts by the greedy rule
    `config.method` of `ops.choose_rollouts`: maxmin, dpp or match, over advantage times vector.

    `dpp` and `match` keep fewer where the rest adds nothing. A group whose advantages are all 0 keeps its first ones.
    """
    by_count: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        by_count[max(1, share(len(members(group)), config.keep_fraction))].append(group)
    for count, alike in by_count.items():
        # An advantage that is not finite keeps a rollout out of the choice.
        advantages = [r.advantage if r.kept else math.nan for group in alike for r in group.rollouts]
        choice = ops.choose_rollouts(
            similarity_vectors(alike, config),
            torch.tensor(advantages, dtype=torch.float32),
            borders([len(group.rollouts) for group in alike]),
            rule=config.method,
            k=count,
        )
        kept = iter(choice.kept.tolist())
        for group in alike:
            chosen = [index for index, _ in enumerate(group.rollouts) if next(kept)]
            pushes = any(rollout.advantage != 0 for rollout in group.rollouts)
            keep_only(group, chosen if pushes else members(group)[:count], UNCHOSEN)
