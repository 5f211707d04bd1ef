"""What a step cost and saved: by hand, and over a run's metrics."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.config import BudgetConfig, Config, DataConfig, LossConfig, ModelConfig, UpdatesConfig
from fastrl_fast.drop_reasons import FILTERED, SIMILAR
from fastrl_fast.packing import ModelShape, microbatch_flops, to_train_group
from fastrl_fast.savings import Passes, flop_sums, generation_saved, means, seconds_saved, totals
from fastrl_fast.types import Group, Prompt, Rollout

FLAT = ModelShape(parameters=1000, layers=0, hidden=16)
"""Without attention a token costs 2 P = 2000."""


def rollout(tokens: int, reason: str = "") -> Rollout:
    return Rollout([1] * tokens, [-1.0] * tokens, "stop", drop_reason=reason)


GROUPS = [
    Group(Prompt("a", [1] * 10, "ask", {}), [rollout(4), rollout(6, SIMILAR), rollout(0, SIMILAR)]),
    Group(Prompt("b", [1] * 20, "ask", {}), [rollout(5, FILTERED)]),
    Group(Prompt("c", [1] * 30, "ask", {}), []),
]


def sums(groups: list[Group], shape: ModelShape, passes: Passes, *, longest_shared: float = 0) -> dict[str, float]:
    """With every group in a micro-batch of its own, those that share first."""
    trained = [to_train_group(group, longest_shared=longest_shared).sequences for group in groups]
    forward = sum(microbatch_flops(sorted(some, key=lambda s: s.group is None), shape) for some in trained)
    return flop_sums(groups, shape, passes, forward=forward, longest_shared=longest_shared)


def test_flops_by_hand():
    """algorithms.md 2.4: 2 P T to sample, 2 P T for old and for reference, 6 P T to train; T includes prompts."""
    kept, dropped = 14, 16 + 10 + 25
    assert sums(GROUPS, FLAT, Passes(old=1.0, reference=1.0, update=3.0)) == {
        "flops/generation": 2000 * (10 + 4 + 6 + 20 + 5),
        "flops/old": 2000 * kept,
        "flops_saved/old": 2000 * dropped,
        "flops_shared/old": 0,
        "flops/reference": 2000 * kept,
        "flops_saved/reference": 2000 * dropped,
        "flops_shared/reference": 0,
        "flops/update": 6000 * kept,
        "flops_saved/update": 6000 * dropped,
        "flops_shared/update": 0,
    }


def test_a_shared_prompt_is_charged_once_and_saved_with_its_last_rollout():
    """10 tokens of prompt; completions of 4 and 6 kept, 5 dropped; and 20 of a prompt whose only rollout is dropped."""
    groups = [Group(GROUPS[0].prompt, [rollout(4), rollout(6), rollout(5, SIMILAR)]), GROUPS[1]]
    spent = sums(groups, FLAT, Passes(old=0.0, reference=0.0, update=3.0), longest_shared=math.inf)
    assert spent["flops/update"] == 6000 * (10 + 4 + 6)
    assert spent["flops_shared/update"] == 6000 * 10
    assert spent["flops_saved/update"] == 6000 * (5 + 20 + 5)
    # Nothing of more than 15 tokens may share: the completions of 4 and 5 do, that of 6 has a prompt of its own.
    spent = sums(groups, FLAT, Passes(old=0.0, reference=0.0, update=3.0), longest_shared=15)
    assert spent["flops/update"] == 6000 * (10 + 4 + 10 + 6)
    assert spent["flops_shared/update"] == 0
    assert spent["flops_saved/update"] == 6000 * (5 + 20 + 5)


def test_a_prompt_in_two_micro_batches_is_charged_twice():
    group = [Group(GROUPS[0].prompt, [rollout(4), rollout(6)])]
    once = FLAT.group_flops(10, [4]) + FLAT.group_flops(10, [6])
    spent = flop_sums(group, FLAT, Passes(0, 0, 1), forward=once, longest_shared=math.inf)
    assert (spent["flops/update"], spent["flops_shared/update"]) == (2000 * 30, 0)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 120), st.booleans()), max_size=6)), max_size=3
    ),
    longest=st.sampled_from([0, 40, 90, math.inf]),
)
@settings(max_examples=200, deadline=None)
def test_what_is_saved_is_what_packing_spares(groups, longest):
    """Sharing spares what prompts of their own would have added, dropping what packing all rollouts would have."""
    shape = ModelShape(parameters=1000, layers=2, hidden=16, head=300)

    def cost(dropped: str, bound: float) -> dict[str, float]:
        made = [
            Group(Prompt("a", [1] * prompt, "ask", {}), [rollout(n, "" if kept else dropped) for n, kept in lengths])
            for prompt, lengths in groups
        ]
        return sums(made, shape, Passes(old=1.0, reference=0.0, update=3.0), longest_shared=bound)

    spent = cost(SIMILAR, longest)
    assert spent["flops_shared/old"] == pytest.approx(cost(SIMILAR, 0)["flops/old"] - spent["flops/old"])
    assert spent["flops_saved/old"] == pytest.approx(cost("", longest)["flops/old"] - spent["flops/old"])


def test_attention_is_counted_once_per_token():
    """Completions behind a shared prompt cost what whole forward passes cost, less the prompts; the head reads
    completion tokens."""
    shape = ModelShape(parameters=1000, layers=2, hidden=16, head=300)
    whole = shape.forward_flops(14) + shape.forward_flops(16) - shape.forward_flops(10) + 2 * 300 * 10
    group = [Group(GROUPS[0].prompt, [rollout(4), rollout(6)])]
    spent = sums(group, shape, Passes(0, 0, 3), longest_shared=math.inf)
    assert spent["flops/generation"] == pytest.approx(whole)
    assert spent["flops/update"] == pytest.approx(3 * whole)


@pytest.mark.parametrize(
    ("updates", "settings", "kl", "expected"),
    [
        (1, {}, 0.0, (0, 0, 3)),
        (4, {}, 0.0, (1, 0, 3)),
        (4, {"old_logprobs": "rollout"}, 0.1, (0, 1, 3)),
        (1, {"epochs": 2}, 0.1, (1, 1, 6)),
    ],
)
def test_passes_are_those_that_the_trainer_runs(updates, settings, kl, expected):
    config = Config(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        loss=LossConfig(kl_coef=kl),
        updates=UpdatesConfig(**settings),
    )
    passes = Passes.of(config, updates=updates)
    assert (passes.old, passes.reference, passes.update) == expected


def test_seconds_saved_are_at_the_pace_of_the_kept():
    metrics = sums(GROUPS, FLAT, Passes(old=1.0, reference=1.0, update=3.0)) | {"rollouts/generated": 4.0}
    metrics |= generation_saved(metrics, 3, BudgetConfig(group_size=2))
    saved = seconds_saved(metrics, {"seconds/sample": 8.0, "seconds/score": 2.0, "seconds/update": 7.0})
    expected = {"sample": 8.0 * 2 / 4, "score": 2.0 * 51 / 14, "update": 7.0 * 51 / 14}
    assert saved == pytest.approx({f"seconds_saved/{name}": value for name, value in expected.items()})
    nothing = sums(GROUPS[1:], FLAT, Passes(old=0.0, reference=0.0, update=3.0)) | {"flops_saved/generation": 0.0}
    assert set(seconds_saved(nothing, {"seconds/update": 1.0}).values()) == {0.0}


@pytest.mark.parametrize(
    ("budget", "drawn", "generated", "expected"),
    [
        (BudgetConfig(kind="ars", group_size=8), 4, 24, 100 * 8 / 24),  # 6 each where 8 were possible
        (BudgetConfig(kind="aero", group_size=4, max_group_size=8), 4, 16, 100.0),  # nobody needed to be rescued
        (BudgetConfig(kind="greso", group_size=8), 6, 32, 50.0),  # two of six prompts skipped
        (BudgetConfig(kind="knapsack", group_size=8), 4, 32, 0.0),
        (BudgetConfig(), 4, 0, 0.0),
    ],
)
def test_sampling_saved_is_against_groups_of_full_size(budget, drawn, generated, expected):
    metrics = {"rollouts/generated": float(generated), "flops/generation": 100.0}
    assert generation_saved(metrics, drawn, budget) == pytest.approx({"flops_saved/generation": expected})


def test_totals_sum_what_can_be_summed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [
        {"step": 1, "reward/mean": 0.5, "flops/update": 0.1, "rollouts/kept": 3.0, "rollouts/kept_fraction": 0.5},
        {"step": 2, "reward/mean": 0.5, "flops/update": 0.2, "rollouts/kept": 4.0, "seconds_saved/update": None},
        {"step": 3, "reward/mean": 0.5, "flops/update": 0.3, "dropped/similar": 2.0, "eval/avg@1": 0.3},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in steps))
    assert totals(path) == {"flops/update": 0.6, "rollouts/kept": 7.0, "dropped/similar": 2.0}


def test_means_over_the_steps_of_a_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [
        {"step": i, "prune/fidelity": f, "groups/effective_size": 2.0, "rollouts/kept_fraction": 0.5}
        for i, f in enumerate([0.5, 1.0])
    ]
    steps.append({"step": 3, "rollouts/kept_fraction": 0.5})  # nothing was kept
    path.write_text("".join(json.dumps(record) + "\n" for record in steps))
    assert means(path) == {"prune/fidelity": 0.75, "groups/effective_size": 2.0, "rollouts/kept_fraction": 0.5}
