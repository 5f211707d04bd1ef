"""Flat arrays give what the trainer's own groups give, in whatever kind they come."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fastrl_fast import advantage, prune
from fastrl_fast.arrays import ArrayBudget, prune_arrays
from fastrl_fast.budget import knapsack
from fastrl_fast.config import BudgetConfig, PruneConfig
from fastrl_fast.method_config import AdvantageConfig
from fastrl_fast.types import Group, Prompt, Rollout

TEXTS = [[1, 2, 3], [1, 2, 3], [4, 5], [6], [7, 8, 9], [7, 8], [1, 9], [2, 2, 2]]
CHANCES = [[-0.1 * token for token in text] for text in TEXTS]
REWARDS = [1.0, 1.0, 0.0, math.nan, 0.0, 1.0, 1.0, 0.5]
RIGHT = [True, True, False, False, False, True, True, False]
CUTS = [0, 4, 8]
METHODS = {
    "mdap": PruneConfig(method="mdap", weighting="multiplicity"),
    "none": PruneConfig(method="none"),
    "cppo": PruneConfig(method="cppo", keep_fraction=0.5),
    "pods": PruneConfig(method="pods", keep_fraction=0.5),
    "random": PruneConfig(method="random", keep_fraction=0.5),
    "aero_mdap": PruneConfig(method="aero_mdap", keep=2),
    "match": PruneConfig(method="match", similarity="gradient", weighting="match"),
    "all": PruneConfig(method="mdap", divisor="all", tau=1.0, align=4),
}


def arguments(kind: Callable[[Any], Any] = np.array) -> tuple[Any, ...]:
    tokens = [token for text in TEXTS for token in text]
    return kind(tokens), kind(np.cumsum([0, *map(len, TEXTS)])), kind(REWARDS), kind(CUTS)


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


@pytest.mark.parametrize("name", METHODS)
def test_the_answer_is_that_of_the_trainers_groups(name: str) -> None:
    config, settings = METHODS[name], AdvantageConfig(preset="verl")
    answer = prune_arrays(*arguments(), config, advantage=settings, logprobs=flat(CHANCES), right=RIGHT, seed=3, step=5)
    rollouts = [
        Rollout(text, chances, "stop", reward=reward, right=right)
        for text, chances, reward, right in zip(TEXTS, CHANCES, REWARDS, RIGHT, strict=True)
    ]
    groups = [
        Group(Prompt(str(number), [], "", {}), rollouts[a:b], number=number)
        for number, (a, b) in enumerate(pairwise(CUTS))
    ]
    advantage.assign_advantages(groups, preset="verl")
    prune.prune(groups, config, settings, kl=False, seed=3, step=5)
    if config.align > 1:
        prune.put_back(groups, prune.offers(groups, kl=False), multiple=config.align)
    assert answer.kept.tolist() == [rollout.kept for rollout in rollouts]
    assert answer.advantages.tolist() == pytest.approx([rollout.advantage for rollout in rollouts])
    assert answer.weights.tolist() == pytest.approx([rollout.weight * rollout.kept for rollout in rollouts])
    assert not answer.kept[3], "what could not be graded is not trained on"


def test_torch_comes_back_as_torch_and_everything_else_as_numpy() -> None:
    results = [prune_arrays(*arguments(kind), METHODS["mdap"]) for kind in (torch.as_tensor, np.array, list)]
    assert [type(result.kept) for result in results] == [torch.Tensor, np.ndarray, np.ndarray]
    assert len({tuple(result.kept.tolist()) for result in results}) == 1
    assert results[0].weights.dtype == torch.float32 and results[1].advantages.dtype == np.float32


def test_cppo_over_the_batch_cuts_across_groups() -> None:
    config = PruneConfig(method="cppo_batch", keep_fraction=0.5)
    kept = prune_arrays(*arguments(), config).kept
    # Of the 7 graded ones floor(3.5); the wrong ones of both groups are the farthest from their means.
    assert kept.sum() == 3 and kept[2] and kept[4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: [0, 3, 2]}, "cu_seqlens must rise from 0 to 19"),
        ({1: [0, 19]}, "one border more than there are rewards"),
        ({3: [0, 9]}, "cu_group_sizes must rise from 0 to 8"),
        ({"logprobs": [0.0]}, "logprobs must have 19 entries, got 1"),
        ({"config": PruneConfig(method="balanced")}, "right must be given where prune.method is balanced"),
        ({"config": METHODS["match"]}, "logprobs must be given where prune.similarity is gradient"),
    ],
)
def test_mistakes_are_named(change: dict[Any, Any], message: str) -> None:
    inputs: list[Any] = [*arguments(list), METHODS["mdap"]]
    for place, value in change.items():
        if isinstance(place, int):
            inputs[place] = value
    inputs[4] = change.get("config", inputs[4])
    with pytest.raises(ValueError, match=message):
        prune_arrays(*inputs, logprobs=change.get("logprobs"))


def test_a_budget_learns_from_arrays_and_resumes() -> None:
    config = BudgetConfig(kind="knapsack", group_size=4, min_group_size=2, max_group_size=8)
    ids, right = ["a", "b", "c"], [1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]

    def made() -> ArrayBudget:
        return ArrayBudget(config, prompts=9, prompts_per_step=3, total_steps=30)

    budget, cuts = made(), [0, 4, 8, 12]
    assert budget.plan(ids, step=0).tolist() == [4, 4, 4]
    budget.observe(ids, np.array(right), cuts, right=np.array(right), step=0)
    expected = knapsack.allocate([0.25, 0.5, 1.0], group_size=4, low=2, high=8)
    assert budget.plan(ids, step=1).tolist() == expected and sum(expected) == 12
    other = made()
    other.load_state_dict(budget.state_dict())
    assert other.plan(ids, step=1).tolist() == expected


def test_a_staged_budget_asks_for_more_until_one_is_right() -> None:
    budget = ArrayBudget(
        BudgetConfig(kind="aero", group_size=2, extra=2, max_group_size=3), prompts=2, prompts_per_step=2, total_steps=9
    )
    assert budget.extend(["a", "b"], [0, 0, 1, 0], [0, 2, 4], right=[0, 0, 1, 0]).tolist() == [1, 0]


def test_ars_goes_by_what_was_kept() -> None:
    config = BudgetConfig(kind="ars", group_size=8, epoch_steps=1)
    sizes = []
    for stays in (8, 2):
        budget = ArrayBudget(config, prompts=1, prompts_per_step=1, total_steps=4)
        for step, kept in enumerate((8, stays)):
            mask = np.arange(8) < kept
            budget.observe(["a"], [1.0] * 8, [0, 8], right=[1] * 8, step=step, kept=mask)
        sizes.append(int(budget.plan(["a"], step=2)[0]))
    assert sizes == [8, 2]
    with pytest.raises(ValueError, match=r"ids must be one per group \(1\), got 2"):
        budget.observe(["a", "b"], [1.0] * 8, [0, 8], right=[1] * 8, step=2)
