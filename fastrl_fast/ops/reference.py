"""Each operator in plain float64 PyTorch or Python: slow, short and evidently right. Tests compare with these."""

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops.group_advantage import PRESETS
from fastrl_fast.ops.loss_settings import LossSettings


def packed_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    row_index: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return logprobs [N] and entropy [N] in `dtype` from a whole [N, V] log_softmax; autograd gives the gradients."""
    rows = hidden if row_index is None else hidden[row_index]
    logits = rows.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    finite = log_p.masked_fill(log_p == -math.inf, 0)  # 0 ln 0 = 0
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * finite).sum(1)


def group_advantage(rewards: Tensor, cu_group_sizes: Tensor, *, preset: str = "trl") -> tuple[Tensor, Tensor]:
    """Return advantages [N] float64 and dead [G] bool, group by group."""
    p = PRESETS[preset]
    advantages, dead = torch.zeros(rewards.shape, dtype=torch.float64), []
    offsets = cu_group_sizes.tolist()
    for begin, end in pairwise(offsets):
        group = rewards[begin:end].to(torch.float64)
        graded = group[~group.isnan()]
        n = graded.numel()
        dead.append(n < 2 or bool(graded.min() == graded.max()))
        if dead[-1]:
            continue
        centred = group - graded.mean()
        if p.divide_by_std:
            centred = centred / (graded.std(correction=p.ddof) + p.eps)
        if p.leave_one_out:
            centred = centred * n / (n - 1)
        advantages[begin:end] = centred.nan_to_num(nan=0.0)
    return advantages, torch.tensor(dead, dtype=torch.bool)


def select_diverse(
    token_ids: Tensor,
    cu_seqlens: Tensor,
    cu_group_sizes: Tensor,
    classes: Tensor,
    *,
    rule: str = "mdap",
    tau: float = 0.8,
    ngram: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return kept [N] and representative [N] with Python sets and exact fractions."""
    tokens, cuts, groups, labels = token_ids.tolist(), cu_seqlens.tolist(), cu_group_sizes.tolist(), classes.tolist()
    sets = [{tuple(tokens[p : p + ngram]) for p in range(begin, end - ngram + 1)} for begin, end in pairwise(cuts)]

    def jaccard(i: int, j: int) -> Fraction:
        united = len(sets[i] | sets[j])
        return Fraction(len(sets[i] & sets[j]), united) if united else Fraction(1)

    bound = 1 - Fraction(round(tau * 1_000_000), 1_000_000)
    kept, representative = [False] * len(labels), [-1] * len(labels)
    for begin, end in pairwise(groups):
        for label in {x for x in labels[begin:end] if x >= 0}:
            members = [i for i in range(begin, end) if labels[i] == label]
            chosen: list[int] = []
            for i in members:
                if rule == "mdap":
                    kept[i] = all(jaccard(i, j) <= bound for j in chosen)
                else:
                    kept[i] = not chosen or jaccard(i, chosen[0]) < bound
                if kept[i]:
                    chosen.append(i)
            for i in members:
                representative[i] = i if kept[i] else max(chosen, key=lambda j: (jaccard(i, j), -j))
    return torch.tensor(kept, dtype=torch.bool), torch.tensor(representative, dtype=torch.int64)


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cu_targets: Tensor,
    *,
    token_weights: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the statistics by name, in the dtype of `logprobs`; autograd gives the gradient.

    No token may be masked.
    """
    ratio, clip, kl, clip_low, clip_high, dual_clip, kl_coef = LossSettings(**settings)
    lengths = cu_targets.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    a = advantages[sequence]
    r = _ratios(logprobs, logprobs.detach() if old_logprobs is None else old_logprobs, sequence, lengths, ratio)
    clipped = r.clamp(1 - clip_low, 1 + clip_high)
    if clip == "cispo":
        token_loss = -clipped.detach() * a * logprobs
    else:
        token_loss = torch.maximum(-a * r, -a * clipped)
        if dual_clip is not None:
            token_loss = torch.where(a < 0, torch.minimum(token_loss, -a * dual_clip), token_loss)
    k = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        d = (logprobs - ref_logprobs).clamp(-20, 20)
        k = {"k1": d, "k2": 0.5 * d.square(), "k3": torch.expm1(-d) + d}[kl]
    stats = {
        "tokens": torch.tensor(len(a)),
        "clipped_low": ((r < 1 - clip_low) & (a < 0)).sum(),
        "clipped_high": ((r > 1 + clip_high) & (a > 0)).sum(),
        "clipped_dual": ((r > (dual_clip or math.inf)) & (a < 0) & (clip == "ppo")).sum(),
        "ratio": r.sum(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        "kl": k.sum(),
    }
    if rollout_logprobs is not None:
        gap = (logprobs - rollout_logprobs).abs()
        stats |= {"sampler_gap": gap.sum(), "sampler_gap_max": gap.max()}
    w = weights[sequence] * (1 if token_weights is None else token_weights)
    return (w * (token_loss + kl_coef * k)).sum(), {name: value.detach() for name, value in stats.items()}


def _ratios(logprobs: Tensor, old: Tensor, sequence: Tensor, lengths: Tensor, kind: str) -> Tensor:
    log_ratio = (logprobs - old).clamp(-20, 20)
    if kind != "token":
        sums = torch.zeros(len(lengths), dtype=log_ratio.dtype).index_add(0, sequence, log_ratio)
        mean = (sums / lengths.clamp(min=1))[sequence]
        log_ratio = mean if kind == "sequence" else mean.detach() + (logprobs - logprobs.detach())
    return log_ratio.exp()
