"""packed_logprobs with the vocabulary cut into shards, one per rank.

Each rank walks its own rows of the head; one all-gather of 16 bytes per token merges what they found. This module
calls no process group: the caller hands in the two exchanges.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops import logit_slabs
from fastrl_fast.ops.packed_logprobs import (
    check_settings,
    check_tensors,
    compute_dtype,
    gather_rows,
    operand_dtype,
    scatter_rows,
)

Exchange = Callable[[Tensor], Tensor]


class Shard(NamedTuple):
    """Which part of the vocabulary a rank holds, and how ranks exchange tensors."""

    vocab_begin: int
    """The first row of this rank's weight is this token's."""
    gather: Exchange
    """[4, N] of this rank to [ranks, 4, N] of all, in rank order."""
    add: Exchange
    """The sum over all ranks, for the gradient of `hidden`."""


def sharded_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    shard: Shard,
    row_index: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return logprobs [N] and entropy [N] of the whole vocabulary, the same on every rank.

    `weight` [V / ranks, H] and `bias` are this rank's rows; `hidden`, `targets` (numbers of the whole vocabulary) and
    `row_index` are the same on all ranks. The backward returns the gradient of this rank's rows, and the whole gradient
    of `hidden` (one `shard.add`). All other arguments as in `packed_logprobs`.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit. A target that no rank holds has logprob NaN.
    """
    check_settings(temperature, softcap, logit_scale)
    check_tensors(hidden, weight, targets, row_index, bias)
    return _Sharded.apply(hidden, weight, bias, targets, row_index, shard, (temperature, softcap, logit_scale))


def merge(parts: Tensor) -> Tensor:
    """Return [4, N] over the whole vocabulary from [ranks, 4, N] over its shards, in rank order.

    The rows are m = max z, s = sum e^(z - m), t = sum (z - m) e^(z - m) and the target's z (NaN on ranks that do not
    hold it).
    """
    row_max = parts[:, 0].amax(0)
    origin = torch.where(row_max == -torch.inf, 0, row_max)
    total = torch.zeros_like(parts[0])
    total[0] = row_max
    total[3] = torch.nan
    for m, s, t, target in parts:
        shift = torch.where(m == -torch.inf, 0, m - origin)  # a shard of -inf alone has s = t = 0
        total[1] += shift.exp() * s
        total[2] += shift.exp() * (t + shift * s)
        total[3] = torch.where(target.isnan(), total[3], target)
    return total


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        row_index: Tensor | None,
        shard: Shard,
        settings: tuple[float, float | None, float],
    ) -> tuple[Tensor, Tensor]:
        head, local = _head(hidden, weight, bias, settings), (targets - shard.vocab_begin).contiguous()
        own = logit_slabs.forward(gather_rows(hidden, row_index, operand_dtype(hidden, weight)), local, head)
        row_max, log_sum, logprobs, entropy = logit_slabs.finish(merge(shard.gather(own)))
        ctx.save_for_backward(hidden, weight, bias, local, row_index, row_max, log_sum, entropy)
        ctx.shard, ctx.settings = shard, settings
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local, row_index, row_max, log_sum, entropy = ctx.saved_tensors
        head = _head(hidden, weight, bias, ctx.settings)
        grads = logit_slabs.Grads(
            row_max=row_max.contiguous(),
            log_sum=log_sum.contiguous(),
            entropy=entropy,
            logprobs=grad_logprobs.to(head.dtype).contiguous(),
            upstream_entropy=grad_entropy.to(head.dtype).contiguous(),
        )
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        rows = gather_rows(hidden, row_index, operand_dtype(hidden, weight))
        grad_rows, grad_weight, grad_bias = logit_slabs.backward(rows, local, head, grads, needs)
        grad_hidden = None
        if grad_rows is not None:
            # added before it is rounded to the dtype of hidden
            grad_hidden = scatter_rows(ctx.shard.add(grad_rows), row_index, hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[float, float | None, float]
) -> logit_slabs.Head:
    temperature, softcap, logit_scale = settings
    return logit_slabs.Head(
        weight=weight, bias=bias, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        dtype=compute_dtype(hidden, weight),
    )  # fmt: skip
