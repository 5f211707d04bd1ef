"""pass@k against counting, and the columns that reward functions are given."""

import itertools

import pytest

from fastrl_fast.accuracy import pass_at_k
from fastrl_fast.grading import grading_columns
from fastrl_fast.types import Group, Prompt, Rollout


@pytest.mark.parametrize("total", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(total):
    """By trying every way to draw k of the completions."""
    for right, k in itertools.product(range(total + 1), range(1, total + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (total - right), k))
        assert pass_at_k(total, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_stays_exact_for_large_numbers():
    """Not 1 - (1 - p)^k, and no overflow."""
    assert pass_at_k(1000, 1, 1) == pytest.approx(0.001)
    assert pass_at_k(100_000, 50_000, 1) == pytest.approx(0.5)
    assert pass_at_k(10, 9, 2) == 1.0 and pass_at_k(10, 0, 10) == 0.0


@pytest.mark.parametrize("k", [0, -1, 5])
def test_pass_at_k_wants_k_within_the_samples(k):
    with pytest.raises(ValueError, match=rf"k must be in \[1, 4\], got {k}"):
        pass_at_k(4, 2, k)


def rollouts(*texts: str) -> list[Rollout]:
    return [Rollout([ord(c) for c in text], [0.0] * len(text), "stop", text=text) for text in texts]


def test_columns_line_up_with_rollouts():
    """A09: one row per rollout, in order, whatever the group sizes."""
    groups = [
        Group(Prompt("a", [1], "2+2", {"answer": "4", "level": 1}), rollouts("4", "5", "6")),
        Group(Prompt("b", [1], "none", {"answer": "0"}), []),
        Group(Prompt("c", [1], "1+1", {"answer": "2", "source": "x"}), rollouts("2")),
    ]
    prompts, completions, columns = grading_columns(groups)
    assert prompts == ["2+2", "2+2", "2+2", "1+1"]
    assert completions == ["4", "5", "6", "2"]
    assert columns == {
        "answer": ["4", "4", "4", "2"],
        "level": [1, 1, 1, None],
        "source": [None, None, None, "x"],
        "completion_ids": [[ord(c)] for c in completions],
        "finish_reason": ["stop"] * 4,
    }


def test_chat_rows_are_given_as_messages():
    """As in TRL: a prompt is a list of messages, a completion a list of one."""
    messages = [{"role": "user", "content": "hi"}]
    prompts, completions, _ = grading_columns([Group(Prompt("a", [1], messages, {}), rollouts("yes", ""))])
    assert prompts == [messages, messages]
    assert completions == [[{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": ""}]]


def test_no_groups():
    assert grading_columns([]) == ([], [], {})
