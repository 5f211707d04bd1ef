"""Rules that keep what stands out."""

from itertools import accumulate

from ..drop_reasons import ALIKE, SMALL
from ..method_config import PruneConfig
from ..types import Group
from .rule import Dice, keep_only, members, share


def largest_advantages(groups: list[Group], config: PruneConfig, dice: Dice) -> None:
    """Keep the floor(keep_fraction x n) largest |A| of each group, at least one, the earliest on ties.

    CPPO (arXiv 2503.22342) per prompt, as FastRL's baseline has it; CPPO's own code cuts over the whole batch.
    """
    for group in groups:
        own = sorted(members(group), key=lambda i: -abs(group.rollouts[i].advantage))
        keep_only(group, own[: max(1, share(len(own), config.keep_fraction))], SMALL)


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
