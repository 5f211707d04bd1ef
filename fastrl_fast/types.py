"""The data that flows through one step: prompts, their rollouts, and the packed batches made of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Picture:
    """One image of a prompt, as the file that it came in: decoding it again costs milliseconds, its pixels a hundred
    times the memory.

    `grid` counts patches (frames, rows, columns), of which merge x merge make a token; the tokens stand in the prompt's
    `token_ids`, or in a row that it is part of, from `start` on.
    """

    data: bytes
    grid: tuple[int, int, int]
    merge: int
    start: int

    @property
    def patches(self) -> int:
        return math.prod(self.grid)

    @property
    def tokens(self) -> int:
        return self.patches // self.merge**2


class UnfitImage(ValueError):
    """The file of an image is damaged, or it has a shape that the model cannot take."""


class ImageReader(Protocol):
    """What prompts, sampling and updates ask of a model's way to read images."""

    @property
    def placeholder(self) -> str:
        """Stands for one image in a prompt's text."""
        ...

    def place(self, token_ids: list[int], images: list[bytes]) -> tuple[list[int], tuple[Picture, ...]]:
        """The prompt with as many tokens for each image as it takes. Raises UnfitImage for an image that cannot be
        read, ValueError for one too many or too few for the placeholders."""
        ...

    def pixel_values(self, pictures: Sequence[Picture]) -> Tensor:
        """What the vision tower reads: [patches, values of a patch] float32, image after image."""
        ...


@dataclass(slots=True, frozen=True)
class Prompt:
    """What the model is asked.

    `id` is stable over runs and resumes, `token_ids` is the templated prompt, `text` what the row said (a string, or
    the list of chat messages when the row held one), `columns` every other column of the row, handed to the rewards
    by name, `pictures` its images in the order of their tokens.
    """

    id: str
    token_ids: list[int]
    text: str | list[dict[str, str]]
    columns: dict[str, Any]
    pictures: tuple[Picture, ...] = ()


@dataclass(slots=True)
class Rollout:
    """One completion of a prompt, as sampled, then as graded, then as decided by pruning.

    `rollout_logprobs[t]` is the log-probability of `completion_ids[t]` in the distribution it was sampled from.
    `reward` is NaN until graded and stays NaN where it could not be graded. `right` is what the reward function of
    `reward.right` said. `drop_reason` is empty for a kept rollout.
    `weight` multiplies the rollout's whole loss; rules that make it stand for dropped ones set it above one.

    Example: group of two, rewards 1 and 0 -> advantages +0.707 and -0.707, both kept with weight 1.
    """

    completion_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: str
    text: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float = math.nan
    right: bool = False
    advantage: float = 0.0
    weight: float = 1.0
    drop_reason: str = ""

    @property
    def kept(self) -> bool:
        return not self.drop_reason

    @property
    def graded(self) -> bool:
        """Whether there is something that could be reinforced, and a reward for it."""
        return bool(self.completion_ids) and not math.isnan(self.reward)


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt, the `number`th of the step over all ranks; `dead` when all graded rewards are equal,
    so that comparing them gives nothing.

    `weight` is 1 / the chance with which the prompt was sampled where a budget draws lots, else 1. `fidelity` is the
    cosine between the gradients of the whole group and of its kept rollouts, as their sketches have it.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    dead: bool = False
    number: int = 0
    weight: float = 1.0
    fidelity: float = 1.0


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch: S sequences back to back, T tokens, N targets (every completion token is one), no padding.

    A prompt that several sequences share is there once, before their completions, whose positions go on from its end.
    input_ids, position_ids [T] int64; cu_seqlens [M+1] int64 borders in T of the M pieces that attend to themselves:
    whole sequences, shared prompts, completions behind them; prefixes [K, 3] int64 for each shared prompt where it
    starts, where it ends and where its last completion ends;
    targets [N] int64 the completion tokens; row_index [N] int64 the hidden row that predicts each target;
    cu_targets [S+1] int64 borders of the sequences in N; advantages, weights [S] float32;
    rollout_logprobs [N] float32; old_logprobs, ref_logprobs [N] float32 once they are known.
    With images: position_ids [3, T] (frame, row and column), pixel_values [patches, values of a patch] float32,
    image_grid_thw [images, 3] int64, and `pictures` in the order of their tokens, `start` counting in T.
    Example: prompt [7, 8] with completions [1] and [2, 3] -> input_ids [7, 8, 1, 2, 3], position_ids [0, 1, 2, 2, 3],
    cu_seqlens [0, 2, 3, 5], prefixes [[0, 2, 5]], targets [1, 2, 3], row_index [1, 1, 3], cu_targets [0, 1, 3].
    An empty batch (S = 1 dummy token, N = 0) keeps a rank in step with the others and adds zero loss.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    prefixes: Tensor
    targets: Tensor
    row_index: Tensor
    cu_targets: Tensor
    advantages: Tensor
    weights: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    pictures: tuple[Picture, ...] = ()

    def to(self, device: torch.device) -> "PackedBatch":
        fields = {name: getattr(self, name) for name in self.__slots__}
        moved: dict[str, Any] = {
            n: t.to(device, non_blocking=True) if isinstance(t, Tensor) else t for n, t in fields.items()
        }
        return PackedBatch(**moved)
