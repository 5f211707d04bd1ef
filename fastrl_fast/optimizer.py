"""AdamW and its learning rate as a function of the step alone."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from .config import OptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in one pass over each tensor."""
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """Rate at `step` = 0, 1, ...: linear warm-up from lr / warmup_steps, then constant, linear or cosine down to 0.

    A pure function of the step, so that a resumed run needs no scheduler state.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr
