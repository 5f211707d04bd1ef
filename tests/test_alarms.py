"""Each alarm fires on what it is for, once, and stays silent a hair below its threshold."""

import dataclasses
import math

import pytest

from fastrl_fast import alarms
from fastrl_fast.alarms import ALARMS, Alarms
from fastrl_fast.config import BudgetConfig, Config, DataConfig, ModelConfig, OptimizerConfig, RolloutConfig
from fastrl_fast.metrics import RunLog
from fastrl_fast.trainer import Trainer
from fastrl_fast.training_run import TrainingRun

PLAIN = Config(
    model=ModelConfig(path="builtin:demo"),
    data=DataConfig(path="demo:train?size=64", prompts_per_step=4),
    rollout=RolloutConfig(max_completion_tokens=24),
)
HALF = dataclasses.replace(PLAIN, model=ModelConfig(path="builtin:demo", dtype="bfloat16"))
STAGED = dataclasses.replace(PLAIN, budget=BudgetConfig(kind="aero", group_size=4, max_group_size=20))
FILTERED = dataclasses.replace(PLAIN, budget=BudgetConfig(filter=True, tries=3))
GOOD = {
    "completion/truncated_fraction": 0.1,
    "rollouts/graded": 40.0,
    "rollouts/generated": 40.0,
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "groups/count": 10.0,
    "groups/dead": 3.0,
    "prompts/skipped": 0.0,
    "collect/tries": 1.0,
    "grader/timeouts": 0.0,
    "grader/worker_deaths": 0.0,
    "policy/sampler_gap": 1e-6,
    "policy/logprobs_above_zero": 0.0,
    "optimizer/updates": 1.0,
    "optimizer/not_finite": 0.0,
    "optimizer/lr": 1e-6,
}
CASES = [
    # alarm, config, metrics at which it just holds, metrics at which it just does not, a word of the text
    ("truncation", PLAIN, {"completion/truncated_fraction": 0.26}, {"completion/truncated_fraction": 0.25}, "26%"),
    ("same_reward", PLAIN, {"reward/std": 9e-7}, {"reward/std": 1e-6}, "reward 0.5 in 3 steps"),
    ("same_reward", PLAIN, {"reward/std": 0.0}, {"reward/std": 0.0, "rollouts/graded": 1.0}, "rollouts.jsonl"),
    ("nothing_graded", PLAIN, {"rollouts/graded": 0.0, "groups/dead": 10.0}, {"rollouts/graded": 1.0}, "no rollout"),
    ("dead_groups", PLAIN, {"groups/dead": 9.0}, {"groups/dead": 8.0}, "90% of the groups"),
    ("sampler_gap", PLAIN, {"policy/sampler_gap": 0.0011}, {"policy/sampler_gap": 0.001}, "0.0011"),
    ("sampler_gap", HALF, {"policy/sampler_gap": 0.031}, {"policy/sampler_gap": 0.03}, "0.0310"),
    ("sampler_gap", PLAIN, {"policy/sampler_gap": 1.0}, {"policy/sampler_gap": 1.0, "optimizer/updates": 2.0}, "1.0"),
    ("grader_timeouts", PLAIN, {"grader/timeouts": 2.0}, {}, "2 answers took longer than reward.timeout (10 s)"),
    ("grader_timeouts", PLAIN, {"grader/worker_deaths": 1.0}, {}, "1 ended their worker"),
    ("logprob_above_zero", PLAIN, {"policy/logprobs_above_zero": 1e-9}, {}, "1.0e-09"),
    ("gradient_not_finite", PLAIN, {"optimizer/not_finite": 1.0}, {}, "1 updates"),
    ("learning_rate_zero", PLAIN, {"optimizer/lr": 0.0}, {"optimizer/lr": 1e-300}, "changes nothing"),
    ("budget_at_ceiling", STAGED, {"rollouts/generated": 180.0}, {"rollouts/generated": 179.0}, "18.0 rollouts"),
    ("budget_out_of_tries", FILTERED, {"collect/tries": 3.0}, {"collect/tries": 2.0}, "budget.tries (3)"),
]


