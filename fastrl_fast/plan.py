"""What a run would do and need, from its config, data and rewards alone."""

import math
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from .accuracy import held_out_prompts
from .builtin import resolve_model
from .config import Config
from .data import PromptData
from .grading import empty_columns
from .memory import Memory, ModelSize, estimate_memory
from .method_config import STAGED
from .model import load_tokenizer
from .packing import ModelShape, microbatch_flops, microbatch_tower_flops, sharing_limit, to_train_group
from .rewards.registry import build
from .rules import require
from .savings import Passes, flop_sums
from .types import Group, Prompt, Rollout
from .vision import load_images, read_tower


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that was not started: what it reads, and what follows from that."""

    config: Config
    size: ModelSize
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    """All prompts of the data."""
    first: list[Prompt]
    """Those of the first step, in the run's order."""
    answer_column: str | None
    """Column of the data that rewards get as `answer`."""
    dropped: int
    held_out: list[Prompt]

    @classmethod
    def read(cls, config: Config) -> "Plan":
        """Raises ValueError for whatever the user can mend."""
        path = resolve_model(config.model.path)
        tokenizer = load_tokenizer(path, config.model)
        images = load_images(path, tokenizer, config.model, config.data)
        data = PromptData(config.data, tokenizer, seed=config.seed, images=images)
        held_out = held_out_prompts(config, tokenizer, images)
        prompts, first = data.first(len(data)), data.next_prompts(config.data.prompts_per_step)
        for checked in (prompts, held_out):
            _check_rewards(config, checked)
        size = _model_size(path, config)
        return cls(config, size, tokenizer, prompts, first, data.answer_column, data.dropped_overlong, held_out)

    @property
    def steps(self) -> int:
        return total_steps(self.config, prompts=len(self.prompts))

    @property
    def rollouts(self) -> int:
        """Rollouts of one step, in their first round."""
        return self.config.data.prompts_per_step * self.config.budget.group_size

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of the largest micro-batch: updates.tokens_per_microbatch, or all that a step can have."""
        config, budget = self.config, self.config.budget
        group = budget.max_group_size if budget.kind in (*STAGED, "knapsack") else budget.group_size
        row = max(self._row_tokens(length, group) for length in {len(prompt.token_ids) for prompt in self.prompts})
        return min(config.updates.tokens_per_microbatch, config.data.prompts_per_step * int(row))

    def _row_tokens(self, prompt: float, group: int) -> float:
        """Of a group of this size, its prompt of so many tokens included."""
        return prompt * self._copies(prompt, group) + group * self.config.rollout.max_completion_tokens

    def _copies(self, prompt: float, group: int) -> int:
        """How often the prompt of a group, of so many tokens, is computed before completions of full length."""
        longest = math.inf if self.config.updates.share_prompts else 0.0
        limit = sharing_limit(round(prompt), [self.config.rollout.max_completion_tokens] * group, longest)
        return 1 if limit else group

    def memory(self, ranks: int) -> Memory:
        """Of one rank, had no rollout been dropped and every completion its full length."""
        updates = self.config.updates
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts) / len(self.prompts)
        tokens = self.rollouts * (prompt + self.config.rollout.max_completion_tokens) / ranks / updates.minibatches
        if updates.rollouts_per_update is not None:
            tokens *= min(updates.rollouts_per_update / self.rollouts, 1.0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        several = tokens > updates.tokens_per_microbatch
        patches, step_patches = self._patches(prompt)
        return estimate_memory(
            self.size,
            self.config,
            ranks=ranks,
            several_microbatches=several,
            device=device,
            tokens=self.microbatch_tokens,
            decoded=self._decoded_tokens(ranks),
            patches=patches,
            step_patches=step_patches / ranks,
        )

    def _decoded_tokens(self, ranks: int) -> float:
        """What the rollouts of a rank, or its held-out ones, have when all are complete, each padded to the longest."""
        if self.config.budget.filter:
            return math.inf  # for prompts that were filtered out others are drawn, more than are missing
        rollouts = max(self.rollouts, len(self.held_out) * self.config.eval.samples)
        longest = max(len(prompt.token_ids) for prompt in (*self.prompts, *self.held_out))
        return math.ceil(rollouts / ranks) * (longest + self.config.rollout.max_completion_tokens)

    def _patches(self, prompt_tokens: float) -> tuple[float, float]:
        """Patches of a full micro-batch, at least those of the largest prompt, and of all micro-batches of a step."""
        counts = [sum(picture.patches for picture in prompt.pictures) for prompt in self.prompts]
        group, groups = self.config.budget.group_size, self.config.data.prompts_per_step
        fit = min(self.config.updates.tokens_per_microbatch / self._row_tokens(prompt_tokens, group), groups)
        patches = self._copies(prompt_tokens, group) * sum(counts) / len(counts)
        return max(fit * patches, *counts), groups * patches

    def flops(self) -> tuple[dict[str, float], float]:
        """FLOPs of a step by phase, had no rollout been dropped and every completion its full length, and the vision
        tower's part of them all."""
        config, size = self.config, self.size
        shape = ModelShape(
            parameters=size.layers * size.layer_parameters + size.hidden,
            layers=size.layers,
            hidden=size.queries,
            head=size.table,
            tower=size.tower,
        )
        long = math.inf if config.updates.share_prompts else 0.0
        completion = Rollout([0] * config.rollout.max_completion_tokens, [], "length")
        groups = [Group(prompt, [completion] * config.budget.group_size) for prompt in self.first]
        passes = Passes.of(config, updates=config.updates.minibatches)
        forward = tower = 0.0
        for group in groups:
            sequences = to_train_group(group, longest_shared=long).sequences
            forward += microbatch_flops(sequences, shape)
            tower += microbatch_tower_flops(sequences, shape)
        sums = flop_sums(groups, shape, passes, forward=forward, tower=tower, longest_shared=long)
        phases = ("generation", "old", "reference", "update")
        images = sum(shape.tower_flops(group.prompt.pictures) for group in groups)
        images += sum(passes.cost(phase, 0.0, tower) for phase in phases[1:])
        return {phase: sums[f"flops/{phase}"] for phase in phases}, images


def total_steps(config: Config, *, prompts: int) -> int:
    """Steps of a whole run over this many prompts. Raises ValueError where one beyond them is to be profiled."""
    steps = config.max_steps or config.epochs * prompts // config.data.prompts_per_step
    last = max(config.log.profile_steps, default=0)
    require(last <= steps, "log.profile_steps", f"steps of this run, 1 to {steps}", config.log.profile_steps)
    return steps


def _check_rewards(config: Config, prompts: list[Prompt]) -> None:
    """Load each reward here, and look for the columns that it needs. Raises ValueError."""
    if not prompts:
        return
    for term in config.reward.terms:
        try:
            build(term.name).columns(empty_columns(prompts))
        except ValueError as error:
            raise ValueError(f"reward.functions: {error}") from error


def _model_size(path: str, config: Config) -> ModelSize:
    """From the model's configuration alone: no weight is read."""
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
        return ModelSize.of(settings, read_tower(settings))
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: cannot read {path}: {' '.join(str(error).split())}") from error
