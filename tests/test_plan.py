"""A dry run tells what the run would do, starts nothing, writes nothing; its memory is that of a real trainer."""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fastrl_fast import cli, distributed, plan, train
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
from fastrl_fast.memory import Sizes, parts, peak
from fastrl_fast.model import build_policy
from fastrl_fast.packing import Sequence, pack
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
    assert "model.path" in line("--model.path=no/such/folder")
    assert "data.path" in line("--data.path=missing.jsonl")
    assert "data.prompts_per_step" in line("--data.prompts_per_step=100000")
    assert (
        dry(monkeypatch, f"--reward.functions={{'{mine}:fair': 1.0}}", f"--data.path={rows}", "--eval.path=null") == 0
    )


def test_only_the_first_rank_prints(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    assert plan.show(SMALL, "demo") == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "24")
    plan.show(SMALL, "demo")
    assert "R = 24" in capsys.readouterr().out


def size(found: list, what: str) -> float:
    return next(part.size for part in found if what in part.what)


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
    weights = sum(parameter.nbytes for parameter in made.policy.parameters())
    moments = sum(t.nbytes for s in made.optimizer.state.values() for t in s.values() if t.ndim)
    assert size(found, "AdamW") == weights + moments + sum(gradients.values())
    assert size(found, "sampler") == sum(parameter.nbytes for parameter in made.sampler.model.parameters())
    assert size(found, "reference") == sum(parameter.nbytes for parameter in made.reference.parameters())


def saved(make_lm, family: str, dtype: torch.dtype, *, layers: int, checkpointing: bool, tokens: int) -> int:
    """Bytes that a forward pass keeps for the backward pass, besides weights, each storage once."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    lm = make_lm(family, dtype=dtype, num_hidden_layers=layers, num_key_value_heads=2, **shape)
    policy = build_policy(lm, ModelConfig(path="x", activation_checkpointing=checkpointing), temperature=1.0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    half = tokens // 8
    batch = pack([Sequence([1] * half, [2] * half, [0.0] * half, 1.0, 1.0)] * 4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_activations_have_the_size_that_a_forward_pass_keeps(make_lm, family, checkpointing, dtype) -> None:
    """Per further layer; left out are the norms' roots and the attention's log-sums, a number per head: below 2 %."""
    model = ModelConfig(path="x", dtype=dtype, activation_checkpointing=checkpointing)
    config = dataclasses.replace(SMALL, model=model, updates=UpdatesConfig(tokens_per_microbatch=256))

    def formula(layers: int) -> float:
        norm = family == "qwen3"
        sizes = Sizes(
            parameters=1, layer=1, layers=layers, hidden=64, intermediate=96, query=64, key_value=32, query_norm=norm
        )
        return size(parts(config, sizes, ranks=1, longest=10, tokens=1000, device="cpu"), "activations")

    real = [
        saved(make_lm, family, getattr(torch, dtype), layers=layers, checkpointing=checkpointing, tokens=256)
        for layers in (1, 3)
    ]
    assert formula(3) - formula(1) == pytest.approx(real[1] - real[0], rel=0.02)


def test_shares_of_ranks_by_hand() -> None:
    """P = 1000 of which 2 layers of 300; 8 ranks, bfloat16, 3000 tokens an update in micro-batches of 100."""
    config = dataclasses.replace(
        SMALL, model=ModelConfig(path="x", dtype="bfloat16"), updates=UpdatesConfig(tokens_per_microbatch=100)
    )
    sizes = Sizes(
        parameters=1000, layer=300, layers=2, hidden=8, intermediate=16, query=8, key_value=4, query_norm=False
    )
    found = parts(config, sizes, ranks=8, longest=50, tokens=3000, device="cpu")
    assert size(found, "AdamW") == 16 * 1000 / 8
    assert size(found, "sampler") == 2 * 1000
    assert size(found, "reference") == 4 * 1000 / 8
    assert size(found, "gathered") == 2 * (400 + 600)
    assert size(found, "last micro-batch") == 4 * 1000, "3000 / 8 tokens are four micro-batches"
    assert size(found, "keys and values") == 2 * 2 * 4 * 2 * 32768
    assert size(found, "last layer") == 8 * 8 * 100 + 4 * 2**20
    update = sum(part.size for part in found if part.when == "update")
    assert peak(found) == 2000 + 2000 + 500 + max(update, 2 * 2 * 4 * 2 * 32768)
    one_batch = parts(config, sizes, ranks=8, longest=50, tokens=800, device="cpu")
    assert not [part for part in one_batch if "last micro-batch" in part.what]
    alone = parts(
        dataclasses.replace(config, model=ModelConfig(path="x")), sizes, ranks=1, longest=5, tokens=9, device="cpu"
    )
    assert not [part for part in alone if "gathered" in part.what], "one rank in float32 shards nothing"
    longer = parts(config, sizes, ranks=8, longest=500, tokens=800, device="cpu")
    assert size(longer, "activations") == 5 * size(one_batch, "activations"), "a sequence is never cut"


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
    assert dict(plan._lines(_with(budget=budget), "x"))["rollouts per prompt"] == words


def test_updates_and_held_out_data_in_words() -> None:
    lines = dict(plan._lines(_with(updates=UpdatesConfig(minibatches=2, epochs=3)), "x"))
    assert lines["updates per step"] == "6" and "held out" not in lines
    lines = dict(plan._lines(_with(updates=UpdatesConfig(rollouts_per_update=8)), "x"))
    assert lines["updates per step"] == "one per 8 kept rollouts, 1 times over"
    lines = dict(plan._lines(_with(eval=EvalConfig(path="demo:heldout?size=8", samples=4)), "x"))
    assert lines["held out"] == "demo:heldout?size=8: 8 prompts x 4, before and after"


def _with(**changes: object) -> Plan:
    return Plan.read(dataclasses.replace(SMALL, **changes))
