"""group_advantage against vectorised PyTorch on groups of one size, and against a loop over ragged ones."""

from collections.abc import Iterable
from typing import Any

import timing
import torch
from torch import Tensor

from fastrl_fast.ops import group_advantage


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
    group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    mean = torch.zeros(len(sizes), dtype=rewards.dtype).index_add(0, group, rewards) / sizes
    centred = rewards - mean[group]
    variance = torch.zeros(len(sizes), dtype=rewards.dtype).index_add(0, group, centred.square()) / (sizes - 1)
    return (centred / (variance.sqrt()[group] + 1e-4)).float(), variance == 0


def case(name: str, sizes: Tensor, runs: dict[str, Any], wanted: dict[str, float]) -> timing.Case:
    rewards = torch.rand(int(sizes.sum()), generator=torch.Generator().manual_seed(0))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])

    def check(results: dict[str, Any]) -> None:
        for advantages, dead in results.values():
            torch.testing.assert_close(advantages, results["ours"][0], rtol=1e-3, atol=1e-4)
            assert dead is None or torch.equal(dead, results["ours"][1])

    called = {"ours": group_advantage, **runs}
    return timing.Case(
        name=name,
        runs={n: (lambda f=f: f(rewards, cu)) for n, f in called.items()},
        check=check,
        wanted=wanted,
    )


def cases() -> Iterable[timing.Case]:
    equal = torch.full((4096,), 16)
    runs = {"torch, vectorised": vectorised, "torch, no NaN, no dead": plain_trl}
    runs["torch.compile, vectorised"] = torch.compile(vectorised, dynamic=False)
    yield case("4096 groups of 16", equal, runs, {"torch, vectorised": 5.0})
    uneven = torch.randint(2, 31, (4096,), generator=torch.Generator().manual_seed(1))
    yield case("4096 ragged groups", uneven, {"torch, index_add": ragged}, {})


if __name__ == "__main__":
    timing.main(__doc__, cases)
