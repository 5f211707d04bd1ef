"""FastGRPOTrainer against the released TRL: the same loss without pruning, and by hand with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="TRL is not installed: pip install 'fastrl_fast[reference]'")

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from fastrl_fast.config import BudgetConfig, PruneConfig
from fastrl_fast.integrations.trl import FastGRPOTrainer

pytestmark = pytest.mark.reference

SIZE = 4
PROMPTS = {"3 4 5 6": 10, "7 8": 20, "9 10 11": 30}
"""Prompts of different lengths, and where the words of their answers begin."""
NONE, MDAP = PruneConfig(method="none"), PruneConfig(method="mdap", tau=0.8)


def answers(start: int) -> list[list[int]]:
    """Four answers of different lengths: the second is the first again, longer; the others are unlike."""
    words = list(range(start, start + 9))
    return [words[:3], words[:3] * 2, words[3:8], words[8:9]]


def rewards(completions: list[str], **columns: Any) -> list[float]:
    """By length: 1, 1, 0, 0 of each group, and of the last prompt all the same."""
    return [1.0 if int(text.split()[0]) >= 30 else float(text.split()[0][-1] == "0") for text in completions]


def planned(prompts: list[str], trainer: Any) -> dict[str, Any]:
    ids = [[int(word) for word in prompt.split()] for prompt in prompts]
    size = trainer.num_generations
    completions = [answers(PROMPTS[prompt])[n % size] for n, prompt in enumerate(prompts)]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(str(n) for n in range(3, 89))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


@pytest.fixture
def make_trainer(make_lm: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Any) -> Callable[..., Any]:
    """A function from (class, GRPOConfig settings) to a trainer of the planned answers; weights are the same always."""
    # By path: TRL loads its reference model again from there.
    folder = str(tmp_path / "model")
    make_lm("qwen2", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(folder)

    def made(kind: type = FastGRPOTrainer, *, ours: dict[str, Any] | None = None, **settings: Any) -> Any:
        usual = dict(
            output_dir=str(tmp_path), per_device_train_batch_size=6, gradient_accumulation_steps=2, max_steps=1,
            num_generations=SIZE, max_completion_length=8, shuffle_dataset=False, learning_rate=1e-5, use_cpu=True,
            gradient_checkpointing=False, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_steps=1, max_grad_norm=0.0, model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * 4)
        arguments = dict(args=GRPOConfig(**usual | settings), train_dataset=rows, processing_class=tokenizer)
        return kind(folder, rewards, rollout_func=planned, **arguments, **(ours or {}))

    return made


def trained(trainer: Any) -> tuple[list[Tensor], list[float]]:
    """The gradients at each optimizer step, and the losses of the micro-batches."""
    gradients: list[Tensor] = []
    losses: list[float] = []
    trainer.create_optimizer()
    parameters = list(trainer.model.parameters())

    def look(*_: Any) -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]))

    trainer.optimizer.register_step_pre_hook(look)
    compute = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        loss = compute(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = noted
    trainer.train()
    return gradients, losses


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "beta": 0.1},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "temperature": 0.7},
        {"loss_type": "cispo", "num_iterations": 2, "max_steps": 2, "beta": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 2},
        {"loss_type": "dapo", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_without_pruning_loss_and_gradient_are_those_of_trl(make_trainer, settings):
    theirs, their_losses = trained(make_trainer(GRPOTrainer, **settings))
    ours, our_losses = trained(make_trainer(ours={"prune": NONE}, **settings))
    assert len(ours) == len(theirs) == settings.get("max_steps", 1)
    for mine, yours in zip(ours, theirs, strict=True):
        assert float((mine - yours).norm() / yours.norm()) < 1e-5
    # Rows are dealt to micro-batches in another order; TRL's own losses of an update add up to the same.
    assert sum(our_losses) == pytest.approx(sum(their_losses), abs=1e-6)


def by_hand(make_trainer, *, weights: dict[int, float], count: float, per_row: bool) -> Tensor:
    """The gradient of - sum w A logprob over the answers with a weight, divided by what counts."""
    lm = make_trainer(GRPOTrainer).model
    advantage = 0.5 / (1 / 3) ** 0.5  # two of four are right: (1 - 0.5) / sample deviation
    loss = torch.zeros(())
    for prompt in list(PROMPTS)[:2]:
        start = [int(word) for word in prompt.split()]
        for number, weight in weights.items():
            ids = answers(PROMPTS[prompt])[number]
            logits = lm(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1]
            sign = 1.0 if number < 2 else -1.0
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()
            loss = loss - weight * sign * advantage * logprobs / (len(ids) if per_row else 1) / count
    loss.backward()
    return torch.cat([p.grad.flatten() for p in lm.parameters()])


# Answers of the first two prompts have 3, 6, 5 and 1 tokens; the second is like the first. The last prompt's group is
# dead: its rollouts cost nothing and count, after mdap without the second.
@pytest.mark.parametrize(
    ("loss", "prune", "weights", "count"),
    [
        ("dapo", MDAP, {0: 1, 2: 1, 3: 1}, 3 * (3 + 5 + 1)),
        ("dapo", PruneConfig(method="mdap", divisor="all"), {0: 1, 2: 1, 3: 1}, 3 * 15),
        ("grpo", MDAP, {0: 1, 2: 1, 3: 1}, 9),
        ("grpo", PruneConfig(method="mdap", weighting="multiplicity"), {0: 2, 2: 1, 3: 1}, 12),
    ],
)
def test_with_pruning_the_gradient_is_the_kept_rollouts(make_trainer, loss, prune, weights, count):
    trainer = make_trainer(ours={"prune": prune}, loss_type=loss)
    (gradient,), _ = trained(trainer)
    expected = by_hand(make_trainer, weights=weights, count=count, per_row=loss == "grpo")
    # TRL adds 1e-4 to the deviation, 0.577.
    assert float((gradient - expected).norm() / expected.norm()) < 3e-4
    log = trainer.state.log_history[0]
    assert log["fastrl/kept"] == 6 and log["fastrl/dead_groups"] == 1 and log["fastrl/flops_saved/update"] > 0


def test_dropped_rollouts_go_through_no_forward_pass(make_trainer):
    """Old and reference logprobs included; with a KL term the dead group's kept rollouts are trained on."""
    seen: list[int] = []
    trainer = make_trainer(ours={"prune": MDAP}, beta=0.1, num_iterations=2, max_steps=2, loss_type="grpo")
    trainer._checked = True
    for model in (trainer.model, trainer.ref_model):
        forward = model.forward

        def counted(*args: Any, forward: Any = forward, packed: Any = None, **kwargs: Any) -> Any:
            seen.append(packed.targets.numel())
            return forward(*args, packed=packed, **kwargs)

        model.forward = counted
    trained(trainer)
    # Nine kept rollouts of 27 tokens: reference, old, and two updates.
    assert sum(seen) == 4 * 27


