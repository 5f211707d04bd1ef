"""The settings that make a method: how many rollouts, how they are weighed, which are trained on."""

from dataclasses import dataclass
from typing import Literal

from .rules import not_negative, require

AdvantagePreset = Literal["trl", "verl", "fastrl", "rloo", "dr_grpo"]
DeadGroups = Literal["drop", "posterior_z", "posterior_centered", "posterior_const"]
BudgetKind = Literal["fixed", "ars", "aero", "aero_ars", "knapsack", "greso", "dppo", "reinforce_ada"]
PruneMethod = Literal[
    "none",
    "mdap",
    "mdap_seed",
    "maxmin",
    "dpp",
    "match",
    "random",
    "cppo",
    "cppo_batch",
    "pods",
    "dppo",
    "balanced",
    "aero",
    "aero_mdap",
]

STAGED = ("aero", "aero_ars", "reinforce_ada")
"""Budgets that ask for more rollouts after seeing rewards."""
ARS = ("ars", "aero_ars")
"""Budgets under the ceiling of FastRL's adaptive rollout sampling."""
BY_OUTCOME = (*STAGED, "knapsack", "greso", "aero_mdap", "balanced")
"""Budgets and prune methods that count right and wrong answers."""
BY_SIMILARITY = ("mdap", "mdap_seed", "aero_mdap")
"""Prune methods that give each dropped rollout a kept one to stand for it."""
ALIGNABLE = (*BY_SIMILARITY, "random", "cppo")
"""Prune methods whose dropped rollouts can come back as they were."""
MATCHABLE = (*BY_SIMILARITY, "maxmin", "dpp", "match", "random", "cppo")
"""Prune methods whose kept rollouts can be weighed to stand for the whole group."""
OVER_KEPT = ("pods", "aero", "aero_mdap")
"""Prune methods whose advantages are those of the chosen subset, unless the config says otherwise."""
EITHER = (*OVER_KEPT, "random", "balanced")
"""Prune methods that choose by outcome or by lot and so may be followed by new statistics."""


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """How many rollouts each prompt gets."""

    kind: BudgetKind = "fixed"
    """`fixed`: the same number for every prompt; `ars`: one number for all, lowered from epoch to epoch (FastRL);
    `aero`: more for prompts without a right answer (reconstruction); `aero_ars`: both; `knapsack`: by expected
    information; `greso`: prompts that are always right or wrong are mostly skipped; `dppo`: prompts without differences
    are skipped by lot, and weigh more when they are not; `reinforce_ada`: rounds until both outcomes were seen."""
    group_size: int = 8
    """Rollouts per prompt; of a staged budget in its first round; of `knapsack` on average."""
    max_group_size: int = 16
    """Most rollouts per prompt of `aero`, `reinforce_ada` and `knapsack`; where `ars` lowers it, its start."""
    min_group_size: int = 2
    """Fewest rollouts per prompt of `ars` and `knapsack`."""
    extra: int = 2
    """Rollouts that `aero` and `reinforce_ada` add to a prompt in one round."""
    skip: float = 0.5
    """Chance with which `dppo` skips a prompt whose last visit showed no differences."""
    until: Literal["positive", "balanced"] = "balanced"
    """`reinforce_ada` ends a prompt with one right answer, or with prune.keep / 2 right and as many wrong."""
    epoch_steps: int | None = None
    """Steps that `ars` and `greso` count as an epoch; by default one pass over the data, or a tenth of a run of less
    than two passes."""
    filter: bool = False
    """Leave out groups whose mean lies outside (filter_low, filter_high) and sample further prompts in their place
    (DAPO's dynamic sampling, EasyR1's online filter)."""
    filter_on: Literal["right", "reward"] = "right"
    """Mean that the filter looks at: the share of right answers, or the weighted reward."""
    filter_low: float = 0.01
    """Groups with a mean of at most this are left out."""
    filter_high: float = 0.99
    """Groups with a mean of at least this are left out."""
    tries: int = 10
    """Times per step that prompts are drawn to replace filtered or skipped ones, the first included."""
    when_short: Literal["train", "skip", "stop"] = "train"
    """When the tries run out: train on the groups there are, skip the step, or stop the run."""

    def __post_init__(self) -> None:
        rule = "2 or greater (a group of one has no advantage)"
        require(self.group_size >= 2, "budget.group_size", rule, self.group_size)
        if self.kind in (*STAGED, "knapsack"):
            rule = f"at least budget.group_size ({self.group_size})"
            require(self.max_group_size >= self.group_size, "budget.max_group_size", rule, self.max_group_size)
        if self.kind in (*ARS, "knapsack"):
            rule = f"from 2 to budget.group_size ({self.group_size})"
            require(2 <= self.min_group_size <= self.group_size, "budget.min_group_size", rule, self.min_group_size)
        require(0 <= self.skip < 1, "budget.skip", "in [0, 1)", self.skip)
        require(self.extra >= 1, "budget.extra", "1 or greater", self.extra)
        require(self.epoch_steps is None or self.epoch_steps >= 1, "budget.epoch_steps", "1 or more", self.epoch_steps)
        rule = f"greater than budget.filter_low ({self.filter_low})"
        require(self.filter_high > self.filter_low, "budget.filter_high", rule, self.filter_high)
        require(self.tries >= 1, "budget.tries", "1 or greater", self.tries)


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    preset: AdvantagePreset = "fastrl"
    """Group normalisation as in: trl (sample std + 1e-4), verl and fastrl (sample std + 1e-6), rloo, dr_grpo (mean
    only)."""
    over: Literal["pool", "kept"] | None = None
    """Rollouts whose mean and deviation count: all that were graded, or those that pruning chose; by default the
    method's own: kept for pods and aero, else pool."""
    dead_groups: DeadGroups = "drop"
    """Advantage of groups without differences, from the posterior success rate u (AERO, reconstruction): posterior_z
    (r - u) / sqrt(u (1 - u)), posterior_centered r - u, posterior_const 2 u - 1; drop: 0."""
    posterior_decay: float = 0.0
    """Share of a prompt's earlier right and wrong answers that its posterior remembers at its next visit; 0 = none."""

    def __post_init__(self) -> None:
        rule = "in [0, 1]"
        require(0 <= self.posterior_decay <= 1, "advantage.posterior_decay", rule, self.posterior_decay)
        if self.posterior_decay > 0:
            rule = "one of the posteriors where advantage.posterior_decay is greater than 0"
            require(self.dead_groups != "drop", "advantage.dead_groups", rule, self.dead_groups)


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Which rollouts are dropped after grading, before any forward pass is spent on them."""

    method: PruneMethod = "mdap"
    """`mdap`: per advantage class keep rollouts that differ from every kept one (paper); `mdap_seed`: that differ from
    the first one (the authors' code); `maxmin`: a share of the group, each the least like those before; `dpp`: a share
    that spans the largest volume; `match`: a share whose weighted sum can come nearest to the group's; `random`: by
    lot; `cppo`: the largest advantages of each group; `cppo_batch`: of the step; `pods`: the most different rewards;
    `dppo`: by lot among small advantages, with weights that undo the lot; `balanced`: as many right as wrong; `aero`:
    as many right as wrong where right ones are rare (reconstruction); `aero_mdap`: aero, then mdap; `none`."""
    similarity: Literal["jaccard", "gradient"] = "jaccard"
    """What the rules up to match call alike, and what weights of match are made of: `jaccard`, the share of common
    n-grams; `gradient`, the cosine of sketches of the rollouts' gradients, from token ids and the sampler's
    logprobs."""
    ngram: int = 1
    """Tokens in a row that jaccard compares, 1 to 4; 1 as in the authors' code."""
    tau: float = 0.8
    """Smallest distance, 1 - similarity and so from 0 to 1, at which two rollouts of one class both stay."""
    keep_fraction: float = 0.5
    """Share of a group that maxmin, dpp, match, random, cppo and pods keep at most, of a step under cppo_batch; chance
    of a rollout with a small advantage under dppo."""
    keep: int = 4
    """Rollouts that balanced keeps of a group, and aero of one that is all right or all wrong."""
    wrong_per_right: float = 1.0
    """Wrong rollouts that aero keeps per right one."""
    align: int = 1
    """Put dropped rollouts back until the number kept is a multiple of this (the authors' code needs it, we do not)."""
    weighting: Literal["none", "multiplicity", "match"] = "none"
    """`multiplicity`: a kept rollout also carries the weight of the pruned ones nearest to it; `match`: weights that
    bring the kept rollouts' sum nearest to that of the whole group, in the space of prune.similarity."""
    divisor: Literal["kept", "all"] = "kept"
    """The loss is divided by the tokens (or sequences) of the kept rollouts, or of all graded ones as without
    pruning."""
    zero_advantage: Literal["drop", "keep"] = "drop"
    """Without a KL term rollouts of advantage 0 have no gradient; `keep` runs them through the update all the same, as
    trainers do that look at no advantage first."""

    def __post_init__(self) -> None:
        require(1 <= self.ngram <= 4, "prune.ngram", "from 1 to 4", self.ngram)
        rule = "1 where prune.similarity is gradient, which looks at single tokens"
        require(self.ngram == 1 or self.similarity == "jaccard", "prune.ngram", rule, self.ngram)
        require(0 <= self.tau <= 1, "prune.tau", "in [0, 1]", self.tau)
        require(0 < self.keep_fraction <= 1, "prune.keep_fraction", "in (0, 1]", self.keep_fraction)
        require(self.keep >= 2, "prune.keep", "2 or greater", self.keep)
        not_negative("prune", wrong_per_right=self.wrong_per_right)
        require(self.align >= 1, "prune.align", "1 or greater", self.align)
        if self.align > 1:
            rule = f"one of {', '.join(ALIGNABLE)} where prune.align is greater than 1"
            require(self.method in ALIGNABLE, "prune.method", rule, self.method)
            rule = "none where prune.align is greater than 1: what comes back would count twice"
            require(self.weighting == "none", "prune.weighting", rule, self.weighting)
        if self.weighting == "multiplicity":
            rule = "none unless prune.method is mdap, mdap_seed or aero_mdap"
            require(self.method in (*BY_SIMILARITY, "none"), "prune.weighting", rule, self.weighting)
        if self.weighting == "match":
            rule = f"none or multiplicity unless prune.method is one of {', '.join(MATCHABLE)}"
            require(self.method in (*MATCHABLE, "none"), "prune.weighting", rule, self.weighting)


def advantages_over(advantage: AdvantageConfig, prune: PruneConfig) -> str:
    """`pool` or `kept`: the rollouts whose statistics make the advantages."""
    return advantage.over or ("kept" if prune.method in OVER_KEPT else "pool")


def check_method(budget: BudgetConfig, advantage: AdvantageConfig, prune: PruneConfig, *, right: str) -> None:
    """Raise ValueError for parts that contradict each other; `right` names the reward that tells right from wrong."""
    by_outcome = budget.kind in BY_OUTCOME or prune.method in BY_OUTCOME or advantage.dead_groups != "drop"
    if by_outcome or (budget.filter and budget.filter_on == "right"):
        rule = "the name of a reward that grades answers, as this method counts right and wrong ones"
        require(right != "format", "reward.right", rule, right)
    rule = f"pool where prune.method is {prune.method}, which chooses by advantage"
    require(advantage.over != "kept" or prune.method in EITHER, "advantage.over", rule, advantage.over)
    if budget.filter:
        rule = "drop where budget.filter leaves dead groups out"
        require(advantage.dead_groups == "drop", "advantage.dead_groups", rule, advantage.dead_groups)
    least = {"random": 1, "cppo": 1, "maxmin": 1, "dpp": 1, "match": 1, "pods": 2}.get(prune.method, 0)
    smallest = budget.min_group_size if budget.kind in (*ARS, "knapsack") else budget.group_size
    rule = f"at least {least} / {smallest}, so that {prune.method} keeps {least} of the smallest group"
    require(prune.keep_fraction * smallest >= least, "prune.keep_fraction", rule, prune.keep_fraction)
