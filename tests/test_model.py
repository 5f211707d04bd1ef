"""The policy against stock transformers models that read one sequence at a time."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from fastrl_fast.config import ModelConfig
from fastrl_fast.model import (
    Policy,
    build_policy,
    frozen_copy,
    full_weights,
    load_causal_lm,
    load_tokenizer,
    sampler_copy,
)
from fastrl_fast.ops import packed_logprobs
from fastrl_fast.packing import Sequence, pack

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    # A window of 4 is shorter than most sequences below.
    "mistral": {"sliding_window": 4},
}
SIZES = [(3, 5), (1, 1), (7, 2), (2, 20), (6, 6), (1, 3)]
SETTINGS = ModelConfig(path="none")


def sequences(seed: int = 0, vocabulary: int = 89) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(vocabulary, (n,), generator=generator).tolist()

    return [Sequence(ids(p), ids(c), [0.0] * c, 1.0, 1.0) for p, c in SIZES]


def alone(lm, sequence: Sequence, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of one completion by the textbook formula, nothing packed or padded (K03)."""
    tokens = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
    logits = lm(tokens, use_cache=False).logits[0, len(sequence.prompt_ids) - 1 : -1] / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, torch.tensor(sequence.completion_ids)[:, None])[:, 0], entropy


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forward_equals_each_sequence_alone(make_lm, family, tied):
    """K05, V01, V15: same numbers however a sequence is packed, temperature before the softmax."""
    lm = make_lm(family, tie_word_embeddings=tied, **FAMILIES[family])
    for temperature in (0.6, 1.0, 1.3):
        policy = Policy(copy.deepcopy(lm), temperature=temperature)
        assert policy.tied is tied
        logprobs, entropy = policy(pack(sequences()))
        expected = [alone(lm, s, temperature) for s in sequences()]
        torch.testing.assert_close(logprobs.double(), torch.cat([e[0] for e in expected]), rtol=0, atol=1e-6)
        torch.testing.assert_close(entropy.double(), torch.cat([e[1] for e in expected]), rtol=0, atol=1e-6)


GROUPS = [(37, [5, 17, 29, 1]), (6, [3, 3, 3]), (9, [4]), (2, [11, 11, 70, 71]), (5, [8, 2])]
"""Prompts and completions: ragged, alike, a group of one, longer than its prompt, and two that pruning left."""


def in_groups(*, share: bool) -> list[Sequence]:
    """The rollouts of GROUPS and, between them, two that share nothing."""
    generator = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(89, (n,), generator=generator).tolist()

    rollouts = []
    for number, (prompt, completions) in enumerate(GROUPS):
        asked = ids(prompt)
        rollouts += [Sequence(asked, ids(n), [0.0] * n, 1.0, 1.0, number if share else None) for n in completions]
        if number < 2:
            rollouts.append(Sequence(ids(4), ids(6), [0.0] * 6, 1.0, 1.0))
    return rollouts


@pytest.mark.parametrize("head", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_change_neither_logprobs_nor_gradients(make_lm, family, dtype, head):
    """Against stock models that read every sequence by itself; issue 5's bounds.

    Norms and rotary angles are float32 in models of any dtype, which bounds what gradients in float64 can show. Heads
    of 8 have their attention in torch's parts; in float32 those of 16 and 32 have it in one compiled pass.
    """
    window = {"sliding_window": 73} if family == "mistral" else {}  # Just covers the longest prompt and completion.
    lm = make_lm(family, dtype=dtype, head_dim=head, **window)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(0.5)  # With the full weights even a stock model's logprobs round by 4e-6 in float32.
    policy = Policy(copy.deepcopy(lm), temperature=1.0)
    rollouts = in_groups(share=True)
    batch = pack(rollouts)
    assert len(batch.prefixes) == 4 and max(len(s) for s in rollouts) == 73 <= policy.longest_shared
    expected = torch.cat([alone(lm, s, 1.0)[0] for s in rollouts])
    logprobs, _ = policy(batch)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    (expected * upstream).sum().backward()
    (logprobs * upstream).sum().backward()
    tight = dtype == torch.float64
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12 if tight else 2e-6)
    theirs = dict(lm.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        apart = (parameter.grad - theirs[name].grad).norm() / theirs[name].grad.norm()
        assert apart <= (1e-6 if tight else 1e-5), name


def test_models_with_capped_scores_are_loaded_and_share_prompts(tmp_path):
    """Gemma 2, whose other layers have a window; against the stock model's own plain attention."""
    torch.manual_seed(0)
    sizes = SMALL | dict(num_hidden_layers=2, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=1.5)
    Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=73)).save_pretrained(tmp_path)
    lm = load_causal_lm(str(tmp_path), SETTINGS).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    rollouts = in_groups(share=True)
    expected = torch.cat([alone(lm, s, 1.0)[0] for s in rollouts])
    logprobs, _ = build_policy(lm, SETTINGS, temperature=1.0)(pack(rollouts))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)


