"""What each rollout's reward says relative to its group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl_fast.ops._lib import cuda_stream, kernels, library


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantagePreset:
    """One way to turn a group's rewards into advantages."""

    divide_by_std: bool = False
    """Divide by the standard deviation plus `eps`."""
    leave_one_out: bool = False
    """Subtract the mean of the other members instead of everyone's: a factor n / (n - 1)."""
    ddof: int = 1
    """The variance is sum (r - mean)^2 / (n - ddof)."""
    eps: float = 0.0
    """Added to the standard deviation, outside the root."""


PRESETS = {
    "trl": AdvantagePreset(divide_by_std=True, eps=1e-4),
    "verl": AdvantagePreset(divide_by_std=True, eps=1e-6),
    "fastrl": AdvantagePreset(divide_by_std=True, eps=1e-6),
    "rloo": AdvantagePreset(leave_one_out=True),
    "dr_grpo": AdvantagePreset(),
}
"""The numbers of the frameworks people compare with (algorithms.md 1.1, 3.10, 3.12)."""

library.define(
    "group_advantage(Tensor rewards, Tensor cu_group_sizes, bool divide_by_std, bool leave_one_out, int ddof, "
    "float eps) -> (Tensor, Tensor)"
)


def group_advantage(rewards: Tensor, cu_group_sizes: Tensor, *, preset: str = "trl") -> tuple[Tensor, Tensor]:
    """Return the advantage of each rollout within its group, and which groups are dead.

    With n graded members (reward not NaN), their mean mu and std = sqrt(sum (r - mu)^2 / (n - ddof)), in float64:
    `trl` (r - mu) / (std + 1e-4); `verl`, `fastrl` (r - mu) / (std + 1e-6), all with ddof 1;
    `rloo` n / (n - 1) (r - mu); `dr_grpo` r - mu.
    A group is dead when fewer than two members are graded or all graded rewards are equal: its advantages are
    exactly 0. An ungraded member is left out of the moments and has advantage 0.

    Args:
        rewards: [N] float32 or float64; NaN where a rollout could not be graded.
        cu_group_sizes: [G + 1] int64, offsets of the groups into `rewards`; empty groups are allowed (and dead).
        preset: a key of `PRESETS`.

    Returns:
        advantages [N] float32, dead [G] bool, on the device of `rewards`; the same bits on the CPU and on CUDA.

    Raises:
        ValueError: unknown preset, wrong shape or dtype; on the CPU also offsets that do not cut `rewards` into groups,
            and infinite rewards.

    Source: algorithms.md 1.1 (FastRL), 3.10 (Dr. GRPO, arXiv 2503.20783), 3.12 (RLOO, arXiv 2402.14740).
    """
    # Not `check`: making three messages that nobody reads takes 7 us.
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}")
    if rewards.ndim != 1 or rewards.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rewards must be [N] float32 or float64, not {list(rewards.shape)} {rewards.dtype}")
    if cu_group_sizes.ndim != 1 or cu_group_sizes.shape[0] < 1 or cu_group_sizes.dtype != torch.int64:
        found = f"{list(cu_group_sizes.shape)} {cu_group_sizes.dtype}"
        raise ValueError(f"cu_group_sizes must be [G + 1] int64, not {found}")
    p = PRESETS[preset]
    advantages, dead = torch.ops.fastrl_fast.group_advantage(
        rewards, cu_group_sizes, p.divide_by_std, p.leave_one_out, p.ddof, p.eps
    )
    return advantages, dead


@torch.library.register_fake("fastrl_fast::group_advantage", lib=library)
def _fake(
    rewards: Tensor, cu_group_sizes: Tensor, divide_by_std: bool, leave_one_out: bool, ddof: int, eps: float
) -> tuple[Tensor, Tensor]:
    advantages = rewards.new_empty(rewards.shape, dtype=torch.float32)
    return advantages, rewards.new_empty((cu_group_sizes.shape[0] - 1,), dtype=torch.bool)


def _cpu(
    rewards: Tensor, cu: Tensor, divide_by_std: bool, leave_one_out: bool, ddof: int, eps: float
) -> tuple[Tensor, Tensor]:
    rewards, cu = rewards.to(torch.float64).contiguous(), cu.contiguous()
    advantages, dead = _fake(rewards, cu, divide_by_std, leave_one_out, ddof, eps)
    kernels.group_advantage_cpu(
        rewards.data_ptr(), rewards.shape[0], cu.data_ptr(), dead.shape[0], divide_by_std, leave_one_out, ddof, eps,
        advantages.data_ptr(), dead.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return advantages, dead


def _cuda(
    rewards: Tensor, cu: Tensor, divide_by_std: bool, leave_one_out: bool, ddof: int, eps: float
) -> tuple[Tensor, Tensor]:
    rewards, cu = rewards.to(torch.float64).contiguous(), cu.contiguous()
    advantages, dead = _fake(rewards, cu, divide_by_std, leave_one_out, ddof, eps)
    with cuda_stream(rewards) as stream:
        kernels.group_advantage_cuda(
            rewards.data_ptr(), cu.data_ptr(), dead.shape[0], divide_by_std, leave_one_out, ddof, eps,
            advantages.data_ptr(), dead.data_ptr(), stream,
        )  # fmt: skip
    return advantages, dead


library.impl("group_advantage", _cpu, "CPU")
library.impl("group_advantage", _cuda, "CUDA")
