"""Pruning: the two rules, weights that keep the balance, and rollouts that may be left out for free."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast import drop_reasons
from fastrl_fast.advantage import assign_advantages
from fastrl_fast.config import LossConfig, PruneConfig
from fastrl_fast.loss import OBJECTIVES, build_objective, policy_loss
from fastrl_fast.model import Policy
from fastrl_fast.packing import Sequence, divisor, pack, to_train_group
from fastrl_fast.prune import DROP_REASONS, FREE, SIMILAR, UNGRADED, advantage_classes, counted, prune
from fastrl_fast.types import Group, Prompt, Rollout


def make_group(texts: list[list[int]], rewards: list[float], prompt_ids: list[int] | None = None) -> Group:
    rollouts = [Rollout(t, [-1.0] * len(t), "stop", reward=r) for t, r in zip(texts, rewards, strict=True)]
    group = Group(Prompt("p", prompt_ids or [1, 2], "text", {}), rollouts)
    assign_advantages([group], preset="fastrl")
    return group


def kept(group: Group) -> list[int]:
    return [i for i, r in enumerate(group.rollouts) if r.kept]


def distance(a: list[int], b: list[int]) -> float:
    return 1 - len(set(a) & set(b)) / len(set(a) | set(b))


def naive_rule(texts: list[list[int]], rewards: list[float], method: str, tau: float) -> list[int]:
    """Walk every set of equal rewards in sampling order, as the paper and the authors' code do."""
    stay: list[int] = []
    for reward in sorted({r for r in rewards if not math.isnan(r)}):
        members: list[int] = []
        for i, text in enumerate(texts):
            if rewards[i] != reward or not text:
                continue
            against = members if method == "mdap" else members[:1]
            # The code keeps strictly above tau (J < 1 - tau), the paper from tau on.
            near = [
                distance(text, texts[j]) < tau if method == "mdap" else distance(text, texts[j]) <= tau for j in against
            ]
            if not any(near):
                members.append(i)
        stay += members
    return sorted(stay)


def test_rules_of_the_paper_and_of_the_code():
    """algorithms.md 1.2: against every kept rollout, or against the class's first one only."""
    texts = [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 9], [1, 2, 3, 9]]
    results = {}
    for method in ("mdap", "mdap_seed"):
        group = make_group([*texts, [30]], [1.0] * 4 + [0.0])
        prune([group], PruneConfig(method=method, tau=0.6), kl=False)
        results[method] = kept(group)
    # The third is near the second, which is not the first: only the paper's rule drops it.
    assert results == {"mdap": [0, 1, 4], "mdap_seed": [0, 1, 2, 4]}


@pytest.mark.parametrize("method", ["mdap", "mdap_seed"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_equals_the_naive_rule(method, data):
    count = data.draw(st.integers(2, 10))
    texts = data.draw(st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=count, max_size=count))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=count, max_size=count))
    # Odd hundredths never equal a fraction of small sets, so that rounding decides nothing.
    tau = data.draw(st.sampled_from([0.0, 0.39, 0.61, 0.79, 1.0]))
    group = make_group(texts, rewards)
    prune([group], PruneConfig(method=method, tau=tau), kl=True)
    assert kept(group) == naive_rule(texts, rewards, method, tau)
    for rollout in group.rollouts:
        assert rollout.drop_reason in ("", SIMILAR, UNGRADED)
        assert rollout.weight == 1.0


def test_similar_rollouts_go_and_different_ones_stay():
    """P16: a flipped sign would keep the two that are alike."""
    group = make_group([[1], [1], [2], [3]], [1.0, 1.0, 1.0, 0.0])
    prune([group], PruneConfig(), kl=False)
    assert kept(group) == [0, 2, 3]