def test_shared_prompts_are_recomputed_with_the_layers(make_lm):
    """Activation checkpointing runs the attention again in the backward pass."""
    gradients = []
    for checkpointing in (False, True):
        policy = build_policy(make_lm(), replace(SETTINGS, activation_checkpointing=checkpointing), temperature=1.0)
        policy(pack(in_groups(share=True)))[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_window_bounds_what_can_be_shared(make_lm):
    assert Policy(make_lm("mistral", sliding_window=64), temperature=1.0).longest_shared == 64
    assert Policy(make_lm("mistral", sliding_window=None), temperature=1.0).longest_shared == math.inf
    assert Policy(make_lm("qwen2", sliding_window=64, use_sliding_window=False), temperature=1.0).longest_shared > 64
    slides = dict(sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert Policy(make_lm("qwen2", **slides), temperature=1.0).longest_shared == 64
    assert Policy(make_lm("llama"), temperature=1.0).longest_shared == math.inf


def test_float32_is_close_enough_to_one_at_a_time(make_lm):
    """K05: below 1e-5 in float32."""
    lm = make_lm(dtype=torch.float32)
    expected = torch.cat([alone(lm, s, 1.0)[0] for s in sequences()])
    logprobs, _ = Policy(lm, temperature=1.0)(pack(sequences()))
    assert float((logprobs - expected).detach().abs().max()) < 1e-5


def test_the_window_matters(make_lm):
    """Guards the Mistral case above: without its window the numbers are others."""
    wide, narrow = (Policy(make_lm("mistral", sliding_window=w), temperature=1.0) for w in (None, 4))
    assert float((wide(pack(sequences()))[0] - narrow(pack(sequences()))[0]).detach().abs().max()) > 1e-3


def test_temperature_is_applied_to_logits_not_to_logprobs():
    """V01: logits [2, 0] at T = 0.5 give -0.01815, not -0.25386."""
    hidden = torch.eye(2)[:1]
    weight = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    zero = torch.zeros(1, dtype=torch.int64)
    logprobs, _ = packed_logprobs(hidden, weight, zero, row_index=zero, temperature=0.5)
    assert float(logprobs) == pytest.approx(-0.01815, abs=1e-5)


def test_one_sequence_cannot_see_another(make_lm):
    """K06: changing every token of one sequence leaves the others bit for bit."""
    policy = Policy(make_lm(dtype=torch.float32), temperature=1.0)
    first, changed = sequences(), sequences()
    changed[2] = Sequence([5] * 7, [6] * 2, [0.0] * 2, 1.0, 1.0)
    before, after = policy(pack(first))[0], policy(pack(changed))[0]
    borders = pack(first).cu_targets.tolist()
    rest = [i for i in range(len(before)) if not borders[2] <= i < borders[3]]
    assert torch.equal(before[rest], after[rest])
    assert not torch.equal(before, after)


def test_gradients_equal_one_at_a_time(make_lm):
    lm = make_lm(tie_word_embeddings=True)
    torch.cat([alone(lm, s, 0.7)[0] for s in sequences()]).square().sum().backward()
    policy = Policy(copy.deepcopy(lm), temperature=0.7)
    policy.zero_grad()
    policy(pack(sequences()))[0].square().sum().backward()
    theirs = dict(lm.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-5, atol=1e-5, msg=name)


def test_activation_checkpointing_changes_no_gradient(make_lm):
    gradients = []
    for checkpointing in (False, True):
        config = replace(SETTINGS, activation_checkpointing=checkpointing)
        policy = build_policy(make_lm(), config, temperature=1.0)
        calls = []
        policy.decoder.layers[0].mlp.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        policy(pack(sequences()))[0].sum().backward()
        assert len(calls) == (2 if checkpointing else 1), "the layer runs again in the backward pass"
        gradients.append([p.grad for p in policy.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_dropout_is_off_however_the_config_spells_it(make_lm, tmp_path, family):
    """V15: two forwards of a policy in training mode are equal bit for bit."""
    if family == "gpt2":
        sizes = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=89, n_positions=64)
        lm = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    else:
        lm = make_lm(family, dtype=torch.float32, attention_dropout=0.5)
    lm.save_pretrained(tmp_path)
    policy = build_policy(load_causal_lm(str(tmp_path), SETTINGS), SETTINGS, temperature=1.0)
    assert policy.training
    once, again = (policy(pack(sequences()))[0] for _ in range(2))
    assert torch.equal(once, again)
    expected = torch.cat([alone(lm.eval(), s, 1.0)[0] for s in sequences()])
    torch.testing.assert_close(once, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_full_weights_load_into_a_stock_model(make_lm, tied):
    lm = make_lm(tie_word_embeddings=tied)
    policy = Policy(copy.deepcopy(lm), temperature=1.0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    stock = AutoModelForCausalLM.from_config(lm.config, dtype=torch.float64, attn_implementation="sdpa").eval()
    weights = dict(full_weights(policy))
    assert set(weights) == {name for name, _ in stock.named_parameters()}
    stock.load_state_dict(weights, strict=False)
    expected = torch.cat([alone(stock, s, 1.0)[0] for s in sequences()])
    torch.testing.assert_close(policy(pack(sequences()))[0].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_and_sampler_copies_do_not_follow_training(make_lm, tied):
    lm = make_lm(dtype=torch.float32, tie_word_embeddings=tied)
    sampler = sampler_copy(lm, dtype=torch.bfloat16, device=torch.device("cpu"))
    policy = build_policy(lm, SETTINGS, temperature=1.0)
    reference = frozen_copy(policy)
    before = reference(pack(sequences()))[0].clone()
    assert torch.equal(before, policy(pack(sequences()))[0].detach())
    sampler_before = [p.clone() for p in sampler.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    policy(pack(sequences()))[0].sum().backward()
    optimizer.step()
    assert not torch.equal(before, policy(pack(sequences()))[0].detach())
    assert torch.equal(before, reference(pack(sequences()))[0])
    assert all(torch.equal(a, b) for a, b in zip(sampler_before, sampler.parameters(), strict=True))
    assert reference.tied is policy.tied is tied
    assert not any(p.requires_grad for p in (*reference.parameters(), *sampler.parameters()))
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [True, False])
def test_a_sampler_may_read_the_trained_weights_themselves(make_lm, tied):
    lm = make_lm(dtype=torch.float32, tie_word_embeddings=tied)
    sampler = sampler_copy(lm, dtype=torch.float32, device=torch.device("cpu"), share_weights=True)
    policy = build_policy(lm, SETTINGS, temperature=1.0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    mine, theirs = dict(sampler.named_parameters()), dict(policy.lm.named_parameters())
    assert mine.keys() == theirs.keys() and all(mine[name].data_ptr() == theirs[name].data_ptr() for name in mine)
    assert not any(p.requires_grad for p in mine.values()) and all(p.requires_grad for p in theirs.values())


def test_the_dummy_batch_gives_every_parameter_a_zero_gradient(make_lm):
    """P08: a rank without rollouts takes part in every backward pass, with nothing to add."""
    policy = Policy(make_lm(), temperature=1.0)
    logprobs, entropy = policy(pack([]))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_shape_counts_parameters_outside_the_embedding(make_lm):
    for tied in (True, False):
        lm = make_lm(tie_word_embeddings=tied)
        shape = Policy(lm, temperature=1.0).shape
        layer = sum(p.numel() for p in lm.model.layers[0].parameters())
        assert (shape.parameters, shape.layers, shape.hidden) == (2 * layer + 32, 2, 32)


@pytest.mark.parametrize("tied", [True, False])
def test_shard_units_are_the_layers_and_an_untied_head(make_lm, tied):
    policy = Policy(make_lm(tie_word_embeddings=tied), temperature=1.0)
    assert policy.shard_units == [*policy.decoder.layers, *([] if tied else [policy.head])]
    # GPT-2 calls its layers otherwise, and ties.
    gpt2 = Policy(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=9)), temperature=1.0)
    assert gpt2.shard_units == list(gpt2.decoder.h)


SMALL = dict(vocab_size=89, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)


GPT_OSS = GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("model", "config", "reason"),
    [
        (GptOssForCausalLM, GPT_OSS, "sinks"),
        (StableLmForCausalLM, StableLmConfig(**SMALL, num_key_value_heads=4), "do not pass keyword arguments"),
        (BloomForCausalLM, BloomConfig(vocab_size=89, hidden_size=32, n_layer=1, n_head=4), "built in"),
        # Its head is more than a matrix.
        (BertLMHeadModel, BertConfig(**SMALL, is_decoder=True), "differ from its own"),
    ],
)
def test_models_that_packed_attention_cannot_serve_are_refused(model, config, reason):
    """K06: before anything is sampled, not by numbers that are wrong."""
    with pytest.raises(ValueError, match=rf"^model\.path: .*{reason}"):
        build_policy(model(config), SETTINGS, temperature=1.0)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (CohereForCausalLM, CohereConfig(**SMALL, num_key_value_heads=2, logit_scale=0.3, pad_token_id=0)),
        (GraniteForCausalLM, GraniteConfig(**SMALL, num_key_value_heads=2, logits_scaling=3.0)),
        (Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0)),
        # A window of 4 on the first of two layers.
        (
            Gemma2ForCausalLM,
            Gemma2Config(
                **(SMALL | {"num_hidden_layers": 2}),
                num_key_value_heads=2,
                head_dim=8,
                sliding_window=4,
                attn_logit_softcapping=1.5,
            ),
        ),
    ],
)
def test_scales_and_caps_of_the_logits_are_the_models_own(model, config):
    torch.manual_seed(0)
    config._attn_implementation = "eager" if hasattr(config, "attn_logit_softcapping") else "sdpa"
    lm = model(config).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    expected = torch.cat([alone(lm, s, 0.7)[0] for s in sequences()])
    logprobs, _ = Policy(lm, temperature=0.7)(pack(sequences()))
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)


def test_layers_that_would_leak_across_sequences_are_refused(make_lm):
    """K06: a recurrent layer or chunked attention knows nothing of our borders."""
    for name, value in (("layer_types", ["linear_attention", "full_attention"]), ("attention_chunk_size", 4)):
        lm = make_lm()
        setattr(lm.config, name, value)
        with pytest.raises(ValueError, match=rf"model\.path.*{name}"):
            Policy(lm, temperature=1.0)


def test_a_path_without_a_model_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match=r"^model\.path: cannot load") as error:
        load_causal_lm(str(tmp_path / "none"), replace(SETTINGS, path="some/model"))
    assert "\n" not in str(error.value)


def test_a_model_folder_without_a_tokenizer_or_with_a_damaged_file_is_one_clear_line(make_lm, tmp_path):
    make_lm("llama", dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^model\.path: cannot load the tokenizer of 'some/model'"):
        load_tokenizer(str(tmp_path), replace(SETTINGS, path="some/model"))
    # What git leaves where large files were not fetched.
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"^model\.path: cannot load the model of 'some/model'"):
        load_causal_lm(str(tmp_path), replace(SETTINGS, path="some/model"))
