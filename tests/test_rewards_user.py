"""Reward functions of the user's own, in TRL's, verl's and EasyR1's signature, and reasoning_gym's scorers."""

import json
import textwrap
from dataclasses import dataclass

import pytest

from fastrl_fast.rewards import Grader, reasoning_gym_reward
from fastrl_fast.rewards.answers import final_answer
from fastrl_fast.rewards.registry import build
from fastrl_fast.rewards.user import as_scores, load


@dataclass
class Term:
    name: str
    weight: float = 1.0


def write(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def grade(name, prompts, completions, **columns):
    return load(name)(prompts, completions, **columns)


def grade_in_worker(name, prompts, completions, **columns):
    with Grader([Term(name)], workers=1, timeout=20) as grader:
        return [value[name] for value in grader.grade(prompts, completions, columns)]


# --- TRL ----------------------------------------------------------------------------------------------------------


def test_trl_signature_gets_columns_and_whole_groups(tmp_path):
    path = write(
        tmp_path,
        """
        def longest(prompts, completions, bonus, **columns):
            best = {p: max(len(c) for q, c in zip(prompts, completions) if q == p) for p in prompts}
            return [b + (len(c) == best[p]) for p, c, b in zip(prompts, completions, bonus)]
        """,
    )
    prompts = [f"p{i // 5}" for i in range(100)]
    completions = ["x" * (i % 5 + 1) for i in range(100)]
    with Grader([Term(path + ":longest")], workers=2, timeout=20) as grader:  # more than one call for each worker
        values = grader.grade(prompts, completions, {"bonus": [i % 3 for i in range(100)]})
    assert [value[path + ":longest"] for value in values] == [i % 3 + float(i % 5 == 4) for i in range(100)]


def test_trl_function_without_keywords_gets_what_it_asks_for(tmp_path):
    path = write(tmp_path, "def f(completions, answer):\n    return [c == a for c, a in zip(completions, answer)]\n")
    assert grade(path + ":f", ["p"] * 2, ["1", "2"], answer=["1", "1"], other=[0, 0]) == [1.0, 0.0]


def test_what_a_function_cannot_be_called_without_is_needed(tmp_path):
    """TRL's own arguments, defaults and *arguments are not; a decorator that keeps the signature hides nothing."""
    path = write(
        tmp_path,
        """
        import functools

        def plain(prompts, completions, answer, *rest, unit, hint=None, **columns):
            return [1.0] * len(completions)

        @functools.wraps(plain)
        def wrapped(*args, **columns):
            return plain(*args, **columns)

        def all_of_them(**columns):
            return [1.0] * len(columns["completions"])

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 1.0
        """,
    )
    assert build(f"{path}:plain").needs == build(f"{path}:wrapped").needs == ("answer", "unit")
    assert build(f"{path}:all_of_them").needs == build(f"verl:{path}:compute_score").needs == ()
    with Grader([Term(f"{path}:plain")], workers=1, timeout=20) as grader:
        with pytest.raises(ValueError, match="plain' needs the column 'unit'; the data has: answer"):
            grader.grade([], [], {"answer": []})
        assert grader.grade([], [], {"answer": [], "unit": []}) == []


def test_trl_conversations_get_messages(tmp_path):
    path = write(
        tmp_path,
        "def f(prompts, completions, **k):\n    return [float(c[0]['content'] == 'yes') for c in completions]\n",
    )
    prompt = [{"role": "user", "content": "?"}]
    assert grade(path + ":f", [prompt] * 2, ["yes", "no"]) == [1.0, 0.0]


def test_r35_r06_kinds_of_values(tmp_path):
    path = write(
        tmp_path,
        """
        import numpy as np
        def f(completions, **columns):
            odd = [None, float("nan"), float("-inf")]
            return [True, np.bool_(False), np.float32(0.5), np.int64(2), 1, *odd, np.float64(3)]
        def array(completions, **columns):
            return np.arange(len(completions)) > 0
        """,
    )
    assert grade(path + ":f", ["p"] * 9, ["c"] * 9) == [1.0, 0.0, 0.5, 2.0, 1.0, None, None, None, 3.0]
    assert grade(path + ":array", ["p"] * 2, ["c"] * 2) == [0.0, 1.0]


def test_torch_fits_into_a_worker_and_its_tensors_are_values(tmp_path):
    path = write(
        tmp_path,
        """
        import torch
        def f(completions, **columns):
            weight = torch.ones(64, 64) @ torch.ones(64, 64)
            return weight[0, :len(completions)] / 64 if len(completions) < 64 else torch.tensor(1.0)
        """,
    )
    with Grader([Term(path + ":f")], workers=1, timeout=20) as grader:
        assert grader.grade(["p"] * 3, ["c"] * 3, {}) == [{path + ":f": 1.0}] * 3
        with pytest.raises(ValueError, match=r"expected a list of 64 values, got Tensor"):
            grader.grade(["p"] * 64, ["c"] * 64, {})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[1.0]", "expected 3 values, one for each completion, got 1"),  # R05
        ("[1.0, 2.0]", "expected 3 values, one for each completion, got 2"),
        ("1.0", "expected a list of 3 values, got float 1.0"),
        ("None", "expected a list of 3 values, got NoneType"),
        ("{'score': 1.0}", "expected a list of 3 values, got dict"),
        (
            "[{'score': 1.0, 'acc': 1}] * 3",
            r"expected numbers or None, got a dict with the keys \['score', 'acc'\]",
        ),  # R35
        ("['1.0'] * 3", "expected numbers or None, got str"),
        ("[[1.0]] * 3", "expected numbers or None, got list"),
        ("(x for x in '123')", "expected a list of 3 values, got generator"),
    ],
)
def test_r05_r35_wrong_results_name_the_function(result, message):
    with pytest.raises(ValueError, match=rf"reward 'mine.py:f': {message}"):
        as_scores("mine.py:f", eval(result), 3)