def test_classes_of_continuous_rewards():
    """Advantages within 1e-4 are one class, and the next starts at its own lowest member."""
    group = make_group([[i] for i in range(6)], [0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    values = [0.3, 0.30005, 0.3001001, -1.0, 0.3 + 1e-9, 0.50]
    for rollout, value in zip(group.rollouts, values, strict=True):
        rollout.advantage = value
    assert advantage_classes(group) == [1, 1, 2, 0, 1, 3]
    group.rollouts[3].drop_reason = UNGRADED
    assert advantage_classes(group) == [0, 0, 1, -1, 0, 2]


def test_float_noise_in_rewards_does_not_split_a_class():
    group = make_group([[7]] * 4, [0.1 + 0.2, 0.3, 1.0, 0.9 + 0.1])
    assert advantage_classes(group) == [0, 0, 1, 1]
    prune([group], PruneConfig(), kl=False)
    assert kept(group) == [0, 2]


def test_multiplicity_restores_the_balance():
    """algorithms.md 1.7: 7 right and 1 wrong, pruned to 1 + 1, sum to -2.12 without weights and to 0 with them."""
    for weighting, expected in (("none", -2.12), ("multiplicity", 0.0)):
        group = make_group([[5, 6]] * 8, [1.0] * 7 + [0.0])
        prune([group], PruneConfig(weighting=weighting), kl=False)
        assert kept(group) == [0, 7]
        total = sum(group.rollouts[i].weight * group.rollouts[i].advantage for i in kept(group))
        assert total == pytest.approx(expected, abs=5e-3 if expected else 1e-5)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_weights_of_a_class_add_up_to_its_size(data):
    count = data.draw(st.integers(2, 10))
    texts = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=count, max_size=count))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=count, max_size=count))
    method = data.draw(st.sampled_from(["mdap", "mdap_seed"]))
    group = make_group(texts, rewards)
    labels = advantage_classes(group)
    prune([group], PruneConfig(method=method, weighting="multiplicity"), kl=True)
    for label in set(labels) - {-1}:
        weight = sum(r.weight for r, own in zip(group.rollouts, labels, strict=True) if own == label and r.kept)
        assert weight == labels.count(label)


def test_a_pruned_rollout_adds_its_weight_to_the_nearest_kept_one():
    group = make_group([[1, 2, 3], [7, 8, 9], [7, 8, 3], [50]], [1.0, 1.0, 1.0, 0.0])
    prune([group], PruneConfig(tau=0.6, weighting="multiplicity"), kl=False)
    assert [r.weight for r in group.rollouts] == [1.0, 2.0, 1.0, 1.0]


def test_zero_advantages_are_free_only_without_kl():
    """P03, A06: a KL term pulls on dead groups too."""
    for kl in (False, True):
        dead, live = make_group([[1], [2]], [1.0, 1.0]), make_group([[1], [2], [3]], [0.0, 0.5, 1.0])
        prune([dead, live], PruneConfig(method="none"), kl=kl)
        assert kept(dead) == ([0, 1] if kl else [])
        assert kept(live) == ([0, 1, 2] if kl else [0, 2])
        reasons = {r.drop_reason for g in (dead, live) for r in g.rollouts}
        assert reasons == ({""} if kl else {"", FREE})
        assert all(counted(r) for g in (dead, live) for r in g.rollouts)


def test_zero_advantages_are_kept_where_the_config_says_so():
    dead, live = make_group([[1], [2]], [1.0, 1.0]), make_group([[1], [2], [3]], [0.0, 0.5, 1.0])
    prune([dead, live], PruneConfig(method="none", zero_advantage="keep"), kl=False)
    assert (kept(dead), kept(live)) == ([0, 1], [0, 1, 2])


def test_a_dead_group_keeps_one_of_each_kind_under_kl():
    group = make_group([[1, 2], [1, 2], [8, 9]], [1.0] * 3)
    prune([group], PruneConfig(), kl=True)
    assert kept(group) == [0, 2]


def test_what_could_not_be_graded_is_out_of_everything():
    group = make_group([[1], [2], [], [4]], [0.0, 1.0, 1.0, math.nan])
    prune([group], PruneConfig(method="none"), kl=True)
    assert [r.drop_reason for r in group.rollouts] == ["", "", UNGRADED, UNGRADED]
    train = to_train_group(group)
    assert len(train.sequences) == 2 and (train.loss_tokens, train.loss_sequences) == (2, 2)


def test_duplicate_prompts_are_pruned_apart():
    """A07: equal texts of two groups with the same prompt do not prune each other."""
    groups = [make_group([[1], [2]], [0.0, 1.0]) for _ in range(2)]
    prune(groups, PruneConfig(), kl=False)
    assert [kept(g) for g in groups] == [[0, 1], [0, 1]]


