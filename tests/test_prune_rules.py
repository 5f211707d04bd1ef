"""Rules other than MDAP: closed forms, brute force, and lots that belong to (seed, step, prompt)."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.advantage import assign_advantages
from fastrl_fast.budget.dppo import DppoBudget
from fastrl_fast.config import AdvantageConfig, PruneConfig
from fastrl_fast.drop_reasons import FREE, LOT, REJECTED, SMALL, UNGRADED
from fastrl_fast.packing import to_train_group
from fastrl_fast.prune import cut_step, offers, prune, put_back, sizes
from fastrl_fast.prune.extremes import max_variance_subset
from fastrl_fast.types import Group, Prompt, Rollout


def make_group(rewards: list[float], *, prompt_id: str = "p", number: int = 0) -> Group:
    rollouts = [Rollout([i + 1, i + 2], [-1.0, -1.0], "stop", reward=r, right=r >= 1) for i, r in enumerate(rewards)]
    group = Group(Prompt(prompt_id, [1, 2], "text", {}), rollouts, number=number)
    assign_advantages([group], preset="fastrl")
    return group


def kept(group: Group) -> list[int]:
    return [i for i, r in enumerate(group.rollouts) if r.kept]


def pruned(rewards: list[float], config: PruneConfig, *, advantage: AdvantageConfig | None = None, **draws) -> Group:
    group = make_group(rewards)
    prune([group], config, advantage, kl=True, **draws)
    return group


def rewards_of(group: Group) -> list[float]:
    return [group.rollouts[i].reward for i in kept(group)]


@given(
    values=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5]) | st.floats(-3, 3), min_size=1, max_size=9),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_max_variance_subset_equals_brute_force(values, data):
    """PODS: the scan over k highest and m - k lowest."""
    size = data.draw(st.integers(1, len(values)))
    found = max_variance_subset(values, size)
    assert len(set(found)) == size
    best = max(statistics.pvariance(choice) for choice in itertools.combinations(values, size))
    assert statistics.pvariance([values[i] for i in found]) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_pods_of_binary_rewards_is_half_and_half():
    """3.2: m / 2 right and m / 2 wrong, and advantages over these: +-sqrt(3) / 2 for two and two."""
    group = pruned([1.0] * 5 + [0.0] * 3, PruneConfig(method="pods", keep_fraction=0.5))
    assert sorted(rewards_of(group)) == [0.0, 0.0, 1.0, 1.0]
    for i in kept(group):
        sign = 1 if group.rollouts[i].right else -1
        assert group.rollouts[i].advantage == pytest.approx(sign * math.sqrt(3) / 2, rel=1e-5)
    pool = pruned([1.0] * 5 + [0.0] * 3, PruneConfig(method="pods"), advantage=AdvantageConfig(over="pool"))
    full = make_group([1.0] * 5 + [0.0] * 3)
    assert [r.advantage for r in pool.rollouts] == [r.advantage for r in full.rollouts]


def test_pods_of_ungraded_and_few():
    assert kept(pruned([1.0, math.nan, 0.0, math.nan], PruneConfig(method="pods", keep_fraction=0.5))) == [0, 2]
    assert kept(pruned([math.nan] * 3, PruneConfig(method="pods"))) == []


def test_cppo_keeps_the_largest_advantages():
    """3.1: 7 right, 1 wrong: |A| is 2.475 for the wrong one and 0.354 for the others; ties go to the earliest."""
    group = pruned([1.0] * 6 + [0.0, 1.0], PruneConfig(method="cppo", keep_fraction=0.5))
    assert kept(group) == [0, 1, 2, 6]
    assert group.rollouts[6].advantage == pytest.approx(-2.475, abs=1e-3)
    assert group.rollouts[0].advantage == pytest.approx(0.354, abs=1e-3)
    assert len(kept(pruned([1.0, 0.0, 0.5], PruneConfig(method="cppo", keep_fraction=0.3)))) == 1


def step_of_groups() -> list[Group]:
    return [
        make_group([1.0] * 7 + [0.0], prompt_id="a", number=1),
        make_group([1.0, 0.0] * 4, prompt_id="b", number=0),
        make_group([1.0] * 4, prompt_id="c", number=2),
        make_group([math.nan, 0.25, 0.75], prompt_id="d", number=3),
    ]


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kl", [True, False])
def test_cppo_over_the_step_is_one_cut(fraction, kl):
    """3.1: top k of |A| over the flat batch, so that a group of small advantages may lose more than its share."""
    groups = step_of_groups()
    prune(groups, PruneConfig(method="cppo_batch", keep_fraction=fraction), kl=kl)
    # Two ranks with two groups each must agree with one rank that has them all.
    everywhere = [*sizes(groups[2:]), *sizes(groups[:2])]
    for group in groups:
        cut_step([group], everywhere, keep_fraction=fraction)
    flat = [(g.number, i, abs(r.advantage)) for g in groups for i, r in enumerate(g.rollouts) if r.graded]
    chosen = sorted(flat, key=lambda one: (-one[2], one[0], one[1]))[: max(1, math.floor(len(flat) * fraction + 1e-9))]
    places = {(number, index) for number, index, _ in chosen}
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            expected = "" if kl or rollout.advantage else FREE
            expected = expected if (group.number, index) in places else SMALL
            assert rollout.drop_reason == (expected if rollout.graded else UNGRADED)


def test_cppo_over_the_step_by_hand():
    """2.475 of the lone wrong one, then .935 of four right and four wrong, then .707: .354 comes last."""
    groups = step_of_groups()
    cut_step(groups, sizes(groups), keep_fraction=0.5)
    assert [kept(group) for group in groups] == [[7], list(range(8)), [], [1, 2]]
    assert kept(pruned([1.0] * 7 + [0.0], PruneConfig(method="cppo"))) == [0, 1, 2, 7], "a group alone keeps its half"


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_random_pruning_is_uniform_and_repeatable(fraction):
    config = PruneConfig(method="random", keep_fraction=fraction)
    counts = [0] * 8
    for step in range(400):
        group = pruned([1.0] * 4 + [0.0] * 4, config, seed=1, step=step)
        assert len(kept(group)) == 8 * fraction
        assert kept(group) == kept(pruned([0.0, 1.0] * 4, config, seed=1, step=step)), "blind to rewards"
        for i in kept(group):
            counts[i] += 1
    deviation = math.sqrt(400 * fraction * (1 - fraction))
    assert all(abs(count - 400 * fraction) < 4 * deviation for count in counts)


def test_lots_differ_by_seed_step_and_prompt():
    config = PruneConfig(method="random")
    first = make_group([0.0, 1.0] * 8, prompt_id="a"), make_group([0.0, 1.0] * 8, prompt_id="b")
    prune(list(first), config, kl=True, seed=1, step=1)
    alone = make_group([0.0, 1.0] * 8, prompt_id="b")
    prune([alone], config, kl=True, seed=1, step=1)
    others = [pruned([0.0, 1.0] * 8, config, seed=s, step=t) for s, t in ((1, 2), (2, 1))]
    assert kept(alone) == kept(first[1])
    assert len({tuple(kept(g)) for g in (*first, *others)}) == 4


def test_dppo_is_unbiased():
    """3.4: the weighted sum over the kept has the mean of the sum over all, and its divisor does not move."""
    config = PruneConfig(method="dppo", keep_fraction=0.4, divisor="all")
    rewards = [1.0, 0.2, 0.4, 0.5, 0.6, 0.3, 0.9, 0.0]
    whole = make_group(rewards)
    values = [3.0, -1.0, 2.0, 0.5, -2.0, 1.5, 4.0, -0.5]
    truth = sum(r.advantage * v for r, v in zip(whole.rollouts, values, strict=True))
    trials = []
    for step in range(4000):
        group = make_group(rewards)
        prune([group], config, kl=True, seed=0, step=step)
        trials.append(sum(r.weight * r.advantage * v for r, v in zip(group.rollouts, values, strict=True) if r.kept))
        assert to_train_group(group, divisor="all").loss_tokens == 16
    assert abs(statistics.fmean(trials) - truth) < 4 * statistics.stdev(trials) / math.sqrt(len(trials))
    mean = statistics.fmean(abs(r.advantage) for r in whole.rollouts)
    for before, after in zip(whole.rollouts, group.rollouts, strict=True):
        small = abs(before.advantage) < mean
        assert after.kept or (small and after.drop_reason == LOT)
        assert not after.kept or after.weight == (2.5 if small else 1.0)


def test_dppo_is_unbiased_exactly(monkeypatch):
    """3.4: over all outcomes of the lots over prompts and over small advantages, each times its chance, the weighted
    sum w_q w_o A v of what is trained on is the sum A v over everything."""
    skip, keep = 0.4, 0.3
    rewards = {"a": [1.0, 0.2, 0.4], "b": [1.0, 0.0], "c": [0.9, 0.1, 0.3]}
    values = {"a": [3.0, -1.0, 2.0], "b": [0.5, 4.0], "c": [1.0, -2.0, 7.0]}
    config = PruneConfig(method="dppo", keep_fraction=keep, divisor="all")
    budget = DppoBudget(2, skip=skip, seed=0)
    # What a and c last showed were no differences; b is new.
    budget.load_state_dict({"dead": ["a", "c"]})
    whole = {name: make_group(given, prompt_id=name) for name, given in rewards.items()}
    truth = sum(r.advantage * v for name, g in whole.items() for r, v in zip(g.rollouts, values[name], strict=True))
    lots: dict[tuple[str, str, int], bool] = {}
    # A lot that falls on "low" is below its chance; what it decides is asked for below.
    monkeypatch.setattr(
        "fastrl_fast.budget.dppo.draw", lambda seed, step, what, name: 0.0 if lots[what, name, 0] else 0.99
    )
    monkeypatch.setattr(
        "fastrl_fast.prune.rule.draw", lambda seed, step, what, name, i: 0.0 if lots[what, name, i] else 0.99
    )
    small = {
        (name, i)
        for name, g in whole.items()
        for i, r in enumerate(g.rollouts)
        if abs(r.advantage) < statistics.fmean(abs(r.advantage) for r in g.rollouts)
    }
    assert len(small) >= 2
    questions = [("dppo", "a", 0), ("dppo", "c", 0), *(("prune", name, i) for name, i in sorted(small))]
    expected = total_chance = 0.0
    for answers in itertools.product([True, False], repeat=len(questions)):
        lots.update(zip(questions, answers, strict=True))
        chance = math.prod(
            (low if answer else 1 - low)
            for (what, _, _), answer in zip(questions, answers, strict=True)
            for low in [skip if what == "dppo" else keep]
        )
        groups = [make_group(given, prompt_id=name) for name, given in rewards.items()]
        planned = budget.plan([g.prompt for g in groups], step=3)
        sampled = [g for g, size in zip(groups, planned, strict=True) if size]
        for group in sampled:
            group.weight = budget.weight(group.prompt)
        prune(sampled, config, kl=True)
        expected += chance * sum(
            r.weight * r.advantage * v
            for g in sampled
            for r, v in zip(g.rollouts, values[g.prompt.id], strict=True)
            if r.kept
        )
        total_chance += chance
    assert total_chance == pytest.approx(1.0)
    assert expected == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(
    ("k", "right", "expected"), [(1.0, 2, (2, 2)), (2.0, 2, (2, 4)), (1.0, 3, (3, 3)), (3.0, 3, (3, 5))]
)
def test_aero_rejects_wrong_answers_where_right_ones_are_rare(k, right, expected):
    """Reconstruction, 2.4: all c right ones and k c wrong ones."""
    group = pruned([1.0] * right + [0.0] * (8 - right), PruneConfig(method="aero", wrong_per_right=k))
    assert (rewards_of(group).count(1.0), rewards_of(group).count(0.0)) == expected
    assert all(r.kept or r.drop_reason == REJECTED for r in group.rollouts)


def test_aero_one_rescued_of_sixteen():
    """1 right + 1 wrong stay; over the kept set they are +-0.707, over the pool +3.75 and -0.25."""
    rewards = [0.0] * 10 + [1.0] + [0.0] * 5
    group = pruned(rewards, PruneConfig(method="aero"))
    assert sorted(group.rollouts[i].advantage for i in kept(group)) == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    pool = pruned(rewards, PruneConfig(method="aero"), advantage=AdvantageConfig(over="pool"))
    assert kept(pool) == kept(group)
    assert sorted(pool.rollouts[i].advantage for i in kept(pool)) == pytest.approx([-0.25, 3.75], abs=1e-4)


def test_aero_keeps_half_right_and_better_groups_whole():
    for right in (4, 7):
        assert kept(pruned([1.0] * right + [0.0] * (8 - right), PruneConfig(method="aero"))) == list(range(8))


def test_aero_keeps_some_of_a_dead_group():
    for reward in (0.0, 1.0):
        assert len(kept(pruned([reward] * 16, PruneConfig(method="aero", keep=4)))) == 4
    assert len(kept(pruned([0.0] * 3, PruneConfig(method="aero", keep=4)))) == 3


def test_aero_counts_right_answers_and_not_rewards():
    """Half a point for the format makes no answer right: such a group is all wrong, though not dead."""
    group = pruned([0.5, 0.0, 0.0, 0.5, 0.5, 0.0], PruneConfig(method="aero", keep=4))
    assert len(kept(group)) == 4 and not group.dead


def test_aero_then_mdap_prunes_what_rejection_left():
    group = make_group([1.0, 1.0, *[0.0] * 6])
    for rollout in group.rollouts:
        rollout.completion_ids, rollout.rollout_logprobs = [7, 8], [-1.0, -1.0]
    prune([group], PruneConfig(method="aero_mdap", weighting="multiplicity"), kl=False)
    assert sorted(rewards_of(group)) == [0.0, 1.0]
    assert [group.rollouts[i].weight for i in kept(group)] == [2.0, 2.0]
    advantages = sorted(group.rollouts[i].advantage for i in kept(group))
    assert advantages == pytest.approx([-0.866, 0.866], abs=1e-3), "of the two and two that rejection kept"


@pytest.mark.parametrize(
    ("right", "wrong", "expected"), [(5, 3, (2, 2)), (1, 7, (1, 3)), (8, 0, (4, 0)), (0, 8, (0, 4)), (1, 1, (1, 1))]
)
def test_balanced_fills_from_the_other_side(right, wrong, expected):
    """Reinforce-Ada: n / 2 + n / 2, advantages r - mean of the whole pool."""
    group = make_group([1.0] * right + [0.0] * wrong)
    assign_advantages([group], preset="dr_grpo")
    prune([group], PruneConfig(method="balanced", keep=4), AdvantageConfig(preset="dr_grpo"), kl=True)
    assert (rewards_of(group).count(1.0), rewards_of(group).count(0.0)) == expected
    for i in kept(group):
        rollout = group.rollouts[i]
        assert rollout.advantage == pytest.approx(rollout.reward - right / (right + wrong), abs=1e-6)


def aligned(multiple: int, *, kl: bool = True) -> list[Group]:
    groups = [make_group([1.0, 0.0, 0.0, 0.0, 0.5, 1.0], number=1), make_group([1.0, 0.0] * 3, number=0)]
    for group in groups:
        for rollout in group.rollouts:
            rollout.completion_ids, rollout.rollout_logprobs = [5], [-1.0]
    prune(groups, PruneConfig(align=multiple), kl=kl)
    # Two ranks with a group each must agree with one rank that has both.
    everywhere = [*offers(groups[:1], kl=kl), *offers(groups[1:], kl=kl)]
    for group in groups:
        put_back([group], everywhere, multiple=multiple)
    return groups


@pytest.mark.parametrize(("multiple", "total"), [(1, 5), (5, 5), (6, 6), (7, 7), (8, 8), (11, 11), (12, 12)])
def test_alignment(multiple, total):
    """1.2, step 4: rollouts come back, round-robin over groups, largest |A| first."""
    later, earlier = aligned(multiple)
    assert len(kept(later)) + len(kept(earlier)) == total
    back_later, back_earlier = len(kept(later)) - 3, len(kept(earlier)) - 2
    assert back_earlier - back_later in (0, 1) or total == 12
    if total == 7:
        assert kept(earlier) == [0, 1, 2] and kept(later) == [0, 1, 4, 5], "the right one of |A| 1.3 before wrong ones"


def test_alignment_ends_where_nothing_is_left():
    groups = aligned(100)
    assert [len(kept(g)) for g in groups] == [6, 6]


def test_the_divisor_counts_a_group_by_its_weight():
    group = make_group([1.0, 0.0])
    group.weight = 2.0
    prune([group], PruneConfig(method="none"), kl=False)
    for divisor in ("all", "kept"):
        train = to_train_group(group, divisor=divisor)
        assert (train.loss_tokens, train.loss_sequences) == (8, 4)
        assert [sequence.weight for sequence in train.sequences] == [2.0, 2.0]


def test_divisor_of_all_does_not_move_with_pruning():
    group = make_group([1.0, 0.0, 0.0, math.nan, 0.0])
    before = to_train_group(group, divisor="all")
    prune([group], PruneConfig(method="cppo", keep_fraction=0.5), kl=False)
    after, fewer = to_train_group(group, divisor="all"), to_train_group(group)
    assert (before.loss_tokens, before.loss_sequences) == (after.loss_tokens, after.loss_sequences) == (8, 4)
    assert (fewer.loss_tokens, fewer.loss_sequences) == (4, 2)


def test_no_rule_minds_empty_and_ungraded_groups():
    for method in (
        "random",
        "cppo",
        "pods",
        "dppo",
        "balanced",
        "aero",
        "aero_mdap",
        "mdap",
        "maxmin",
        "dpp",
        "match",
        "none",
    ):
        groups = [make_group([]), make_group([math.nan, math.nan]), make_group([1.0]), make_group([1.0, 1.0])]
        prune(groups, PruneConfig(method=method), kl=False)
        assert not any(r.kept for g in groups for r in g.rollouts), "nothing teaches anything here"
        assert {r.drop_reason for r in groups[1].rollouts} == {UNGRADED}
        assert FREE in {r.drop_reason for r in groups[3].rollouts}
