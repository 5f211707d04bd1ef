"""Rules and weights over similarity vectors, against brute force and closed forms; fidelity against its definition."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast import ops
from fastrl_fast.advantage import assign_advantages
from fastrl_fast.config import AdvantageConfig, PruneConfig
from fastrl_fast.drop_reasons import FREE, SIMILAR, SMALL, UNCHOSEN, UNGRADED
from fastrl_fast.prune import measure_fidelity, prune
from fastrl_fast.prune.vectors import cosines, gradient_sketches, jaccard_factors, similarity_vectors
from fastrl_fast.prune.weights import non_negative
from fastrl_fast.types import Group, Prompt, Rollout

TEXTS = st.lists(st.integers(0, 6), max_size=7)


def make_group(texts: list[list[int]], rewards: list[float], logprobs: list[list[float]] | None = None) -> Group:
    chosen = logprobs or [[-1.0] * len(text) for text in texts]
    rollouts = [
        Rollout(text, logs, "stop", reward=reward, right=reward >= 1)
        for text, logs, reward in zip(texts, chosen, rewards, strict=True)
    ]
    group = Group(Prompt("p", [1, 2], "text", {}), rollouts)
    assign_advantages([group], preset="fastrl")
    return group


def kept(group: Group) -> list[int]:
    return [i for i, r in enumerate(group.rollouts) if r.kept]


def grams(text: list[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}


@given(texts=st.lists(TEXTS, max_size=8), n=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_products_of_factors_are_jaccard_similarities(texts, n):
    rows = torch.tensor(jaccard_factors(texts, ngram=n), dtype=torch.float64).reshape(len(texts), len(texts))
    for i, j in itertools.product(range(len(texts)), repeat=2):
        a, b = grams(texts[i], n), grams(texts[j], n)
        assert float(rows[i] @ rows[j]) == pytest.approx(len(a & b) / len(a | b) if a | b else 1.0, abs=1e-6)


def test_ngrams_see_the_order_of_tokens():
    """The same tokens in another order are equal as a set and different as pairs."""
    texts, rewards = [[1, 2, 3, 4], [4, 3, 2, 1], [9]], [1.0, 1.0, 0.0]
    for ngram, stay in ((1, [0, 2]), (2, [0, 1, 2]), (4, [0, 1, 2])):
        group = make_group(texts, rewards)
        prune([group], PruneConfig(ngram=ngram), kl=False)
        assert kept(group) == stay


def naive_gradient_rule(group: Group, method: str, tau: float) -> list[int]:
    rows = gradient_sketches([group]).tolist()

    def cosine(a: list[float], b: list[float]) -> float:
        aa, bb = sum(x * x for x in a), sum(x * x for x in b)
        if aa == 0 or bb == 0:
            return float(aa == bb)
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(aa * bb)

    stay: list[int] = []
    for reward in {r.reward for r in group.rollouts if r.graded}:
        members: list[int] = []
        for i, rollout in enumerate(group.rollouts):
            if not rollout.graded or rollout.reward != reward:
                continue
            against = members if method == "mdap" else members[:1]
            distances = [1 - cosine(rows[i], rows[j]) for j in against]
            if not any(d < tau if method == "mdap" else d <= tau for d in distances):
                members.append(i)
        stay += members
    return sorted(stay)


@pytest.mark.parametrize("method", ["mdap", "mdap_seed"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_mdap_by_gradient_is_the_plain_loop(method, data):
    count = data.draw(st.integers(2, 8))
    texts = data.draw(st.lists(TEXTS, min_size=count, max_size=count))
    logs = [data.draw(st.lists(st.floats(-5, 0), min_size=len(t), max_size=len(t))) for t in texts]
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=count, max_size=count))
    # No cosine of short texts is this number, so that rounding decides nothing.
    tau = data.draw(st.sampled_from([0.1234567, 0.4234567, 0.8234567]))
    group = make_group(texts, rewards, logs)
    config = PruneConfig(method=method, tau=tau, similarity="gradient", weighting="multiplicity")
    prune([group], config, kl=True)
    assert kept(group) == naive_gradient_rule(group, method, tau)
    assert {r.drop_reason for r in group.rollouts} <= {"", SIMILAR, UNGRADED}
    assert sum(r.weight for r in group.rollouts if r.kept) == sum(r.graded for r in group.rollouts)


def test_gradient_similarity_looks_at_unsure_tokens():
    """Two texts that share only tokens of probability 1 are alike as sets and have nothing in common as gradients."""
    texts, logs = [[1, 2, 3, 7], [1, 2, 3, 8], [50]], [[0.0, 0.0, 0.0, -3.0]] * 2 + [[-1.0]]
    for similarity, stay in (("jaccard", [0, 2]), ("gradient", [0, 1, 2])):
        group = make_group(texts, [1.0, 1.0, 0.0], logs)
        prune([group], PruneConfig(similarity=similarity, tau=0.5), kl=False)
        assert kept(group) == stay


def test_cosines_of_zero_vectors():
    vectors = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    expected = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0.5**0.5], [1, 0, 1, 0], [0, 0.5**0.5, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(cosines(vectors), expected)


def random_groups(seed: int) -> list[Group]:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for size in (8, 5, 8, 1, 0):
        texts = [torch.randint(0, 12, (6,), generator=generator).tolist() for _ in range(size)]
        rewards = torch.randint(0, 4, (size,), generator=generator).mul(0.5).tolist()
        groups.append(make_group(texts, rewards))
    groups[0].rollouts[3].completion_ids, groups[0].rollouts[3].rollout_logprobs = [], []
    groups[2].rollouts[1].reward = math.nan
    assign_advantages(groups, preset="fastrl")
    return groups


@pytest.mark.parametrize("similarity", ["jaccard", "gradient"])
@pytest.mark.parametrize("method", ["maxmin", "dpp", "match"])
def test_choices_are_those_of_the_operator_group_by_group(method, similarity):
    groups = random_groups(1)
    config = PruneConfig(method=method, similarity=similarity, keep_fraction=0.5)
    for group, same in zip(groups, random_groups(1), strict=True):
        graded = [i for i, r in enumerate(same.rollouts) if r.graded]
        vectors = similarity_vectors([same], config)[graded]
        advantages = torch.tensor([same.rollouts[i].advantage for i in graded])
        size = max(1, len(graded) // 2)
        choice = ops.choose_rollouts(vectors, advantages, torch.tensor([0, len(graded)]), rule=method, k=size)
        chosen = [i for i, stays in zip(graded, choice.kept.tolist(), strict=True) if stays]
        prune([group], config, kl=True)
        assert kept(group) == (chosen if bool(advantages.any()) else graded[:size])
    at_once = random_groups(1)
    prune(at_once, config, kl=True)
    assert [kept(g) for g in at_once] == [kept(g) for g in groups]
    assert {r.drop_reason for g in groups for r in g.rollouts} <= {"", UNCHOSEN, UNGRADED}
    assert all(r.weight == 1 for g in groups for r in g.rollouts)


@pytest.mark.parametrize("method", ["maxmin", "dpp", "match"])
def test_right_and_wrong_both_stay(method):
    """Opposite advantages are the least alike of all: two of six are one right and one wrong."""
    group = make_group(
        [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 4], [1, 2, 4]], [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    )
    prune([group], PruneConfig(method=method, keep_fraction=0.34), kl=False)
    assert sorted(group.rollouts[i].reward for i in kept(group)) == [0.0, 1.0]


def test_nothing_is_lost_where_copies_are_pruned_by_match():
    """7 right and 1 wrong with texts of their own: one of each, weighed 7 and 1, is the whole gradient."""
    group = make_group([[5, 6]] * 7 + [[8, 9]], [1.0] * 7 + [0.0])
    before = [[r.advantage for r in group.rollouts]]
    config = PruneConfig(method="match", similarity="gradient", keep_fraction=0.25, weighting="match")
    prune([group], config, kl=False)
    assert sorted(group.rollouts[i].weight for i in kept(group)) == pytest.approx([1.0, 7.0], rel=1e-6)
    measure_fidelity([group], before)
    assert group.fidelity == pytest.approx(1.0, abs=1e-9)


def nearest(pushes: torch.Tensor, target: torch.Tensor) -> float:
    """Least squares over every subset, those with a negative weight left out."""
    best = float(target @ target)
    for size in range(1, len(pushes) + 1):
        for subset in itertools.combinations(range(len(pushes)), size):
            columns = pushes[list(subset)].T
            weights = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
            if bool((weights >= 0).all()):
                best = min(best, float((columns @ weights - target).square().sum()))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_non_negative_weights_are_the_best_of_all_subsets(seed):
    """More members than dimensions included, where some span others."""
    generator = torch.Generator().manual_seed(seed)
    pushes = torch.randn(seed % 7, 3 + seed % 4, generator=generator, dtype=torch.float64)
    target = pushes.sum(0) + torch.randn(pushes.shape[1], generator=generator, dtype=torch.float64)
    weights = non_negative(pushes @ pushes.T, pushes @ target)
    assert bool((weights >= 0).all())
    assert float((pushes.T @ weights - target).square().sum()) == pytest.approx(nearest(pushes, target), abs=1e-9)


@pytest.mark.parametrize("similarity", ["jaccard", "gradient"])
@pytest.mark.parametrize("seed", range(3))
def test_weights_of_match_are_those_of_the_operator(seed, similarity):
    """On the set that the operator picks, its own least-squares weights and ours are the same."""
    config = PruneConfig(method="match", similarity=similarity, weighting="match")
    group, whole = random_groups(seed)[1], random_groups(seed)[1]
    graded = len(whole.rollouts)
    advantages = torch.tensor([r.advantage for r in whole.rollouts])
    borders = torch.tensor([0, graded])
    choice = ops.choose_rollouts(similarity_vectors([whole], config), advantages, borders, rule="match", k=graded // 2)
    prune([group], config, kl=True)
    ours = [r.weight if r.kept else 0.0 for r in group.rollouts]
    assert ours == pytest.approx(choice.weights.tolist(), rel=1e-6)


@pytest.mark.parametrize("method", ["mdap", "mdap_seed", "maxmin", "dpp", "random", "cppo"])
def test_match_weights_never_lower_the_fidelity(method):
    for seed in range(4):
        found = []
        for weighting in ("none", "match"):
            groups = random_groups(seed)
            before = [[r.advantage for r in g.rollouts] for g in groups]
            prune(groups, PruneConfig(method=method, similarity="gradient", weighting=weighting), kl=True)
            measure_fidelity(groups, before)
            found.append([g.fidelity for g in groups])
        for plain, matched in zip(*found, strict=True):
            assert matched >= plain - 1e-6
        assert found[0] != found[1]


def test_rollouts_that_match_would_not_use_are_dropped():
    """Both wrong answers have the text of the kept right one: the group pushes away from it, and no weight >= 0 can."""
    group = make_group([[1], [2], [1], [1]], [1.0, 1.0, 0.0, 0.0])
    prune([group], PruneConfig(method="cppo", keep_fraction=0.25, weighting="match"), kl=False)
    assert [r.drop_reason for r in group.rollouts] == [UNCHOSEN, SMALL, SMALL, SMALL]


def test_an_unpruned_group_keeps_its_bits():
    group = make_group([[1], [2], [3]], [1.0, 0.0, 0.3])
    prune([group], PruneConfig(weighting="match"), kl=False)
    assert [r.weight for r in group.rollouts] == [1.0, 1.0, 1.0]


def test_fidelity_is_the_cosine_of_sums():
    """Against the definition, with weights, advantages taken anew, and a group that lost everything."""
    groups = random_groups(2)
    before = [[r.advantage for r in g.rollouts] for g in groups]
    prune(groups, PruneConfig(method="pods"), AdvantageConfig(), kl=True)
    groups[0].rollouts[kept(groups[0])[0]].weight = 3.0
    for rollout in groups[1].rollouts:
        rollout.drop_reason = UNCHOSEN
    measure_fidelity(groups, before)
    for group, advantages in zip(groups, before, strict=True):
        rows = gradient_sketches([group]).double()
        whole = sum((a * v for a, v in zip(advantages, rows, strict=True)), torch.zeros(rows.shape[1]))
        now = [r.weight * r.advantage * r.kept * (a != 0) for r, a in zip(group.rollouts, advantages, strict=True)]
        part = sum((a * v for a, v in zip(now, rows, strict=True)), torch.zeros(rows.shape[1]))
        cosine = float(whole @ part) / max(float(whole.norm() * part.norm()), 1e-12)
        expected = cosine if float(whole.norm()) > 0 else 1.0
        assert group.fidelity == pytest.approx(expected, abs=1e-5)
    assert groups[1].fidelity == 0.0


def test_what_pruning_7_to_1_costs():
    """algorithms.md 1.7: with a text for the right and one for the wrong ones of equal length that share nothing, whole
    and kept gradient are (7 x .354, -2.475) and (.354, -2.475): a cosine of 8 / sqrt(2 x 50)."""
    group = make_group([[5]] * 7 + [[8]], [1.0] * 7 + [0.0])
    before = [[r.advantage for r in group.rollouts]]
    prune([group], PruneConfig(), kl=False)
    measure_fidelity([group], before)
    assert group.fidelity == pytest.approx(8 / math.sqrt(2 * 50), rel=1e-6)
    assert sum(r.advantage for r in group.rollouts if r.kept) == pytest.approx(-2.12, abs=5e-3)


def test_fidelity_of_free_rollouts_is_whole():
    """Leaving out what has no gradient changes nothing."""
    group = make_group([[1], [2], [3]], [0.0, 0.5, 1.0])
    before = [[r.advantage for r in group.rollouts]]
    prune([group], PruneConfig(method="none"), kl=False)
    assert group.rollouts[1].drop_reason == FREE
    measure_fidelity([group], before)
    assert group.fidelity == 1.0
