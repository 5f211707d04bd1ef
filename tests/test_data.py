"""Rows of every source as prompts, the order and the cursor over them, and one clear message per mistake."""

import csv
import gzip
import json
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastrl_fast.config import DataConfig
from fastrl_fast.data import PromptData, load_rows

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(*, template: str | None = TEMPLATE, eos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte; special tokens are a Llama-style BOS, and with `eos` an EOS."""
    special = ["<bos>", "<eos>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    around = "<bos> $A <eos>" if eos else "<bos> $A"
    bpe.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<bos>", 0), ("<eos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>", chat_template=template
    )


TOKENIZER = make_tokenizer()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_data(
    path: str, *, seed: int = 0, tokenizer: PreTrainedTokenizerFast = TOKENIZER, **changes: Any
) -> PromptData:
    changes.setdefault("prompts_per_step", 1)
    return PromptData(DataConfig(path=path, **changes), tokenizer, seed=seed)


def decode(data: PromptData, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[str]:
    return [str(tokenizer.decode(prompt.token_ids)) for prompt in data.first(len(data))]


ROWS = [{"question": f"What is {i} + 1?", "answer": str(i + 1), "level": i % 3} for i in range(10)]


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return write(tmp_path / "ten.jsonl", ROWS)


# sources


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = "\n".join(json.dumps(row) for row in ROWS) + "\n"
    (tmp_path / "a.jsonl").write_bytes(lines.encode())
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace("\n", "\r\n").encode())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": ROWS}))
    (tmp_path / "lines.json").write_text(lines)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert load_rows(str(path), "train") == ROWS, path.name


def test_csv_keeps_text_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [["question", "answer"], ["a, \u2028 b?", "007"], ["two\nlines", "NA"], ['"so"', ""], ["x", "1e5"]]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows(rows)  # its lines end in \r\n
    want: list[list[str | None]] = [["a, \u2028 b?", "007"], ["two\nlines", "NA"], ['"so"', None], ["x", "1e5"]]
    assert load_rows(str(path), "train") == [dict(zip(rows[0], row, strict=True)) for row in want]


def test_jsonl_lines_end_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a\u2028b\x85c"}\n\n{"question": "d"}', encoding="utf-8")
    assert [row["question"] for row in load_rows(str(path), "train")] == ["a\u2028b\x85c", "d"]


def test_datasets_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict(train=whole, test=whole.select(range(2))).save_to_disk(str(tmp_path / "split"))
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", ROWS)
    assert load_rows(str(tmp_path / "plain"), "train") == ROWS
    assert load_rows(str(tmp_path / "split"), "test") == ROWS[:2]
    assert load_rows(str(tmp_path / "files"), "train") == ROWS
    with pytest.raises(ValueError, match=r"data\.path: .*split has no split 'dev'; it has train, test$"):
        load_rows(str(tmp_path / "split"), "dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data\.path: the folder .*empty is empty$"):
        load_rows(str(tmp_path / "empty"), "train")


def test_demo_splits_share_no_prompt_and_answers_are_text() -> None:
    train = load_rows("demo:train?size=300", "train")
    heldout = load_rows("demo:heldout", "train")
    assert (len(train), len(heldout)) == (300, 256)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert load_rows("demo:train?size=300&seed=1", "train") != train == load_rows("demo:train?size=300", "train")
    data = make_data("demo:train?size=50", shuffle=False)
    assert [prompt.columns["answer"] for prompt in data.first(50)] == [row["answer"] for row in train[:50]]


def test_reasoning_gym_rows_carry_what_the_scorer_needs() -> None:
    gym = pytest.importorskip("reasoning_gym")
    rows = load_rows("reasoning_gym:leg_counting?size=3&seed=1&max_animals=4", "train")
    assert len(rows) == 3 and rows == load_rows("reasoning_gym:leg_counting?size=3&seed=1&max_animals=4", "train")
    for row in rows:
        score = gym.get_score_answer_fn(row["rg_dataset"])
        assert score(answer=row["answer"], entry=json.loads(row["rg_entry"])) == 1.0
    with pytest.raises(ValueError, match=r"data\.path: reasoning_gym:no_such_task"):
        load_rows("reasoning_gym:no_such_task", "train")


# prompts


def test_template_system_prompt_and_instruction_with_one_bos(ten: str) -> None:
    data = make_data(ten, system_prompt="Be brief.", instruction="\nBox it.")
    prompt = data.first(1)[0]
    assert TOKENIZER.decode(prompt.token_ids) == "<bos>[system]Be brief.\n[user]What is 0 + 1?\nBox it.\n[assistant]"
    assert prompt.token_ids.count(0) == 1
    assert prompt.text == "What is 0 + 1?"
    assert prompt.columns == {"answer": "1", "level": 0}


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("off", [False, True])
def test_plain_prompts_get_the_tokenizers_bos_once_and_no_eos(tmp_path: Path, eos: bool, off: bool) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "Hi"}, {"prompt": "<bos>Hi"}, {"prompt": "Hi<eos>"}])
    tokenizer = make_tokenizer(template=TEMPLATE if off else None, eos=eos)
    data = make_data(path, tokenizer=tokenizer, chat_template=not off, instruction="")
    assert decode(data, tokenizer)[:2] == ["<bos>Hi", "<bos>Hi"]
    assert decode(data, tokenizer)[2].startswith("<bos>Hi<eos>")


def test_chat_messages_as_questions(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "d"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": talk}, {"prompt": own}])
    data = make_data(path, system_prompt="sys", instruction="!")
    assert decode(data) == [
        "<bos>[system]sys\n[user]a\n[assistant]b\n[user]c!\n[assistant]",
        "<bos>[system]own\n[user]d!\n[assistant]",
    ]
    assert data.first(1)[0].text == talk


def test_usual_and_named_columns(tmp_path: Path) -> None:
    row = {"problem": "P", "question": "Q", "solution": "S", "ground_truth": "G", "extra": [1, 2]}
    path = write(tmp_path / "a.jsonl", [row])
    usual = make_data(path).first(1)[0]
    assert usual.text == "P"
    assert usual.columns == {"question": "Q", "solution": "S", "ground_truth": "G", "extra": [1, 2], "answer": "S"}
    named = make_data(path, prompt_column="question", answer_column="ground_truth").first(1)[0]
    assert (named.text, named.columns["answer"], named.columns["problem"]) == ("Q", "G", "P")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72, "72"),
        (51.0, "51.0"),
        (True, "True"),
        ("  x", "  x"),
        (None, None),
        (float("nan"), None),
        (10**30, "1" + "0" * 30),
    ],
)
def test_answers_become_text_once(tmp_path: Path, value: object, text: str | None) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "answer": value}, {"prompt": "q2"}])
    first, second = make_data(path).first(2)
    assert first.columns["answer"] == text
    assert second.columns["answer"] is None


def test_decimal_answers_of_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["q"], "answer": [Decimal("1.50")]}), tmp_path / "a.parquet")
    assert make_data(str(tmp_path / "a.parquet")).first(1)[0].columns["answer"] == "1.50"


def test_ids_are_given_or_hashes_and_equal_rows_stay_apart(tmp_path: Path, ten: str) -> None:
    given_ids = write(tmp_path / "given.jsonl", [{"id": i, "prompt": "q"} for i in (7, 3)])
    assert [prompt.id for prompt in make_data(given_ids).first(2)] == ["7", "3"]
    repeated = write(tmp_path / "repeated.jsonl", [{"id": 1, "prompt": "q"}] * 3)
    ids = [prompt.id for prompt in make_data(repeated).first(3)]
    assert len(set(ids)) == 3
    assert [prompt.id for prompt in make_data(repeated).first(3)] == ids
    shorter = write(tmp_path / "shorter.jsonl", ROWS[4:])  # an id does not depend on what stands before
    assert [prompt.id for prompt in make_data(shorter).first(6)] == [p.id for p in make_data(ten).first(10)[4:]]


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in (1, 9, 5, 6)])
    data = make_data(path, chat_template=False, max_prompt_tokens=6)  # with BOS: 2, 10, 6, 7
    assert [prompt.text for prompt in data.first(9)] == ["x", "xxxxx"]
    assert (len(data), data.dropped_overlong) == (2, 2)


# order


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12), seed=st.integers(0, 3), cut=st.integers(0, 12))
def test_each_prompt_once_per_epoch_also_over_a_resume(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, cut: int
) -> None:
    path = write(tmp_path_factory.mktemp("order") / "a.jsonl", ROWS)
    data, seen = make_data(path, seed=seed), []
    for number, size in enumerate(sizes):
        if number == cut:
            state = json.loads(json.dumps(data.state_dict()))
            data = make_data(path, seed=seed)
            data.load_state_dict(state)
        part = data.next_prompts(size)
        assert len(part) == size
        seen += [prompt.id for prompt in part]
    whole = make_data(path, seed=seed).next_prompts(len(seen))
    assert seen == [prompt.id for prompt in whole]
    for start in range(0, len(seen) - 9, 10):
        assert len(set(seen[start : start + 10])) == 10
    assert max(Counter(seen).values()) - min(Counter(seen).values(), default=0) <= 1


def test_order_is_a_function_of_seed_and_epoch(ten: str) -> None:
    def orders(seed: int, **changes: Any) -> list[list[str]]:
        data = make_data(ten, seed=seed, **changes)
        return [[str(p.text) for p in data.next_prompts(10)] for _ in range(2)]

    first, second = orders(0)
    assert first != second and orders(0) == [first, second] and orders(1)[0] != first
    assert orders(0, shuffle=False) == [[row["question"] for row in ROWS]] * 2


def test_resume_with_other_data_starts_over_with_one_warning(tmp_path: Path, ten: str) -> None:
    data = make_data(ten)
    data.next_prompts(6)
    other = make_data(write(tmp_path / "other.jsonl", ROWS[:5]))
    with pytest.warns(UserWarning, match=r"data\.path: .*other\.jsonl is not the data of the checkpoint") as caught:
        other.load_state_dict(data.state_dict())
    assert len(caught) == 1
    assert len({prompt.id for prompt in other.next_prompts(5)}) == 5


# mistakes


@pytest.mark.parametrize(
    ("name", "content", "changes", "message"),
    [
        ("a.txt", "x", {}, r"^data\.path: .*a\.txt must end in \.jsonl, \.json, \.csv, \.parquet"),
        ("a.jsonl", "", {}, r"^data\.path: no rows in .*a\.jsonl$"),
        ("a.json", "[]", {}, r"^data\.path: no rows in "),
        ("a.csv", "question,answer\n", {}, r"^data\.path: no rows in "),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt"', {}, r"^data\.path: line 2 of .* is not json: "),
        ("a.jsonl", "[1]", {}, r"^data\.path: row 1 of .* must be an object with named columns, got \[1\]"),
        ("a.json", "{", {}, r"^data\.path: .* is not json: "),
        ("a.json", "3", {}, r"^data\.path: .* must hold a list of objects, got int"),
        ("a.csv", "prompt,answer\na\n", {}, r"^data\.path: row 1 of .* as many values as the header has names"),
        ("a.csv", "prompt,prompt\na,b\n", {}, r"^data\.path: the columns of .* must have different names"),
        ("a.parquet", "not parquet", {}, r"^data\.path: can't read .*a\.parquet: "),
        ("a.jsonl.gz", "not gzip", {}, r"^data\.path: can't read .*a\.jsonl\.gz: "),
        ("a.jsonl", '{"Problem": 1, "b": 2}', {}, r"^data\.prompt_column .* has Problem, b$"),
        ("a.jsonl", '{"prompt": "a"}', {"prompt_column": "q"}, r"^data\.prompt_column must be one of prompt in .*'q'$"),
        ("a.jsonl", '{"prompt": "a"}', {"answer_column": "y"}, r"^data\.answer_column must be one of prompt in .*'y'$"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": null}', {}, r"^data\.path: row 2 of .*: column 'prompt' is empty$"),
        ("a.jsonl", '{"prompt": " "}', {}, r"^data\.path: row 1 of .*: column 'prompt' is empty$"),
        ("a.jsonl", '{"prompt": 3}', {}, r"row 1 of .* 'prompt' must be text or a list of messages .*got 3$"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}', {}, r"row 1 of .* with role and content, got "),
        ("a.jsonl", '{"prompt": [{"role": "user", "content": []}]}', {}, r"row 1 of .* messages of text, got \[\]$"),
        ("a.jsonl", '{"prompt": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]}', {},
         r"row 1 of .* is refused by the chat template: no tools$"),
        ("a.jsonl", '{"prompt": [{"role": "user", "content": "x"}]}', {"chat_template": False},
         r"row 1 of .* holds chat messages, which need data\.chat_template"),
        ("a.jsonl", '{"prompt": "a", "answer": [1]}', {},
         r"^data\.answer_column: row 1 of .* must be text or a number, got list \[1\]$"),
        ("a.jsonl", '{"prompt": "a", "answer": {"x": 1}}', {}, r"^data\.answer_column: row 1 .* got dict "),
        ("a.jsonl", '{"prompt": "a"}', {"max_prompt_tokens": 3, "chat_template": False, "instruction": "abc"},
         r"^data\.max_prompt_tokens must be at least 5, the shortest prompt of .*, got 3$"),
        ("a.jsonl", '{"prompt": "a"}', {"prompts_per_step": 2}, r"^data\.prompts_per_step must be at most 1, .*got 2$"),
        ("a.jsonl", '{"prompt": "a"}', {"chat_template": False, "system_prompt": "s"},
         r"^data\.system_prompt needs a chat template, and data\.chat_template is off$"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_that_names_the_field(
    tmp_path: Path, name: str, content: str, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        make_data(str(tmp_path / name), **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["nowhere.jsonl", "nowhere.txt", "./nowhere", "../a/b", "/tmp/no/such/folder", "~/nowhere/x", "a/b/c", "x.gz"],
)
def test_what_looks_like_a_file_is_never_asked_for_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=r"^eval\.path: no such file"):
        load_rows(path, "test", field="eval.path")


def test_hub_ids_with_and_without_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> datasets.Dataset:
        asked.append((name, configuration, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("openai/gsm8k:main", "test") == load_rows("someone/v1.5", "train") == ROWS
    assert asked == [("openai/gsm8k", "main", "test"), ("someone/v1.5", None, "train")]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"^data\.path: can't load split 'train' of hub id someone/data: no network$"):
        load_rows("someone/data", "train")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("demo:valid", "demo: must be followed by one of train, heldout, got 'valid'"),
        ("demo:train?size=x", "size must be a whole number of 0 or more, got 'x'"),
        ("demo:train?size=0", "no rows in demo:train"),
        ("demo:train?count=3", "demo:train takes size and seed, got count"),
    ],
)
def test_mistakes_in_demo_paths(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^data\.path: {message}"):
        load_rows(path, "train")


def test_system_prompt_without_a_template(ten: str) -> None:
    with pytest.raises(ValueError, match=r"data\.system_prompt needs a chat template, and the tokenizer has none"):
        make_data(ten, tokenizer=make_tokenizer(template=None), system_prompt="s")


def test_gsm8k() -> None:
    path = SHARED / "gsm8k" / "train.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    start = time.monotonic()
    data = make_data(str(path), max_prompt_tokens=500, prompts_per_step=16)
    assert time.monotonic() - start < 30  # 3 s on an idle core
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(data) + data.dropped_overlong == len(rows) == 7473
    lengths = [len(f"[user]{row['question']}\n[assistant]".encode()) + 1 for row in rows]
    assert data.dropped_overlong == sum(length > 500 for length in lengths)
    answers = {prompt.columns["answer"] for prompt in data.next_prompts(len(data))}
    assert answers == {row["answer"] for row, length in zip(rows, lengths, strict=True) if length <= 500}
