"""Kernels that attend from some rows of a packed row to others and also say, or take, the log-sum-exp of the scores.

q, out [T, heads, D], k, v [T, kv heads, D], lse [T, heads] float32 (float64 for float64): all as one packed row.
"""

import importlib.util
import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
HAS_FLASH_3 = importlib.util.find_spec("flash_attn_interface") is not None

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

    `causal` blocks look at themselves up to the query; others look at all keys of their block.
    """

    queries: Rows
    keys: Rows
    causal: bool
    borders: Borders | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """score = softcap(scale q.k), softcap(x) = c tanh(x / c); a causal query sees itself and window - 1 before it."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class Blocks:
    """Calls without borders: torch's flash attention for the CPU, or matrix products where that cannot serve."""

    def __init__(self, q: Tensor, k: Tensor, scores: Scores) -> None:
        self.kv_heads = k.shape[1]
        self.repeats = q.shape[1] // k.shape[1]
        self.scores = scores
        self.products = q.is_cuda or scores.softcap is not None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """out and lse of the call's queries."""
        heads = self._queries(q, call.queries), self._keys(k, call.keys), self._keys(v, call.keys)
        mask = self._mask(call, heads[0])
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
        sums = self._queries(lse[..., None], call.queries)[..., 0]
        ks, vs = self._keys(k, call.keys), self._keys(v, call.keys)
        mask = self._mask(call, qs)
        if self.products:
            gq, gk, gv = _products_backward(g, qs, ks, vs, outs, sums, mask, self.scores)
        else:
            gq, gk, gv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, qs, ks, vs, outs, sums, 0.0, call.causal and mask is None, attn_mask=mask, scale=self.scores.scale
            )
        return self._rows(gq, call.queries), self._key_rows(gk, call.keys), self._key_rows(gv, call.keys)

    def _queries(self, x: Tensor, rows: Rows) -> Tensor:
        """[n x kv heads, repeats, L, D]: queries that share a key head lie side by side, a view where rows is a
        slice."""
        blocks = x[rows].unsqueeze(0) if isinstance(rows, slice) else x[rows]
        return blocks.unflatten(2, (self.kv_heads, self.repeats)).permute(0, 2, 3, 1, 4).flatten(0, 1)

    def _keys(self, x: Tensor, rows: Rows) -> Tensor:
        """[n x kv heads, repeats, S, D], repeated by a stride of zero: older kernels know no grouped queries."""
        blocks = x[rows].unsqueeze(0) if isinstance(rows, slice) else x[rows]
        return blocks.transpose(1, 2).flatten(0, 1).unsqueeze(1).expand(-1, self.repeats, -1, -1)

    def _rows(self, x: Tensor, rows: Rows) -> Tensor:
        """Undo _queries."""
        blocks = x.unflatten(0, (-1, self.kv_heads)).movedim(3, 1).flatten(2, 3)
        return blocks.squeeze(0) if isinstance(rows, slice) else blocks

    def _key_rows(self, x: Tensor, rows: Rows) -> Tensor:
        """Undo _keys, adding up what the repeated heads got."""
        blocks = x.sum(1).unflatten(0, (-1, self.kv_heads)).transpose(1, 2)
        return blocks.squeeze(0) if isinstance(rows, slice) else blocks

    def _mask(self, call: Call, q: Tensor) -> Tensor | None:
        """What to add to the scores of a causal call; None where causality alone says it."""
        length, window = q.shape[2], self.scores.window
        reach = length if window is None else min(window, length)
        if not call.causal or (reach == length and not self.products):
            return None
        age = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)[None]
        seen = (age >= 0) & (age < reach)
        return torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -math.inf)


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


def takes_borders(q: Tensor, scores: Scores) -> bool:
    """Whether a variable-length kernel serves these queries: half precision on CUDA, heads of a multiple of 8 up to
    256; torch's own has no soft cap."""
    fits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] % 8 == 0 and q.shape[2] <= 256
    return fits and (scores.softcap is None or HAS_FLASH)


