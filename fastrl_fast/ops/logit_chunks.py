"""Loss and gradient of a language-model head in one walk: chunks of rows whose logits are kept, three GEMMs.

`logit_slabs` makes the logits twice, once for the logprobs and once for the gradient, so that a chunk need not hold a
whole row. Here a chunk of rows keeps its logits until the loss has said what their gradient is.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

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


class Slopes(Protocol):
    """What a walk asks about the loss."""

    sparse: bool
    """Whether rows may have slope 0, so that it pays to look for them."""
    borders: list[int] | None
    """Where rows belong together: offsets of what must lie in one chunk, 0 the first; None = each row stands alone."""

    def slope(self, logprobs: Tensor, rows: slice) -> Tensor:
        """Return d loss / d logprob of each row; called once for each chunk, in order."""
        ...


def walk(hidden: Tensor, targets: Tensor, head: Head, loss: Slopes, needs: tuple[bool, bool, bool]) -> Walk:
    """Return logprobs and entropy [N] of every row, and the gradients of `loss`.

    hidden [N, H] in `head.dtype`, or in bfloat16 on CUDA with float32 sums; targets [N]. Rows whose slope is 0 take no
    part in the second and third GEMM. Where a chunk would be too small for rows that belong together the logits are
    made twice.
    """
    chunks = _chunks(hidden.shape[0], head.weight.shape[0], hidden.device.type, loss.borders)
    if chunks is None:
        return _walk_twice(hidden, targets, head, loss, needs)
    made = Walk(
        hidden.new_empty(hidden.shape[0], dtype=head.dtype),
        hidden.new_empty(hidden.shape[0], dtype=head.dtype),
        torch.zeros_like(hidden, dtype=head.dtype) if needs[0] else None,
        torch.empty_like(head.weight, dtype=head.dtype) if needs[1] else None,
        torch.zeros_like(head.bias, dtype=torch.float64) if needs[2] and head.bias is not None else None,
    )
    written = False
    largest = max((rows.stop - rows.start for rows in chunks), default=0)
    kept = hidden.new_empty(largest * head.weight.shape[0], dtype=head.dtype)
    for rows in chunks:
        slabs = _slabs(kept, rows.stop - rows.start, head.weight.shape[0], logit_slabs.LIMITS[hidden.device.type])
        grads = _fill(slabs, hidden[rows], targets[rows], head, loss, rows, made)
        live = torch.nonzero(grads.logprobs)[:, 0] if loss.sparse else None
        if live is not None and live.shape[0] == rows.stop - rows.start:
            live = None
        if not any(needs) or (live is not None and live.shape[0] == 0):
            continue
        _add_gradients(slabs, hidden, targets, head, grads, rows, live, made, first=not written)
        written = True
    if made.grad_weight is not None and not written:
        made.grad_weight.zero_()
    return made


def _chunks(rows: int, vocabulary: int, device: str, borders: list[int] | None) -> list[slice] | None:
    """Cut the rows, of equal size where they stand alone; None where what belongs together is too large."""
    most = max(1, min(CHUNK_ROWS[device], CHUNK_ELEMENTS[device] // vocabulary))
    if borders is None:
        count = max(1, -(-rows // most))
        return list(logit_slabs.slices(rows, max(1, -(-rows // count))))
    chunks, start = [], 0
    for begin, end in pairwise(border for border in borders if border <= rows):
        if end - begin > most:
            return None
        if end - start > most:
            chunks.append(slice(start, begin))
            start = begin
    return [*chunks, slice(start, rows)] if start < rows else chunks


def _fill(
    slabs: list[tuple[slice, Tensor]], hidden: Tensor, y: Tensor, head: Head, loss: Slopes, rows: slice, made: Walk
) -> Grads:
    """Make the logits of a chunk, write its logprobs and entropies, and return what its gradient needs."""
    sums = logit_slabs.start(hidden, head.dtype)
    for columns, logits in slabs:
        head.fill(logits, hidden, *head.part(columns, hidden.dtype))
        logit_slabs.fold(logits, y, columns.start, head.scale, sums)
    row_max, log_sum, made.logprobs[rows], made.entropy[rows] = logit_slabs.finish(sums)
    g = loss.slope(made.logprobs[rows], rows)
    return Grads(
        row_max=row_max,
        log_sum=log_sum,
        entropy=made.entropy[rows],
        logprobs=g,
        upstream_entropy=torch.zeros_like(g),
    )


def _add_gradients(
    slabs: list[tuple[slice, Tensor]],
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    grads: Grads,
    rows: slice,
    live: Tensor | None,
    made: Walk,
    *,
    first: bool,
) -> None:
    """Add a chunk's gradients, of its `live` rows (None = all), to those made; the `first` writes the weight's."""
    part, y = hidden[rows], targets[rows]
    grad_part = None if made.grad_rows is None else made.grad_rows[rows]
    if live is not None:
        part, y, grads = part[live], y[live], grads[live]
        grad_part = None if grad_part is None else torch.zeros_like(part, dtype=head.dtype)
    for columns, logits in slabs:
        kept_logits = logits if live is None else logits[live]
        d = logit_slabs.differentiate(kept_logits, y, columns.start, head, grads, part.dtype)
        if grad_part is not None:
            logit_slabs.add_product(grad_part, d, head.part(columns, part.dtype)[0])
        if made.grad_weight is not None and first:
            logit_slabs.multiply(d.t(), part, made.grad_weight[columns])
        elif made.grad_weight is not None:
            logit_slabs.add_product(made.grad_weight[columns], d.t(), part)
        if made.grad_bias is not None:
            made.grad_bias[columns] += d.sum(0, dtype=torch.float64)
    if made.grad_rows is not None and grad_part is not None and live is not None:
        made.grad_rows[rows].index_copy_(0, live, grad_part)


def _walk_twice(hidden: Tensor, targets: Tensor, head: Head, loss: Slopes, needs: tuple[bool, bool, bool]) -> Walk:
    """The same with logits that are made again for the gradient, in the memory of a slab."""
    row_max, log_sum, logprobs, entropy = logit_slabs.finish(logit_slabs.forward(hidden, targets, head))
    g = loss.slope(logprobs, slice(0, hidden.shape[0]))
    grads = Grads(row_max=row_max, log_sum=log_sum, entropy=entropy, logprobs=g, upstream_entropy=torch.zeros_like(g))
    live = torch.nonzero(g)[:, 0]
    grad_live, grad_weight, grad_bias = logit_slabs.backward(hidden[live], targets[live], head, grads[live], needs)
    grad_rows = None
    if grad_live is not None:
        grad_rows = torch.zeros_like(hidden, dtype=head.dtype).index_copy_(0, live, grad_live)
    return Walk(logprobs, entropy, grad_rows, grad_weight, grad_bias)


def _slabs(kept: Tensor, rows: int, vocabulary: int, limits: logit_slabs.SlabLimits) -> list[tuple[slice, Tensor]]:
    """Cut the buffer into one contiguous block of logits per slab of the vocabulary."""
    step = max(1, min(limits.columns, limits.elements // rows))
    return [
        (columns, kept[rows * columns.start : rows * columns.stop].view(rows, columns.stop - columns.start))
        for columns in logit_slabs.slices(vocabulary, step)
    ]
