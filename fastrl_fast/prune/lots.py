"""Rules that draw lots."""

from ..drop_reasons import LOT
from ..method_config import PruneConfig
from ..types import Group
from .rule import Dice, keep_only, members, share


def at_random(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Keep floor(keep_fraction x n) of each group's n graded rollouts, at least one (FastRL's random baseline)."""
    for group in groups:
        own = members(group)
        keep_only(group, dice.some(group, own, max(1, share(len(own), config.keep_fraction))), LOT)


def small_at_random(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Keep a rollout whose |A| is below its group's mean with chance keep_fraction and weight 1 / keep_fraction.

    The expected weighted sum over the kept ones is the sum over all, with a divisor of all. After DPPO (arXiv
    2603.04135), whose formula we have not seen: where the border lies is our guess, and there is no lot over prompts
    (algorithms.md 3.4).
    """
    for group in groups:
        own = members(group)
        mean = sum(abs(group.rollouts[i].advantage) for i in own) / max(1, len(own))
        small = [i for i in own if abs(group.rollouts[i].advantage) < mean]
        for i in small:
            if dice.roll(group, i) < config.keep_fraction:
                group.rollouts[i].weight /= config.keep_fraction
            else:
                group.rollouts[i].drop_reason = LOT
