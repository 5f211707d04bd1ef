"""One side of bench.versus_trl in a process of its own: takes a step for every line it reads, and reports on it.

    python -m bench.versus_side (ours | trl | plugin) JOB.json

A line is `planned NAME` (the planned completions, so that all but sampling is measured) or `sampled NAME`, where NAME
is a method of this side; with `check` behind it the gradient is written to the file that the report names.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import timing

# isort: split
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fastrl_fast.types import Group, Prompt, Rollout

from .versus_job import Job
from .versus_reward import parity

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "mdap": {"method": "mdap", "tau": 0.8},
    "lot": {"method": "random", "keep_fraction": 0.375},
}
"""Settings of `prune`: all rollouts, FastRL's rule, and 3 of 8 where random weights write texts that are all unlike."""
LEARNING_RATE = 1e-6


class Meter:
    """Seconds and memory of one step, and its gradient where asked."""

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], folder: str, side: str) -> None:
        self.named = list(named_parameters)
        self.file = Path(folder) / f"gradient-{side}.pt"
        self.checking = False
        self.sampling = 0.0

    def start(self, *, checking: bool) -> None:
        self.checking, self.sampling = checking, 0.0
        self.before = timing.reset_peak()
        self.started = time.perf_counter()

    def stop(self, **more: Any) -> dict[str, Any]:
        seconds = time.perf_counter() - self.started
        peak = timing.memory_mb("VmHWM")
        times = {"step": seconds, "generation": self.sampling, "update": seconds - self.sampling}
        return times | {"peak MB": peak, "grown MB": peak - self.before, "gradient": str(self.file)} | more

    def look(self, *_: Any) -> None:
        """Before the optimizer's step: every parameter's gradient, clipped."""
        if self.checking:
            torch.save({name: p.grad.clone() for name, p in self.named}, self.file)

    def sampled(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted as sampling."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            result = sample(*args, **kwargs)
            self.sampling += time.perf_counter() - before
            return result

        return timed


def load_tokenizer(job: Job) -> PreTrainedTokenizerFast:
    """Not AutoTokenizer, which takes every Qwen2 folder for one with Qwen2's own vocabulary."""
    return PreTrainedTokenizerFast.from_pretrained(job.model)


def serve_ours(job: Job, commands: "Commands") -> None:
    from dataclasses import replace

    from fastrl_fast import config as c
    from fastrl_fast import distributed, train
    from fastrl_fast.accuracy import build_grader
    from fastrl_fast.data import PromptData
    from fastrl_fast.model import load_causal_lm
    from fastrl_fast.trainer import Trainer

    settings = c.Config(
        model=c.ModelConfig(path=job.model),
        data=c.DataConfig(
            path=f"{job.folder}/prompts.jsonl", prompts_per_step=job.prompts, chat_template=False, shuffle=False
        ),
        rollout=c.RolloutConfig(max_completion_tokens=job.high, stop_token_ids=job.stops),
        reward=c.RewardConfig(functions={f"{Path(__file__).with_name('versus_reward.py')}:parity": 1.0}, workers=1),
        budget=c.BudgetConfig(group_size=job.group_size),
        advantage=c.AdvantageConfig(preset="trl"),
        loss=c.LossConfig(kind="dapo"),
        updates=c.UpdatesConfig(tokens_per_microbatch=job.tokens_per_microbatch),
        optimizer=c.OptimizerConfig(lr=LEARNING_RATE),
        log=c.LogConfig(rollouts=False),
    )
    device = distributed.start()
    with build_grader(settings.reward) as grader:
        tokenizer = load_tokenizer(job)
        data = PromptData(settings.data, tokenizer, seed=0)
        inputs = train.Inputs(load_causal_lm(job.model, settings.model), tokenizer, data, None, None)
        parts = train.build_parts(settings, inputs, grader, device, folder=Path(job.folder), log=None)
        meter = Meter(parts.policy.lm.named_parameters(), job.folder, "ours")
        parts.optimizer.register_step_pre_hook(meter.look)
        trainers = {}
        for name, prune in METHODS.items():
            trainers[name] = Trainer(replace(settings, prune=c.PruneConfig(**prune)), parts, total_steps=10**9)
        real, planned = parts.sampler, PlannedSampler(job, tokenizer, parts.sampler)
        for kind, method, checking in commands:
            trainer = trainers[method]
            trainer.schedule.collector.sampler = planned if kind == "planned" else real
            trainer.clock.take()
            meter.start(checking=checking)
            metrics = trainer.step()
            meter.sampling = trainer.clock.take()["sample"]
            counts = {"tokens": metrics["tokens/generated"], "kept": metrics["rollouts/kept"]}
            commands.reply(meter.stop(loss=metrics["loss/value"], **counts))
    distributed.stop()


class PlannedSampler:
    """Answers every prompt with its planned completions."""

    def __init__(self, job: Job, tokenizer: Any, weights_go_to: Any) -> None:
        self.load_weights = weights_go_to.load_weights
        self.rollouts = {
            row["prompt"]: [(ids, tokenizer.decode(ids, skip_special_tokens=True)) for ids in row["planned"]]
            for row in job.rows()
        }

    def sample(
        self, prompts: list[Prompt], group_sizes: list[int], *, finished: Callable[[Group], None], **_: Any
    ) -> list[Group]:
        groups = []
        for prompt in prompts:
            rollouts = [Rollout(ids, [-1.0] * len(ids), "stop", text) for ids, text in self.rollouts[prompt.text]]
            groups.append(Group(prompt, rollouts))
            finished(groups[-1])
        return groups


def serve_trl(job: Job, commands: "Commands", *, plugin: bool) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = load_tokenizer(job)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.generation_config.eos_token_id = job.stops
    planned = {row["prompt"]: row["planned"] for row in job.rows()}
    meter = Meter(model.named_parameters(), job.folder, "plugin" if plugin else "trl")
    losses: list[float] = []

    def answer(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The planned completions as TRL's own hook takes them; its prompts are repeated once per completion."""
        ids = tokenizer(prompts)["input_ids"]
        completions = [planned[prompt][n % job.group_size] for n, prompt in enumerate(prompts)]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    class Steps(TrainerCallback):
        """One step for each command."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            command = next(commands, None)
            if command is None:
                commands.end()
            kind, method, checking = command
            trainer.rollout_func = meter.sampled(answer) if kind == "planned" else None
            if plugin:
                trainer.prune_config = prune[method]
            losses.clear()
            meter.start(checking=checking)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tokens = trainer._metrics["train"]["completions/mean_length"][-1] * job.rollouts
            kept = trainer._metrics["train"].get("fastrl/kept", [job.rollouts])[-1]
            commands.reply(meter.stop(loss=sum(losses), tokens=tokens, kept=kept))

    settings = GRPOConfig(
        output_dir=f"{job.folder}/out",
        per_device_train_batch_size=job.trl_batch,
        gradient_accumulation_steps=job.rollouts // job.trl_batch,
        num_generations=job.group_size,
        max_completion_length=job.high,
        loss_type="dapo",
        epsilon_high=0.28,
        shuffle_dataset=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_steps=10**6,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    kind: type = GRPOTrainer
    if plugin:
        from fastrl_fast.config import PruneConfig
        from fastrl_fast.integrations.trl import FastGRPOTrainer

        kind = FastGRPOTrainer
        prune = {name: PruneConfig(**settings) for name, settings in METHODS.items()}
    rows = Dataset.from_list([{"prompt": prompt} for prompt in planned])
    trainer = kind(model, parity, args=settings, train_dataset=rows, processing_class=tokenizer, callbacks=[Steps()])
    trainer.create_optimizer()
    trainer.optimizer.register_step_pre_hook(meter.look)
    trainer._generate_single_turn = meter.sampled(trainer._generate_single_turn)
    compute = trainer.compute_loss

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = compute(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = noted
    trainer.train()


class Commands:
    """Lines from the parent; what libraries print goes to the error stream, so that replies stay alone."""

    def __init__(self) -> None:
        self.replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __iter__(self) -> "Commands":
        return self

    def __next__(self) -> tuple[str, str, bool]:
        words = sys.stdin.readline().split()
        if not words:
            raise StopIteration
        return words[0], words[1], words[2:] == ["check"]

    def reply(self, report: dict[str, Any]) -> None:
        print(json.dumps(report), file=self.replies, flush=True)

    def end(self) -> None:
        """Leave from the middle of a training loop."""
        sys.exit(0)


def main() -> None:
    side, file = sys.argv[1:]
    job = Job(**json.loads(Path(file).read_text()))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    commands = Commands()
    if side == "ours":
        serve_ours(job, commands)
    else:
        serve_trl(job, commands, plugin=side == "plugin")


if __name__ == "__main__":
    main()
