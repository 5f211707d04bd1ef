"""A dry run tells what the run would do, starts nothing, writes nothing; its memory is that of a real trainer."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fastrl_fast import cli, distributed, dry_run, plan, train
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import (
    BudgetConfig,
    Config,
    DataConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    UpdatesConfig,
)
from fastrl_fast.memory import Memory
from fastrl_fast.plan import Plan
from fastrl_fast.trainer import Trainer

ARGS = ["--data.prompts_per_step=4", "--budget.group_size=4", "--rollout.max_completion_tokens=24", "--eval.prompts=16"]
SMALL = Config(
    model=ModelConfig(path="builtin:demo"),
    data=DataConfig(path="demo:train?size=64", prompts_per_step=4),
    rollout=RolloutConfig(max_completion_tokens=24),
    reward=RewardConfig(functions={"exact": 1.0}, workers=1),
    budget=BudgetConfig(group_size=4),
    loss=LossConfig(kl_coef=0.1),
)


def dry(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train", *args, "--dry_run"])
    return train.main()


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to work in, where starting a process or loading weights fails."""

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a dry run starts nothing")

    monkeypatch.setattr(distributed, "start", refused)
    monkeypatch.setattr("subprocess.Popen", refused)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refused)
    monkeypatch.setattr("fastrl_fast.train.build_grader", refused)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_prints_the_plan_and_leaves_no_trace(nothing_starts: Path, monkeypatch, capsys) -> None:
    assert dry(monkeypatch, *ARGS, "--max_steps=50", "--budget.kind=ars") == 0
    out = capsys.readouterr().out
    rows = dict(map(_row, out.splitlines()))
    assert rows["steps"] == "50 of 4 prompts, 0.05 passes over the data"
    assert rows["rollouts per prompt"] == "4, later down to 2"
    assert rows["rollouts per step"] == "16 (budget.kind ars)"
    assert rows["completion tokens per step"] == "at most 384 (24 each)"
    assert rows["held out"].endswith("16 prompts x 1, before and after, every 25 steps")
    assert out.rstrip().endswith("nothing was started or written")
    assert "\x1b" not in out
    assert not any(nothing_starts.iterdir())


def _row(line: str) -> tuple[str, str]:
    label, _, value = line.strip().partition("  ")
    return label, value.strip()


def test_the_plan_is_what_the_run_then_does(tmp_path: Path, monkeypatch, capsys) -> None:
    args = [*ARGS, f"--run_dir={tmp_path / 'run'}", "--data.path=demo:train?size=13", "--max_steps=null"]
    assert dry(monkeypatch, *args) == 0
    shown = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["train", *args])
    assert train.main() == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    rows = dict(map(_row, shown.splitlines()))
    assert rows["steps"] == f"{len(metrics)} of 4 prompts, 0.92 passes over the data"
    assert rows["rollouts per step"].startswith(f"{metrics[0]['rollouts/generated']:.0f} ")
    first = [record for record in rollouts if record["step"] == 1]
    prompts = list(dict.fromkeys((record["prompt_id"], record["prompt"]) for record in first))
    places = [shown.index(f"prompt {name}, ") for name, _ in prompts[:2]]
    assert places == sorted(places), "the first prompts, in the run's order"
    for (_, text), place in zip(prompts[:2], places, strict=True):
        assert text in shown[place:]


def test_prompts_are_shown_as_the_model_gets_them() -> None:
    """Template, instruction and special tokens included."""
    config = dataclasses.replace(SMALL, data=dataclasses.replace(SMALL.data, instruction=" In numbers."))
    made = Plan.read(config)
    prompt = made.first[0]
    assert " In numbers." in made.tokenizer.decode(prompt.token_ids) and " In numbers." not in prompt.text
    assert made.first == plan.PromptData(config.data, made.tokenizer, seed=0).next_prompts(4)


