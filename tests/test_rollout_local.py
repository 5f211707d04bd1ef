"""The embedded sampler against one full forward per sequence, closed forms of truncation, and frequencies."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fastrl_fast.config import RolloutConfig
from fastrl_fast.rollout import build_sampler
from fastrl_fast.rollout.local import LocalSampler
from fastrl_fast.rollout.token_choice import Truncation, choose, sampling_logprobs
from fastrl_fast.rollout.uniforms import text_key, uniforms
from fastrl_fast.types import Group, Prompt, Rollout

IDS = 40
EOS = 3


def make_tokenizer(size: int = IDS) -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": EOS} | {f"w{i}": i for i in range(4, size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
    )


def make_model(kind: str = "llama", *, vocab: int = IDS, seed: int = 0, **changes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    special = {"bos_token_id": 2, "eos_token_id": EOS, "pad_token_id": 0, "initializer_range": 0.2}
    if kind == "gpt2":  # learned positions, dropout
        config = GPT2Config(
            vocab_size=vocab, n_positions=128, n_embd=32, n_layer=2, n_head=4, eos_token_id=EOS, bos_token_id=2
        )
        return GPT2LMHeadModel(config)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    return model_class(config_class(**{**shape, **heads, **special, **changes}))


def make_prompts(*lengths: int, first: int = 5) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", token_ids=[4 + (first * (i + 1) + 7 * k) % (IDS - 4) for k in range(n)], text="", columns={})
        for i, n in enumerate(lengths)
    ]


def sampler(model: PreTrainedModel, **settings_: Any) -> LocalSampler:
    settings_.setdefault("max_completion_tokens", 12)
    made = build_sampler(RolloutConfig(**settings_), copy.deepcopy(model), make_tokenizer())
    assert isinstance(made, LocalSampler)
    return made


def full_logits(model: PreTrainedModel, prompt: Prompt, rollout: Rollout) -> torch.Tensor:
    """Logits [completion, vocabulary] by one unbatched float64 forward without a cache."""
    ids = torch.tensor([prompt.token_ids + rollout.completion_ids])
    with torch.no_grad():
        logits = copy.deepcopy(model).double().eval()(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt.token_ids) - 1 : -1]


def assert_logprobs(groups: list[Group], model: PreTrainedModel, *, temperature: float = 1.0) -> None:
    for group in groups:
        for rollout in group.rollouts:
            logits = full_logits(model, group.prompt, rollout) / temperature
            rows = torch.arange(len(rollout.completion_ids))
            truth = logits.log_softmax(-1)[rows, rollout.completion_ids]
            torch.testing.assert_close(
                torch.tensor(rollout.rollout_logprobs, dtype=torch.float64), truth, atol=1e-5, rtol=0
            )


def outcome(groups: list[Group]) -> list[tuple[list[int], list[float]]]:
    return [(rollout.completion_ids, rollout.rollout_logprobs) for group in groups for rollout in group.rollouts]


def tokens(groups: list[Group]) -> dict[str, list[list[int]]]:
    return {group.prompt.id: [rollout.completion_ids for rollout in group.rollouts] for group in groups}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_equal_a_full_forward_of_each_sequence(kind: str, temperature: float) -> None:
    model = make_model(kind)
    prompts = make_prompts(3, 11, 7, 1, 7)
    groups = sampler(model, temperature=temperature).sample(prompts, [4, 1, 3, 0, 2], seed=1, step=0)
    assert [len(group.rollouts) for group in groups] == [4, 1, 3, 0, 2]
    assert [group.prompt for group in groups] == prompts
    assert_logprobs(groups, model, temperature=temperature)


def test_rows_that_finish_early_do_not_disturb_the_others() -> None:
    model = make_model(initializer_range=0.02)  # near uniform: with four stop ids most rows end early
    made = sampler(model, max_completion_tokens=40, stop_token_ids=[5, 6, 7])
    groups = made.sample(make_prompts(4, 9, 2, 6), [16] * 4, seed=0, step=0)
    lengths = {len(rollout.completion_ids) for group in groups for rollout in group.rollouts}
    assert len(lengths) > 8
    assert_logprobs(groups, model)


def test_temperature_0_takes_the_likeliest_token_each_time() -> None:
    """Field report V14."""
    model = make_model()
    for group in sampler(model, temperature=0.7, top_p=0.5).sample(make_prompts(5), [2], seed=0, step=0, temperature=0):
        for rollout in group.rollouts:
            logits = full_logits(model, group.prompt, rollout)
            assert rollout.completion_ids == logits.argmax(dim=-1).tolist()
            assert rollout.rollout_logprobs == [0.0] * len(rollout.completion_ids)


def test_evaluation_may_use_its_own_temperature() -> None:
    model = make_model()
    made = sampler(model, temperature=1.0)
    assert_logprobs(made.sample(make_prompts(5), [6], seed=0, step=0, temperature=0.7), model, temperature=0.7)


def test_truncated_logprobs_are_those_of_the_renormalised_rest() -> None:
    model = make_model()
    groups = sampler(model, temperature=0.8, top_k=9, top_p=0.9, min_p=0.02).sample(
        make_prompts(4, 6), [8, 8], seed=0, step=0
    )
    for group in groups:
        for rollout in group.rollouts:
            logits = full_logits(model, group.prompt, rollout)
            for row, token, logprob in zip(logits, rollout.completion_ids, rollout.rollout_logprobs, strict=True):
                kept = kept_probabilities(row.tolist(), temperature=0.8, top_k=9, top_p=0.9, min_p=0.02)
                assert logprob == pytest.approx(math.log(kept[token]), abs=1e-5)


def kept_probabilities(
    logits: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """The definition, one token at a time."""
    weights = {i: math.exp((x - max(logits)) / temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept: list[int] = []
    reached = 0.0
    for i in order:
        if kept and reached >= top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    kept = [i for i in kept if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.06, 0.4]),
)
def test_truncation_follows_its_definition(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scaled = [x / 8 for x in logits]
    truncation = Truncation(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = sampling_logprobs(torch.tensor([scaled]), truncation)[0].double().exp()
    want = torch.zeros(len(scaled), dtype=torch.float64)
    for token, probability in kept_probabilities(
        scaled, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    ).items():
        want[token] = probability
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_temperature_divides_the_logits_not_the_logprobs() -> None:
    got = sampling_logprobs(torch.tensor([[2.0, 0.0]]), Truncation(temperature=0.5))  # field report V01
    assert got[0, 0].item() == pytest.approx(-0.01815, abs=5e-6)


def test_a_tiny_temperature_neither_overflows_nor_gives_nan() -> None:
    got = sampling_logprobs(torch.tensor([[2.0, 0.0, -3.0]]), Truncation(temperature=1e-8))
    assert got[0].tolist() == [0.0, -2e8, -5e8]


def test_inverse_cdf_hits_every_border_and_no_token_of_probability_zero() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(5, 5)
    draws = torch.tensor([0.0, 0.5 - 2.0**-52, 0.5, 0.75, 1 - 2.0**-52], dtype=torch.float64)
    picked, logprobs = choose(logits, draws, Truncation())
    assert picked.tolist() == [1, 1, 3, 3, 3]
    assert logprobs.tolist() == [pytest.approx(math.log(0.5))] * 5


def test_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    count = 200_000
    draws = uniforms(torch.arange(count) * 7919, torch.zeros(count, dtype=torch.int64), seed=3, step=5, count=1)[:, 0]
    picked, _ = choose(probabilities.log().expand(count, 5), draws, Truncation())
    expected = probabilities.double() * count
    chi_square = ((picked.bincount(minlength=5) - expected) ** 2 / expected).sum()
    assert chi_square < 18.47  # 0.1 % point at 4 degrees of freedom


def test_draws_are_uniform_and_uncorrelated_along_every_axis() -> None:
    keys = torch.tensor([text_key(str(i)) for i in range(64)]).repeat_interleave(8)
    indices = torch.arange(8).repeat(64)
    draws = torch.stack([uniforms(keys, indices, seed=seed, step=s, count=40) for seed in (0, 1) for s in (0, 1)])
    assert draws.min() >= 0 and draws.max() < 1
    n = draws.numel()
    assert abs(draws.mean() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    counts = torch.histc(draws.float(), bins=16, min=0, max=1)
    assert ((counts - n / 16) ** 2 / (n / 16)).sum() < 37.7  # 0.1 % point at 15 degrees of freedom
    whole = draws.view(2, 2, 64, 8, 40)
    for axis in range(5):
        a, b = whole.narrow(axis, 0, whole.shape[axis] - 1), whole.narrow(axis, 1, whole.shape[axis] - 1)
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.numel()), axis


def test_splitmix_matches_the_published_sequence() -> None:
    """With state s the n-th output of SplitMix64 is mix(s + n gamma); for s = 0 the first is 0xe220a8397b1dcdaf."""
    from fastrl_fast.rollout.uniforms import _GAMMA, _mix, _signed

    first = _mix(torch.tensor([_signed(_GAMMA), _signed(2 * _GAMMA)]))
    assert [x % 2**64 for x in first.tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_completions_do_not_depend_on_batching_order_or_when_they_are_asked_for() -> None:
    model = make_model()
    prompts = make_prompts(3, 9, 5)
    whole = tokens(sampler(model).sample(prompts, [4, 4, 4], seed=7, step=2))
    for budget in (1, 40, 100):
        assert tokens(sampler(model, tokens_per_batch=budget).sample(prompts, [4, 4, 4], seed=7, step=2)) == whole
    made = sampler(model)
    assert tokens(made.sample(prompts[::-1], [4, 4, 4], seed=7, step=2)) == whole
    first, later = (tokens(made.sample(prompts, [2] * 3, seed=7, step=2, first_index=k)) for k in (0, 2))
    assert {key: first[key] + later[key] for key in whole} == whole


def test_rollouts_differ_by_index_prompt_id_step_and_seed() -> None:
    made = sampler(make_model(initializer_range=0.02))
    same_text = [Prompt(id=str(i), token_ids=[5, 6], text="", columns={}) for i in range(2)]
    seen = []
    for seed, step in [(0, 0), (0, 1), (1, 0)]:
        for group in made.sample(same_text, [4, 4], seed=seed, step=step):
            # two may well be nothing but the end token: only those of some length must differ
            seen += [tuple(r.completion_ids) for r in group.rollouts if len(r.completion_ids) >= 5]
    assert len(set(seen)) == len(seen) > 12


def test_a_prompt_asked_twice_in_one_call_gets_two_different_groups() -> None:
    made = sampler(make_model(initializer_range=0.02))
    (prompt,) = make_prompts(4)
    first, second = made.sample([prompt, prompt], [4, 4], seed=0, step=0)
    assert tokens([first]) != tokens([second])
    assert tokens(made.sample([prompt], [4], seed=0, step=0)) == tokens([first])


def test_stop_tokens_end_a_completion_and_belong_to_it() -> None:
    model = make_model(initializer_range=0.02)
    model.generation_config.eos_token_id = [8, 9]
    made = sampler(model, stop_token_ids=[10], max_completion_tokens=30)
    stops = {EOS, 8, 9, 10}
    assert made.stop_ids == stops
    seen = set()
    for rollout in made.sample(make_prompts(4), [200], seed=0, step=0)[0].rollouts:
        assert len(rollout.rollout_logprobs) == len(rollout.completion_ids) <= 30
        assert not stops & set(rollout.completion_ids[:-1])
        last = rollout.completion_ids[-1]
        assert rollout.finish_reason == ("stop" if last in stops else "length")
        assert rollout.finish_reason == "stop" or len(rollout.completion_ids) == 30
        body = rollout.completion_ids[:-1] if last in stops else rollout.completion_ids
        assert rollout.text == make_tokenizer().decode(body, skip_special_tokens=True)
        seen.add(last)
    assert stops < seen


@pytest.mark.parametrize("budget", [32768, 100], ids=["as rows leave a batch", "batch by batch"])
def test_groups_are_told_when_their_last_rollout_is_there(budget: int) -> None:
    """Each once, whole, and the first ones before the last are sampled."""
    prompts, sizes = make_prompts(9, 4, 6, 5), [3, 2, 0, 4]
    made = sampler(make_model(), max_completion_tokens=40, tokens_per_batch=budget)
    silent = made.sample(prompts, sizes, seed=3, step=0)
    sampled: list[list[int]] = []
    told: list[tuple[str, list[tuple[list[int], list[float]]], int]] = []
    decoded = made._rollout

    def count(ids: list[int], logprobs: list[float]) -> Rollout:
        sampled.append(ids)
        return decoded(ids, logprobs)

    made._rollout = count  # type: ignore[method-assign]

    def finished(group: Group) -> None:
        told.append((group.prompt.id, outcome([group]), len(sampled)))

    groups = made.sample(prompts, sizes, seed=3, step=0, finished=finished)
    assert outcome(groups) == outcome(silent)
    assert {name: rollouts for name, rollouts, _ in told} == {group.prompt.id: outcome([group]) for group in groups}
    assert len(told) == len(groups)
    whens = [when for _, _, when in told]
    assert whens[0] == 0, "the group of none has nothing to wait for"
    assert whens[1] < whens[-1] == 9


def test_a_single_token_and_a_prompt_that_fills_the_context() -> None:
    made = sampler(make_model(max_position_embeddings=16), max_completion_tokens=5)
    with pytest.warns(UserWarning, match="context of 16"):
        groups = made.sample(make_prompts(16, 13, 4), [2, 2, 2], seed=0, step=0)
    assert [(r.completion_ids, r.rollout_logprobs, r.finish_reason) for r in groups[0].rollouts] == [
        ([], [], "length")
    ] * 2
    assert all(len(r.completion_ids) <= 3 for r in groups[1].rollouts)
    assert max(len(r.completion_ids) for r in groups[2].rollouts) == 5
    single = sampler(make_model(), max_completion_tokens=1).sample(make_prompts(3), [8], seed=0, step=0)[0]
    assert {len(r.completion_ids) for r in single.rollouts} == {1}
    assert sampler(make_model()).sample([], [], seed=0, step=0) == []


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    model = make_model(vocab=IDS + 200, tie_word_embeddings=False, initializer_range=0.02)
    groups = sampler(model, max_completion_tokens=20).sample(make_prompts(4), [64], seed=0, step=0)
    assert max(token for r in groups[0].rollouts for token in r.completion_ids) < IDS


def test_no_dropout_in_sampling() -> None:
    model = make_model("gpt2").train()
    made = sampler(model)
    prompts = make_prompts(6)
    first, second = (outcome(made.sample(prompts, [4], seed=0, step=0)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("tied", [True, False])
def test_output_follows_the_new_weights(tied: bool) -> None:
    old = make_model(tie_word_embeddings=tied)
    new = make_model(tie_word_embeddings=tied, seed=1)
    made = sampler(old)
    prompts = make_prompts(5, 2)
    before = outcome(made.sample(prompts, [3, 3], seed=0, step=0))
    made.load_weights(new.named_parameters())  # a tied head comes once, under the embedding's name
    after = made.sample(prompts, [3, 3], seed=0, step=0)
    assert outcome(after) == outcome(sampler(new).sample(prompts, [3, 3], seed=0, step=0)) != before
    assert_logprobs(after, new)
    made.load_weights(old.state_dict().items())  # and here under both
    assert outcome(made.sample(prompts, [3, 3], seed=0, step=0)) == before


def test_load_weights_casts_to_the_samplers_dtype() -> None:
    new = make_model(seed=1)
    made = sampler(make_model().bfloat16())
    made.load_weights(new.named_parameters())
    for (_, got), (name, want) in zip(made.model.named_parameters(), new.named_parameters(), strict=True):
        assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16()), name
    rollout = made.sample(make_prompts(5), [1], seed=0, step=0)[0].rollouts[0]
    assert all(math.isfinite(x) and x <= 0 for x in rollout.rollout_logprobs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({"model.extra": torch.zeros(2)}), "no weight named 'model.extra'"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(33)}), r"shape \(32,\), got \(33,\)"),
        (lambda w: w.pop("model.norm.weight"), "1 weights did not come, first 'model.norm.weight'"),
    ],
)
def test_load_weights_is_strict(change: object, message: str) -> None:
    weights = dict(make_model().named_parameters())
    change(weights)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        sampler(make_model()).load_weights(weights.items())


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"rollout.stop_token_ids must be token ids in \[0, 40\), got 40"):
        sampler(make_model(), stop_token_ids=[40])
    with pytest.raises(ValueError, match="prompt p0 has no tokens"):
        sampler(make_model()).sample(make_prompts(0), [1], seed=0, step=0)
    windowed = make_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ValueError, match=r"must be at most 6 for prompt p0.*window of 16 tokens, got 12"):
        sampler(windowed).sample(make_prompts(10), [1], seed=0, step=0)


def test_ordinary_sampling_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler(make_model()).sample(make_prompts(3, 5), [2, 2], seed=0, step=0)