def test_nothing_left_and_nothing_given():
    """P02."""
    groups = [make_group([[1], [2]], [1.0, 1.0]), make_group([[], []], [0.0, 1.0]), make_group([], [])]
    prune(groups, PruneConfig(), kl=False)
    assert not any(r.kept for g in groups for r in g.rollouts)
    assert [r.drop_reason for g in groups for r in g.rollouts] == [FREE, FREE, UNGRADED, UNGRADED]
    assert not [s for g in groups for s in to_train_group(g).sequences]
    prune([], PruneConfig(), kl=False)


def test_drop_reasons_are_all_reported():
    named = {value for name, value in vars(drop_reasons).items() if name.isupper() and isinstance(value, str)}
    assert set(DROP_REASONS) == named and {UNGRADED, SIMILAR, FREE} < named


def step_groups() -> list[Group]:
    """A live group, one with a zero advantage in it, a dead one, one with an ungraded member, a duplicate prompt."""
    generator = torch.Generator().manual_seed(0)

    def texts(*sizes: int) -> list[list[int]]:
        return [torch.randint(89, (n,), generator=generator).tolist() for n in sizes]

    return [
        make_group(texts(3, 1, 6, 2), [1.0, 0.0, 0.0, 1.0], [4, 5, 6]),
        make_group(texts(2, 4, 5), [0.0, 0.5, 1.0], [7]),
        make_group(texts(5, 2, 2), [1.0, 1.0, 1.0], [8, 9]),
        make_group(texts(2, 3, 4), [0.0, math.nan, 1.0], [4, 5, 6]),
    ]


def plain_grpo(policy: Policy, groups: list[Group], kind: str, kl_coef: float) -> torch.Tensor:
    """The on-policy update over ALL graded rollouts, one forward each, written as on paper."""
    graded = [(g, r) for g in groups for r in g.rollouts if not math.isnan(r.reward)]
    tokens = sum(len(r.completion_ids) for _, r in graded)
    total = torch.zeros((), dtype=torch.float64)
    for g, r in graded:
        batch = pack([Sequence(g.prompt.token_ids, r.completion_ids, r.rollout_logprobs, 0.0, 1.0)])
        logprobs = policy(batch)[0].double()
        reference = logprobs.detach() - 0.1
        for logprob, ref in zip(logprobs, reference, strict=True):
            ratio = (logprob - logprob.detach()).exp()
            loss = -r.advantage * (logprob if OBJECTIVES[kind].clip == "cispo" else ratio)
            loss = loss + kl_coef * (torch.exp(ref - logprob) - 1 - (ref - logprob))
            scale = {
                "token-mean": tokens,
                "seq-mean-token-mean": len(graded) * len(r.completion_ids),
                "seq-mean-token-sum-norm": len(graded) * 10,
            }[OBJECTIVES[kind].aggregation]
            total = total + loss / scale
    return total


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_without_pruning_the_update_is_plain_grpo(kind, kl_coef, make_lm):
    """Invariant (d) of the design: leaving out rollouts of zero advantage changes neither gradient nor divisor."""
    policy = Policy(make_lm(), temperature=1.0)
    groups = step_groups()
    truth = plain_grpo(policy, groups, kind, kl_coef)
    expected = torch.autograd.grad(truth, list(policy.parameters()))

    prune(groups, PruneConfig(method="none"), kl=kl_coef > 0)
    parts = [to_train_group(g) for g in groups]
    sequences = [s for part in parts for s in part.sequences]
    assert len(sequences) == (12 if kl_coef else 8), "rollouts of zero advantage cost a forward pass only under KL"
    batch = pack(sequences)
    batch.ref_logprobs = policy(batch)[0].detach() - 0.1
    objective = build_objective(LossConfig(kind=kind, kl_coef=kl_coef))
    how = {"batch": batch, "objective": objective, "divisor": divisor(parts), "max_completion_tokens": 10}
    loss, _ = policy(batch, partial(policy_loss, **how))
    assert float(loss.detach()) == pytest.approx(float(truth.detach()), abs=1e-6)
    for ours, right in zip(torch.autograd.grad(loss, list(policy.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-6)