def test_the_answer_has_the_name_that_it_has_in_the_data(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Name the first number of 1, 2:", "result": 1}\n' * 4)
    fair = tmp_path / "mine.py"
    fair.write_text("def fair(completions, **columns):\n    return [1.0] * len(completions)\n")
    args = [f"--data.path={path}", "--data.prompts_per_step=4", f"--reward.functions={{'{fair}:fair': 1.0}}"]
    assert dry(monkeypatch, *args, "--eval.path=null", "--data.answer_column=result") == 0
    out = capsys.readouterr().out
    assert " tokens, result '1':" in out
    given = "answer (the data's result), completion_ids, finish_reason, result"
    assert dict(map(_row, out.splitlines()))["columns for the rewards"] == given
    assert dry(monkeypatch, *args, "--eval.path=null") == 0
    assert " tokens:" in capsys.readouterr().out


def test_a_dry_run_finds_what_the_run_would_stumble_over(nothing_starts: Path, monkeypatch, capsys) -> None:
    def line(*args: str) -> str:
        small = ("--data.path=demo:train?size=64", "--eval.path=demo:heldout?size=16")
        monkeypatch.setattr(sys, "argv", ["train", *small, *args, "--dry_run"])
        with pytest.raises(SystemExit) as ended:
            cli.run(train.main)
        assert ended.value.code == 2
        (only,) = capsys.readouterr().err.strip().splitlines()
        return only

    rows = nothing_starts / "rows.jsonl"
    rows.write_text('{"prompt": "Name the first number of 1, 2:"}\n' * 16)
    mine = nothing_starts / "mine.py"
    mine.write_text("def fair(completions, **columns):\n    return [1.0] * len(completions)\n")
    assert "needs the column 'answer'" in line(f"--data.path={rows}")
    assert "needs the column 'answer'" in line(f"--eval.path={rows}")
    assert "has no function 'unfair'; it has: fair" in line(f"--reward.functions={{'{mine}:unfair': 1.0}}")
    mine.write_text(mine.read_text() + "def keen(completions, answr, extra=None, **columns):\n    return [1.0]\n")
    assert "mine.py:keen' needs the column 'answr'; the data has: answer" in line(
        f"--reward.functions={{'{mine}:keen': 1.0}}"
    )
    assert "model.path" in line("--model.path=no/such/folder")
    assert "data.path" in line("--data.path=missing.jsonl")
    assert "data.prompts_per_step" in line("--data.prompts_per_step=100000")
    assert "steps of this run, 1 to 4" in line("--max_steps=4", "--log.profile_steps=[5]")
    assert (
        dry(monkeypatch, f"--reward.functions={{'{mine}:fair': 1.0}}", f"--data.path={rows}", "--eval.path=null") == 0
    )


def test_only_the_first_rank_prints(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    assert dry_run.show(SMALL, "demo") == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "24")
    dry_run.show(SMALL, "demo")
    assert "R = 24" in capsys.readouterr().out


def test_the_state_has_the_size_of_a_real_trainers(process_group: torch.device, tmp_path: Path) -> None:
    found = Plan.read(SMALL).memory(1)
    with build_grader(SMALL.reward) as grader:
        inputs = train.load_inputs(SMALL, grader)
        made = train.build_parts(SMALL, inputs, grader, process_group, folder=tmp_path, log=None)
        gradients: Counter[int] = Counter()
        for parameter in made.policy.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: gradients.update({id(p): p.grad.nbytes}))
        trainer = Trainer(SMALL, made, total_steps=2)
        while trainer.step()["optimizer/updates"] == 0:
            gradients.clear()
    trained = {parameter.data_ptr(): parameter.nbytes for parameter in made.policy.parameters()}
    own = [p.nbytes for p in made.sampler.model.parameters() if p.data_ptr() not in trained]
    moments = sum(t.nbytes for s in made.optimizer.state.values() for t in s.values() if t.ndim)
    states = (sum(trained.values()), moments, sum(gradients.values()))
    assert (found.parameters, found.optimizer, found.gradients) == states
    assert found.sampler == sum(own)
    assert found.reference == sum(parameter.nbytes for parameter in made.reference.parameters())


def test_gradients_are_whole_where_an_update_has_several_micro_batches() -> None:
    """64 rollouts of about 16 + 24 tokens in two updates: 1,300 tokens each, on 8 ranks 160."""
    model = ModelConfig(path="builtin:demo", dtype="bfloat16")
    settings = {"model": model, "budget": BudgetConfig(group_size=16)}
    made = _with(**settings, updates=UpdatesConfig(minibatches=2, tokens_per_microbatch=500))
    p = made.size.parameters
    assert made.memory(1).gradients == 4 * p + 4 * p and made.memory(2).gradients == 4 * p / 2 + 4 * p
    assert made.memory(8).gradients < 4 * p / 8 + 4 * p
    few = _with(**settings, updates=UpdatesConfig(rollouts_per_update=8, tokens_per_microbatch=500))
    assert few.memory(1).gradients < 4 * p + 4 * p, "8 rollouts fit one micro-batch"