def test_everything_dead_trains_on_nothing(make_trainer):
    trainer = make_trainer(ours={"prune": MDAP})
    trainer.reward_funcs = [lambda completions, **_: [1.0] * len(completions)]
    (gradient,), losses = trained(trainer)
    assert losses == [0.0, 0.0] and not gradient.any()


def test_ars_lowers_the_group_and_is_saved(make_trainer, tmp_path):
    ours = {"prune": MDAP, "budget": BudgetConfig(kind="ars", group_size=SIZE, min_group_size=2, epoch_steps=1)}
    trainer = make_trainer(ours=ours, max_steps=3, save_strategy="steps", save_steps=1)
    trainer.ceiling.reference = 5.0  # Three stay of each group, two fewer: so two rollouts fewer.
    trained(trainer)

    def sizes(trainer: Any) -> list[float]:
        return [log["fastrl/group_size"] for log in trainer.state.log_history if "fastrl/group_size" in log]

    assert sizes(trainer) == [4, 2, 2] and trainer.num_generations == SIZE
    resumed = make_trainer(ours=ours, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert sizes(resumed) == [4, 2, 2] and resumed.ceiling.state_dict() == trainer.ceiling.state_dict()


def test_generation_goes_its_old_way(make_trainer):
    """With a cache and padding on the left, the same tokens as the stock model's."""
    prompts = {"input_ids": torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]]), "do_sample": False, "max_new_tokens": 12}
    prompts["attention_mask"] = (prompts["input_ids"] > 0).long()
    ours, theirs = (make_trainer(kind).model.eval().generate(**prompts) for kind in (FastGRPOTrainer, GRPOTrainer))
    assert ours.shape[1] > 4 and torch.equal(ours, theirs)


def test_a_model_that_cannot_be_packed_is_refused(make_trainer):
    """The first micro-batch is compared with TRL's own forward pass."""
    trainer = make_trainer(ours={"prune": NONE})
    forward = trainer.model.forward

    def off(*args: Any, packed: Any = None, **kwargs: Any) -> Any:
        found = forward(*args, packed=packed, **kwargs)
        return found if packed is None else (found[0] - 0.01, found[1])

    trainer.model.forward = off
    with pytest.raises(ValueError, match=r"packed logprobs differ from TRL's by 0\.01"):
        trainer.train()


@pytest.mark.parametrize(
    ("ours", "settings", "message"),
    [
        ({"prune": PruneConfig(method="pods")}, {}, "prune.method must be one of none, mdap"),
        ({"prune": PruneConfig(similarity="gradient")}, {}, "prune.similarity must be jaccard in TRL"),
        ({"prune": PruneConfig(method="cppo", weighting="match")}, {}, "prune.weighting must be none or multiplicity"),
        ({"prune": PruneConfig(align=4)}, {}, "prune.align must be 1 in TRL"),
        ({"budget": BudgetConfig(kind="aero")}, {}, "budget.kind must be fixed or ars in TRL"),
        ({"budget": BudgetConfig(kind="ars")}, {"max_steps": -1}, "budget.epoch_steps must be given"),
    ],
)
def test_settings_that_contradict_are_refused(make_trainer, ours, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(ours=ours, **settings)
