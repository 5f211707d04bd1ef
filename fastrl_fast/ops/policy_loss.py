"""From logprobs to the policy's loss, its gradient and its statistics, in one compiled pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check, cuda_stream, kernels, library
from fastrl_fast.ops.loss_settings import LossSettings, check_loss


class PolicyLossStats(NamedTuple):
    """Over the tokens whose weight is not 0; float64 scalars."""

    tokens: Tensor
    clipped_low: Tensor
    """Tokens of negative advantage with ratio < 1 - clip_low."""
    clipped_high: Tensor
    """Tokens of positive advantage with ratio > 1 + clip_high."""
    clipped_dual: Tensor
    """Tokens of negative advantage with ratio > dual_clip."""
    ratio: Tensor
    """Sum of the ratios."""
    ratio_min: Tensor
    """+inf where there is no token."""
    ratio_max: Tensor
    """-inf where there is no token."""
    kl: Tensor
    """Sum of the KL estimates, without the coefficient; 0 without reference logprobs."""
    sampler_gap: Tensor
    """Sum of |logprob - rollout logprob|; 0 without rollout logprobs."""
    sampler_gap_max: Tensor
    """-inf without tokens or rollout logprobs."""


assert len(PolicyLossStats._fields) == kernels.POLICY_LOSS_STATS, "the header's list of statistics is another one"

library.define(
    "policy_loss(Tensor logprobs, Tensor? old_logprobs, Tensor? ref_logprobs, Tensor? rollout_logprobs, "
    "Tensor advantages, Tensor weights, Tensor? token_weights, Tensor cu_targets, int ratio, int clip, int kl, "
    "float clip_low, float clip_high, float dual_clip, float kl_coef) -> (Tensor, Tensor, Tensor)"
)


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
) -> tuple[Tensor, PolicyLossStats]:
    """Return sum_t w_t (l_t + kl_coef k_t), differentiable in `logprobs`, and the statistics of the same tokens.

    l_t and k_t are what `LossSettings` says. Tokens of weight 0 are masked: their numbers are not read, their gradient
    is 0. Sums are float64 in a fixed order: the result does not depend on the thread count.

    Args:
        logprobs: [N] float32, or float64 to compute in float64; all on one device.
        advantages: [S], one per sequence.
        weights: [S], the factor of the terms of a sequence's tokens.
        cu_targets: [S + 1] int64, offsets of the sequences into `logprobs`.
        token_weights: [N], a further factor of each token's term, 0 to mask it; None = 1.
        old_logprobs: [N], constant; None = the policy's own, every ratio is exactly 1.
        ref_logprobs: [N], constant; needed where kl_coef > 0.
        rollout_logprobs: [N]; for statistics only.
        settings: the fields of `LossSettings`.

    Returns:
        loss [] in the dtype of `logprobs`, statistics.

    Raises:
        ValueError: unknown kinds, numbers out of range, tensors that do not fit.

    Source: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585;
        algorithms.md 3.8 to 3.11.
    """
    chosen, given = LossSettings(**settings), (old_logprobs, ref_logprobs, rollout_logprobs)
    check_loss(chosen, ref_logprobs)
    check_tensors(logprobs, advantages, weights, cu_targets, (*given, token_weights))
    loss, _, stats = torch.ops.fastrl_fast.policy_loss(
        logprobs, *given, advantages, weights, token_weights, cu_targets, *chosen.numbers()
    )
    return loss, PolicyLossStats(*stats.unbind())


def check_tensors(
    logprobs: Tensor, advantages: Tensor, weights: Tensor, cu_targets: Tensor, given: tuple[Tensor | None, ...]
) -> None:
    check(
        logprobs.ndim == 1 and logprobs.dtype in (torch.float32, torch.float64),
        f"logprobs must be [N] float32 or float64, not {list(logprobs.shape)} {logprobs.dtype}",
    )
    check(
        cu_targets.ndim == 1 and cu_targets.shape[0] >= 1 and cu_targets.dtype == torch.int64,
        f"cu_targets must be [S + 1] int64, not {list(cu_targets.shape)} {cu_targets.dtype}",
    )
    tokens, sequences = logprobs.shape[0], cu_targets.shape[0] - 1
    for name, tensor in zip(("old_logprobs", "ref_logprobs", "rollout_logprobs", "token_weights"), given, strict=True):
        check(
            tensor is None or tensor.shape == logprobs.shape,
            f"{name} must be one per token ({tokens}), not {None if tensor is None else list(tensor.shape)}",
        )
    for name, tensor in (("advantages", advantages), ("weights", weights)):
        check(
            tensor.shape == (sequences,),
            f"{name} must be one per sequence ({sequences}), not {list(tensor.shape)}",
        )


def _forward(
    logprobs: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    rollout: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    token_weights: Tensor | None,
    cu_targets: Tensor,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, sequences = logprobs.dtype, cu_targets.shape[0] - 1
    given = (logprobs, old, ref, rollout, advantages, weights, token_weights)
    # A list keeps the converted tensors alive until the kernel has read them.
    inputs = [x if x is None else x.to(dtype).contiguous() for x in given]
    cu_targets = cu_targets.contiguous()
    blocks = sequences if logprobs.is_cuda else -(-sequences // kernels.POLICY_LOSS_BLOCK)
    partial = logprobs.new_empty(blocks * (1 + kernels.POLICY_LOSS_STATS), dtype=torch.float64)
    grad = logprobs.new_empty(logprobs.shape)
    loss = logprobs.new_empty((), dtype=torch.float64)
    stats = logprobs.new_empty(kernels.POLICY_LOSS_STATS, dtype=torch.float64)
    arguments = (
        dtype == torch.float64, logprobs.shape[0], *(0 if x is None else x.data_ptr() for x in inputs),
        cu_targets.data_ptr(), sequences, *settings,
        partial.data_ptr(), grad.data_ptr(), loss.data_ptr(), stats.data_ptr(),
    )  # fmt: skip
    if logprobs.is_cuda:
        with cuda_stream(logprobs) as stream:
            kernels.policy_loss_cuda(*arguments, stream)
    else:
        kernels.policy_loss_cpu(*arguments, torch.get_num_threads())
    return loss.to(dtype), grad, stats


library.impl("policy_loss", _forward, "CPU")
library.impl("policy_loss", _forward, "CUDA")


@torch.library.register_fake("fastrl_fast::policy_loss", lib=library)
def _fake(logprobs: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    stats = logprobs.new_empty(len(PolicyLossStats._fields), dtype=torch.float64)
    return logprobs.new_empty(()), torch.empty_like(logprobs, memory_format=torch.contiguous_format), stats


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1], output[2])


def _gradient(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (grad,) = ctx.saved_tensors
    return grad * grad_loss, *(None for _ in range(14))


torch.library.register_autograd("fastrl_fast::policy_loss", _gradient, setup_context=_setup_context, lib=library)
