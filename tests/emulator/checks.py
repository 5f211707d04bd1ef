"""Run every emulated CUDA operator against float64 numpy or Python sets: `python checks.py LIBRARY [--seeds ...]`.

Only numpy is needed, so that it also runs where a sanitizer is preloaded.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np

from choices import check_choose_rollouts, mix_bits
from library import POLICY_STATS, Array, Library, PolicySettings

INFINITY = np.float64(np.inf)


def offsets(sizes: list[int]) -> Array:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


# --- group_advantage ---------------------------------------------------------------------------------------------

PRESETS = [
    {"divide_by_std": True, "leave_one_out": False, "ddof": 1, "eps": 1e-4},
    {"divide_by_std": True, "leave_one_out": False, "ddof": 0, "eps": 1e-6},
    {"divide_by_std": False, "leave_one_out": True, "ddof": 1, "eps": 0.0},
    {"divide_by_std": False, "leave_one_out": False, "ddof": 1, "eps": 0.0},
]
GROUP_SIZES = [[], [0], [1, 2], [8] * 5, [0, 3, 33, 64, 1, 0], [*range(70)]]


def reward_case(sizes: list[int]) -> tuple[Array, Array]:
    """Rewards with dead groups and ungraded members, and the offsets of the groups."""
    make = np.random.default_rng(len(sizes))
    cu = offsets(sizes)
    rewards = make.choice([0.0, 0.1, 0.5, 1.0, 1.5], cu[-1])
    rewards[make.random(cu[-1]) < 0.1] = np.nan
    if len(sizes) > 3:
        rewards[cu[3] : cu[4]] = 0.1
    return rewards, cu


def true_advantages(rewards: Array, cu: Array, preset: dict) -> tuple[Array, Array]:
    advantages, dead = np.zeros(len(rewards)), np.ones(len(cu) - 1, np.bool_)
    for g, (begin, end) in enumerate(itertools.pairwise(cu)):
        group = rewards[begin:end]
        graded = group[~np.isnan(group)]
        n = len(graded)
        if n < 2 or graded.min() == graded.max():
            continue
        dead[g] = False
        centred = group - graded.mean()
        if preset["divide_by_std"]:
            centred = centred / (graded.std(ddof=preset["ddof"]) + preset["eps"])
        if preset["leave_one_out"]:
            centred = centred * n / (n - 1)
        advantages[begin:end] = np.nan_to_num(centred, nan=0.0)
    return advantages, dead


def check_group_advantage(library: Library) -> None:
    for sizes, preset in itertools.product(GROUP_SIZES, PRESETS):
        rewards, cu = reward_case(sizes)
        ours, dead = library.group_advantage(rewards, cu, **preset)
        truth, truly_dead = true_advantages(rewards, cu, preset)
        assert (dead == truly_dead).all()
        # rounding of the result to float32; two float64 ways to a mean differ by 1e-16, over eps 1e-6 that is 1e-10
        np.testing.assert_allclose(ours, truth, rtol=2**-23, atol=1e-9)
        assert (ours[np.repeat(truly_dead, np.diff(cu))] == 0).all()


# --- packed_logprobs ---------------------------------------------------------------------------------------------

LOGIT_SIZES = [(1, [1]), (3, [7]), (2, [31, 1, 40]), (3, [300, 2049, 5]), (2, [2048, 4097])]


class Logits:
    """Logits [rows, V] in slabs whose rows are longer than the slab is wide; what follows a row is NaN."""

    def __init__(self, rows: int, widths: list[int], spread: float, *, forbidden: bool) -> None:
        make = np.random.default_rng(rows + sum(widths))
        self.x = (make.standard_normal((rows, sum(widths))) * spread).astype(np.float32)
        if forbidden:  # a whole first slab of -inf, and some more
            self.x[:, : widths[0]] = -np.inf
            self.x[0, widths[0] :: 3] = -np.inf
        allowed = [np.flatnonzero(row > -np.inf) for row in self.x]
        self.targets = np.array([make.choice(columns) for columns in allowed], np.int64)
        self.scale = float(np.float32(0.7))
        self.starts = offsets(widths)
        self.upstream = make.standard_normal((2, rows)).astype(np.float32)

    def slabs(self) -> list[tuple[int, int, Array]]:
        result = []
        for start, end in itertools.pairwise(self.starts.tolist()):
            slab = np.full((len(self.x), end - start + 3), np.nan, np.float32)
            slab[:, : end - start] = self.x[:, start:end]
            result.append((start, end - start, slab))
        return result


def log_softmax(logits: Logits, dtype: type) -> tuple[Array, Array, Array]:
    """Return log p [rows, V], the target's, and the entropy, computed in `dtype`."""
    z = logits.x.astype(dtype) * dtype(logits.scale)
    z = z - z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True, dtype=dtype))
    finite = np.where(np.isinf(log_p), dtype(0), log_p)
    entropy = -(np.exp(log_p) * finite).sum(1, dtype=dtype)
    return log_p, log_p[np.arange(len(z)), logits.targets], entropy


