"""The memory estimate against published parameter counts, what autograd really saves, and arithmetic by hand."""

from dataclasses import replace

import pytest
import torch

from fastrl_fast.config import Config, DataConfig, LossConfig, ModelConfig, RolloutConfig, UpdatesConfig
from fastrl_fast.memory import LOGIT_CHUNK, ModelSize, estimate_memory
from fastrl_fast.model import build_policy
from fastrl_fast.ops._lib import kernels
from fastrl_fast.ops.packed_attention import segments
from fastrl_fast.packing import Sequence, pack


def qwen(layers: int, hidden: int, intermediate: int, keys: int, vocabulary: int, *, tied: bool = False) -> ModelSize:
    return ModelSize(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        queries=hidden,
        keys=keys,
        vocabulary=vocabulary,
        tied=tied,
    )


QWEN = {
    "1.5B": (qwen(28, 1536, 8960, 256, 151936, tied=True), 1_543_714_304),
    "7B": (qwen(28, 3584, 18944, 512, 152064), 7_615_616_512),
    "32B": (qwen(64, 5120, 27648, 1024, 152064), 32_763_876_352),
}
"""Sizes in the published configurations of Qwen2.5, and parameters in the published weight files."""

SMALL = ModelSize(layers=3, hidden=8, intermediate=16, queries=8, keys=4, vocabulary=100, tied=False)


def config(*, dtype: str = "float32", checkpointing: bool = False, kl: float = 0.0, tokens: int = 1000) -> Config:
    return Config(
        model=ModelConfig(path="none", dtype=dtype, activation_checkpointing=checkpointing),
        data=DataConfig(path="none"),
        loss=LossConfig(kl_coef=kl),
        updates=UpdatesConfig(tokens_per_microbatch=tokens),
        rollout=RolloutConfig(tokens_per_batch=500),
    )


@pytest.mark.parametrize("name", QWEN)
def test_parameters_are_the_published_ones_but_for_biases(name):
    size, published = QWEN[name]
    biases = size.layers * (size.queries + 2 * size.keys)
    assert size.parameters + biases == published


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_sizes_are_read_from_a_configuration(make_lm, family, tied):
    lm = make_lm(family, tie_word_embeddings=tied)
    left_out = ("bias", "q_norm.weight", "k_norm.weight")
    counted = [p.numel() for name, p in lm.named_parameters() if not name.endswith(left_out)]
    assert ModelSize.of(lm.config).parameters == sum(counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_activations_are_what_autograd_saves(make_lm, monkeypatch, family, dtype):
    """Within 1 %: rotary tables and the norms' scales are left out, the embedding's output is counted."""
    for where in ("layers.has_layer_kernels", "ops.packed_attention.has_row_kernel"):
        monkeypatch.setattr(f"fastrl_fast.{where}", lambda *tensors: False)
    size, saved = saved_bytes(make_lm, family, dtype)
    expected = size.layers * size.layer_activation_bytes(dtype.itemsize) + size.hidden * (4 + 2 * dtype.itemsize)
    assert saved == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(not kernels.FUSED_LAYERS, reason="this processor has no AVX2")
def test_compiled_passes_save_less(make_lm):
    """Of a norm its input and output, of a gated layer both halves and their product, of attention its output once."""
    size, saved = saved_bytes(make_lm, "qwen2", torch.float32)
    layer = 2 * 2 * size.hidden + 2 * size.queries + 2 * size.keys + 3 * size.intermediate
    assert saved == pytest.approx(4 * (size.layers * layer + 2 * size.hidden), rel=0.02)
    assert saved < 0.75 * size.layers * size.layer_activation_bytes(4)


def saved_bytes(make_lm, family, dtype) -> tuple[ModelSize, float]:
    """Sizes of a model, and bytes per token that autograd saves of its layers."""
    lm = make_lm(family, dtype=dtype, hidden_size=128, intermediate_size=320, num_hidden_layers=3, head_dim=16)
    size, policy = ModelSize.of(lm.config), build_policy(lm, ModelConfig(path="none"), temperature=1.0)
    batch = pack([Sequence([1] * 40, [2] * 60, [0.0] * 60, 1.0, 1.0)] * 4)
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = policy.decoder(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            packed_segments=segments(batch.cu_seqlens),
        ).last_hidden_state
    assert hidden.dtype == dtype
    return size, sum(saved.values()) / batch.input_ids.numel()


def test_one_rank_by_hand():
    """Nothing is gathered or copied, gradients are there once; the head's float32 weight gradient is the only sum."""
    memory = estimate_memory(SMALL, config(kl=0.1), ranks=1, device="cpu")
    layer = 8 * (2 * 8 + 2 * 4) + 3 * 8 * 16 + 2 * 8
    parameters = 3 * layer + 2 * 800 + 8
    assert SMALL.parameters == parameters
    assert (memory.parameters, memory.optimizer, memory.reference) == (4 * parameters, 8 * parameters, 4 * parameters)
    assert (memory.gradients, memory.gathered, memory.sampler) == (4 * parameters, 0, 0)
    assert memory.activations == 1000 * (3 * 4 * (2 * 8 * 3 + 3 * 8 + 2 * 4 + 4 * 16) + 3 * 4 * 8)
    assert memory.head == 2 * 4 * 1000 * 8 + 2 * 4 * 800 + LOGIT_CHUNK["cpu"]
    assert memory.cache == 500 * 3 * 2 * 4 * 4
    assert memory.total == memory.throughout + memory.update


def test_sharding_divides_states_but_not_what_a_micro_batch_needs():
    size, settings = QWEN["7B"][0], config(dtype="bfloat16", checkpointing=True)
    one, many = (estimate_memory(size, settings, ranks=n, several_microbatches=False) for n in (8, 64))
    for name in ("parameters", "optimizer"):
        assert getattr(one, name) == 8 * getattr(many, name)
    for name in ("sampler", "gathered", "activations", "head"):
        assert getattr(one, name) == getattr(many, name)
    deferred = estimate_memory(size, settings, ranks=64)
    assert deferred.gradients == many.parameters + 4 * size.parameters > many.gradients
    often = replace(settings, updates=replace(settings.updates, reduce_gradients="microbatch"))
    assert estimate_memory(size, often, ranks=64) == many


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all():
    size = QWEN["1.5B"][0]
    plain, checkpointed = (
        estimate_memory(size, config(dtype="bfloat16", checkpointing=on), ranks=8).activations for on in (False, True)
    )
    layer, last = size.layer_activation_bytes(2), size.hidden * 8
    assert plain == 1000 * (28 * layer + last) and checkpointed == 1000 * (28 * 2 * size.hidden + layer + last)


def test_the_cache_counts_where_it_is_larger_than_the_update():
    settings = config(tokens=1)
    large = replace(settings, rollout=RolloutConfig(tokens_per_batch=10**9))
    assert estimate_memory(SMALL, large, ranks=1).total > estimate_memory(SMALL, settings, ranks=1).total
