"""Which rollouts of a group stand for all of it, judged by vectors and advantages."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check, cuda_stream, kernels, library

CHOICES = ("maxmin", "dpp", "match", "random", "top_advantage")
"""In the order of the enum of csrc/kernels/choose_rollouts.h, where `given` follows."""


class Choice(NamedTuple):
    """What a rule kept."""

    kept: Tensor
    """[N] bool."""
    order: Tensor
    """[N] int64: the turn in which a rollout was kept within its group, from 0; -1 where it was not."""
    weights: Tensor
    """[N] float32: factor of the rollout's advantage; 1 where kept (`match`: its own), else 0."""
    fidelity: Tensor
    """[G] float64: cosine between the group's whole gradient and the weighted kept one, in the space of the vectors."""


library.define(
    "choose_rollouts(Tensor vectors, Tensor advantages, Tensor cu_group_sizes, int rule, int k, int seed, "
    "Tensor? weights) -> (Tensor, Tensor, Tensor)"
)


def choose_rollouts(
    vectors: Tensor, advantages: Tensor, cu_group_sizes: Tensor, *, rule: str, k: int, seed: int = 0
) -> Choice:
    """Keep at most k rollouts of each group, one after the other, ties to the lowest index.

    With g_i = A_i v_i and c_ij the cosine of g_i and g_j (0 where one is 0):
    `maxmin` starts with the largest |g| and adds the rollout least similar to any kept one; zero rows come last.
    `dpp` adds the rollout that raises the determinant of |A_i A_j| c_ij most, until the rest is in the kept ones' span.
    `match` picks rollouts and weights >= 0 so that the weighted sum comes near sum_i g_i (non-negative least squares).
    `random` draws without replacement by a hash of `seed` and the rollout's index.
    `top_advantage` takes the largest |A| (CPPO; one group over everything ranks the whole batch).
    A rollout with a vector or advantage that is not finite is never kept. The result is float64 arithmetic in one
    order: the same bits on the CPU and on CUDA, whatever the thread count.

    Args:
        vectors: [N, width] float32, for example from `gradient_sketch`; on the CPU or on CUDA like all inputs.
        advantages: [N] float32.
        cu_group_sizes: [G + 1] int64, offsets of the groups.
        rule: one of `CHOICES`.
        k: >= 0.
        seed: >= 0, for `random`.

    Raises:
        ValueError: unknown rule, numbers out of range, tensors that do not fit or are not on one device; on the CPU
            also offsets that do not cut the rollouts into groups.

    Source: maxmin: Gonzalez 1985; dpp: Chen et al., arXiv 1709.05135; match: Lawson and Hanson 1974, chapter 23;
        top_advantage: CPPO, arXiv 2503.22342.
    """
    check(rule in CHOICES, f"rule must be one of {', '.join(CHOICES)}, not {rule!r}")
    check(k >= 0, f"k must be >= 0, not {k}")
    check(seed >= 0, f"seed must be >= 0, not {seed}")
    _check_tensors(vectors, advantages, cu_group_sizes)
    weights, order, fidelity = torch.ops.fastrl_fast.choose_rollouts(
        vectors, advantages, cu_group_sizes, CHOICES.index(rule), k, seed, None
    )
    return Choice(order >= 0, order, weights, fidelity)


def group_fidelity(vectors: Tensor, advantages: Tensor, weights: Tensor, cu_group_sizes: Tensor) -> Tensor:
    """Return cos(sum_i A_i v_i, sum_i w_i A_i v_i) of each group, [G] float64: what a choice left of its gradient.

    Rollouts with a vector or advantage that is not finite are left out of both sums. 1 where both sums are 0, 0 where
    one is.

    Args:
        weights: [N] float32, 0 for a rollout that was not kept; the others as in `choose_rollouts`.

    Raises:
        ValueError: tensors that do not fit or are not on one device; offsets as in `choose_rollouts`.
    """
    _check_tensors(vectors, advantages, cu_group_sizes)
    check(
        weights.shape == advantages.shape and weights.dtype == torch.float32 and weights.device == vectors.device,
        f"weights must be float32, one per rollout ({advantages.shape[0]}), on the device of vectors, "
        f"not {list(weights.shape)} {weights.dtype} {weights.device}",
    )
    return torch.ops.fastrl_fast.choose_rollouts(vectors, advantages, cu_group_sizes, len(CHOICES), 0, 0, weights)[2]


def _check_tensors(vectors: Tensor, advantages: Tensor, cu_group_sizes: Tensor) -> None:
    for name, tensor, ndim, dtype in (
        ("vectors", vectors, 2, torch.float32),
        ("advantages", advantages, 1, torch.float32),
        ("cu_group_sizes", cu_group_sizes, 1, torch.int64),
    ):
        check(
            tensor.ndim == ndim and tensor.dtype == dtype and tensor.device == vectors.device,
            f"{name} must have {ndim} dimension(s), {dtype}, on the device of vectors, "
            f"not {list(tensor.shape)} {tensor.dtype} {tensor.device}",
        )
    rollouts = vectors.shape[0]
    check(
        advantages.shape[0] == rollouts, f"advantages must be one per rollout ({rollouts}), not {advantages.shape[0]}"
    )
    check(cu_group_sizes.shape[0] >= 1, "cu_group_sizes must hold at least the 0 it starts with")


@torch.library.register_fake("fastrl_fast::choose_rollouts", lib=library)
def _fake(
    vectors: Tensor, advantages: Tensor, cu: Tensor, rule: int, k: int, seed: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    order = advantages.new_empty(advantages.shape, dtype=torch.int64)
    return torch.empty_like(advantages), order, advantages.new_empty(cu.shape[0] - 1, dtype=torch.float64)


def _forward(
    vectors: Tensor, advantages: Tensor, cu: Tensor, rule: int, k: int, seed: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    vectors, advantages, cu = vectors.detach().contiguous(), advantages.detach().contiguous(), cu.contiguous()
    out, order, fidelity = _fake(vectors, advantages, cu, rule, k, seed, weights)
    if weights is not None:
        out.copy_(weights)
    (rollouts, width), groups = vectors.shape, fidelity.shape[0]
    k = min(k, rollouts)
    arguments = (
        vectors.data_ptr(), advantages.data_ptr(), rollouts, cu.data_ptr(), groups, width, rule, k, seed,
        out.data_ptr(), order.data_ptr(), fidelity.data_ptr(),
    )  # fmt: skip
    if vectors.is_cuda:
        size = kernels.choose_rollouts_workspace(rule, rollouts, groups, width, k)
        workspace = vectors.new_empty(size, dtype=torch.float64)
        with cuda_stream(vectors) as stream:
            kernels.choose_rollouts_cuda(*arguments, workspace.data_ptr(), stream)
    else:
        kernels.choose_rollouts_cpu(*arguments, torch.get_num_threads())
    return out, order, fidelity


for _device in ("CPU", "CUDA"):
    library.impl("choose_rollouts", _forward, _device)
