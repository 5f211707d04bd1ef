"""Which rollouts of a group are worth a forward pass, decided from rewards, advantages and token ids alone."""

from ..advantage import reassign_advantages
from ..drop_reasons import DROP_REASONS, FREE, SIMILAR, UNGRADED
from ..method_config import AdvantageConfig, PruneConfig, advantages_over
from ..types import Group, Rollout
from .align import Offer, offers, put_back
from .diverse import choose_diverse
from .extremes import Size, cut_step, largest_advantages, largest_variance, sizes
from .fidelity import measure_fidelity
from .lots import at_random, small_at_random
from .outcomes import balance, reject
from .rule import Dice, Rule
from .similarity import advantage_classes, drop_similar
from .weights import match_weights

__all__ = [
    "DROP_REASONS",
    "FREE",
    "SIMILAR",
    "UNGRADED",
    "Offer",
    "Size",
    "advantage_classes",
    "counted",
    "cut_step",
    "measure_fidelity",
    "offers",
    "prune",
    "put_back",
    "sizes",
]

METHODS: dict[str, tuple[Rule, ...]] = {
    "none": (),
    "mdap": (drop_similar,),
    "mdap_seed": (drop_similar,),
    "maxmin": (choose_diverse,),
    "dpp": (choose_diverse,),
    "match": (choose_diverse,),
    "random": (at_random,),
    "cppo": (largest_advantages,),
    "cppo_batch": (),
    "pods": (largest_variance,),
    "dppo": (small_at_random,),
    "balanced": (balance,),
    "aero": (reject,),
    "aero_mdap": (reject, drop_similar),
}
"""The rules of each method in their order; that of cppo_batch needs all ranks and comes after (`cut_step`)."""


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
    taken anew after the method's first rule. At the end weights are multiplied by their group's, and without a KL term
    (`kl` false) kept rollouts of zero advantage are marked FREE, which changes no gradient, unless the config keeps
    them. Lots are drawn by (seed, step, prompt, index) alone.
    """
    advantage = advantage or AdvantageConfig()
    dice = Dice(seed, step)
    for number, rule in enumerate(METHODS[config.method]):
        rule(groups, config, dice)
        if number == 0 and advantages_over(advantage, config) == "kept":
            reassign_advantages(groups, preset=advantage.preset)
    if config.weighting == "match":
        match_weights(groups, config)
    free = not kl and config.zero_advantage == "drop"
    for group in groups:
        for rollout in group.rollouts:
            rollout.weight *= group.weight
            if rollout.kept and rollout.advantage == 0 and free:
                rollout.drop_reason = FREE


def counted(rollout: Rollout) -> bool:
    """Whether the rollout's tokens are in a divisor of the loss that is made of kept rollouts."""
    return rollout.kept or rollout.drop_reason == FREE
