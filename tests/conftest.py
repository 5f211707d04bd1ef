"""Shared by all tests: one quiet thread, no network, and tiny models made from a config."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_utils import PreTrainedModel

from fastrl_fast import distributed

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def process_group() -> Iterator[torch.device]:
    """A process group of one, as every run has."""
    device = distributed.start()
    yield device
    distributed.stop()


@pytest.fixture
def make_lm() -> Callable[..., PreTrainedModel]:
    """A function from (family, settings) to a stock transformers model with random weights, float64 by default."""
    return _make_lm


def _make_lm(family: str = "qwen2", *, dtype: torch.dtype = torch.float64, **settings: object) -> PreTrainedModel:
    sizes = dict(vocab_size=89, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=False)
    config = CONFIGS[family](**(sizes | settings))
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in lm.parameters():
            # Wide enough that the softmax is far from uniform, so that mistakes show.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return lm.to(dtype).eval()
