"""Public bug reports about advantages, each on its smallest input."""

import math
from dataclasses import replace

import pytest
import torch

from fastrl_fast import ops
from fastrl_fast.advantage import assign_advantages
from fastrl_fast.config import BudgetConfig, PruneConfig
from fastrl_fast.packing import pack, to_train_group
from fastrl_fast.prune import FREE, UNGRADED, prune
from fastrl_fast.types import Group, Prompt, Rollout

PRESETS = ("trl", "verl", "fastrl", "rloo", "dr_grpo")


def group(rewards: list[float], name: str = "p") -> Group:
    rollouts = [Rollout([i, i + 50], [-1.0] * 2, "stop", reward=reward) for i, reward in enumerate(rewards)]
    return Group(Prompt(name, [1], "the same text", {}), rollouts)


def assigned(rewards: list[float], preset: str = "fastrl") -> Group:
    made = group(rewards)
    assign_advantages([made], preset=preset)
    return made


def values(made: Group) -> list[float]:
    return [rollout.advantage for rollout in made.rollouts]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.35, 0.4, 0.7])
def test_A01_equal_rewards_that_are_not_exact_give_zero(reward: float, preset: str) -> None:
    made = assigned([reward] * 8, preset)
    assert values(made) == [0.0] * 8 and made.dead
    odd = assigned([reward] * 7 + [reward + 1.0], preset)
    assert max(map(abs, values(odd))) < 8


@pytest.mark.parametrize("rewards", [[1.0], [1.0, math.nan, math.nan], [math.nan] * 3])
def test_A03_a_group_of_one_is_dead(rewards: list[float]) -> None:
    made = assigned(rewards)
    assert values(made) == [0.0] * len(rewards) and made.dead
    with pytest.raises(ValueError, match="group of one has no advantage"):
        BudgetConfig(group_size=1)


def test_A04_statistics_stay_within_a_prompt() -> None:
    groups = [group([0.0, 1.0]), group([10.0, 11.0])]
    assign_advantages(groups, preset="fastrl")
    (a, b), (c, d) = map(values, groups)
    assert -a == b and (a, b) == (c, d) and b > 0


def test_A05_advantages_are_of_the_whole_group() -> None:
    made = assigned([1.0] + [0.0] * 7)
    before = values(made)
    prune([made], PruneConfig(method="random", keep=4), kl=False)
    assert values(made) == before


def test_A06_dead_is_a_matter_of_the_group_whatever_the_scaling() -> None:
    for preset in PRESETS:
        dead, live = group([0.5, 0.5]), group([0.0, 1.0])
        assign_advantages([dead, live], preset=preset)
        assert dead.dead and not live.dead
        prune([dead], PruneConfig(method="none"), kl=True)
        assert all(rollout.kept for rollout in dead.rollouts), "a KL term needs them"


def test_A07_a_prompt_that_comes_twice_is_two_groups() -> None:
    groups = [group([1.0] * 4, "1"), group([0.0] * 4, "2")]
    assign_advantages(groups, preset="fastrl")
    assert all(made.dead and values(made) == [0.0] * 4 for made in groups)


def test_A09_every_column_follows_the_rollouts_that_stay() -> None:
    made = assigned([float(i) for i in range(8)])
    for place, rollout in enumerate(made.rollouts):
        rollout.drop_reason = "" if place in (0, 3, 5) else "similar"
        rollout.rollout_logprobs = [-float(place)] * 2
    kept = to_train_group(made).sequences
    assert [s.completion_ids[0] for s in kept] == [-int(s.rollout_logprobs[0]) for s in kept] == [0, 3, 5]
    assert [s.advantage for s in kept] == [made.rollouts[i].advantage for i in (0, 3, 5)]
    with pytest.raises(AssertionError, match="every completion token"):
        pack([replace(kept[0], rollout_logprobs=[0.0])])


def test_Z02_nothing_is_an_answer() -> None:
    borders = torch.zeros(1, dtype=torch.int64)
    advantages, dead = ops.group_advantage(torch.zeros(0, dtype=torch.float64), borders, preset="fastrl")
    assert advantages.shape == dead.shape == (0,)
    logprobs, entropy = ops.packed_logprobs(torch.zeros(0, 4), torch.zeros(9, 4), torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)
    assert pack([]).targets.shape == (0,)


def test_R31_a_completion_without_tokens_has_no_reward_and_no_gradient() -> None:
    made = group([10.0, 0.0])
    made.rollouts[0].completion_ids, made.rollouts[0].rollout_logprobs = [], []
    assign_advantages([made], preset="fastrl")
    assert values(made) == [0.0, 0.0] and made.dead and made.rollouts[0].drop_reason == UNGRADED
    assert [len(s.completion_ids) for s in to_train_group(made).sequences] == [2]


def test_L16_rewards_that_cancel_are_dead() -> None:
    made = assigned([a + b for a, b in zip([1.0, -1.0], [-1.0, 1.0], strict=True)])
    assert made.dead
    prune([made], PruneConfig(method="none"), kl=False)
    assert {rollout.drop_reason for rollout in made.rollouts} == {FREE}
