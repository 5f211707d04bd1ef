"""The least an update can cost: its multiplications at the rate of this machine's own sgemm."""

import math
from collections.abc import Iterator

import torch

from fastrl_fast.memory import ModelSize
from fastrl_fast.packing import sharing_limit
from fastrl_fast.types import Group

SGEMM = 1536
"""Side of the square matrices whose product sets the rate."""
SGEMM_FLOPS = 2.0 * SGEMM**3


def sgemm() -> torch.Tensor:
    return torch.mm(_SQUARE, _SQUARE, out=_OUT)


_SQUARE = torch.randn(SGEMM, SGEMM, generator=torch.Generator().manual_seed(0))
_OUT = torch.empty_like(_SQUARE)


def update_flops(size: ModelSize, groups: list[Group], *, shared: bool) -> float:
    """FLOPs of forward and backward over the kept rollouts: three times the forward pass.

    2 per parameter of the layers' matrices and token; `attention_flops`; 2 x vocabulary x hidden per completion token.
    `shared` counts the prompt of a group once where it is shared.
    """
    tokens = targets = 0.0
    for prompt, lengths, times in _kept(groups, shared):
        tokens += times * prompt + sum(lengths)
        targets += sum(lengths)
    matrices = size.layers * (size.layer_parameters - 2 * size.hidden)
    return 3 * (2 * matrices * tokens + 2 * size.table * targets) + attention_flops(size, groups, shared=shared)


def attention_flops(size: ModelSize, groups: list[Group], *, shared: bool) -> float:
    """Of those the attention's: 4 x queries x layers per pair of positions that attend to each other, three times."""
    pairs = 0.0
    for prompt, lengths, times in _kept(groups, shared):
        pairs += times * prompt**2 / 2 + sum(n * prompt + n**2 / 2 for n in lengths)
    return 3 * 4 * size.queries * size.layers * pairs


def _kept(groups: list[Group], shared: bool) -> Iterator[tuple[int, list[int], int]]:
    """Of each group the prompt's tokens, those of the kept completions, and how often the prompt is computed."""
    for group in groups:
        prompt, lengths = len(group.prompt.token_ids), [len(r.completion_ids) for r in group.rollouts if r.kept]
        yield prompt, lengths, 1 if shared and sharing_limit(prompt, lengths, math.inf) else len(lengths)
