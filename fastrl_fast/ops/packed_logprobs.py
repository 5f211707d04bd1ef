"""Logprobs and entropies of the targets of a packed batch, straight from hidden states and head weights."""

from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops import logit_slabs
from fastrl_fast.ops._lib import check, forbid_second_derivative, library

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_HEAD = (
    "Tensor hidden, Tensor weight, Tensor targets, Tensor? row_index, Tensor? bias, "
    "float temperature, float? softcap, float logit_scale, int? ignore_index"
)
library.define(f"packed_logprobs({_HEAD}, bool entropy) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"packed_logprobs_backward({_HEAD}, Tensor grad_logprobs, Tensor? grad_entropy, Tensor row_max, Tensor log_sum, "
    "Tensor entropy, bool[] needs) -> (Tensor, Tensor, Tensor)"
)


def packed_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    row_index: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the entropy of each target's distribution, without a [tokens, vocabulary] tensor.

    z_v = softcap(x_v * logit_scale) / temperature with x_v = h . W_v + b_v and softcap(u) = c tanh(u / c);
    logprob = z_y - ln sum_v e^z_v (never above 0), entropy = - sum_v p_v ln p_v, in nats.

    The vocabulary is walked in slabs of float32 logits (2 MB on the CPU, 256 MB on a GPU); low-precision weights are
    up-cast slab by slab. Memory beyond inputs and outputs does not grow with V. The backward makes the logits again,
    skips targets whose upstream gradients are all zero, sums in float32 and returns gradients of `hidden`, `weight` and
    `bias` in their dtypes. On CUDA bfloat16 `hidden` and `weight` are multiplied as they are and summed in float32, and
    the logits' gradient is rounded to bfloat16 before it is multiplied; the backward synchronises once, to count the
    targets that have a gradient.

    Args:
        hidden, weight: [T, H] and [V, H], float32, bfloat16, float16 or float64; float64 anywhere computes in float64.
        targets: [N] int64 in [0, V), or `ignore_index`.
        row_index: [N] int64 in [0, T), the row of `hidden` that predicts each target (rows may repeat; only these are
            multiplied); None pairs target i with row i.
        bias: [V] or None.
        temperature, softcap, logit_scale: > 0; no softcap where None.
        ignore_index: targets of this value (often -100) are not multiplied: logprob 0, entropy 0, no gradient.
        entropy: False leaves the entropy out: an empty tensor [0] is returned in its place.

    Returns:
        logprobs [N] and entropy [N] (or [0]), float32 (float64 where computed in float64).

    Raises:
        ValueError: shapes, dtypes or settings that do not fit; on the CPU also a target outside the vocabulary (on CUDA
            its logprob is NaN).

    Source: design.md 4.1; online softmax after Milakov and Gimelshein, arXiv 1805.02867.
    """
    check_settings(temperature, softcap, logit_scale)
    check_tensors(hidden, weight, targets, row_index, bias)
    logprobs, entropies, *_ = torch.ops.fastrl_fast.packed_logprobs(
        hidden, weight, targets, row_index, bias, float(temperature), softcap, float(logit_scale), ignore_index, entropy
    )
    return logprobs, entropies


def check_settings(temperature: float, softcap: float | None, logit_scale: float) -> None:
    check(temperature > 0, f"temperature must be > 0, not {temperature}")
    check(softcap is None or softcap > 0, f"softcap must be > 0 or None, not {softcap}")
    check(logit_scale > 0, f"logit_scale must be > 0, not {logit_scale}")


def check_tensors(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, bias: Tensor | None
) -> None:
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        check(
            matrix.ndim == 2 and matrix.dtype in FLOATS,
            f"{name} must have two dimensions and a float dtype, not {list(matrix.shape)} {matrix.dtype}",
        )
    check(
        hidden.shape[1] == weight.shape[1],
        f"hidden [T, H] and weight [V, H] must agree in H, not {list(hidden.shape)} and {list(weight.shape)}",
    )
    for name, index in (("targets", targets), ("row_index", row_index)):
        check(
            index is None or (index.ndim == 1 and index.dtype == torch.int64),
            f"{name} must be [N] int64, not {None if index is None else (list(index.shape), index.dtype)}",
        )
    rows = hidden.shape[0] if row_index is None else row_index.shape[0]
    check(targets.shape[0] == rows, f"targets must be one per row ({rows}), not {targets.shape[0]}")
    check(
        bias is None or (bias.shape == weight.shape[:1] and bias.dtype in FLOATS),
        f"bias must be float and [V] = [{weight.shape[0]}], not {None if bias is None else list(bias.shape)}",
    )


def check_targets(targets: Tensor, weight: Tensor) -> None:
    """On the CPU only: elsewhere it would synchronise."""
    if targets.device.type == "cpu" and targets.numel():
        low, high = int(targets.min()), int(targets.max())
        vocabulary = weight.shape[0]
        check(low >= 0 and high < vocabulary, f"targets must lie in [0, {vocabulary}), not in [{low}, {high}]")


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32


def operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What is multiplied: bfloat16 on a GPU, whose tensor cores sum its products in float32; else as computed."""
    on_tensor_cores = hidden.is_cuda and hidden.dtype == weight.dtype == torch.bfloat16
    return torch.bfloat16 if on_tensor_cores else compute_dtype(hidden, weight)


def gather_rows(hidden: Tensor, row_index: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (hidden if row_index is None else hidden.index_select(0, row_index)).to(dtype).contiguous()


def build_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None, logit_scale: float
) -> logit_slabs.Head:
    return logit_slabs.Head(
        weight=weight,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        dtype=compute_dtype(hidden, weight),
    )


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *head_settings, ignore_index, entropy = settings
    if ignore_index is not None:
        asked = torch.nonzero(targets != ignore_index)[:, 0]
        row_index = asked if row_index is None else row_index[asked]
        fewer = _forward(hidden, weight, targets[asked], row_index, *head_settings, None, entropy)
        return _spread(fewer, asked, targets.shape[0])
    head = build_head(hidden, weight, *head_settings)
    targets = targets.contiguous()
    check_targets(targets, weight)
    sums = logit_slabs.forward(gather_rows(hidden, row_index, operand_dtype(hidden, weight)), targets, head)
    row_max, log_sum, logprobs, entropies = logit_slabs.finish(sums)
    return logprobs, entropies if entropy else log_sum.new_empty(0), row_max.clone(), log_sum


def _spread(
    fewer: tuple[Tensor, Tensor, Tensor, Tensor], asked: Tensor, total: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put the results of the targets asked for where they belong, among zeros."""
    spread = [x.new_zeros(total).index_copy_(0, asked, x) if x.shape == asked.shape else x for x in fewer]
    return spread[0], spread[1], spread[2], spread[3]


def _backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    head, ignore_index = build_head(hidden, weight, *rest[:4]), rest[4]
    grad_logprobs, grad_entropy, row_max, log_sum, entropy, needs = rest[5:]
    dtype = head.dtype
    absent = torch.zeros_like(log_sum)
    grads = logit_slabs.Grads(
        row_max=row_max,
        log_sum=log_sum,
        entropy=entropy if entropy.numel() else absent,
        logprobs=grad_logprobs.to(dtype).contiguous(),
        upstream_entropy=absent if grad_entropy is None else grad_entropy.to(dtype).contiguous(),
    )
    has_gradient = (grads.logprobs != 0) | (grads.upstream_entropy != 0)
    if ignore_index is not None:
        has_gradient &= targets != ignore_index
    asked = torch.nonzero(has_gradient)[:, 0]
    if asked.shape[0] < targets.shape[0]:
        row_index = asked if row_index is None else row_index[asked]
        targets, grads = targets[asked], grads[asked]
    rows = gather_rows(hidden, row_index, operand_dtype(hidden, weight))
    grad_rows, grad_weight, grad_bias = logit_slabs.backward(
        rows, targets.contiguous(), head, grads, (needs[0], needs[1], needs[2])
    )
    nothing = hidden.new_empty(0)
    return (
        nothing if grad_rows is None else scatter_rows(grad_rows, row_index, hidden),
        nothing.clone() if grad_weight is None else grad_weight,
        nothing.clone() if grad_bias is None else grad_bias,
    )


def scatter_rows(grad_rows: Tensor, row_index: Tensor | None, hidden: Tensor) -> Tensor:
    """Add the gradients of the gathered rows up where they came from, in a fixed order on either device."""
    if row_index is None:
        return grad_rows.to(hidden.dtype)
    total = grad_rows.new_zeros(hidden.shape)
    if total.device.type == "cpu":
        total.index_add_(0, row_index, grad_rows)
    else:
        total.index_put_((row_index,), grad_rows, accumulate=True)  # sorts; index_add_ would use float atomics
    return total.to(hidden.dtype)


for _device in ("CPU", "CUDA"):
    library.impl("packed_logprobs", _forward, _device)
    library.impl("packed_logprobs_backward", _backward, _device)


@torch.library.register_fake("fastrl_fast::packed_logprobs", lib=library)
def _fake_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, entropy = compute_dtype(hidden, weight), settings[-1]
    per_target = [hidden.new_empty(targets.shape, dtype=dtype) for _ in range(4)]
    if not entropy:
        per_target[1] = hidden.new_empty(0, dtype=dtype)
    return per_target[0], per_target[1], per_target[2], per_target[3]


@torch.library.register_fake("fastrl_fast::packed_logprobs_backward", lib=library)
def _fake_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_index: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs = rest[-1]
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else hidden.new_empty(0),
        torch.empty_like(weight) if needs[1] else hidden.new_empty(0),
        torch.empty_like(bias) if needs[2] and bias is not None else hidden.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.temperature, ctx.softcap, ctx.logit_scale, ctx.ignore_index, _ = inputs
    _, entropies, row_max, log_sum = output
    ctx.save_for_backward(*tensors, entropies, row_max, log_sum)
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    hidden, weight, targets, row_index, bias, entropies, row_max, log_sum = ctx.saved_tensors
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_sum)
    if entropies.shape[0] != targets.shape[0]:
        grad_entropy = None
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[4]]
    grad_hidden, grad_weight, grad_bias = torch.ops.fastrl_fast.packed_logprobs_backward(
        hidden, weight, targets, row_index, bias, ctx.temperature, ctx.softcap, ctx.logit_scale,
        ctx.ignore_index, grad_logprobs, grad_entropy, row_max, log_sum, entropies, needs,
    )  # fmt: skip
    return (
        grad_hidden if needs[0] else None,
        grad_weight if needs[1] else None,
        None,
        None,
        grad_bias if needs[2] else None,
        *(None for _ in range(5)),
    )


torch.library.register_autograd("fastrl_fast::packed_logprobs", _gradient, setup_context=_setup_context, lib=library)
forbid_second_derivative("packed_logprobs_backward")
