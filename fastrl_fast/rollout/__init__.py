"""Sampling of completions: the `Sampler` protocol and `build_sampler`, which picks the engine that the config names."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import RolloutConfig
from ..types import Group, ImageReader, Prompt
from .local import LocalSampler

__all__ = ["LocalSampler", "Sampler", "build_sampler"]


class Sampler(Protocol):
    """What the trainer and the evaluation ask of an engine."""

    def sample(
        self,
        prompts: list[Prompt],
        group_sizes: list[int],
        *,
        seed: int,
        step: int,
        first_index: int = 0,
        temperature: float | None = None,
        finished: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """One group per prompt, of the size asked for; `temperature` None means the config's, 0
        the likeliest token each time. `finished` is told each group once its last rollout is there, in any order.

        A completion is a function of the weights, `seed`, `step`, the prompt and its index in the group, which counts
        from `first_index`: asking for more of a group later goes on where the first call ended.
        """
        ...

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Takes over full (unsharded) tensors by their transformers names; later samples come from them."""
        ...


def build_sampler(
    config: RolloutConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    images: ImageReader | None = None,
    barred: Sequence[int] = (),
) -> Sampler:
    """The engine of `config.engine`; it owns `model` from then on: hand over a copy, not the trained model. `images`
    reads the prompts' images; tokens `barred` are never sampled."""
    assert config.engine == "local", "the config admits known engines only"
    return LocalSampler(model, tokenizer, config, images=images, barred=barred)
