"""Attention behind shared prompts against the textbook formula on whole sequences, in float64."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_at_most_twice
from torch import Tensor

from fastrl_fast.ops.attention_calls import Blocks, Call, Scores
from fastrl_fast.ops.prefix_attention import LONG, SHORT, STEP, PrefixPlan, plan_prefixes, prefix_attention
from fastrl_fast.ops.varlen_attention import Flash2, Flash3, TorchFlash

LAYOUTS = {
    "one group": [(5, [3, 1, 4])],
    "groups and whole sequences": [(5, [3, 1, 4]), (7, None), (1, [2, 2]), (2, None), (9, [1, 1])],
    "equal short pieces": [(3, [3, 3, 3]), (3, [3, 3])],
    "longer than short": [(SHORT + 9, [SHORT + 1, 2, SHORT + 1, SHORT]), (4, [SHORT * 2, 1])],
    "a completion without tokens": [(4, [0, 3]), (2, [1, 0])],
    "in stairs": [(LONG, [LONG + 1, 5]), (2 * LONG + 3, None), (3, [LONG - 1, 1])],
    "in three steps": [(3 * STEP - 50, [9, 4])],
    "no completion with tokens": [(4, [0, 0]), (2, [1, 3]), (3, [0, 0])],
}
"""Of each item the prompt's length and its completions'; None is a whole sequence that shares nothing."""

DTYPES = [(torch.float32, 8), (torch.float32, 16), (torch.float32, 32), (torch.bfloat16, 8)]
"""With sizes of heads: float32 ones of 16 and 32 go through row_attention, where it has code."""


def laid_out(layout) -> tuple[Tensor, Tensor, list[Tensor]]:
    """cu_seqlens, prefixes and for every whole sequence its rows, worked out token by token."""
    borders, prefixes, sequences, at = [0], [], [], 0
    for prompt, completions in layout:
        start, at = at, at + prompt
        borders.append(at)
        rows = torch.arange(start, at)
        if completions is None:
            sequences.append(rows)
            continue
        middle = at
        for length in completions:
            sequences.append(torch.cat([rows, torch.arange(at, at + length)]))
            at += length
            borders.append(at)
        prefixes.append((start, middle, at))
    return torch.tensor(borders), torch.tensor(prefixes).view(-1, 3), sequences


def inputs(total: int, heads: int, kv_heads: int, dim: int, dtype=torch.float64) -> list[Tensor]:
    make = torch.Generator().manual_seed(total)
    shapes = [(1, total, heads, dim), (1, total, kv_heads, dim), (1, total, kv_heads, dim)]
    drawn = [torch.randn(shape, generator=make, dtype=torch.float64) * 2 for shape in shapes]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in drawn]


def textbook(q, k, v, sequences: list[Tensor], *, scale: float, window=None, softcap=None) -> Tensor:
    """softmax(softcap(scale q k^T)) v over every whole sequence; a row that several have is the same in all."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    out = torch.zeros_like(q)
    for rows in sequences:
        scores = scale * q[:, :, rows] @ k[:, :, rows].mT
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        age = torch.arange(len(rows))[:, None] - torch.arange(len(rows))[None]
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        out = out.index_copy(2, rows, scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, :, rows])
    return out.transpose(1, 2)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def assert_exact(layout, heads=(4, 2), **settings) -> None:
    borders, prefixes, sequences = laid_out(layout)
    leaves = inputs(int(borders[-1]), *heads, 8)
    ours = prefix_attention(*leaves, plan_prefixes(borders, prefixes), scale=0.4, **settings)
    truth = textbook(*leaves, sequences, scale=0.4, **settings)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)
    for mine, right in zip(gradients(ours, leaves), gradients(truth, leaves), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_whole_sequences_with_gradients(layout, heads, softcap):
    assert_exact(LAYOUTS[layout], heads, softcap=softcap)


items = st.tuples(st.integers(1, 12), st.one_of(st.none(), st.lists(st.integers(1, 12), min_size=1, max_size=5)))


@given(st.lists(items, min_size=1, max_size=5).filter(lambda layout: any(completions for _, completions in layout)))
@settings(max_examples=50, deadline=None)
def test_any_layout_equals_whole_sequences(layout):
    """Groups of one are laid down as whole sequences by `pack`, and hold here all the same."""
    assert_exact(layout)


def test_a_window_cuts_whole_sequences_and_must_cover_shared_ones():
    layout = [(3, [4, 2]), (20, None), (2, None)]
    assert_exact(layout, window=7)
    assert_exact([(3, [4, 2]), (LONG + 9, None), (2 * LONG, None)], window=LONG - 3)
    with pytest.raises(AssertionError, match="inside the window"):
        assert_exact(layout, window=6)


def test_scale_defaults_to_one_over_root_of_head_size():
    borders, prefixes, sequences = laid_out(LAYOUTS["one group"])
    leaves = inputs(int(borders[-1]), 4, 2, 8)
    ours = prefix_attention(*leaves, plan_prefixes(borders, prefixes))
    torch.testing.assert_close(ours, textbook(*leaves, sequences, scale=8**-0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "dim"), DTYPES)
@pytest.mark.parametrize("layout", ["groups and whole sequences", "longer than short", "in stairs"])
def test_rounds_as_torch_does(layout, dtype, dim):
    """Against float64, at most twice the error of torch's own attention on every whole sequence by itself."""
    borders, prefixes, sequences = laid_out(LAYOUTS[layout])
    leaves = inputs(int(borders[-1]), 4, 2, dim, dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    plain = leaves[0].new_zeros(leaves[0].shape)
    for rows in sequences:
        alone = torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, rows] for x in leaves), is_causal=True, scale=0.4, enable_gqa=True
        )
        plain = plain.index_copy(2, rows, alone)
    plain = plain.transpose(1, 2)
    ours = prefix_attention(*leaves, plan_prefixes(borders, prefixes), scale=0.4)
    truth = textbook(*exact, sequences, scale=0.4)
    # A share is e to the difference of two log-sum-exps, which round by their size.
    largest = max(1.0, 0.4 * float(exact[0].detach().norm(dim=-1).max() * exact[1].detach().norm(dim=-1).max()))
    pairs_of = ((ours, leaves), (plain, leaves), (truth, exact))
    results = ([out.detach(), *gradients(out, inputs)] for out, inputs in pairs_of)
    for mine, torchs, right in zip(*results, strict=True):
        assert_at_most_twice(mine, torchs, right, size=float(right.abs().max()) * largest)


