import math
from dataclasses import dataclass

import pytest
import torch
from numerics import assert_at_most_twice, error, run_with_scalar_code
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl_fast.ops import logit_slabs, packed_logprobs, reference

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"temperature": 1.3, "softcap": 5.0, "logit_scale": 0.5},
}


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    row_index: Tensor

    def tensors(self, dtype=None):
        """Fresh leaves of hidden, weight and bias."""
        return [x.to(dtype or x.dtype).clone().requires_grad_() for x in (self.hidden, self.weight, self.bias)]


def case(rows, h, v, n, *, dtype=torch.float32, spread=1.0, seed=0):
    """Logits of standard deviation about `spread`."""
    make = torch.Generator().manual_seed(seed)
    return Case(
        (torch.randn(rows, h, generator=make) * spread / math.sqrt(h)).to(dtype),
        torch.randn(v, h, generator=make).to(dtype),
        torch.randn(v, generator=make).to(dtype),
        torch.randint(v, (n,), generator=make),
        torch.randint(rows, (n,), generator=make),
    )


def largest_logit(c, *, temperature=1.0, **_):
    """What a logprob is a difference of: no float32 method can know it better than to this number's rounding."""
    logits = c.hidden.double() @ c.weight.double().t() + c.bias.double()
    return float(logits.masked_fill(logits.isinf(), 0).abs().max()) / temperature


def largest_products(c, upstream, **settings):
    """What the gradients of hidden, weight and bias are sums of: upstream * p * (weight, hidden or 1).

    p = e^z, so an error of z is a relative error of p.
    """
    p_error = max(1.0, largest_logit(c, **settings)) * max(float(u.abs().max()) for u in upstream)
    return [p_error * float(x.abs().max()) for x in (c.weight, c.hidden, torch.ones(1))]


SIZES = [(1, 1, 1, 1), (1, 3, 2, 1), (3, 16, 7, 5), (37, 24, 1003, 50), (130, 33, 4099, 130)]


@pytest.fixture
def small_slabs(monkeypatch):
    """Walk even a small vocabulary in many slabs and row blocks."""
    monkeypatch.setitem(logit_slabs.LIMITS, "cpu", logit_slabs.SlabLimits(elements=16 * 27, rows=16, columns=100))


@pytest.mark.parametrize("spread", [1.0, 50.0])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_against_float64_truth(size, settings, spread):
    c = case(*size, spread=spread)
    options = {"row_index": c.row_index, "bias": c.bias, **settings}
    truth = reference.packed_logprobs(c.hidden, c.weight, c.targets, **options)
    torchs = reference.packed_logprobs(c.hidden, c.weight, c.targets, dtype=torch.float32, **options)
    ours = packed_logprobs(c.hidden, c.weight, c.targets, **options)
    assert ours[0].dtype == ours[1].dtype == torch.float32
    for x, y, t in zip(ours, torchs, truth, strict=True):
        assert_at_most_twice(x, y, t, size=largest_logit(c, **settings))


def gradients(function, c, dtype, options, upstream):
    hidden, weight, bias = c.tensors(dtype)
    outputs = function(hidden, weight, c.targets, row_index=c.row_index, bias=bias, **options)
    return torch.autograd.grad(outputs, (hidden, weight, bias), [u.to(outputs[0].dtype) for u in upstream])


@pytest.mark.parametrize("spread", [1.0, 50.0])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_against_float64_truth(size, settings, spread):
    c = case(*size, spread=spread)
    upstream = torch.randn(2, size[3], generator=torch.Generator().manual_seed(1)).unbind()
    truth = gradients(reference.packed_logprobs, c, torch.float64, settings, upstream)
    torchs = gradients(reference.packed_logprobs, c, torch.float32, {"dtype": torch.float32, **settings}, upstream)
    ours = gradients(packed_logprobs, c, torch.float32, settings, upstream)
    for x, y, t, size in zip(ours, torchs, truth, largest_products(c, upstream, **settings), strict=True):
        assert_at_most_twice(x, y, t, size=size)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_slabs_and_blocks_change_nothing_but_rounding(settings, small_slabs):
    test_values_against_float64_truth((37, 24, 1003, 50), settings, 1.0)
    test_gradients_against_float64_truth((37, 24, 1003, 50), settings, 1.0)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_plain_torch_slabs_that_float64_uses(settings, small_slabs, monkeypatch):
    monkeypatch.setattr(logit_slabs, "_has_kernel", lambda logits: False)
    for spread in (1.0, 50.0):
        test_values_against_float64_truth((37, 24, 1003, 50), settings, spread)
        test_gradients_against_float64_truth((37, 24, 1003, 50), settings, spread)
    test_forbidden_tokens_have_no_probability(None)
    test_a_broken_logit_is_seen()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_float32_inside(dtype):
    c = case(37, 24, 1003, 50, dtype=dtype)
    exact = Case(c.hidden.float(), c.weight.float(), c.bias.float(), c.targets, c.row_index)
    upstream = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).unbind()
    ours = packed_logprobs(c.hidden, c.weight, c.targets, row_index=c.row_index, bias=c.bias)
    same = packed_logprobs(exact.hidden, exact.weight, exact.targets, row_index=c.row_index, bias=exact.bias)
    assert torch.equal(ours[0], same[0]) and torch.equal(ours[1], same[1])
    low, high = (gradients(packed_logprobs, x, None, {}, upstream) for x in (c, exact))
    for x, y in zip(low, high, strict=True):
        assert x.dtype == dtype and torch.equal(x, y.to(dtype))


