"""Every objective against loops over tokens, published numbers, and invariance under packing, order and splitting."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from fastrl_fast.config import LossConfig
from fastrl_fast.loss import OBJECTIVES, Objective, build_objective, loss_terms, policy_loss, sum_names
from fastrl_fast.model import Policy
from fastrl_fast.ops import policy_loss as loss_operator
from fastrl_fast.packing import Divisor, Sequence, pack
from fastrl_fast.types import PackedBatch

MAX_TOKENS = 10


def make_batch(lengths: list[int], seed: int = 0, *, spread: float = 0.4) -> tuple[torch.Tensor, PackedBatch]:
    """Float64 logprobs [N] that want a gradient, and a batch whose old and reference logprobs differ from them."""
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    advantages, weights = noise(len(lengths)).tolist(), (1 + noise(len(lengths)).abs()).tolist()
    batch = pack(
        [Sequence([1], [2] * n, [-1.0] * n, a, w) for n, a, w in zip(lengths, advantages, weights, strict=True)]
    )
    total = sum(lengths)
    logprobs = -noise(total).abs()
    batch = replace(
        batch,
        advantages=batch.advantages.double(),
        weights=batch.weights.double(),
        old_logprobs=logprobs + spread * noise(total),
        ref_logprobs=logprobs + spread * noise(total),
    )
    return logprobs.requires_grad_(), batch


def whole(batch: PackedBatch) -> Divisor:
    lengths = batch.cu_targets.diff()
    return Divisor(float((batch.weights * lengths).sum()), float(batch.weights[lengths > 0].sum()))


def naive(logprobs: list[float], batch: PackedBatch, objective: Objective, divisor: Divisor) -> float:
    """The objective as one would write it on paper: loops over sequences and tokens, Python floats."""
    loss = 0.0
    borders = batch.cu_targets.tolist()
    for s, (a, b) in enumerate(itertools.pairwise(borders)):
        adv, weight = float(batch.advantages[s]), float(batch.weights[s])
        new, old, ref = logprobs[a:b], batch.old_logprobs[a:b].tolist(), batch.ref_logprobs[a:b].tolist()
        mean = sum(n - o for n, o in zip(new, old, strict=True)) / max(b - a, 1)
        sequence_loss = 0.0
        for n, o, r in zip(new, old, ref, strict=True):
            ratio = math.exp(n - o if objective.ratio == "token" else mean)
            clipped = min(max(ratio, 1 - objective.clip_low), 1 + objective.clip_high)
            if objective.clip == "cispo":
                token = -clipped * adv * n
            else:
                token = -min(ratio * adv, clipped * adv)
                if objective.dual_clip is not None and adv < 0:
                    token = min(token, -objective.dual_clip * adv)
            d = n - r
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[objective.kl_kind]
            sequence_loss += token + objective.kl_coef * kl
        if objective.aggregation == "token-mean":
            loss += weight * sequence_loss / divisor.loss_tokens
        elif objective.aggregation == "seq-mean-token-mean":
            loss += weight * sequence_loss / (b - a) / divisor.loss_sequences
        else:
            loss += weight * sequence_loss / MAX_TOKENS / divisor.loss_sequences
    return loss


def evaluate(
    logprobs: torch.Tensor, batch: PackedBatch, objective: Objective, divisor: Divisor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, stats = loss_operator(
        logprobs, **loss_terms(batch, objective, divisor=divisor, max_completion_tokens=MAX_TOKENS)
    )
    return loss, stats._asdict()


def ours(logprobs: torch.Tensor, batch: PackedBatch, objective: Objective, divisor: Divisor) -> torch.Tensor:
    return evaluate(logprobs, batch, objective, divisor)[0]


def one_token(advantage: float, ratio: float, **settings: object) -> float:
    batch = pack([Sequence([1], [2], [0.0], advantage, 1.0)])
    batch.old_logprobs = torch.tensor([-math.log(ratio)], dtype=torch.float64)
    objective = build_objective(LossConfig(**settings))
    return float(ours(torch.zeros(1, dtype=torch.float64), batch, objective, Divisor(1, 1)))


@pytest.mark.parametrize("aggregation", [None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_equals_loops_over_tokens(kind, aggregation):
    logprobs, batch = make_batch([3, 1, 7, 2, 5], seed=len(kind))
    for dual_clip, kl in itertools.product((None, 1.1), (None, "k1", "k2", "k3")):
        config = LossConfig(
            kind=kind, aggregation=aggregation, dual_clip=dual_clip, kl_coef=0.3 if kl else 0.0, kl_kind=kl or "k3"
        )
        objective = build_objective(config)
        loss = ours(logprobs, batch, objective, whole(batch))
        truth = naive(logprobs.tolist(), batch, objective, whole(batch))
        assert float(loss.detach()) == pytest.approx(truth, abs=1e-12), config
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_gradient_is_the_slope_of_the_loops(kind):
    """For objectives without a stopped gradient central differences of the naive loss are the truth."""
    objective = build_objective(LossConfig(kind=kind, dual_clip=1.5, kl_coef=0.2, clip_low=0.2, clip_high=0.25))
    logprobs, batch = make_batch([3, 1, 4], seed=5)
    (gradient,) = torch.autograd.grad(ours(logprobs, batch, objective, whole(batch)), logprobs)
    values, h = logprobs.tolist(), 1e-6
    for i in range(len(values)):
        up, down = (
            naive([v + s * h * (j == i) for j, v in enumerate(values)], batch, objective, whole(batch)) for s in (1, -1)
        )
        assert float(gradient[i]) == pytest.approx((up - down) / (2 * h), abs=1e-8)


def test_dual_clip_and_sides_of_the_clip():
    """L13."""
    dapo = dict(kind="dapo", clip_low=0.2, clip_high=0.28)
    assert one_token(-1.0, 50.0, **dapo) == pytest.approx(50)
    assert one_token(-1.0, 50.0, **dapo, dual_clip=3.0) == pytest.approx(3)
    assert one_token(1.0, 50.0, **dapo) == pytest.approx(-1.28)
    assert one_token(1.0, 50.0, **dapo, dual_clip=3.0) == pytest.approx(-1.28)
    assert one_token(1.0, 0.5, **dapo) == pytest.approx(-0.5)


def test_clip_counts_are_of_tokens_whose_gradient_the_clip_took():
    """L16, L13: by the sign of the advantage, one side each."""
    ratios = [0.5, 1.0, 1.5]
    for advantage, expected in ((1.0, (0, 1)), (-1.0, (1, 0))):
        batch = pack([Sequence([1], [2] * 3, [0.0] * 3, advantage, 1.0)])
        batch.old_logprobs = -torch.tensor(ratios).log()
        new = torch.zeros(3, requires_grad=True)
        loss, stats = evaluate(new, batch, OBJECTIVES["grpo"], Divisor(3, 1))
        assert (int(stats["clipped_low"]), int(stats["clipped_high"])) == expected
        (gradient,) = torch.autograd.grad(loss, new)
        assert int((gradient == 0).sum()) == sum(expected)


def test_divisors_below_one_divide():
    """Weights may be shares: half a rollout in the whole update is still averaged over half a rollout."""
    for kind in OBJECTIVES:
        values = []
        for weight in (1.0, 0.125):
            batch = pack([Sequence([1], [2] * 3, [0.0] * 3, 0.5, weight)])
            loss = ours(torch.zeros(3), batch, OBJECTIVES[kind], Divisor(3 * weight, weight))
            values.append(float(loss))
        assert values[0] == values[1]


def test_ratios_are_per_token():
    """L12: [1.10, .90, 1.50] -> [1.10, .90, 1.20], not one ratio of 1.485."""
    batch = pack([Sequence([1], [2, 3, 4], [0.0] * 3, 1.0, 1.0)])
    batch.old_logprobs = torch.tensor([0.5, 0.4, 0.2], dtype=torch.float64).log()
    new = torch.tensor([0.55, 0.36, 0.30], dtype=torch.float64).log()
    loss, stats = evaluate(new, batch, build_objective(LossConfig()), Divisor(3, 1))
    assert float(loss) == pytest.approx(-(1.10 + 0.90 + 1.20) / 3)
    assert float(stats["ratio"]) == pytest.approx(1.10 + 0.90 + 1.50)
    assert (int(stats["clipped_low"]), int(stats["clipped_high"])) == (0, 1)


@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
def test_gspo_ratio_is_normalised_by_length_and_sequences_weigh_equally(kind):
    """L07: 10 and 1000 tokens, each log ratio 0.01, both give s = 1.01005."""
    lengths = [10, 1000]
    batch = pack([Sequence([1], [2] * n, [0.0] * n, a, 1.0) for n, a in zip(lengths, (1.0, 1.0), strict=True)])
    batch.old_logprobs = torch.full((1010,), -0.01, dtype=torch.float64)
    objective = build_objective(LossConfig(kind=kind, clip_low=0.5, clip_high=0.5))
    new = torch.zeros(1010, dtype=torch.float64, requires_grad=True)
    loss, stats = evaluate(new, batch, objective, Divisor(1010, 2))
    assert float(stats["ratio"]) / 1010 == pytest.approx(1.01005, abs=1e-5)
    assert float(loss.detach()) == pytest.approx(-1.01005, abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, new)
    assert float(gradient[:10].sum()) == pytest.approx(float(gradient[10:].sum()))


def test_gspo_and_gspo_token_have_equal_values_and_gradients():
    """With one advantage per sequence the two are the same function (GSPO paper, section 4.3)."""
    logprobs, batch = make_batch([3, 1, 7, 2], spread=3e-4)
    results = []
    for kind in ("gspo", "gspo_token"):
        loss = ours(logprobs, batch, build_objective(LossConfig(kind=kind)), whole(batch))
        results.append((loss.detach(), *torch.autograd.grad(loss, logprobs)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_cispo_keeps_the_gradient_of_every_token():
    logprobs, batch = make_batch([3, 4, 5], spread=3.0)
    objective = build_objective(LossConfig(kind="cispo"))
    (gradient,) = torch.autograd.grad(ours(logprobs, batch, objective, whole(batch)), logprobs)
    assert gradient.all()
    ratio = (logprobs.detach() - batch.old_logprobs).exp()
    assert float(ratio.min()) < 0.8 and float(ratio.max()) > 1.2, "some tokens lie outside the clip range"
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 4, 5]))
    expected = -(ratio.clamp(0, 1.2) * batch.advantages[sequence] * batch.weights[sequence]) / whole(batch).loss_tokens
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    (ppo,) = torch.autograd.grad(ours(logprobs, batch, OBJECTIVES["dapo"], whole(batch)), logprobs)
    assert not ppo.all(), "where the clip of dapo takes gradients away"


KL_KINDS = ("k1", "k2", "k3")


def kl_of(kind: str, d: torch.Tensor) -> torch.Tensor:
    """The operator's estimate for each log ratio [N], one token per sequence."""
    zero, one = torch.zeros(1, dtype=d.dtype), torch.ones(1, dtype=d.dtype)
    cu = torch.tensor([0, 1])
    return torch.stack([loss_operator(x[None], zero, one, cu, ref_logprobs=zero, kl=kind, kl_coef=1.0)[0] for x in d])


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_estimators(kind):
    closed = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d}[kind]
    for d in (-3.0, -1e-4, 0.0, 0.5, 3.0):
        value = float(kl_of(kind, torch.tensor([d], dtype=torch.float64)))
        assert value == pytest.approx(closed(d), rel=1e-6, abs=1e-15)
    # Small differences do not cancel in float32 either.
    small = float(kl_of("k3", torch.tensor([1e-3])))
    assert small == pytest.approx(math.exp(-1e-3) - 1 + 1e-3, rel=1e-3)


