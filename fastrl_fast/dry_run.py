"""`train --dry_run`: says what a run would do and need; starts nothing and writes nothing."""

import os

from rich.console import Console

from .config import BudgetConfig, Config
from .grading import empty_columns
from .method_config import ARS, STAGED
from .plan import Plan
from .tables import build_console, print_line, print_table

RANKS = (1, 2, 4, 8)
"""Numbers of ranks that the memory is estimated for, besides those of the command itself."""
PROMPTS_SHOWN = 2
FORMULAS = {
    "parameters": ("weights", "4 P / R"),
    "optimizer": ("AdamW's moments", "8 P / R"),
    "reference": ("the reference's weights", "4 P / R"),
    "sampler": ("the sampler's weights", "b P; 0 with one rank in float32, whose sampler reads the trained ones"),
    "gradients": (
        "gradients",
        "4 P / R, and where sharded 4 P until the last of several micro-batches, else 4 (gathered)",
    ),
    "gathered": ("gathered weights", "b (embedding, head and two layers)"),
    "activations": (
        "activations",
        "L ((4 b + 8) H + 4 b I + 3 b Q + 2 b K) T; less with checkpointing",
    ),
    "images": ("images", "4 x values of a step's patches; what the trained tower keeps of a micro-batch's"),
    "head": ("the loss", "8 H T, the gradients of head and embedding, one chunk of logits"),
    "cache": ("keys and values", "2 L K b rollout.tokens_per_batch, or the tokens of all rollouts where they are less"),
    "total": ("at most", "all but the smaller of the update's part and keys and values"),
}
"""Fields of memory.Memory in words, and as memory.estimate_memory computes them."""


def show(config: Config, recipe: str) -> int:
    """Print the plan on rank 0. Raises ValueError for whatever the user can mend."""
    plan = Plan.read(config)
    if os.environ.get("RANK", "0") == "0":
        console = build_console()
        print_table(console, ["plan", ""], _lines(plan, recipe), left=2)
        _show_memory(plan, console)
        for prompt in plan.first[:PROMPTS_SHOWN]:
            answer = f", {plan.answer_column} {prompt.columns['answer']!r}" if plan.answer_column else ""
            print_line(console, f"prompt {prompt.id}, {len(prompt.token_ids)} tokens{answer}:", "bold cyan")
            print_line(console, str(plan.tokenizer.decode(prompt.token_ids)))
        print_line(console, "nothing was started or written", "bold")
    return 0


def _lines(plan: Plan, recipe: str) -> list[list[str]]:
    config, size = plan.config, plan.size
    lengths = [len(prompt.token_ids) for prompt in plan.prompts]
    passes = plan.steps * config.data.prompts_per_step / len(plan.prompts)
    samples = plan.rollouts * config.rollout.max_completion_tokens
    lines = [
        ["recipe", recipe],
        ["model", f"{config.model.path}: {size.parameters / 1e6:.2f}M parameters, {size.layers} layers"],
        *_images(plan),
        ["data", f"{config.data.path}: {len(plan.prompts)} prompts ({plan.dropped} too long)"],
        ["prompt tokens", f"{min(lengths)} to {max(lengths)}, {sum(lengths) / len(lengths):.1f} on average"],
        ["steps", f"{plan.steps} of {config.data.prompts_per_step} prompts, {passes:.2f} passes over the data"],
        ["rollouts per prompt", _group_sizes(config.budget)],
        ["rollouts per step", f"{plan.rollouts} (budget.kind {config.budget.kind})"],
        ["completion tokens per step", f"at most {samples:,} ({config.rollout.max_completion_tokens} each)"],
        ["TFLOP per step", f"at most {_flops(plan)}"],
        ["method", f"prune {config.prune.method}, loss {config.loss.kind}, advantage {config.advantage.preset}"],
        ["updates per step", _updates(config)],
        ["rewards", ", ".join(f"{term.weight:g} x {term.name}" for term in config.reward.terms)],
        ["columns for the rewards", _columns(plan)],
        ["checkpoints", f"{12 * size.parameters / 2**30:.3g} GiB each (12 P), {config.checkpoint.keep} are kept"],
        ["run folder", config.run_dir or f"runs/{recipe}-HASH"],
    ]
    if plan.held_out:
        often = f", every {config.eval.every} steps" if config.eval.every else ""
        what = f"{len(plan.held_out)} prompts x {config.eval.samples}, before and after{often}"
        lines.insert([name for name, _ in lines].index("steps"), ["held out", f"{config.eval.path}: {what}"])
    return lines


def _columns(plan: Plan) -> str:
    answer = "answer" if plan.answer_column in ("answer", None) else f"answer (the data's {plan.answer_column})"
    return ", ".join(answer if name == "answer" else name for name in empty_columns(plan.prompts))


def _images(plan: Plan) -> list[list[str]]:
    """What a model that reads images does with them."""
    tower = plan.size.tower
    if tower is None:
        return []
    state = "frozen" if plan.config.model.freeze_vision else "trained"
    tokens = [picture.tokens for prompt in plan.prompts for picture in prompt.pictures] or [0]
    spread = f"{min(tokens)} to {max(tokens)}, {sum(tokens) / len(tokens):.1f} on average"
    return [
        ["vision tower", f"{tower.parameters / 1e6:.2f}M of them, {tower.layers} layers, {state}"],
        ["tokens per image", spread],
    ]


def _flops(plan: Plan) -> str:
    phases, images = plan.flops()
    parts = ", ".join(f"{phase} {value / 1e12:.3g}" for phase, value in phases.items() if value)
    return f"{parts}" + (f"; {images / sum(phases.values()):.1%} in the vision tower" if images else "")


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
    """A row per part that this run needs, a column per number of ranks."""
    columns = {ranks: plan.memory(ranks) for ranks in sorted({*RANKS, int(os.environ.get("WORLD_SIZE", "1"))})}
    rows = []
    for field, (what, formula) in FORMULAS.items():
        sizes = [getattr(memory, field) for memory in columns.values()]
        if any(sizes):
            rows.append([what, formula, *(f"{size / 2**30:.3g}" for size in sizes)])
    head = ["GiB on each rank, estimated", "formula", *(f"R = {ranks}" for ranks in columns)]
    print_table(console, head, rows, left=2)
    size, width = plan.size, 2 if plan.config.model.dtype == "bfloat16" else 4
    print_line(
        console,
        f"P = {size.parameters:,}, b = {width}, L = {size.layers}, H = {size.hidden}, I = {size.intermediate}, "
        f"Q = {size.queries}, K = {size.keys}, T = {plan.microbatch_tokens:,} (updates.tokens_per_microbatch, or a "
        "whole step where that is less); without the allocator's slack and what CUDA itself takes",
    )
