"""The answer graders: what is found in a completion, what counts as equal, and how long the worst answers take."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.rewards import equal, exact_reward, faults, format_reward, math_reward, number_reward
from fastrl_fast.rewards.answers import bare_answer, final_answer, find_boxes, gold_text, last_box
from fastrl_fast.rewards.expression import evaluate
from fastrl_fast.rewards.value import Unreadable, same_value

PAIRS = Path(__file__).parents[2] / "shared" / "cases" / "answer_pairs.jsonl"
KNOWN_WRONG: dict[tuple[str, str], str] = {}
"""Pairs we get wrong, and why. Empty: all are right."""


def math_one(completion, gold, **columns):
    return math_reward(["p"], [completion], answer=[gold], **{key: [value] for key, value in columns.items()})[0]


# --- finding the answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{\frac{1}{3}}", [r"\frac{1}{3}"]),  # R08
        (r"\boxed{\sqrt{\frac{a}{b}}}", [r"\sqrt{\frac{a}{b}}"]),  # R08
        (r"\fbox{42} and \boxed {7}", ["42", "7"]),  # R10
        (r"\boxed{840}.,but \n\n**Final Answer**\n\boxed{840}", ["840", "840"]),  # R11
        (r"\boxed{\{1,2\}}", [r"\{1,2\}"]),
        (r"\boxed{x = \boxed{5}}", [r"x = \boxed{5}"]),
        (r"\boxed{5", []),  # R12
        (r"\boxed{", []),
        (r"\boxed{}", [""]),
        (r"\boxed{{{{", []),
        ("no box } here {", []),
    ],
)
def test_boxes_are_found_by_balanced_braces(text, boxes):
    assert find_boxes(text) == boxes


def test_r12_fifty_thousand_unclosed_boxes_take_no_time():
    start = time.process_time()
    assert find_boxes(r"\boxed{" * 50_000) == []
    assert find_boxes(r"\boxed{" * 50_000 + "}" * 50_000) == [r"\boxed{" * 49_999 + "}" * 49_999]
    assert last_box("{" * 50_000) is None
    assert time.process_time() - start < 2  # quadratic time would be minutes


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>\boxed{42}</answer>", "42"),  # R24
        (r"<think>\boxed{7}</think><answer>8</answer>", "8"),  # R24
        (r"<thinking>\boxed{7}</thinking> so \boxed{8}", "8"),
        (r"<thinking>so \boxed{7}</thinking>", "7"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        (r"\boxed{x = \boxed{5}}", "5"),
        ("2+40=42\n#### 42\n" + " and the reasoning above confirms this result is consistent." * 8, "42"),  # R14
        ("The answer is $1,234.00", "$1,234.00"),  # R26
        ("The final answer is: **12**. I am sure.", "12"),
        ("答案：４２", "４２"),
        ("so x = 6 and then we", None),
        (r"the answer is \boxed{5", None),  # R12
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_r25_a_truncated_completion_needs_a_closed_marker():
    assert math_one("... so x = 6 and then we", "6", finish_reason="length") == 0.0
    assert math_one("... so x = 6 and then we", "6") == 0.0
    assert math_one("The answer is 6", "6", finish_reason="length") == 0.0  # it may have been going to be 64
    assert math_one("#### 6", "6", finish_reason="length") == 0.0
    assert math_one("#### 6", "6", finish_reason="stop") == 1.0
    assert math_one(r"so \boxed{6} and then we", "6", finish_reason="length") == 1.0


def test_bare_answer_is_one_short_line():
    assert bare_answer("<think>hm</think> 42 km ") == "42 km"
    assert bare_answer("a\nb") is None
    assert bare_answer("1" * 201) is None


# --- equality -----------------------------------------------------------------------------------------------------


def _pairs():
    if not PAIRS.exists():
        return []
    notes = {"(empty string)": "", "(empty gold)": "", "\\boxed{5 (unclosed)": "\\boxed{5", "−5 (U+2212)": "−5"}
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    verdicts = {True: 1.0, False: 0.0, "ungradable": None}
    return [
        (notes.get(row["gold"], row["gold"]), notes.get(row["answer"], row["answer"]), verdicts[row["right"]])
        for row in rows
        if row["right"] in verdicts
    ]


def test_answer_pairs():
    pairs = _pairs()
    if not pairs:
        pytest.skip("the answer pairs are not here (../shared/cases/answer_pairs.jsonl)")
    wrong = {(gold, answer) for gold, answer, right in pairs if math_one(answer, gold) != right}
    assert wrong == set(KNOWN_WRONG)
    assert len(pairs) > 50


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5/4", "1 1/4"),  # R17
        ("71/6", "11 5/6"),  # R17
        (r"2\frac{1}{2}", "2.5"),
        ("2½", "5/2"),
        ("300000", "3e5"),  # R22
        (r"\dfrac{9}{7}", r"\frac{9}{7}"),  # R23
        (r"\frac12", "0.5"),
        ("145°", r"145^\circ"),  # R28
        ("60", "60°"),
        ("-5", "−5"),
        ("2√3", r"2\sqrt{3}"),
        ("E", "E: A polygenic risk score"),  # R13
        ("E", "E)"),
        ("E", r"\text{E}"),
        ("x<3", r"(-\infty, 3)"),  # R19, gold first
        ("1,234", "1234"),  # R26
        (r"11,\! 111,\! 111,\! 100", "11111111100"),
        ("42", "42 km"),
        ("135 square feet", r"135\text{ square feet}"),
        ("50%", "0.5"),
        ("5, 7", "7, 5"),
        (r"1 \pm \sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
        (r"\begin{pmatrix} 1/5 \\ -3 \end{pmatrix}", r"\begin{bmatrix}0.2\\-3\end{bmatrix}"),
        (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty, 2)"),
        ("2x+4y-3=0", r"y = -\frac{1}{2}x + \frac{3}{4}"),
        ("x^2-1", "(x-1)(x+1)"),
        ("52_8", "52"),
        (r"\sin 30^\circ", "1/2"),
        ("31.41592653589793", r"10\pi"),
        (r"\log_2 8", "3"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"\binom{5}{2}", "10"),
        (r"\text{no solution}", "No solution."),
        (r"\frac{7!}{5!}", "42"),
        ("5", "2+3=5"),
        ("(3,4)", "3, 4"),
        ("10", "10!/9!"),
        ("10", r"\{10\}"),
        ("1 000 000", "10^6"),
        ("16π平方米", r"16\pi"),
        ("9米", "9 m"),
    ],
)
def test_equal(gold, answer):
    assert equal(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),  # R15
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),  # R16
        ("2", "2 2/3"),  # R17
        ("10", "4 10/3"),
        ("3*x-1*y+13=0", "3x + 4y + 14=0"),  # R20
        ("4", r"4\sqrt(2)"),  # R21
        ("1", "1e1000000000"),  # R22
        (r"(-\infty, 3)", "x<3"),  # R19: documented policy
        ("5", "5, 7"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("35 cm", "35 m"),
        ("0.5", "0.5%"),
        ("52", "52_8"),
        ("x=5", "y=5"),
        ("5", "x+1=5"),
        ("4 cm", "I think it is 4 or so"),
        ("east", "seat"),  # no product of letters
        ("x", "|x|"),
        ("E", "A polygenic risk score E"),  # R13
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
        ("1", ""),
        ("2", "2}*"),
        ("1000000001", "1000000000"),
        ("11/4", "1 1/4"),
        ("10", "1 0"),
        ("5", "5!"),
        ("5", "5 or 7"),
        ("12 cm", "12 cm^2"),
        ("9米", "9厘米"),
    ],
)
def test_not_equal(gold, answer):
    assert equal(gold, answer) is False


@pytest.mark.parametrize("gold", ["", "   ", "see figure", "$$", "2}*+", "9^{9^{9^{9}}}", "1" * 3000])
@pytest.mark.parametrize("answer", ["5", "garbage", ""])
def test_r04_a_gold_that_cannot_be_read_is_never_rewarded(gold, answer):
    assert math_one(rf"\boxed{{{answer}}}", gold) is None


@pytest.mark.parametrize(("gold", "reward"), [(1, 1.0), (2.0, 0.0), (1.0, 1.0), (None, None), ("1", 1.0), (True, 0.0)])
def test_r33_gold_need_not_be_text(gold, reward):
    assert math_one(r"\boxed{1}", gold) == reward


def test_gsm8k_gold():
    assert gold_text("She has 2 + 40 = 42.\n#### 1,042") == "1,042"
    assert math_one(r"\boxed{1042}", "She has 2 + 40 = 42.\n#### 1,042") == 1.0
    assert number_reward(["p"], ["it is 1042 in all"], answer=["She has 2.\n#### 1,042"]) == [1.0]


@pytest.mark.parametrize(
    "answer",
    [
        r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",  # R01
        "9^{9^{9^{9}}}",
        "10^{10^{10}}",
        "(10^{10})!",
        "3000!" * 300,
        r"\sqrt" * 900 + "2",
        "-" * 1900 + "1",
        "((" * 900,
        "1" * 100_000,
        "." * 100_000 + "x",
        r"\frac" * 400,
        "x^{99999}" * 200,
        r"\sin" * 400 + "1",
    ],
)
def test_r01_no_answer_takes_long(answer):
    """The bound is wide for a busy machine: what it excludes takes minutes or for ever in a symbolic grader."""
    start = time.process_time()
    assert math_one(rf"\boxed{{{answer}}}", "7") == 0.0
    assert number_reward(["p"], [answer], answer=["7"])[0] in (0.0, 1.0)
    assert time.process_time() - start < 2
    assert faults.take_count() == 0


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=r"0123456789.,+-*/^(){}[]\|!%=<>xye fracsqrtboxed", max_size=40), st.text(max_size=20))
def test_any_text_is_graded_without_a_fault(left, right):
    assert math_one(rf"\boxed{{{left}}}", right) in (0.0, 1.0, None)
    assert number_reward(["p"], [left], answer=[right])[0] in (0.0, 1.0, None)
    assert faults.take_count() == 0


@settings(max_examples=100, deadline=None)
@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_equal_exactly_when_they_are(a, b):
    left = rf"\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert equal(left, f"{b.numerator}/{b.denominator}") is (a == b)
    assert evaluate(f"({left}) + ({b})") == a + b
    assert evaluate(f"({left}) * ({b})") == a * b


def test_values_with_roots_are_equal_to_all_digits():
    assert same_value(evaluate(r"\frac{1}{\sqrt{2}}"), evaluate(r"\frac{\sqrt2}{2}"))
    assert same_value(evaluate(r"\sqrt{3+2\sqrt{2}}"), evaluate(r"1+\sqrt{2}"))
    assert not same_value(evaluate(r"\sqrt{2}"), evaluate("1.414213562373095048801688724209698078569"))
    with pytest.raises(Unreadable):
        evaluate("4 10/3")


# --- the plain rewards --------------------------------------------------------------------------------------------


def test_exact():
    completions = [r"so \boxed{ 4/2 }", "4/2 ", "2", r"\boxed{2}"]
    assert exact_reward(["p"] * 4, completions, answer=["4/2"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert exact_reward(["p"] * 2, ["x", "x"], answer=[None, ""]) == [None, None]


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("first 3, then 42", "42", 1.0),
        ("The answer is $1,234.00.", "1234", 1.0),  # R26
        ("it is 22.2 C", "22.2", 1.0),
        ("it is 0.5", "1/2", 1.0),
        (r"\boxed{7} of 9", "7", 1.0),
        ("答案：４２", 42, 1.0),
        ("−5", "-5", 1.0),
        ("3e5", "300000", 1.0),
        ("1e1000000000", "1", 0.0),
        ("none", "1", 0.0),
        ("0.1", "0.10000000000000000000001", 0.0),
        ("1/0", "1", 0.0),
        ("7", "see figure", None),
        ("7", None, None),
    ],
)
def test_number(text, gold, reward):
    assert number_reward(["p"], [text], answer=[gold]) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"<thinking>a</thinking> It is \boxed{\frac{1}{2}}.", 1.0),
        ("\n<thinking>a\nb</thinking>\n\\boxed{1}\n", 1.0),
        (r"<thinking>a</thinking> \boxed{1} \boxed{1}", 0.0),
        (r"<thinking>a</thinking><thinking>b</thinking>\boxed{1}", 0.0),  # R29
        (r"<thinking>a<thinking>b</thinking>\boxed{1}", 0.0),
        (r"<thinking>a</thinking>", 0.0),
        (r"<thinking>\boxed{1}</thinking>", 0.0),
        (r"<thinking>a</thinking> \boxed{", 0.0),  # R12
        (r"<thinking>a</thinking> \boxed{}", 0.0),
        (r"First <thinking>a</thinking> \boxed{1}", 0.0),
        (r"\boxed{1}</thinking><thinking>", 0.0),
        ("", 0.0),  # R31
    ],
)
def test_format(text, reward):
    assert format_reward(["p"], [text]) == [reward]
