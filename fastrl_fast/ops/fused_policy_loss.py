"""Loss of the policy from hidden states and head weights, its gradient made in the forward pass."""

from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops import logit_chunks, logit_slabs
from fastrl_fast.ops._lib import check, library
from fastrl_fast.ops.importance import IMPORTANCE_KINDS, Importance, check_importance
from fastrl_fast.ops.loss_rows import Columns, LossNumbers, LossRows
from fastrl_fast.ops.loss_settings import LossSettings, check_loss
from fastrl_fast.ops.packed_logprobs import (
    build_head,
    check_settings,
    check_targets,
    check_tensors,
    compute_dtype,
    gather_rows,
    operand_dtype,
    scatter_rows,
)
from fastrl_fast.ops.policy_loss import PolicyLossStats
from fastrl_fast.ops.policy_loss import check_tensors as check_loss_tensors

library.define(
    "fused_policy_loss(Tensor hidden, Tensor weight, Tensor targets, Tensor? row_index, Tensor? bias, "
    "float temperature, float? softcap, float logit_scale, Tensor? old_logprobs, Tensor? ref_logprobs, "
    "Tensor? rollout_logprobs, Tensor? token_weights, Tensor advantages, Tensor weights, Tensor cu_targets, int ratio, "
    "int clip, int kl, float clip_low, float clip_high, float dual_clip, float kl_coef, int importance, float cap, "
    "float floor, bool[] needs) "
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
    importance: Importance | None = None,
    **loss: Any,
) -> tuple[Tensor, Tensor, Tensor, PolicyLossStats]:
    """Return policy_loss(packed_logprobs(...)) and its parts, with three GEMMs in all instead of four.

    Chunks of rows keep their logits (`logit_chunks`), so the gradient needs no second set of them; rows whose gradient
    is 0 (no advantage, clipped, masked) are left out of the two GEMMs of the gradient. The gradients of `hidden`,
    `weight` and `bias` are made here, once, in float32 (float64 where computed in float64), and only handed out by
    backward: of the loss alone, logprobs and entropy are constants. `weight` in low precision needs a float32 sum of
    its size. Where a sequence's tokens depend on each other (`ratio` other than token with `old_logprobs` or
    `token_weights`, `importance` of sequences without `old_logprobs`) a chunk holds whole sequences.

    Args:
        hidden, weight, targets, row_index, bias, temperature, softcap, logit_scale: as in `packed_logprobs`.
        importance: multiplies the advantages by `importance_weights` of the old logprobs, or of the policy's own where
            these are None, over the tokens that are not masked; the KL term keeps its weight. None = no correction.
        advantages, weights, cu_targets, loss: all that `policy_loss` takes.

    Returns:
        loss [], logprobs [N], entropy [N], statistics.

    Raises:
        ValueError: as `packed_logprobs` and `policy_loss` do; what `importance` or its kind beside `ratio` cannot be.

    Source: design.md 4.1.
    """
    check_settings(temperature, softcap, logit_scale)
    check_tensors(hidden, weight, targets, row_index, bias)
    arguments = _loss_arguments(targets, (advantages, weights, cu_targets), importance or Importance(), **loss)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    loss_sum, logprobs, entropy, stats, *_ = torch.ops.fastrl_fast.fused_policy_loss(
        hidden, weight, targets, row_index, bias, float(temperature), softcap, float(logit_scale), *arguments, needs
    )
    return loss_sum, logprobs, entropy, PolicyLossStats(*stats.unbind())


def _loss_arguments(
    targets: Tensor,
    per_sequence: tuple[Tensor, Tensor, Tensor],
    importance: Importance,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    **settings: Any,
) -> tuple[Any, ...]:
    """Check everything that is the loss's, and return it in the operator's order."""
    chosen, given = LossSettings(**settings), (old_logprobs, ref_logprobs, rollout_logprobs, token_weights)
    check_loss(chosen, ref_logprobs)
    check_loss_tensors(targets.new_empty(targets.shape, dtype=torch.float32, device="meta"), *per_sequence, given)
    check_importance(importance, rollout_logprobs)
    check(
        chosen.ratio == "token" or importance.of_sequences or importance.kind == "none",
        f"importance.kind must be of sequences where ratio is {chosen.ratio!r}, not {importance.kind}",
    )
    kind, cap, floor = importance
    return (*given, *per_sequence, *chosen.numbers(), IMPORTANCE_KINDS.index(kind), float(cap), float(floor))


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias, needs = rest[0], rest[-1]
    head = build_head(hidden, weight, *rest[:4])
    check_targets(targets, weight)
    work = LossRows(Columns(*rest[4:11]), LossNumbers(*rest[11:-1]), head.dtype)
    order, n = work.order, work.moving
    source = order if row_index is None else row_index[order]
    rows, targets = gather_rows(hidden, source, operand_dtype(hidden, weight)), targets[order]
    made = logit_chunks.walk(rows[:n], targets[:n], head, work, (needs[0], needs[1], needs[2]))
    quiet = logit_slabs.finish(logit_slabs.forward(rows[n:], targets[n:], head))[2:]
    if n < targets.shape[0]:
        work.slope(quiet[0], slice(n, targets.shape[0]))
    loss, stats = work.totals()
    logprobs, entropy = (
        x.new_empty(order.shape).index_copy_(0, order, torch.cat([x, y]))
        for x, y in zip((made.logprobs, made.entropy), quiet, strict=True)
    )
    nothing = hidden.new_empty(0)
    return (
        loss.to(head.dtype),
        logprobs,
        entropy,
        stats,
        nothing if made.grad_rows is None else scatter_rows(made.grad_rows, source[:n], hidden),
        nothing.clone() if made.grad_weight is None else made.grad_weight.to(weight.dtype),
        nothing.clone() if made.grad_bias is None or bias is None else made.grad_bias.to(bias.dtype),
    )


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
    results: list[Tensor | None] = [None] * 26
    if grad_loss is not None:
        # The usual upstream 1 is worth looking at: the product would be one more tensor of the weight's size.
        is_one = type(grad_loss) is Tensor and grad_loss.device.type == "cpu" and bool(grad_loss == 1)
        for place, needed, gradient in zip((0, 1, 4), ctx.needs, ctx.saved_tensors, strict=True):
            if needed:
                results[place] = gradient if is_one else gradient * grad_loss.to(gradient.dtype)
    return tuple(results)


torch.library.register_autograd("fastrl_fast::fused_policy_loss", _gradient, setup_context=_setup_context, lib=library)
