"""Every rule against a search or a plain loop in Python, on groups small enough to try everything."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.ops import CHOICES, choose_rollouts, gradient_sketch, group_fidelity


def choose(vectors, advantages=None, *, rule, k, seed=0):
    """One group; returns the kept indices in their order, the choice."""
    v = torch.tensor(vectors, dtype=torch.float32)
    a = torch.ones(len(v)) if advantages is None else torch.tensor(advantages, dtype=torch.float32)
    choice = choose_rollouts(v, a, torch.tensor([0, len(v)]), rule=rule, k=k, seed=seed)
    kept = sorted((t, i) for i, t in enumerate(choice.order.tolist()) if t >= 0)
    assert [t for t, _ in kept] == list(range(len(kept))), "turns are 0, 1, ..."
    assert torch.equal(choice.kept, choice.order >= 0) and torch.equal(choice.kept, choice.weights > 0)
    return [i for _, i in kept], choice


def small_group(seed, n=6, width=4):
    """Small integers, so that all products are exact and ties occur."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randint(-2, 3, (n, width), generator=generator).double()
    a = torch.randint(-2, 3, (n,), generator=generator).double() / 2
    if seed % 3 == 0:
        v[n - 1] = v[0]
    return v, a


def test_the_most_different_ones_are_kept_not_the_most_alike():
    """P16."""
    for rule in ("maxmin", "dpp"):
        assert choose([[1, 0], [1, 0], [0, 1]], rule=rule, k=2)[0] == [0, 2]


def test_zero_rows_come_last_and_nothing_is_nan():
    """P15."""
    rows = [[0, 0, 0], [1, 0, 0], [0.9, 0.1, 0]]
    assert choose(rows, rule="maxmin", k=2)[0] == [1, 2]
    assert choose(rows, rule="maxmin", k=3)[0] == [1, 2, 0]
    assert choose(rows, rule="dpp", k=3)[0] == [1, 2]
    assert choose(rows, rule="match", k=3)[0] in ([2, 1], [1, 2])
    for rule in CHOICES:
        assert choose([[0, 0]] * 3, rule=rule, k=2)[1].fidelity.isfinite().all()
        assert choose(rows, [0, 0, 0], rule=rule, k=2)[1].fidelity.tolist() == [1.0], "nothing of nothing is lost"


