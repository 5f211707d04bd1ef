"""Weights that correct for completions sampled from a distribution other than the policy's own."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check
from fastrl_fast.ops.sequence_sums import sequence_sums

IMPORTANCE_KINDS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_geometric",
)

_MOST_LOG_RATIO = 20.0


class Importance(NamedTuple):
    """Which correction, and its bounds."""

    kind: str = "none"
    """One of `IMPORTANCE_KINDS`."""
    cap: float = 2.0
    """Truncated weights are at most this; masked ones are 0 above it."""
    floor: float = 0.0
    """Masked weights are 0 below this."""

    @property
    def of_sequences(self) -> bool:
        return self.kind.startswith("sequence")

    @property
    def masks(self) -> bool:
        return self.kind.endswith(("mask", "geometric"))


def check_importance(importance: Importance, rollout_logprobs: Tensor | None) -> None:
    kind, cap, floor = importance
    check(kind in IMPORTANCE_KINDS, f"importance.kind must be one of {', '.join(IMPORTANCE_KINDS)}, not {kind!r}")
    check(cap > 0, f"importance.cap must be > 0, not {cap}")
    check(0 <= floor <= cap, f"importance.floor must be in [0, importance.cap = {cap}], not {floor}")
    check(kind == "none" or rollout_logprobs is not None, f"importance.kind = {kind} needs rollout_logprobs")


def importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, cu_targets: Tensor, importance: Importance
) -> tuple[Tensor, Tensor]:
    """Return the weights and whether each was out of bounds: [N] for kinds of tokens, [S] for kinds of sequences.

    With u = exp(logprob - rollout logprob), or the product of these over a sequence: truncate w = min(u, cap); mask
    w = u where floor <= u <= cap, else 0; geometric, with u to the power of 1 / length: w = 1 inside these bounds, else
    0. The exponent is cut to [-20, 20]; no gradient.

    Args:
        logprobs, rollout_logprobs: [N] float.
        cu_targets: [S + 1] int64, offsets of the sequences into them; read for kinds of sequences.
        importance: a kind other than none.

    Source: TIS, fengyao.notion.site/off-policy-rl; IcePop's mask; algorithms.md 3.14.
    """
    logprobs = logprobs.detach()
    if importance.of_sequences:
        log_ratio = sequence_sums(logprobs, cu_targets, old_logprobs=rollout_logprobs)[:, 1].to(logprobs.dtype)
    else:
        log_ratio = logprobs - rollout_logprobs
    geometric = importance.kind == "sequence_geometric"
    if geometric:
        log_ratio = log_ratio / cu_targets.diff().clamp(min=1)
    ratio = log_ratio.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO).exp()
    if not importance.masks:
        return ratio.clamp(max=importance.cap), ratio > importance.cap
    outside = (ratio < importance.floor) | (ratio > importance.cap)
    return torch.where(outside, 0, torch.ones_like(ratio) if geometric else ratio), outside
