"""Budgets: published numbers, optima by brute force, and state that survives a checkpoint."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.budget import Outcome, build_budget
from fastrl_fast.budget.budget import FixedBudget
from fastrl_fast.budget.ceiling import ArsCeiling, FixedCeiling
from fastrl_fast.budget.dppo import DppoBudget
from fastrl_fast.budget.greso import ALWAYS, GresoBudget
from fastrl_fast.budget.knapsack import KnapsackBudget, allocate, dead_chance, value
from fastrl_fast.budget.rounds import RoundsBudget
from fastrl_fast.config import BudgetConfig, Config, DataConfig, ModelConfig, PruneConfig
from fastrl_fast.types import Group, Prompt, Rollout

PROMPTS = [Prompt(f"p{i}", [1], "ask", {}) for i in range(400)]


def outcome(prompt_id: str = "p", *, n: int = 8, right: int = 0, stayed: int = 0, trained: bool = True) -> Outcome:
    return Outcome(prompt_id, n, n, right, right in (0, n), stayed, trained)


def group(right: int, wrong: int, ungraded: int = 0) -> Group:
    made = [Rollout([1], [-1.0], "stop", reward=float(i < right), right=i < right) for i in range(right + wrong)]
    return Group(PROMPTS[0], made + [Rollout([1], [-1.0], "stop") for _ in range(ungraded)])


def test_ars_example():
    """algorithms.md 1.3: m 3.1 -> 2.6, M 7 -> 6, start 8 gives 8, 8, 7, 6, 6 at a = .04, .25, .5, .75, 1."""
    ceiling = ArsCeiling(8, least=2, epoch_steps=1)
    sizes = []
    for step, mean, largest in [(4, 3.1, 7), (25, 2.6, 6), (50, 2.6, 6), (75, 2.6, 6), (100, 2.6, 6)]:
        rest = round(mean * 10) - largest
        stayed = [largest] + [rest // 9 + (i < rest % 9) for i in range(9)]
        assert sum(stayed) / 10 == pytest.approx(mean) and max(stayed) == largest
        ceiling.observe([outcome(stayed=n) for n in stayed], step=step, total_steps=100)
        sizes.append(ceiling.size)
    assert sizes == [8, 8, 7, 6, 6]


@given(m=st.integers(1, 8), spread=st.integers(0, 7), start=st.integers(2, 16))
@settings(max_examples=50, deadline=None)
def test_ars_closed_form_and_bounds(m, spread, start):
    """Stationary statistics: it lowers by (M - m)(a - 1/2), only in the second half, never below 2 or above the
    start."""
    ceiling = ArsCeiling(start, least=2, epoch_steps=1)
    for step in range(1, 11):
        ceiling.observe([outcome(stayed=m), outcome(stayed=m + 2 * spread)], step=step, total_steps=10)
        mean, largest = m + spread, m + 2 * spread
        assert ceiling.size == max(2, round(start - max(0.0, (largest - mean) * (step / 10 - 0.5))))
        assert 2 <= ceiling.size <= start


def test_ars_looks_at_trained_groups_and_whole_epochs():
    ceiling = ArsCeiling(8, least=2, epoch_steps=2)
    for step, stayed in enumerate([(2, 8), (4, 6), (1, 1), (1, 1)], start=1):
        seen = [outcome(stayed=n) for n in stayed] + [outcome(stayed=99, trained=False)]
        ceiling.observe(seen, step=step, total_steps=4)
        assert ceiling.size == 8 if step < 4 else ceiling.size == 3, "8 - (6 - 1)"
    assert ceiling.reference == 6.0, "mean 5 and largest 7 over the first epoch"
    ceiling.observe([], step=6, total_steps=4)


def test_dead_chance():
    """P18: a group of G shows nothing with p^G + (1 - p)^G."""
    for size, chance in [(2, 0.702), (4, 0.449), (8, 0.201), (16, 0.040)]:
        assert dead_chance(size, 0.1819) == pytest.approx(chance, abs=1e-3)


def test_knapsack_values():
    """algorithms.md 3.7: V(8, p)."""
    published = {0.05: 0.015, 0.125: 0.063, 0.25: 0.127, 1 / 3: 0.142, 0.5: 0.124, 0.75: 0.042, 0.95: 0.001}
    for rate, expected in published.items():
        assert value(8, rate) == pytest.approx(expected, abs=5e-4)


@given(
    rates=st.lists(st.sampled_from([0.05, 0.125, 0.25, 1 / 3, 0.5, 0.7, 0.95]), min_size=1, max_size=4),
    group_size=st.integers(2, 5),
    high=st.integers(5, 7),
)
@settings(max_examples=60, deadline=None)
def test_knapsack_is_the_optimum(rates, group_size, high):
    sizes = allocate(rates, group_size=group_size, low=2, high=high)
    assert sum(sizes) <= group_size * len(rates) and all(2 <= n <= high for n in sizes)
    best = max(
        sum(value(n, p) for n, p in zip(choice, rates, strict=True))
        for choice in itertools.product(range(2, high + 1), repeat=len(rates))
        if sum(choice) <= group_size * len(rates)
    )
    assert sum(value(n, p) for n, p in zip(sizes, rates, strict=True)) == pytest.approx(best, rel=1e-12)


def optimum(rates: list[float], total: int, low: int, high: int) -> float:
    """The dynamic programme over items and budget."""
    best = [0.0] * (total + 1)
    for rate in rates:
        table = [-math.inf] * (total + 1)
        for left in range(total + 1):
            for size in range(low, min(high, left) + 1):
                table[left] = max(table[left], best[left - size] + value(size, rate))
        best = table
    return best[total]


def test_knapsack_equals_the_dynamic_programme():
    rates = [(i % 15 + 0.5) / 16 for i in range(20)]
    sizes = allocate(list(rates), group_size=8, low=2, high=32)
    assert sum(sizes) == 160
    found = sum(value(n, p) for n, p in zip(sizes, rates, strict=True))
    assert found == pytest.approx(optimum(rates, 160, 2, 32), rel=1e-12)


def test_knapsack_corner_cases():
    assert allocate([None, None], group_size=8, low=2, high=16) == [8, 8]
    assert allocate([0.0, 1.0, None], group_size=8, low=2, high=16) == [14, 2, 8], "the rest goes to the hard prompt"
    assert allocate([0.0, 0.0, 1.0], group_size=8, low=2, high=9) == [9, 9, 2], "what nobody can use is not spent"
    assert allocate([1.0, 1.0], group_size=8, low=2, high=16) == [2, 2]
    assert allocate([], group_size=8, low=2, high=16) == []
    assert allocate([0.5, 0.25], group_size=4, low=4, high=4) == [4, 4]


def test_knapsack_learns_rates():
    budget = KnapsackBudget(8, low=2, high=16)
    assert budget.plan(PROMPTS[:2], step=0) == [8, 8]
    budget.observe([outcome("p0", right=4), outcome("p1", right=8)], step=1, total_steps=9)
    budget.observe([Outcome("p1", 8, 0, 0, True, 0, True)], step=2, total_steps=9)
    assert budget.plan(PROMPTS[:2], step=2) == [14, 2], "a visit that could not be graded is forgotten"


def test_rescue_ends_with_the_first_success_or_at_the_ceiling():
    """AERO (reconstruction): n_extra at a time while c = 0, up to n_total."""
    budget = RoundsBudget(8, extra=2, ceiling=FixedCeiling(15), right=1, wrong=0)
    assert budget.plan(PROMPTS[:2], step=0) == [8, 8]
    groups = [group(0, 8), group(1, 7), group(8, 0), group(0, 14), group(0, 15), group(0, 0, ungraded=8)]
    assert budget.extend(groups) == [2, 0, 0, 1, 0, 2]


def test_reinforce_ada_exits():
    positive = RoundsBudget(8, extra=8, ceiling=FixedCeiling(32), right=1, wrong=0)
    balanced = RoundsBudget(8, extra=8, ceiling=FixedCeiling(32), right=2, wrong=2)
    groups = [group(0, 8), group(1, 7), group(2, 6), group(7, 1), group(8, 0), group(0, 32)]
    assert positive.extend(groups) == [8, 0, 0, 0, 0, 0]
    assert balanced.extend(groups) == [8, 8, 0, 8, 8, 0]


def test_greso_skips_by_history():
    """Sampled with chance max(p^z, 0.01): within four deviations over 400 prompts, and always before any history."""
    budget = GresoBudget(4, seed=3, epoch_steps=10**9)
    assert budget.plan(PROMPTS, step=0) == [4] * 400
    for visits in (1, 2, 9):
        while budget.alike.get("p0", (0, ""))[0] < visits:
            budget.observe([outcome(p.id, right=8) for p in PROMPTS], step=1, total_steps=9)
        chance = max(0.5**visits, ALWAYS)
        drawn = [n for step in range(5) for n in budget.plan(PROMPTS, step=step)]
        share, deviation = sum(n > 0 for n in drawn) / 2000, math.sqrt(chance * (1 - chance) / 2000)
        assert set(drawn) <= {0, 4} and abs(share - chance) < 4 * deviation
    assert budget.plan(PROMPTS[5:6], step=7) == budget.plan(PROMPTS, step=7)[5:6], "a draw belongs to its prompt"
    budget.observe([outcome(p.id, right=3) for p in PROMPTS], step=1, total_steps=9)
    assert budget.plan(PROMPTS, step=0) == [4] * 400, "one mixed visit clears the history"


def test_greso_steers_to_its_targets():
    budget = GresoBudget(4, seed=0, epoch_steps=1)
    seen = [outcome(f"p{i}", right=8 if i < 1 else 0 if i < 3 else 4) for i in range(12)]
    budget.observe(seen, step=1, total_steps=9)
    assert budget.chance == {"easy": 0.5, "hard": 0.5}, "not in the first epoch"
    budget.observe(seen, step=2, total_steps=9)
    assert budget.chance == pytest.approx({"easy": 0.49, "hard": 0.49}), "1/12 easy and 2/12 hard reach their targets"
    budget.observe([outcome(f"p{i}", right=4) for i in range(12)], step=3, total_steps=9)
    assert budget.chance == pytest.approx({"easy": 0.5, "hard": 0.5})
    for step in range(4, 100):
        budget.observe([outcome("p", right=8)], step=step, total_steps=9)
    assert budget.chance == pytest.approx({"easy": 0.05, "hard": 0.95})


def test_greso_draws_more_where_many_groups_are_dead():
    budget = GresoBudget(4, seed=0, epoch_steps=1)
    assert budget.prompts_to_draw(100, target=256) == 125
    budget.observe([outcome("a", right=8), outcome("b", right=4)], step=1, total_steps=9)
    assert budget.prompts_to_draw(100, target=256) == 250
    assert budget.prompts_to_draw(256, target=256) == 384 and budget.prompts_to_draw(1, target=256) == 64


def test_dppo_skips_prompts_without_differences_by_lot():
    budget = DppoBudget(4, skip=0.7, seed=1)
    assert budget.plan(PROMPTS, step=0) == [4] * 400 and budget.weight(PROMPTS[0]) == 1.0
    budget.observe([outcome(p.id, right=8 if i % 2 else 3) for i, p in enumerate(PROMPTS)], step=1, total_steps=9)
    drawn = [budget.plan(PROMPTS, step=step) for step in range(10)]
    assert all(n == 4 for sizes in drawn for n in sizes[::2])
    skipped = sum(n == 0 for sizes in drawn for n in sizes[1::2])
    assert abs(skipped - 2000 * 0.7) < 4 * math.sqrt(2000 * 0.7 * 0.3)
    assert budget.weight(PROMPTS[1]) == pytest.approx(1 / 0.3) and budget.weight(PROMPTS[0]) == 1.0
    budget.observe([outcome("p1", right=4)], step=2, total_steps=9)
    assert budget.weight(PROMPTS[1]) == 1.0, "one mixed visit clears the history"


def test_the_first_round_has_its_dead_chance():
    """Of groups with p = 1/2 and four rollouts, 1/16 have no right answer: the share that is rescued."""
    budget = RoundsBudget(4, extra=2, ceiling=FixedCeiling(6), right=1, wrong=0)
    groups = [group(bits.bit_count(), 4 - bits.bit_count()) for bits in range(16)]
    assert sum(n > 0 for n in budget.extend(groups)) / 16 == 0.5**4


@pytest.mark.parametrize("kind", ["fixed", "ars", "aero", "aero_ars", "knapsack", "greso", "dppo", "reinforce_ada"])
def test_a_restored_budget_plans_alike(kind):
    """P19: allocations after a resume are those of an uninterrupted run."""
    config = Config(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        budget=BudgetConfig(kind=kind, epoch_steps=2),
        prune=PruneConfig(method="none"),
    )

    def step(budget, number: int) -> list[int]:
        sizes = budget.plan(PROMPTS[:20], step=number)
        seen = [outcome(p.id, right=(i * number) % 9, stayed=2 + i % 3) for i, p in enumerate(PROMPTS[:20])]
        budget.observe(seen, step=number + 1, total_steps=9)
        return sizes

    whole, first, second = (build_budget(config, prompts=64) for _ in range(3))
    for number in range(4):
        step(whole, number), step(first, number)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for number in range(4, 9):
        assert step(whole, number) == step(second, number)
    assert whole.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("max_steps", "epochs", "given", "expected"),
    [(None, 3, None, 4), (8, 1, None, 4), (7, 1, None, 1), (60, 1, 5, 5), (None, 1, None, 1)],
)
def test_epochs_of_long_and_short_runs(max_steps, epochs, given, expected):
    """A pass over 64 prompts is four steps; a run of less than two passes would never see one end in time."""
    config = Config(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d", prompts_per_step=16),
        budget=BudgetConfig(kind="ars", epoch_steps=given),
        max_steps=max_steps,
        epochs=epochs,
    )
    budget = build_budget(config, prompts=64)
    assert isinstance(budget, FixedBudget) and isinstance(budget.ceiling, ArsCeiling)
    assert budget.ceiling.epoch_steps == expected
