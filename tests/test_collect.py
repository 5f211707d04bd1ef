"""Collection: rounds, refills that end, and draws that go on where a group stands."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fastrl_fast.budget import build_budget
from fastrl_fast.collect import INDICES_PER_TRY, Collected, Collector
from fastrl_fast.config import (
    AdvantageConfig,
    BudgetConfig,
    Config,
    DataConfig,
    ModelConfig,
    PruneConfig,
    RewardConfig,
    RolloutConfig,
)
from fastrl_fast.draws import draw
from fastrl_fast.drop_reasons import FILTERED, SURPLUS, UNGRADED
from fastrl_fast.metrics import Clock
from fastrl_fast.types import Group, Prompt, Rollout

PROMPTS = [Prompt(f"p{i}", [1], "ask", {"rate": rate}) for i, rate in enumerate([0.0, 1.0, 0.5, 0.2, 0.9])]


class Data:
    """Hands out the five prompts in turn for ever."""

    def __init__(self) -> None:
        self.position = 0

    def next_prompts(self, count: int) -> list[Prompt]:
        taken = [PROMPTS[(self.position + i) % len(PROMPTS)] for i in range(count)]
        self.position += count
        return taken


class Sampler:
    """Completions are functions of (seed, step, prompt, index), as the protocol asks."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], list[int], int]] = []

    def sample(
        self, prompts, group_sizes, *, seed, step, first_index=0, temperature=None, finished=None
    ) -> list[Group]:
        self.calls.append(([p.id for p in prompts], group_sizes, first_index))
        groups = [
            Group(p, [self.rollout(seed, step, p, first_index + k) for k in range(size)])
            for p, size in zip(prompts, group_sizes, strict=True)
        ]
        for group in groups[::-1] if finished else ():
            finished(group)
        return groups

    def rollout(self, seed, step, prompt, index) -> Rollout:
        number = int(draw(seed, step, prompt.id, index) * 1e6)
        return Rollout([number], [-1.0], "stop", text=str(number))


class Grader:
    """Right with the prompt's own rate, decided by the completion."""

    def submit(self, *batch, expected):
        return SimpleNamespace(result=lambda: self.grade(*batch))

    def grade(self, prompts, completions, columns) -> list[dict[str, float | None]]:
        return [
            {"exact": float(int(text) < 1e6 * rate)} for text, rate in zip(completions, columns["rate"], strict=True)
        ]


def config(**sections) -> Config:
    return Config(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d", prompts_per_step=sections.pop("prompts", 5)),
        reward=RewardConfig(functions={"exact": 1.0}),
        **({"prune": PruneConfig(method="none")} | sections),
    )


def collector(settings: Config) -> Collector:
    return Collector(settings, Data(), Sampler(), Grader(), build_budget(settings, prompts=5), Clock())


def texts(groups: list[Group]) -> list[tuple[str, list[str]]]:
    return [(group.prompt.id, [rollout.text for rollout in group.rollouts]) for group in groups]


def test_a_fixed_budget_is_one_call_of_the_sampler(process_group):
    """Every feature off: what a plain trainer would do."""
    made = collector(config())
    collected = made.collect(3)
    assert made.sampler.calls == [(["p0", "p1", "p2", "p3", "p4"], [8] * 5, 0)]
    assert texts(collected.groups) == texts(Sampler().sample(PROMPTS, [8] * 5, seed=0, step=3))
    assert collected.left_out == [] and [g.number for g in collected.groups] == [0, 1, 2, 3, 4]
    assert collected.counts == {
        "prompts/drawn": 5,
        "prompts/skipped": 0,
        "collect/tries": 1,
        "collect/rounds": 1,
    }
    assert set(made.clock.seconds) == {"sample", "grade"}


