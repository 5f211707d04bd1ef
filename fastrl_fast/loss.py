"""The policy objective of every method in the GRPO family, as a row of settings."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from . import ops
from .loss_config import Aggregation, LossConfig, LossKind
from .packing import Divisor
from .types import PackedBatch

NO_CORRECTION = ops.Importance()
ABOVE_ZERO = 1e-3
"""Rounding lifts a logprob of nearly 0 by some float32 units of the largest logit, 30 x 1.2e-7; more is no
probability."""


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
    importance: ops.Importance = NO_CORRECTION


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
    row, own = OBJECTIVES[config.kind], config.importance
    return replace(
        row,
        clip_low=row.clip_low if config.clip_low is None else config.clip_low,
        clip_high=row.clip_high if config.clip_high is None else config.clip_high,
        aggregation=config.aggregation or row.aggregation,
        dual_clip=config.dual_clip,
        kl_coef=config.kl_coef,
        kl_kind=config.kl_kind,
        importance=NO_CORRECTION if own.kind == "none" else ops.Importance(own.kind, own.cap, own.floor),
    )


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    batch: PackedBatch,
    objective: Objective,
    divisor: Divisor,
    max_completion_tokens: int,
    **head: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the step's loss, and sums over its tokens for the metrics.

    Evaluated by the policy's head in the place of `packed_logprobs`, with the arguments of that. Per token, with ratio
    r and advantage A: ppo: max(-A r, -A clip(r)), at most -A dual_clip where A < 0; cispo: -sg(clip(r)) A logprob; A
    times the importance weight; plus kl_coef x KL. Token losses are weighted so that the parts of all micro-batches of
    all ranks add up to the aggregation over the whole update. Where `batch.old_logprobs` is None the policy has not
    been updated since sampling, and its own detached logprobs are the old ones (ratio exactly 1).
    """
    terms = loss_terms(batch, objective, divisor=divisor, max_completion_tokens=max_completion_tokens)
    loss, logprobs, entropy, stats = ops.fused_policy_loss(
        hidden, weight, targets, **head, **terms, importance=objective.importance
    )
    sums = {
        "loss": loss.detach(),
        "update_tokens": stats.tokens,
        "entropy": entropy.sum(),
        "sampler_gap": stats.sampler_gap,
        "above_zero": (logprobs > ABOVE_ZERO).sum(),
        "clipped_low": stats.clipped_low,
        "clipped_high": stats.clipped_high,
        "ratio": stats.ratio,
    }
    if objective.kl_coef > 0:
        sums["kl"] = stats.kl
    if objective.importance.kind != "none":
        old = logprobs if batch.old_logprobs is None else batch.old_logprobs
        sums |= _importance_sums(old, batch, objective.importance)
    return loss, sums


def sum_names(objective: Objective) -> list[str]:
    """The names of the sums that `policy_loss` returns."""
    names = ["loss", "update_tokens", "entropy", "sampler_gap", "above_zero", "clipped_low", "clipped_high", "ratio"]
    names += ["kl"] if objective.kl_coef > 0 else []
    return names + (["importance", "importance_cut"] if objective.importance.kind != "none" else [])


def _importance_sums(old: Tensor, batch: PackedBatch, importance: ops.Importance) -> dict[str, Tensor]:
    """The weights of all tokens, and how many were cut or masked; those of a sequence count once per token."""
    weights, cut = ops.importance_weights(old, batch.rollout_logprobs, batch.cu_targets, importance)
    tokens = batch.cu_targets.diff() if importance.of_sequences else torch.ones_like(weights)
    return {"importance": (weights * tokens).sum(), "importance_cut": (cut * tokens).sum()}


def loss_terms(
    batch: PackedBatch, objective: Objective, *, divisor: Divisor, max_completion_tokens: int
) -> dict[str, Any]:
    """What `ops.policy_loss` takes besides the logprobs, and `ops.fused_policy_loss` besides the head's arguments."""
    if objective.kl_coef > 0:
        assert batch.ref_logprobs is not None, "a KL penalty needs reference logprobs"
    return {
        "advantages": batch.advantages,
        "weights": _weights(batch, objective.aggregation, divisor=divisor, max_completion_tokens=max_completion_tokens),
        "cu_targets": batch.cu_targets,
        "old_logprobs": batch.old_logprobs,
        "ref_logprobs": batch.ref_logprobs if objective.kl_coef > 0 else None,
        "rollout_logprobs": batch.rollout_logprobs,
        "ratio": objective.ratio,
        "clip": objective.clip,
        "clip_low": objective.clip_low,
        "clip_high": objective.clip_high,
        "dual_clip": objective.dual_clip,
        "kl": objective.kl_kind,
        "kl_coef": objective.kl_coef,
    }


def _weights(batch: PackedBatch, aggregation: Aggregation, *, divisor: Divisor, max_completion_tokens: int) -> Tensor:
    """Weight [S] of each sequence's token losses in the sum over the update; not finite where a sequence has none.

    With sequence weight w and length L: token-mean w / loss tokens; seq-mean-token-mean w / (L x sequences);
    seq-mean-token-sum-norm w / (max_completion_tokens x sequences). A sequence of weight 0 has weight 0, also where no
    other has one and the divisor is 0 too.
    """
    if aggregation == "token-mean":
        weights = batch.weights / divisor.loss_tokens
    elif aggregation == "seq-mean-token-mean":
        weights = batch.weights / batch.cu_targets.diff() / divisor.loss_sequences
    else:
        weights = batch.weights / (max_completion_tokens * divisor.loss_sequences)
    return torch.where(batch.weights == 0, 0.0, weights)
