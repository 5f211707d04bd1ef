"""Attention of a whole packed row in one compiled call, for float32 on CPUs with AVX2 or AVX-512."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check, forbid_second_derivative, kernels, library

library.define("row_attention(Tensor q, Tensor k, Tensor v, Tensor pieces, float scale) -> (Tensor, Tensor)")
library.define(
    "row_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor pieces, float scale, Tensor out, "
    "Tensor lse) -> (Tensor, Tensor, Tensor)"
)


def has_row_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether `row_attention` has code for this processor, and for queries and values of these dtypes and head sizes.

    Values of another size than keys, as DeepSeek's have, have none.
    """
    multiple = kernels.ROW_ATTENTION_MULTIPLE
    return (
        q.device.type == "cpu" and q.dtype == torch.float32 and multiple > 0 and q.shape[-1] % multiple == 0
        and v.shape[-1] == q.shape[-1]
    )  # fmt: skip


def row_pieces(borders: Sequence[int], groups: Sequence[Sequence[int]] = ()) -> Tensor:
    """[M, 3] int64 on the CPU: where each piece starts and ends, and the number of its prompt's piece or -1.

    borders: of the M pieces; groups: for each shared prompt where it starts, where it ends and where its last
    completion ends.
    """
    starts = {start: number for number, start in enumerate(borders[:-1])}
    pieces = [[start, end, -1] for start, end in pairwise(borders)]
    for start, middle, end in groups:
        for number in range(starts[start] + 1, len(pieces)):
            if pieces[number][1] > end:
                break
            pieces[number][2] = starts[start]
        assert pieces[starts[start]][1] == middle, "a shared prompt is one piece"
    return torch.tensor(pieces, dtype=torch.int64).view(-1, 3)


def row_attention(q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v of every piece of a row, over its own tokens up to each and all tokens of its prompt.

    All scores of 48 queries and 64 keys stay in the L1 cache. Sums are in an order that the shapes alone decide: no bit
    depends on the thread count. Differentiable in q, k and v.

    Args:
        q: [T, heads, D] float32 on the CPU, see `has_row_kernel`; head h asks key head h // (heads / kv heads).
        k, v: [T, kv heads, D].
        pieces: [M, 3] int64 on the CPU, from `row_pieces`: they cover T in order, a prompt is an earlier piece.
        scale: of the scores.

    Returns:
        [T, heads, D].

    Raises:
        ValueError: dtypes, shapes or pieces that do not fit; no code for this processor or head size.

    Source: FlashAttention-2, arXiv 2307.08691; design.md 4.5.
    """
    check(
        has_row_kernel(q, v),
        "q must be float32 on a CPU with AVX2, D a multiple of 16 and the same in v, "
        f"not {q.dtype} {list(q.shape)} and {list(v.shape)}",
    )
    check(
        q.ndim == 3 and k.ndim == 3 and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        f"q and k must be [T, heads, D] and [T, kv heads, D], not {list(q.shape)} and {list(k.shape)}",
    )
    check((q.shape[0], q.shape[2]) == (k.shape[0], k.shape[2]), f"k must fit q {list(q.shape)}, not {list(k.shape)}")
    check(k.shape == v.shape, f"v must be shaped as k {list(k.shape)}, not {list(v.shape)}")
    check(
        all(x.dtype == q.dtype and x.device == q.device for x in (k, v)),
        f"k and v must be float32 on the CPU, not {k.dtype} {k.device} and {v.dtype} {v.device}",
    )
    check(
        pieces.ndim == 2 and pieces.shape[1] == 3 and pieces.dtype == torch.int64 and pieces.device == q.device,
        f"pieces must be [M, 3] int64 on the CPU, not {list(pieces.shape)} {pieces.dtype} {pieces.device}",
    )
    out: Tensor = torch.ops.fastrl_fast.row_attention(q, k, v, pieces, scale)[0]
    return out


@torch.library.register_fake("fastrl_fast::row_attention", lib=library)
def _fake(q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2])


@torch.library.register_fake("fastrl_fast::row_attention_backward", lib=library)
def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, scale: float, out: Tensor, lse: Tensor
) -> tuple[Any, ...]:
    kv_heads = k.shape[1]
    return (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), pieces.data_ptr(), pieces.shape[0], q.shape[0], kv_heads,
        q.shape[1] // kv_heads, q.shape[2], scale, out.data_ptr(), lse.data_ptr(),
    )  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, pieces = (x.detach().contiguous() for x in (q, k, v, pieces))
    out, lse = _fake(q, k, v, pieces, scale)
    kernels.row_attention_cpu(*_arguments(q, k, v, pieces, scale, out, lse), torch.get_num_threads())
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, pieces: Tensor, scale: float, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, pieces, out, lse = (x.detach().contiguous() for x in (grad, q, k, v, pieces, out, lse))
    grads = _fake_backward(grad, q, k, v)
    pointers = (grad.data_ptr(), *(x.data_ptr() for x in grads))
    arguments = _arguments(q, k, v, pieces, scale, out, lse)
    kernels.row_attention_backward_cpu(*arguments, *pointers, torch.get_num_threads())
    return grads


library.impl("row_attention", _forward, "CPU")
library.impl("row_attention_backward", _backward, "CPU")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, pieces, out, lse = ctx.saved_tensors
    return *torch.ops.fastrl_fast.row_attention_backward(grad, q, k, v, pieces, ctx.scale, out, lse), None, None


torch.library.register_autograd("fastrl_fast::row_attention", _gradient, setup_context=_setup_context, lib=library)
forbid_second_derivative("row_attention_backward")
