"""What only a CUDA device can show: every operator there, against float64, the CPU's bits and itself."""

import math

import pytest
import torch
from numerics import assert_at_most_twice

from fastrl_fast.ops import (
    CHOICES,
    PRESETS,
    RULES,
    choose_rollouts,
    fused_policy_loss,
    gradient_sketch,
    group_advantage,
    packed_logprobs,
    policy_loss,
    reference,
    select_diverse,
)
from fastrl_fast.ops.loss_settings import CLIP_KINDS, RATIO_KINDS
from fastrl_fast.ops.prefix_attention import plan_prefixes, prefix_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(*tensors):
    return [x.cuda() for x in tensors]


def head_case(t, h, v, dtype):
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(t, h, generator=make).to(dtype)
    weight = (torch.randn(v, h, generator=make) / math.sqrt(h)).to(dtype)
    return hidden, weight, torch.randint(v, (t,), generator=make), torch.randn(2, t, generator=make)


def value_and_gradients(function, hidden, weight, targets, upstream, settings):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    outputs = function(*leaves, targets, **settings)
    upstream = [u.to(outputs[0].dtype) for u in upstream]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.3, "softcap": 5.0, "logit_scale": 0.5}], ids=["", "softcap"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 8, 9), (130, 64, 4099), (9000, 128, 33000)], ids=str)
def test_packed_logprobs_against_float64(size, dtype, settings):
    hidden, weight, targets, upstream = on_gpu(*head_case(*size, dtype))
    ours = value_and_gradients(packed_logprobs, hidden, weight, targets, upstream, settings)
    exact = (hidden.double(), weight.double())
    truth = value_and_gradients(reference.packed_logprobs, *exact, targets, upstream, settings)
    low = settings | {"dtype": torch.float32}
    torchs = value_and_gradients(reference.packed_logprobs, *(x.float() for x in exact), targets, upstream, low)
    if dtype == torch.bfloat16:
        low = settings | {"dtype": torch.bfloat16}
        torchs[2:] = value_and_gradients(reference.packed_logprobs, hidden, weight, targets, upstream, low)[2:]
    for x, y, t in zip(ours, torchs, truth, strict=True):
        assert_at_most_twice(x, y, t)


def test_packed_logprobs_repeats_itself_bit_for_bit():
    case = on_gpu(*head_case(3000, 128, 20001, torch.bfloat16))
    first, second = (value_and_gradients(packed_logprobs, *case, {}) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_group_advantage_has_the_bits_of_the_cpu(preset):
    make = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 100, (3000,), generator=make)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    rewards = torch.rand(int(cu[-1]), generator=make, dtype=torch.float64)
    rewards[::7] = math.nan
    for x, y in zip(
        group_advantage(rewards, cu, preset=preset), group_advantage(*on_gpu(rewards, cu), preset=preset), strict=True
    ):
        assert torch.equal(x, y.cpu())


@pytest.mark.parametrize("ratio", RATIO_KINDS)
@pytest.mark.parametrize("clip", CLIP_KINDS)
def test_policy_loss_is_that_of_the_cpu(ratio, clip):
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 900, (64,), generator=make)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    logprobs, old, ref = (-torch.rand(int(cu[-1]), generator=make, dtype=torch.float64) for _ in range(3))
    case = (logprobs, torch.randn(64, generator=make), torch.rand(64, generator=make), cu)
    settings = {"ratio": ratio, "clip": clip, "kl_coef": 0.1}
    here, stats = policy_loss(*case, old_logprobs=old, ref_logprobs=ref, **settings)
    there, stats_there = policy_loss(*on_gpu(*case), old_logprobs=old.cuda(), ref_logprobs=ref.cuda(), **settings)
    for x, y in zip((here, *stats), (there, *stats_there), strict=True):
        torch.testing.assert_close(y.cpu(), x, rtol=1e-12, atol=0)


def test_gradient_sketch_has_the_bits_of_the_cpu():
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 2000, (300,), generator=make)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.randint(0, 150_000, (int(cu_seqlens[-1]),), generator=make)
    case = (tokens, torch.rand(tokens.shape, generator=make).log(), cu_seqlens)
    assert torch.equal(gradient_sketch(*case), gradient_sketch(*on_gpu(*case)).cpu())


