"""Kept rollouts to a packed batch: no padding, shared prompts once, and what a forward pass over them costs."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal

import torch
from torch import Tensor

from .positions import going_on, prompt_positions
from .prune import UNGRADED, counted
from .tower import TowerShape
from .types import Group, PackedBatch, Picture, Rollout

LEAST_SAVED = 0.1
"""Rollouts share a prompt where that spares at least this part of their tokens: attention in parts that are merged
costs up to an eighth of a small model's update (most in groups of two), and below a tenth was not always won back."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One rollout as the update needs it; those of one `group` share a prompt that a row needs to hold only once."""

    prompt_ids: list[int]
    completion_ids: list[int]
    rollout_logprobs: list[float]
    advantage: float
    weight: float
    group: int | None = None
    pictures: tuple[Picture, ...] = ()

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
    """What the cost of a sequence depends on: parameters outside the embedding, layers, width of the attention (heads x
    head size), weights of the head, which is paid for completion tokens only, and what reads images."""

    parameters: int
    layers: int
    hidden: int
    head: int = 0
    tower: TowerShape | None = None

    def forward_flops(self, length: int) -> float:
        """2 P L for the weights and 2 x layers x hidden x L^2 for causal attention (scores and values, half of
        them)."""
        return 2.0 * self.parameters * length + 2.0 * self.layers * self.hidden * length**2

    def group_flops(self, prompt: int, completions: list[int]) -> float:
        """One forward pass over completions of these lengths and their prompt, which is computed once."""
        return self.forward_flops(prompt) + sum(self.completion_flops(prompt, length) for length in completions)

    def completion_flops(self, prompt: int, length: int) -> float:
        """What a completion adds to the forward pass over its prompt."""
        return self.forward_flops(prompt + length) - self.forward_flops(prompt) + 2.0 * self.head * length

    def tower_flops(self, pictures: abc.Sequence[Picture]) -> float:
        """One forward pass of the vision tower over these images."""
        return sum(self.tower.forward_flops(picture.grid) for picture in pictures) if self.tower else 0.0


def to_train_group(group: Group, *, divisor: Literal["kept", "all"] = "kept", longest_shared: float = 0) -> TrainGroup:
    """Keep of a pruned group what the update needs.

    With the divisor `all` every graded rollout counts in it, by its group's weight. Rollouts of at most
    `longest_shared` tokens, prompt and completion, may share their prompt, and do where `sharing_limit` says so.
    """
    prompt = group.prompt.token_ids
    limit = sharing_limit(len(prompt), [len(r.completion_ids) for r in group.rollouts if r.kept], longest_shared)

    def sequence(r: Rollout) -> Sequence:
        number = group.number if len(prompt) + len(r.completion_ids) <= limit else None
        pictures = group.prompt.pictures
        return Sequence(prompt, r.completion_ids, r.rollout_logprobs, r.advantage, r.weight, number, pictures)

    sequences = [sequence(r) for r in group.rollouts if r.kept]
    if divisor == "all":
        in_loss = [(group.weight, len(r.completion_ids)) for r in group.rollouts if r.drop_reason != UNGRADED]
    else:
        in_loss = [(r.weight, len(r.completion_ids)) for r in group.rollouts if counted(r)]
    return TrainGroup(
        sequences,
        loss_tokens=sum(weight * length for weight, length in in_loss),
        loss_sequences=sum(weight for weight, _ in in_loss),
    )


def sharing_limit(prompt: int, completions: list[int], longest_shared: float) -> float:
    """Tokens of prompt and completion up to which rollouts with completions of these lengths share a prompt of this
    one: `longest_shared`, or 0 where that would save less than LEAST_SAVED of their tokens."""
    wholes = [prompt + length for length in completions if prompt + length <= longest_shared]
    return longest_shared if prompt * (len(wholes) - 1) >= LEAST_SAVED * sum(wholes) else 0


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


