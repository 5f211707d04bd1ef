"""Packed attention against the textbook formula, one sequence at a time, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.ops.packed_attention import FILL, packed_attention, segments

LAYOUTS = {
    "one": [9],
    "ones": [1, 1, 1, 1],
    "equal": [6, 6, 6],
    "alike": [20, 19, 18, 17, 20],
    "very different": [1, 40, 2, 17, 1, 5],
}


def borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(total: int, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(total)
    shapes = [(1, heads, total, dim), (1, kv_heads, total, dim), (1, kv_heads, total, dim)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def textbook(q, k, v, lengths: list[int], *, scale: float, window: int | None) -> torch.Tensor:
    """softmax(scale q k^T) v for each sequence and head, with an explicit mask."""
    repeat = q.shape[1] // k.shape[1]
    outputs = []
    for qs, ks, vs in zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True):
        ks, vs = ks.repeat_interleave(repeat, 1), vs.repeat_interleave(repeat, 1)
        n = qs.shape[2]
        hidden = torch.tensor([[j > i or (window is not None and j <= i - window) for j in range(n)] for i in range(n)])
        scores = (scale * qs @ ks.mT).masked_fill(hidden, -math.inf)
        outputs.append((scores.softmax(-1) @ vs).transpose(1, 2))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_textbook_with_gradients(layout, heads, window):
    lengths = LAYOUTS[layout]
    q, k, v = inputs(sum(lengths), *heads)
    ours = packed_attention(q, k, v, segments(borders(lengths)), scale=0.4, window=window)
    truth = textbook(q, k, v, lengths, scale=0.4, window=window)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for mine, right in zip(*(torch.autograd.grad(out, (q, k, v), upstream) for out in (ours, truth)), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def test_values_may_be_smaller_than_keys():
    """As in DeepSeek's models: there is no compiled pass for them."""
    q, k, v = (x.float() for x in inputs(7, dim=32))
    ours = packed_attention(q, k, v[..., :16], segments(borders([4, 3])), scale=0.1)
    truth = textbook(q.double(), k.double(), v[..., :16].double(), [4, 3], scale=0.1, window=None)
    torch.testing.assert_close(ours.double(), truth, rtol=0, atol=1e-5)


def test_scale_defaults_to_one_over_root_of_head_size():
    q, k, v = inputs(7)
    truth = textbook(q, k, v, [4, 3], scale=8**-0.5, window=None)
    torch.testing.assert_close(packed_attention(q, k, v, segments(borders([4, 3]))), truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 8), (torch.float32, 32), (torch.bfloat16, 8)])
@pytest.mark.parametrize("layout", ["equal", "alike", "very different"])
def test_nothing_leaks_across_a_border(layout, dtype, dim):
    """K06: other sequences keep their output bit for bit, and no gradient crosses, when one sequence is full of NaN."""
    lengths = LAYOUTS[layout]
    q, k, v = (t.detach().to(dtype) for t in inputs(sum(lengths), dim=dim))
    plan = segments(borders(lengths))
    before = packed_attention(q, k, v, plan)
    for number in range(len(lengths)):
        a, b = borders(lengths)[number : number + 2].tolist()
        poisoned = [t.clone() for t in (q, k, v)]
        for tensor in poisoned:
            tensor[:, :, a:b] = math.nan
        after = packed_attention(*poisoned, plan)
        assert after[:, a:b].isnan().all()
        assert torch.equal(torch.cat([after[:, :a], after[:, b:]], 1), torch.cat([before[:, :a], before[:, b:]], 1))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_segments_visit_every_position_once(lengths):
    plan = segments(borders(lengths))
    total = sum(lengths)
    gathered = torch.cat([index.flatten() for index in plan.buckets])
    assert torch.equal(gathered[plan.restore], torch.arange(total)), "restore undoes the gathering"
    assert plan.restore.unique().numel() == total, "no two positions share an output"
    assert plan.max_length == max(lengths)
    assert plan.cu_seqlens.dtype == torch.int32 and plan.cu_seqlens.tolist() == borders(lengths).tolist()
    assert gathered.numel() <= total / FILL, "padding stays below the share that FILL allows"
    for index in plan.buckets:
        sequence = torch.bucketize(index, borders(lengths), right=True)
        assert (sequence == sequence[:, :1]).all(), "a row holds one sequence only"


def test_sequences_without_tokens_take_no_part():
    lengths = [3, 0, 2]
    q, k, v = inputs(5)
    ours = packed_attention(q, k, v, segments(borders(lengths)))
    torch.testing.assert_close(ours, textbook(q, k, v, [3, 2], scale=8**-0.5, window=None), rtol=0, atol=1e-12)
