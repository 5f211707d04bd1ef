"""packed_logprobs with the vocabulary cut into shards, one per rank.

Each rank walks its own rows of the head; one all-gather of 16 bytes per token merges what they found. This module
calls no process group: the caller hands in the two exchanges.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops import logit_slabs
from fastrl_fast.ops._lib import library
from fastrl_fast.ops.packed_logprobs import (
    build_head,
    check_settings,
    check_tensors,
    compute_dtype,
    gather_rows,
    operand_dtype,
    scatter_rows,
)

_HEAD = (
    "Tensor hidden, Tensor weight, Tensor targets, Tensor? row_index, Tensor? bias, "
    "float temperature, float? softcap, float logit_scale"
)
library.define(f"shard_sums({_HEAD}) -> Tensor")
library.define(
    f"shard_backward({_HEAD}, Tensor row_max, Tensor log_sum, Tensor entropy, Tensor grad_logprobs, "
    "Tensor grad_entropy, bool[] needs) -> (Tensor, Tensor, Tensor)"
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
    return _Sharded.apply(
        hidden, weight, bias, targets, row_index, shard, (float(temperature), softcap, float(logit_scale))
    )


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


def _sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, bias: Tensor | None, *settings: Any
) -> Tensor:
    rows = gather_rows(hidden, row_index, operand_dtype(hidden, weight))
    return logit_slabs.forward(rows, targets.contiguous(), build_head(hidden, weight, bias, *settings))


def _backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    head, needs = build_head(hidden, weight, bias, *rest[:3]), rest[-1]
    row_max, log_sum, entropy, *upstream = (x.contiguous() for x in rest[3:-1])
    grads = logit_slabs.Grads(
        row_max=row_max, log_sum=log_sum, entropy=entropy, logprobs=upstream[0], upstream_entropy=upstream[1]
    )
    rows = gather_rows(hidden, row_index, operand_dtype(hidden, weight))
    made = logit_slabs.backward(rows, targets.contiguous(), head, grads, (needs[0], needs[1], needs[2]))
    return tuple(hidden.new_empty(0) if x is None else x for x in made)  # type: ignore[return-value]


for _device in ("CPU", "CUDA"):
    library.impl("shard_sums", _sums, _device)
    library.impl("shard_backward", _backward, _device)


@torch.library.register_fake("fastrl_fast::shard_sums", lib=library)
def _fake_sums(hidden: Tensor, weight: Tensor, targets: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty((4, targets.shape[0]), dtype=compute_dtype(hidden, weight))


@torch.library.register_fake("fastrl_fast::shard_backward", lib=library)
def _fake_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs, dtype = rest[-1], compute_dtype(hidden, weight)
    return (
        hidden.new_empty((targets.shape[0], hidden.shape[1]), dtype=dtype) if needs[0] else hidden.new_empty(0),
        torch.empty_like(weight) if needs[1] else hidden.new_empty(0),
        torch.empty_like(bias) if needs[2] and bias is not None else hidden.new_empty(0),
    )


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
        local = targets - shard.vocab_begin
        own = torch.ops.fastrl_fast.shard_sums(hidden, weight, local, row_index, bias, *settings)
        row_max, log_sum, logprobs, entropy = logit_slabs.finish(merge(shard.gather(own)))
        ctx.save_for_backward(hidden, weight, bias, local, row_index, row_max, log_sum, entropy)
        ctx.add, ctx.settings = shard.add, settings
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local, row_index, row_max, log_sum, entropy = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]]
        grad_rows, grad_weight, grad_bias = torch.ops.fastrl_fast.shard_backward(
            hidden, weight, local, row_index, bias, *ctx.settings,
            row_max, log_sum, entropy, grad_logprobs.to(log_sum.dtype), grad_entropy.to(log_sum.dtype), needs,
        )  # fmt: skip
        # added before it is rounded to the dtype of hidden
        grad_hidden = scatter_rows(ctx.add(grad_rows), row_index, hidden) if needs[0] else None
        return grad_hidden, grad_weight if needs[1] else None, grad_bias if needs[2] else None, None, None, None, None