@pytest.mark.parametrize(("dtype", "dim"), DTYPES)
def test_nothing_leaks(dtype, dim):
    """Poison in one completion stays there; poison in a prompt reaches its own completions and nothing else."""
    borders, prefixes, _ = laid_out(LAYOUTS["groups and whole sequences"])
    plan, total = plan_prefixes(borders, prefixes), int(borders[-1])
    clean = [x.detach() for x in inputs(total, 4, 2, dim, dtype)]
    before = prefix_attention(*clean, plan)
    groups = {start: (middle, end) for start, middle, end in prefixes.tolist()}
    for a, b in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        poisoned = [x.clone() for x in clean]
        for x in poisoned:
            x[:, :, a:b] = torch.nan
        after = prefix_attention(*poisoned, plan)
        reached = torch.zeros(total, dtype=torch.bool)
        reached[a : groups[a][1] if a in groups else b] = True
        assert after[:, reached].isnan().all()
        assert torch.equal(after[:, ~reached], before[:, ~reached])


@given(st.lists(items, min_size=1, max_size=5).filter(lambda layout: any(completions for _, completions in layout)))
@settings(max_examples=50, deadline=None)
def test_both_plans_ask_the_same_rows(layout):
    """Each plan's calls, spelled out as pairs of query and key, are what causality over whole sequences allows."""
    borders, prefixes, sequences = laid_out(layout)
    plan = plan_prefixes(borders, prefixes)
    allowed = {(int(q), int(k)) for rows in sequences for i, q in enumerate(rows) for k in rows[: i + 1]}
    for calls in (plan.blocks, plan.varlen):
        asked = [pair for call in calls for pair in pairs(call, int(borders[-1]))]
        assert len(asked) == len(set(asked)) and set(asked) == allowed
    assert plan.longest == max(prompt + max(completions) for prompt, completions in layout if completions)


def pairs(call, total: int) -> list[tuple[int, int]]:
    queries, keys = (torch.arange(total)[rows] for rows in (call.queries, call.keys))
    if call.borders is None:
        blocks = list(zip(queries.view(-1, queries.shape[-1]), keys.view(-1, keys.shape[-1]), strict=True))
    else:
        sizes = [x.diff().tolist() for x in (call.borders.queries, call.borders.keys)]
        assert (call.borders.longest_query, call.borders.longest_key) == tuple(map(max, sizes))
        assert all(x.dtype == torch.int32 for x in (call.borders.queries, call.borders.keys))
        blocks = list(zip(queries.split(sizes[0]), keys.split(sizes[1]), strict=True))
    return [
        (int(q), int(k)) for qs, ks in blocks for i, q in enumerate(qs) for k in (ks[: i + 1] if call.causal else ks)
    ]