def gradient(logits: Logits, dtype: type) -> Array:
    log_p, _, entropy = log_softmax(logits, dtype)
    p = np.exp(log_p)
    g, h = logits.upstream.astype(dtype)
    one_hot = np.arange(p.shape[1]) == logits.targets[:, None]
    finite = np.where(np.isinf(log_p), dtype(0), log_p)
    return dtype(logits.scale) * (g[:, None] * (one_hot - p) - h[:, None] * p * (finite + entropy[:, None]))


def assert_at_most_twice(ours: Array, numpys: Array, truth: Array, size: float, eps: float = 2**-23) -> None:
    """The rule of tests/numerics.py: twice the error of float32 numpy, or one rounding of a number of `size`."""
    assert np.isfinite(ours).all(), "not finite"
    error, theirs = np.abs(ours - truth).max(), np.abs(numpys - truth).max()
    assert error <= max(2 * theirs, size * eps), f"error {error:.3e}, numpy's {theirs:.3e}"


def folded(library: Library, logits: Logits) -> Array:
    sums = np.zeros((4, len(logits.x)), np.float32)
    sums[0], sums[3] = -np.inf, np.nan
    for start, cols, slab in logits.slabs():
        library.logit_fold(slab, cols, start, logits.targets, logits.scale, sums)
    return sums


def check_logit_fold(library: Library) -> None:
    for (rows, widths), spread in itertools.product(LOGIT_SIZES, (1.0, 50.0)):
        for forbidden in {False, len(widths) > 1}:
            logits = Logits(rows, widths, spread, forbidden=forbidden)
            row_max, sum_exp, sum_dexp, target = folded(library, logits)
            log_sum = np.log(sum_exp)
            size = float(np.abs(logits.x[np.isfinite(logits.x)]).max())
            _, theirs, their_entropy = log_softmax(logits, np.float32)
            _, truth, true_entropy = log_softmax(logits, np.float64)
            assert_at_most_twice((target - row_max) - log_sum, theirs, truth, size)
            assert_at_most_twice(log_sum - sum_dexp / sum_exp, their_entropy, true_entropy, size)


def check_logit_fold_faults(library: Library) -> None:
    """NaN and +inf come out as NaN, in their own row only; a target of another slab is left alone."""
    logits = Logits(3, [300, 500], 1.0, forbidden=False)
    logits.x[0, 3], logits.x[1, 700] = np.nan, np.inf
    logits.targets[2] = 10**6
    sums = folded(library, logits)
    assert np.isnan(sums[1]).tolist() == [True, True, False]
    assert np.isnan(sums[3, 2]), "the target lies in no slab"


