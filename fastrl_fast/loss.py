"""The policy objective of every method in the GRPO family, as a row of settings."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from . import ops
from .config import Aggregation, LossConfig, LossKind
from .packing import Divisor
from .types import PackedBatch


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
    if objective.kl_coef > 0:
        assert batch.ref_logprobs is not None, "a KL penalty needs reference logprobs"
    weights = _weights(batch, objective.aggregation, divisor=divisor, max_completion_tokens=max_completion_tokens)
    loss, stats = ops.policy_loss(
        logprobs,
        batch.advantages,
        weights,
        batch.cu_targets,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs if objective.kl_coef > 0 else None,
        ratio=objective.ratio,
        clip=objective.clip,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        kl=objective.kl_kind,
        kl_coef=objective.kl_coef,
    )
    sums = {"clipped_low": stats.clipped_low, "clipped_high": stats.clipped_high, "ratio": stats.ratio}
    return loss, sums | ({"kl": stats.kl} if objective.kl_coef > 0 else {})


def token_weights(
    batch: PackedBatch, aggregation: Aggregation, *, divisor: Divisor, max_completion_tokens: int
) -> Tensor:
    """Weight [N] of each token loss in the sum over the update.

    With sequence weight w and length L: token-mean w / loss tokens; seq-mean-token-mean w / (L x sequences);
    seq-mean-token-sum-norm w / (max_completion_tokens x sequences). Where the update has no token the divisor is 0, and
    so is the number of weights.
    """
    weights = _weights(batch, aggregation, divisor=divisor, max_completion_tokens=max_completion_tokens)
    return torch.repeat_interleave(weights, batch.cu_targets.diff())


def _weights(batch: PackedBatch, aggregation: Aggregation, *, divisor: Divisor, max_completion_tokens: int) -> Tensor:
    """Weight [S] of each sequence's tokens; not finite where a sequence has none."""
    if aggregation == "token-mean":
        return batch.weights / divisor.loss_tokens
    if aggregation == "seq-mean-token-mean":
        return batch.weights / batch.cu_targets.diff() / divisor.loss_sequences
    return batch.weights / (max_completion_tokens * divisor.loss_sequences)
