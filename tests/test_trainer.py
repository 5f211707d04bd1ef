"""Whole steps of the trainer in one process: every method adds up, several updates clip, and a stop leaves no trace."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastrl_fast import ops
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import (
    AdvantageConfig,
    BudgetConfig,
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PruneConfig,
    RewardConfig,
    RolloutConfig,
    UpdatesConfig,
)
from fastrl_fast.loss import OBJECTIVES
from fastrl_fast.loss_config import ImportanceConfig
from fastrl_fast.model import full_weights
from fastrl_fast.rewards import Grader
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import BAD_GRADIENTS_IN_A_ROW, Trainer
from fastrl_fast.training_run import TrainingRun

PLAIN = Config(
    model=ModelConfig(path="builtin:demo"),
    data=DataConfig(path="demo:train?size=64", prompts_per_step=4),
    rollout=RolloutConfig(max_completion_tokens=24),
    reward=RewardConfig(functions={"exact": 1.0, "format": 0.5}, workers=1),
    budget=BudgetConfig(group_size=6),
    optimizer=OptimizerConfig(lr=1e-3),
    updates=UpdatesConfig(tokens_per_microbatch=128),
)
ROLLOUTS = 4 * 6


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with build_grader(PLAIN.reward) as made:
        yield made


@pytest.fixture
def make_trainer(grader: Grader, process_group: torch.device, tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer of PLAIN with some sections replaced; all share one run folder."""

    def made(**changes: object) -> Trainer:
        config = dataclasses.replace(PLAIN, **changes)
        parts = build_parts(config, load_inputs(config, grader), grader, process_group, folder=tmp_path, log=None)
        return Trainer(config, parts, total_steps=10)

    return made


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([weight.flatten() for _, weight in full_weights(trainer.parts.policy)]).clone()


METHODS = [
    # loss, prune method, weighting, advantages, KL, (minibatches, epochs), old logprobs, aggregation
    ("grpo", "none", "none", "trl", None, (1, 1), "recompute", None),
    ("grpo", "mdap", "multiplicity", "fastrl", "k1", (2, 1), "rollout", "token-mean"),
    ("dapo", "mdap_seed", "none", "verl", "k2", (1, 2), "recompute", "seq-mean-token-mean"),
    ("dr_grpo", "mdap", "none", "dr_grpo", None, (4, 1), "recompute", None),
    ("gspo", "none", "multiplicity", "rloo", "k3", (2, 2), "rollout", "seq-mean-token-sum-norm"),
    ("gspo_token", "mdap_seed", "multiplicity", "fastrl", None, (1, 2), "recompute", "token-mean"),
    ("cispo", "mdap", "none", "rloo", "k3", (2, 2), "recompute", None),
]


@pytest.mark.parametrize(("loss", "method", "weighting", "preset", "kl", "updates", "old", "aggregation"), METHODS)
def test_a_step_of_every_method_adds_up(
    make_trainer, loss, method, weighting, preset, kl, updates, old, aggregation
) -> None:
    minibatches, epochs = updates
    kl_settings = {"kl_coef": 0.1, "kl_kind": kl} if kl else {}
    trainer = make_trainer(
        loss=LossConfig(kind=loss, aggregation=aggregation, **kl_settings),
        advantage=AdvantageConfig(preset=preset),
        prune=PruneConfig(method=method, weighting=weighting, tau=1.0),
        updates=UpdatesConfig(
            minibatches=minibatches, epochs=epochs, old_logprobs=old, tokens_per_microbatch=128 * epochs
        ),
    )
    before = weights(trainer)
    metrics = trainer.step()
    after = weights(trainer)
    assert after.isfinite().all() and not torch.equal(after, before)
    assert all(map(math.isfinite, metrics.values()))
    dropped = {name: value for name, value in metrics.items() if name.startswith("dropped/")}
    assert metrics["rollouts/kept"] + sum(dropped.values()) == metrics["rollouts/generated"] == ROLLOUTS
    assert dropped["dropped/ungraded"] == 0
    assert (dropped["dropped/similar"] > 0) == (method != "none")
    assert (dropped["dropped/zero_advantage"] == 0) or not kl
    assert 0 < metrics["tokens/trained"] <= metrics["tokens/generated"] <= ROLLOUTS * 24
    assert metrics["optimizer/updates"] + metrics["optimizer/skipped"] == minibatches * epochs
    assert ("policy/kl" in metrics) == bool(kl)
    if epochs == minibatches == 1:
        assert metrics["policy/ratio"] == 1.0 and metrics["policy/clipped_low"] == metrics["policy/clipped_high"] == 0
        assert metrics["policy/sampler_gap"] < 1e-5, "sampler and policy are the same model"
    if epochs > 1:
        assert metrics["policy/ratio"] != 1.0
        assert metrics["policy/sampler_gap"] > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_next_rollouts_come_from_the_new_policy(make_trainer, dtype) -> None:
    """One rank in float32 has one memory for both; elsewhere weights are handed over."""
    trainer = make_trainer(model=ModelConfig(path="builtin:demo", dtype=str(dtype).removeprefix("torch.")))
    before = weights(trainer)
    trainer.step()
    assert not torch.equal(weights(trainer), before)
    trained = dict(full_weights(trainer.parts.policy))
    for name, sampled in trainer.parts.sampler.model.named_parameters():
        assert torch.equal(sampled, trained[name].to(dtype)), name
        assert (sampled.data_ptr() == trained[name].data_ptr()) == (dtype == torch.float32)


