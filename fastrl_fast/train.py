"""`torchrun -m fastrl_fast.train [--config NAME_OR_FILE] [--section.field VALUE ...]`: train a model with group-based
RL."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import cli, distributed, dry_run, plan, run_folder, savings
from .accuracy import Accuracy, build_accuracy, build_grader
from .advantage import Posterior
from .budget import build_budget
from .builtin import resolve_model
from .checkpoint import Checkpointer
from .config import Config
from .data import PromptData
from .grading import empty_columns
from .interrupt import Interrupted
from .metrics import RunLog, check_trackers
from .model import build_policy, frozen_copy, load_causal_lm, load_tokenizer, sampler_copy
from .optimizer import build_optimizer
from .rewards import Grader
from .rollout import EngineSampler, Sampler, build_engine, build_sampler
from .trainer import Parts, Trainer
from .training_run import TrainingRun
from .types import ImageReader, Prompt
from .vision import barred_tokens, load_images


def main() -> int:
    argv = [argument for argument in sys.argv[1:] if argument != cli.DRY_RUN]
    about = f"{cli.DRY_RUN} prints the plan, the memory and the first prompts, and starts nothing. "
    config, recipe = cli.parse(argv, prog="fastrl_fast.train", about=about)
    check_trackers(config.log.trackers)
    if cli.DRY_RUN in sys.argv[1:]:
        return dry_run.show(config, recipe)
    device = distributed.start()
    try:
        return train(config, recipe, device)
    finally:
        distributed.stop()


@dataclass(slots=True)
class Inputs:
    """What a run reads before it writes anything."""

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: PromptData
    accuracy: Accuracy | None
    images: ImageReader | None


def train(config: Config, recipe: str, device: torch.device) -> int:
    """Check everything that can be wrong, then load, train and say what was learnt; the exit code, 128 + the signal's
    number for a run that a signal ended, 3 for one that lost its sampler."""
    with distributed.together(lambda: build_grader(config.reward)) as grader:
        inputs = distributed.together(lambda: load_inputs(config, grader))
        total_steps = plan.total_steps(config, prompts=len(inputs.data))
        folder = _open_folder(config, recipe, total_steps)
        with _run_log(folder, config, total_steps) as log:
            parts = build_parts(config, inputs, grader, device, folder=folder, log=log)
            code = _train(config, parts, total_steps, folder)
            if isinstance(parts.sampler, EngineSampler):
                parts.sampler.close()
            return code


def _train(config: Config, parts: Parts, total_steps: int, folder: Path) -> int:
    training, log = TrainingRun(Trainer(config, parts, total_steps=total_steps)), parts.log
    _start(training)
    try:
        training.run()
    except Interrupted as interrupted:
        if log:
            done = training.trainer.steps_done
            log.say(f"ended by {interrupted} after step {done}; the same command goes on: {folder}")
        return interrupted.code
    if log:
        _finish(training, folder, log)
    return 0


def load_inputs(config: Config, grader: Grader) -> Inputs:
    """Read data and model. Raises ValueError for whatever the user can mend."""
    path = resolve_model(config.model.path)
    tokenizer = load_tokenizer(path, config.model)
    images = load_images(path, tokenizer, config.model, config.data)
    data = PromptData(config.data, tokenizer, seed=config.seed, images=images)
    accuracy = build_accuracy(config, tokenizer, grader, images)
    for prompts in (data.first(len(data)), accuracy.prompts if accuracy else []):
        _check_columns(grader, prompts)
    return Inputs(load_causal_lm(path, config.model), tokenizer, data, accuracy, images)


def _check_columns(grader: Grader, prompts: list[Prompt]) -> None:
    """Raise ValueError for a column that a reward needs and no row of the data has: grading nothing finds out."""
    if prompts:
        grader.grade([], [], empty_columns(prompts))


def build_parts(
    config: Config, inputs: Inputs, grader: Grader, device: torch.device, *, folder: Path, log: RunLog | None
) -> Parts:
    """Build the sampler, the sharded policy, the reference where the loss needs one, and the optimizer."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    sampler = _sampler(config, inputs.lm, inputs.tokenizer, inputs.images, device)
    policy = build_policy(inputs.lm, config.model, temperature=config.rollout.temperature)
    reference = frozen_copy(policy) if config.loss.kl_coef > 0 else None
    shape = policy.shape
    for model in (policy, reference):
        if model is not None:
            distributed.shard(model, model.shard_units, dtype=dtype, device=device)
    return Parts(
        policy=policy,
        shape=shape,
        reference=reference,
        optimizer=build_optimizer(policy.parameters(), config.optimizer),
        sampler=sampler,
        data=inputs.data,
        images=inputs.images,
        grader=grader,
        budget=build_budget(config, prompts=len(inputs.data)),
        posterior=Posterior(config.advantage),
        accuracy=inputs.accuracy,
        checkpointer=Checkpointer(
            folder / "checkpoints", keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
        ),
        log=log,
        device=device,
    )


