"""Public bug reports about sampling, each on its smallest input; helpers are those of the sampler's own tests."""

import pytest
import torch
from test_rollout_local import EOS, make_model, make_prompts, outcome, sampler

from fastrl_fast.config import RolloutConfig
from fastrl_fast.ops import packed_logprobs
from fastrl_fast.packing import Sequence, pack


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_V01_temperature_is_inside_on_both_sides(temperature: float) -> None:
    from fastrl_fast.model import Policy

    model = make_model()
    (group,) = sampler(model, temperature=temperature).sample(make_prompts(4), [2], seed=0, step=0)
    rows = [Sequence(group.prompt.token_ids, r.completion_ids, r.rollout_logprobs, 1.0, 1.0) for r in group.rollouts]
    batch = pack(rows)
    logprobs, _ = Policy(model, temperature=temperature)(batch)
    torch.testing.assert_close(logprobs.detach(), batch.rollout_logprobs, rtol=0, atol=1e-5)
    zero = torch.zeros(1, dtype=torch.int64)
    half, _ = packed_logprobs(torch.eye(2)[:1], torch.tensor([[2.0, 0], [0, 0]]), zero, row_index=zero, temperature=0.5)
    assert float(half) == pytest.approx(-0.01815, abs=1e-5)


def test_V04_completions_differ_within_a_group_and_come_again_with_the_seed() -> None:
    made = sampler(make_model(initializer_range=0.02))
    first, again, other = (made.sample(make_prompts(4), [4], seed=seed, step=0) for seed in (1, 1, 2))
    assert outcome(first) == outcome(again) != outcome(other)
    assert len({tuple(rollout.completion_ids) for rollout in first[0].rollouts}) == 4


def test_V05_the_next_completions_come_from_the_new_weights() -> None:
    made = sampler(make_model(seed=0))
    before = outcome(made.sample(make_prompts(4), [2], seed=0, step=0))
    other = make_model(seed=1)
    made.load_weights(other.named_parameters())
    assert outcome(made.sample(make_prompts(4), [2], seed=0, step=0)) != before
    assert outcome(made.sample(make_prompts(4), [2], seed=0, step=0)) == outcome(
        sampler(other).sample(make_prompts(4), [2], seed=0, step=0)
    )


def test_V06_ids_that_the_tokenizer_does_not_know_are_never_sampled() -> None:
    model = make_model(vocab=64)
    (group,) = sampler(model, max_completion_tokens=30).sample(make_prompts(3), [8], seed=0, step=0)
    assert max(token for rollout in group.rollouts for token in rollout.completion_ids) < 40


def test_V07_a_missing_logprob_is_never_filled_in() -> None:
    for given in ([-1.0] * 3, []):
        with pytest.raises(AssertionError, match="every completion token has a rollout logprob"):
            pack([Sequence([1], [5] * 5, given, 1.0, 1.0)])


def test_V09_what_is_trained_on_follows_from_lengths_not_from_ids() -> None:
    """pad == eos == 2, and the completion ends with it: it is trained on, and nothing behind it."""
    batch = pack([Sequence([1], [5, 6, 2], [-1.0] * 3, 1.0, 1.0), Sequence([1], [2], [-1.0], 1.0, 1.0)])
    assert batch.targets.tolist() == [5, 6, 2, 2] and batch.cu_targets.tolist() == [0, 3, 4]
    ended = sampler(make_model(initializer_range=0.02), stop_token_ids=[5, 6, 7], max_completion_tokens=60)
    for rollout in ended.sample(make_prompts(3), [8], seed=0, step=0)[0].rollouts:
        if rollout.finish_reason == "stop":
            assert rollout.completion_ids[-1] in (EOS, 5, 6, 7)
        assert len(rollout.rollout_logprobs) == len(rollout.completion_ids)


def test_V10_a_prompt_that_fills_the_context_has_an_empty_completion() -> None:
    model = make_model(max_position_embeddings=16)
    with pytest.warns(UserWarning, match="context of 16"):
        (group,) = sampler(model).sample(make_prompts(16), [2], seed=0, step=0)
    assert [rollout.completion_ids for rollout in group.rollouts] == [[], []]
    assert not any(rollout.graded for rollout in group.rollouts)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-40, 1e-320])
def test_V14_a_temperature_near_zero_is_greedy_and_zero_is_refused_for_training(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"rollout\.temperature must be greater than 0"):
        RolloutConfig(temperature=0.0)
    with pytest.raises(ValueError, match=r"rollout\.temperature must be 1e-8 or greater"):
        RolloutConfig(temperature=1e-40)
    (group,) = sampler(make_model()).sample(make_prompts(4), [2], seed=0, step=0, temperature=temperature)
    assert group.rollouts[0].completion_ids == group.rollouts[1].completion_ids
    assert all(logprob == pytest.approx(0.0) for logprob in group.rollouts[0].rollout_logprobs)
