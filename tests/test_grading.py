"""Grading beside sampling: it has begun before the sampler is done, and it changes no value."""

import itertools
import random
import time
from pathlib import Path

import pytest

from fastrl_fast.config import RewardTerm
from fastrl_fast.grading import Grading
from fastrl_fast.rewards import Grader
from fastrl_fast.types import Group, Prompt, Rollout

REWARDS = """
from pathlib import Path

def marks(prompts, completions, folder, **columns):
    Path(folder[0], "begun").touch()
    return [float(len(c)) for c in completions]

def rank_in_group(prompts, completions, **columns):  # depends on whole groups being seen at once
    assert len(set(prompts)) * 3 == len(prompts)
    return [sum(len(other) < len(c) for p, other in zip(prompts, completions) if p == q)
            for q, c in zip(prompts, completions)]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def make_groups(count: int, folder: Path, *, seed: int = 0) -> list[Group]:
    draws = random.Random(seed)
    return [
        Group(
            Prompt(f"p{i}", [1], f"question {i}", {"folder": str(folder)}),
            [Rollout([1], [0.0], "stop", text="x" * draws.randrange(50)) for _ in range(3)],
        )
        for i in range(count)
    ]


def test_grading_begins_before_sampling_ends(file: Path, tmp_path: Path) -> None:
    """The second half is not sampled before the first is being graded."""
    groups = make_groups(2, tmp_path)
    with Grader([RewardTerm(name=f"{file}:marks", weight=1.0)], workers=1, timeout=30) as grader:
        grading = Grading(grader, [], expected=6)
        grading.add(groups[0])
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "begun").exists()
        grading.add(groups[1])
        assert [group for group, _ in grading.result()] == groups


def test_values_are_those_of_one_submission_in_any_order(file: Path, tmp_path: Path) -> None:
    groups = make_groups(40, tmp_path)
    groups.insert(7, Group(groups[0].prompt, []))
    names = ["marks", "rank_in_group"]
    with Grader([RewardTerm(name=f"{file}:{name}", weight=1.0) for name in names], workers=2, timeout=30) as grader:
        truth = {}
        for group in groups:
            if group.rollouts:
                texts = [rollout.text for rollout in group.rollouts]
                truth[group.prompt.id] = grader.grade([group.prompt.text] * 3, texts, {"folder": [str(tmp_path)] * 3})
        for seed in range(2):
            order = random.Random(seed).sample(groups, len(groups))
            grading = Grading(grader, [], expected=120)
            for group in order:
                grading.add(group)
            graded = grading.result()
            assert [group for group, _ in graded] == [group for group in order if group.rollouts]
            assert {group.prompt.id: values for group, values in graded} == truth
        assert Grading(grader, [], expected=0).result() == []


def test_a_lot_has_the_columns_of_all_prompts(tmp_path: Path) -> None:
    """As in one submission: a prompt without a column gives None, also where it is graded without those that have
    one."""
    groups = make_groups(2, tmp_path)
    (tmp_path / "hints.py").write_text(
        "def hinted(prompts, completions, hint, **columns):\n    return [h for h in hint]\n"
    )
    groups[1].prompt.columns["hint"] = 1.0
    with Grader([RewardTerm(name=f"{tmp_path}/hints.py:hinted", weight=1.0)], workers=1, timeout=30) as grader:
        grading = Grading(grader, [group.prompt for group in groups], expected=6)
        for group in groups:
            grading.add(group)
        assert [[*value.values()] for _, values in grading.result() for value in values] == [[None]] * 3 + [[1.0]] * 3


class Refusing:
    """A grader that takes two lots and finds a column missing in the third."""

    def __init__(self) -> None:
        self.calls = itertools.count(1)

    def submit(self, *batch: object, expected: int) -> object:
        if next(self.calls) == 3:
            raise ValueError("no column answer")
        return object()


def test_a_refusal_waits_until_all_is_sampled(tmp_path: Path) -> None:
    """P01: raised in the midst of sampling it would leave the other ranks waiting."""
    grading = Grading(Refusing(), [], expected=24)  # type: ignore[arg-type]
    for group in make_groups(8, tmp_path):
        grading.add(group)
    with pytest.raises(ValueError, match="no column answer"):
        grading.result()
