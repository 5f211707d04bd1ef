"""Public bug reports about rewards, each on its smallest input (README.md in this folder names them)."""

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastrl_fast.config import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from fastrl_fast.rewards import Grader, equal, faults, format_reward, math_reward, overlong_penalty, total
from fastrl_fast.rewards.answers import find_boxes, last_box
from fastrl_fast.rewards.user import as_scores, load


@dataclass
class Term:
    name: str
    weight: float = 1.0


def grade(answer: str, gold: object, **columns: object) -> float | None:
    given = {name: [value] for name, value in columns.items()}
    return math_reward(["p"], [answer], answer=[gold], **given)[0]


TOWER = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"


@pytest.mark.parametrize("answer", [TOWER, r"\boxed{9^{9^{9^{9}}}}", r"\boxed{10^{10^{10}}}", r"\boxed{(10^{10})!}"])
def test_R01_a_tower_of_powers_is_wrong_at_once(answer: str) -> None:
    started = time.process_time()
    assert grade(answer, "3") == 0.0
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "unit", ["½ ", r"\frac12 ", r"\pi^", "万", "万亿", "f(x)=", "\n", r"\int ", "one hundred ", "1e"]
)
def test_R01_whatever_is_repeated_is_read_in_a_second(unit: str) -> None:
    """Once exponential in the number of fractions, and deeper than Python's stack."""
    text = (unit * 2000)[:1999]
    faults.take_count()
    started = time.process_time()
    assert grade(rf"\boxed{{{text}}}", "5") == 0.0 and grade(rf"\boxed{{{text[:300]}}}", "x + 5") == 0.0
    assert grade(r"\boxed{5}", text) != 1.0
    assert time.process_time() - started < 3 and faults.take_count() == 0


def test_R02_grading_works_in_a_thread() -> None:
    values: list[float | None] = []
    pairs = [(r"The answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}"), (r"\boxed{7.41\%}", r"7.41\%")]
    thread = threading.Thread(target=lambda: values.extend(grade(*pair) for pair in pairs))
    thread.start()
    thread.join()
    assert values == [1.0, 1.0]


def test_R03_a_hanging_answer_costs_itself_and_the_next_batch_works(tmp_path: Path) -> None:
    code = "def f(completions, **c):\n    while 'hang' in completions: pass\n    return [1.0] * len(completions)\n"
    (tmp_path / "r.py").write_text(code)
    name = f"{tmp_path}/r.py:f"
    with Grader([Term(name)], workers=2, timeout=0.5) as grader:
        before = set(grader.worker_pids())
        values = grader.grade([f"p{i}" for i in range(8)], ["ok"] * 7 + ["hang"], {})
        assert [value[name] for value in values] == [1.0] * 7 + [0.0]
        assert [v[name] for v in grader.grade(["p"] * 8, ["ok"] * 8, {})] == [1.0] * 8
        limit = time.monotonic() + 30  # a new worker takes a moment to start
        while len(grader.worker_pids()) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        assert len(set(grader.worker_pids()) & before) == 1, "one worker was replaced"


@pytest.mark.parametrize("gold", ["", "see figure", None])
def test_R04_a_gold_that_cannot_be_read_rewards_nobody(gold: str | None) -> None:
    assert grade(r"\boxed{5}", gold) is None and grade("garbage", gold) is None


@pytest.mark.parametrize("result", [[1.0], [1.0, 2.0], 1.0])
def test_R05_a_wrong_count_is_an_error_that_names_the_function(result: object) -> None:
    with pytest.raises(ValueError, match=r"mine\.py:f.*3"):
        as_scores("mine.py:f", result, 3)


def test_R06_none_is_not_a_number_and_not_zero() -> None:
    assert as_scores("f", [1.0, None, math.nan, math.inf], 4) == [1.0, None, None, None]
    assert as_scores("f", [-(10**400), 1e308, 1e6, True], 4) == [None, None, 1e6, 1.0]
    assert math.isnan(total([Term("a"), Term("b")], {"a": 1.0, "b": None}))


def test_R07_no_rewards_or_unknown_ones_fail_at_the_start() -> None:
    with pytest.raises(ValueError, match="non-empty"):
        RewardConfig(functions={})
    with pytest.raises(ValueError, match=r"reward\.functions must be given a weight that is not 0"):
        RewardConfig(functions={"math": 0.0})
    with pytest.raises(ValueError, match="unknown reward 'mth'"):
        Grader([Term("mth")], workers=1, timeout=1)


def test_R08_boxes_are_balanced() -> None:
    assert find_boxes(r"\boxed{\frac{1}{3}} \boxed{\sqrt{\frac{a}{b}}}") == [r"\frac{1}{3}", r"\sqrt{\frac{a}{b}}"]


def test_R10_fbox_is_a_box() -> None:
    assert grade(r"\fbox{42}", "42") == grade(r"\fbox{\frac{1}{2}}", "1/2") == 1.0


def test_R11_two_equal_boxes_are_one_answer() -> None:
    assert grade("\\boxed{840}.,but let me\n\n**Final Answer**\n\\boxed{840}", "840") == 1.0
    assert grade(r"\boxed{004} ... \boxed{004}", "4") == 1.0


@pytest.mark.parametrize("text", [r"\boxed{5", r"\boxed{", r"\boxed{}", r"\boxed{{{{", "{" * 50_000, r"\boxed{" * 9000])
def test_R12_an_unclosed_box_is_wrong_and_quick(text: str) -> None:
    started = time.process_time()
    assert grade(text, "5") == 0.0 and not last_box(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "answer", [r"\boxed{\text{E}}", r"\boxed{E: A polygenic}", r"\boxed{E)}", r"\boxed{C} \boxed{E}"]
)
def test_R13_a_letter_may_be_wrapped_or_followed(answer: str) -> None:
    assert grade(answer, "E") == 1.0
    assert grade(r"\boxed{A polygenic score}", "E") == 0.0