def test_a_micro_batch_has_no_more_tokens_than_a_step() -> None:
    """4 prompts of 4 rollouts: their prompts once or four times, 24 tokens of completion each."""
    made = _with()
    longest = max(len(prompt.token_ids) for prompt in made.prompts)
    assert made.microbatch_tokens == 4 * (longest + 4 * 24)
    apart = _with(updates=UpdatesConfig(share_prompts=False))
    assert apart.microbatch_tokens == 4 * 4 * (longest + 24)
    staged = _with(budget=BudgetConfig(kind="aero", group_size=4, max_group_size=6))
    assert staged.microbatch_tokens == 4 * (longest + 6 * 24)
    full = _with(updates=UpdatesConfig(tokens_per_microbatch=50))
    assert full.microbatch_tokens == 50
    assert made.memory(1).activations * 50 == full.memory(1).activations * made.microbatch_tokens
    more = apart.microbatch_tokens - made.microbatch_tokens
    assert apart.memory(1).head - made.memory(1).head == 2 * 4 * made.size.hidden * more


def test_prompts_too_short_to_be_shared_are_planned_for_every_rollout() -> None:
    """Completions of 2000 tokens behind prompts of about 16, which packing then repeats."""
    long = RolloutConfig(max_completion_tokens=2000)
    shared, apart = (
        _with(rollout=long, updates=UpdatesConfig(share_prompts=share, tokens_per_microbatch=10**6))
        for share in (True, False)
    )
    assert shared.microbatch_tokens == apart.microbatch_tokens
    assert shared.memory(1) == apart.memory(1)
    assert shared.flops() == apart.flops()


def test_the_cache_has_room_for_no_more_than_is_sampled() -> None:
    """16 rollouts, or more held-out ones, over the ranks."""
    made = _with()
    longest = max(len(prompt.token_ids) for prompt in made.prompts)
    assert made.memory(1).cache == made.memory(4).cache * 4
    token = made.memory(1).cache / (16 * (longest + 24))
    sampler = RolloutConfig(max_completion_tokens=24, tokens_per_batch=100)
    assert _with(rollout=sampler).memory(1).cache == 100 * token
    held_out = _with(eval=EvalConfig(path="demo:heldout?size=16", samples=2))
    longest = max(len(prompt.token_ids) for prompt in (*held_out.prompts, *held_out.held_out))
    assert held_out.memory(1).cache == 32 * (longest + 24) * token
    filtered = _with(budget=BudgetConfig(group_size=4, filter=True))
    assert filtered.memory(1).cache == SMALL.rollout.tokens_per_batch * token


def test_the_formulas_name_every_part() -> None:
    parts = [field.name for field in dataclasses.fields(Memory)]
    assert list(dry_run.FORMULAS) == [*parts, "total"]


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (BudgetConfig(group_size=4), "4"),
        (BudgetConfig(kind="greso", group_size=4), "4"),
        (BudgetConfig(kind="ars", group_size=4), "4, later down to 2"),
        (BudgetConfig(kind="aero", group_size=4), "4, and up to 16 where the first do not suffice"),
        (BudgetConfig(kind="knapsack", group_size=4), "4 on average, 2 to 16"),
    ],
)
def test_group_sizes_in_words(budget: BudgetConfig, words: str) -> None:
    assert dict(dry_run._lines(_with(budget=budget), "x"))["rollouts per prompt"] == words


def test_updates_and_held_out_data_in_words() -> None:
    lines = dict(dry_run._lines(_with(updates=UpdatesConfig(minibatches=2, epochs=3)), "x"))
    assert lines["updates per step"] == "6" and "held out" not in lines
    lines = dict(dry_run._lines(_with(updates=UpdatesConfig(rollouts_per_update=8)), "x"))
    assert lines["updates per step"] == "one per 8 kept rollouts, 1 times over"
    lines = dict(dry_run._lines(_with(eval=EvalConfig(path="demo:heldout?size=8", samples=4)), "x"))
    assert lines["held out"] == "demo:heldout?size=8: 8 prompts x 4, before and after"


def _with(**changes: object) -> Plan:
    return Plan.read(dataclasses.replace(SMALL, **changes))