class Varlen:
    """Calls with borders, on CUDA: FlashAttention 3 or 2 where installed, else the one inside torch."""

    def __init__(self, q: Tensor, k: Tensor, scores: Scores) -> None:
        self.scores = scores
        self.reach = (-1, -1) if scores.window is None else (scores.window - 1, 0)
        hopper = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)
        self.run: type[_Flash2] | type[_Flash3] | type[_TorchFlash] = _TorchFlash
        if HAS_FLASH_3 and hopper and scores.softcap is None:
            self.run = _Flash3
        elif HAS_FLASH:
            self.run = _Flash2

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """out and lse of the call's queries."""
        inputs = q[call.queries].contiguous(), k[call.keys].contiguous(), v[call.keys].contiguous()
        out, lse = self.run.forward(*inputs, call, self.scores, self._reach(call))
        return out, lse.t()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the call's queries, keys and values, given the merged out and lse."""
        g, qs, outs = (x[call.queries].contiguous() for x in (grad, q, out))
        ks, vs = k[call.keys].contiguous(), v[call.keys].contiguous()
        sums = lse[call.queries].t().contiguous()
        return self.run.backward(g, qs, ks, vs, outs, sums, call, self.scores, self._reach(call))

    def _reach(self, call: Call) -> tuple[int, int]:
        return self.reach if call.causal else (-1, -1)


def _borders(call: Call) -> tuple[Tensor, Tensor, int, int]:
    assert call.borders is not None, "a variable-length kernel needs borders"
    return call.borders.queries, call.borders.keys, call.borders.longest_query, call.borders.longest_key


class _Flash2:
    """flash-attn 2.7 and later."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, call: Call, scores: Scores, reach: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _flash_2()._flash_attn_varlen_forward(
            q, k, v, *_borders(call), 0.0, scores.scale, call.causal, *reach, scores.softcap or 0.0
        )
        return out, lse

    @staticmethod
    def backward(
        g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scores: Scores,
        reach: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_2()._flash_attn_varlen_backward(
            g, q, k, v, out, lse, *grads, *_borders(call), 0.0, scores.scale, call.causal, *reach,
            scores.softcap or 0.0, None, True,
        )  # fmt: skip
        return grads


class _Flash3:
    """flash-attn 3 (`flash_attn_interface`), whose functions name both window sizes."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, call: Call, scores: Scores, reach: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        cu_q, cu_k, max_q, max_k = _borders(call)
        out, lse, *_ = _flash_3()._flash_attn_forward(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            softmax_scale=scores.scale, causal=call.causal, window_size_left=reach[0], window_size_right=reach[1],
        )  # fmt: skip
        return out, lse

    @staticmethod
    def backward(
        g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scores: Scores,
        reach: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cu_q, cu_k, max_q, max_k = _borders(call)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_3()._flash_attn_backward(
            g, q, k, v, out, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            dq=dq, dk=dk, dv=dv, softmax_scale=scores.scale, is_causal=call.causal, window_size_left=reach[0],
            window_size_right=reach[1], deterministic=True,
        )  # fmt: skip
        return dq, dk, dv


class _TorchFlash:
    """The FlashAttention 2 inside torch; without dropout it reads nothing of the random state it is given."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, call: Call, scores: Scores, reach: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        left, right = (None, None) if reach[0] < 0 else reach
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_borders(call), 0.0, call.causal, False, scale=scores.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse

    @staticmethod
    def backward(
        g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scores: Scores,
        reach: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        left, right = (None, None) if reach[0] < 0 else reach
        unused = torch.empty(2, dtype=torch.int64, device=q.device), torch.empty(0, dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            g, q, k, v, out, lse, *_borders(call), 0.0, call.causal, *unused, scale=scores.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]


def _flash_2() -> ModuleType:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def _flash_3() -> ModuleType:
    import flash_attn_interface

    return flash_attn_interface