def test_expected_k3_is_the_kl():
    """E over the policy of k1 and of k3 is KL(policy || reference)."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    d = (p / q).log()
    kl = float((p * d).sum())
    assert float((p * kl_of("k1", d)).sum()) == pytest.approx(kl)
    assert float((p * kl_of("k3", d)).sum()) == pytest.approx(kl)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_huge_log_ratios_give_finite_gradients(kind, gap):
    """L03: exp overflows before an outer clamp would act, and the gradient is NaN."""
    for kl_kind in KL_KINDS:
        batch = pack([Sequence([1], [2, 3], [0.0] * 2, a, 1.0) for a in (1.0, -1.0)])
        batch.old_logprobs = batch.ref_logprobs = torch.full((4,), -gap)
        new = torch.zeros(4, requires_grad=True)
        objective = build_objective(LossConfig(kind=kind, kl_coef=0.1, kl_kind=kl_kind))
        loss = ours(new, batch, objective, Divisor(4, 2))
        (gradient,) = torch.autograd.grad(loss, new)
        assert loss.isfinite() and gradient.isfinite().all()


def test_token_mean_is_over_the_whole_update():
    """L02: losses 1, 1, 1 in one micro-batch and 10 in the other give 3.25, not 5.5."""
    first = pack([Sequence([1], [2] * 3, [0.0] * 3, -1.0, 1.0)])
    second = pack([Sequence([1], [2], [0.0], -10.0, 1.0)])
    total = sum(
        float(ours(torch.zeros(b.targets.numel()), b, OBJECTIVES["dapo"], Divisor(4, 2))) for b in (first, second)
    )
    assert total == 3.25


def test_old_logprobs_may_be_the_policys_own():
    """L11: without stored old logprobs the ratio is exactly 1, with the gradient of old = detached new."""
    for kind in OBJECTIVES:
        logprobs, batch = make_batch([3, 1, 4])
        results = []
        for old in (None, logprobs.detach().clone()):
            batch.old_logprobs = old
            loss, stats = evaluate(logprobs, batch, OBJECTIVES[kind], whole(batch))
            assert float(stats["ratio"]) == 8.0
            results.append((loss.detach(), *torch.autograd.grad(loss, logprobs)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_epoch_is_off_policy():
    """L11: after an update the ratio to the stored logprobs is no longer 1 and the clip acts."""
    logprobs = torch.full((8,), -1.0, requires_grad=True)
    batch = pack([Sequence([1], [2] * 4, [0.0] * 4, a, 1.0) for a in (1.0, -1.0)])
    batch.old_logprobs = logprobs.detach().clone()
    ratios, clipped = [], []
    for _ in range(2):
        loss, stats = evaluate(logprobs, batch, OBJECTIVES["grpo"], Divisor(8, 2))
        (gradient,) = torch.autograd.grad(loss, logprobs)
        with torch.no_grad():
            logprobs -= 5.0 * gradient
        ratios.append(float(stats["ratio"]))
        clipped.append((int(stats["clipped_low"]), int(stats["clipped_high"])))
    assert ratios[0] == 8.0 and ratios[1] != 8.0
    assert clipped == [(0, 0), (4, 4)], "L16: each side counts the tokens whose gradient it took"


def test_a_dropped_rollout_cannot_move_the_loss():
    """L06: what is not in the batch has no way in, and weight 0 is the same as not being there."""
    sequences = [Sequence([1], [2] * n, [0.0] * n, a, 1.0) for n, a in ((3, 1.0), (2, -1.0))]
    extra = Sequence([1], [2] * 4, [0.0] * 4, 7.0, 0.0)
    without, having = pack(sequences), pack([*sequences, extra])
    for kind in OBJECTIVES:
        values = []
        for batch in (without, having):
            logprobs = torch.arange(batch.targets.numel(), dtype=torch.float64) * -0.1
            batch.old_logprobs = logprobs - 0.05
            values.append(float(ours(logprobs, batch, OBJECTIVES[kind], Divisor(5, 2))))
        assert values[0] == pytest.approx(values[1], abs=1e-15)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_weights_multiply(kind):
    """A rollout of weight 3 is three rollouts."""
    long, short = Sequence([1], [2] * 4, [-0.5] * 4, 1.5, 1.0), Sequence([1], [2], [-0.5], -0.5, 1.0)
    heavy, copies = pack([replace(long, weight=3.0), short]), pack([long, long, long, short])
    for batch in (heavy, copies):
        batch.old_logprobs = torch.full((batch.targets.numel(),), -0.1, dtype=torch.float64)
    results = [
        float(ours(torch.zeros(b.targets.numel(), dtype=torch.float64), b, OBJECTIVES[kind], whole(b)))
        for b in (heavy, copies)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_empty_update_has_loss_zero_and_gradients_zero(kind, make_lm):
    """L08, P02: nothing to divide by."""
    policy = Policy(make_lm(), temperature=1.0)
    batch = pack([])
    objective = build_objective(LossConfig(kind=kind, kl_coef=0.1))
    batch.ref_logprobs = policy(batch)[0].detach()
    for divisor in (Divisor(0, 0), Divisor(10, 2)):
        settings = {"batch": batch, "objective": objective, "divisor": divisor, "max_completion_tokens": MAX_TOKENS}
        loss, sums = policy(batch, partial(policy_loss, **settings))
        assert float(loss.detach()) == 0.0 and all(float(v) == 0.0 for v in sums.values())
        assert list(sums) == sum_names(objective)
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


SPLITS = {
    "one row": [[0, 1, 2, 3, 4, 5]],
    "reversed": [[5, 4, 3, 2, 1, 0]],
    "one by one": [[3], [0], [5], [1], [2], [4]],
    "three rows, one empty": [[4, 0], [], [1, 5, 2], [3]],
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_gradient_does_not_depend_on_packing_order_or_splitting(kind, make_lm):
    """Invariant (a) of the design; L01, L02, P11."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(89, (n,), generator=generator).tolist() for n in (4, 7, 3, 1, 9, 5)]
    sequences = [Sequence([7, i], c, [0.0] * len(c), 0.7 - 0.5 * i, 1.0 + i % 3) for i, c in enumerate(ids)]
    policy = Policy(make_lm(), temperature=0.8)
    objective = build_objective(LossConfig(kind=kind, kl_coef=0.1))
    divisor = Divisor(sum(s.weight * len(s.completion_ids) for s in sequences), sum(s.weight for s in sequences))
    with torch.no_grad():
        alone = [policy(pack([s]))[0] for s in sequences]
    results = []
    for split in SPLITS.values():
        policy.zero_grad(set_to_none=True)
        for members in split:
            batch = pack([sequences[i] for i in members])
            shifted = torch.cat([alone[i] + 0.02 * math.sin(i) for i in members]) if members else torch.zeros(0)
            batch.old_logprobs, batch.ref_logprobs = shifted, shifted - 0.3
            ours(policy(batch)[0], batch, objective, divisor).backward()
        results.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    assert float(results[0].norm()) > 1e-3
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-6)


def test_objective_rows_can_be_overridden_field_by_field():
    row = build_objective(LossConfig(kind="dapo"))
    assert row == OBJECTIVES["dapo"]
    changed = build_objective(LossConfig(kind="dapo", clip_low=0.0, aggregation="seq-mean-token-mean", dual_clip=3.0))
    assert changed == replace(row, clip_low=0.0, aggregation="seq-mean-token-mean", dual_clip=3.0)


def test_a_kl_penalty_without_reference_logprobs_cannot_happen():
    logprobs, batch = make_batch([2])
    with pytest.raises(AssertionError, match="reference"):
        ours(logprobs, replace(batch, ref_logprobs=None), build_objective(LossConfig(kl_coef=0.1)), whole(batch))
