"""What every registered operator must pass, whoever wrote it: none is left out because the list is the dispatcher's."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl_fast.ops import (
    CHOICES,
    RULES,
    Shard,
    choose_rollouts,
    fused_policy_loss,
    gradient_sketch,
    group_advantage,
    group_fidelity,
    packed_logprobs,
    policy_loss,
    select_diverse,
    sharded_logprobs,
)
from fastrl_fast.ops._lib import kernels
from fastrl_fast.ops.fused_layers import has_layer_kernels, rms_norm, swiglu
from fastrl_fast.ops.prefix_attention import plan_prefixes, prefix_attention

Function = Callable[..., tuple[Tensor, ...]]


def offsets(total, pieces):
    return torch.linspace(0, total, pieces + 1).long()


def head(large, dtype):
    """Leaves hidden, weight and bias, and targets; `large` is above what one thread does alone."""
    rows, width, vocabulary = (301, 40, 2003) if large else (5, 4, 31)
    make = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (vocabulary, width), (vocabulary,))
    leaves = [torch.randn(shape, generator=make, dtype=dtype).requires_grad_() for shape in shapes]
    return leaves, torch.randint(vocabulary, (rows,), generator=make), make


def packed(large, dtype):
    leaves, targets, make = head(large, dtype)
    index = torch.randint(len(targets), targets.shape, generator=make)
    return leaves, lambda h, w, b: packed_logprobs(h, w, targets, bias=b, row_index=index, temperature=0.7)


def sharded(large, dtype):
    leaves, targets, make = head(large, dtype)
    index, alone = torch.randint(len(targets), targets.shape, generator=make), Shard(0, lambda x: x[None], lambda x: x)
    return leaves, lambda h, w, b: sharded_logprobs(h, w, targets, bias=b, row_index=index, shard=alone, softcap=9.0)


def fused(large, dtype):
    leaves, targets, make = head(large, dtype)
    advantages, weights = torch.randn(3, generator=make, dtype=dtype), torch.rand(3, generator=make, dtype=dtype)
    # close to the policy's own: the true loss is then smooth in every logit, and no ratio is clipped
    old = packed_logprobs(leaves[0].detach(), leaves[1].detach(), targets, bias=leaves[2].detach())[0] + 0.1
    rest = (targets, advantages, weights, offsets(len(targets), 3))
    return leaves, lambda h, w, b: fused_policy_loss(h, w, *rest, bias=b, old_logprobs=old, clip_low=0.9)[:1]


def loss(large, dtype):
    n, sequences, make = 120_000 if large else 9, 40 if large else 3, torch.Generator().manual_seed(0)
    logprobs, old, reference = (-torch.rand(n, generator=make, dtype=dtype) for _ in range(3))
    rest = (torch.randn(sequences, generator=make), torch.rand(sequences, generator=make), offsets(n, sequences))
    given = {"old_logprobs": old, "ref_logprobs": reference, "clip_low": 0.99, "clip_high": 9.0, "kl_coef": 0.2}

    def run(x):
        value, stats = policy_loss(x, *rest, ratio="sequence", **given)
        return value, stats.kl, stats.ratio_max

    return [logprobs.requires_grad_()], run


def advantages(large, dtype):
    n, make = 160_000 if large else 12, torch.Generator().manual_seed(0)
    cu = offsets(n, n // 16 + 1)
    return [torch.rand(n, generator=make, dtype=dtype)], lambda x: group_advantage(x, cu)


def rollouts(large):
    n, each, make = (1024, 120, torch.Generator().manual_seed(0)) if large else (6, 3, torch.Generator().manual_seed(0))
    ids, cu = torch.randint(900, (n * each,), generator=make), torch.arange(0, n * each + 1, each)
    return ids, cu, offsets(n, max(1, n // 16)), make


def diverse(large, dtype):
    ids, cu, groups, make = rollouts(large)
    classes = torch.randint(2, (len(cu) - 1,), generator=make)
    return [classes], lambda c: sum((select_diverse(ids, cu, groups, c, rule=rule, tau=0.9) for rule in RULES), ())


def sketches(large, dtype):
    ids, cu, *_, make = rollouts(large)
    return [-torch.rand(len(ids), generator=make)], lambda x: (gradient_sketch(ids, x, cu, width=64),)


def chosen(large, dtype):
    *_, groups, make = rollouts(large)
    n = int(groups[-1])
    vectors = torch.randn(n, 96, generator=make)

    def run(x):
        made = [choose_rollouts(vectors, x, groups, rule=rule, k=2) for rule in CHOICES]
        return (*sum(made, ()), group_fidelity(vectors, x, made[0].weights * 0.7, groups))

    return [torch.randn(n, generator=make)], run


def attention(large, dtype):
    """In float64, which alone shows a gradient by differences, torch's parts take the place of the operator."""
    prompt, completion = (100, 60) if large else (4, 3)
    make, total = torch.Generator().manual_seed(0), prompt + 2 * completion
    plan = plan_prefixes(torch.tensor([0, prompt, prompt + completion, total]), torch.tensor([[0, prompt, total]]))
    shapes = [(1, heads, total, 16) for heads in (6, 3, 3)]
    leaves = [torch.randn(shape, generator=make, dtype=dtype).requires_grad_() for shape in shapes]
    return leaves, lambda q, k, v: (prefix_attention(q, k, v, plan),)


