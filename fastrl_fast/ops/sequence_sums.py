"""Sums of logprobs over each sequence of a packed batch."""

import torch
from torch import Tensor

from fastrl_fast.ops._lib import check


def sequence_sums(logprobs: Tensor, cu_targets: Tensor, *, old_logprobs: Tensor | None = None) -> Tensor:
    """Return sum logprob, sum (logprob - old) and the number of tokens of each sequence, [S, 3] float64.

    The mean log ratio of GSPO is column 1 over column 2; e^column 1 is the importance weight of a whole sequence.
    Differences are taken in float64 and added in token order, one sequence at a time, so the result depends neither on
    the thread count nor on what else is in the batch. Differentiable in `logprobs`.

    Args:
        logprobs: [N] float.
        cu_targets: [S + 1] int64, offsets of the sequences into `logprobs`.
        old_logprobs: [N]; None = the detached logprobs themselves, column 1 is 0.

    Raises:
        ValueError: tensors that do not fit.
    """
    check(
        logprobs.ndim == 1 and logprobs.is_floating_point(),
        f"logprobs must be [N] and float, not {list(logprobs.shape)} {logprobs.dtype}",
    )
    check(
        cu_targets.ndim == 1 and cu_targets.shape[0] >= 1 and cu_targets.dtype == torch.int64,
        f"cu_targets must be [S + 1] int64, not {list(cu_targets.shape)} {cu_targets.dtype}",
    )
    check(
        old_logprobs is None or old_logprobs.shape == logprobs.shape,
        f"old_logprobs must be one per token ({logprobs.shape[0]}), "
        f"not {None if old_logprobs is None else list(old_logprobs.shape)}",
    )
    new = logprobs.double()
    old = new.detach() if old_logprobs is None else old_logprobs.double()
    lengths = cu_targets.diff()
    columns = torch.stack([new, new - old], dim=1)
    if lengths.shape[0] == 0:  # segment_reduce wants a segment
        return torch.cat([columns[:0], columns.new_zeros(0, 1)], dim=1)
    sums = torch.segment_reduce(columns, "sum", lengths=lengths, axis=0, initial=0.0)
    return torch.cat([sums, lengths[:, None].to(sums.dtype)], dim=1)
