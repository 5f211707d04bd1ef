"""From logits to the chosen tokens: temperature, truncation, and an inverse CDF in exact integers."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE = 2.0**46
_COLDEST = 1e-30
"""Below it logits / temperature leaves float32."""
_SLAB = 1 << 24
"""Logits treated at a time: a slab's float32 and int64 copies stay below 1 GB at any vocabulary and batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The distribution that tokens are drawn from: softmax(logits / temperature), cut to its likely part."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def sampling_logprobs(logits: Tensor, truncation: Truncation) -> Tensor:
    """Log-probabilities [N, V] float32 of the distribution sampled from; -inf for a token that is cut off.

    In the order of transformers: logits / temperature, the top_k likeliest (ties: lowest ids), of these the smallest
    set whose renormalised probability reaches top_p, of these the ones with min_p times the likeliest or more.
    """
    logits = logits.to(torch.float32)
    if truncation.temperature != 1.0:
        logits = logits / max(truncation.temperature, _COLDEST)
    if 0 < truncation.top_k < logits.shape[-1] or truncation.top_p < 1.0:
        logits = _cut_tail(logits, truncation)
    if truncation.min_p > 0.0:
        probs = torch.softmax(logits, dim=-1)
        logits = logits.masked_fill(probs < truncation.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def _cut_tail(logits: Tensor, truncation: Truncation) -> Tensor:
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    if truncation.top_k > 0:
        ordered[:, truncation.top_k :] = -torch.inf
    if truncation.top_p < 1.0:
        probs = torch.softmax(ordered, dim=-1, dtype=torch.float64)
        before = probs.cumsum(dim=-1) - probs
        before[:, 0] = -1.0  # the likeliest token always stays
        ordered = ordered.masked_fill(before >= truncation.top_p, -torch.inf)
    return torch.empty_like(ordered).scatter_(-1, ids, ordered)


def choose(logits: Tensor, draws: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """The token at each draw of the inverse CDF in order of ids, int64 [N], and its log-probability, float32 [N].

    logits [N, V] of any float type, draws [N] float64 in [0, 1). Probabilities become integer multiples of 2^-46, whose
    running sums are exact: a token of probability 0 is never chosen, on any device and in any order of summation.
    """
    rows = max(1, _SLAB // logits.shape[-1])
    if logits.shape[0] <= rows:
        return _choose(logits, draws, truncation)
    parts = zip(logits.split(rows), draws.split(rows), strict=True)
    tokens, logprobs = zip(*(_choose(part, draw, truncation) for part, draw in parts), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _choose(logits: Tensor, draws: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    logprobs = sampling_logprobs(logits, truncation)
    cdf = (logprobs.exp() * _SCALE).to(torch.int64).cumsum(dim=-1)
    target = (draws.unsqueeze(1) * cdf[:, -1:]).to(torch.int64)  # below the total: draws are at most 1 - 2^-52
    tokens = torch.searchsorted(cdf, target, right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
