"""Loss and gradient of a language-model head in one walk: chunks of rows whose logits are kept, three GEMMs.

`logit_slabs` makes the logits twice, once for the logprobs and once for the gradient, so that a chunk need not hold a
whole row. Here a chunk of rows keeps its logits until the loss has said what their gradient is.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops import logit_slabs
from fastrl_fast.ops.logit_slabs import Grads, Head

CHUNK_ELEMENTS = {"cpu": 15 << 20, "cuda": 1 << 28}
"""Logits kept at a time: 60 MB of float32 on a CPU, 1 GB on a GPU."""
CHUNK_ROWS = {"cpu": 1024, "cuda": 16384}


class Walk(NamedTuple):
    """What a walk has made; gradients in the dtype that is computed in, None where not asked for."""

    logprobs: Tensor
    entropy: Tensor
    grad_rows: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def walk(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    slope: Callable[[Tensor, slice], Tensor],
    needs: tuple[bool, bool, bool],
) -> Walk:
    """Return logprobs and entropy [N] of every row, and the gradients of a loss that is a sum over rows.

    hidden [N, H] in `head.dtype`, or in bfloat16 on CUDA with float32 sums; targets [N]. slope(logprobs, rows) is
    called once for each chunk of rows, in order, and returns d loss / d logprob of each; rows whose slope is 0 take no
    part in the second and third GEMM.
    """
    n = hidden.shape[0]
    logprobs, entropy = hidden.new_empty(2, n, dtype=head.dtype)
    grad_rows = torch.zeros_like(hidden, dtype=head.dtype) if needs[0] else None
    grad_weight = torch.empty_like(head.weight, dtype=head.dtype) if needs[1] else None
    written = False
    grad_bias = torch.zeros_like(head.bias, dtype=torch.float64) if needs[2] and head.bias is not None else None
    vocabulary, device = head.weight.shape[0], hidden.device.type
    most = max(1, min(CHUNK_ROWS[device], CHUNK_ELEMENTS[device] // vocabulary, n))
    chunks = max(1, -(-n // most))
    step = max(1, -(-n // chunks))  # of equal size, or the last GEMMs would be small ones
    kept = hidden.new_empty(min(step, n) * vocabulary, dtype=head.dtype)
    for rows in logit_slabs.slices(n, step):
        part, y = hidden[rows], targets[rows]
        slabs = _slabs(kept, rows.stop - rows.start, vocabulary, logit_slabs.LIMITS[device])
        sums = logit_slabs.start(part, head.dtype)
        for columns, logits in slabs:
            head.fill(logits, part, *head.part(columns, part.dtype))
            logit_slabs.fold(logits, y, columns.start, head.scale, sums)
        row_max, log_sum, logprobs[rows], entropy[rows] = logit_slabs.finish(sums)
        g = slope(logprobs[rows], rows)
        live = torch.nonzero(g)[:, 0]
        if live.shape[0] == 0 or not any(needs):
            continue
        grads = Grads(
            row_max=row_max, log_sum=log_sum, entropy=entropy[rows], logprobs=g, upstream_entropy=torch.zeros_like(g)
        )
        whole = live.shape[0] == part.shape[0]
        if not whole:
            part, y, grads = part[live], y[live], grads[live]
        grad_part = None
        if grad_rows is not None:
            grad_part = grad_rows[rows] if whole else torch.zeros_like(part, dtype=head.dtype)
        for columns, logits in slabs:
            kept_logits = logits if whole else logits[live]
            d = logit_slabs.differentiate(kept_logits, y, columns.start, head, grads, part.dtype)
            if grad_part is not None:
                logit_slabs.add_product(grad_part, d, head.part(columns, part.dtype)[0])
            if grad_weight is not None and written:
                logit_slabs.add_product(grad_weight[columns], d.t(), part)
            elif grad_weight is not None:
                logit_slabs.multiply(d.t(), part, grad_weight[columns])
            if grad_bias is not None:
                grad_bias[columns] += d.sum(0, dtype=torch.float64)
        written = True
        if grad_rows is not None and grad_part is not None and not whole:
            grad_rows[rows].index_copy_(0, live, grad_part)
    if grad_weight is not None and not written:
        grad_weight.zero_()
    return Walk(logprobs, entropy, grad_rows, grad_weight, grad_bias)


def _slabs(kept: Tensor, rows: int, vocabulary: int, limits: logit_slabs.SlabLimits) -> list[tuple[slice, Tensor]]:
    """Cut the buffer into one contiguous block of logits per slab of the vocabulary."""
    step = max(1, min(limits.columns, limits.elements // rows))
    return [
        (columns, kept[rows * columns.start : rows * columns.stop].view(rows, columns.stop - columns.start))
        for columns in logit_slabs.slices(vocabulary, step)
    ]
