"""Pruning and budgets for loops of one's own: flat arrays in, numpy or torch, and the same kind out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .advantage import Posterior, assign_advantages
from .budget import Outcome, build_budget
from .config import BudgetConfig, Config, DataConfig, ModelConfig
from .method_config import BY_OUTCOME, AdvantageConfig, PruneConfig, check_method
from .prune import cut_step, offers, prune, put_back, sizes
from .types import Group, Prompt, Rollout

Array: TypeAlias = Tensor | np.ndarray | Sequence[Any]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What became of N rollouts; tensors on the device of the rewards where these were one, else numpy arrays."""

    advantages: Any
    """[N] float32: of whole groups, unless the method takes them anew; 0 where a reward is NaN."""
    kept: Any
    """[N] bool: worth a forward and backward pass."""
    weights: Any
    """[N] float32: factor of the rollout's whole loss; 0 where it is not kept."""


def prune_arrays(
    token_ids: Array,
    cu_seqlens: Array,
    rewards: Array,
    cu_group_sizes: Array,
    config: PruneConfig,
    *,
    advantage: AdvantageConfig | None = None,
    logprobs: Array | None = None,
    right: Array | None = None,
    kl: bool = False,
    seed: int = 0,
    step: int = 0,
) -> Pruned:
    """Return advantages, kept rollouts and weights by the rules of `config.method` (docs/pruning.md).

    Args:
        token_ids: [T] whole numbers, the completions' tokens back to back, without prompts and padding.
        cu_seqlens: [N + 1] offsets of the completions into `token_ids`, from 0 to T.
        rewards: [N], NaN where a completion could not be graded.
        cu_group_sizes: [G + 1] offsets of the groups into the rollouts, from 0 to N.
        config: which rollouts to drop.
        advantage: how rewards become advantages; by default FastRL's, (r - mean) / (std + 1e-6).
        logprobs: [T] the sampler's, for what compares gradients (`similarity: gradient`, weights of `match`).
        right: [N] bool, for methods that count right and wrong answers.
        kl: whether the loss has a KL term: then rollouts of zero advantage are not free to leave out.
        seed: draws are functions of this, the step and the rollout's place.
        step: see `seed`.

    Raises:
        ValueError: offsets that do not cut, lengths that do not fit, something that the method needs and is not there.
    """
    advantage = advantage or AdvantageConfig()
    _check_given(config, advantage, logprobs=logprobs, right=right)
    groups = _groups(token_ids, cu_seqlens, rewards, cu_group_sizes, logprobs, right)
    assign_advantages(groups, preset=advantage.preset)
    Posterior(advantage).assign(groups)
    prune(groups, config, advantage, kl=kl, seed=seed, step=step)
    if config.method == "cppo_batch":
        cut_step(groups, sizes(groups), keep_fraction=config.keep_fraction)
    if config.align > 1:
        put_back(groups, offers(groups, kl=kl), multiple=config.align)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return Pruned(
        _like(rewards, [rollout.advantage for rollout in rollouts], torch.float32),
        _like(rewards, [rollout.kept for rollout in rollouts], torch.bool),
        _like(rewards, [rollout.weight * rollout.kept for rollout in rollouts], torch.float32),
    )


def _check_given(
    config: PruneConfig, advantage: AdvantageConfig, *, logprobs: Array | None, right: Array | None
) -> None:
    check_method(BudgetConfig(group_size=1000), advantage, config, right="right")
    by_outcome = config.method in BY_OUTCOME or advantage.dead_groups != "drop"
    if by_outcome and right is None:
        raise ValueError(f"right must be given where prune.method is {config.method}, which counts right answers")
    if logprobs is None and config.similarity == "gradient":
        raise ValueError("logprobs must be given where prune.similarity is gradient")


