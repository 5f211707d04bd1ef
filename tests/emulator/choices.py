"""The rules of csrc/kernels/choose_rollouts.h in numpy, and the check of the emulated kernel against them."""

import itertools

import numpy as np

from library import Array, Library

RULES = ("maxmin", "dpp", "match", "random", "top_advantage", "given")
"""In the order of the enum."""


def mix_bits(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def choice_case(sizes: list[int], width: int, seed: int) -> tuple[Array, Array, Array]:
    """Vectors that have much in common, so that least squares would give some of them a negative weight.

    Multiples of 1/4, so that their products and sums are exact; some copies, zeros and numbers that are not finite.
    """
    make = np.random.default_rng(seed)
    total = sum(sizes)
    vectors = (np.round(4 * make.standard_normal((total, width)) + 4 * make.standard_normal(width)) / 4).astype("f4")
    advantages = make.choice([-1.5, -0.5, 0.25, 0.5, 1.0, 1.0], total).astype(np.float32)
    if total > 8:
        vectors[5], vectors[3], vectors[total // 2, width - 1] = vectors[4], 0, np.nan
        advantages[6], advantages[7] = 0, np.inf
    return vectors, advantages, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def greedy(rule: str, vectors: Array, advantages: Array, places: list[int], k: int, seed: int) -> list[int]:
    """The members one group keeps, in their order; none of them may be broken; `places` are those over all groups."""
    lengths = np.linalg.norm(vectors, axis=1)
    units = vectors / np.where(lengths > 0, lengths, 1)[:, None]
    cosines = units @ units.T * np.sign(np.outer(advantages, advantages))
    sizes = (advantages * lengths) ** 2
    kernel = np.outer(abs(advantages), abs(advantages)) * cosines
    keys = [mix_bits((mix_bits(seed) + place) % 2**64) >> 11 for place in places]

    def score(i: int, kept: list[int]) -> float:
        if rule == "random":
            return -keys[i]
        if rule == "top_advantage":
            return float(abs(advantages[i]))
        if rule == "maxmin":
            if sizes[i] == 0:
                return -9.0
            return float(sizes[i]) if not kept else -round(float(cosines[i, kept].max()), 12)
        inside = kernel[np.ix_(kept, kept)]
        rest = kernel[i, i] - kernel[i, kept] @ np.linalg.solve(inside, kernel[kept, i]) if kept else kernel[i, i]
        return round(float(rest), 12)

    kept: list[int] = []
    while len(kept) < min(k, len(vectors)):
        best = max((i for i in range(len(vectors)) if i not in kept), key=lambda i: (score(i, kept), -i))
        if rule == "dpp" and score(best, kept) <= 1e-9 * kernel.diagonal().max():
            break
        kept.append(best)
    return kept


def assert_matched(g: Array, weights: Array, k: int) -> None:
    """The conditions of a least squares with weights >= 0 (Karush, Kuhn and Tucker) on what is kept."""
    left = g.sum(0) - weights @ g
    slack = 1e-5 * np.linalg.norm(g.sum(0)) * np.linalg.norm(g, axis=1)  # the weights are float32
    pulls, kept = g @ left, weights > 0
    assert (weights >= 0).all() and kept.sum() <= k
    assert (abs(pulls[kept]) <= slack[kept]).all(), "another weight would be better"
    assert kept.sum() == k or (pulls <= slack).all(), "another member would help"


def true_fidelity(g: Array, weights: Array) -> float:
    whole, part = g.sum(0), weights @ g
    sizes = np.linalg.norm(whole) * np.linalg.norm(part)
    return float(whole @ part / sizes) if sizes else float(not whole.any() and not part.any())


def check_choose_rollouts(library: Library) -> None:
    for (sizes, width), (number, rule) in itertools.product(CASES, enumerate(RULES)):
        vectors, advantages, cu = choice_case(sizes, width, 0)
        given = np.where(np.arange(len(vectors)) % 3, 0.5, 0).astype(np.float32) if rule == "given" else None
        for k in (3, 100):
            ours = library.choose_rollouts(
                vectors, advantages, cu, rule=number, k=min(k, len(vectors)), seed=7, weights=given
            )
            for group, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
                here = slice(begin, end)
                weights, order, fidelity = ours[0][here].astype(np.float64), ours[1][here], ours[2][group]
                sound = np.isfinite(vectors[here]).all(1) & np.isfinite(advantages[here])
                v, a = vectors[here][sound].astype(np.float64), advantages[here][sound].astype(np.float64)
                kept = np.argsort(np.where(order < 0, end, order), kind="stable")[: (order >= 0).sum()]
                assert (order[kept] == np.arange(len(kept))).all() and sound[kept].all()
                if rule == "match":
                    assert ((weights > 0) == (order >= 0)).all()
                    assert_matched(a[:, None] * v, weights[sound], k)
                elif rule != "given":
                    assert (weights == (order >= 0)).all()
                    members = np.flatnonzero(sound)
                    expected = greedy(rule, v, a, (begin + members).tolist(), k, 7)
                    assert members[expected].tolist() == kept.tolist()
                np.testing.assert_allclose(fidelity, true_fidelity(a[:, None] * v, weights[sound]), atol=1e-9)


CASES = [([], 4), ([1, 0, 2], 3), ([9, 12, 20], 17), ([4, 12, 17], 12)]
"""Sizes of the groups, and the width; in the last two `match` takes members in that have to leave again."""