def test_bfloat16_loses_less_than_a_hundredth_of_what_pytorch_loses():
    c = case(37, 24, 1003, 50, dtype=torch.bfloat16)
    options = {"row_index": c.row_index, "bias": c.bias}
    ours = packed_logprobs(c.hidden, c.weight, c.targets, **options)
    truth = reference.packed_logprobs(c.hidden, c.weight, c.targets, **options)
    torchs = reference.packed_logprobs(c.hidden, c.weight, c.targets, dtype=torch.bfloat16, **options)
    for x, y, t in zip(ours, torchs, truth, strict=True):
        assert error(x, t) <= error(y, t) / 100


def test_float64_gradcheck(small_slabs):
    c = case(5, 4, 31, 7)
    for settings in SETTINGS.values():

        def run(hidden, weight, bias, settings=settings):
            return packed_logprobs(hidden, weight, c.targets, row_index=c.row_index, bias=bias, **settings)

        assert torch.autograd.gradcheck(run, c.tensors(torch.float64))


def test_row_index_is_a_gather():
    c = case(9, 8, 101, 40)
    gathered = packed_logprobs(c.hidden[c.row_index], c.weight, c.targets)
    indexed = packed_logprobs(c.hidden, c.weight, c.targets, row_index=c.row_index)
    assert torch.equal(gathered[0], indexed[0]) and torch.equal(gathered[1], indexed[1])


def test_forbidden_tokens_have_no_probability(small_slabs):
    c = case(37, 24, 203, 37)
    c.bias[:120] = -math.inf  # whole slabs of nothing come first
    c.targets = c.targets % 83 + 120
    c.row_index = torch.arange(37)
    upstream = torch.ones(2, 37).unbind()
    truth = reference.packed_logprobs(c.hidden, c.weight, c.targets, bias=c.bias)
    torchs = reference.packed_logprobs(c.hidden, c.weight, c.targets, bias=c.bias, dtype=torch.float32)
    for x, y, t in zip(packed_logprobs(c.hidden, c.weight, c.targets, bias=c.bias), torchs, truth, strict=True):
        assert_at_most_twice(x, y, t, size=largest_logit(c))
    truth = gradients(reference.packed_logprobs, c, torch.float64, {}, upstream)
    torchs = gradients(reference.packed_logprobs, c, torch.float32, {"dtype": torch.float32}, upstream)
    ours = gradients(packed_logprobs, c, torch.float32, {}, upstream)
    for x, y, t, size in zip(ours, torchs, truth, largest_products(c, upstream), strict=True):
        assert_at_most_twice(x, y, t, size=size)
    assert bool((ours[1][:120] == 0).all())
    c.targets[0] = 5
    assert packed_logprobs(c.hidden, c.weight, c.targets, bias=c.bias)[0][0] == -math.inf


def test_a_broken_logit_is_seen():
    c = case(3, 4, 50, 3)
    c.hidden[1, 2] = math.nan
    logprobs, entropy = packed_logprobs(c.hidden, c.weight, c.targets)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_a_logprob_is_never_positive_nor_an_entropy_negative(spread):
    c = case(500, 8, 9, 500, spread=spread)
    best = (c.hidden @ c.weight.t()).argmax(1)
    logprobs, entropy = packed_logprobs(c.hidden, c.weight, best)
    assert float(logprobs.max()) <= 0 and float(entropy.min()) >= 0
    assert float(logprobs.min()) >= -math.log(9) - 1e-6  # the likeliest of nine
    one = packed_logprobs(c.hidden, c.weight[:1], torch.zeros(500, dtype=torch.int64))
    assert bool((one[0] == 0).all()) and bool((one[1] == 0).all())


