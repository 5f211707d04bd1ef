r"""Answers of the kinds that field reports are about, and the verdict that was thought of before they were graded.

A line of answers.jsonl is [how, gold, answer, right]: the answer in a \boxed, as a whole completion, or as one that was
cut off; 1.0, 0.0, or null where the gold cannot be read.
"""

import json
import time
from pathlib import Path

from fastrl_fast.rewards import faults, math_reward

ROWS = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


def graded(how: str, gold: str, answer: str) -> float | None:
    completion = f"\\boxed{{{answer}}}" if how == "box" else answer
    (value,) = math_reward(["p"], [completion], answer=[gold], finish_reason=["length" if how == "cut" else "stop"])
    return value


def test_every_kind_of_answer_gets_the_verdict_that_is_right() -> None:
    assert len(ROWS) > 1300
    faults.take_count()
    assert [row for row in ROWS if graded(*row[:3]) != row[3]] == []
    assert faults.take_count() == 0


def test_names_and_numbers_are_the_same_both_ways() -> None:
    """Where neither side is a policy of its own: a unit, a percent sign or a base left out, an inequality, a choice."""
    signs = (r"\text", "%", "_", "<", ">", r"\le", r"\ge", r"\ne", ":", "million", "thousand", "billion", "答")
    plain = [(g, a) for how, g, a, r in ROWS if how == "box" and r == 1.0 and not any(s in g + a for s in signs)]
    numbers = [(g, a) for g, a in plain if any(c.isdigit() for c in g) and any(c.isdigit() for c in a)]
    assert len(numbers) > 200
    one_way = [(g, a) for g, a in numbers if graded("box", a, g) != 1.0]
    assert one_way == []


def test_odd_missing_golds_are_never_right() -> None:
    for gold in (float("nan"), None, [], "", "  "):
        for answer in ("nan", "None", "[]", ""):
            assert math_reward(["p"], [f"\\boxed{{{answer}}}"], answer=[gold]) == [None]


def test_ordinary_answers_are_graded_by_the_thousand() -> None:
    """Processor time, so that a busy machine is no slower; the target is 1000 per second and core."""
    golds = [g for i in range(1, 501) for g in (str(i), f"\\frac{{{i}}}{{7}}", f"{i / 8}", f"{i}\\sqrt{{3}}")]
    answers = [f"It follows that the answer is \\boxed{{{gold}}}." for gold in golds]
    math_reward(["p"], [r"\boxed{1}"], answer=["1"])
    started = time.process_time()
    assert math_reward(["p"] * len(golds), answers, answer=golds) == [1.0] * len(golds)
    assert len(golds) / (time.process_time() - started) > 1000