@pytest.mark.parametrize("rule", CHOICES)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_rows_are_out_and_the_loop_ends(rule, broken):
    """P14."""
    rows = [[1, 0, broken], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    kept, choice = choose(rows, [1, 1, broken, 1], rule=rule, k=4)
    assert sorted(kept) == [1, 3]
    assert float(choice.fidelity) == pytest.approx(1.0)


def test_opposite_advantages_are_different():
    """The same answer with the other sign pushes the other way."""
    assert choose([[1, 0], [1, 0], [1, 0]], [1, 1, -1], rule="maxmin", k=2)[0] == [0, 2]


def cosine(x, y):
    sizes = float(x.norm() * y.norm())
    return max(-1.0, min(1.0, float(x @ y) / sizes)) if sizes else 0.0


@pytest.mark.parametrize("seed", range(30))
def test_maxmin_is_the_plain_loop(seed):
    v, a = small_group(seed)
    g = a[:, None] * v
    kept, left = [], list(range(len(g)))
    for _ in range(4):

        def score(i, kept=kept):
            if not g[i].any():
                return (-1, 0.0)
            return (0, float(g[i] @ g[i]) if not kept else -round(max(cosine(g[i], g[j]) for j in kept), 12))

        best = max(left, key=lambda i: (*score(i), -i))
        kept.append(best)
        left.remove(best)
    assert choose(v.tolist(), a.tolist(), rule="maxmin", k=4)[0] == kept


@pytest.mark.parametrize("seed", range(30))
def test_dpp_raises_the_determinant_most(seed):
    v, a = small_group(seed)
    unit = torch.stack([x / x.norm() if x.any() else x for x in v]) * a[:, None]
    kernel = unit @ unit.t()
    kept, _ = choose(v.tolist(), a.tolist(), rule="dpp", k=6)
    for turn, i in enumerate(kept):
        before = kept[:turn]
        volumes = {
            j: float(torch.linalg.det(kernel[before + [j]][:, before + [j]])) for j in range(6) if j not in before
        }
        assert volumes[i] == pytest.approx(max(volumes.values()), rel=1e-9)
    assert len(kept) == len(set(kept)) == int(torch.linalg.matrix_rank(kernel)), "stops at the rank"


def least_squares(g, members):
    """The unconstrained optimum on a subset: weights by member and the squared error; None where not all positive."""
    total = g.sum(0)
    if not members:
        return {}, float(total @ total)
    x = torch.linalg.lstsq(g[list(members)].t(), total[:, None], driver="gelsd").solution[:, 0]
    error = total - x @ g[list(members)]
    return (dict(zip(members, x.tolist(), strict=True)), float(error @ error)) if bool((x > 0).all()) else None


def best_match(g, candidates):
    """Non-negative least squares by trying every subset."""
    subsets = (s for size in range(len(candidates) + 1) for s in itertools.combinations(candidates, size))
    return min(e for s in subsets if (found := least_squares(g, s)) is not None for e in [found[1]])


@pytest.mark.parametrize("seed", range(30))
def test_match_is_non_negative_least_squares(seed):
    v, a = small_group(seed)
    g = a[:, None] * v
    scale = 1 + float(g.sum(0) @ g.sum(0))
    for k in range(1, 7):
        kept, choice = choose(v.tolist(), a.tolist(), rule="match", k=k)
        assert len(kept) <= k
        error = g.sum(0) - choice.weights.double() @ g
        assert float(error @ error) <= best_match(g, kept) + 1e-6 * scale, "the best weights for what is kept"
    assert float(error @ error) == pytest.approx(best_match(g, range(6)), abs=1e-6 * scale), (
        "and of all, without a limit"
    )


def test_match_keeps_the_sum_of_copies():
    """Seven right answers and a wrong one: one of each, weighted, push like all eight."""
    advantages = [0.354] * 7 + [-2.475]
    kept, choice = choose([[1, 0]] * 7 + [[0, 1]], advantages, rule="match", k=2)
    assert sorted(kept) == [0, 7]
    assert choice.weights[[0, 7]].tolist() == pytest.approx([7.0, 1.0])
    assert float(choice.fidelity) == pytest.approx(1.0)
    assert float(choose([[1, 0]] * 7 + [[0, 1]], advantages, rule="maxmin", k=2)[1].fidelity) < 0.9


def test_top_advantage():
    assert choose([[1]] * 5, [0.5, -2, 2, 0, 1], rule="top_advantage", k=3)[0] == [1, 2, 4]
    assert choose([[1]] * 3, [0, 0, 0], rule="top_advantage", k=2)[0] == [0, 1]


def test_random_is_a_fair_draw_of_the_seed_alone():
    vectors, advantages, cu = torch.ones(4000, 1), torch.ones(4000), torch.arange(0, 4001, 8)
    choice = choose_rollouts(vectors, advantages, cu, rule="random", k=3, seed=5)
    again = choose_rollouts(vectors * 7, -advantages, cu, rule="random", k=3, seed=5)
    assert torch.equal(choice.kept, again.kept)
    assert choice.kept.view(500, 8).sum(1).tolist() == [3] * 500
    other = choose_rollouts(vectors, advantages, cu, rule="random", k=3, seed=6)
    assert not torch.equal(choice.kept, other.kept)
    share = choice.kept.view(500, 8).double().mean(0)
    assert float((share - 3 / 8).abs().max()) < 5 * math.sqrt(3 / 8 * 5 / 8 / 500), "no place is preferred"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(CHOICES), st.integers(0, 9), st.integers(0, 8))
def test_fidelity_and_limits(seed, rule, k, n):
    v, a = small_group(seed, n=n) if n else (torch.zeros(0, 4).double(), torch.zeros(0).double())
    choice = choose_rollouts(v.float(), a.float(), torch.tensor([0, 0, n]), rule=rule, k=k, seed=seed)
    assert int(choice.kept.sum()) <= min(k, n)
    if rule in ("random", "top_advantage", "maxmin"):
        assert int(choice.kept.sum()) == min(k, n)
    g = a[:, None] * v
    whole, part = g.sum(0), choice.weights.double() @ g
    if whole.norm() > 1e-6 and part.norm() > 1e-6:
        expected = cosine(whole, part)
    else:
        expected = 1.0 if whole.norm() < 1e-6 and part.norm() < 1e-6 else 0.0
    assert choice.fidelity.tolist() == pytest.approx([1.0, expected], abs=1e-6)
    given = group_fidelity(v.float(), a.float(), choice.weights, torch.tensor([0, 0, n]))
    assert torch.equal(given, choice.fidelity)


def test_sketch_is_the_sum_of_signed_tokens():
    ids, logprobs = torch.tensor([5, 7, 5, 9]), torch.tensor([0.5, 0.25, 0.125, 1.0]).log()
    cu = torch.tensor([0, 3, 3, 4])
    sketch = gradient_sketch(ids, logprobs, cu, width=64)
    alone = {
        t: gradient_sketch(torch.tensor([t]), torch.tensor([-math.inf]), torch.tensor([0, 1]), width=64)[0]
        for t in (5, 7)
    }
    for row in alone.values():
        assert int((row != 0).sum()) == 1 and float(row.abs().max()) == 1
    expected = (0.5 + 0.875) * alone[5] + 0.75 * alone[7]
    assert torch.equal(sketch[0], expected)
    assert not sketch[1:].any(), "no tokens, and a token that was certain"


