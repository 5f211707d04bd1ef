"""Advantages of groups: the same formula in NumPy-free Python, invariances, and groups that teach nothing."""

import copy
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.advantage import assign_advantages
from fastrl_fast.config import PruneConfig
from fastrl_fast.prune import UNGRADED, prune
from fastrl_fast.types import Group, Prompt, Rollout


def group(rewards: list[float], *, prompt_id: str = "p", tokens: int = 2) -> Group:
    rollouts = [Rollout(list(range(tokens)), [-1.0] * tokens, "stop", reward=r) for r in rewards]
    return Group(Prompt(prompt_id, [1], "same text", {}), rollouts)


def advantages(g: Group) -> list[float]:
    return [r.advantage for r in g.rollouts]


def truth(rewards: list[float], preset: str) -> list[float]:
    graded = [r for r in rewards if not math.isnan(r)]
    if len(graded) < 2 or max(graded) == min(graded):
        return [0.0] * len(rewards)
    mean, std, n = statistics.fmean(graded), statistics.stdev(graded), len(graded)
    one = {
        "trl": lambda r: (r - mean) / (std + 1e-4),
        "verl": lambda r: (r - mean) / (std + 1e-6),
        "fastrl": lambda r: (r - mean) / (std + 1e-6),
        "rloo": lambda r: r - (sum(graded) - r) / (n - 1),
        "dr_grpo": lambda r: r - mean,
    }[preset]
    return [0.0 if math.isnan(r) else one(r) for r in rewards]


REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.5, math.nan]), st.floats(-5, 5))


@pytest.mark.parametrize("preset", ["trl", "verl", "fastrl", "rloo", "dr_grpo"])
@given(groups=st.lists(st.lists(REWARD, max_size=9), max_size=5))
@settings(max_examples=40, deadline=None)
def test_equals_the_formula_group_by_group(preset, groups):
    """A04: no statistics across prompts."""
    made = [group(rewards) for rewards in groups]
    assign_advantages(made, preset=preset)
    for g, rewards in zip(made, groups, strict=True):
        expected = truth(rewards, preset)
        # Where rewards differ by rounding alone, float64 statistics are no truth: the size is bounded all the same.
        assert advantages(g) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        graded = [r for r in rewards if not math.isnan(r)]
        assert g.dead == (len(graded) < 2 or max(graded) == min(graded))


def test_published_numbers():
    """A04 and algorithms.md 1.7: 7 right, 1 wrong."""
    two = [group([0.0, 1.0]), group([10.0, 11.0])]
    assign_advantages(two, preset="fastrl")
    assert advantages(two[0]) == advantages(two[1]) == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    eight = group([1.0] * 7 + [0.0])
    assign_advantages([eight], preset="fastrl")
    assert advantages(eight) == pytest.approx([0.354] * 7 + [-2.475], abs=1e-3)


def test_permuting_permutes():
    """A04."""
    rewards = [0.0, 1.0, 0.25, 1.0, 0.5]
    order = [3, 0, 4, 2, 1]
    a, b, other = group(rewards), group([rewards[i] for i in order]), group([9.0, 1.0])
    assign_advantages([a, other], preset="trl")
    assign_advantages([copy.deepcopy(other), b], preset="trl")
    assert advantages(b) == pytest.approx([advantages(a)[i] for i in order], rel=1e-6)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.35, 0.4, 0.7, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 7, 8])
def test_equal_rewards_give_exactly_zero(value, size):
    """A01: a one-pass float32 variance leaves a residue that the division blows up."""
    g = group([value] * size)
    assign_advantages([g], preset="fastrl")
    assert advantages(g) == [0.0] * size and g.dead


def test_duplicate_prompts_stay_two_groups():
    """A07: grouping by text would see rewards 1 and 0 for one prompt."""
    same = [group([1.0] * 4, prompt_id="1"), group([0.0] * 4, prompt_id="2")]
    assign_advantages(same, preset="fastrl")
    assert all(g.dead and advantages(g) == [0.0] * 4 for g in same)


def test_group_of_one_and_group_that_shrank_to_one():
    """A03."""
    small = [group([1.0]), group([1.0, math.nan, math.nan]), group([])]
    assign_advantages(small, preset="fastrl")
    assert all(g.dead for g in small)
    assert [a for g in small for a in advantages(g)] == [0.0] * 4


def test_ungraded_rollouts_stay_out_of_the_moments():
    g = group([0.0, math.nan, 1.0])
    assign_advantages([g], preset="fastrl")
    assert advantages(g) == pytest.approx([-0.70711, 0.0, 0.70711], abs=1e-4)
    assert [r.drop_reason for r in g.rollouts] == ["", UNGRADED, ""]


def test_a_completion_without_tokens_counts_as_ungraded():
    """P04: nothing in it could be reinforced, whatever its reward."""
    g = group([0.0, 1.0, 1.0])
    g.rollouts[2].completion_ids, g.rollouts[2].rollout_logprobs = [], []
    assign_advantages([g], preset="fastrl")
    assert advantages(g) == pytest.approx([-0.70711, 0.70711, 0.0], abs=1e-4)
    assert g.rollouts[2].drop_reason == UNGRADED and math.isnan(g.rollouts[2].reward)


def test_pruning_does_not_recompute_advantages():
    """A05: they are those of the full group."""
    g = group([1.0] + [0.0] * 7)
    assign_advantages([g], preset="fastrl")
    before = advantages(g)
    prune([g], PruneConfig(), kl=False)
    assert sum(r.kept for r in g.rollouts) == 2, "eight equal texts: one of each class"
    assert advantages(g) == before == pytest.approx(truth([1.0] + [0.0] * 7, "fastrl"), rel=1e-6)


def test_rewards_that_cancel_make_a_dead_group():
    """L16, A06: what counts is the total, within the group."""
    totals = [a + b for a, b in zip([1.0, -1.0], [-1.0, 1.0], strict=True)]
    g = group(totals)
    assign_advantages([g], preset="fastrl")
    assert g.dead


def test_dead_group_rate_follows_from_accuracy():
    """P18: P(dead) = p^G + (1 - p)^G, here by counting every outcome of a group."""
    p = 0.1819
    for size, expected in ((2, 0.702), (4, 0.449), (8, 0.201)):
        outcomes = [[float(n >> i & 1) for i in range(size)] for n in range(2**size)]
        groups = [group(rewards) for rewards in outcomes]
        assign_advantages(groups, preset="fastrl")
        chance = sum(
            math.prod(p if r else 1 - p for r in rewards) for rewards, g in zip(outcomes, groups, strict=True) if g.dead
        )
        assert chance == pytest.approx(expected, abs=1e-3)


def test_no_groups():
    """Z02."""
    assign_advantages([], preset="fastrl")
