"""Attention from some rows of a packed row to others that also says, and takes, the log-sum-exp of the scores.

q, out [T, kv heads, repeats, D], k, v [T, kv heads, D], lse [T, kv heads, repeats] float32 (float64 for float64): all
as one packed row, queries by the key head that they share.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class Borders:
    """Offsets [B + 1] int32 of B blocks in the queries and in the keys of a call, and the longest of each."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True)
class Call:
    """Which rows ask which: a slice of T, [n, L] indices of n equal blocks, or [R] indices of blocks cut by `borders`.

    The last query of a `causal` block sees the last of its keys, each before it one less; others look at all keys of
    their block. `again`: an earlier causal call has had the same keys.
    """

    queries: Rows
    keys: Rows
    causal: bool
    again: bool = False
    borders: Borders | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """score = softcap(scale q.k), softcap(x) = c tanh(x / c); a causal query sees itself and window - 1 before it."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Blocks:
    """Calls without borders: torch's flash attention for the CPU, or matrix products where that cannot serve."""

    def __init__(self, q: Tensor, scores: Scores) -> None:
        self.kv_heads, self.repeats = q.shape[1:3]
        self.scores = scores
        self.products = q.is_cuda or scores.softcap is not None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """out and lse of the call's queries."""
        heads = self._queries(q, call.queries), self._keys(k, call.keys), self._keys(v, call.keys)
        mask = self._mask(call, *heads[:2])
        if self.products:
            out, lse = _products_forward(*heads, mask, self.scores)
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *heads, 0.0, call.causal and mask is None, attn_mask=mask, scale=self.scores.scale
            )
        return self._rows(out, call.queries), self._rows(lse, call.queries)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the call's queries, keys and values, given the merged out and lse."""
        g, qs, outs = (self._queries(x, call.queries) for x in (grad, q, out))
        sums = self._queries(lse, call.queries)
        ks, vs = self._keys(k, call.keys), self._keys(v, call.keys)
        mask = self._mask(call, qs, ks)
        if self.products:
            gq, gk, gv = _products_backward(g, qs, ks, vs, outs, sums, mask, self.scores)
        else:
            gq, gk, gv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, qs, ks, vs, outs, sums, 0.0, call.causal and mask is None, attn_mask=mask, scale=self.scores.scale
            )
        return self._rows(gq, call.queries), self._key_rows(gk, call.keys), self._key_rows(gv, call.keys)

    def _queries(self, x: Tensor, rows: Rows) -> Tensor:
        """[n x kv heads, repeats, L, ...], a view where rows is a slice."""
        return x[rows].movedim(0, 2) if isinstance(rows, slice) else x[rows].movedim(1, 3).flatten(0, 1)

    def _keys(self, x: Tensor, rows: Rows) -> Tensor:
        """[n x kv heads, repeats, S, D], repeated by a stride of zero: older kernels know no grouped queries."""
        heads = x[rows].transpose(0, 1) if isinstance(rows, slice) else x[rows].transpose(1, 2).flatten(0, 1)
        return heads.unsqueeze(1).expand(-1, self.repeats, -1, -1)

    def _rows(self, x: Tensor, rows: Rows) -> Tensor:
        """Undo _queries; a view."""
        return x.movedim(2, 0) if isinstance(rows, slice) else x.unflatten(0, (-1, self.kv_heads)).movedim(3, 1)

    def _key_rows(self, x: Tensor, rows: Rows) -> Tensor:
        """Undo _keys, adding up what the repeated heads got."""
        heads = x.sum(1)
        if isinstance(rows, slice):
            return heads.transpose(0, 1)
        return heads.unflatten(0, (-1, self.kv_heads)).transpose(1, 2)

    def _mask(self, call: Call, q: Tensor, k: Tensor) -> Tensor | None:
        """What to add to the scores of a causal call; None where the kernel's own causality says it."""
        rows, columns, window = q.shape[2], k.shape[2], self.scores.window
        reach = None if window is None or window >= columns else window
        if not call.causal or (rows == columns and reach is None and not self.products):
            return None
        # The corner of a larger mask is the mask of a smaller call.
        corner = _mask(1 << (rows - 1).bit_length(), 1 << (columns - 1).bit_length(), reach, q.dtype, q.device)
        return corner[-rows:, -columns:]


@functools.lru_cache(maxsize=16)
def _mask(rows: int, columns: int, reach: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where one of the last `rows` of `columns` tokens sees itself or one of the `reach` - 1 before it, else -inf."""
    last = torch.arange(columns - rows, columns, device=device)
    age = last[:, None] - torch.arange(columns, device=device)
    seen = age >= 0 if reach is None else (age >= 0) & (age < reach)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """Scores in at least float32, and their slope where they are capped: d softcap(x) / dx = 1 - (softcap(x) / c)^2."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    s = (q.to(dtype) @ k.to(dtype).mT) * scores.scale
    slope = None
    if scores.softcap is not None:
        tanh = torch.tanh(s / scores.softcap)
        s, slope = scores.softcap * tanh, 1 - tanh**2
    return (s if mask is None else s + mask), slope


def _products_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor]:
    s, _ = _scores(q, k, mask, scores)
    lse = torch.logsumexp(s, -1)
    return (torch.exp(s - lse[..., None]) @ v.to(s.dtype)).to(q.dtype), lse


def _products_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    s, slope = _scores(q, k, mask, scores)
    p = torch.exp(s - lse[..., None])
    g, qs, ks, vs, outs = (x.to(s.dtype) for x in (grad, q, k, v, out))
    ds = p * (g @ vs.mT - (g * outs).sum(-1, keepdim=True)) * scores.scale
    if slope is not None:
        ds = ds * slope
    return (ds @ ks).to(q.dtype), (ds.mT @ qs).to(k.dtype), (p.mT @ g).to(v.dtype)
