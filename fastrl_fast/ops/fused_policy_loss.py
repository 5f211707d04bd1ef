"""Loss of the policy from hidden states and head weights, its gradient made in the forward pass."""

import math
from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops import logit_chunks, logit_slabs
from fastrl_fast.ops._lib import check, library
from fastrl_fast.ops.packed_logprobs import (
    check_settings,
    check_targets,
    check_tensors,
    compute_dtype,
    gather_rows,
    operand_dtype,
    scatter_rows,
)
from fastrl_fast.ops.policy_loss import CLIP_KINDS, KL_KINDS, RATIO_KINDS, PolicyLossStats
from fastrl_fast.ops.policy_loss import check_settings as check_loss_settings
from fastrl_fast.ops.policy_loss import check_tensors as check_loss_tensors

library.define(
    "fused_policy_loss(Tensor hidden, Tensor weight, Tensor targets, Tensor? row_index, Tensor? bias, "
    "float temperature, float? softcap, float logit_scale, Tensor? old_logprobs, Tensor? ref_logprobs, "
    "Tensor? rollout_logprobs, Tensor advantages, Tensor weights, Tensor? token_weights, Tensor cu_targets, int clip, "
    "int kl, float clip_low, float clip_high, float dual_clip, float kl_coef, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cu_targets: Tensor,
    *,
    row_index: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weights: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    ratio: str = "token",
    clip: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, PolicyLossStats]:
    """Return policy_loss(packed_logprobs(...)) and its parts, with three GEMMs in all instead of four.

    Chunks of rows keep their logits (60 MB on the CPU, 1 GB on a GPU), so the gradient needs no second set of them;
    rows whose gradient is 0 (no advantage, clipped, masked) are left out of the two GEMMs of the gradient, and those
    known beforehand to have none only pass through the memory of `packed_logprobs`. The gradients of `hidden`, `weight`
    and `bias` are made here, once, in float32 (float64 where computed in float64), and only handed out by backward:
    of the loss alone, logprobs and entropy are constants. `weight` in low precision needs a float32 sum of its size.
    Each token's loss must depend on its own logprob alone: `ratio` other than token needs `old_logprobs` None (one
    update per sample: every ratio is 1) and no `token_weights`.

    Args:
        hidden, weight, targets, row_index, bias, temperature, softcap, logit_scale: as in `packed_logprobs`.
        advantages, weights, cu_targets and all other settings: as in `policy_loss`.

    Returns:
        loss [], logprobs [N], entropy [N], statistics.

    Raises:
        ValueError: as `packed_logprobs` and `policy_loss` do, and where a ratio of whole sequences would be needed.

    Source: design.md 4.1.
    """
    check_settings(temperature, softcap, logit_scale)
    check_tensors(hidden, weight, targets, row_index, bias)
    check_loss_settings(ratio, clip, kl, clip_low, clip_high, dual_clip, kl_coef)
    given = (old_logprobs, ref_logprobs, rollout_logprobs)
    like = targets.new_empty(targets.shape, dtype=torch.float32, device="meta")
    check_loss_tensors(like, advantages, weights, cu_targets, (*given, token_weights))
    check(kl_coef == 0 or ref_logprobs is not None, f"kl_coef = {kl_coef} needs ref_logprobs")
    alone = ratio == "token" or (old_logprobs is None and token_weights is None)
    check(
        alone, f"ratio {ratio!r} with old_logprobs or token_weights needs policy_loss: its tokens are not independent"
    )
    asked = torch.is_grad_enabled()
    needs = [asked and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    loss, logprobs, entropy, stats, *_ = torch.ops.fastrl_fast.fused_policy_loss(
        hidden, weight, targets, row_index, bias, float(temperature), softcap, float(logit_scale),
        *given, advantages, weights, token_weights, cu_targets, CLIP_KINDS.index(clip), KL_KINDS.index(kl),
        float(clip_low), float(clip_high), math.inf if dual_clip is None else float(dual_clip), float(kl_coef), needs,
    )  # fmt: skip
    return loss, logprobs, entropy, PolicyLossStats(*stats.unbind())


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    row_index: Tensor | None,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    old: Tensor | None,
    ref: Tensor | None,
    rollout: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    token_weights: Tensor | None,
    cu_targets: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *loss_settings, kl_coef, needs = settings
    dtype = compute_dtype(hidden, weight)
    head = logit_slabs.Head(
        weight=weight, bias=bias, temperature=temperature, softcap=softcap, logit_scale=logit_scale, dtype=dtype
    )
    check_targets(targets, weight)
    lengths = cu_targets.diff()
    a, w = (torch.repeat_interleave(x.to(dtype), lengths) for x in (advantages, weights))
    w = w if token_weights is None else w * token_weights.to(dtype)
    # Without a gradient these rows need no logits of their own to be kept.
    quiet = (w == 0) | (a == 0) if kl_coef == 0 else w == 0
    order = torch.cat([torch.nonzero(~quiet)[:, 0], torch.nonzero(quiet)[:, 0]])
    moving = order[: order.shape[0] - int(quiet.sum())]
    n, tokens = moving.shape[0], targets.shape[0]
    rows = gather_rows(hidden, order if row_index is None else row_index[order], operand_dtype(hidden, weight))
    columns = [None if x is None else x.to(dtype)[order] for x in (old, ref, rollout)]
    targets, a, w = targets[order], a[order], w[order]
    parts: list[tuple[Tensor, Tensor]] = []

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        loss, gradient, stats = torch.ops.fastrl_fast.policy_loss(
            logprobs, *(None if x is None else x[part] for x in columns), a[part], w[part], None,
            torch.arange(part.stop - part.start + 1, device=logprobs.device),
            RATIO_KINDS.index("token"), *loss_settings, kl_coef,
        )  # fmt: skip
        parts.append((loss.double(), stats))
        return gradient

    made = logit_chunks.walk(rows[:n], targets[:n], head, slope, (needs[0], needs[1], needs[2]))
    logprobs, entropy = made.logprobs, made.entropy
    if n < tokens:
        silent = logit_slabs.finish(logit_slabs.forward(rows[n:], targets[n:], head))[2:]
        slope(silent[0], slice(n, tokens))
        logprobs, entropy = torch.cat([logprobs, silent[0]]), torch.cat([entropy, silent[1]])
    loss, stats = _add_up(parts, logprobs)
    nothing = hidden.new_empty(0)
    back = torch.empty_like(order)
    back[order] = torch.arange(tokens, device=order.device)
    source = moving if row_index is None else row_index[moving]
    return (
        loss.to(dtype),
        logprobs[back],
        entropy[back],
        stats,
        nothing if made.grad_rows is None else scatter_rows(made.grad_rows, source, hidden),
        nothing.clone() if made.grad_weight is None else made.grad_weight.to(weight.dtype),
        nothing.clone() if made.grad_bias is None or bias is None else made.grad_bias.to(bias.dtype),
    )


def _add_up(parts: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Merge losses and statistics of all chunks, in their order."""
    loss = like.new_zeros((), dtype=torch.float64)
    names = PolicyLossStats._fields
    stats = like.new_zeros(len(names), dtype=torch.float64)
    lowest, highest = names.index("ratio_min"), [names.index("ratio_max"), names.index("sampler_gap_max")]
    stats[lowest] = math.inf
    stats[highest] = -math.inf
    for part_loss, part in parts:
        loss += part_loss
        merged = stats + part
        merged[lowest] = torch.minimum(stats[lowest], part[lowest])
        merged[highest] = torch.maximum(stats[highest], part[highest])
        stats = merged
    return loss, stats


for _device in ("CPU", "CUDA"):
    library.impl("fused_policy_loss", _forward, _device)


@torch.library.register_fake("fastrl_fast::fused_policy_loss", lib=library)
def _fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs, dtype = rest[-1], compute_dtype(hidden, weight)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(targets.shape, dtype=dtype),
        hidden.new_empty(targets.shape, dtype=dtype),
        hidden.new_empty(len(PolicyLossStats._fields), dtype=torch.float64),
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else hidden.new_empty(0),
        torch.empty_like(weight) if needs[1] else hidden.new_empty(0),
        torch.empty_like(bias) if needs[2] and bias is not None else hidden.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-1]
    ctx.save_for_backward(*output[4:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    results: list[Tensor | None] = [None] * 22
    if grad_loss is not None:
        # The usual upstream 1 is worth looking at: the product would be one more tensor of the weight's size.
        is_one = type(grad_loss) is Tensor and grad_loss.device.type == "cpu" and bool(grad_loss == 1)
        for place, needed, gradient in zip((0, 1, 4), ctx.needs, ctx.saved_tensors, strict=True):
            if needed:
                results[place] = gradient if is_one else gradient * grad_loss.to(gradient.dtype)
    return tuple(results)


torch.library.register_autograd("fastrl_fast::fused_policy_loss", _gradient, setup_context=_setup_context, lib=library)
