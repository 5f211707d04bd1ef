"""group_advantage against vectorised PyTorch on groups of one size, and against verl's functions."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import referees
import timing
import torch
from torch import Tensor

from fastrl_fast.ops import PRESETS, group_advantage, reference


def vectorised(rewards: Tensor, cu_group_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """What TRL does: a view by group, with NaN left out of the moments as ours does."""
    table = rewards.view(cu_group_sizes.shape[0] - 1, -1)
    graded = ~table.isnan()
    n = graded.sum(1, keepdim=True)
    mean = table.nansum(1, keepdim=True) / n
    centred = torch.where(graded, table - mean, 0)
    std = (centred.square().sum(1, keepdim=True) / (n - 1)).sqrt()
    low, high = (table.nan_to_num(nan=x) for x in (torch.inf, -torch.inf))
    dead = (n[:, 0] < 2) | (low.amin(1) == high.amax(1))
    return torch.where(dead[:, None], 0, centred / (std + 1e-4)).flatten().float(), dead


def plain_trl(rewards: Tensor, cu_group_sizes: Tensor) -> tuple[Tensor, None]:
    """Without NaN, without dead groups: four operations."""
    table = rewards.view(cu_group_sizes.shape[0] - 1, -1)
    return ((table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True) + 1e-4)).flatten(), None


def ragged(rewards: Tensor, cu_group_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """What verl does: scatter by group number."""
    sizes = cu_group_sizes.diff()
    group = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
    mean = rewards.new_zeros(len(sizes)).index_add(0, group, rewards) / sizes
    centred = rewards - mean[group]
    variance = rewards.new_zeros(len(sizes)).index_add(0, group, centred.square()) / (sizes - 1)
    return (centred / (variance.sqrt()[group] + 1e-4)).float(), variance == 0


def from_verl() -> dict[str, Any]:
    """verl's loop over rollouts and its vectorised form."""
    names = {
        "verl, loop": "compute_grpo_outcome_advantage",
        "verl, vectorised": "compute_grpo_vectorized_outcome_advantage",
    }
    found = {name: referees.verl_advantages(function) for name, function in names.items()}
    return {name: (lambda *a, f=f: (f(*a), None)) for name, f in found.items() if f is not None}


def check_errors(rewards: Tensor, cu_group_sizes: Tensor, results: dict[str, Any]) -> None:
    """Each against the float64 truth of its own preset: verl adds another eps than the rest do.

    Ours may be off by the rounding of its result. Moments in float32 may be off by more, without bound for groups that
    are nearly equal: 16 roundings of a reward, which is below 1, over the group's standard deviation + eps.
    """
    rewards, cu = rewards.cpu(), cu_group_sizes.cpu()
    sizes = cu.diff()
    centred = reference.group_advantage(rewards, cu, preset="dr_grpo")[0]
    squares = torch.segment_reduce(centred.square(), "sum", lengths=sizes)
    std = (squares / (sizes - 1)).sqrt().repeat_interleave(sizes)
    for name, (advantages, dead) in results.items():
        preset = "verl" if name.startswith("verl") else "trl"
        truth, truly_dead = reference.group_advantage(rewards, cu, preset=preset)
        rounding = 2.0**-24 * (truth.abs() if name == "ours" else 16 / (std + PRESETS[preset].eps))
        worst = ((advantages.cpu().double() - truth).abs() / (rounding + 1e-8)).max()
        assert worst <= 1, f"{name} is off by {worst:.2f} of what its rounding explains"
        assert dead is None or torch.equal(dead.cpu(), truly_dead), f"{name} calls other groups dead"


def case(
    setting: timing.Setting, name: str, sizes: Tensor, runs: dict[str, Any], wanted: dict[str, float]
) -> timing.Case:
    rewards = torch.rand(int(sizes.sum()), generator=torch.Generator().manual_seed(0)).to(setting.device)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(setting.device)

    called = {"ours": group_advantage, **runs}
    return timing.Case(
        name=name,
        runs={n: (lambda f=f: f(rewards, cu)) for n, f in called.items()},
        check=partial(check_errors, rewards, cu),
        wanted={} if setting.device == "cuda" else wanted,
        bytes=rewards.nbytes + 4 * len(rewards),
    )


def cases(setting: timing.Setting) -> Iterable[timing.Case]:
    groups = 8 if setting.quick else 2048 if setting.on_gpu else 4096
    runs = {"torch, vectorised": vectorised, "torch, no NaN, no dead": plain_trl}
    runs |= timing.compiled(vectorised, setting)
    if setting.device == "cpu":
        runs |= from_verl()
    yield case(setting, f"{groups} groups of 16", torch.full((groups,), 16), runs, {"torch, vectorised": 5.0})
    uneven = torch.randint(2, 31, (groups,), generator=torch.Generator().manual_seed(1))
    yield case(setting, f"{groups} ragged groups", uneven, {"torch, index_add": ragged}, {})


if __name__ == "__main__":
    timing.main(__doc__, cases)
