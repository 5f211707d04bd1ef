"""What a prune rule is: it sets drop reasons and weights of kept rollouts, group by group."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..draws import draw
from ..method_config import PruneConfig
from ..types import Group


@dataclass(frozen=True, slots=True)
class Dice:
    """Draws of a step."""

    seed: int
    step: int

    def roll(self, group: Group, index: int) -> float:
        """A number in [0, 1) that belongs to one rollout."""
        return draw(self.seed, self.step, "prune", group.prompt.id, index)

    def some(self, group: Group, members: list[int], count: int) -> list[int]:
        """`count` of the members, each as likely as any other, or all if there are fewer."""
        return sorted(members, key=lambda index: self.roll(group, index))[:count]


Rule = Callable[[list[Group], PruneConfig, Dice], None]


def members(group: Group) -> list[int]:
    """Indices of the rollouts that are kept so far."""
    return [index for index, rollout in enumerate(group.rollouts) if rollout.kept]


def keep_only(group: Group, chosen: list[int], reason: str) -> None:
    """Drop the kept rollouts that are not chosen."""
    for index in set(members(group)) - set(chosen):
        group.rollouts[index].drop_reason = reason


def share(count: int, fraction: float) -> int:
    """floor(count x fraction), as one would by hand: 0.29 x 100 is 29."""
    return math.floor(count * fraction + 1e-9)
