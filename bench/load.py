"""Models and loads of the benches of whole updates: random weights where speed is all that counts, lengths by plan."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers.modeling_utils import PreTrainedModel

from fastrl_fast.builtin import resolve_model
from fastrl_fast.config import ModelConfig
from fastrl_fast.drop_reasons import SIMILAR
from fastrl_fast.model import load_causal_lm
from fastrl_fast.types import Group, Prompt, Rollout

TOKENS = 900
"""Token ids of a load lie below this: every model here knows them."""


def _tiny() -> PretrainedConfig:
    """The shape of the demo's model, with room for long prompts."""
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    return LlamaConfig(vocab_size=TOKENS, tie_word_embeddings=True, max_position_embeddings=4096, **sizes)


def _small() -> PretrainedConfig:
    sizes = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8)
    sizes |= dict(num_key_value_heads=4, max_position_embeddings=4096)
    return Qwen2Config(vocab_size=1024, tie_word_embeddings=True, **sizes)


CONFIGS = {"0.6M": _tiny, "3.4M": _small}
MODELS = (*CONFIGS, "135M")
"""Models by their parameters; 135M is SmolLM2 (needs the extra `demo`)."""


def load_model(name: str) -> PreTrainedModel:
    """The same weights at every call."""
    if name == "135M":
        return load_causal_lm(resolve_model("builtin:smollm2"), ModelConfig(path="builtin:smollm2"))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32, attn_implementation="sdpa")


def make_groups(prompt: int, completions: list[list[int]], *, kept: int | None = None) -> list[Group]:
    """Groups of random tokens, one per list of completion lengths, each with a prompt of `prompt` tokens.

    Advantages are random and not zero. With `kept` each group keeps that many rollouts, chosen by lot, as pruning
    would have left it.
    """
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, TOKENS, (count,), generator=generator).tolist()

    groups = []
    for number, lengths in enumerate(completions):
        rollouts = [Rollout(ids(n), [-1.0] * n, "stop", reward=0.0) for n in lengths]
        for rollout, advantage in zip(rollouts, torch.randn(len(lengths), generator=generator).tolist(), strict=True):
            rollout.advantage = advantage
        for dropped in torch.randperm(len(lengths), generator=generator).tolist()[kept:] if kept else []:
            rollouts[dropped].drop_reason = SIMILAR
        groups.append(Group(Prompt(str(number), ids(prompt), "", {}), rollouts, number=number))
    return groups


def spread_lengths(groups: int, size: int, *, low: int, high: int) -> list[list[int]]:
    """Lengths from `low` to `high`, evenly spaced on a logarithmic scale and dealt out by lot: many short, few long."""
    count = groups * size
    steps = torch.linspace(0, 1, count)
    lengths = (low * (high / low) ** steps).round().long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return lengths[order].view(groups, size).tolist()
