"""Calls with borders: FlashAttention 3, 2, or the one inside torch, on CUDA in half precision."""

import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops.attention_calls import Call, Scores

HAS_FLASH = importlib.util.find_spec("flash_attn") is not None
HAS_FLASH_3 = importlib.util.find_spec("flash_attn_interface") is not None


def varlen_kernel(q: Tensor, scores: Scores) -> "Varlen | None":
    """The fastest kernel with borders for queries [T, kv heads, repeats, D]; None where none serves.

    They are for CUDA, bfloat16 or float16, and D a multiple of 8 up to 256; only flash-attn 2 caps scores.
    """
    if not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256):
        return None
    if HAS_FLASH_3 and scores.softcap is None and torch.cuda.get_device_capability(q.device) >= (9, 0):
        return Flash3(scores)
    if HAS_FLASH:
        return Flash2(scores)
    return TorchFlash(scores) if scores.softcap is None else None


class Varlen:
    """One call of a variable-length kernel for all blocks between borders."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """out and lse of the call's queries."""
        out, lse = self._forward(
            q[call.queries].flatten(1, 2).contiguous(), k[call.keys].contiguous(), v[call.keys].contiguous(), call
        )
        return out.unflatten(1, q.shape[1:3]), lse.t().unflatten(1, q.shape[1:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the call's queries, keys and values, given the merged out and lse."""
        g, qs, outs = (x[call.queries].flatten(1, 2).contiguous() for x in (grad, q, out))
        ks, vs = k[call.keys].contiguous(), v[call.keys].contiguous()
        sums = lse[call.queries].flatten(1, 2).t().contiguous()
        gq, gk, gv = self._backward([g, qs, ks, vs, outs, sums], call)
        return gq.unflatten(1, q.shape[1:3]), gk, gv

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """out [R, heads, D] and lse [heads, R]."""
        raise NotImplementedError

    def _backward(self, given: list[Tensor], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; given are grad, q, k, v, out and lse [heads, R]."""
        raise NotImplementedError

    def _reach(self, call: Call) -> tuple[int, int]:
        """Keys seen before and after a query; -1 is all that causality leaves."""
        return (-1, -1) if self.scores.window is None or not call.causal else (self.scores.window - 1, 0)


def _borders(call: Call) -> tuple[Tensor, Tensor, int, int]:
    assert call.borders is not None, "a variable-length kernel needs borders"
    return call.borders.queries, call.borders.keys, call.borders.longest_query, call.borders.longest_key


class Flash2(Varlen):
    """flash-attn 2.7 and later, its backward pass without atomics."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        settings = self.scores.scale, call.causal, *self._reach(call), self.scores.softcap or 0.0
        out, lse, *_ = _flash_2()._flash_attn_varlen_forward(q, k, v, *_borders(call), 0.0, *settings)
        return out, lse

    def _backward(self, given: list[Tensor], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in given[1:4])
        settings = self.scores.scale, call.causal, *self._reach(call), self.scores.softcap or 0.0, None, True
        _flash_2()._flash_attn_varlen_backward(*given, dq, dk, dv, *_borders(call), 0.0, *settings)
        return dq, dk, dv


class Flash3(Varlen):
    """flash-attn 3 (`flash_attn_interface`), whose functions name both sides of the window."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        settings = self._named(call) | {"causal": call.causal}
        out, lse, *_ = _flash_3()._flash_attn_forward(q, k, v, **settings)
        return out, lse

    def _backward(self, given: list[Tensor], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in given[1:4])
        settings = self._named(call) | {"is_causal": call.causal, "deterministic": True}
        _flash_3()._flash_attn_backward(*given, dq=dq, dk=dk, dv=dv, **settings)
        return dq, dk, dv

    def _named(self, call: Call) -> dict[str, Any]:
        borders = dict(
            zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _borders(call), strict=True)
        )
        left, right = self._reach(call)
        return borders | dict(softmax_scale=self.scores.scale, window_size_left=left, window_size_right=right)


class TorchFlash(Varlen):
    """The FlashAttention 2 inside torch."""

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *self.random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_borders(call), 0.0, call.causal, False, **self._named(call)
        )
        return out, lse

    def _backward(self, given: list[Tensor], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the random state of any call will do.
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *given, *_borders(call), 0.0, call.causal, *self.random, **self._named(call)
        )
        return dq, dk, dv

    def _named(self, call: Call) -> dict[str, Any]:
        left, right = self._reach(call)
        window = {} if left < 0 else dict(window_size_left=left, window_size_right=right)
        return {"scale": self.scores.scale} | window


def _flash_2() -> ModuleType:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def _flash_3() -> ModuleType:
    import flash_attn_interface

    return flash_attn_interface
