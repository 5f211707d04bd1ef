"""Kept rollouts to micro-batches: no padding, balanced over ranks, the same number on every rank."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch

from .prune import UNGRADED, counted
from .types import Group, PackedBatch


@dataclass(frozen=True, slots=True)
class Sequence:
    """One rollout as the update needs it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    rollout_logprobs: list[float]
    advantage: float
    weight: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """What is left of one group: sequences to train on, and its share of the loss's divisor.

    `loss_tokens` and `loss_sequences` are weighted sums over all rollouts that count in the loss, including those
    that were left out only because their gradient is zero: leaving them out must not change the update.
    """

    sequences: list[Sequence]
    loss_tokens: float
    loss_sequences: float


@dataclass(frozen=True, slots=True)
class Divisor:
    """Sums over all ranks and micro-batches of one update that its loss is divided by."""

    loss_tokens: float
    loss_sequences: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost of a sequence depends on: parameters outside the embedding, layers, hidden size."""

    parameters: int
    layers: int
    hidden: int

    def forward_flops(self, length: int) -> float:
        """2 P L for the weights and 2 x layers x hidden x L^2 for causal attention (scores and values, half of
        them)."""
        return 2.0 * self.parameters * length + 2.0 * self.layers * self.hidden * length**2


def to_train_group(group: Group, *, divisor: Literal["kept", "all"] = "kept") -> TrainGroup:
    """Keep of a pruned group what the update needs; with the divisor `all` every graded rollout counts in it, by its
    group's weight."""
    sequences = [
        Sequence(group.prompt.token_ids, r.completion_ids, r.rollout_logprobs, r.advantage, r.weight)
        for r in group.rollouts
        if r.kept
    ]
    if divisor == "all":
        in_loss = [(group.weight, len(r.completion_ids)) for r in group.rollouts if r.drop_reason != UNGRADED]
    else:
        in_loss = [(r.weight, len(r.completion_ids)) for r in group.rollouts if counted(r)]
    return TrainGroup(
        sequences,
        loss_tokens=sum(weight * length for weight, length in in_loss),
        loss_sequences=sum(weight for weight, _ in in_loss),
    )


def divisor(groups: list[TrainGroup]) -> Divisor:
    return Divisor(sum(g.loss_tokens for g in groups), sum(g.loss_sequences for g in groups))


def split_minibatches(groups: list[TrainGroup], count: int) -> list[list[TrainGroup]]:
    """Cut the groups of a step into `count` runs whose sizes differ by at most one; groups stay whole."""
    size, longer = divmod(len(groups), count)
    borders = [i * size + min(i, longer) for i in range(count + 1)]
    return [groups[a:b] for a, b in pairwise(borders)]


def split_by_rollouts(groups: list[TrainGroup], rollouts: int) -> list[list[TrainGroup]]:
    """Cut the groups of a step into as many runs as it needs for about `rollouts` kept rollouts each; groups stay
    whole."""
    ends = list(accumulate(len(group.sequences) for group in groups))
    total = ends[-1] if ends else 0
    count = max(1, -(-total // rollouts))
    # A group goes where its middle falls; with fewer groups than runs some runs are empty.
    runs: list[list[TrainGroup]] = [[] for _ in range(count)]
    for group, end in zip(groups, ends, strict=True):
        middle = end - len(group.sequences) / 2
        runs[min(count - 1, int(middle * count / max(1, total)))].append(group)
    return [run for run in runs if run] or [[]]


def plan_microbatches(
    sequences: list[Sequence], *, ranks: int, tokens_per_microbatch: int, shape: ModelShape
) -> list[list[list[int]]]:
    """Return for each rank its micro-batches as lists of indices into `sequences`, the same number for every rank.

    Sequences go to the rank with the least estimated FLOPs so far, costliest first; inside a rank they are packed
    first-fit by falling length into micro-batches of at most `tokens_per_microbatch` tokens (a longer sequence has
    one of its own). Ranks with fewer get empty lists. The plan is a pure function of its arguments, so all ranks
    agree without talking.
    """
    by_cost = sorted(range(len(sequences)), key=lambda i: (-shape.forward_flops(len(sequences[i])), i))
    load = [0.0] * ranks
    plans: list[list[list[int]]] = [[] for _ in range(ranks)]
    room: list[list[int]] = [[] for _ in range(ranks)]
    for index in by_cost:
        length = len(sequences[index])
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += shape.forward_flops(length)
        fits = next((b for b, free in enumerate(room[rank]) if free >= length), None)
        if fits is None:
            plans[rank].append([index])
            room[rank].append(tokens_per_microbatch - length)
        else:
            plans[rank][fits].append(index)
            room[rank][fits] -= length
    count = max(len(plan) for plan in plans)
    return [plan + [[]] * (count - len(plan)) for plan in plans]


def pack(sequences: list[Sequence]) -> PackedBatch:
    """Lay sequences back to back; an empty list gives the dummy batch that adds zero loss.

    The target of hidden row t is the token at t + 1, so the first completion token is predicted by the last prompt row.
    """
    if not sequences:
        sequences = [Sequence([0], [], [], 0.0, 0.0)]
    input_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for s in sequences:
        assert s.prompt_ids, "the first completion token needs a prompt token to be predicted from"
        assert len(s.rollout_logprobs) == len(s.completion_ids), "every completion token has a rollout logprob"
        first_target = len(input_ids) + len(s.prompt_ids) - 1
        rows += range(first_target, first_target + len(s.completion_ids))
        positions += range(len(s))
        input_ids += s.prompt_ids
        input_ids += s.completion_ids
    return PackedBatch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        position_ids=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *map(len, sequences)], dtype=torch.int64).cumsum(0),
        targets=torch.tensor([t for s in sequences for t in s.completion_ids], dtype=torch.int64),
        row_index=torch.tensor(rows, dtype=torch.int64),
        cu_targets=torch.tensor([0, *(len(s.completion_ids) for s in sequences)], dtype=torch.int64).cumsum(0),
        advantages=torch.tensor([s.advantage for s in sequences], dtype=torch.float32),
        weights=torch.tensor([s.weight for s in sequences], dtype=torch.float32),
        rollout_logprobs=torch.tensor([x for s in sequences for x in s.rollout_logprobs], dtype=torch.float32),
    )
