"""Walk the logits of a language-model head slab by slab of the vocabulary, without ever holding them all.

The GEMMs are torch's. The one-pass work on each slab is a kernel of csrc/kernels/packed_logprobs.h; in float64, which
is there to check gradients, it is the same formulas in plain torch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops._lib import cuda_stream, kernels


class SlabLimits(NamedTuple):
    """The largest slab of logits held at a time."""

    elements: int
    rows: int
    """More rows than this are walked in blocks under the same slab of the weight."""
    columns: int
    """Bounds the up-cast slab of the weight where there are few rows."""


LIMITS = {"cpu": SlabLimits(1 << 19, 512, 992), "cuda": SlabLimits(1 << 26, 8192, 32768)}
"""2 MB of float32 logits stay in a CPU's cache, as does a slab of 992 rows of the weight (with 4096 the GEMM was 10 to
30 % slower; with 4 MB of logits loss and gradient of a narrow head, 5 to 20 %). Rows of 1024 logits would be 4096 bytes
apart and share few places of that cache: the product for the weight's gradient, which walks down columns, took 40 %
longer at H = 64 and 3 % at H = 576. 256 MB keep a GPU's GEMM busy."""

STEADY_ROWS, STEADY_COLUMNS = 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The last layer: z = softcap(x * logit_scale) / temperature with x = h . W_v + b_v."""

    weight: Tensor
    """[V, H], any float dtype."""
    bias: Tensor | None
    """[V] or None."""
    temperature: float
    softcap: float | None
    """softcap(u) = softcap * tanh(u / softcap)."""
    logit_scale: float
    dtype: torch.dtype
    """What is computed in: float32, or float64."""

    @property
    def scale(self) -> float:
        """What a slab made by `fill` must be multiplied by to be z."""
        return (self.logit_scale if self.softcap is None else self.softcap) / self.temperature

    def part(self, columns: slice, operands: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the slab of the weight in the dtype that is multiplied, and of the bias, up-cast."""
        bias = None if self.bias is None else self.bias[columns].to(self.dtype)
        return self.weight[columns].to(operands), bias

    def fill(self, logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Write x, or tanh(x * logit_scale / softcap), into `logits` [rows, columns]."""
        multiply(hidden, weight.t(), logits)
        if bias is not None:
            logits.add_(bias)
        if self.softcap is not None:
            logits.mul_(self.logit_scale / self.softcap).tanh_()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grads:
    """What the backward needs per target besides the logits; all [N]."""

    row_max: Tensor
    log_sum: Tensor
    entropy: Tensor
    logprobs: Tensor
    """Upstream gradient of the logprobs."""
    upstream_entropy: Tensor
    """Upstream gradient of the entropy."""

    def __getitem__(self, rows: slice | Tensor) -> "Grads":
        return Grads(
            row_max=self.row_max[rows],
            log_sum=self.log_sum[rows],
            entropy=self.entropy[rows],
            logprobs=self.logprobs[rows],
            upstream_entropy=self.upstream_entropy[rows],
        )


def forward(hidden: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Return [4, N]: the largest z, sum e^(z - max), sum (z - max) e^(z - max) and the target's z of each row.

    hidden [N, H] in `head.dtype`, or in bfloat16 on CUDA with float32 sums; targets [N]. A target outside the
    vocabulary leaves NaN in the last row.
    """
    n = hidden.shape[0]
    sums = start(hidden, head.dtype)
    rows_at_once, columns_at_once, buffer = _plan(n, head)
    for columns in slices(head.weight.shape[0], columns_at_once):
        weight, bias = head.part(columns, hidden.dtype)
        for rows in slices(n, rows_at_once):
            logits = _view(buffer, rows, columns)
            head.fill(logits, hidden[rows], weight, bias)
            fold(logits, targets[rows], columns.start, head.scale, sums[:, rows])
    return sums


def start(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums [4, N] in `dtype` of rows that have met no logit yet."""
    sums = hidden.new_zeros(4, hidden.shape[0], dtype=dtype)
    sums[0] = -math.inf
    sums[3] = math.nan
    return sums


def finish(sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest z, the log-sum, the target's logprob and the entropy of each row."""
    row_max, sum_exp, sum_dexp, target_logit = sums.unbind()
    log_sum = sum_exp.log()
    # (z_y - max) first: both are exact to their own rounding, and their difference is small
    logprobs = ((target_logit - row_max) - log_sum).clamp_(max=0)
    return row_max, log_sum, logprobs, (log_sum - sum_dexp / sum_exp).clamp_(min=0)


def backward(
    hidden: Tensor, targets: Tensor, head: Head, grads: Grads, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden [N, H] (in `head.dtype`), weight and bias (in their dtypes) where `needs` asks.

    The logits are made again. The vocabulary is the outer loop: each slab of the weight's gradient is written once,
    summed in `head.dtype` (the bias in float64), and the gradient of `hidden` accumulates. What is multiplied has the
    dtype of `hidden`, the logits' gradient too.
    """
    n = hidden.shape[0]
    allocate = torch.zeros_like if n == 0 else torch.empty_like
    grad_hidden = torch.zeros_like(hidden, dtype=head.dtype) if needs[0] else None
    grad_weight = allocate(head.weight) if needs[1] else None
    grad_bias = torch.zeros_like(head.bias) if needs[2] and head.bias is not None else None
    if n == 0:
        return grad_hidden, grad_weight, grad_bias
    rows_at_once, columns_at_once, buffer = _plan(n, head)
    for columns in slices(head.weight.shape[0], columns_at_once):
        weight, bias = head.part(columns, hidden.dtype)
        weight_sum = None if grad_weight is None else _sum_place(grad_weight[columns], head.dtype)
        bias_sum = weight.new_zeros(weight.shape[0], dtype=torch.float64)  # a plain sum over all rows
        for rows in slices(n, rows_at_once):
            logits = _view(buffer, rows, columns)
            head.fill(logits, hidden[rows], weight, bias)
            slopes = differentiate(logits, targets[rows], columns.start, head, grads[rows], hidden.dtype)
            if grad_hidden is not None:
                add_product(grad_hidden[rows], slopes, weight)
            if weight_sum is not None and rows.start == 0:
                multiply(slopes.t(), hidden[rows], weight_sum)
            elif weight_sum is not None:
                add_product(weight_sum, slopes.t(), hidden[rows])
            if grad_bias is not None:
                bias_sum += slopes.sum(0, dtype=torch.float64)
        if grad_weight is not None and weight_sum is not None and weight_sum.dtype != grad_weight.dtype:
            grad_weight[columns] = weight_sum
        if grad_bias is not None:
            grad_bias[columns] = bias_sum
    return grad_hidden, grad_weight, grad_bias


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a b into `out`, summed in the dtype of `out`: that of a and b, or float32 over bfloat16 on CUDA."""
    if a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif out.is_cuda:
        torch.mm(a, b, out=out)
    else:
        _steadily(lambda x, y, place: torch.mm(x, y, out=place), a, b, out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to `total`, summed in the dtype of `total`."""
    if a.dtype != total.dtype:  # addmm takes a float32 total with bfloat16 factors only from some release of torch on
        total += torch.mm(a, b, out_dtype=total.dtype)
    elif total.is_cuda:
        total.addmm_(a, b)
    else:
        _steadily(lambda x, y, place: place.addmm_(x, y), a, b, total)


def _steadily(product: Callable[[Tensor, Tensor, Tensor], Tensor], a: Tensor, b: Tensor, out: Tensor) -> None:
    """product(a, b, out) on a CPU, with the same bits for any number of threads.

    MKL's products in float32 have that where the columns of the result are a multiple of 16 or fewer than that, and its
    rows a multiple of 8 where they are few; others are cut or padded. Found by trying, and tried by a test.
    """
    rows, columns = out.shape
    more = -rows % STEADY_ROWS
    if more and rows < 8 * STEADY_ROWS:
        padded = torch.nn.functional.pad(out, (0, 0, 0, more))
        _steadily(product, torch.nn.functional.pad(a, (0, 0, 0, more)), b, padded)
        out.copy_(padded[:rows])
        return
    even = columns - columns % STEADY_COLUMNS
    for part in (slice(even), slice(even, columns)) if 0 < even < columns else (slice(columns),):
        product(a, b[:, part], out[:, part])


def _sum_place(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return where a slab of the weight's gradient is summed: in its place, unless that is of lower precision."""
    return part if part.dtype == dtype else torch.empty_like(part, dtype=dtype)


def _plan(rows: int, head: Head) -> tuple[int, int, Tensor]:
    """Choose rows and columns of a slab, and allocate the one buffer that all slabs share."""
    limits = LIMITS[head.weight.device.type]
    rows = max(1, min(rows, limits.rows))
    columns = max(1, min(head.weight.shape[0], limits.columns, limits.elements // rows))
    return rows, columns, head.weight.new_empty(rows * columns, dtype=head.dtype)


def slices(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _view(buffer: Tensor, rows: slice, columns: slice) -> Tensor:
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    return buffer[: shape[0] * shape[1]].view(shape)


def _has_kernel(logits: Tensor) -> bool:
    return logits.dtype == torch.float32


def fold(logits: Tensor, targets: Tensor, start: int, scale: float, sums: Tensor) -> None:
    """Add a slab to the running sums [4, rows]."""
    rows, columns = logits.shape
    if _has_kernel(logits):
        pointers = [x.data_ptr() for x in sums]
        arguments = (logits.data_ptr(), rows, columns, columns, start, targets.data_ptr(), scale, *pointers)
        if logits.is_cuda:
            with cuda_stream(logits) as stream:
                kernels.logit_fold_cuda(*arguments, stream)
        else:
            kernels.logit_fold_cpu(*arguments, torch.get_num_threads())
        return
    old_max, old_sum, old_dsum, old_target = sums.unbind()
    z = logits * scale
    row_max = torch.maximum(old_max, z.amax(1))
    # -inf - -inf is NaN: a row that has met only -inf so far is measured from 0, and its old sums are 0 anyway
    origin = torch.where(row_max == -math.inf, 0, row_max)
    shift = torch.where(old_max == -math.inf, 0, old_max - origin)
    d = z - origin[:, None]
    e = d.exp()
    d.clamp_(min=_lowest_exponent(z.dtype))
    here, column = _target_column(targets, start, columns)
    old_target.copy_(torch.where(here, z.gather(1, column)[:, 0], old_target))
    old_dsum.copy_(shift.exp() * (old_dsum + shift * old_sum) + (e * d).sum(1))
    old_sum.copy_(shift.exp() * old_sum + e.sum(1))
    old_max.copy_(row_max)


def differentiate(logits: Tensor, targets: Tensor, start: int, head: Head, grads: Grads, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x = h . W_v + b_v in `dtype`, given (and spoiling) a slab from `Head.fill`."""
    slope = None if head.softcap is None else torch.addcmul(torch.ones_like(logits), logits, logits, value=-1)
    rows, columns = logits.shape
    rounded = None  # bfloat16 written by the kernel itself
    if _has_kernel(logits):
        per_row = (grads.row_max, grads.log_sum, grads.entropy, grads.logprobs, grads.upstream_entropy)
        pointers = [x.data_ptr() for x in per_row]
        arguments = (logits.data_ptr(), rows, columns, columns, start, targets.data_ptr(), head.scale, *pointers)
        if logits.is_cuda:
            if dtype == torch.bfloat16 and slope is None:
                rounded = torch.empty_like(logits, dtype=dtype)
            with cuda_stream(logits) as stream:
                kernels.logit_grad_cuda(*arguments, 0 if rounded is None else rounded.data_ptr(), stream)
        else:
            kernels.logit_grad_cpu(*arguments, torch.get_num_threads())
    else:
        lp = logits.mul_(head.scale).sub_(grads.row_max[:, None]).sub_(grads.log_sum[:, None])
        p = lp.exp()
        lp.clamp_(min=_lowest_exponent(lp.dtype))
        pull = grads.logprobs[:, None] + grads.upstream_entropy[:, None] * (lp + grads.entropy[:, None])
        torch.mul(p, pull, out=logits).mul_(-head.scale)
        here, column = _target_column(targets, start, columns)
        push = torch.where(here, grads.logprobs * head.scale, 0)[:, None]
        logits.scatter_(1, column, logits.gather(1, column) + push)
    if slope is not None and head.softcap is not None:
        logits.mul_(slope).mul_(head.logit_scale / head.softcap)
    return logits.to(dtype) if rounded is None else rounded


def _target_column(targets: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return which targets lie in the slab, and a valid column [rows, 1] for each row."""
    column = targets - start
    return (column >= 0) & (column < columns), column.clamp(0, columns - 1)[:, None]


def _lowest_exponent(dtype: torch.dtype) -> float:
    """Below it e^d is not a normal number; clamping d there, after e^d is taken, keeps d e^d from being -inf * 0."""
    return math.log(torch.finfo(dtype).tiny)