def _sampler(
    config: Config,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageReader | None,
    device: torch.device,
) -> Sampler:
    """The engine of the config, with the weights of `lm`; all ranks call this together."""
    if config.rollout.engine == "local":
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        whole = not distributed.divides(dtype)
        if whole:
            torch.nn.Module.to(lm, device)  # here, for what is moved later is other memory
        copy = sampler_copy(lm, dtype=dtype, device=device, share_weights=whole)
        return build_sampler(config.rollout, copy, tokenizer, images=images, barred=barred_tokens(lm.config))
    return distributed.together(lambda: build_engine(config, resolve_model(config.model.path), lm, tokenizer))


def _open_folder(config: Config, recipe: str, total_steps: int) -> Path:
    """Rank 0 opens the run folder; a refusal ends all ranks with its message."""

    def opened() -> Path | None:
        if distributed.rank() != 0:
            return None
        return run_folder.open_run_folder(cli.to_dict(config), recipe, total_steps=total_steps)

    folder = distributed.broadcast_object(distributed.together(opened))
    assert folder is not None, "rank 0 opened it"
    return folder


@contextmanager
def _run_log(folder: Path, config: Config, total_steps: int) -> Iterator[RunLog | None]:
    """Rank 0's log, closed however the run ends: an open progress bar hides the terminal's cursor."""
    if distributed.rank() != 0:
        yield None
        return
    log = RunLog(folder, total_steps=total_steps, trackers=config.log.trackers, settings=cli.to_dict(config))
    try:
        yield log
    finally:
        log.close()


def _start(training: TrainingRun) -> None:
    """Resume where there is something to resume, and say what is about to run."""
    resumed, trainer = training.resume(), training.trainer
    log = trainer.parts.log
    if log is None:
        return
    config, data = trainer.config, trainer.parts.data
    parameters = sum(p.numel() for p in trainer.parts.policy.parameters())
    log.resume_at(trainer.steps_done)
    log.say(
        f"{config.model.path}: {parameters / 1e6:.2f}M parameters on {distributed.world_size()} x "
        f"{trainer.parts.device.type}; {len(data)} prompts ({data.dropped_overlong} too long"
        f"{f', {data.dropped_unreadable} with a damaged image' if data.dropped_unreadable else ''}); "
        f"{trainer.total_steps} steps of {config.data.prompts_per_step} prompts x {config.budget.group_size} rollouts"
    )
    if resumed:
        log.say(f"resumed after step {trainer.steps_done} of {log.folder}")


def _finish(training: TrainingRun, folder: Path, log: RunLog) -> None:
    """Write the summary, which marks the run as finished, and print what was learnt."""
    before, after = training.accuracy_before, training.accuracy_after
    totals, means = savings.totals(folder / "metrics.jsonl"), savings.means(folder / "metrics.jsonl")
    steps = training.trainer.steps_done
    summary = {"steps": steps, "before": before, "after": after, "totals": totals, "means": means}
    run_folder.write_summary(folder, summary)
    for name in (name for name in before if name in after and name != "ungraded"):
        log.say(f"held-out {name}: {before[name]:.3f} before, {after[name]:.3f} after")
    named = shlex.quote(str(folder))
    log.say(f"wrote {named}: {', '.join(name for name in run_folder.OWN if (folder / name).exists())}")
    log.say(f"next: python -m fastrl_fast.report {named}")
    log.say(f"      python -m fastrl_fast.export {named} OUT_FOLDER")


if __name__ == "__main__":
    cli.run(main)