def test_r05_wrong_count_is_found_through_the_pool_whatever_the_prompts(tmp_path):
    path = write(tmp_path, "def one(completions, **columns):\n    return [1.0]\n")
    for prompts in (["p"] * 3, ["p", "q", "r"]):
        with pytest.raises(ValueError, match=r"mine.py:one'.*expected 3 values.*got 1"):
            grade_in_worker(path + ":one", prompts, ["c"] * 3)


def test_a_function_that_raises_is_an_error_with_its_line_and_the_grader_lives_on(tmp_path):
    path = write(
        tmp_path,
        """
        def f(completions, **columns):
            if "bad" in completions:
                return {}["missing"]
            return [1.0] * len(completions)
        """,
    )
    name = path + ":f"
    with Grader([Term(name), Term("format")], workers=2, timeout=20) as grader:
        with pytest.raises(
            ValueError, match=r"mine.py:f' raised KeyError: 'missing' \(line 4: return {}\[\"missing\"\]\)"
        ):
            grader.grade(["p"] * 2, ["ok", "bad"], {})
        assert grader.counters["errors"] == 1
        assert [value[name] for value in grader.grade(["p"] * 2, ["ok", "ok"], {})] == [1.0, 1.0]


def test_sys_exit_in_a_function_is_an_error_too(tmp_path):
    path = write(tmp_path, "import sys\ndef f(completions, **columns):\n    sys.exit(0)\n")
    with pytest.raises(ValueError, match="raised SystemExit"):
        grade_in_worker(path + ":f", ["p"], ["c"])


def test_columns_that_a_worker_cannot_read_are_an_error(tmp_path):
    class Local:
        pass

    path = write(tmp_path, "def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ValueError, match=r"cannot be sent to a worker: .*Local"):
        grade_in_worker(path + ":f", ["p"], ["c"], thing=[Local()])


# --- loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.py:missing", "def f(): pass\ndef g(): pass\nx = 1\n", r"no function 'missing'; it has: f, g"),
        ("mine.py:x", "x = 1\n", r"no function 'x'; it has: none"),
        (
            "mine.py:f",
            "import nothing_of_that_name\n",
            r"cannot be imported: ModuleNotFoundError: .*nothing_of_that_name",
        ),
        ("mine.py:f", "def f(:\n", r"cannot be imported: SyntaxError"),
        ("mine.py:f", "import os\nos._exit(7)\n", r"ended with exit code 7 while it loaded"),
        ("mine.py:f", "raise SystemExit(3)\n", r"cannot be imported: SystemExit: 3 \(line 1: "),
        ("gone.py:f", "", r"there is no file .*gone.py"),
    ],
)
def test_bad_files_fail_at_construction(tmp_path, name, text, message):
    write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        Grader([Term("format"), Term(f"{tmp_path}/{name}")], workers=1, timeout=5)


@pytest.mark.parametrize("name", ["mine.py:", "mine:f", "verl:mine.py", "other:mine.txt:f", "mine.py:f g"])
def test_bad_names_fail_at_construction(name):
    with pytest.raises(ValueError, match=r"expected path/to/file\.py:function"):
        Grader([Term(name)], workers=1, timeout=5)