def test_sketch_products_estimate_the_true_ones():
    """Unbiased: over seeds the mean is the product of the whole vectors."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(200, (400,), generator=generator)
    logprobs = -torch.rand(400, generator=generator) * 3
    cu = torch.tensor([0, 200, 400])
    whole = torch.zeros(2, 200, dtype=torch.float64)
    whole.view(-1).index_add_(0, ids + 200 * (torch.arange(400) // 200), 1 - logprobs.double().exp())
    products = []
    for seed in range(200):
        sketch = gradient_sketch(ids, logprobs, cu, width=256, seed=seed).double()
        products.append(float(sketch[0] @ sketch[1]))
    spread = float(whole[0].norm() * whole[1].norm()) / math.sqrt(256)
    mean = sum(products) / 200
    assert abs(mean - float(whole[0] @ whole[1])) < 5 * spread / math.sqrt(200)


def test_sketch_rounds_to_exact_sums():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(5000, generator=generator).double() * 8
    sketch = gradient_sketch(torch.zeros(5000, dtype=torch.int64), logprobs.float(), torch.tensor([0, 5000]), width=2)
    exact = torch.floor((1 - logprobs.float().double().exp()) * 1024 + 0.5) / 1024
    assert float(sketch.abs().sum()) == float(exact.sum())


def test_a_broken_logprob_keeps_a_rollout_out():
    ids, logprobs = torch.arange(4), torch.tensor([-1.0, math.nan, -1.0, -2.0])
    sketch = gradient_sketch(ids, logprobs, torch.tensor([0, 2, 4]), width=8)
    choice = choose_rollouts(sketch, torch.ones(2), torch.tensor([0, 2]), rule="random", k=2)
    assert choice.kept.tolist() == [False, True]


@pytest.mark.parametrize("rule", CHOICES)
def test_thread_count_changes_nothing(rule):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5000, (64 * 16 * 20,), generator=generator)
    logprobs = -torch.rand(len(ids), generator=generator)
    cu, groups = torch.arange(0, len(ids) + 1, 20), torch.arange(0, 1025, 16)
    advantages = torch.randn(1024, generator=generator)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sketch = gradient_sketch(ids, logprobs, cu, width=128)
            choice = choose_rollouts(sketch, advantages, groups, rule=rule, k=5)
            results.append([sketch, *choice, group_fidelity(sketch, advantages, choice.weights * 0.7, groups)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_opcheck():
    v, a, cu = torch.randn(5, 4), torch.randn(5), torch.tensor([0, 2, 5])
    torch.library.opcheck(torch.ops.fastrl_fast.choose_rollouts.default, (v, a, cu, 2, 2, 0, None))
    torch.library.opcheck(torch.ops.fastrl_fast.choose_rollouts.default, (v, a, cu, 5, 0, 0, torch.ones(5)))
    torch.library.opcheck(torch.ops.fastrl_fast.gradient_sketch.default, (torch.arange(5), a, cu, 8, 1))


def test_compiles_without_graph_breaks():
    ids, logprobs, cu, groups = torch.arange(9), -torch.rand(9), torch.tensor([0, 2, 5, 9]), torch.tensor([0, 1, 3])

    def fidelities(advantages):
        sketch = gradient_sketch(ids, logprobs, cu, width=16)
        choice = choose_rollouts(sketch, advantages * 2, groups, rule="match", k=1)
        return choice.fidelity + group_fidelity(sketch, advantages, choice.weights, groups)

    advantages = torch.tensor([1.0, -0.5, 2.0])
    compiled = torch.compile(fidelities, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(advantages), fidelities(advantages))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "mdap"}, "rule must be one of maxmin, dpp, match, random, top_advantage, not 'mdap'"),
        ({"k": -1}, "k must be >= 0, not -1"),
        ({"seed": -1}, "seed must be >= 0, not -1"),
        ({"vectors": torch.zeros(3)}, "vectors must have 2 dimension(s), torch.float32, on the device"),
        ({"advantages": torch.zeros(2)}, "advantages must be one per rollout (3), not 2"),
        ({"cu_group_sizes": torch.tensor([0, 2])}, "cu_group_sizes must end with 3, not 2"),
        ({"cu_group_sizes": torch.tensor([0, 2, 1, 3])}, "cu_group_sizes must not decrease"),
    ],
)
def test_what_is_refused(change, message):
    usual = {"vectors": torch.zeros(3, 2), "advantages": torch.zeros(3), "cu_group_sizes": torch.tensor([0, 3])}
    arguments = {**usual, "rule": "dpp", "k": 2, **change}
    with pytest.raises(ValueError) as caught:
        choose_rollouts(*[arguments.pop(name) for name in usual], **arguments)
    assert message in str(caught.value)
    with pytest.raises(ValueError, match="width must be a power of two"):
        gradient_sketch(torch.arange(1), torch.zeros(1), torch.tensor([0, 1]), width=100)