def test_rescue_goes_on_where_the_group_stands(process_group):
    budget = BudgetConfig(kind="aero", group_size=4, extra=3, max_group_size=12)
    made = collector(config(budget=budget))
    collected = made.collect(0)
    whole = dict(texts(Sampler().sample(PROMPTS, [12] * 5, seed=0, step=0)))
    for group, (prompt_id, mine) in zip(collected.groups, texts(collected.groups), strict=True):
        assert mine == whole[prompt_id][: len(mine)], "rounds give what one large group would have held"
        right = [rollout.right for rollout in group.rollouts]
        assert len(mine) == 12 if not any(right) else len(mine) == 4 or not any(right[: len(mine) - 3])
    assert len(collected.groups[0].rollouts) == 12 and len(collected.groups[1].rollouts) == 4
    assert made.sampler.calls[1][2] == 4 and made.sampler.calls[-1][2] == 10
    assert [call[1] for call in made.sampler.calls[-1:]] == [[2]], "the last round is cut at the ceiling"
    assert collected.counts["collect/rounds"] == len(made.sampler.calls) == 4


def test_rewards_and_right_of_every_round(process_group):
    collected = collector(config(budget=BudgetConfig(kind="reinforce_ada", max_group_size=32, extra=8))).collect(0)
    for group in collected.groups:
        for rollout in group.rollouts:
            expected = float(int(rollout.text) < 1e6 * group.prompt.columns["rate"])
            assert (rollout.reward, rollout.right, rollout.rewards["exact"]) == (expected, expected == 1.0, expected)


def filtered(settings: BudgetConfig, prompts: int = 4) -> tuple[Collected, Collector]:
    made = collector(config(budget=settings, prompts=prompts))
    return made.collect(0), made


def test_filtered_groups_are_replaced(process_group):
    collected, _ = filtered(BudgetConfig(filter=True))
    assert len(collected.groups) == 4
    for group in collected.groups:
        assert 0 < sum(r.right for r in group.rollouts) < 8 and all(r.kept for r in group.rollouts)
    assert {g.prompt.id for g in collected.left_out} >= {"p0", "p1"}
    assert {r.drop_reason for g in collected.left_out for r in g.rollouts} == {FILTERED}
    assert all(g.dead for g in collected.left_out)
    numbers = [g.number for g in collected.groups + collected.left_out]
    assert sorted(numbers) == list(range(int(collected.counts["prompts/drawn"])))
    assert [o.trained for o in collected.outcomes()].count(True) == 4


def test_a_prompt_met_again_draws_anew(process_group):
    collected, made = filtered(BudgetConfig(filter=True))
    firsts = [call[2] for call in made.sampler.calls]
    assert firsts == [i * INDICES_PER_TRY for i in range(len(firsts))]
    seen = [(g.prompt.id, tuple(r.text for r in g.rollouts)) for g in collected.groups + collected.left_out]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("action", ["train", "skip"])
def test_tries_run_out(process_group, action, monkeypatch):
    """P01: nothing ever passes; three tries, then the action."""
    monkeypatch.setattr(Grader, "grade", lambda self, p, c, columns: [{"exact": 1.0} for _ in c])
    collected, _ = filtered(BudgetConfig(filter=True, tries=3, when_short=action))
    assert collected.groups == [] and len(collected.left_out) == 12
    assert collected.counts["collect/tries"] == 3


def test_short_steps(process_group, monkeypatch):
    """One prompt in five passes: what there is after two tries is trained on, or the step is skipped."""

    def grade(self, prompts, completions, columns):
        return [{"exact": float(i % 2) if rate == 0.5 else 0.0} for i, rate in enumerate(columns["rate"])]

    monkeypatch.setattr(Grader, "grade", grade)
    some, _ = filtered(BudgetConfig(filter=True, tries=2))
    assert [g.prompt.id for g in some.groups] == ["p2", "p2"] or [g.prompt.id for g in some.groups] == ["p2"]
    none, _ = filtered(BudgetConfig(filter=True, tries=2, when_short="skip"))
    assert none.groups == []
    assert {r.drop_reason for g in none.left_out if g.prompt.id == "p2" for r in g.rollouts} == {SURPLUS}


def test_stop_names_the_setting(process_group, monkeypatch):
    monkeypatch.setattr(Grader, "grade", lambda self, p, c, columns: [{"exact": 0.0} for _ in c])
    with pytest.raises(ValueError, match=r"^budget\.tries must be greater than 2 .* 0 of 4 groups were found"):
        filtered(BudgetConfig(filter=True, tries=2, when_short="stop"))