def test_a_file_may_import_its_neighbours_and_be_named_relatively(tmp_path, monkeypatch):
    write(tmp_path, "VALUE = 0.25\n", "neighbour_of_mine.py")
    write(tmp_path, "from neighbour_of_mine import VALUE\ndef f(completions, **k): return [VALUE] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    assert grade_in_worker("mine.py:f", ["p"], ["c"]) == [0.25]


# --- verl and EasyR1 ----------------------------------------------------------------------------------------------


def test_r30_verl_numbers_and_dicts_may_mix(tmp_path):
    path = write(
        tmp_path,
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            if solution_str == "dict":
                return {"score": 1, "acc": 1, "pred": "x"}
            if solution_str == "bare":
                return {"acc": 1}
            return float((data_source, ground_truth, extra_info) == ("gsm8k", "42", {"index": 1}))
        """,
    )
    name = f"verl:{path}:compute_score"
    columns = {"data_source": ["gsm8k"] * 3, "extra_info": [{"index": 1}, {"index": 1}, None]}
    assert grade(name, ["p"] * 3, ["dict", "a", "a"], answer=["42"] * 3, **columns) == [1.0, 1.0, 0.0]
    gold = [{"ground_truth": "42", "style": "rule"}] * 3
    assert grade(name, ["p"] * 3, ["a"] * 3, reward_model=gold, **columns) == [1.0, 1.0, 0.0]
    with pytest.raises(
        ValueError, match=r"a number or a dict with the key 'score', got a dict with the keys \['acc'\]"
    ):
        grade(name, ["p"], ["bare"])


EASYR1 = {
    "batch": """
        def compute_score(reward_inputs, weight=0.5):
            if not isinstance(reward_inputs, list):
                raise ValueError("a list, please")
            scores = []
            for one in reward_inputs:
                right = one["response"] == one["ground_truth"]
                scores.append({"overall": weight * right + one["response_length"], "accuracy": right})
            return scores
        """,
    "sequential": """
        def compute_score(reward_input, weight=0.5):
            if not isinstance(reward_input, dict):
                raise ValueError("a dict, please")
            right = reward_input["response"] == reward_input["ground_truth"]
            return {"overall": weight * right + reward_input["response_length"], "accuracy": right}
        """,
    "declared": """
        REWARD_TYPE = "sequential"
        def compute_score(reward_input):
            assert isinstance(reward_input, dict)
            right = reward_input["response"] == reward_input["ground_truth"]
            return {"overall": 0.5 * right + reward_input["response_length"]}
        """,
}


@pytest.mark.parametrize("kind", EASYR1)
def test_easyr1_kinds(tmp_path, kind):
    name = f"easyr1:{write(tmp_path, EASYR1[kind])}:compute_score"
    ids = [[1, 2, 3], [1], []]
    assert grade(name, ["p"] * 3, ["a", "b", ""], answer=["a"] * 3, completion_ids=ids) == [3.5, 1.0, 0.0]


def test_easyr1_errors_name_both_tries(tmp_path):
    path = write(tmp_path, "def compute_score(x):\n    return x['response'] + 1\n")
    with pytest.raises(
        ValueError, match=r"compute_score' raised TypeError: list.*with a single dict: .* raised TypeError"
    ):
        load(f"easyr1:{path}:compute_score")(["p"], ["c"], answer=["a"])
    path = write(tmp_path, "def compute_score(x):\n    return [{'accuracy': 1.0} for _ in x]\n")
    with pytest.raises(ValueError, match="the key 'overall'"):
        load(f"easyr1:{path}:compute_score")(["p"], ["c"], answer=["a"])


# --- reasoning_gym ------------------------------------------------------------------------------------------------


def test_reasoning_gym_gives_its_own_score():
    gym = pytest.importorskip("reasoning_gym", reason="reasoning_gym is an extra")
    data = gym.create_dataset("chain_sum", size=4, seed=1, min_terms=2, max_terms=2)
    entries = [data[i] for i in range(4)]
    columns = {"rg_dataset": ["chain_sum"] * 4, "rg_entry": [json.dumps(entry) for entry in entries]}
    answers = [entries[0]["answer"], rf"<thinking>..</thinking>\boxed{{{entries[1]['answer']}}}", "nonsense", ""]
    expected = [
        data.score_answer(final_answer(text) or text, entry) for text, entry in zip(answers, entries, strict=True)
    ]
    assert expected[:2] == [1.0, 1.0] and max(expected[2:]) < 1.0
    assert reasoning_gym_reward(["p"] * 4, answers, **columns) == expected
    assert grade_in_worker("reasoning_gym", ["p"] * 4, answers, **columns) == expected


def test_reasoning_gym_faults():
    pytest.importorskip("reasoning_gym", reason="reasoning_gym is an extra")
    assert reasoning_gym_reward(["p"], ["5"], rg_dataset=["chain_sum"], rg_entry=["{}"]) == [0.0]
    with pytest.raises(ValueError, match="rg_dataset: Dataset 'chain_sums' not registered"):
        reasoning_gym_reward(["p"], ["5"], rg_dataset=["chain_sums"], rg_entry=["{}"])


def test_reasoning_gym_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'fastrl_fast\[reasoning-gym\]'"):
        reasoning_gym_reward(["p"], ["5"], rg_dataset=["chain_sum"], rg_entry=["{}"])
