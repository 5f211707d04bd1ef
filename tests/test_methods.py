"""Every method's recipe behind the demo: it parses, takes real steps, and goes on after a resume as if nothing was."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from fastrl_fast import cli
from fastrl_fast.accuracy import build_grader
from fastrl_fast.config import Config
from fastrl_fast.data import PromptData
from fastrl_fast.loss import build_objective, policy_loss
from fastrl_fast.model import full_weights
from fastrl_fast.packing import Divisor, Sequence, pack
from fastrl_fast.rewards import Grader
from fastrl_fast.train import Inputs, build_parts, load_inputs
from fastrl_fast.trainer import Trainer
from fastrl_fast.training_run import TrainingRun

METHODS = [name for name in cli.recipe_names() if "model" not in yaml.safe_load(cli.recipe_path(name).read_text())]
"""Every recipe that goes behind one with a model."""
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


@pytest.fixture(scope="module")
def make(grader: Grader, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trainer]:
    """A trainer of four steps that records its groups; the files are read once for all of them."""
    read = load_inputs(parse("grpo"), grader)

    def made(config: Config, folder: Path | None = None) -> Trainer:
        data = PromptData(config.data, read.tokenizer, seed=config.seed)
        inputs = Inputs(copy.deepcopy(read.lm), read.tokenizer, data, None, None)
        folder = folder or tmp_path_factory.mktemp("run")
        parts = build_parts(config, inputs, grader, torch.device("cpu"), folder=folder, log=None)
        return Trainer(config, parts, total_steps=4)

    return made


def step(made: Trainer) -> dict[str, float]:
    """The metrics of a step, whose account adds up."""
    metrics = {name: value for name, value in made.step().items() if not name.startswith("seconds")}
    adds_up(metrics)
    return metrics


def adds_up(metrics: dict[str, float]) -> None:
    """Every rollout and every token is kept or dropped for one reason; spent and saved FLOPs are those of all of
    them."""
    for kept, dropped, generated in (
        ("rollouts/kept", "dropped/", "rollouts/generated"),
        ("tokens/trained", "dropped_tokens/", "tokens/generated"),
    ):
        parts = [value for name, value in metrics.items() if name.startswith(dropped)]
        assert metrics[kept] + sum(parts) == metrics[generated]
    assert metrics["rollouts/kept"] <= metrics["rollouts/graded"] <= metrics["rollouts/generated"]
    ungraded = metrics["dropped/ungraded"], metrics["dropped_tokens/ungraded"]
    assert metrics["rollouts/graded"] == metrics["rollouts/generated"] - ungraded[0]
    assert metrics["tokens/graded"] == metrics["tokens/generated"] - ungraded[1]
    assert metrics["flops/update"] + metrics["flops_saved/update"] > 0
    assert (metrics["flops/update"] > 0) == (metrics["rollouts/kept"] > 0)
    assert 0 <= metrics.get("prune/fidelity", 0.0) <= 1, "no number where no group with differences keeps any"


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in full_weights(made.parts.policy)}


@pytest.mark.parametrize("recipe", METHODS)
def test_a_method_trains_and_resumes_alike(recipe: str, make, tmp_path: Path, process_group, monkeypatch) -> None:
    """P19: four steps in one go, or two and after a resume two more: the same budgets, lots, rollouts and weights, bit
    for bit."""
    records: list = []
    monkeypatch.setattr("fastrl_fast.trainer.distributed.gather_to_first", records.append)
    config = parse(recipe)
    whole = make(config, tmp_path)
    start = weights(whole)
    first = [step(whole), step(whole)]
    TrainingRun(whole).save()
    last = [step(whole), step(whole)]
    whole.parts.checkpointer.wait()
    assert sum(m["optimizer/updates"] for m in (*first, *last)) > 0
    assert any(not torch.equal(start[name], weight) for name, weight in weights(whole).items())
    resumed = make(config, tmp_path)
    assert TrainingRun(resumed).resume() and resumed.steps_done == 2
    assert [step(resumed), step(resumed)] == last
    assert records[2:4] == records[4:6], "rollouts, rewards, advantages, weights, fates"
    assert all(torch.equal(weights(resumed)[name], weight) for name, weight in weights(whole).items())
    assert resumed.parts.budget.state_dict() == whole.parts.budget.state_dict()
    assert resumed.parts.posterior.state_dict() == whole.parts.posterior.state_dict()


def test_recipes_carry_the_published_numbers() -> None:
    """algorithms.md 1.5, 2.1, 3.1 to 3.9."""
    paper, code, aero = parse("fastrl"), parse("fastrl_code"), parse("aero")
    loss = paper.loss
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, loss.kl_coef, loss.aggregation) == (
        0.2, 0.3, 3.0, 0.01, "token-mean",
    )  # fmt: skip
    assert (paper.prune.method, paper.prune.tau, paper.prune.ngram, paper.prune.align) == ("mdap", 0.8, 1, 1)
    assert (code.prune.method, code.prune.tau, code.budget.kind) == ("mdap_seed", 0.8, "fixed")
    assert (paper.budget.kind, paper.prune.similarity, paper.prune.weighting) == ("ars", "jaccard", "none")
    assert paper.reward.functions == {"exact": 1.0, "format": 0.5}
    assert (aero.budget.max_group_size, aero.budget.extra, aero.prune.wrong_per_right) == (16, 2, 1.0)
    dapo, gspo = parse("fastrl", "dapo"), parse("fastrl", "gspo")
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.loss.kl_coef) == (0.2, 0.28, 0.0)
    assert (dapo.budget.filter, dapo.budget.tries, dapo.budget.kind) == (True, 10, "ars")
    assert (gspo.loss.kind, gspo.loss.clip_low, gspo.loss.clip_high) == ("gspo_token", 3e-4, 4e-4)
    assert gspo.updates.minibatches == 4 and gspo.prune == paper.prune


def test_methods_go_behind_any_objective() -> None:
    for objective in ("dapo", "gspo"):
        loss = parse(objective).loss
        assert parse(objective, "cppo", "greso", "pods", "random", "knapsack").loss == loss
        both = parse("fastrl", objective)
        assert (both.loss, both.prune.method, both.budget.kind) == (loss, "mdap", "ars")


def test_with_every_feature_off_the_update_is_plain_grpo_bit_for_bit(make, grader, process_group) -> None:
    """One sampling call, the group's z-scores, one backward pass, one optimizer step, written out; the trainer's step
    ends with the same bits."""
    config = parse("grpo")
    config = dataclasses.replace(config, updates=dataclasses.replace(config.updates, share_prompts=False))
    ours = make(config)
    metrics = step(ours)
    plain = make(config)
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


def test_rollouts_of_zero_advantage_cost_time_and_change_nothing(make, process_group) -> None:
    free, paid = step(make(parse("grpo"))), step(make(parse("grpo_every_rollout")))
    assert free["rollouts/kept"] < paid["rollouts/kept"] == paid["rollouts/generated"] == free["rollouts/generated"]
    assert free["optimizer/grad_norm"] == pytest.approx(paid["optimizer/grad_norm"], rel=1e-5)


def test_rollouts_per_update_sets_the_number_of_updates(make, process_group) -> None:
    """The authors' code: kept rollouts, rounded up to a multiple, over as many per update."""
    made = make(parse("fastrl_code", extra=("--prune.align=4", "--updates.rollouts_per_update=4")))
    metrics = made.step()
    assert metrics["rollouts/kept"] % 4 == 0
    assert 2 <= metrics["optimizer/updates"] <= metrics["rollouts/kept"] / 4, "groups stay whole"


def test_a_step_with_nothing_left_is_skipped(make, process_group) -> None:
    """P02: the filter lets nothing pass; the run goes on."""
    impossible = ("--budget.filter_low=0.49", "--budget.filter_high=0.495", "--budget.tries=2")
    made = make(parse("dapo", extra=impossible))
    start = weights(made)
    metrics = made.step()
    assert (metrics["optimizer/updates"], metrics["optimizer/skipped"], metrics["rollouts/kept"]) == (0, 1, 0)
    assert metrics["dropped/filtered"] == metrics["rollouts/generated"] == 32
    assert metrics["flops/update"] == 0 and metrics["flops_saved/update"] > 0
    assert all(torch.equal(start[name], weight) for name, weight in weights(made).items())
    assert made.steps_done == 1
