"""Shards of the vocabulary in one process: threads stand for ranks, a barrier for the exchange."""

import math
import threading

import pytest
import torch
from numerics import assert_at_most_twice

from fastrl_fast.ops import reference
from fastrl_fast.ops.sequence_sums import sequence_sums
from fastrl_fast.ops.sharded_logprobs import Shard, merge, sharded_logprobs


class Ranks:
    """Exchanges between threads, in the order of their ranks."""

    def __init__(self, count):
        self.count, self.barrier, self.slots = count, threading.Barrier(count), [None] * count

    def gather(self, rank, x):
        self.slots[rank] = x
        self.barrier.wait(10)
        result = torch.stack(list(self.slots))
        self.barrier.wait(10)
        return result

    def run(self, work):
        results, failures = [None] * self.count, []

        def body(rank):
            try:
                torch.set_num_threads(1)
                results[rank] = work(rank)
            except BaseException as error:
                failures.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results


def run_sharded(cuts, hidden, weight, bias, targets, upstream, row_index, **settings):
    """Outputs of rank 0, after a check that all ranks agree, and the whole gradients put together."""
    ranks = Ranks(len(cuts) - 1)

    def work(rank):
        part = slice(cuts[rank], cuts[rank + 1])
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight[part], bias[part])]
        shard = Shard(cuts[rank], lambda x: ranks.gather(rank, x), lambda x: ranks.gather(rank, x).sum(0))
        outputs = sharded_logprobs(
            leaves[0], leaves[1], targets, bias=leaves[2], shard=shard, row_index=row_index, **settings
        )
        # one backward in each thread would share autograd's worker: the CPU's backward runs in the calling thread
        gradients = torch.autograd.grad(outputs, leaves, upstream)
        return [x.detach() for x in outputs], gradients

    results = ranks.run(work)
    for outputs, gradients in results[1:]:
        assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(outputs, results[0][0], strict=True))
        assert torch.equal(gradients[0].nan_to_num(7), results[0][1][0].nan_to_num(7))
    grads = [results[0][1][0], *(torch.cat([g[i] for _, g in results]) for i in (1, 2))]
    return results[0][0], grads


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "softcap": 5.0, "logit_scale": 0.5}])
@pytest.mark.parametrize("cuts", [[0, 203], [0, 100, 203], [0, 1, 90, 91, 203]], ids=str)
def test_equals_the_whole_vocabulary(cuts, settings):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator) for s in ((9, 8), (203, 8), (203,)))
    bias[1:90] = -math.inf  # a shard without any possible token
    bias[150] = -math.inf
    targets = torch.cat([torch.randint(91, 150, (28,), generator=generator), torch.tensor([0, 202])])
    row_index = torch.randint(9, (30,), generator=generator)
    upstream = torch.randn(2, 30, generator=generator).unbind()
    ours, gradients = run_sharded(cuts, hidden, weight, bias, targets, upstream, row_index, **settings)

    def whole(function, in_dtype, **options):
        leaves = [x.to(in_dtype).requires_grad_() for x in (hidden, weight, bias)]
        outputs = function(leaves[0], leaves[1], targets, row_index=row_index, bias=leaves[2], **settings, **options)
        return [x.detach() for x in outputs], torch.autograd.grad(outputs, leaves, [u.to(in_dtype) for u in upstream])

    truth = whole(reference.packed_logprobs, torch.float64)
    torchs = whole(reference.packed_logprobs, torch.float32, dtype=torch.float32)
    for x, y, t in zip([*ours, *gradients], [*torchs[0], *torchs[1]], [*truth[0], *truth[1]], strict=True):
        assert_at_most_twice(x, y, t, size=20.0)


