"""Advantages of groups: the same formula in NumPy-free Python, invariances, and groups that teach nothing."""

import copy
import json
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.advantage import Posterior, assign_advantages, reassign_advantages
from fastrl_fast.budget import Outcome
from fastrl_fast.config import AdvantageConfig, PruneConfig
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


def posterior(kind: str, rewards: list[float], *, decay: float = 0.0, memory: Outcome | None = None) -> list[float]:
    made = Posterior(AdvantageConfig(dead_groups=kind, posterior_decay=decay))
    if memory:
        made.observe([memory])
    g = group(rewards)
    for rollout in g.rollouts:
        rollout.right = rollout.reward == 1.0
    assign_advantages([g], preset="fastrl")
    made.assign([g])
    return advantages(g)


@pytest.mark.parametrize("n", [2, 8, 16])
def test_posterior_closed_forms(n):
    """algorithms.md 2.3 (a reconstruction of AERO): +-1 / sqrt(n + 1); r - u is +-1 / (n + 2); 2 u - 1."""
    for right in (0.0, 1.0):
        sign = 1 if right else -1
        assert posterior("posterior_z", [right] * n) == pytest.approx([sign / math.sqrt(n + 1)] * n)
        assert posterior("posterior_centered", [right] * n) == pytest.approx([sign / (n + 2)] * n)
        assert posterior("posterior_const", [right] * n) == pytest.approx([sign * n / (n + 2)] * n)
        assert posterior("drop", [right] * n) == [0.0] * n


def test_posterior_published_numbers():
    assert posterior("posterior_z", [1.0] * 8)[0] == pytest.approx(0.333, abs=5e-4)
    assert posterior("posterior_z", [0.0] * 16)[0] == pytest.approx(-0.243, abs=5e-4)
    assert posterior("posterior_centered", [1.0] * 8)[0] == pytest.approx(0.1)
    assert posterior("posterior_const", [0.0] * 16)[0] == pytest.approx(-0.889, abs=5e-4)


def test_posterior_leaves_live_groups_and_ungraded_rollouts_alone():
    live = [1.0, 0.0, 0.0]
    assert posterior("posterior_z", live) == pytest.approx(truth(live, "fastrl"), rel=1e-5)
    values = posterior("posterior_z", [1.0, math.nan, 1.0])
    assert values == pytest.approx([1 / math.sqrt(3), 0.0, 1 / math.sqrt(3)])
    assert posterior("posterior_z", [math.nan, math.nan]) == [0.0, 0.0]


def test_posterior_remembers_earlier_visits():
    """a = 1 + d c, b = 1 + d (n - c): four right and four wrong before, half remembered, make u of 2 right 5 / 8."""
    before = Outcome("p", 8, 8, 4, False, 8, True)
    values = posterior("posterior_z", [1.0, 1.0], decay=0.5, memory=before)
    assert values == pytest.approx([math.sqrt(3 / 5)] * 2)
    assert posterior("posterior_z", [1.0, 1.0], decay=0.0, memory=before) == pytest.approx([1 / math.sqrt(3)] * 2)


def test_posterior_memory_is_state():
    config = AdvantageConfig(dead_groups="posterior_z", posterior_decay=0.9)
    first, second = Posterior(config), Posterior(config)
    first.observe([Outcome("p", 8, 8, 3, False, 8, True), Outcome("q", 8, 7, 0, True, 8, True)])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for made in (first, second):
        made.observe([Outcome("p", 8, 8, 8, True, 8, True)])
    assert second.memory == first.memory
    assert first.memory["p"] == pytest.approx((0.9 * (0.9 * 3 + 8), 0.81 * 5))


def test_dead_groups_with_a_posterior_are_trained_on():
    """What is dead in comparison is not dead for the update."""
    g = group([1.0] * 4)
    for rollout in g.rollouts:
        rollout.right = True
    assign_advantages([g], preset="fastrl")
    Posterior(AdvantageConfig(dead_groups="posterior_z")).assign([g])
    prune([g], PruneConfig(method="none"), kl=False)
    assert g.dead and all(r.kept for r in g.rollouts)
    reassign_advantages([g], preset="fastrl")
    assert advantages(g) == pytest.approx([1 / math.sqrt(5)] * 4), "statistics over the kept ones do not undo it"


def test_advantages_over_kept_rollouts():
    g = group([1.0, 0.0, 0.0, 1.0, 0.0])
    assign_advantages([g], preset="fastrl")
    g.rollouts[1].drop_reason = g.rollouts[3].drop_reason = "rejected"
    reassign_advantages([g], preset="fastrl")
    expected = truth([1.0, 0.0, 0.0], "fastrl")
    assert advantages(g) == pytest.approx([expected[0], 0.0, expected[1], 0.0, expected[2]], rel=1e-5)
    assert [r.drop_reason for r in g.rollouts] == ["", "rejected", "", "rejected", ""]