class ArrayBudget:
    """How many rollouts each prompt gets, for a sampler of one's own; prompts are named by ids that stay the same.

    `total_steps` and `prompts`, the number of prompts in the data, tell budgets that change from epoch to epoch where
    they are. Raises ValueError for settings that contradict each other.
    """

    def __init__(
        self, config: BudgetConfig, *, prompts: int, prompts_per_step: int, total_steps: int, seed: int = 0
    ) -> None:
        whole = Config(
            model=ModelConfig(path="none"),
            data=DataConfig(path="none", prompts_per_step=prompts_per_step),
            budget=config,
            max_steps=total_steps,
            seed=seed,
        )
        self.total_steps = total_steps
        self._budget = build_budget(whole, prompts=prompts)

    def plan(self, ids: Sequence[str], *, step: int) -> np.ndarray:
        """[P] int64: rollouts of each prompt's first round in this step, counted from 0; 0 skips the prompt."""
        return np.array(self._budget.plan([_prompt(i) for i in ids], step=step), dtype=np.int64)

    def extend(self, ids: Sequence[str], rewards: Array, cu_group_sizes: Array, *, right: Array) -> np.ndarray:
        """[P] int64: further rollouts of each prompt after seeing these; ask again until all are 0."""
        groups = _graded(ids, rewards, cu_group_sizes, right)
        return np.array(self._budget.extend(groups), dtype=np.int64)

    def observe(
        self,
        ids: Sequence[str],
        rewards: Array,
        cu_group_sizes: Array,
        *,
        right: Array,
        step: int,
        kept: Array | None = None,
    ) -> None:
        """Learn from a whole step, counted from 0: [N] rewards and right answers of all its groups, and what pruning
        kept (by default all), which is what `ars` goes by."""
        groups = _graded(ids, rewards, cu_group_sizes, right)
        if kept is not None:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            for rollout, stays in zip(rollouts, _one_each("kept", kept, len(rollouts)), strict=True):
                rollout.drop_reason = "" if stays else "dropped"
        outcomes = [Outcome.of(group) for group in groups]
        self._budget.observe(outcomes, step=step + 1, total_steps=self.total_steps)

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as JSON holds it."""
        return self._budget.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._budget.load_state_dict(state)


def _graded(ids: Sequence[str], rewards: Array, cu_group_sizes: Array, right: Array) -> list[Group]:
    """Groups without texts: budgets look at outcomes alone."""
    count = len(_list(rewards))
    groups = _groups([0] * count, range(count + 1), rewards, cu_group_sizes, None, right)
    if len(groups) != len(ids):
        raise ValueError(f"ids must be one per group ({len(groups)}), got {len(ids)}")
    for group, name in zip(groups, ids, strict=True):
        group.prompt = _prompt(name)
    return groups


def _groups(
    token_ids: Array,
    cu_seqlens: Array,
    rewards: Array,
    cu_group_sizes: Array,
    logprobs: Array | None,
    right: Array | None,
) -> list[Group]:
    tokens, scores = _list(token_ids), _list(rewards)
    borders = _borders("cu_seqlens", cu_seqlens, len(tokens), parts=len(scores))
    chances = _one_each("logprobs", logprobs, len(tokens)) or [0.0] * len(tokens)
    answers = _one_each("right", right, len(scores)) or [False] * len(scores)
    rollouts = [
        Rollout(tokens[a:b], chances[a:b], "stop", reward=float(score), right=bool(answer))
        for (a, b), score, answer in zip(pairwise(borders), scores, answers, strict=True)
    ]
    cuts = _borders("cu_group_sizes", cu_group_sizes, len(rollouts))
    return [Group(_prompt(str(n)), rollouts[a:b], number=n) for n, (a, b) in enumerate(pairwise(cuts))]


def _prompt(name: str) -> Prompt:
    return Prompt(id=name, token_ids=[], text="", columns={})


def _borders(name: str, values: Array, end: int, *, parts: int | None = None) -> list[int]:
    borders = [int(value) for value in _list(values)]
    rising = all(a <= b for a, b in pairwise(borders))
    if not borders or borders[0] != 0 or borders[-1] != end or not rising:
        raise ValueError(f"{name} must rise from 0 to {end}, got {borders!r:.60}")
    if parts is not None and len(borders) != parts + 1:
        raise ValueError(f"{name} must have one border more than there are rewards ({parts}), got {len(borders)}")
    return borders


def _one_each(name: str, values: Array | None, count: int) -> list[Any]:
    given = [] if values is None else _list(values)
    if values is not None and len(given) != count:
        raise ValueError(f"{name} must have {count} entries, got {len(given)}")
    return given


def _list(values: Array) -> list[Any]:
    return values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)


def _like(example: Array, values: list[Any], dtype: torch.dtype) -> Any:
    """The values as a tensor on the example's device, or as a numpy array where the example is no tensor."""
    made = torch.tensor(values, dtype=dtype)
    return made.to(example.device) if isinstance(example, Tensor) else made.numpy()