def varlen_by_blocks(q, k, v, cu_q, cu_k, *, backward=None, causal, scale, softcap):
    """What a variable-length kernel computes, with the matrix products tested above."""
    q, *backward = (x.unflatten(1, (k.shape[1], -1)) for x in (q, *(backward or ())))
    blocks = Blocks(q, Scores(scale=scale, softcap=softcap or None))
    blocks.products = True
    results = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        call = Call(slice(0, b - a), slice(0, d - c), causal)
        parts = q[a:b], k[c:d], v[c:d]
        if not backward:
            results.append([x.flatten(1, 2) for x in blocks.forward(*parts, call)])
        else:
            grad, out, lse = backward
            gq, gk, gv = blocks.backward(grad[a:b], *parts, out[a:b], lse[a:b], call)
            results.append([gq.flatten(1, 2), gk, gv])
    return [torch.cat(x) for x in zip(*results, strict=True)]


def stand_in(q, k, v, cu_q, cu_k, *, causal, scale, softcap=0.0, backward=None):
    """The forward pass of a variable-length kernel, with its layout of the log-sum-exp, or its gradients."""
    rows = dict(causal=causal, scale=scale, softcap=softcap)
    if backward is None:
        out, lse = varlen_by_blocks(q, k, v, cu_q, cu_k, **rows)
        return out, lse.t().contiguous()
    grad, out, lse = backward
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    return varlen_by_blocks(q, k, v, cu_q, cu_k, backward=(grad, out, lse.t()), **rows)


def fill(totals, parts) -> None:
    for total, part in zip(totals, parts, strict=True):
        total.copy_(part)


def pretend_flash_2() -> ModuleType:
    """Signatures of flash-attn 2.7 and 2.8 (flash_attn/flash_attn_interface.py)."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        assert dropout_p == 0 and (window_size_left, window_size_right) == (-1, -1)
        rows = dict(causal=causal, scale=softmax_scale, softcap=softcap)
        return *stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, **rows), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        assert dropout_p == 0 and alibi_slopes is None and deterministic is True
        assert (window_size_left, window_size_right) == (-1, -1)
        rows = dict(causal=causal, scale=softmax_scale, softcap=softcap, backward=(dout, out, softmax_lse))
        fill((dq, dk, dv), stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, **rows))

    module = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return module


def pretend_flash_3() -> ModuleType:
    """Signatures of flash-attn 3 (hopper/flash_attn_interface.py), those of its arguments that are not always none."""

    def _flash_attn_forward(
        q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    ):  # fmt: skip
        assert (window_size_left, window_size_right) == (-1, -1)
        rows = dict(causal=causal, scale=softmax_scale, softcap=softcap)
        return *stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, **rows), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert deterministic is True and (window_size_left, window_size_right) == (-1, -1)
        rows = dict(causal=is_causal, scale=softmax_scale, softcap=softcap, backward=(dout, out, softmax_lse))
        fill((dq, dk, dv), stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, **rows))

    module = ModuleType("flash_attn_interface")
    module._flash_attn_forward = _flash_attn_forward
    module._flash_attn_backward = _flash_attn_backward
    return module


def pretend_torch(monkeypatch) -> None:
    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        return *stand_in(q, k, v, cu_q, cu_k, causal=causal, scale=scale), "seed", "offset", torch.empty(0)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, *, scale):
        assert (seed, offset) == ("seed", "offset")
        return stand_in(q, k, v, cu_q, cu_k, causal=causal, scale=scale, backward=(grad, out, lse))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)


@pytest.mark.parametrize("kernel", [Flash2, Flash3, TorchFlash])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_way_to_variable_length_kernels_equals_whole_sequences(monkeypatch, layout, kernel):
    """Borders, arguments, layouts of the log-sum-exp and sums of gradients, with stand-ins for the kernels."""
    package = ModuleType("flash_attn")
    package.flash_attn_interface = pretend_flash_2()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", pretend_flash_3())
    pretend_torch(monkeypatch)
    monkeypatch.setattr("fastrl_fast.ops.prefix_attention.varlen_kernel", lambda q, scores: kernel(scores))
    assert_exact(LAYOUTS[layout])
    if kernel is Flash2:
        assert_exact(LAYOUTS[layout], softcap=1.5)


def test_a_plan_of_one_call_per_piece_and_group():
    """Short pieces of equal length go together; long ones are views and cost no copy."""
    plan = plan_prefixes(*laid_out([(SHORT + 5, [7, 7, SHORT + 2]), (7, [9, 1])])[:2])
    assert isinstance(plan, PrefixPlan) and plan.longest == 2 * SHORT + 7
    kinds = [(call.causal, isinstance(call.queries, slice)) for call in plan.blocks]
    assert sorted(kinds) == sorted([(True, True)] * 2 + [(True, False)] + [(True, True)] * 2 + [(False, True)] * 2)
