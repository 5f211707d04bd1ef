"""Public bug reports about pruning, filters and shares of ranks, each on its smallest input."""

import math

import pytest
import torch

from fastrl_fast.advantage import assign_advantages
from fastrl_fast.budget.outcome import Outcome
from fastrl_fast.config import BudgetConfig, Config, DataConfig, ModelConfig, PruneConfig, RewardConfig
from fastrl_fast.microbatches import plan_microbatches
from fastrl_fast.ops import choose_rollouts
from fastrl_fast.packing import (
    ModelShape,
    Sequence,
    divisor,
    pack,
    split_minibatches,
    to_train_group,
)
from fastrl_fast.prune import prune
from fastrl_fast.types import Group, Prompt, Rollout

SHAPE = ModelShape(parameters=1000, layers=2, hidden=16)


def sequence(length: int) -> Sequence:
    return Sequence([1], [2] * (length - 1), [0.0] * (length - 1), 1.0, 1.0)


def plan(lengths: list[int], *, ranks: int, budget: int = 100) -> list[list[list[int]]]:
    sequences = [sequence(length) for length in lengths]
    return plan_microbatches(sequences, ranks=ranks, tokens_per_microbatch=budget, shape=SHAPE)


def group(rewards: list[float], texts: list[list[int]] | None = None) -> Group:
    texts = texts or [[i, i + 50] for i in range(len(rewards))]
    rollouts = [Rollout(t, [-1.0] * len(t), "stop", reward=r) for t, r in zip(texts, rewards, strict=True)]
    made = Group(Prompt("p", [1], "text", {}), rollouts)
    assign_advantages([made], preset="fastrl")
    return made


def choose(rows: list[list[float]], *, rule: str, k: int) -> list[int]:
    vectors = torch.tensor(rows, dtype=torch.float32)
    choice = choose_rollouts(vectors, torch.ones(len(rows)), torch.tensor([0, len(rows)]), rule=rule, k=k, seed=0)
    return [i for _, i in sorted((turn, i) for i, turn in enumerate(choice.order.tolist()) if turn >= 0)]


def test_P02_a_step_that_loses_everything_has_an_empty_update() -> None:
    made = group([1.0, 1.0])
    prune([made], PruneConfig(), kl=False)
    trained = to_train_group(made)
    assert not trained.sequences
    assert plan([], ranks=3) == [[], [], []], "no rank has a micro-batch"


def test_P03_kl_keeps_what_has_no_advantage() -> None:
    for kl in (False, True):
        made = group([1.0, 1.0])
        prune([made], PruneConfig(method="none"), kl=kl)
        assert [rollout.kept for rollout in made.rollouts] == [kl, kl]


def test_P04_nothing_to_train_on_is_dropped_and_counted() -> None:
    made = group([1.0, 0.0, 1.0], [[], [1], [2]])
    prune([made], PruneConfig(method="none"), kl=True)
    assert made.rollouts[0].drop_reason == "ungraded"


@pytest.mark.parametrize(("rows", "ranks"), [(206, 4), (512, 6), (2, 4), (1, 4), (0, 2)])
def test_P05_no_count_has_to_divide(rows: int, ranks: int) -> None:
    plans = plan([20] * rows, ranks=ranks)
    assert sorted(i for rank in plans for batch in rank for i in batch) == list(range(rows))
    assert len({len(rank) for rank in plans}) == 1


@pytest.mark.parametrize(("rows", "parts"), [(124, 15), (7, 5), (3, 5), (0, 2)])
def test_P07_there_are_as_many_parts_as_asked_for(rows: int, parts: int) -> None:
    groups = [to_train_group(group([0.0, 1.0])) for _ in range(rows)]
    sizes = [len(part) for part in split_minibatches(groups, parts)]
    assert len(sizes) == parts and sum(sizes) == rows and max(sizes) - min(sizes) <= 1


def test_P08_a_rank_without_a_sample_runs_as_many_passes() -> None:
    plans = plan([30], ranks=2)
    assert [len(rank) for rank in plans] == [1, 1] and plans[1] == [[]]
    dummy = pack([])
    assert dummy.input_ids.numel() == 1 and dummy.targets.numel() == 0


def test_P10_the_number_of_micro_batches_is_agreed() -> None:
    plans = plan([95] * 5 + [20] * 5, ranks=2)
    assert len(plans[0]) == len(plans[1]) and sum(map(len, (b for rank in plans for b in rank))) == 10


def test_P11_fewer_samples_than_micro_batches_on_a_rank() -> None:
    plans = plan([100] * 3, ranks=2)
    assert [len(rank) for rank in plans] == [2, 2] and plans[1][1] == [], "a dummy takes part in the second pass"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_P14_a_broken_row_is_left_out_and_the_loop_ends(broken: float) -> None:
    for rule in ("maxmin", "dpp", "match"):
        assert 0 not in choose([[1, broken], [1, 0], [0, 1]], rule=rule, k=3)


def test_P15_a_zero_row_is_like_nothing_and_comes_last() -> None:
    assert choose([[0, 0, 0], [1, 0, 0], [0.9, 0.1, 0]], rule="maxmin", k=3)[-1] == 0


def test_P16_different_ones_are_chosen_not_alike_ones() -> None:
    assert choose([[1, 0], [1, 0], [0, 1]], rule="maxmin", k=2) == [0, 2]


def test_P17_the_divisor_is_that_of_the_tokens_there_are() -> None:
    groups = [to_train_group(group([0.0, 1.0])), to_train_group(group([1.0, 1.0]))]
    assert divisor(groups[:1]).loss_tokens == 4
    config = BudgetConfig(filter=True)
    assert config.tries == 10 and config.when_short == "train", "refilled, a bounded number of times"


@pytest.mark.parametrize(("size", "chance"), [(2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)])
def test_P18_the_share_of_dead_groups_is_known(size: int, chance: float) -> None:
    p = 0.1819
    dead = 0.0
    for right in range(size + 1):
        made = group([1.0] * right + [0.0] * (size - right))
        dead += made.dead * math.comb(size, right) * p**right * (1 - p) ** (size - right)
    assert dead == pytest.approx(chance, abs=1e-3)


@pytest.mark.parametrize("kind", ["ars", "greso", "knapsack", "reinforce_ada", "aero"])
def test_P19_a_budget_that_was_restored_plans_alike(kind: str) -> None:
    import json

    from fastrl_fast.budget import build_budget

    config = Config(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d", prompts_per_step=4),
        reward=RewardConfig(functions={"exact": 1.0}),
        budget=BudgetConfig(kind=kind, group_size=4),  # type: ignore[arg-type]
        prune=PruneConfig(method="aero" if kind == "aero" else "none"),
        max_steps=20,
    )
    prompts = [Prompt(f"p{i}", [1], "t", {}) for i in range(4)]
    whole, restored = (build_budget(config, prompts=4) for _ in range(2))
    for step in range(3):
        groups = [group([float(i % 2)] * 2 + [float(step % 2)] * 2) for i in range(4)]
        for prompt, made in zip(prompts, groups, strict=True):
            made.prompt = prompt
        whole.observe([Outcome.of(made) for made in groups], step=step + 1, total_steps=20)
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert restored.plan(prompts, step=3) == whole.plan(prompts, step=3)
