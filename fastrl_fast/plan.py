"""What a run would do and need: `train --dry_run` reads config, data and rewards, starts nothing and writes nothing."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from .accuracy import held_out_prompts
from .builtin import resolve_model
from .config import BudgetConfig, Config
from .data import PromptData
from .memory import Part, Sizes, parts, peak
from .method_config import ARS, STAGED
from .model import Policy, load_tokenizer
from .rewards.registry import build, find
from .tables import build_console, print_line, print_table
from .types import Prompt

RANKS = (1, 2, 4, 8)
"""Numbers of ranks that the memory is estimated for, besides those of the command itself."""
PROMPTS_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that was not started: what it reads, and what follows from that."""

    config: Config
    sizes: Sizes
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    """All prompts of the data."""
    first: list[Prompt]
    """Those of the first step, in the run's order."""
    dropped: int
    held_out: int

    @classmethod
    def read(cls, config: Config) -> "Plan":
        """Raises ValueError for whatever the user can mend."""
        path = resolve_model(config.model.path)
        tokenizer = load_tokenizer(path, config.model)
        data = PromptData(config.data, tokenizer, seed=config.seed)
        held_out = held_out_prompts(config, tokenizer)
        for prompt in [*data.first(1), *held_out[:1]]:
            _check_rewards(config, prompt)
        prompts, first = data.first(len(data)), data.next_prompts(config.data.prompts_per_step)
        sizes = _sizes(path, config)
        return cls(config, sizes, tokenizer, prompts, first, data.dropped_overlong, len(held_out))

    @property
    def steps(self) -> int:
        return total_steps(self.config, prompts=len(self.prompts))

    @property
    def rollouts(self) -> int:
        """Rollouts of one step, in their first round."""
        return self.config.data.prompts_per_step * self.config.budget.group_size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that there may be."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + self.config.rollout.max_completion_tokens

    def memory(self, ranks: int) -> list[Part]:
        """Of one rank, had no rollout been dropped and every completion its full length."""
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts) / len(self.prompts)
        tokens = self.rollouts * (prompt + self.config.rollout.max_completion_tokens)
        if (some := self.config.updates.rollouts_per_update) is not None:
            tokens *= min(some / self.rollouts, 1.0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokens = int(tokens / self.config.updates.minibatches)
        return parts(self.config, self.sizes, ranks=ranks, longest=self.longest, tokens=tokens, device=device)


def total_steps(config: Config, *, prompts: int) -> int:
    """Steps of a whole run over this many prompts."""
    return config.max_steps or config.epochs * prompts // config.data.prompts_per_step


def show(config: Config, recipe: str) -> int:
    """Print the plan on rank 0. Raises ValueError for whatever the user can mend."""
    plan = Plan.read(config)
    if os.environ.get("RANK", "0") == "0":
        console = build_console()
        print_table(console, ["plan", ""], _lines(plan, recipe), left=2)
        _show_memory(plan, console)
        for prompt in plan.first[:PROMPTS_SHOWN]:
            answer = prompt.columns.get("answer")
            print_line(console, f"prompt {prompt.id}, {len(prompt.token_ids)} tokens, answer {answer!r}:", "bold cyan")
            print_line(console, str(plan.tokenizer.decode(prompt.token_ids)))
        print_line(console, "nothing was started or written", "bold")
    return 0


def _lines(plan: Plan, recipe: str) -> list[list[str]]:
    config, sizes = plan.config, plan.sizes
    lengths = [len(prompt.token_ids) for prompt in plan.prompts]
    passes = plan.steps * config.data.prompts_per_step / len(plan.prompts)
    samples = plan.rollouts * config.rollout.max_completion_tokens
    lines = [
        ["recipe", recipe],
        ["model", f"{config.model.path}: {sizes.parameters / 1e6:.2f}M parameters, {sizes.layers} layers"],
        ["data", f"{config.data.path}: {len(plan.prompts)} prompts ({plan.dropped} too long)"],
        ["prompt tokens", f"{min(lengths)} to {max(lengths)}, {sum(lengths) / len(lengths):.1f} on average"],
        ["steps", f"{plan.steps} of {config.data.prompts_per_step} prompts, {passes:.2f} passes over the data"],
        ["rollouts per prompt", _group_sizes(config.budget)],
        ["rollouts per step", f"{plan.rollouts} (budget.kind {config.budget.kind})"],
        ["completion tokens per step", f"at most {samples:,} ({config.rollout.max_completion_tokens} each)"],
        ["method", f"prune {config.prune.method}, loss {config.loss.kind}, advantage {config.advantage.preset}"],
        ["updates per step", _updates(config)],
        ["rewards", ", ".join(f"{term.weight:g} {term.name}" for term in config.reward.terms)],
        ["checkpoints", f"{12 * sizes.parameters / 2**30:.3g} GiB each (12 P), {config.checkpoint.keep} are kept"],
        ["run folder", config.run_dir or f"runs/{recipe}-HASH"],
    ]
    if plan.held_out:
        often = f", every {config.eval.every} steps" if config.eval.every else ""
        what = f"{plan.held_out} prompts x {config.eval.samples}, before and after{often}"
        lines.insert(4, ["held out", f"{config.eval.path}: {what}"])
    return lines


def _group_sizes(budget: BudgetConfig) -> str:
    if budget.kind in STAGED:
        return f"{budget.group_size}, and up to {budget.max_group_size} where the first do not suffice"
    if budget.kind == "knapsack":
        return f"{budget.group_size} on average, {budget.min_group_size} to {budget.max_group_size}"
    return f"{budget.group_size}" + (f", later down to {budget.min_group_size}" if budget.kind in ARS else "")


def _updates(config: Config) -> str:
    updates = config.updates
    if updates.rollouts_per_update is not None:
        return f"one per {updates.rollouts_per_update} kept rollouts, {updates.epochs} times over"
    return f"{updates.minibatches * updates.epochs}"


def _show_memory(plan: Plan, console: Console) -> None:
    """A row per part, a column per number of ranks; parts that a number of ranks does not need are empty."""
    here = int(os.environ.get("WORLD_SIZE", "1"))
    columns = {ranks: plan.memory(ranks) for ranks in sorted({*RANKS, here})}
    known = {part.what: part for found in columns.values() for part in found}
    rows = []
    for what, part in known.items():
        needed = [next((p.size for p in found if p.what == what), None) for found in columns.values()]
        cells = ["" if size is None else f"{size / 2**30:.3g}" for size in needed]
        rows.append([what, part.formula, part.when, *cells])
    rows.append(["together, at most", "always + max(sampling, update)", ""])
    rows[-1] += [f"{peak(found) / 2**30:.3g}" for found in columns.values()]
    head = ["GiB on each rank, estimated", "formula", "when", *(f"R = {ranks}" for ranks in columns)]
    print_table(console, head, rows, left=3)
    sizes = plan.sizes
    print_line(
        console,
        f"P = {sizes.parameters:,}, b = {2 if plan.config.model.dtype == 'bfloat16' else 4}, L = {sizes.layers}, "
        f"H = {sizes.hidden}, I = {sizes.intermediate}, Q = {sizes.query}, K = {sizes.key_value}, T = the tokens of a "
        "micro-batch; left out: waste of the allocator, temporaries of single operators, CUDA's own 0.5 GiB",
    )


def _check_rewards(config: Config, prompt: Prompt) -> None:
    """Load each reward here, and look for the columns that it needs. Raises ValueError."""
    columns: dict[str, list[Any]] = {name: [] for name in (*prompt.columns, "completion_ids", "finish_reason")}
    for term in config.reward.terms:
        try:
            build(term.name)
            find(term.name).columns(columns)
        except ValueError as error:
            raise ValueError(f"reward.functions: {error}") from error


def _sizes(path: str, config: Config) -> Sizes:
    """From the model's configuration alone, on torch's meta device: no weight is read."""
    trust = config.model.trust_remote_code
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(settings, trust_remote_code=trust, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: cannot read {path}: {' '.join(str(error).split())}") from error
    policy = Policy(lm, temperature=1.0)
    heads = settings.num_attention_heads
    width = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    return Sizes(
        parameters=sum(parameter.numel() for parameter in lm.parameters()),
        layer=max(sum(p.numel() for p in unit.parameters()) for unit in policy.shard_units if unit is not policy.head),
        layers=settings.num_hidden_layers,
        hidden=settings.hidden_size,
        intermediate=settings.intermediate_size,
        query=heads * width,
        key_value=getattr(settings, "num_key_value_heads", heads) * width,
        query_norm=any(name.endswith("q_norm") for name, _ in lm.named_modules()),
    )