def two_operators(hidden, weight, targets, *, importance, **settings):
    """What the fused operator replaces: all logits made again for the gradient."""
    head = {name: settings.pop(name) for name in ("row_index", "bias", "temperature", "softcap", "logit_scale")}
    logprobs, entropy = ops.packed_logprobs(hidden, weight, targets, **head)
    loss, stats = ops.policy_loss(logprobs, **settings)
    return loss, logprobs.detach(), entropy.detach(), stats


@pytest.mark.parametrize("updates", [(1, 1), (2, 2)], ids=["one update", "four updates"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_fused_update_is_that_of_the_two_operators(make_trainer, monkeypatch, kind, updates) -> None:
    """With plain gradient descent, where a difference of the gradients stays as small as it is."""
    results = []
    for operator in (ops.fused_policy_loss, two_operators):
        monkeypatch.setattr(ops, "fused_policy_loss", operator)
        kl = 0.1 if kind in ("grpo", "gspo") else 0.0
        trainer = make_trainer(
            loss=LossConfig(kind=kind, kl_coef=kl, clip_low=1e-3, clip_high=1e-3),
            prune=PruneConfig(method="none"),
            optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=1e9),
            updates=UpdatesConfig(minibatches=updates[0], epochs=updates[1], tokens_per_microbatch=256),
        )
        trainer.parts.optimizer = torch.optim.SGD(trainer.parts.policy.parameters(), lr=1e-2)
        before = weights(trainer)
        metrics = trainer.step()
        results.append((weights(trainer) - before, metrics))
    (ours, our_metrics), (theirs, their_metrics) = results
    assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm()) > 0
    for name, value in their_metrics.items():
        if not name.startswith("seconds"):
            assert our_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    if updates != (1, 1):
        assert our_metrics["policy/clipped_low"] + our_metrics["policy/clipped_high"] > 0


def halved(trainer: Trainer) -> Trainer:
    """Its sampler reports half of each probability."""
    sample = trainer.parts.sampler.sample

    def report(*args: object, **settings: object) -> list:
        groups = sample(*args, **settings)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.rollout_logprobs = [x - math.log(2.0) for x in rollout.rollout_logprobs]
        return groups

    trainer.parts.sampler.sample = report
    return trainer


IMPORTANCE = [
    # kind, cap, weight of each token that follows where each token is twice as likely as the sampler said
    ("token_truncate", 1.5, 1.5),
    ("token_truncate", 2.5, 2.0),
    ("token_mask", 1.5, 0.0),
    ("token_mask", 2.5, 2.0),
    ("sequence_truncate", 1.5, 1.5),
    ("sequence_mask", 1.5, 0.0),
    ("sequence_geometric", 1.5, 0.0),
    ("sequence_geometric", 2.5, 1.0),
]


def test_importance_weights_correct_the_update(make_trainer) -> None:
    """Each one multiplies the whole update, here by one number."""
    moves, settings = [], {"optimizer": OptimizerConfig(lr=1e3, max_grad_norm=1e9)}
    for kind, cap, weight in [("none", 2.0, 1.0), *IMPORTANCE]:
        loss = LossConfig(importance=ImportanceConfig(kind=kind, cap=cap))
        trainer = halved(make_trainer(loss=loss, **settings))
        trainer.parts.optimizer = torch.optim.SGD(trainer.parts.policy.parameters(), lr=1.0)
        before = weights(trainer)
        metrics = trainer.step()
        moves.append(weights(trainer) - before)
        assert float((moves[-1] - weight * moves[0]).norm()) <= 1e-5 * float(moves[0].norm()) > 0
        if kind != "none":
            assert metrics["policy/importance"] == pytest.approx(weight, rel=1e-5)
            assert metrics["policy/importance_cut"] == float(cap < 2.0)


def test_importance_weights_of_several_updates_are_those_of_the_first(make_trainer) -> None:
    """They come from the old logprobs, however far the policy has moved since."""
    loss = LossConfig(importance=ImportanceConfig(kind="token_truncate", cap=2.5))
    metrics = halved(make_trainer(loss=loss, updates=UpdatesConfig(minibatches=2, epochs=2))).step()
    assert metrics["policy/importance"] == pytest.approx(2.0, rel=1e-5)
    assert metrics["policy/ratio"] != 1.0