def check_logit_grad(library: Library) -> None:
    for (rows, widths), spread in itertools.product(LOGIT_SIZES, (1.0, 50.0)):
        for forbidden, bf16 in itertools.product({False, len(widths) > 1}, (False, True)):
            logits = Logits(rows, widths, spread, forbidden=forbidden)
            sums = folded(library, logits)
            log_sum = np.log(sums[1])
            per_row = [sums[0], log_sum, log_sum - sums[2] / sums[1], *logits.upstream]
            parts = []
            for start, cols, slab in logits.slabs():
                parts.append(library.logit_grad(slab, cols, start, logits.targets, logits.scale, per_row, bf16=bf16))
                assert np.isnan(slab[:, cols:]).all(), "written past the end of a row"
            # p = e^z: an error of z is a relative error of p
            size = max(1.0, float(np.abs(logits.x[np.isfinite(logits.x)]).max())) * float(np.abs(logits.upstream).max())
            ours, truth = np.concatenate(parts, axis=1), gradient(logits, np.float64)
            assert_at_most_twice(ours, gradient(logits, np.float32), truth, size, 2**-8 if bf16 else 2**-23)


# --- policy_loss -------------------------------------------------------------------------------------------------

SEQUENCE_LENGTHS = [[], [0], [1, 0, 40], [5, 300, 1, 0, 129, 7]]


def policy_case(lengths: list[int], dtype: type, seed: int) -> tuple[list[Array | None], Array]:
    """The arrays of PolicyLossArgs: clips, both signs of A, A = 0, far log ratios and masked NaN all occur."""
    make = np.random.default_rng(seed)
    n, s = sum(lengths), len(lengths)
    logprobs = -np.abs(make.standard_normal(n))
    others = [logprobs + 0.3 * make.standard_normal(n) for _ in range(3)]
    for array in (*others, logprobs)[: seed % 2 * 3]:
        array[::11] -= 30  # outside of the cut
    advantages, weights, factors = make.standard_normal(s), make.random(s) + 0.1, make.random(n)
    advantages[2:3] = 0
    factors[::5] = 0
    logprobs[::5] = np.nan
    given = [array if seed < 2 or i != seed - 2 else None for i, array in enumerate([*others, factors])]
    arrays = [logprobs, *given[:3], advantages, weights, given[3]]
    if given[3] is None:
        logprobs[::5] = -1.0
    return [None if array is None else array.astype(dtype) for array in arrays], offsets(lengths)


def cut(x: float) -> tuple[float, bool]:
    return max(-20.0, min(20.0, x)), abs(x) <= 20


def true_policy_loss(arrays: list[Array | None], cu: Array, settings: PolicySettings) -> tuple[float, Array, Array]:
    """The formulas of csrc/kernels/policy_loss.h, token by token."""
    logprobs, old, ref, rollout, advantages, weights, factors = (
        None if array is None else array.astype(np.float64) for array in arrays
    )
    loss, grad = 0.0, np.zeros(len(logprobs))
    stats = np.array([0, 0, 0, 0, 0, np.inf, -np.inf, 0, 0, -np.inf])
    low, high = 1 - settings.low, 1 + settings.high
    for q, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
        w = np.full(end - begin, weights[q]) * (1 if factors is None else factors[begin:end])
        live = [begin + i for i in np.flatnonzero(w)]
        cuts = {t: (0.0, True) if old is None else cut(logprobs[t] - old[t]) for t in live}
        mean = sum(d for d, _ in cuts.values()) / max(len(live), 1)
        a = advantages[q]
        for t in live:
            token, wt = settings.ratio == 0, w[t - begin]
            r = math.exp(cuts[t][0] if token else mean)
            clipped = min(max(r, low), high)
            share = w.sum() / len(live) if settings.ratio == 1 else wt
            is_high, is_low, is_dual = a > 0 and r > high, a < 0 and r < low, a < 0 and r > settings.dual
            if settings.clip == 1:
                value, slope, is_dual = -clipped * a * logprobs[t], -clipped * a * wt, False
            else:
                value = -a * settings.dual if is_dual else max(-a * r, -a * clipped)
                follows = not (is_high or is_low or is_dual) and (cuts[t][1] or settings.ratio == 2)
                slope = -a * r * share * follows
            k = dk = 0.0
            if ref is not None:
                d, inside = cut(logprobs[t] - ref[t])
                k = (d, d * d / 2, math.expm1(-d) + d)[settings.kl]
                dk = (1.0, d, -math.expm1(-d))[settings.kl] * inside
            gap = 0.0 if rollout is None else abs(logprobs[t] - rollout[t])
            loss += wt * (value + settings.kl_coef * k)
            grad[t] = slope + wt * settings.kl_coef * dk
            stats += [1, is_low, is_high, is_dual, r, 0, 0, k, gap, 0]
            stats[5], stats[6] = min(stats[5], r), max(stats[6], r)
            stats[9] = stats[9] if rollout is None else max(stats[9], gap)
    return loss, grad, stats