@pytest.mark.parametrize("rule", CHOICES)
def test_choose_rollouts_has_the_bits_of_the_cpu(rule):
    make = torch.Generator().manual_seed(0)
    vectors = torch.randn(1024, 200, generator=make) + torch.randn(200, generator=make)
    advantages = torch.randn(1024, generator=make)
    vectors[17, 3], advantages[40] = math.nan, math.inf
    case = (vectors, advantages, torch.tensor([0, 64, 64, 72, 300, 301, 1024]))
    for k in (4, 40):
        here, there = choose_rollouts(*case, rule=rule, k=k), choose_rollouts(*on_gpu(*case), rule=rule, k=k)
        assert all(torch.equal(x, y.cpu()) for x, y in zip(here, there, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_policy_loss_is_the_unfused(dtype):
    hidden, weight, targets, _ = on_gpu(*head_case(3000, 128, 20001, dtype))
    cu, advantages = torch.arange(0, 3001, 100).cuda(), torch.linspace(-1, 1, 30).cuda()
    weights = torch.full((30,), 1 / 3000).cuda()

    def unfused(hidden, weight):
        return policy_loss(packed_logprobs(hidden, weight, targets)[0], advantages, weights, cu)[0]

    def fused(hidden, weight):
        return fused_policy_loss(hidden, weight, targets, advantages, weights, cu)[0]

    results = []
    for function in (fused, unfused):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        loss = function(*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_selection_is_that_of_the_cpu(rule):
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 1200, (1024,), generator=make)
    tokens = (torch.rand(int(lengths.sum()), generator=make).pow(4) * 5000).long()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    case = (tokens, cu_seqlens, torch.arange(0, 1025, 16), torch.randint(-1, 2, (1024,), generator=make))
    for tau, ngram in ((0.8, 1), (0.7, 1), (0.9, 2), (0.99, 4)):
        here = select_diverse(*case, rule=rule, tau=tau, ngram=ngram)
        there = select_diverse(*on_gpu(*case), rule=rule, tau=tau, ngram=ngram)
        assert all(torch.equal(x, y.cpu()) for x, y in zip(here, there, strict=True))


def test_another_stream_than_the_default_is_honoured():
    rewards, cu = on_gpu(torch.rand(1 << 20), torch.arange(0, (1 << 20) + 1, 16))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # were the kernel on another stream, it would not wait for what follows
        doubled = rewards * 2
        ours, _ = group_advantage(doubled, cu)
    stream.synchronize()
    assert torch.equal(ours, group_advantage(rewards * 2, cu)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
def test_prefix_attention_against_float64(heads, dtype):
    """Two groups and a whole sequence; at most twice the error of torch's own attention on each whole sequence."""
    cu_seqlens = torch.tensor([0, 300, 365, 500, 777, 900, 901, 1030])
    prefixes = torch.tensor([[0, 300, 500], [777, 900, 1030]])
    spans = [[(0, 300), (300, 365)], [(0, 300), (365, 500)], [(500, 777)], [(777, 900), (900, 901)]]
    rows = [torch.cat([torch.arange(*span) for span in s]).cuda() for s in [*spans, [(777, 900), (901, 1030)]]]
    make = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, n, 1030, 64, generator=make) for n in (heads[0], heads[1], heads[1])]
    upstream = torch.randn(1, 1030, heads[0], 64, generator=make).cuda()

    def whole(q, k, v):
        out = torch.zeros_like(q)
        for row in rows:
            parts = (x[:, :, row] for x in (q, k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            out = out.index_copy(2, row, attended)
        return out.transpose(1, 2)

    def run(function, to):
        leaves = [x.cuda().to(dtype).to(to).requires_grad_() for x in drawn]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(to))]

    plan = plan_prefixes(*on_gpu(cu_seqlens, prefixes))
    ours = run(lambda q, k, v: prefix_attention(q, k, v, plan), dtype)
    for x, y, t in zip(ours, run(whole, dtype), run(whole, torch.float64), strict=True):
        assert_at_most_twice(x, y, t)
    again = run(lambda q, k, v: prefix_attention(q, k, v, plan), dtype)
    assert all(torch.equal(x, y) for x, y in zip(ours[:1], again[:1], strict=True))