def test_filter_on_reward_and_ungraded_groups(process_group, monkeypatch):
    def grade(self, prompts, completions, columns):
        return [{"exact": None if rate == 0.0 else rate} for rate in columns["rate"]]

    monkeypatch.setattr(Grader, "grade", grade)
    settings = BudgetConfig(filter=True, filter_on="reward", filter_low=0.15, filter_high=0.9, tries=1)
    collected, _ = filtered(settings, prompts=5)
    assert [g.prompt.id for g in collected.groups] == ["p2", "p3"]
    reasons = {g.prompt.id: {r.drop_reason for r in g.rollouts} for g in collected.left_out}
    assert reasons == {"p0": {UNGRADED}, "p1": {FILTERED}, "p4": {FILTERED}}


def test_skipped_prompts_are_replaced_before_sampling(process_group):
    made = collector(config(budget=BudgetConfig(kind="greso", group_size=2, tries=50), prompts=3))
    made.budget.alike = {"p0": (9, "hard"), "p1": (9, "easy")}
    collected = made.collect(0)
    assert len(collected.groups) == 3
    assert {g.prompt.id for g in collected.groups} <= {"p2", "p3", "p4"}
    assert collected.counts["prompts/skipped"] == collected.counts["prompts/drawn"] - 3 > 0


def test_groups_carry_the_weight_of_their_lot(process_group):
    made = collector(config(budget=BudgetConfig(kind="dppo", group_size=2, skip=0.75, tries=50), prompts=3))
    made.budget.load_state_dict({"dead": ["p0", "p1"]})
    seen = {g.prompt.id: g.weight for step in range(8) for g in made.collect(step).groups}
    assert seen.items() >= {"p2": 1.0, "p3": 1.0, "p4": 1.0}.items()
    assert {seen[name] for name in seen.keys() & {"p0", "p1"}} == {4.0}


def test_overlong_completions_lose_up_to_one(process_group, monkeypatch):
    """DAPO (3.8): 0 up to L_max - L_c, then (L_max - L_c - L) / L_c, -1 at L_max; right answers stay right."""
    lengths = iter([5, 6, 7, 8, 9, 10, 0, 10])

    def rollout(self, seed, step, prompt, index):
        return Rollout([1] * (n := next(lengths)), [-1.0] * n, "stop", text="0")

    monkeypatch.setattr(Sampler, "rollout", rollout)
    settings = config(prompts=1, rollout=RolloutConfig(max_completion_tokens=10))
    settings = replace(settings, reward=RewardConfig(functions={"exact": 1.0}, overlong_buffer=4))
    monkeypatch.setattr(Grader, "grade", lambda self, p, c, columns: [{"exact": 1.0} for _ in c])
    (group,) = collector(settings).collect(0).groups
    assert [r.reward for r in group.rollouts] == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 1.0, 0.0]
    assert all(r.right for r in group.rollouts)


def test_greso_surplus_is_left_out(process_group, monkeypatch):
    monkeypatch.setattr(Grader, "grade", lambda self, p, c, columns: [{"exact": float(i % 2)} for i, _ in enumerate(c)])
    made = collector(config(budget=BudgetConfig(kind="greso", filter=True), prompts=4))
    collected = made.collect(0)
    assert [g.number for g in collected.groups] == [0, 1, 2, 3], "1.25 x 4 were sampled, the first four are used"
    assert {r.drop_reason for g in collected.left_out for r in g.rollouts} == {SURPLUS}


