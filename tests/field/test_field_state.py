"""Public bug reports about checkpoints, resuming and FSDP, each on its smallest input.

C03, C04, C05 and C08 are whole files of tests: tests/test_checkpoint.py breaks a save at every file operation.
"""

import json
from pathlib import Path

import pytest
import torch
from test_data import make_data, write
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl_fast.checkpoint import Checkpointer, complete
from fastrl_fast.config import ModelConfig, OptimizerConfig
from fastrl_fast.demo import MODEL_DIR
from fastrl_fast.model import load_causal_lm, save_pretrained
from fastrl_fast.optimizer import learning_rate


def saved(folder: Path, step: int, *, keep: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(step)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saver = Checkpointer(folder, keep=keep)
    saver.save(step, model, optimizer, {})
    saver.wait()
    return model, optimizer


def prompts(folder: Path, count: int, name: str = "d") -> str:
    return write(folder / f"{name}.jsonl", [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(count)])


def test_C02_each_prompt_once_per_epoch_over_a_resume(tmp_path: Path) -> None:
    path = prompts(tmp_path, 10)
    first = make_data(path)
    seen = [p.id for _ in range(2) for p in first.next_prompts(2)]
    again = make_data(path)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    seen += [p.id for _ in range(3) for p in again.next_prompts(2)]
    assert len(set(seen)) == 10


def test_C02_a_resume_at_the_end_of_an_epoch_begins_the_next(tmp_path: Path) -> None:
    path = prompts(tmp_path, 4)
    whole, first = make_data(path), make_data(path)
    expected = [p.id for p in whole.next_prompts(12)]
    seen = [p.id for p in first.next_prompts(4)]
    again = make_data(path)
    again.load_state_dict(first.state_dict())
    assert seen + [p.id for p in again.next_prompts(8)] == expected


def test_C03_C04_C05_damaged_failed_and_partial_saves(tmp_path: Path, process_group) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    newest = tmp_path / "step_000002" / "rank_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:10])
    (tmp_path / ".partial-step_000003").mkdir()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="step_000002 cannot be read"):
        assert Checkpointer(tmp_path, keep=2).load_newest(model, optimizer) == {"step": 1}
    saved(tmp_path, 3)
    assert not list(tmp_path.glob(".partial-*"))


def test_C06_there_is_no_random_state_to_lose() -> None:
    """Every draw is a function of the seed, the step, the prompt and its index."""
    from fastrl_fast.draws import draw

    before = draw(1, 2, "p", 3)
    torch.manual_seed(99)
    assert draw(1, 2, "p", 3) == before != draw(1, 2, "p", 4)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_C07_the_rate_is_a_function_of_the_step(schedule: str) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=3)  # type: ignore[arg-type]
    rates = [learning_rate(config, step=step, total_steps=10) for step in range(10)]
    assert rates[5] == learning_rate(config, step=5, total_steps=10)
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_C11_other_data_begins_at_its_beginning_with_a_warning(tmp_path: Path) -> None:
    first = make_data(prompts(tmp_path, 10, "a"))
    first.next_prompts(6)
    other = make_data(prompts(tmp_path, 5, "b"))
    with pytest.warns(UserWarning, match="not the data of the checkpoint"):
        other.load_state_dict(first.state_dict())
    assert len({p.id for p in other.next_prompts(5)}) == 5


def test_C13_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    """And the tokenizer comes with it: the same ids, special tokens and chat template."""
    settings = ModelConfig(path="builtin:demo")
    weights = {n: p.detach() + 1 for n, p in load_causal_lm(str(MODEL_DIR), settings).named_parameters()}
    save_pretrained(str(MODEL_DIR), weights, tmp_path, settings)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, weights[n]) for n, p in loaded.named_parameters())
    ours, theirs = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(MODEL_DIR)
    text = "Name the first number of 3, 20: ½ ÿ\n"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"] and ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert all(path.stat().st_size for path in tmp_path.iterdir())


def test_F02_tied_embeddings_stay_tied(tmp_path: Path, process_group, make_lm) -> None:
    from fastrl_fast.model import Policy

    first = Policy(make_lm(tie_word_embeddings=True, dtype=torch.float32), temperature=1.0)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    sum(p.sum() for p in first.parameters()).backward()
    optimizer.step()
    saver = Checkpointer(tmp_path, keep=1)
    saver.save(1, first, optimizer, {})
    saver.wait()
    again = Policy(make_lm(tie_word_embeddings=True, dtype=torch.float32), temperature=1.0)
    saver.load_newest(again, torch.optim.AdamW(again.parameters()))
    assert again.tied and torch.equal(again.head.weight, first.head.weight)


def test_F03_a_save_counts_only_when_every_ranks_file_is_seen(tmp_path: Path, process_group, monkeypatch) -> None:
    """Two nodes that write to disks of their own: rank 0 sees its file alone."""
    from fastrl_fast import distributed

    gather = distributed.gather_lists

    def with_another_node(items: list, **settings: object) -> list:
        other = [("rank_00001.safetensors", [100, 1])] if isinstance(items[0], tuple) else []
        return gather(items) + other

    monkeypatch.setattr(distributed, "gather_lists", with_another_node)
    with pytest.raises(ValueError, match=r"rank 0 does not see all of rank_00001\.safetensors: all ranks"):
        saved(tmp_path, 1)
    assert not complete(tmp_path)


def test_L15_weights_that_are_not_finite_never_replace_good_ones(tmp_path: Path, process_group) -> None:
    model, optimizer = saved(tmp_path, 1, keep=1)
    with torch.no_grad():
        model.weight.fill_(float("inf"))
    saver = Checkpointer(tmp_path, keep=1)
    saver.save(2, model, optimizer, {})
    with pytest.raises(ValueError, match="not finite"):
        saver.wait()
    assert [path.name for path in complete(tmp_path)] == ["step_000001"]
