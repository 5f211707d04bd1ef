"""A short vector per rollout that stands for its policy gradient, from token ids and the sampler's logprobs."""

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check, cuda_stream, kernels, library

library.define("gradient_sketch(Tensor token_ids, Tensor logprobs, Tensor cu_seqlens, int width, int seed) -> Tensor")


def gradient_sketch(
    token_ids: Tensor, logprobs: Tensor, cu_seqlens: Tensor, *, width: int = 1024, seed: int = 0
) -> Tensor:
    """Return sum over a rollout's tokens of (1 - pi_t) e_{y_t}, its coordinates hashed into `width` signed buckets.

    This is the gradient of the rollout's log-probability along the logits with hidden states and the other tokens'
    small terms left out; it costs no forward pass. Inner products of sketches estimate those of the vectors without
    bias, with a standard error of about |a| |b| / sqrt(width). 1 - pi_t is rounded to multiples of 1/1024, which makes
    the sums exact: every machine, device and thread count gives the same bits.

    Args:
        token_ids: [T] int64, completions back to back, on the CPU or on CUDA like all inputs.
        logprobs: [T] float32, of each token in the distribution it was sampled from; above 0 counts as 0.
        cu_seqlens: [N + 1] int64, offsets of the completions.
        width: a power of two in [2, 2^20].
        seed: of the hash; at least 0.

    Returns:
        [N, width] float32; a rollout with a NaN logprob has NaN in its first bucket, which keeps it from being chosen.

    Raises:
        ValueError: width or seed out of range, tensors that do not fit or are not on one device; on the CPU also
            offsets that do not cut the tokens into completions.

    Source: design.md 4.3; signed hashing after Weinberger et al., arXiv 0902.2206.
    """
    check(2 <= width <= 1 << 20 and width & (width - 1) == 0, f"width must be a power of two in [2, 2^20], not {width}")
    check(seed >= 0, f"seed must be >= 0, not {seed}")
    for name, tensor, dtype in (
        ("token_ids", token_ids, torch.int64),
        ("logprobs", logprobs, torch.float32),
        ("cu_seqlens", cu_seqlens, torch.int64),
    ):
        check(
            tensor.ndim == 1 and tensor.dtype == dtype and tensor.device == token_ids.device,
            f"{name} must be one-dimensional {dtype} on the device of token_ids, "
            f"not {list(tensor.shape)} {tensor.dtype} {tensor.device}",
        )
    check(cu_seqlens.shape[0] >= 1, "cu_seqlens must hold at least the 0 it starts with")
    tokens = token_ids.shape[0]
    check(logprobs.shape[0] == tokens, f"logprobs must be one per token ({tokens}), not {logprobs.shape[0]}")
    return torch.ops.fastrl_fast.gradient_sketch(token_ids, logprobs, cu_seqlens, width, seed)


@torch.library.register_fake("fastrl_fast::gradient_sketch", lib=library)
def _fake(token_ids: Tensor, logprobs: Tensor, cu_seqlens: Tensor, width: int, seed: int) -> Tensor:
    return logprobs.new_empty(cu_seqlens.shape[0] - 1, width)


def _forward(token_ids: Tensor, logprobs: Tensor, cu_seqlens: Tensor, width: int, seed: int) -> Tensor:
    token_ids, logprobs, cu_seqlens = token_ids.contiguous(), logprobs.detach().contiguous(), cu_seqlens.contiguous()
    sketch = _fake(token_ids, logprobs, cu_seqlens, width, seed)
    arguments = (
        token_ids.data_ptr(), logprobs.data_ptr(), token_ids.shape[0], cu_seqlens.data_ptr(), sketch.shape[0],
        width, seed, sketch.data_ptr(),
    )  # fmt: skip
    if token_ids.is_cuda:
        with cuda_stream(token_ids) as stream:
            kernels.gradient_sketch_cuda(*arguments, stream)
    else:
        kernels.gradient_sketch_cpu(*arguments, torch.get_num_threads())
    return sketch


library.impl("gradient_sketch", _forward, "CPU")
library.impl("gradient_sketch", _forward, "CUDA")