def check_policy_loss(library: Library) -> None:
    kinds = itertools.product(range(3), range(2), range(3), (np.inf, 1.2), SEQUENCE_LENGTHS[1:])
    for case, (ratio, clip, kl, dual, lengths) in enumerate(kinds):
        dtype = (np.float64, np.float32)[case % 2]
        settings = PolicySettings(ratio=ratio, clip=clip, kl=kl, dual=dual)
        arrays, cu = policy_case(lengths, dtype, case % 6)
        truth = true_policy_loss(arrays, cu, settings)
        ours = library.policy_loss(arrays, cu, settings)
        # float64 inside: all that is left of float32 is the rounding of the gradient
        np.testing.assert_allclose(ours[0][0], truth[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(ours[1], truth[1], rtol=1e-12 if dtype is np.float64 else 2**-23, atol=1e-12)
        np.testing.assert_allclose(ours[2], truth[2], rtol=1e-12, atol=1e-12)
    loss, _, stats = library.policy_loss(*policy_case([], np.float32, 0), PolicySettings(ratio=0, clip=0, kl=0))
    assert loss[0] == 0 and stats.tolist() == [0, 0, 0, 0, 0, np.inf, -np.inf, 0, 0, -np.inf]
    assert len(stats) == POLICY_STATS


# --- gradient_sketch ---------------------------------------------------------------------------------------------


def sketch_case(lengths: list[int], seed: int) -> tuple[Array, Array, Array]:
    make = np.random.default_rng(seed)
    tokens = make.integers(0, 50, sum(lengths))
    logprobs = -make.exponential(2.0, len(tokens)).astype(np.float32)
    logprobs[::7], logprobs[3::11] = 0.0, -np.inf
    return tokens, logprobs, offsets(lengths)


def check_gradient_sketch(library: Library) -> None:
    for width, lengths in itertools.product((2, 64, 1024), ([], [0, 1], [3, 700, 0, 256])):
        tokens, logprobs, cu = sketch_case(lengths, width)
        if len(lengths) > 1:
            logprobs[0] = np.nan
        truth = np.zeros((len(lengths), width))
        for i, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
            for token, logprob in zip(tokens[begin:end].tolist(), logprobs[begin:end].tolist(), strict=True):
                h = mix_bits(token + 5)
                miss = 0.0 if math.isnan(logprob) else 1 - math.exp(logprob)
                truth[i, h >> (65 - width.bit_length())] += (-1) ** (h & 1) * math.floor(miss * 1024 + 0.5) / 1024
            truth[i, 0] = np.nan if np.isnan(logprobs[begin:end]).any() else truth[i, 0]
        ours = library.gradient_sketch(tokens, logprobs, cu, width=width, seed=5)
        np.testing.assert_array_equal(ours, truth)


# --- selection ---------------------------------------------------------------------------------------------------


class Rollouts:
    """Token ids of few values, so that answers overlap; groups of 0 to 40 members, some answers empty, some copied."""

    def __init__(self, seed: int, *, groups: list[int], most_tokens: int, vocabulary: int) -> None:
        make = np.random.default_rng(seed)
        lengths = make.integers(0, most_tokens + 1, sum(groups))
        lengths[make.random(len(lengths)) < 0.1] = 0
        self.cu_groups, self.cu_seqlens = offsets(groups), offsets(lengths.tolist())
        self.tokens = make.integers(0, vocabulary, self.cu_seqlens[-1]) - 2
        self.tokens[make.random(len(self.tokens)) < 0.1] = 2**40
        for i in range(1, len(lengths), 3):  # a copy of most of the one before
            (a, b, c) = self.cu_seqlens[i - 1 : i + 2]
            shared = min(b - a, c - b) * 7 // 8
            self.tokens[b : b + shared] = self.tokens[a : a + shared]
        self.classes = make.integers(-1, 2, len(lengths))

    def arguments(self) -> tuple[Array, Array, Array, Array]:
        return self.tokens, self.cu_seqlens, self.cu_groups, self.classes


def select(rollouts: Rollouts, *, tau: int, ngram: int, seed_only: bool) -> tuple[list[bool], list[int]]:
    """The rules of csrc/kernels/selection.h with Python sets and exact fractions."""
    sets = []
    for begin, end in itertools.pairwise(rollouts.cu_seqlens.tolist()):
        tokens = rollouts.tokens[begin:end].tolist()
        sets.append({tuple(tokens[p : p + ngram]) for p in range(len(tokens) - ngram + 1)})
    classes = rollouts.classes.tolist()

    def jaccard(i: int, j: int) -> Fraction:
        united = len(sets[i] | sets[j])
        return Fraction(len(sets[i] & sets[j]), united) if united else Fraction(1)

    bound = 1 - Fraction(tau, 10**6)
    kept, representative = [False] * len(sets), [-1] * len(sets)
    for begin, end in itertools.pairwise(rollouts.cu_groups.tolist()):
        for label in {c for c in classes[begin:end] if c >= 0}:
            members = [i for i in range(begin, end) if classes[i] == label]
            chosen: list[int] = []
            for i in members:
                before = chosen[:1] if seed_only else chosen
                near = [jaccard(i, j) >= bound if seed_only else jaccard(i, j) > bound for j in before]
                kept[i] = not any(near)
                chosen += [i] * kept[i]
            for i in members:
                representative[i] = i if kept[i] else max(chosen, key=lambda j: (jaccard(i, j), -j))
    return kept, representative


SELECTION_CASES = [
    {"groups": [], "most_tokens": 0, "vocabulary": 1},
    {"groups": [1, 0, 2], "most_tokens": 3, "vocabulary": 3},
    {"groups": [8, 8, 5], "most_tokens": 40, "vocabulary": 12},
    {"groups": [20, 3], "most_tokens": 700, "vocabulary": 300},
]
RULES = [(800_000, 1, False), (800_000, 1, True), (300_000, 2, False), (0, 1, True), (1_000_000, 3, False)]


def check_selection(library: Library) -> None:
    for seed, case in enumerate(SELECTION_CASES):
        rollouts = Rollouts(seed, **case)
        for tau, ngram, seed_only in RULES:
            kept, nearest = library.select_diverse(*rollouts.arguments(), tau=tau, ngram=ngram, seed_only=seed_only)
            expected, representative = select(rollouts, tau=tau, ngram=ngram, seed_only=seed_only)
            assert kept.tolist() == expected and nearest.tolist() == representative


CHECKS: dict[str, list[Callable[[Library], None]]] = {
    "choose_rollouts": [check_choose_rollouts],
    "group_advantage": [check_group_advantage],
    "packed_logprobs": [check_logit_fold, check_logit_fold_faults, check_logit_grad],
    "gradient_sketch": [check_gradient_sketch],
    "policy_loss": [check_policy_loss],
    "selection": [check_selection],
}
"""By the name of the .cu file."""
SCHEDULES = [{"seed": 0, "resident": 1}, {"seed": 1, "resident": 3}, {"seed": 2, "resident": 2}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("operators", nargs="*", default=list(CHECKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    settings = parser.parse_args()
    library = Library(settings.library)
    for operator, seed in itertools.product(settings.operators, settings.seeds):
        library.configure(**SCHEDULES[seed])
        for check in CHECKS[operator]:
            check(library)


if __name__ == "__main__":
    main()