def shared_runs(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Neighbours of one group together, as `pack` lays them down; all others alone."""
    keyed = groupby(enumerate(sequences), key=lambda pair: (pair[1].group, pair[0] if pair[1].group is None else None))
    return [[sequence for _, sequence in run] for _, run in keyed]


def microbatch_flops(sequences: list[Sequence], shape: ModelShape) -> float:
    """One forward pass over a micro-batch of these sequences, their images included."""
    runs = shared_runs(sequences)
    language = sum(shape.group_flops(len(run[0].prompt_ids), [len(s.completion_ids) for s in run]) for run in runs)
    return language + microbatch_tower_flops(sequences, shape)


def microbatch_tower_flops(sequences: list[Sequence], shape: ModelShape) -> float:
    """The vision tower's part of `microbatch_flops`."""
    return sum(shape.tower_flops(run[0].pictures) for run in shared_runs(sequences))


@dataclass(slots=True)
class Row:
    """The tokens of a micro-batch as they are laid down; `pieces` are lengths, `positions` [3, length] each."""

    input_ids: list[int]
    positions: list[Tensor]
    pieces: list[int]
    prefixes: list[tuple[int, int, int]]
    target_rows: list[int]
    pictures: list[Picture]

    def add(self, tokens: list[int], *positions: Tensor) -> None:
        self.positions += positions
        self.input_ids += tokens
        self.pieces.append(len(tokens))

    def add_pictures(self, pictures: tuple[Picture, ...], start: int) -> None:
        """Those of a prompt that begins at `start`."""
        self.pictures += [replace(picture, start=start + picture.start) for picture in pictures]

    def add_targets(self, first_row: int, completion_start: int, count: int) -> None:
        """The first target is read from the prompt's last row, the others from the completion's own."""
        if count > 0:
            self.target_rows.append(first_row)
            self.target_rows += range(completion_start, completion_start + count - 1)


PixelReader = Callable[[abc.Sequence[Picture]], Tensor]
"""Pictures to pixel values [patches, values of a patch]."""


def pack(sequences: list[Sequence], read: PixelReader | None = None) -> PackedBatch:
    """Lay sequences back to back, neighbours of one group behind one prompt; an empty list gives the dummy batch that
    adds zero loss.

    The target of hidden row t is the token at t + 1, so the first completion token is predicted by the last prompt row,
    which all completions of a group share. `read` gives the pixels of the prompts' images, once for
    each prompt laid down.
    """
    sequences = sequences or [Sequence([0], [], [], 0.0, 0.0)]
    row = Row([], [], [], [], [], [])
    for run in shared_runs(sequences):
        prompt, start = run[0].prompt_ids, len(row.input_ids)
        assert prompt, "the first completion token needs a prompt token to be predicted from"
        middle = start + len(prompt)
        positions = prompt_positions(len(prompt), run[0].pictures)
        row.add_pictures(run[0].pictures, start)
        if len(run) == 1:
            completion = run[0].completion_ids
            row.add(prompt + completion, positions, going_on(positions, len(completion)))
            row.add_targets(middle - 1, middle, len(completion))
            continue
        row.add(prompt, positions)
        for sequence in run:
            assert sequence.prompt_ids == prompt, "the rollouts of a group have one prompt"
            row.add_targets(middle - 1, len(row.input_ids), len(sequence.completion_ids))
            row.add(sequence.completion_ids, going_on(positions, len(sequence.completion_ids)))
        row.prefixes.append((start, middle, len(row.input_ids)))
    batch = _to_batch(row, sequences)
    if row.pictures:
        assert read is not None, "images are read by the model's own reader"
        batch.pictures = tuple(row.pictures)
        batch.pixel_values = read(row.pictures)
        batch.image_grid_thw = torch.tensor([picture.grid for picture in row.pictures])
    return batch


def _to_batch(row: Row, sequences: list[Sequence]) -> PackedBatch:
    for s in sequences:
        assert len(s.rollout_logprobs) == len(s.completion_ids), "every completion token has a rollout logprob"
    positions = torch.cat(row.positions, dim=1)
    return PackedBatch(
        input_ids=torch.tensor(row.input_ids, dtype=torch.int64),
        position_ids=positions if row.pictures else positions[0],
        cu_seqlens=torch.tensor([0, *row.pieces], dtype=torch.int64).cumsum(0),
        prefixes=torch.tensor(row.prefixes, dtype=torch.int64).view(-1, 3),
        targets=torch.tensor([t for s in sequences for t in s.completion_ids], dtype=torch.int64),
        row_index=torch.tensor(row.target_rows, dtype=torch.int64),
        cu_targets=torch.tensor([0, *(len(s.completion_ids) for s in sequences)], dtype=torch.int64).cumsum(0),
        advantages=torch.tensor([s.advantage for s in sequences], dtype=torch.float32),
        weights=torch.tensor([s.weight for s in sequences], dtype=torch.float32),
        rollout_logprobs=torch.tensor([x for s in sequences for x in s.rollout_logprobs], dtype=torch.float32),
    )
