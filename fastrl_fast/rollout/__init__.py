"""Sampling of completions: the `Sampler` protocol and `build_sampler`, which picks the engine that the config names."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import Config, RolloutConfig
from ..types import Group, ImageReader, Prompt
from ..vision import KINDS, barred_tokens
from .local import LocalSampler
from .request import EngineLost

__all__ = ["EngineLost", "EngineSampler", "LocalSampler", "Sampler", "build_engine", "build_sampler"]


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


@runtime_checkable
class EngineSampler(Sampler, Protocol):
    """An engine that computes logprobs in its own way, from its own copy of the weights."""

    def probe(self, prompts: list[Prompt]) -> list[Group]:
        """Completions of `prompts` along the path of every sample, but without truncation, to be compared with the
        policy; on each rank those that it is to look after, maybe none."""
        ...

    def rest(self) -> None:
        """Free what only sampling needs, until the next weights come."""
        ...

    def close(self) -> None:
        """End it, before the process group does."""
        ...


def build_sampler(
    config: RolloutConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    images: ImageReader | None = None,
    barred: Sequence[int] = (),
) -> Sampler:
    """The local engine; it owns `model` from then on: hand over a copy, not the trained model. `images` reads the
    prompts' images; tokens `barred` are never sampled."""
    return LocalSampler(model, tokenizer, config, images=images, barred=barred)


def build_engine(config: Config, path: str, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> EngineSampler:
    """The vLLM engine that `config.rollout` names, of the model at `path`, of which `lm` is the loaded one and stays
    the caller's.

    Raises ValueError for what is not installed or not there, and for images that servers would have to read.
    """
    settings, barred = config.rollout, barred_tokens(lm.config)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    if settings.engine == "vllm_server":
        try:
            from .vllm_server import build_servers
        except ImportError as error:
            raise ValueError(f"rollout.engine vllm_server needs httpx2: pip install httpx2 ({error})") from error
        if lm.config.model_type in KINDS:
            raise ValueError("rollout.engine must be local or vllm for a model that reads images, got 'vllm_server'")
        return build_servers(lm, tokenizer, settings, dtype=dtype, barred=barred)
    from .vllm_engine import build_vllm

    return build_vllm(config, path, lm, tokenizer, dtype=dtype, barred=barred)
