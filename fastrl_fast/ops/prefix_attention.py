"""Attention over a row in which several completions follow one prompt that is there once."""

import functools
import warnings
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops.attention_calls import Blocks, Borders, Call, Scores
from fastrl_fast.ops.row_attention import has_row_kernel, row_attention, row_pieces
from fastrl_fast.ops.varlen_attention import varlen_kernel

SHORT = 64
"""Equal pieces of at most this many tokens share a call: gathering them costs less than a call for each."""

LONG = 256
"""Pieces of at least this many tokens go in stairs: torch's kernel for the CPU computes the whole square of scores,
though half of them are masked."""

STEP = 256
"""About as many tokens has a step of a stair, which has two at least. Shorter ones leave too little in a call for two
threads: an update at 16/512 took 1.3 times as long there with 8 steps as with none, and 0.93 with 2. Longer ones make
more masked scores: with a prompt of 900 an update took 2 to 6 % longer on one thread with 2 steps than with 4."""


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The calls that make up the attention of one row: every piece on itself, then completions on their prompt.

    blocks: one call per piece, per step of a long one, or per set of short equal pieces, and one per group; varlen: the
    same in two calls with borders; pieces: the same for one call of `row_attention`; longest: tokens of the longest
    prompt with completion; longest_piece: of any piece.
    """

    blocks: list[Call]
    varlen: list[Call]
    pieces: Tensor
    longest: int
    longest_piece: int


def plan_prefixes(cu_seqlens: Tensor, prefixes: Tensor) -> PrefixPlan:
    """Plan the attention of one packed row.

    cu_seqlens [M+1] int64: borders of the pieces (whole sequences, shared prompts, completions behind them) in T;
    prefixes [K, 3] int64: for each shared prompt where it starts, where it ends and where its last completion ends.
    """
    borders, device = cu_seqlens.tolist(), cu_seqlens.device
    # A call without queries ends the process: torch's kernel for the CPU divides by their number.
    groups = [group for group in prefixes.tolist() if group[2] > group[1]]
    pieces = [(a, b) for a, b in pairwise(borders) if b > a]
    blocks = _piece_calls(pieces, device)
    blocks += [Call(slice(middle, end), slice(start, middle), causal=False) for start, middle, end in groups]
    longest_piece = max(b - a for a, b in pieces)
    rows = row_pieces(borders, groups)
    return PrefixPlan(blocks, _varlen_calls(pieces, groups, device), rows, _longest(pieces, groups), longest_piece)


def _longest(pieces: list[tuple[int, int]], groups: list[list[int]]) -> int:
    """Tokens of the longest shared prompt with one of its completions; both lists are in order of the row."""
    middles, longest = [middle for _, middle, _ in groups], 0
    for a, b in pieces:
        if (number := bisect_right(middles, a) - 1) >= 0 and b <= groups[number][2]:
            longest = max(longest, middles[number] - groups[number][0] + b - a)
    return longest


def _varlen_calls(pieces: list[tuple[int, int]], groups: list[list[int]], device: torch.device) -> list[Call]:
    """One causal call over all pieces, and one of all completions on their prompts."""
    lengths = [b - a for a, b in pieces]
    itself, longest = _offsets(lengths, device), max(lengths)
    calls = [Call(slice(None), slice(None), causal=True, borders=Borders(itself, itself, longest, longest))]
    if groups:
        behind, before = [(b, c) for _, b, c in groups], [(a, b) for a, b, _ in groups]
        counts = [[b - a for a, b in spans] for spans in (behind, before)]
        offsets = [_offsets(count, device) for count in counts]
        across = Borders(offsets[0], offsets[1], max(counts[0]), max(counts[1]))
        queries, keys = (torch.cat([torch.arange(a, b) for a, b in spans]) for spans in (behind, before))
        calls.append(Call(queries.to(device), keys.to(device), causal=False, borders=across))
    return calls


def _piece_calls(pieces: list[tuple[int, int]], device: torch.device) -> list[Call]:
    """Causal calls that cover every piece once."""
    calls, short = [], defaultdict(list)
    for start, end in pieces:
        if end - start <= SHORT:
            short[end - start].append(start)
        else:
            calls += _stair(start, end)
    for length, starts in short.items():
        rows: slice | Tensor = slice(starts[0], starts[0] + length)
        if len(starts) > 1:
            rows = (torch.tensor(starts)[:, None] + torch.arange(length)).to(device)
        calls.append(Call(rows, rows, causal=True))
    return calls


def _stair(start: int, end: int) -> list[Call]:
    """One causal call, or for a long piece the queries of each step with all keys up to them; the last step first."""
    length = end - start
    step = length if length < LONG else -(-length // (max(2, round(length / STEP)) * SHORT)) * SHORT
    stops = range(end, start, -step)
    return [Call(slice(max(start, stop - step), stop), slice(start, stop), True, stop < end) for stop in stops]


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device, torch.int32)


def prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: PrefixPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal self-attention of each sequence, prompts that several completions follow being there once.

    query [1, heads, T, D], key and value [1, kv heads, T, D] (heads a multiple of kv heads) -> [1, T, heads, D]. With A
    a completion's attention on itself and B on its prompt, of log-sum-exp a and b, its output is
    (e^a A + e^b B) / (e^a + e^b), the attention over both. The backward pass gives every part the merged output and
    log-sum-exp; a prompt's keys get the sum over its completions. float32, float64 and bfloat16.

    On CUDA in half precision two variable-length calls of FlashAttention; on the CPU in float32 one of `row_attention`
    where it has code, else torch's flash attention; elsewhere (float32 on CUDA, capped scores) matrix products that
    hold the scores of one group at a time.
    `window` (a query sees itself and window - 1 before it) must cover every prompt with its completion.
    """
    assert window is None or window >= plan.longest, "a shared prompt must lie inside the window of its completions"
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if has_row_kernel(q, v) and softcap is None and (window is None or window >= plan.longest_piece):
        return row_attention(q, k, v, plan.pieces, scale).unsqueeze(0)
    q = q.unflatten(1, (k.shape[1], -1))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # what every kernel asks for
    scores = Scores(scale=scale, window=window, softcap=softcap)
    out: Tensor = _PrefixAttention.apply(q, k, v, plan, scores)
    return out.flatten(1, 2).unsqueeze(0)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: PrefixPlan, scores: Scores) -> Tensor:
        varlen = varlen_kernel(q, scores)
        if q.is_cuda and varlen is None:
            _warn_of_products(f"{q.dtype}, heads of {q.shape[3]}{', capped scores' if scores.softcap else ''}")
        ctx.kernel = varlen or Blocks(q, scores)
        ctx.calls = plan.varlen if varlen else plan.blocks
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for call in ctx.calls:
            part, part_lse = ctx.kernel.forward(q, k, v, call)
            if not call.causal:
                part, part_lse = _merge(out[call.queries], lse[call.queries], part, part_lse)
            out[call.queries], lse[call.queries] = part, part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        for call in ctx.calls:
            parts = ctx.kernel.backward(grad, q, k, v, out, lse, call)
            seen = call.again or not call.causal
            rows = ((call.queries, not call.causal), (call.keys, seen), (call.keys, seen))
            for total, part, (where, add) in zip(grads, parts, rows, strict=True):
                if add:
                    total[where] += part
                else:
                    total[where] = part
        return *grads, None, None


@functools.cache
def _warn_of_products(what: str) -> None:
    warnings.warn(f"no FlashAttention for {what}: shared prompts go through matrix products, slowly", stacklevel=2)


def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from the attention over each."""
    lse = torch.logaddexp(a_lse, b_lse)
    share = torch.exp(b_lse - lse)[..., None]
    return torch.lerp(a.to(lse.dtype), b.to(lse.dtype), share).to(a.dtype), lse
