r"""Answers as Geometry3K and GeoQA8K-R1V give them, and as models write them."""

import json

import pytest

from fastrl_fast.rewards import equal, format_reward, math_reward


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("140°", "140"),
        ("140°", r"140^\circ"),
        ("140°", "140 degrees"),
        (r"5 \sqrt { 3 }", r"5\sqrt{3}"),
        (r"5 \sqrt { 3 }", "5√3"),
        (r"\frac { 2 \sqrt { 2 } } { 5 }", r"\dfrac{2\sqrt{2}}{5}"),
        (r"6 \pi", "6π"),
        ("2400πcm^{2}", r"2400\pi"),
        ("20cm²", r"20\text{ cm}^2"),
        (r"\frac{4}{3}米", "4/3"),
        (r"\frac{3}{2}√{3}", r"\frac{3\sqrt{3}}{2}"),
        ("13", "x = 13"),
        ("80", r"m\widehat{AB} = 80^\circ"),
        ("80", r"m \angle ABC=80"),
        ("80", r"\angle 1 = 80°"),
        ("5", "AB = 5"),
        ("5", r"\overline{A B} = 5 cm"),
        ("C", "(C)"),
    ],
)
def test_right_answers_however_they_are_written(gold, answer):
    assert equal(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("80", r"m\widehat{AB} = 81"),
        ("5", "AB = 6"),
        ("AB = 5", "CD = 5"),
        (r"5 \sqrt { 3 }", r"3\sqrt{5}"),
        (r"5 \sqrt { 3 }", "8.66"),
        (r"6 \pi", "6"),
        ("20cm²", "20cm³"),
        ("140°", "40"),
        ("C", "D"),
    ],
)
def test_wrong_answers(gold, answer):
    assert equal(gold, answer) is False


def test_the_solution_column_of_r1_v_holds_its_answer_in_tags():
    golds = ["<answer> 145° </answer>", "<think> 90 + 55 </think>\n<answer>145°</answer>", "145"]
    completion = "<think>\nWe add.\n</think>\n<answer>145</answer>"
    assert math_reward([""] * 3, [completion] * 3, answer=golds) == [1.0] * 3
    assert math_reward([""], ["<answer>35°</answer>"], answer=golds[:1]) == [0.0]


def test_the_papers_two_rewards_of_one_answer():
    r"""FastRL, section 3: 0.5 for `<thinking>...</thinking>...\boxed{...}`, 1 for being right."""
    tagged = r"<thinking> Opposite angles are equal. </thinking> So \boxed{65^\circ}."
    assert format_reward([""], [tagged]) == math_reward([""], [tagged], answer=["65°"]) == [1.0]
    bare = r"Opposite angles are equal: \boxed{65}"
    assert (format_reward([""], [bare]), math_reward([""], [bare], answer=["65°"])) == ([0.0], [1.0])


CHOICES = [r"30^\circ", r"5 \sqrt { 3 }", "12", r"\frac { 1 } { 2 }"]


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("B", "B", True),
        ("B", "(b)", True),
        ("B", "5√3", True),
        ("B", "12", False),
        ("B", "C", False),
        (r"5 \sqrt { 3 }", "B", True),
        (r"5 \sqrt { 3 }", "(B) 5√3", True),
        (r"5 \sqrt { 3 }", "A", False),
        ("D", "0.5", True),
        ("7", "C", False),  # not among the choices
    ],
)
def test_letters_and_values_of_choices_are_both_right(gold, answer, right):
    """Whichever the row gives, and however the choices are written down."""
    marked = [f"({letter}) {text}" for letter, text in zip("ABCD", CHOICES, strict=True)]
    for choices in (CHOICES, marked, json.dumps(CHOICES)):
        boxed = f"\\boxed{{{answer}}}"
        assert math_reward([""], [boxed], answer=[gold], choices=[choices]) == [float(right)], choices


def test_rows_without_choices_are_graded_as_before():
    boxed = [r"\boxed{B}", r"\boxed{12}"]
    for choices in (None, [None, None], [[], "no list"]):
        assert math_reward([""] * 2, boxed, answer=["B", "C"], choices=choices) == [1.0, 0.0]
    # Letters that stand for letters, and texts that are there twice, say nothing more.
    assert math_reward([""], [r"\boxed{A}"], answer=["B"], choices=[["B", "A"]]) == [0.0]
    assert math_reward([""], [r"\boxed{A}"], answer=["12"], choices=[["12", "12"]]) == [0.0]
    # Nor does a letter that is the text of another choice than its own.
    boxed = [r"\boxed{2a}", r"\boxed{a}"]
    assert math_reward([""] * 2, boxed, answer=["a"] * 2, choices=[["2a", "a"]] * 2) == [0.0, 1.0]
