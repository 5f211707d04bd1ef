"""Rules that choose by right and wrong."""

import math

from ..drop_reasons import REJECTED
from ..method_config import PruneConfig
from ..types import Group
from .rule import Dice, keep_only, members


def reject(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """AERO's rejection (a reconstruction; algorithms.md 2.4).

    A group that is all right or all wrong keeps `config.keep` rollouts. With fewer than half right, all c right ones
    and floor(wrong_per_right c) wrong ones stay. Other groups stay whole. Which ones stay is drawn by lot.
    """
    for group in groups:
        own = members(group)
        right = [i for i in own if group.rollouts[i].right]
        wrong = [i for i in own if not group.rollouts[i].right]
        if not right or not wrong:
            keep_only(group, dice.some(group, own, config.keep), REJECTED)
        elif len(right) < len(own) / 2:
            few = dice.some(group, wrong, math.floor(config.wrong_per_right * len(right)))
            keep_only(group, right + few, REJECTED)


def balance(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Keep `config.keep` rollouts of each group, half right and half wrong, filled up from the other side where one is
    short; drawn by lot (Reinforce-Ada's down-sampling, arXiv 2510.04996)."""
    for group in groups:
        own = members(group)
        right = [i for i in own if group.rollouts[i].right]
        wrong = [i for i in own if not group.rollouts[i].right]
        from_right = min(len(right), max(config.keep // 2, config.keep - len(wrong)))
        chosen = dice.some(group, right, from_right) + dice.some(group, wrong, config.keep - from_right)
        keep_only(group, chosen, REJECTED)
