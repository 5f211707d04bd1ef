"""Loss and gradient of a language-model head in one walk: chunks of rows whose logits are kept, three GEMMs.

`logit_slabs` makes the logits twice, once for the logprobs and once for the gradient, so that a chunk need not hold a
whole row. Here a chunk of rows keeps its logits until the loss has said what their gradient is.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastrl_fast.ops import logit_slabs
from fastrl_fast.ops.logit_slabs import Grads, Head

CHUNK_ELEMENTS = {"cpu": 15 << 20, "cuda": 1 << 28}
"""Logits kept at a time: 60 MB of float32 on a CPU, 1 GB on a GPU."""
CHUNK_ROWS = {"cpu": 512, "cuda": 16384}
"""As many as make a slab on a CPU: more would narrow it."""


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


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some rows and their logits, kept as one contiguous block per slab of the vocabulary."""

    rows: slice
    hidden: Tensor
    targets: Tensor
    slabs: list[tuple[slice, Tensor]]


def walk(hidden: Tensor, targets: Tensor, head: Head, loss: Slopes, needs: tuple[bool, bool, bool]) -> Walk:
    """Return logprobs and entropy [N] of every row, and the gradients of `loss`.

    hidden [N, H] in `head.dtype`, or in bfloat16 on CUDA with float32 sums; targets [N]. Rows whose slope is 0 take no
    part in the second and third GEMM. The first chunk keeps its logits where the weight's gradient will be written, if
    as many rows fit there as into a buffer. Where a chunk would be too small for rows that belong together the logits
    are made twice.
    """
    n, (vocabulary, width), device = hidden.shape[0], head.weight.shape, hidden.device.type
    most = max(1, min(CHUNK_ROWS[device], CHUNK_ELEMENTS[device] // vocabulary))
    within = min(width, CHUNK_ROWS[device]) if needs[1] and head.weight.is_contiguous() else 0
    stretches = _stretches(n, max(within, most), most, loss.borders)
    if stretches is None:
        return _walk_twice(hidden, targets, head, loss, needs)
    made = Walk(
        hidden.new_empty(n, dtype=head.dtype),
        hidden.new_empty(n, dtype=head.dtype),
        torch.zeros_like(hidden, dtype=head.dtype) if needs[0] else None,
        torch.empty_like(head.weight, dtype=head.dtype) if needs[1] else None,
        torch.zeros_like(head.bias, dtype=torch.float64) if needs[2] and head.bias is not None else None,
    )
    borrowed = made.grad_weight if stretches and stretches[0].stop <= within else None
    most = max((rows.stop - rows.start for rows in stretches[0 if borrowed is None else 1 :]), default=0)
    kept, written = hidden.new_empty(most * vocabulary, dtype=head.dtype), False
    for rows in stretches:
        slabs = _slabs(rows.stop - rows.start, head, kept, borrowed if rows.start == 0 else None)
        chunk = _Chunk(rows, hidden[rows], targets[rows], slabs)
        grads = _fill(chunk, head, loss, made)
        live = torch.nonzero(grads.logprobs)[:, 0] if loss.sparse else None
        if any(needs) and (live is None or live.shape[0] > 0):
            _add_gradients(chunk, head, grads, live, made, first=not written)
            written = True
    if made.grad_weight is not None and not written:
        made.grad_weight.zero_()
    return made


def _stretches(rows: int, first: int, most: int, borders: list[int] | None) -> list[slice] | None:
    """Cut the rows into chunks of at most `most`, the first one of at most `first` >= most.

    None where what belongs together is too large for one.
    """
    if borders is None:
        start = min(first, rows) if first > most else 0
        # the rest in equal parts, or the last GEMMs would be small ones
        step = -(-(rows - start) // max(1, -(-(rows - start) // most)))
        borders = [0, *range(start, rows, max(1, step)), rows]
    whole, start, room = [], 0, first
    for begin, end in pairwise(border for border in borders if border <= rows):
        if end - start > room and begin > start:
            whole.append(slice(start, begin))
            start, room = begin, most
        if end - start > room:
            return None
    return [*whole, slice(start, rows)] if start < rows else whole


def _fill(chunk: _Chunk, head: Head, loss: Slopes, made: Walk) -> Grads:
    """Make the logits of a chunk, write its logprobs and entropies, and return what its gradient needs."""
    hidden, rows = chunk.hidden, chunk.rows
    sums = logit_slabs.start(hidden, head.dtype)
    for columns, logits in chunk.slabs:
        head.fill(logits, hidden, *head.part(columns, hidden.dtype))
        logit_slabs.fold(logits, chunk.targets, columns.start, head.scale, sums)
    row_max, log_sum, made.logprobs[rows], made.entropy[rows] = logit_slabs.finish(sums)
    return _grads(row_max, log_sum, made.entropy[rows], loss.slope(made.logprobs[rows], rows))


def _grads(row_max: Tensor, log_sum: Tensor, entropy: Tensor, slope: Tensor) -> Grads:
    return Grads(
        row_max=row_max, log_sum=log_sum, entropy=entropy, logprobs=slope, upstream_entropy=torch.zeros_like(slope)
    )


def _add_gradients(chunk: _Chunk, head: Head, grads: Grads, live: Tensor | None, made: Walk, *, first: bool) -> None:
    """Add what a chunk's `live` rows (None = all) give to the gradients; the `first` chunk writes the weight's."""
    part, targets = chunk.hidden, chunk.targets
    if live is not None and live.shape[0] == part.shape[0]:
        live = None
    grad_part = None if made.grad_rows is None else made.grad_rows[chunk.rows]
    if live is not None:
        part, targets, grads = part[live], targets[live], grads[live]
        grad_part = None if grad_part is None else torch.zeros_like(part, dtype=head.dtype)
    for columns, logits in chunk.slabs:
        kept = logits if live is None else logits[live]
        slopes = logit_slabs.differentiate(kept, targets, columns.start, head, grads, part.dtype)
        if grad_part is not None:
            logit_slabs.add_product(grad_part, slopes, head.part(columns, part.dtype)[0])
        if made.grad_weight is not None and first:
            logit_slabs.multiply(slopes.t(), part, made.grad_weight[columns])
        elif made.grad_weight is not None:
            logit_slabs.add_product(made.grad_weight[columns], slopes.t(), part)
        if made.grad_bias is not None:
            made.grad_bias[columns] += slopes.sum(0, dtype=torch.float64)
    if made.grad_rows is not None and grad_part is not None and live is not None:
        made.grad_rows[chunk.rows].index_copy_(0, live, grad_part)


def _walk_twice(hidden: Tensor, targets: Tensor, head: Head, loss: Slopes, needs: tuple[bool, bool, bool]) -> Walk:
    """The same with logits that are made again for the gradient, in the memory of a slab."""
    row_max, log_sum, logprobs, entropy = logit_slabs.finish(logit_slabs.forward(hidden, targets, head))
    grads = _grads(row_max, log_sum, entropy, loss.slope(logprobs, slice(0, hidden.shape[0])))
    live = torch.nonzero(grads.logprobs)[:, 0]
    grad_live, grad_weight, grad_bias = logit_slabs.backward(hidden[live], targets[live], head, grads[live], needs)
    grad_rows = None
    if grad_live is not None:
        grad_rows = torch.zeros_like(hidden, dtype=head.dtype).index_copy_(0, live, grad_live)
    return Walk(logprobs, entropy, grad_rows, grad_weight, grad_bias)


def _slabs(rows: int, head: Head, kept: Tensor, grad_weight: Tensor | None) -> list[tuple[slice, Tensor]]:
    """Return a contiguous block for the logits of each slab of the vocabulary: in `kept`, or in the weight's gradient.

    There a slab lies where the next slab's part of the gradient will be written: by then it has been used. The last
    ones, behind which there is no room, get memory of their own.
    """
    limits, (vocabulary, width) = logit_slabs.LIMITS[kept.device.type], head.weight.shape
    kept = kept if grad_weight is None else grad_weight.view(-1)
    slabs = []
    for columns in logit_slabs.slices(vocabulary, max(1, min(limits.columns, limits.elements // rows))):
        size = rows * (columns.stop - columns.start)
        begin = rows * columns.start if grad_weight is None else width * columns.stop
        block = kept[begin : begin + size] if begin + size <= kept.numel() else kept.new_empty(size)
        slabs.append((columns, block.view(rows, -1)))
    return slabs