def test_R14_text_behind_the_answer_takes_nothing_away() -> None:
    tail = " and the reasoning above confirms this result is consistent." * 8
    assert grade("2+40=42\n#### 42\n" + tail, "42") == 1.0


def test_R15_small_numbers_are_not_all_equal() -> None:
    assert not equal(r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}") and not equal(r"\frac{1}{2004!}", r"\frac{1}{2006!}")


def test_R16_formulas_are_not_their_numbers() -> None:
    assert not equal(r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}")


def test_R17_mixed_numbers() -> None:
    assert not equal("2", "2 2/3") and not equal("10", "4 10/3")
    assert equal("5/4", "1 1/4") and equal("71/6", "11 5/6")


def test_R19_gold_comes_first() -> None:
    assert equal("x<3", r"(-\infty, 3)") and grade(r"\boxed{(-\infty, 3)}", "x<3") == 1.0


def test_R20_equations_are_not_their_last_number() -> None:
    assert not equal("3*x-1*y+13=0", "3x + 4y + 14=0")


def test_R21_a_malformed_root_is_not_dropped() -> None:
    assert not equal("4", r"4\sqrt(2)")


def test_R22_exponents_are_numbers_and_stay_small() -> None:
    started = time.process_time()
    assert not equal("1", "1e1000000000") and equal("300000", "3e5")
    assert time.process_time() - started < 2


def test_R23_a_bare_latex_gold_is_read() -> None:
    assert grade(r"\boxed{\frac{9}{7}}", r"\dfrac{9}{7}") == grade(r"\boxed{\sqrt{17}}", r"\sqrt{17}") == 1.0


def test_R24_the_answer_block_comes_before_boxes_elsewhere() -> None:
    assert grade(r"<answer>\boxed{42}</answer>", "42") == 1.0
    assert grade(r"<think>\boxed{7}</think><answer>8</answer>", "8") == 1.0


def test_R25_a_truncated_completion_is_not_right_by_luck() -> None:
    assert grade("... so x = 6 and then we", "6", finish_reason="length") == 0.0


def test_R26_currency_separators_and_units() -> None:
    assert grade("The answer is $1,234.00", "1234") == grade("The answer is 42 km", "42") == 1.0
    assert grade(r"\boxed{22.2 C}", "22.2") == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("145°", "145"), ("145°", r"145^\circ"), ("60", "60°"), ("-5", "−5"), ("2√3", r"2\sqrt{3}"), ("42", "答案：４２")],
)
def test_R28_signs_of_unicode(gold: str, answer: str) -> None:
    assert grade(answer if ":" in answer or "：" in answer else f"\\boxed{{{answer}}}", gold) == 1.0


def test_R29_many_blocks_earn_no_format_reward() -> None:
    block = "<thinking>a</thinking>"
    texts = [block * 2 + r"\boxed{1}", block, block + r"\boxed{1}"]
    assert format_reward(["p"] * 3, texts) == [0.0, 0.0, 1.0]


def test_R30_dicts_and_numbers_may_mix_in_verls_signature(tmp_path: Path) -> None:
    code = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"a": {"score": 1, "acc": 1, "pred": "x"}, "b": 0.0, "c": {"score": 0}}[solution_str]
"""
    (tmp_path / "v.py").write_text(code)
    function = load(f"verl:{tmp_path}/v.py:compute_score")
    for order in ("abc", "cba", "bac"):
        values = function(["p"] * 3, list(order), answer=["g"] * 3)
        assert values == [{"a": 1.0, "b": 0.0, "c": 0.0}[letter] for letter in order]


@pytest.mark.parametrize("gold", [1, 1.0, "1"])
def test_R33_a_gold_may_be_a_number(gold: object) -> None:
    assert grade(r"\boxed{1}", gold) == 1.0


def test_R34_grading_is_a_phase_of_its_own_in_parallel_processes() -> None:
    from fastrl_fast.metrics import PHASES

    assert "grade" in PHASES
    with Grader([Term("math")], workers=2, timeout=20) as grader:
        answers = [rf"\boxed{{\frac{{{k}\sqrt3}}{{7}}}}" for k in range(64)]
        handle = grader.submit(["p"] * 64, answers, {"answer": [r"\frac{5\sqrt3}{7}"] * 64})
        assert sum(value["math"] or 0 for value in handle.result()) == 1.0
        assert len(grader.worker_pids()) == 2


def test_R35_truth_values_are_numbers_and_dicts_are_told() -> None:
    import numpy

    assert as_scores("f", [True, numpy.bool_(False), numpy.float32(0.5)], 3) == [1.0, 0.0, 0.5]
    with pytest.raises(ValueError, match=r"a dict with the keys \['score', 'acc'\]"):
        as_scores("f", [{"score": 1.0, "acc": 1}], 1)


@pytest.mark.parametrize(("length", "penalty"), [(12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0)])
def test_R32_the_length_penalty_falls_over_its_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=16, buffer=4) == penalty
    assert overlong_penalty(length, limit=16, buffer=0) == 0.0, "off"
    with pytest.raises(ValueError, match=r"reward\.overlong_buffer"):
        Config(
            model=ModelConfig(path="m"),
            data=DataConfig(path="d"),
            reward=RewardConfig(overlong_buffer=20),
            rollout=RolloutConfig(max_completion_tokens=16),
        )
