"""Which rollouts of a group are different enough to be worth a gradient."""

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check, cuda_stream, kernels, library

RULES = ("mdap", "mdap_seed")
MILLION = 1_000_000

library.define(
    "select_diverse(Tensor token_ids, Tensor cu_seqlens, Tensor cu_group_sizes, Tensor classes, bool seed_only, "
    "int tau_millionths, int ngram) -> (Tensor, Tensor)"
)


def select_diverse(
    token_ids: Tensor,
    cu_seqlens: Tensor,
    cu_group_sizes: Tensor,
    classes: Tensor,
    *,
    rule: str = "mdap",
    tau: float = 0.8,
    ngram: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return which rollouts to keep, walking each class of each group in index order.

    S_i is the set of distinct n-grams of completion i, J(i, j) = |S_i & S_j| / |S_i | S_j| (1 for two empty sets).
    `mdap` (the paper) keeps i unless a kept member of its class is nearer than tau: 1 - J < tau.
    `mdap_seed` (the authors' code) keeps i unless it is near the first member of its class: J >= 1 - tau.
    The first member of a class is always kept. Exact: n-grams are compared whole and J as a fraction, with tau rounded
    to millionths; the result does not depend on machine, device or thread count.

    Args:
        token_ids: [T] int64, completions back to back, on the CPU or on CUDA (T < 2^30 there) like all inputs.
        cu_seqlens: [N + 1] int64, offsets of the completions.
        cu_group_sizes: [G + 1] int64, offsets of the groups into the completions.
        classes: [N] int64, rollouts of one group with equal labels form a class; below 0 is not eligible.
        rule: one of `RULES`.
        tau: distance in [0, 1] from which two completions count as different.
        ngram: >= 1.

    Returns:
        kept [N] bool; representative [N] int64: the rollout itself where kept, else the kept member of its class with
        the largest J (lowest index on ties), -1 where not eligible.

    Raises:
        ValueError: unknown rule, tau or ngram out of range, tensors that do not fit or are not on one device; on the
            CPU also offsets that do not cut the tokens into completions and these into groups.

    Source: FastRL, arXiv 2609.36932; algorithms.md 1.2 and 1.7.
    """
    check(rule in RULES, f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    check(0 <= tau <= 1, f"tau must lie in [0, 1], not {tau}")
    check(ngram >= 1, f"ngram must be >= 1, not {ngram}")
    _check_tensors(token_ids, cu_seqlens, cu_group_sizes, classes)
    kept, representative = torch.ops.fastrl_fast.select_diverse(
        token_ids, cu_seqlens, cu_group_sizes, classes, rule == "mdap_seed", round(tau * MILLION), ngram
    )
    return kept, representative


def _check_tensors(token_ids: Tensor, cu_seqlens: Tensor, cu_group_sizes: Tensor, classes: Tensor) -> None:
    named = {"token_ids": token_ids, "cu_seqlens": cu_seqlens, "cu_group_sizes": cu_group_sizes, "classes": classes}
    for name, tensor in named.items():
        check(
            tensor.ndim == 1 and tensor.dtype == torch.int64 and tensor.device == token_ids.device,
            f"{name} must be one-dimensional int64 on the device of token_ids, "
            f"not {list(tensor.shape)} {tensor.dtype} {tensor.device}",
        )
    for name in ("cu_seqlens", "cu_group_sizes"):
        check(named[name].shape[0] >= 1, f"{name} must hold at least the 0 it starts with")
    rollouts = cu_seqlens.shape[0] - 1
    check(classes.shape[0] == rollouts, f"classes must be one per rollout ({rollouts}), not {classes.shape[0]}")


@torch.library.register_fake("fastrl_fast::select_diverse", lib=library)
def _fake(
    token_ids: Tensor,
    cu_seqlens: Tensor,
    cu_group_sizes: Tensor,
    classes: Tensor,
    seed_only: bool,
    tau: int,
    ngram: int,
) -> tuple[Tensor, Tensor]:
    return classes.new_empty(classes.shape, dtype=torch.bool), torch.empty_like(classes)


def _forward(
    token_ids: Tensor,
    cu_seqlens: Tensor,
    cu_group_sizes: Tensor,
    classes: Tensor,
    seed_only: bool,
    tau: int,
    ngram: int,
) -> tuple[Tensor, Tensor]:
    token_ids, cu_seqlens = token_ids.contiguous(), cu_seqlens.contiguous()
    cu_group_sizes, classes = cu_group_sizes.contiguous(), classes.contiguous()
    kept, representative = torch.empty_like(classes, dtype=torch.bool), torch.empty_like(classes)
    tokens, rollouts, groups = token_ids.shape[0], classes.shape[0], cu_group_sizes.shape[0] - 1
    grouped = (cu_group_sizes.data_ptr(), groups, classes.data_ptr(), tau, ngram, seed_only)
    results = (kept.data_ptr(), representative.data_ptr())
    if token_ids.is_cuda:
        with cuda_stream(token_ids) as stream:
            workspace = token_ids.new_empty(kernels.select_diverse_workspace(tokens, rollouts), dtype=torch.int32)
            kernels.select_diverse_cuda(
                token_ids.data_ptr(), tokens, cu_seqlens.data_ptr(), *grouped, workspace.data_ptr(), *results, stream
            )
    else:
        kernels.select_diverse_cpu(
            token_ids.data_ptr(), tokens, cu_seqlens.data_ptr(), rollouts, *grouped, *results, torch.get_num_threads()
        )
    return kept, representative


library.impl("select_diverse", _forward, "CPU")
library.impl("select_diverse", _forward, "CUDA")
