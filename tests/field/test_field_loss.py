"""Public bug reports about the loss, each on its smallest input; helpers are those of the loss's own tests."""

import math

import pytest
import torch
from test_loss import one_token, ours

from fastrl_fast.config import LossConfig
from fastrl_fast.loss import OBJECTIVES, build_objective
from fastrl_fast.model import Policy
from fastrl_fast.ops import packed_logprobs
from fastrl_fast.ops import policy_loss as loss_operator
from fastrl_fast.packing import Divisor, Sequence, pack


def test_L01_L02_the_gradient_is_that_of_the_whole_step_however_it_is_split(make_lm) -> None:
    rows = [Sequence([7, i], [3 + i] * (i + 1), [0.0] * (i + 1), 0.5 - i, 1.0) for i in range(8)]
    policy = Policy(make_lm(), temperature=1.0)
    whole = Divisor(sum(len(s.completion_ids) for s in rows), 8.0)
    gradients = []
    for pieces in (1, 2, 4, 8):
        policy.zero_grad(set_to_none=True)
        for i in range(pieces):
            batch = pack(rows[i::pieces])
            ours(policy(batch)[0], batch, OBJECTIVES["dapo"], whole).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm()) < 1e-6 * float(gradients[0].norm())


def test_L02_losses_1_1_1_and_10_are_325_and_not_55() -> None:
    parts = [pack([Sequence([1], [2] * 3, [0.0] * 3, -1.0, 1.0)]), pack([Sequence([1], [2], [0.0], -10.0, 1.0)])]
    assert sum(float(ours(torch.zeros(b.targets.numel()), b, OBJECTIVES["dapo"], Divisor(4, 2))) for b in parts) == 3.25


@pytest.mark.parametrize("gap", [100.0, 30.0, -100.0, math.inf, -math.inf])
def test_L03_a_huge_kl_has_a_finite_gradient(gap: float) -> None:
    new = torch.zeros(1, requires_grad=True)
    reference = torch.tensor([gap])
    cu, zero = torch.tensor([0, 1]), torch.zeros(1)
    loss, _ = loss_operator(new, zero, torch.ones(1), cu, ref_logprobs=reference, kl="k3", kl_coef=1.0)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.isfinite().all() and loss.isfinite()


def test_L05_a_forbidden_token_has_no_part_in_the_entropy() -> None:
    hidden = torch.eye(1, requires_grad=True)
    logits = torch.tensor([[0.0], [1.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0])
    zero = torch.zeros(1, dtype=torch.int64)
    _, plain = packed_logprobs(hidden, logits, zero, bias=bias)
    three = torch.cat([logits, torch.zeros(1, 1)])
    _, entropy = packed_logprobs(hidden, three, zero, bias=torch.tensor([0.0, 0.0, -math.inf]))
    assert float(entropy.detach()) == pytest.approx(0.5822, abs=1e-4)
    assert float(entropy.detach()) == float(plain.detach())
    entropy.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["grpo", "dapo", "gspo"])
def test_L06_what_is_not_trained_on_moves_nothing(kind: str) -> None:
    rows = [Sequence([1], [2] * 3, [0.0] * 3, 1.0, 1.0), Sequence([1], [2] * 2, [0.0] * 2, -1.0, 1.0)]
    masked = Sequence([1], [2] * 4, [0.0] * 4, 3.0, 0.0)
    truth = None
    for old in (-2.0, -6.0, math.nan):
        batch = pack([*rows, masked])
        new = torch.full((9,), -0.5, requires_grad=True)
        batch.old_logprobs = torch.cat([torch.full((5,), -0.6), torch.full((4,), old)])
        loss = ours(new, batch, OBJECTIVES[kind], Divisor(5, 2))
        (gradient,) = torch.autograd.grad(loss, new)
        assert not gradient[5:].any()
        result = (float(loss.detach()), gradient.tolist())
        truth = truth or result
        assert result == truth


@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
def test_L07_a_sequence_ratio_is_a_mean_and_sequences_weigh_alike(kind: str) -> None:
    lengths = (10, 1000)
    batch = pack([Sequence([1], [2] * n, [0.0] * n, 1.0, 1.0) for n in lengths])
    batch.old_logprobs = torch.full((1010,), -0.01)
    objective = build_objective(LossConfig(kind=kind, clip_low=0.5, clip_high=0.5))
    new = torch.zeros(1010, requires_grad=True)
    loss = ours(new, batch, objective, Divisor(1010, 2))
    assert float(loss.detach()) == pytest.approx(-1.01005, abs=1e-4)
    (gradient,) = torch.autograd.grad(loss, new)
    assert float(gradient[:10].sum()) == pytest.approx(float(gradient[10:].sum()), rel=1e-4)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_L08_nothing_left_is_loss_zero(kind: str) -> None:
    new = torch.zeros(0, requires_grad=True)
    loss = ours(new, pack([]), OBJECTIVES[kind], Divisor(0, 0))
    loss.backward()
    assert float(loss.detach()) == 0.0 and new.grad is not None and new.grad.isfinite().all()


def test_L12_ratios_are_per_token() -> None:
    batch = pack([Sequence([1], [2, 3, 4], [0.0] * 3, 1.0, 1.0)])
    batch.old_logprobs = torch.tensor([0.5, 0.4, 0.2]).log()
    loss = ours(torch.tensor([0.55, 0.36, 0.30]).log(), batch, OBJECTIVES["grpo"], Divisor(3, 1))
    assert float(loss) == pytest.approx(-(1.10 + 0.90 + 1.20) / 3, abs=1e-5)


def test_L13_the_sides_of_the_clip() -> None:
    dapo = dict(kind="dapo", clip_low=0.2, clip_high=0.28)
    assert one_token(-1.0, 50.0, **dapo) == pytest.approx(50)
    assert one_token(-1.0, 50.0, **dapo, dual_clip=3.0) == pytest.approx(3)
    assert one_token(1.0, 50.0, **dapo) == pytest.approx(-1.28)
    assert one_token(1.0, 0.5, **dapo) == pytest.approx(-0.5)


def test_V03_a_long_sequence_ratio_stays_finite() -> None:
    batch = pack([Sequence([1], [2] * 2000, [0.0] * 2000, 1.0, 1.0)])
    batch.old_logprobs = torch.full((2000,), -0.05)
    new = torch.zeros(2000, requires_grad=True)
    loss = ours(new, batch, OBJECTIVES["gspo"], Divisor(2000, 1))
    loss.backward()
    assert loss.isfinite() and new.grad is not None and new.grad.isfinite().all()