def test_no_targets():
    c = case(4, 8, 20, 0)
    hidden, weight, bias = c.tensors()
    logprobs, entropy = packed_logprobs(hidden, weight, c.targets, row_index=c.row_index, bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(bool((x.grad == 0).all()) for x in (hidden, weight, bias))


def test_targets_without_upstream_gradient_are_not_multiplied(monkeypatch):
    c = case(37, 24, 203, 50)
    upstream = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    upstream[:, torch.arange(50) % 5 > 0] = 0
    seen = []
    backward = logit_slabs.backward
    monkeypatch.setattr(logit_slabs, "backward", lambda hidden, *a: (seen.append(len(hidden)), backward(hidden, *a))[1])
    ours = gradients(packed_logprobs, c, None, {}, upstream.unbind())
    assert seen == [10]
    kept = slice(None, None, 5)
    fewer = Case(c.hidden, c.weight, c.bias, c.targets[kept], c.row_index[kept])
    truth = gradients(reference.packed_logprobs, c, torch.float64, {}, upstream.unbind())
    fewer_ours = gradients(packed_logprobs, fewer, None, {}, upstream[:, kept].unbind())
    for x, y, t, size in zip(ours, fewer_ours, truth, largest_products(c, upstream), strict=True):
        assert_at_most_twice(x, y, t, size=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ignored", [[], [0, 3, 49], range(50)], ids=["none", "some", "all"])
def test_ignored_targets_cost_nothing_and_give_nothing(ignored, dtype):
    c = case(37, 24, 203, 50)
    kept = torch.tensor([i not in ignored for i in range(50)])
    upstream = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).unbind()
    fewer = Case(c.hidden, c.weight, c.bias, c.targets[kept], c.row_index[kept])
    c.targets[~kept] = -100
    results = []
    for x, u in ((c, upstream), (fewer, [v[kept] for v in upstream])):
        tensors = x.tensors(dtype)
        options = {"row_index": x.row_index, "bias": tensors[2], "ignore_index": -100}
        outputs = packed_logprobs(*tensors[:2], x.targets, **options)
        gradients = torch.autograd.grad(outputs, tensors, [v.to(dtype) for v in u])
        results.append(([y.detach() for y in outputs], gradients))
    (outputs, gradients), (expected, expected_gradients) = results
    for x, y in zip(outputs, expected, strict=True):
        assert torch.equal(x[kept], y) and bool((x[~kept] == 0).all())
    for x, y in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(x, y)


def test_without_entropy():
    c = case(9, 8, 101, 9)
    hidden, weight, _ = c.tensors()
    logprobs, entropy = packed_logprobs(hidden, weight, c.targets, entropy=False)
    both = packed_logprobs(hidden, weight, c.targets)
    assert entropy.shape == (0,) and torch.equal(logprobs, both[0])
    for x, y in zip(*(torch.autograd.grad(z.sum(), (hidden, weight)) for z in (logprobs, both[0])), strict=True):
        assert torch.equal(x, y)


def test_a_frozen_head_gets_no_gradient():
    c = case(9, 8, 101, 9)
    hidden = c.hidden.requires_grad_()
    both = torch.autograd.grad(packed_logprobs(hidden, c.weight, c.targets)[0].sum(), hidden)
    _, weight, _ = c.tensors()
    logprobs = packed_logprobs(hidden.detach(), weight, c.targets)[0]
    logprobs.sum().backward()
    truth = reference.packed_logprobs(hidden, c.weight, c.targets)[0].sum()
    assert_at_most_twice(both[0], both[0], torch.autograd.grad(truth, hidden)[0])
    assert weight.grad is not None and c.weight.grad is None


def test_strided_inputs_and_autocast():
    c = case(9, 8, 101, 9)
    strided = packed_logprobs(c.hidden.t().contiguous().t(), c.weight.t().contiguous().t(), c.targets)
    plain = packed_logprobs(c.hidden, c.weight, c.targets)
    assert torch.allclose(strided[0], plain[0], rtol=0, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = packed_logprobs(c.hidden, c.weight, c.targets)
    assert torch.equal(inside[0], plain[0])


class Largest(TorchDispatchMode):
    """Remember the largest storage any operation made, beside those it was given."""

    def __init__(self, *given):
        super().__init__()
        self.given, self.bytes = {x.untyped_storage().data_ptr() for x in given}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def test_memory_does_not_grow_with_the_vocabulary(small_slabs):
    largest = []
    for v in (1000, 4000):
        c = case(64, 24, v, 64)
        head = logit_slabs.Head(
            weight=c.weight, bias=c.bias, temperature=1, softcap=None, logit_scale=1, dtype=torch.float32
        )
        with Largest(c.hidden, c.weight, c.bias, c.targets) as mode:
            logit_slabs.forward(c.hidden, c.targets, head)
        largest.append(mode.bytes)
    assert largest == [16 * 27 * 4] * 2, "something beside the slab"


def threads_agree(run):
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 5, 11, 31, 63, 130, 303])
def test_products_of_any_size_have_the_same_bits_for_any_number_of_threads(rows):
    """In plain torch 3 or 5 rows have others, and so have 24 columns."""
    make = torch.Generator().manual_seed(rows)
    for inner, columns in ((8, 5), (33, 24), (64, 19), (40, 40), (90, 777), (300, 64)):
        a, b = torch.randn(rows, inner, generator=make), torch.randn(inner, columns, generator=make)
        total, before, results = torch.randn(rows, columns, generator=make), torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                made, added = torch.empty(rows, columns), total.clone()
                logit_slabs.multiply(a, b, made)
                logit_slabs.add_product(added, a, b)
                results.append(torch.stack([made, added]))
        finally:
            torch.set_num_threads(before)
        torch.testing.assert_close(results[0], torch.stack([a @ b, total + a @ b]))
        assert all(torch.equal(results[0], other) for other in results[1:]), (inner, columns)


