"""Which rollouts of a group are worth a forward pass, decided from rewards, advantages and token ids alone."""

from ..advantage import reassign_advantages
from ..drop_reasons import DROP_REASONS, FREE, SIMILAR, UNGRADED
from ..method_config import AdvantageConfig, PruneConfig, advantages_over
from ..types import Group, Rollout
from .align import Offer, offers, put_back
from .extremes import largest_advantages, largest_variance
from .lots import at_random, small_at_random
from .outcomes import balance, reject
from .rule import Dice, Rule
from .similarity import advantage_classes, drop_similar

__all__ = [
    "DROP_REASONS",
    "FREE",
    "SIMILAR",
    "UNGRADED",
    "Offer",
    "advantage_classes",
    "counted",
    "offers",
    "prune",
    "put_back",
]

METHODS: dict[str, tuple[Rule, ...]] = {
    "none": (),
    "mdap": (drop_similar,),
    "mdap_seed": (drop_similar,),
    "random": (at_random,),
    "cppo": (largest_advantages,),
    "pods": (largest_variance,),
    "dppo": (small_at_random,),
    "balanced": (balance,),
    "aero": (reject,),
    "aero_mdap": (reject, drop_similar),
}
"""The rules of each method in their order."""


def prune(
    groups: list[Group],
    config: PruneConfig,
    advantage: AdvantageConfig | None = None,
    *,
    kl: bool,
    seed: int = 0,
    step: int = 0,
) -> None:
    """Set `drop_reason` and `weight` of every rollout by the rules of `config.method` (docs/pruning.md).

    Advantages stay those of the full group, unless `advantage` says they are those of the kept rollouts: then they are
    taken anew after the method's first rule. Without a KL term (`kl` false) kept rollouts of zero advantage are then
    marked FREE, which changes no gradient. Lots are drawn by (seed, step, prompt, index) alone.
    """
    advantage = advantage or AdvantageConfig()
    dice = Dice(seed, step)
    for number, rule in enumerate(METHODS[config.method]):
        rule(groups, config, dice)
        if number == 0 and advantages_over(advantage, config) == "kept":
            reassign_advantages(groups, preset=advantage.preset)
    if not kl:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            if rollout.kept and rollout.advantage == 0:
                rollout.drop_reason = FREE


def counted(rollout: Rollout) -> bool:
    """Whether the rollout's tokens are in a divisor of the loss that is made of kept rollouts."""
    return rollout.kept or rollout.drop_reason == FREE
