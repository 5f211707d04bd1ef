"""Rules that keep what stands out."""

from dataclasses import dataclass
from itertools import accumulate

from ..drop_reasons import ALIKE, FREE, SMALL
from ..method_config import PruneConfig
from ..types import Group
from .rule import Dice, keep_only, members, share


def largest_advantages(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Keep the floor(keep_fraction x n) largest |A| of each group, at least one, the earliest on ties.

    CPPO (arXiv 2503.22342) per prompt, as FastRL's baseline has it; CPPO's own code is `cut_step`.
    """
    for group in groups:
        own = sorted(members(group), key=lambda i: -abs(group.rollouts[i].advantage))
        keep_only(group, own[: max(1, share(len(own), config.keep_fraction))], SMALL)


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """One graded rollout of the step: -|A| first, so that sorting puts the largest first and the earliest on ties."""

    minus_size: float
    group: int
    index: int


def sizes(groups: list[Group]) -> list[Size]:
    """What `cut_step` needs to know of a rank's groups, those of zero advantage included."""
    return [
        Size(-abs(rollout.advantage), group.number, index)
        for group in groups
        for index, rollout in enumerate(group.rollouts)
        if rollout.kept or rollout.drop_reason == FREE
    ]


def cut_step(groups: list[Group], everywhere: list[Size], *, keep_fraction: float) -> None:
    """Keep the floor(keep_fraction x N) largest |A| of the step's N graded rollouts, at least one (CPPO's own code,
    arXiv 2503.22342: one cut over the whole batch). `everywhere` are the sizes of all ranks."""
    chosen = sorted(everywhere)[: max(1, share(len(everywhere), keep_fraction))]
    places = {(size.group, size.index) for size in chosen}
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            if (rollout.kept or rollout.drop_reason == FREE) and (group.number, index) not in places:
                rollout.drop_reason = SMALL


def largest_variance(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Keep the floor(keep_fraction x n) rollouts of each group, at least two, whose rewards vary most (PODS, arXiv
    2504.13818)."""
    for group in groups:
        own = members(group)
        rewards = [group.rollouts[i].reward for i in own]
        size = min(len(own), max(2, share(len(own), config.keep_fraction)))
        keep_only(group, [own[i] for i in max_variance_subset(rewards, size)], ALIKE)


def max_variance_subset(values: list[float], size: int) -> list[int]:
    """Indices of the `size` values with the largest variance, in O(n log n).

    An optimal subset is the k highest and the size - k lowest values for some k: scan k with prefix sums, from the even
    split outwards, so that ties end with as many high as low ones.
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    # Around the mean, so that the sums of squares do not cancel.
    mean = sum(values) / max(1, len(values))
    centred = [values[i] - mean for i in order]
    sums = [0.0, *accumulate(centred)]
    squares = [0.0, *accumulate(value * value for value in centred)]
    best, best_high = -1.0, 0
    for high in sorted(range(size + 1), key=lambda high: abs(2 * high - size)):
        low, top = size - high, len(values) - high
        total = sums[low] + sums[-1] - sums[top]
        spread = squares[low] + squares[-1] - squares[top] - total * total / max(1, size)
        if spread > best * (1 + 1e-12):
            best, best_high = spread, high
    return sorted(order[: size - best_high] + order[len(values) - best_high :])