def norm(large, dtype):
    """In float64 the formula takes the place of the operator."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(900 if large else 3, 2, 120 if large else 8, generator=make, dtype=dtype).requires_grad_()
    weight = torch.randn(x.shape[-1], generator=make, dtype=dtype).requires_grad_()

    def run(x, w):
        return (rms_norm(x, w, 1e-6) if has_layer_kernels(x) else w * x * (x.square().mean(-1, True) + 1e-6).rsqrt(),)

    return [x, weight], run


def gated(large, dtype):
    """In float64 the formula takes the place of the operator."""
    make = torch.Generator().manual_seed(0)
    shape = (900 if large else 3, 136 if large else 8)
    leaves = [torch.randn(shape, generator=make, dtype=dtype).requires_grad_() for _ in range(2)]
    return leaves, lambda g, u: (swiglu(g, u) if has_layer_kernels(g) else g * torch.sigmoid(g) * u,)


@dataclass(frozen=True, slots=True)
class Case:
    """A public function, and the operators that it and its gradient are made of."""

    make: Callable[[bool, torch.dtype], tuple[list[Tensor], Function]]
    operators: tuple[str, ...]
    differentiable: bool


CASES = [
    Case(packed, ("packed_logprobs", "packed_logprobs_backward"), True),
    Case(sharded, ("shard_sums", "shard_backward"), True),
    Case(fused, ("fused_policy_loss",), True),
    Case(loss, ("policy_loss",), True),
    Case(advantages, ("group_advantage",), False),
    Case(diverse, ("select_diverse",), False),
    Case(sketches, ("gradient_sketch",), False),
    Case(chosen, ("choose_rollouts",), False),
    Case(attention, ("row_attention", "row_attention_backward"), True),
    Case(norm, ("rms_norm", "rms_norm_backward"), True),
    Case(gated, ("swiglu", "swiglu_backward"), True),
]
REFUSED = {f"{name}_backward" for name in ("packed_logprobs", "rms_norm", "row_attention", "swiglu")}
"""Gradients that torch would have no derivative of, and say no more than a warning."""
FOR_AVX2 = (attention, norm, gated)
NO_AVX2 = pytest.mark.skipif(not kernels.FUSED_LAYERS, reason="this processor has no AVX2")
EVERY = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.operators[0], marks=NO_AVX2 if case.make in FOR_AVX2 else ()) for case in CASES],
)


class Seen(TorchDispatchMode):
    """Calls of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fastrl_fast":
            self.calls[function._schema.name.partition("::")[2]] = (function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def has_autograd(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fastrl_fast::{name}", "Autograd")


def results(case, leaves, run):
    """Outputs, and gradients where there are some."""
    outputs = run(*leaves)
    if not case.differentiable:
        assert not any(x.requires_grad for x in outputs)
        return outputs
    moving = [x for x in outputs if x.requires_grad]
    # an upstream gradient that differs from element to element
    upstream = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).cos().view(x.shape) for x in moving]
    return (*(x.detach() for x in outputs), *torch.autograd.grad(moving, leaves, upstream))


def assert_same_bits(here, there):
    for x, y in zip(here, there, strict=True):
        assert torch.equal(x.nan_to_num(7), y.nan_to_num(7)), f"{float((x.double() - y.double()).abs().max())}"


def test_no_registered_operator_is_left_out():
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    registered = {name.partition(".")[0] for space, _, name in names if space == "fastrl_fast"}
    assert registered == {name for case in CASES for name in case.operators}
    differentiable = {"packed_logprobs", "fused_policy_loss", "policy_loss", "rms_norm", "row_attention", "swiglu"}
    assert {name for name in registered if has_autograd(name)} == differentiable | REFUSED


@EVERY
def test_opcheck(case):
    leaves, run = case.make(False, torch.float32)
    with Seen() as seen:
        results(case, leaves, run)
    assert set(seen.calls) == set(case.operators)
    places = {x.data_ptr() for x in leaves if x.requires_grad}
    for name, (function, args, kwargs) in seen.calls.items():
        moving = places if has_autograd(name) and name not in REFUSED else set()

        def fresh(x, moving=moving):
            return x.detach().clone().requires_grad_(x.data_ptr() in moving) if isinstance(x, Tensor) else x

        torch.library.opcheck(function, tuple(map(fresh, args)), kwargs)


@EVERY
def test_gradcheck_or_no_gradient(case):
    leaves, run = case.make(False, torch.float64)
    results(case, leaves, run)  # asserts that a function without a gradient has none
    if case.differentiable:
        assert torch.autograd.gradcheck(lambda *x: tuple(y for y in run(*x) if y.requires_grad), leaves)


@pytest.mark.parametrize("case", [param for param in EVERY.args[1] if param.values[0].operators[-1] in REFUSED])
def test_a_second_derivative_is_refused(case):
    """Where a gradient is an operator of its own: torch alone would warn, and go on with 0."""
    leaves, run = case.make(False, torch.float32)
    moving = [x for x in run(*leaves) if x.requires_grad]
    gradients = torch.autograd.grad(sum(x.square().sum() for x in moving), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{case.operators[-1]} has no derivative"):
        sum(x.sum() for x in gradients).backward()


@EVERY
def test_compiles_as_one_graph(case):
    leaves, run = case.make(False, torch.float32)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same_bits(results(case, leaves, run), results(case, leaves, compiled))


@EVERY
def test_the_thread_count_changes_no_bit(case):
    leaves, run = case.make(True, torch.float32)
    made, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(results(case, leaves, run))
    finally:
        torch.set_num_threads(before)
    for other in made[1:]:
        assert_same_bits(made[0], other)


def test_these_checks_can_fail():
    """A function whose bits depend on the thread count, and one whose gradient is wrong."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.get_num_threads()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.5

    def wrong(large, dtype):
        return [torch.ones(3, dtype=dtype).requires_grad_()], lambda x: (Wrong.apply(x),)

    case = Case(wrong, (), True)
    with pytest.raises(AssertionError):
        test_the_thread_count_changes_no_bit(case)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        test_gradcheck_or_no_gradient(case)