def said(config: Config, metrics: dict[str, float], *, steps: int) -> tuple[list[str], list[dict[str, float]]]:
    """What is said and the flags, over some steps with the same metrics."""
    watch, texts = Alarms(config), []
    flags = [watch.check(GOOD | metrics, texts.append) for _ in range(steps)]
    return texts, flags


def test_a_good_step_says_nothing_and_writes_every_flag() -> None:
    for config in (PLAIN, STAGED, FILTERED):
        texts, flags = said(config, {}, steps=10)
        assert texts == []
        assert flags == [{f"alarm/{alarm.name}": 0.0 for alarm in ALARMS}] * 10


@pytest.mark.parametrize(("name", "config", "bad", "good", "word"), CASES)
def test_an_alarm_fires_once_at_its_threshold(name, config, bad, good, word) -> None:
    patience = next(alarm.steps for alarm in ALARMS if alarm.name == name)
    texts, flags = said(config, bad, steps=patience + 3)
    assert len(texts) == 1 and word in texts[0], texts
    assert [flag[f"alarm/{name}"] for flag in flags] == [0.0] * (patience - 1) + [1.0] * 4
    assert sum(sum(flag.values()) for flag in flags) == 4, "no other alarm holds"
    assert said(config, good, steps=patience + 3)[0] == []


def test_every_alarm_has_a_case() -> None:
    assert {alarm.name for alarm in ALARMS} == {case[0] for case in CASES}


def test_an_interruption_starts_the_count_anew() -> None:
    watch, texts = Alarms(PLAIN), []
    for dead in (9.0, 9.0, 9.0, 9.0, 3.0, 9.0, 9.0, 9.0, 9.0):
        watch.check(GOOD | {"groups/dead": dead}, texts.append)
    assert texts == []
    watch.check(GOOD | {"groups/dead": 9.0}, texts.append)
    assert len(texts) == 1


def test_budgets_without_a_ceiling_or_tries_raise_none() -> None:
    fixed = dataclasses.replace(PLAIN, budget=BudgetConfig(group_size=16, max_group_size=16))
    assert said(fixed, {"rollouts/generated": 160.0, "collect/tries": 10.0}, steps=5)[0] == []


def test_equal_rewards_are_seen_through_the_rounding_of_their_sums() -> None:
    """128 rewards of 0.1 have a deviation of 0, and sums that say otherwise."""
    total, squares = sum([0.1] * 128), sum([0.1**2] * 128)
    deviation = math.sqrt(max(squares / 128 - (total / 128) ** 2, 0.0))
    assert 0 < deviation < alarms.SAME_REWARD


def test_a_run_tells_its_console_and_its_metrics(tmp_path, capsys, process_group) -> None:
    """A trainer on completions that are all cut: the alarm is one line, and in every step's metrics."""
    from fastrl_fast.accuracy import build_grader
    from fastrl_fast.train import build_parts, load_inputs

    config = dataclasses.replace(
        PLAIN, rollout=RolloutConfig(max_completion_tokens=3), optimizer=OptimizerConfig(lr=1e-3)
    )
    config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, functions={"exact": 1.0}, workers=1))
    log = RunLog(tmp_path, total_steps=4, trackers=[], settings={})
    with build_grader(config.reward) as grader:
        parts = build_parts(config, load_inputs(config, grader), grader, process_group, folder=tmp_path, log=log)
        TrainingRun(Trainer(config, parts, total_steps=4)).run()
    log.close()
    out = capsys.readouterr().out
    assert out.count("ALARM: 100% of the completions were cut at rollout.max_completion_tokens (3)") == 1
    assert out.count("ALARM: every rollout got the reward 0 in 3 steps running") == 1
    written = (tmp_path / "metrics.jsonl").read_text()
    assert written.count('"alarm/truncation": 1.0') == 4
    assert written.count('"alarm/same_reward": 1.0') == 2
    assert written.count('"grader/timeouts": 0.0') == 4
    assert written.count('"alarm/logprob_above_zero": 0.0') == 4
