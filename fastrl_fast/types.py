"""The data that flows through one step: prompts, their rollouts, and the packed batches made of them."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Prompt:
    """What the model is asked.

    `id` is stable over runs and resumes, `token_ids` is the templated prompt, `text` what the row said (a string, or
    the list of chat messages when the row held one), `columns` every other column of the row, handed to the rewards
    by name.
    """

    id: str
    token_ids: list[int]
    text: str | list[dict[str, str]]
    columns: dict[str, Any]


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

    def to(self, device: torch.device) -> "PackedBatch":
        moved = (getattr(self, name) for name in self.__slots__)
        return PackedBatch(*(t.to(device, non_blocking=True) if isinstance(t, Tensor) else t for t in moved))
