"""Norms and gated layers in one pass: against float64 and torch, and in models of several families."""

import copy

import pytest
import torch
from numerics import assert_at_most_twice, run_with_scalar_code
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from fastrl_fast.layers import fuse_layers
from fastrl_fast.ops._lib import kernels
from fastrl_fast.ops.fused_layers import has_layer_kernels, rms_norm, swiglu

pytestmark = pytest.mark.skipif(not kernels.FUSED_LAYERS, reason="this processor has no AVX2")


def leaves(*shapes: tuple[int, ...], size: float = 1.0) -> list[Tensor]:
    make = torch.Generator().manual_seed(len(shapes))
    return [(torch.randn(shape, generator=make) * size).requires_grad_() for shape in shapes]


def with_gradients(out: Tensor, of: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, of, upstream.to(out.dtype))]


def textbook_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("shape", [(1, 8), (63, 16), (64, 24), (2, 65, 3, 32), (300, 576)])
def test_norm_rounds_as_torch_does(shape, size):
    """A gradient of the weights is a sum over rows: the order differs, its size bounds the rounding."""
    given = [*leaves(shape, size=size), *leaves(shape[-1:])]
    exact = [x.detach().double().requires_grad_() for x in given]
    ours, torchs, truth = (
        with_gradients(form(*of, 1e-5), of)
        for form, of in ((rms_norm, given), (textbook_norm, given), (textbook_norm, exact))
    )
    for mine, right, true in zip(ours, torchs, truth, strict=True):
        assert_at_most_twice(mine, right, true, size=4 * float(true.abs().max()))


@pytest.mark.parametrize("size", [1e-4, 1.0, 50.0])
@pytest.mark.parametrize("shape", [(8,), (1, 1024), (3, 5, 8), (70, 776)])
def test_gated_product_rounds_as_torch_does(shape, size):
    given = leaves(shape, shape, size=size)
    exact = [x.detach().double().requires_grad_() for x in given]

    def form(gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up

    ours, torchs, truth = (with_gradients(f(*of), of) for f, of in ((swiglu, given), (form, given), (form, exact)))
    for mine, right, true in zip(ours, torchs, truth, strict=True):
        assert_at_most_twice(mine, right, true, size=4 * float(true.abs().max()))


def test_what_is_not_a_number_stays_and_a_large_gate_saturates():
    gate = torch.tensor([torch.nan, torch.inf, 1e30, -1e30, 200.0, -200.0, 0.0, 1.0])
    out = swiglu(gate, torch.ones(8))
    torch.testing.assert_close(out[1:], nn.functional.silu(gate)[1:], rtol=1e-6, atol=1e-7)
    assert out[0].isnan()
    rows = torch.ones(2, 8)
    rows[0, 3] = torch.nan
    assert rms_norm(rows, torch.ones(8), 1e-6).isnan().all(1).tolist() == [True, False]


def test_bad_input_is_named():
    x, weight = torch.zeros(2, 8), torch.ones(8)
    for call, message in (
        (lambda: rms_norm(torch.zeros(2, 9), torch.ones(9), 1e-6), "x must be float32 on a CPU with AVX2"),
        (lambda: rms_norm(x.double(), weight, 1e-6), "x must be float32"),
        (lambda: rms_norm(x, torch.ones(16), 1e-6), r"weight must be float32 \[8\]"),
        (lambda: swiglu(x, torch.zeros(2, 16)), "up must be as gate"),
        (lambda: swiglu(x.bfloat16(), x.bfloat16()), "gate must be float32"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_models_compute_what_they_did(make_lm, family):
    """All norms and feed-forward layers are replaced, in a copy too, which uses its own weights."""
    plain = make_lm(family, dtype=torch.float32)
    fused = copy.deepcopy(plain)
    fuse_layers(fused)
    replaced = [m for m in fused.modules() if "forward" in vars(m)]
    norms = [m for m in fused.modules() if type(m).__name__.endswith("RMSNorm")]
    assert len(replaced) == len(norms) + 2 and set(norms) < set(replaced)
    assert list(fused.state_dict()) == list(plain.state_dict())
    again = copy.deepcopy(fused)
    with torch.no_grad():
        for model in (plain, again):
            for name, parameter in model.named_parameters():
                # the scale of test_model, at which rounding is small beside the bounds
                parameter.mul_(0.5).add_(0.1 if "norm" in name else 0.0)
    tokens = torch.randint(89, (1, 40), generator=torch.Generator().manual_seed(0))
    results = [with_gradients(model(tokens).logits, list(model.parameters())) for model in (plain, again)]
    for theirs, ours in zip(*results, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    with torch.no_grad():
        assert float((fused(tokens).logits - results[0][0]).abs().max()) > 1e-2, "a copy has weights of its own"
        wide = copy.deepcopy(again).double()(tokens).logits
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), results[1][0], rtol=1e-3, atol=1e-4)


def test_norms_of_another_formula_keep_their_own():
    """Gemma's factor is 1 + weight; a norm of weight 0 says nothing of its formula."""
    for kind, value, count in (
        (GemmaRMSNorm, 0.0, 0),
        (GemmaRMSNorm, 1.0, 0),
        (LlamaRMSNorm, 0.0, 0),
        (LlamaRMSNorm, 1e-6, 1),
        (LlamaRMSNorm, 1.0, 1),
    ):
        assert replaced(kind(16), weight=value) == count, (kind, value)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_other_activations_keep_their_own(scale):
    """Also where weights are so small that every activation is half of what goes in."""
    for activation, count in (("silu", 1), ("gelu", 0), ("relu", 0), ("tanh", 0)):
        layer = LlamaMLP(
            LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, hidden_act=activation)
        )
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(scale)
        assert replaced(layer) == count, activation


def test_layers_of_other_signatures_or_with_a_hook_keep_their_own():
    class Gated(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
            return super().forward(hidden_states * gate)

    assert replaced(Gated(16)) == 0
    per_head = LlamaRMSNorm(16)
    per_head.weight = nn.Parameter(torch.ones(4, 16))
    assert replaced(per_head) == 0
    hooked = LlamaRMSNorm(16)
    own = hooked.forward = lambda x: x
    fuse_layers(hooked)
    assert hooked.forward is own


def replaced(layer: nn.Module, *, weight: float | None = None) -> int:
    if weight is not None:
        nn.init.constant_(layer.weight, weight)
    fuse_layers(layer)
    return sum("forward" in vars(m) for m in layer.modules())


def test_other_processors_keep_every_layer():
    printed = run_with_scalar_code(
        "import torch\nfrom fastrl_fast.layers import fuse_layers\n"
        "from transformers.models.llama.modeling_llama import LlamaRMSNorm\n"
        "norm = LlamaRMSNorm(16)\nfuse_layers(norm)\nprint('forward' in vars(norm))\n"
    )
    assert printed.strip() == "False" and has_layer_kernels(torch.zeros(8))