@pytest.mark.parametrize("spread", [1.0, 50.0])
@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_large_logits_few_tokens_and_bfloat16(tokens, spread):
    """Two shards of a vocabulary of 203; bfloat16 is float32 inside, to the bit."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(s, generator=generator) for s in ((9, 8), (203, 8), (203,)))
    hidden = (hidden * spread / math.sqrt(8)).bfloat16().float()
    weight, bias = weight.bfloat16().float(), bias.bfloat16().float()
    targets, row_index = (torch.randint(n, (tokens,), generator=generator) for n in (203, 9))
    cuts, none = [0, 101, 203], [torch.zeros(tokens)] * 2
    ours, gradients = run_sharded(cuts, hidden, weight, bias, targets, none, row_index)
    truth = reference.packed_logprobs(hidden, weight, targets, row_index=row_index, bias=bias)
    torchs = reference.packed_logprobs(hidden, weight, targets, row_index=row_index, bias=bias, dtype=torch.float32)
    largest = float((hidden.double() @ weight.double().t() + bias).abs().max())
    for x, y, t in zip(ours, torchs, truth, strict=True):
        assert_at_most_twice(x, y, t, size=largest)
    assert not any(bool(x.any()) for x in gradients)
    upstream = list(torch.randn(2, tokens, generator=generator))
    low, high = (
        run_sharded(cuts, *(x.to(dtype) for x in (hidden, weight, bias)), targets, upstream, row_index)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert all(torch.equal(x, y) for x, y in zip(low[0], high[0], strict=True))
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(low[1], high[1], strict=True))


def test_merging_in_parts_changes_nothing_but_rounding():
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(6, 5, 40, generator=generator, dtype=torch.float64) * 20
    m = z.amax(-1)
    e = (z - m[..., None]).exp()
    parts = torch.stack([m, e.sum(-1), ((z - m[..., None]) * e).sum(-1), torch.full_like(m, math.nan)], dim=1)
    parts[4, 3] = z[4, :, 7]
    whole = merge(parts)
    halves = merge(torch.stack([merge(parts[:2]), merge(parts[2:])]))
    torch.testing.assert_close(whole, halves, rtol=1e-13, atol=1e-13)
    all_z = z.transpose(0, 1).reshape(5, -1)
    torch.testing.assert_close(whole[0] + whole[1].log(), all_z.logsumexp(-1), rtol=1e-13, atol=0)
    assert torch.equal(whole[3], z[4, :, 7])


def test_a_target_that_no_rank_holds_is_nan():
    hidden, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4)
    outputs, _ = run_sharded([0, 2, 4], hidden, weight, bias, torch.tensor([1, 9]), [torch.zeros(2)] * 2, None)
    assert outputs[0].isnan().tolist() == [False, True]


def test_sequence_sums():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(12, generator=generator).requires_grad_()
    old, cu = torch.randn(12, generator=generator), torch.tensor([0, 3, 3, 12])
    sums = sequence_sums(logprobs, cu, old_logprobs=old)
    new = logprobs.detach().double()
    for q, part in enumerate((slice(0, 3), slice(3, 3), slice(3, 12))):
        expected = [float(new[part].sum()), float((new - old.double())[part].sum()), part.stop - part.start]
        assert sums[q].tolist() == pytest.approx(expected, abs=1e-14)
    (gradient,) = torch.autograd.grad(sums[2, 0] + 3 * sums[2, 1], logprobs)
    assert gradient.tolist() == [0.0] * 3 + [4.0] * 9
    alone = sequence_sums(logprobs[3:], torch.tensor([0, 9]), old_logprobs=old[3:])
    assert torch.equal(alone[0], sums[2]), "bit for bit, whatever else is in the batch"
    none = sequence_sums(logprobs[:0], torch.tensor([0]))
    assert none.shape == (0, 3) and none.dtype == torch.float64
    (gradient,) = torch.autograd.grad(none.sum(), logprobs)
    assert not gradient.any()
    own = sequence_sums(logprobs, cu)
    assert not own[:, 1].any() and torch.equal(own[:, 0], sums[:, 0])
    with pytest.raises(ValueError, match="old_logprobs must be one per token"):
        sequence_sums(logprobs, cu, old_logprobs=old[:3])


def test_gradcheck_and_compile_of_sequence_sums():
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    old, cu = torch.randn(7, generator=generator, dtype=torch.float64), torch.tensor([0, 3, 3, 7])

    def sums(x):
        return sequence_sums(x, cu, old_logprobs=old)

    assert torch.autograd.gradcheck(sums, logprobs)
    compiled = torch.compile(sums, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logprobs), sums(logprobs))


def test_gradcheck_of_one_shard():
    generator = torch.Generator().manual_seed(2)
    leaves = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
              for shape in ((3, 4), (11, 4), (11,))]  # fmt: skip
    targets, alone = torch.tensor([0, 10, 4]), Shard(0, lambda x: x[None], lambda x: x)

    def run(hidden, weight, bias):
        return sharded_logprobs(hidden, weight, targets, bias=bias, shard=alone, temperature=0.7)

    assert torch.autograd.gradcheck(run, leaves)