@pytest.mark.parametrize("kind", ["grpo", "gspo", "gspo_token", "cispo"])
def test_later_updates_of_a_step_are_clipped(make_trainer, kind: str) -> None:
    """L10, L11: with bounds of almost nothing every token with an advantage has moved out of them or against it by the
    second epoch."""
    bounds = LossConfig(kind=kind, clip_low=1e-6, clip_high=1e-6)
    metrics = make_trainer(loss=bounds, updates=UpdatesConfig(epochs=2)).step()
    clipped = metrics["policy/clipped_low"] + metrics["policy/clipped_high"]
    # Means are over the tokens of both epochs; in the first the ratio is 1 throughout, in the second most have moved.
    assert 0.25 < clipped <= 0.5


def test_rollout_logprobs_as_old_ones_give_the_same_step_where_nothing_differs(make_trainer) -> None:
    """Sampler and policy are one model in float32, so both ways agree to rounding."""
    steps = []
    for old in ("recompute", "rollout"):
        trainer = make_trainer(updates=UpdatesConfig(epochs=2, old_logprobs=old))
        before = weights(trainer)
        trainer.step()
        steps.append(weights(trainer) - before)
    assert (steps[0] - steps[1]).norm() < 1e-3 * steps[0].norm()


def test_a_stop_between_steps_leaves_no_trace(make_trainer) -> None:
    """C12 and invariant (c), with everything that has a state: two updates a step, epochs, a reference, a warm-up."""
    settings = {
        "loss": LossConfig(kind="dapo", kl_coef=0.01),
        "updates": UpdatesConfig(minibatches=2, epochs=2),
        "optimizer": OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=3),
    }
    whole = make_trainer(**settings)
    for _ in range(2):
        whole.step()
    run = TrainingRun(whole)
    run.accuracy_before = {"avg@1": 0.25}
    run.save()
    expected = [whole.step() for _ in range(2)]
    again = make_trainer(**settings)
    resumed = TrainingRun(again)
    assert resumed.resume()
    assert again.steps_done == 2 and resumed.accuracy_before == {"avg@1": 0.25}
    for metrics in expected:
        ours = again.step()
        assert {k: v for k, v in ours.items() if not k.startswith("seconds/")} == {
            k: v for k, v in metrics.items() if not k.startswith("seconds/")
        }
    assert torch.equal(weights(again), weights(whole))


def test_resuming_from_nothing_is_a_fresh_start(make_trainer) -> None:
    trainer = make_trainer()
    assert not TrainingRun(trainer).resume() and trainer.steps_done == 0


def test_gradients_that_are_not_finite_change_nothing_and_end_a_run_that_makes_no_others(make_trainer) -> None:
    trainer = make_trainer()
    broken = next(trainer.parts.policy.parameters()).register_hook(lambda gradient: gradient * math.nan)
    before = weights(trainer)
    for _ in range(BAD_GRADIENTS_IN_A_ROW - 1):
        metrics = trainer.step()
        assert metrics["optimizer/updates"] == 0 and metrics["optimizer/skipped"] == 1
    assert torch.equal(weights(trainer), before)
    assert not trainer.parts.optimizer.state, "neither did the moments"
    with pytest.raises(RuntimeError, match=rf"step 5: {BAD_GRADIENTS_IN_A_ROW} gradients in a row were not finite"):
        trainer.step()
    broken.remove()
    trainer.bad_gradients = BAD_GRADIENTS_IN_A_ROW - 1
    trainer.step()
    assert trainer.bad_gradients == 0, "a good one starts the count anew"


def test_the_learning_rate_reaches_the_optimizer(make_trainer) -> None:
    trainer = make_trainer(optimizer=OptimizerConfig(lr=1e-3, schedule="linear", warmup_steps=2))
    rates = [trainer.step()["optimizer/lr"] for _ in range(3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])
    assert trainer.parts.optimizer.param_groups[0]["lr"] == rates[-1]


def test_a_window_that_is_too_short_for_sharing_is_said_once(make_trainer) -> None:
    trainer = make_trainer()
    said: list[str] = []

    class Log:
        say = said.append

    trainer.parts.log = Log()
    trainer.longest_shared = 100
    trainer._warn_of_window()
    assert said == [
        "updates.share_prompts: the model's sliding window of 100 tokens does not cover data.max_prompt_tokens + "
        "rollout.max_completion_tokens (2072); longer rollouts get a prompt each"
    ]
    trainer.longest_shared = math.inf
    trainer._warn_of_window()
    assert len(said) == 1


def test_prompts_are_shared_and_checked_unless_the_config_says_no(make_trainer) -> None:
    for share in (True, False):
        trainer = make_trainer(updates=UpdatesConfig(share_prompts=share, tokens_per_microbatch=128))
        metrics = trainer.step()
        assert trainer.sharing_check.done is share
        assert (metrics["flops_shared/update"] > 0) is share
