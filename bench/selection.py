"""select_diverse and choose_rollouts against Python sets and vectorised PyTorch."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import timing
import torch
from torch import Tensor

from fastrl_fast.ops import choose_rollouts, gradient_sketch, select_diverse

VOCABULARY = 5000
"""Distinct tokens that the answers to one prompt are drawn from, by a Zipf law as text has."""


def answers(groups: int, size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    law = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    tokens = torch.multinomial(law, groups * size * length, replacement=True, generator=generator)
    return tokens, torch.arange(0, groups * size * length + 1, length), torch.arange(0, groups * size + 1, size)


def python_sets(tokens: Tensor, cu_seqlens: Tensor, cu_groups: Tensor, classes: Tensor, *, tau: float) -> list[bool]:
    """MDAP as published code has it: a set per answer, an intersection per pair."""
    ids, cuts, borders, labels = tokens.tolist(), cu_seqlens.tolist(), cu_groups.tolist(), classes.tolist()
    sets = [set(ids[a:b]) for a, b in pairwise(cuts)]
    kept = [False] * len(sets)
    for begin, end in pairwise(borders):
        for i in range(begin, end):
            others = [j for j in range(begin, i) if kept[j] and labels[j] == labels[i]]
            kept[i] = all(1 - len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= tau for j in others)
    return kept


def diverse(setting: timing.Setting, groups: int, size: int, length: int, tau: float) -> timing.Case:
    here = (*answers(groups, size, length), torch.arange(groups * size) % 2)
    inputs = [x.to(setting.device) for x in here]

    def check(results: dict[str, Any]) -> None:
        kept = results["ours"][0].tolist()
        assert kept == results["python sets"] and 0 < sum(kept) < len(kept)

    return timing.Case(
        name=f"mdap {groups} groups of {size} x {length}",
        runs={"ours": lambda: select_diverse(*inputs, tau=tau), "python sets": lambda: python_sets(*here, tau=tau)},
        check=check,
        wanted={"python sets": 20.0},
        bytes=here[0].nbytes,
    )


def greedy_dpp(vectors: Tensor, advantages: Tensor, size: int, k: int) -> Tensor:
    """Batched incremental Cholesky over groups of one size, in float64."""
    v = torch.nn.functional.normalize(vectors.double(), dim=1).view(-1, size, vectors.shape[1])
    a = advantages.double().view(-1, size, 1)
    kernel = (v @ v.transpose(1, 2)) * a * a.transpose(1, 2)
    left, groups = kernel.diagonal(dim1=1, dim2=2).clone(), torch.arange(len(kernel), device=a.device)
    rows: list[Tensor] = []
    kept = torch.zeros(len(kernel), size, dtype=torch.bool, device=a.device)
    for _ in range(k):
        i = left.masked_fill(kept, -1).argmax(1)
        row = kernel[groups, i]
        for earlier in rows:
            row = row - earlier[groups, i][:, None] * earlier
        row = row / left[groups, i].sqrt()[:, None]
        rows.append(row)
        left = left - row.square()
        kept[groups, i] = True
    return kept.flatten()


def chosen(setting: timing.Setting, rule: str, groups: int, size: int, k: int) -> timing.Case:
    generator = torch.Generator().manual_seed(1)
    tokens, cu_seqlens, cu_groups, logprobs, advantages = (
        x.to(setting.device)
        for x in (
            *answers(groups, size, 256),
            -torch.rand(groups * size * 256, generator=generator),
            torch.randn(groups * size, generator=generator),
        )
    )
    sketch = gradient_sketch(tokens, logprobs, cu_seqlens)
    runs: dict[str, timing.Run] = {"ours": lambda: choose_rollouts(sketch, advantages, cu_groups, rule=rule, k=k)}
    if rule == "dpp":
        runs["torch, batched"] = lambda: greedy_dpp(sketch, advantages, size, k)
    runs["ours, the sketch"] = lambda: gradient_sketch(tokens, logprobs, cu_seqlens)

    def check(results: dict[str, Any]) -> None:
        if rule == "dpp":
            assert float((results["ours"].kept != results["torch, batched"]).double().mean()) < 0.01

    return timing.Case(name=f"{rule} {k} of {size}, {groups} groups", runs=runs, check=check, wanted={})


def cases(setting: timing.Setting) -> Iterable[timing.Case]:
    if setting.quick:
        yield diverse(setting, 4, 8, 200, 0.85)
        for rule in ("maxmin", "dpp", "match"):
            yield chosen(setting, rule, 4, 8, 4)
        return
    yield diverse(setting, 256, 8, 1024, 0.8)
    yield diverse(setting, 256 if setting.on_gpu else 64, 64, 256, 0.85)
    for rule in ("maxmin", "dpp", "match"):
        yield chosen(setting, rule, 256, 8, 4)
    yield chosen(setting, "dpp", 256, 64, 16)
    yield chosen(setting, "match", 256, 64, 16)


if __name__ == "__main__":
    timing.main(__doc__, cases)