def test_parts_that_contradict_each_other_are_refused():
    def mistake(**sections) -> str:
        with pytest.raises(ValueError) as error:
            config(**sections)
        return str(error.value)

    posterior = AdvantageConfig(dead_groups="posterior_z")
    assert "advantage.dead_groups must be drop" in mistake(budget=BudgetConfig(filter=True), advantage=posterior)
    kept = AdvantageConfig(over="kept")
    for method in ("none", "mdap", "cppo", "dppo"):
        assert "advantage.over must be pool" in mistake(prune=PruneConfig(method=method), advantage=kept)
    assert "prune.keep_fraction must be at least 2 / 2" in mistake(
        prune=PruneConfig(method="pods"), budget=BudgetConfig(kind="ars")
    )
    for method in (
        {"budget": BudgetConfig(kind="aero")},
        {"prune": PruneConfig(method="aero")},
        {"advantage": posterior},
        {"budget": BudgetConfig(filter=True)},
    ):
        settings = config()
        with pytest.raises(ValueError, match=r"^reward\.right must be the name of a reward that grades answers"):
            replace(settings, reward=RewardConfig(functions={"format": 1.0, "exact": 1.0}), **method)
        replace(settings, reward=RewardConfig(functions={"format": 1.0, "exact": 1.0}, right="exact"), **method)
    with pytest.raises(ValueError, match=r"reward\.right must be one of reward\.functions \(math, format\)"):
        RewardConfig(right="exact")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BudgetConfig(kind="aero", max_group_size=4), "budget.max_group_size must be at least"),
        (lambda: BudgetConfig(kind="ars", min_group_size=9), "budget.min_group_size must be from 2 to"),
        (lambda: BudgetConfig(extra=0), "budget.extra must be 1 or greater, got 0"),
        (lambda: BudgetConfig(tries=0), "budget.tries must be 1 or greater, got 0"),
        (lambda: BudgetConfig(epoch_steps=0), "budget.epoch_steps must be 1 or"),
        (lambda: BudgetConfig(filter_low=0.9, filter_high=0.5), "budget.filter_high must be greater than"),
        (lambda: PruneConfig(keep=1), "prune.keep must be 2 or greater, got 1"),
        (lambda: PruneConfig(keep_fraction=0.0), "prune.keep_fraction must be in (0, 1], got 0.0"),
        (lambda: PruneConfig(wrong_per_right=-1.0), "prune.wrong_per_right must be 0 or greater, got -1.0"),
        (lambda: PruneConfig(method="pods", align=4), "prune.method must be one of mdap"),
        (lambda: PruneConfig(align=4, weighting="multiplicity"), "prune.weighting must be none"),
        (lambda: PruneConfig(method="cppo", weighting="multiplicity"), "prune.weighting must be none unless"),
        (lambda: PruneConfig(ngram=5), "prune.ngram must be from 1 to 4, got 5"),
        (lambda: PruneConfig(ngram=2, similarity="gradient"), "prune.ngram must be 1 where prune.similarity is"),
        (lambda: PruneConfig(method="pods", weighting="match"), "prune.weighting must be none or multiplicity unless"),
        (lambda: PruneConfig(method="match", align=4), "prune.method must be one of mdap"),
        (lambda: BudgetConfig(skip=1.0), "budget.skip must be in [0, 1), got 1.0"),
        (lambda: RewardConfig(overlong_buffer=-1), "reward.overlong_buffer must be 0 or greater, got -1"),
        (lambda: AdvantageConfig(posterior_decay=0.5), "advantage.dead_groups must be one of the posteriors"),
        (lambda: AdvantageConfig(posterior_decay=1.5), "advantage.posterior_decay must be in [0, 1], got 1.5"),
    ],
)
def test_settings_name_field_rule_and_value(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value) and ", got " in str(error.value)


def test_the_collector_keeps_no_state_between_steps(process_group):
    """Two collectors with the same budget state and cursor collect the same, whatever one did before."""
    settings = config(budget=BudgetConfig(kind="knapsack", max_group_size=16))
    one = collector(settings)
    one.budget.observe(one.collect(0).outcomes(), step=1, total_steps=9)
    other = collector(replace(settings))
    other.budget.load_state_dict(copy.deepcopy(one.budget.state_dict()))
    other.data.position = one.data.position
    assert texts(one.collect(1).groups) == texts(other.collect(1).groups)


def test_a_rank_without_prompts_grades_nothing(process_group, monkeypatch):
    """Fewer prompts than ranks, or none to extend here: there are no columns then that a grader could miss."""
    monkeypatch.setattr("fastrl_fast.distributed.share", lambda count: slice(0, 0))
    collected = collector(config()).collect(0)
    assert collected.groups == [] and collected.counts["prompts/drawn"] > 0