def test_thread_count_changes_no_bit():
    c = case(300, 32, 2003, 300)  # 600 000 logits: above the size from which the kernels use threads
    upstream = torch.randn(2, 300, generator=torch.Generator().manual_seed(1)).unbind()
    assert threads_agree(lambda: packed_logprobs(c.hidden, c.weight, c.targets))
    assert threads_agree(lambda: gradients(packed_logprobs, c, None, {}, upstream))


def test_opcheck():
    c = case(5, 4, 31, 7)
    hidden, weight, bias = c.tensors()
    operator = torch.ops.fastrl_fast.packed_logprobs.default
    for arguments in (
        (hidden, weight, c.targets, c.row_index, bias, 0.7, None, 1.0, None, True),
        (hidden[:3], weight, c.targets[:3], None, None, 1.0, 5.0, 0.5, -100, False),
        (hidden.bfloat16(), weight.bfloat16(), c.targets, c.row_index, None, 1.0, None, 1.0, int(c.targets[0]), True),
    ):
        torch.library.opcheck(operator, arguments)


def test_compiles_without_graph_breaks():
    c = case(5, 4, 31, 7)

    def loss(hidden, weight, bias):
        logprobs, entropy = packed_logprobs(hidden * 2, weight, c.targets, row_index=c.row_index, bias=bias)
        return (logprobs * logprobs.detach() - 0.1 * entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    tensors = c.tensors()
    for x, y in zip(*(torch.autograd.grad(f(*tensors), tensors) for f in (loss, compiled)), strict=True):
        assert torch.equal(x, y)


def test_scalar_code_passes_the_same_tests():
    tests = ["-q", "-p", "no:cacheprovider", __file__, "-k", "truth or forbidden or broken"]
    run_with_scalar_code(f"import pytest\nsys.exit(pytest.main({tests!r}))")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0, not 0.0"),
        ({"softcap": -1.0}, "softcap must be > 0 or None, not -1.0"),
        ({"logit_scale": 0.0}, "logit_scale must be > 0, not 0.0"),
        ({"hidden": torch.zeros(3)}, "hidden must have two dimensions"),
        ({"hidden": torch.zeros(3, 5)}, "must agree in H"),
        ({"weight": torch.zeros(9, 4, dtype=torch.int64)}, "weight must have two dimensions and a float dtype"),
        ({"targets": torch.zeros(3)}, "targets must be [N] int64"),
        ({"targets": torch.tensor([0, 9, 1])}, "targets must lie in [0, 9), not in [0, 9]"),
        ({"targets": torch.tensor([0, -100, 1])}, "targets must lie in [0, 9), not in [-100, 1]"),
        ({"row_index": torch.zeros(2, dtype=torch.int64)}, "targets must be one per row (2), not 3"),
        ({"bias": torch.zeros(8)}, "bias must be float and [V] = [9], not [8]"),
    ],
)
def test_what_is_refused(change, message):
    arguments = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "targets": torch.tensor([0, 8, 1]), **change}
    with pytest.raises(ValueError) as caught:
        packed_logprobs(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("targets"), **arguments)
    assert message in str(caught.value)
