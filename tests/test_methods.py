"""Every method's recipe behind the demo: it parses, takes real steps, and goes on after a resume as if nothing was."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from fastrl_fast import cli
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import Config
from fastrl_fast.loss import build_objective, policy_loss
from fastrl_fast.model import full_weights
from fastrl_fast.packing import Divisor, Sequence, pack
from fastrl_fast.rewards import Grader
from fastrl_fast.train import build_parts, load_inputs
from fastrl_fast.trainer import Trainer

METHODS = (
    "fastrl",
    "fastrl_code",
    "aero",
    "fastrl_aero",
    "cppo",
    "pods",
    "random",
    "dppo",
    "greso",
    "knapsack",
    "reinforce_ada",
    "dapo",
    "gspo",
    "grpo",
)
SMALL = [
    # Six prompts, four a step: from the second step on there is history to plan by.
    "--data.path=demo:train?size=6",
    "--data.prompts_per_step=4",
    "--budget.group_size=4",
    "--budget.epoch_steps=1",
    "--rollout.max_completion_tokens=20",
    "--reward.workers=1",
    "--eval.path=null",
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    config, _ = cli.parse(["--config", "demo", *SMALL], prog="train")
    with build_grader(config.reward) as made:
        yield made


def parse(*recipes: str, extra: tuple[str, ...] = ()) -> Config:
    behind = [f"--config={recipe}" for recipe in recipes]
    return cli.parse(["--config=demo", *behind, *SMALL, *extra], prog="train")[0]


def trainer(config: Config, grader: Grader, folder: Path) -> Trainer:
    device = torch.device("cpu")
    parts = build_parts(config, load_inputs(config, grader), grader, device, folder=folder, log=None)
    return Trainer(config, parts, total_steps=4)


def step(made: Trainer) -> dict[str, float]:
    return {name: value for name, value in made.step().items() if not name.startswith("seconds")}


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in full_weights(made.parts.policy)}


@pytest.mark.parametrize("recipe", METHODS)
def test_a_method_trains_and_resumes_alike(recipe: str, grader: Grader, tmp_path: Path, process_group) -> None:
    """P19: budgets, lots and draws after a resume are those of an uninterrupted run, bit for bit."""
    config = parse(recipe)
    whole = trainer(config, grader, tmp_path)
    start = weights(whole)
    first = [step(whole), step(whole)]
    whole.save()
    last = step(whole)
    assert sum(m["optimizer/updates"] for m in (*first, last)) > 0
    assert any(not torch.equal(start[name], weight) for name, weight in weights(whole).items())
    resumed = trainer(config, grader, tmp_path)
    assert resumed.resume() and resumed.steps_done == 2
    assert step(resumed) == last
    assert all(torch.equal(weights(resumed)[name], weight) for name, weight in weights(whole).items())
    assert resumed.parts.budget.state_dict() == whole.parts.budget.state_dict()
    assert resumed.parts.posterior.state_dict() == whole.parts.posterior.state_dict()


def test_methods_go_behind_any_objective() -> None:
    for objective in ("dapo", "gspo"):
        loss = parse(objective).loss
        assert parse(objective, "cppo", "greso", "pods", "random", "knapsack").loss == loss
        both = parse("fastrl", objective)
        assert (both.loss, both.prune.method, both.budget.kind) == (loss, "mdap", "ars")


def test_with_every_feature_off_the_update_is_plain_grpo_bit_for_bit(grader, tmp_path, process_group) -> None:
    """One sampling call, the group's z-scores, one backward pass, one optimizer step, written out; the trainer's step
    ends with the same bits."""
    config = parse("grpo")
    ours = trainer(config, grader, tmp_path)
    metrics = step(ours)
    plain = trainer(config, grader, tmp_path)
    prompts = plain.parts.data.next_prompts(4)
    groups = plain.parts.sampler.sample(prompts, [4] * 4, seed=config.seed, step=0)
    sequences, tokens = [], 0
    for group in groups:
        rewards = []
        for r in group.rollouts:
            columns = {name: [value] for name, value in group.prompt.columns.items()}
            columns |= {"completion_ids": [r.completion_ids], "finish_reason": [r.finish_reason]}
            graded = grader.grade([group.prompt.text], [r.text], columns)[0]
            rewards.append(graded["exact"] + 0.5 * graded["format"])
        values = torch.tensor(rewards, dtype=torch.float64)
        if values.max() > values.min():
            advantages = ((values - values.mean()) / (values.std() + 1e-6)).float().tolist()
            for r, a in zip(group.rollouts, advantages, strict=True):
                sequences.append(Sequence(group.prompt.token_ids, r.completion_ids, r.rollout_logprobs, a, 1.0))
        tokens += sum(len(r.completion_ids) for r in group.rollouts)
    assert metrics["rollouts/kept"] == len(sequences) and metrics["tokens/generated"] == tokens
    order = sorted(range(len(sequences)), key=lambda i: (-plain.parts.shape.forward_flops(len(sequences[i])), i))
    batch = pack([sequences[i] for i in order])
    settings = {"batch": batch, "objective": build_objective(config.loss), "divisor": Divisor(tokens, 16)}
    loss, _ = plain.parts.policy(batch, partial(policy_loss, **settings, max_completion_tokens=20))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parts.policy.parameters(), config.optimizer.max_grad_norm)
    plain.parts.optimizer.step()
    assert all(torch.equal(weights(ours)[name], weight) for name, weight in weights(plain).items())


def test_rollouts_per_update_sets_the_number_of_updates(grader, tmp_path, process_group) -> None:
    """The authors' code: kept rollouts, rounded up to a multiple, over as many per update."""
    made = trainer(parse("fastrl_code", extra=("--prune.align=4", "--updates.rollouts_per_update=4")), grader, tmp_path)
    metrics = made.step()
    assert metrics["rollouts/kept"] % 4 == 0
    assert 2 <= metrics["optimizer/updates"] <= metrics["rollouts/kept"] / 4, "groups stay whole"


def test_a_step_with_nothing_left_is_skipped(grader, tmp_path, process_group) -> None:
    """P02: the filter lets nothing pass; the run goes on."""
    impossible = ("--budget.filter_low=0.49", "--budget.filter_high=0.495", "--budget.tries=2")
    made = trainer(parse("dapo", extra=impossible), grader, tmp_path)
    start = weights(made)
    metrics = made.step()
    assert (metrics["optimizer/updates"], metrics["optimizer/skipped"], metrics["rollouts/kept"]) == (0, 1, 0)
    assert metrics["dropped/filtered"] == metrics["rollouts/generated"] == 32
    assert metrics["flops/update"] == 0 and metrics["flops_saved/update"] > 0
    assert all(torch.equal(start[name], weight) for name, weight in weights(made).items())
    assert made.steps_done == 1
