"""Layers of a transformer that make one pass over memory, for float32 on CPUs with AVX2."""

from typing import Any

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check, forbid_second_derivative, kernels, library

library.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
library.define("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse_root) -> (Tensor, Tensor)")
library.define("swiglu(Tensor gate, Tensor up) -> Tensor")
library.define("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")


def has_layer_kernels(x: Tensor) -> bool:
    """Whether the functions here have code for this processor, and for x [..., width]."""
    return (
        kernels.FUSED_LAYERS and x.device.type == "cpu" and x.dtype == torch.float32 and x.ndim > 0
        and x.shape[-1] % 8 == 0
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight x / sqrt(mean of x^2 + eps) over the last dimension; x [..., width] and weight [width] float32 -> as x.

    Differentiable in x and weight; the backward pass keeps x and a number per row. No bit depends on the thread count.

    Raises:
        ValueError: tensors that do not fit, or that `has_layer_kernels` says no to.

    Source: arXiv 1910.07467.
    """
    _check_kernels("x", x)
    check(
        weight.shape == x.shape[-1:] and weight.dtype == x.dtype and weight.device == x.device,
        f"weight must be float32 [{x.shape[-1]}] on the CPU, not {weight.dtype} {list(weight.shape)} {weight.device}",
    )
    out: Tensor = torch.ops.fastrl_fast.rms_norm(x, weight, eps)[0]
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate sigmoid(gate) up, element by element; [..., width] float32, differentiable in both, which alone it keeps.

    Raises:
        ValueError: tensors that do not fit, or that `has_layer_kernels` says no to.

    Source: arXiv 2002.05202.
    """
    _check_kernels("gate", gate)
    check(
        up.shape == gate.shape and up.dtype == gate.dtype and up.device == gate.device,
        f"up must be as gate, float32 {list(gate.shape)} on the CPU, not {up.dtype} {list(up.shape)} {up.device}",
    )
    out: Tensor = torch.ops.fastrl_fast.swiglu(gate, up)
    return out


def _check_kernels(name: str, x: Tensor) -> None:
    check(
        has_layer_kernels(x),
        f"{name} must be float32 on a CPU with AVX2, its last dimension a multiple of 8, "
        f"not {x.dtype} {list(x.shape)} {x.device}",
    )


@torch.library.register_fake("fastrl_fast::rms_norm", lib=library)
def _fake_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1])


@torch.library.register_fake("fastrl_fast::rms_norm_backward", lib=library)
def _fake_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse_root: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.register_fake("fastrl_fast::swiglu", lib=library)
def _fake_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.register_fake("fastrl_fast::swiglu_backward", lib=library)
def _fake_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().contiguous() for x in tensors]


def _pointers(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = _contiguous(x, weight)
    out, inverse_root = _fake_norm(x, weight, eps)
    sizes = (inverse_root.numel(), x.shape[-1], eps)
    kernels.rms_norm_cpu(*_pointers(x, weight), *sizes, *_pointers(out, inverse_root), torch.get_num_threads())
    return out, inverse_root


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse_root: Tensor) -> tuple[Tensor, Tensor]:
    grad, x, weight, inverse_root = _contiguous(grad, x, weight, inverse_root)
    grads = _fake_norm_backward(grad, x, weight, inverse_root)
    arguments = (*_pointers(x, weight), inverse_root.numel(), x.shape[-1], *_pointers(inverse_root, grad, *grads))
    kernels.rms_norm_backward_cpu(*arguments, torch.get_num_threads())
    return grads


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = _contiguous(gate, up)
    out = _fake_swiglu(gate, up)
    kernels.swiglu_cpu(*_pointers(gate, up), gate.numel(), out.data_ptr(), torch.get_num_threads())
    return out


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = _contiguous(grad, gate, up)
    grads = _fake_swiglu_backward(grad, gate, up)
    kernels.swiglu_backward_cpu(
        *_pointers(gate, up), gate.numel(), *_pointers(grad, *grads), torch.get_num_threads()
    )  # fmt: skip
    return grads


library.impl("rms_norm", _norm, "CPU")
library.impl("rms_norm_backward", _norm_backward, "CPU")
library.impl("swiglu", _swiglu, "CPU")
library.impl("swiglu_backward", _swiglu_backward, "CPU")


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _norm_gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *torch.ops.fastrl_fast.rms_norm_backward(grad, *ctx.saved_tensors), None


def _keep_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = torch.ops.fastrl_fast.swiglu_backward(grad, *ctx.saved_tensors)
    return grads


torch.library.register_autograd("fastrl_fast::rms_norm", _norm_gradient, setup_context=_keep_norm, lib=library)
torch.library.register_autograd("fastrl_fast::swiglu", _swiglu_gradient, setup_context=_keep_swiglu, lib=library)
forbid_second_derivative("rms_norm_backward")
forbid_second_derivative("swiglu_backward")
