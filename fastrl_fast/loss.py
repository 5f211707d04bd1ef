"""The policy objective of every method in the GRPO family, as a row of settings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .config import Aggregation, LossConfig, LossKind
from .packing import Divisor
from .types import PackedBatch

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp: e^20 is 5e8, far outside any clip range, and still finite in float32."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One row: which ratio, how it is clipped, how token losses are summed, and the KL penalty."""

    ratio: Literal["token", "sequence", "sequence_token"]
    clip: Literal["ppo", "cispo"]
    clip_low: float
    clip_high: float
    aggregation: Aggregation
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_kind: Literal["k1", "k2", "k3"] = "k3"


OBJECTIVES: dict[LossKind, Objective] = {
    "grpo": Objective("token", "ppo", 0.2, 0.2, "seq-mean-token-mean"),
    "dapo": Objective("token", "ppo", 0.2, 0.28, "token-mean"),
    "dr_grpo": Objective("token", "ppo", 0.2, 0.2, "seq-mean-token-sum-norm"),
    "gspo": Objective("sequence", "ppo", 3e-4, 4e-4, "seq-mean-token-mean"),
    "gspo_token": Objective("sequence_token", "ppo", 3e-4, 4e-4, "seq-mean-token-mean"),
    # No floor in effect: 1 - clip_low = 0.
    "cispo": Objective("token", "cispo", 1.0, 0.2, "token-mean"),
}


def build_objective(config: LossConfig) -> Objective:
    """The row of `config.kind` with the fields that the config overrides."""
    row = OBJECTIVES[config.kind]
    return replace(
        row,
        clip_low=row.clip_low if config.clip_low is None else config.clip_low,
        clip_high=row.clip_high if config.clip_high is None else config.clip_high,
        aggregation=config.aggregation or row.aggregation,
        dual_clip=config.dual_clip,
        kl_coef=config.kl_coef,
        kl_kind=config.kl_kind,
    )


def policy_loss(
    logprobs: Tensor, batch: PackedBatch, objective: Objective, *, divisor: Divisor, max_completion_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the step's loss, and sums for the metrics.

    logprobs [N] float32 of the trained policy. Per token, with ratio r and advantage A: ppo: max(-A r, -A clip(r)),
    at most
    -A dual_clip where A < 0; cispo: -sg(clip(r)) A logprob; plus kl_coef x KL. Token losses are weighted so that the
    parts of all micro-batches of all ranks add up to the aggregation over the whole update. Where
    `batch.old_logprobs` is None the policy has not been updated since sampling, and its own detached logprobs are the
    old ones (ratio exactly 1).
    """
    sequence = _sequence_index(batch)
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = _ratio(log_ratio, logprobs, batch, sequence, objective.ratio)
    advantage = batch.advantages[sequence]
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.clip == "cispo":
        token_loss = -clipped.detach() * advantage * logprobs
    else:
        token_loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        if objective.dual_clip is not None:
            token_loss = torch.where(
                advantage < 0, torch.minimum(token_loss, -advantage * objective.dual_clip), token_loss
            )
    stats = _ratio_stats(ratio.detach(), advantage, objective)
    if objective.kl_coef > 0:
        assert batch.ref_logprobs is not None, "a KL penalty needs reference logprobs"
        kl = KL_KINDS[objective.kl_kind]((logprobs - batch.ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        token_loss = token_loss + objective.kl_coef * kl
        stats["kl"] = kl.detach().sum()
    weight = token_weights(batch, objective.aggregation, divisor=divisor, max_completion_tokens=max_completion_tokens)
    return (token_loss * weight).sum(), stats


def token_weights(
    batch: PackedBatch, aggregation: Aggregation, *, divisor: Divisor, max_completion_tokens: int
) -> Tensor:
    """Weight [N] of each token loss in the sum over the update.

    With sequence weight w and length L: token-mean w / loss tokens; seq-mean-token-mean w / (L x sequences);
    seq-mean-token-sum-norm w / (max_completion_tokens x sequences). Where the update has no token the divisor is 0, and
    so is the number of weights.
    """
    sequence = _sequence_index(batch)
    weights = batch.weights[sequence]
    if aggregation == "token-mean":
        return weights / divisor.loss_tokens
    if aggregation == "seq-mean-token-mean":
        return weights / batch.cu_targets.diff()[sequence] / divisor.loss_sequences
    return weights / (max_completion_tokens * divisor.loss_sequences)


def _sequence_index(batch: PackedBatch) -> Tensor:
    """[N] int64: which sequence each target belongs to."""
    lengths = batch.cu_targets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def _ratio(log_ratio: Tensor, logprobs: Tensor, batch: PackedBatch, sequence: Tensor, kind: str) -> Tensor:
    if kind == "token":
        return log_ratio.exp()
    lengths = batch.cu_targets.diff()
    sums = torch.zeros(len(lengths), dtype=log_ratio.dtype, device=log_ratio.device).index_add(0, sequence, log_ratio)
    mean = (sums / lengths.clamp(min=1))[sequence]
    if kind == "sequence":
        return mean.exp()
    return (mean.detach() + logprobs - logprobs.detach()).exp()


def _ratio_stats(ratio: Tensor, advantage: Tensor, objective: Objective) -> dict[str, Tensor]:
    """Counts of tokens whose gradient the clip took away, by the side it acts on, and the ratio's sum."""
    return {
        "clipped_low": ((ratio < 1 - objective.clip_low) & (advantage < 0)).sum(),
        "clipped_high": ((ratio > 1 + objective.clip_high) & (advantage > 0)).sum(),
        "ratio": ratio.sum(),
    }


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(-log_ratio) + log_ratio


KL_KINDS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Estimators of KL(policy || reference) from log_ratio = logprob - ref_logprob."""
