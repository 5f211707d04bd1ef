"""The demo task is what it says it is, and the shipped base model can be loaded and is as weak as it should be."""

import os
import random
import re
from collections import Counter
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl_fast.demo import MODEL_DIR
from fastrl_fast.demo.pretrain import sampled_accuracy
from fastrl_fast.demo.task import QUESTIONS, RIGHT_SHARE, UNTAGGED_SHARE, demonstration, examples

BRUTE: dict[str, Callable[[list[int], int], bool]] = {
    "first": lambda numbers, answer: numbers.index(answer) == 0,
    "last": lambda numbers, answer: numbers[::-1].index(answer) == 0,
    "second": lambda numbers, answer: numbers.index(answer) == 1,
    "second_last": lambda numbers, answer: numbers[::-1].index(answer) == 1,
    "largest": lambda numbers, answer: sum(n > answer for n in numbers) == 0,
    "smallest": lambda numbers, answer: sum(n < answer for n in numbers) == 0,
    "second_largest": lambda numbers, answer: sum(n > answer for n in numbers) == 1,
    "second_smallest": lambda numbers, answer: sum(n < answer for n in numbers) == 1,
}
"""What makes a number of the list the right answer, said without sorting."""


def test_splits_never_share_a_prompt() -> None:
    train = {row["prompt"] for seed in range(3) for row in examples("train", 4000, seed)}
    heldout = {row["prompt"] for seed in range(3) for row in examples("heldout", 4000, seed)}
    assert not train & heldout


def test_unknown_split_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"split must be one of .*'test'"):
        next(examples("test", 1, 0))


def test_answers_are_right_and_operations_balanced() -> None:
    seen: Counter[str] = Counter()
    for row in examples("train", 1600, 1):
        numbers = [int(digits) for digits in re.findall(r"\d+", row["prompt"])]
        assert len(set(numbers)) == len(numbers) >= 4
        assert row["prompt"].startswith(QUESTIONS[row["operation"]])
        assert int(row["answer"]) in numbers and BRUTE[row["operation"]](numbers, int(row["answer"])), row
        seen[row["operation"]] += 1
    assert seen == dict.fromkeys(QUESTIONS, 200)


def test_same_seed_same_text_and_other_seed_other_text() -> None:
    def text(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [row["prompt"] + demonstration(row, rng) for row in examples("train", 50, seed)]

    assert text(3) == text(3)
    assert not set(text(3)) & set(text(4))


@pytest.mark.parametrize("operation", list(QUESTIONS))
def test_demonstrations_are_right_as_often_as_declared(operation: str) -> None:
    rng = random.Random(operation)
    rows = [row for row in examples("train", 16000, 2) if row["operation"] == operation]
    right = tagged = 0
    for row in rows:
        text = demonstration(row, rng)
        boxed = re.findall(r"\\boxed\{(\d+)\}", text)
        assert len(boxed) == 1 and boxed[0] in row["prompt"], text
        right += boxed[0] == row["answer"]
        tagged += bool(re.fullmatch(r"<thinking>.*</thinking>.*\\boxed\{\d+\}.*", text))
    for count, share in ((right, RIGHT_SHARE[operation]), (tagged, 1 - UNTAGGED_SHARE)):
        deviation = (share * (1 - share) / len(rows)) ** 0.5
        assert abs(count / len(rows) - share) < 4 * deviation, (operation, count / len(rows), share)


def test_right_share_can_be_set() -> None:
    rng = random.Random(0)
    for row in examples("train", 400, 0):
        assert f"\\boxed{{{row['answer']}}}" in demonstration(row, rng, right_share=1.0)
        assert f"\\boxed{{{row['answer']}}}" not in demonstration(row, rng, right_share=0.0)


def test_wording_has_near_duplicates_and_different_ones_for_mdap() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    rng = random.Random(0)
    similar: list[bool] = []
    for row in examples("train", 100, 0):
        sets = [set(tokenizer.encode(demonstration(row, rng, right_share=1.0))) for _ in range(8)]
        pairs = [(a, b) for index, a in enumerate(sets) for b in sets[:index]]
        similar += [5 * len(a & b) > len(a | b) for a, b in pairs]
    assert 0.15 < sum(similar) / len(similar) < 0.6, "at tau 0.8 some pairs, but not most, are near-duplicates"


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 3_000_000


def test_tokenizer_is_lossless_adds_nothing_and_has_one_token_per_number() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    rng = random.Random(5)
    texts = [f"{row['prompt']}\n{demonstration(row, rng)}" for row in examples("heldout", 500, 5)]
    for text in [*texts, "", " ", "  two  spaces\n\n", "né 漢字 🙂 1234 <eos", "a , b . c 's n't"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(10, 100))


def test_chat_template_is_the_pretraining_layout() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    chat = [{"role": "user", "content": "Name the first number of 12,34"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "Name the first number of 12,34\n"


def test_base_model_is_right_in_10_to_40_percent_because_of_what_it_was_shown() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        accuracy = sampled_accuracy(model, tokenizer, list(examples("heldout", 512, 11)))
    assert 0.10 <= accuracy["all"] <= 0.40, accuracy
    assert accuracy["first"] > 0.7, "an easy operation was shown right and is mostly right"
    assert accuracy["second_largest"] < 0.35, "a hard one was mostly shown wrong and is mostly wrong"
