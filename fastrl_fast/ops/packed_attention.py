"""Causal attention over sequences that lie back to back in one row, with no way to look across a border."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastrl_fast.ops.row_attention import has_row_kernel, row_attention, row_pieces
from fastrl_fast.ops.varlen_attention import HAS_FLASH

FILL = 0.85
"""Sequences share one padded call when the shortest has at least this share of the longest one's tokens."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the sequences of a packed row lie, and how they are gathered for attention.

    cu_seqlens [S+1] int32 borders in T and the longest length (what a variable-length kernel takes); buckets: for
    sequences of like length one [n, L] index into T, short ones repeating their last position; restore [T]: where
    each position's output lies in the concatenation of the flattened buckets; pieces: what `row_attention` takes.
    """

    cu_seqlens: Tensor
    max_length: int
    buckets: list[Tensor]
    restore: Tensor
    pieces: Tensor


def segments(cu_seqlens: Tensor) -> Segments:
    """Plan the attention of one packed row; cu_seqlens [S+1] int64, starting at 0 and ending at T."""
    borders = cu_seqlens.tolist()
    lengths = cu_seqlens.diff().tolist()
    device = cu_seqlens.device
    restore = torch.empty(borders[-1], dtype=torch.int64)
    buckets = []
    offset = 0
    for members in _buckets(lengths):
        longest = max(lengths[i] for i in members)
        starts = torch.tensor([borders[i] for i in members])[:, None]
        last = torch.tensor([lengths[i] - 1 for i in members])[:, None]
        steps = torch.arange(longest)[None]
        index = starts + torch.minimum(steps, last)
        flat = offset + torch.arange(index.numel()).view_as(index)
        real = steps <= last
        restore[index[real]] = flat[real]
        offset += index.numel()
        buckets.append(index.to(device))
    longest = max(lengths, default=0)
    return Segments(cu_seqlens.to(torch.int32), longest, buckets, restore.to(device), row_pieces(borders))


def _buckets(lengths: list[int]) -> list[list[int]]:
    """Group sequence numbers by like length, longest first; sequences without tokens are in none."""
    groups: list[list[int]] = []
    for index in sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], i)):
        if groups and lengths[index] >= FILL * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: Segments, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Causal self-attention inside each sequence: softmax(scale q k^T) v over the keys at or before the query.

    query [1, heads, T, D], key and value [1, kv heads, T, D] (heads a multiple of kv heads) -> [1, T, heads, D]. With
    `window` a query sees itself and the window - 1 positions before it. On CUDA with flash-attn installed: its
    variable-length kernel. On the CPU in float32 `row_attention` where it has code. Elsewhere: sequences of like length
    are padded on the right and share one call; the padding comes after every real query, so causality alone keeps it
    out, exactly.
    """
    if query.is_cuda and query.dtype != torch.float32 and HAS_FLASH:
        return _flash_attention(query, key, value, plan, scale=scale, window=window)
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    if has_row_kernel(q, v) and (window is None or window >= plan.max_length):
        return row_attention(q, k, v, plan.pieces, q.shape[-1] ** -0.5 if scale is None else scale).unsqueeze(0)
    outputs = []
    for index in plan.buckets:
        bq, bk, bv = (t.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for t in (q, k, v))
        mask = _window_mask(index.shape[1], window, query.device)
        out = scaled_dot_product_attention(
            bq, bk, bv, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.restore).unsqueeze(0)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= length:
        return None
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (age >= 0) & (age < window)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: Segments, *, scale: float | None, window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    borders = dict(cu_seqlens_q=plan.cu_seqlens, cu_seqlens_k=plan.cu_seqlens)
    longest = dict(max_seqlen_q=plan.max_length, max_seqlen_k=plan.max_length)
    reach = (-1, -1) if window is None else (window - 1, 0)
    out = flash_attn_varlen_func(q, k, v, **borders, **longest, softmax_scale=scale, causal=True, window_size=reach)
    return out.unsqueeze(0)
